"""Configs of every family against counts from the real classes, and configs that nobody should write."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecost.architecture import ModelSpec
from moecost.errors import InvalidInputError, MoECostError, UnsupportedModelError
from moecost.hub import reading as hub

MODELS = Path(__file__).parent / "data" / "models"
CONFIGS = {path.name: json.loads(path.read_text()) for path in sorted((MODELS / "configs").glob("*.json"))}


def rows(name: str) -> list[dict[str, str]]:
    with (MODELS / name).open(newline="") as file:
        return list(csv.DictReader(file))


TRUTH = [row for row in rows("truth.csv") if row["total"]]


@pytest.mark.parametrize("row", TRUTH, ids=lambda row: row["file"])
def test_total_is_that_of_the_class_or_checkpoint(row: dict[str, str]) -> None:
    counted = ModelSpec.from_hf(CONFIGS[row["file"]]).num_parameters
    if row["note"].startswith("stored total"):
        assert counted == pytest.approx(int(row["total"]), rel=1e-3)
    else:
        assert counted == int(row["total"])


@pytest.mark.parametrize("part", ["embed", "head", "expert", "router", "shared", "vision"])
def test_parts_are_those_of_the_parameter_names(part: str) -> None:
    # Nemotron-H's embedding has another name there, Gemma 4's norms and scales lie in its router and experts
    odd = ("nvidia__N", "google__gemma-4")
    for row in TRUTH:
        if row[part] and not row["file"].startswith(odd):
            assert ModelSpec.from_hf(CONFIGS[row["file"]]).parameters_by_part[part] == int(row[part]), row["file"]  # type: ignore[index]


def test_totals_of_default_classes() -> None:
    for row in rows("class_defaults.csv"):
        config = json.loads(row["config"])
        assert ModelSpec.from_hf(config, "approximate").num_parameters == int(row["total"]), row["model_type"]


def test_checkpoints_without_a_class() -> None:
    assert ModelSpec.from_hf(CONFIGS["moonshotai__Kimi-K2-Instruct.json"]).num_parameters == pytest.approx(
        1026408235864, rel=1e-6
    )
    black = ModelSpec.from_hf(CONFIGS["Zyphra__BlackMamba-2.8B.json"])
    # 18 x 8 experts of 3 x 1472 x 3872, 18 Mamba layers, a tied embedding of 50304
    assert black.parameters_by_part["expert"] == 18 * 8 * 3 * 1472 * 3872
    assert black.num_parameters == 2_783_212_112
    assert black.num_active_parameters == pytest.approx(630e6, rel=0.01)  # as published
    skywork = ModelSpec.from_hf(CONFIGS["Skywork__Skywork-MoE-Base.json"])
    assert skywork.num_parameters == pytest.approx(146e9, rel=0.01)
    assert skywork.num_active_parameters == pytest.approx(22e9, rel=0.05)


@pytest.mark.parametrize("row", rows("lora_truth.csv"), ids=lambda row: f"{row['file']}-{row['targets']}-{row['rank']}")
def test_adapters_are_those_of_peft(row: dict[str, str]) -> None:
    targets = row["targets"].split(";") if ";" in row["targets"] else row["targets"]
    assert ModelSpec.from_hf(CONFIGS[row["file"]]).trainable_parameters(int(row["rank"]), targets) == int(
        row["trainable"]
    )


def test_flops_are_those_of_pytorch() -> None:
    for row in rows("flops_truth.csv"):
        if row["note"]:
            continue
        flops = ModelSpec.from_hf(CONFIGS[row["file"]]).flops(int(row["seq"]), causal=False)
        assert flops.forward == pytest.approx(float(row["forward"]), rel=1e-3), row["file"]
        assert flops.backward == pytest.approx(float(row["backward"]), rel=1e-3), row["file"]


def test_recurrent_layers_cost_about_what_fallback_code_does_forward() -> None:
    for name in ("ai21labs__AI21-Jamba-1.5-Mini.json", "nvidia__Nemotron-H-56B-Base-8K.json"):
        row = next(r for r in rows("flops_truth.csv") if r["file"] == name)
        assert ModelSpec.from_hf(CONFIGS[name]).flops(512, causal=False).forward == pytest.approx(
            float(row["forward"]), rel=0.01
        )


def test_a_config_is_read_in_milliseconds() -> None:
    ModelSpec.from_hf(CONFIGS["nvidia__Llama-3_3-Nemotron-Super-49B-v1.json"])
    for name in CONFIGS:
        path = MODELS / "configs" / name
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            _ = ModelSpec.from_hf(path).shape
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.02, name  # 1 to 2 ms on an idle core


def test_a_deep_model_is_a_handful_of_groups() -> None:
    assert len(ModelSpec.from_hf(CONFIGS["deepseek-ai__DeepSeek-V3.json"]).layers) == 2
    assert len(ModelSpec.from_hf(CONFIGS["nvidia__Nemotron-H-56B-Base-8K.json"]).layers) == 3


# ------------------------------------------------------------------------------------------------- what is refused

LEAST: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def test_least_config_is_llamas_form() -> None:
    spec = ModelSpec.from_hf(LEAST)
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert spec.num_parameters == 2 * layer + 2 * 100 * 64 + 64
    assert ModelSpec.from_hf({**LEAST, "gated_mlp": False}).num_parameters == spec.num_parameters - 2 * 64 * 96
    assert ModelSpec.from_hf({**LEAST, "tie_word_embeddings": True}).num_parameters == spec.num_parameters - 100 * 64
    grouped = ModelSpec.from_hf({**LEAST, "num_key_value_heads": 2, "head_dim": 32})
    assert grouped.parameters_by_part["attn"] == 2 * (2 * 64 * 128 + 2 * 64 * 64)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_under_any_name_without_a_model_type(name: str) -> None:
    spec = ModelSpec.from_hf({**LEAST, name: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32})
    assert spec.num_experts == 8
    assert spec.parameters_by_part["expert"] == 2 * 8 * 3 * 64 * 32
    first_dense = ModelSpec.from_hf({**LEAST, name: 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1})
    assert first_dense.parameters_by_part["expert"] == 8 * 3 * 64 * 96


def test_null_is_absent() -> None:
    assert ModelSpec.from_hf({**LEAST, "head_dim": None, "num_key_value_heads": None}).num_parameters == (
        ModelSpec.from_hf(LEAST).num_parameters
    )


@pytest.mark.parametrize("model_type", ["martian", "t5", "whisper"])
def test_unknown_model_type_is_refused_by_name_or_approximated(model_type: str) -> None:
    config = {**LEAST, "model_type": model_type}
    with pytest.raises(UnsupportedModelError, match=model_type):
        ModelSpec.from_hf(config)
    spec = ModelSpec.from_hf(config, on_unknown="approximate")
    assert any(model_type in note for note in spec.notes)
    assert spec.num_parameters == ModelSpec.from_hf(LEAST).num_parameters


def test_unknown_field_of_the_shape_is_refused_by_name_or_left_out() -> None:
    config = {**LEAST, "model_type": "llama", "num_memory_heads": 3}
    with pytest.raises(UnsupportedModelError, match="num_memory_heads"):
        ModelSpec.from_hf(config)
    assert "num_memory_heads" in ModelSpec.from_hf(config, on_unknown="approximate").notes[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"vocab_size": math.nan}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 128}, "num_attention_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, "layer_types"),
    ],
)
def test_impossible_values_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(MoECostError, match=field):
        ModelSpec.from_hf({**LEAST, **change})


def test_deep_and_wide_nesting_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidInputError, match="levels deep"):
        ModelSpec.from_hf({**LEAST, "extra": deep})
    looped: dict[str, Any] = dict(LEAST)
    looped["a"] = looped["b"] = looped
    with pytest.raises(InvalidInputError, match="values"):
        ModelSpec.from_hf(looped)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for text in ("", "[1]", "{", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(InvalidInputError):
            ModelSpec.from_hf(path)
    with pytest.raises(InvalidInputError, match=r"missing\.json"):
        ModelSpec.from_hf(tmp_path / "missing.json")


def test_every_family_is_reached_by_one_table() -> None:
    tables = (hub.ORDINARY, hub.IRREGULAR, hub.HYBRIDS, hub.RECENT)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert set(hub.SAME_AS.values()) <= set(names)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(0, 12),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["full_attention", "linear_attention", "sparse", "mamba", "auto", "M*-E", [], {}, [1], [None]]),
    st.lists(st.integers(0, 9), max_size=4),
    st.recursive(st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("ab"), inner), max_leaves=4),
)
EXTRA = (
    *("num_experts", "num_experts_per_tok", "head_dim", "kv_lora_rank", "layer_types", "text_config", "vision_config"),
    *(
        "moe_layer_freq",
        "mlp_only_layers",
        "model_type",
        "architectures",
        "sliding_window",
        "block_configs",
        "odd_size",
    ),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_spec_or_one_clear_error(data: st.DataObject) -> None:
    config = json.loads(json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        inner = [v for v in config.values() if isinstance(v, dict) and v]
        target = data.draw(st.sampled_from(inner)) if inner and data.draw(st.booleans()) else config
        key = data.draw(st.sampled_from(sorted({*map(str, target), *EXTRA})))
        if data.draw(st.integers(0, 4)):
            target[key] = data.draw(VALUES)
        else:
            target.pop(key, None)
    start = time.perf_counter()
    try:
        spec = ModelSpec.from_hf(config, data.draw(st.sampled_from(["raise", "approximate"])))
    except MoECostError:
        pass  # any other exception fails the test
    else:
        assert spec.num_parameters >= spec.num_active_parameters >= 0
        assert spec.flops(64).forward >= 0
        assert spec.trainable_parameters(8, "all-linear") >= 0
    assert time.perf_counter() - start < 1
