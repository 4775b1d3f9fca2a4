"""`ModelSpec`: the catalogue, overrides, adapters and FLOPs by hand-worked numbers."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moecost import catalog, parameters
from moecost.architecture import ModelSpec
from moecost.errors import InvalidInputError, MoECostError, UnknownNameError
from moecost.quantities import Matrix

CONFIGS = Path(__file__).parent / "data" / "models" / "configs"
MIXTRAL = ModelSpec.from_hf(CONFIGS / "mistralai__Mixtral-8x7B-v0.1.json")
NAMES = catalog.models()


# ------------------------------------------------------------------------------------------------------- catalogue


@pytest.mark.parametrize("name", NAMES)
def test_catalogue_entry_counts_what_its_publisher_does(name: str) -> None:
    spec = ModelSpec.load(name)
    assert spec.name == name == name.lower()
    assert spec.num_active_parameters <= spec.num_parameters
    assert len(spec.layers) <= 8
    if spec.published_parameters:
        # Nemotron-3 Super's 120B and the 355B of GLM-4.5 are rounded, or count layers for multi-token prediction
        assert spec.num_parameters == pytest.approx(spec.published_parameters, rel=0.01)
    if spec.published_active_parameters and spec.num_experts:
        # rounded down to whole billions, and conventions differ: with both embeddings, with one, with none
        assert 0.65 <= spec.published_active_parameters / spec.num_active_parameters <= 1.1


def test_catalogue_is_large_and_mostly_found_by_hub_id() -> None:
    assert len(NAMES) >= 70
    assert sum(bool(ModelSpec.load(name).num_experts) for name in NAMES) >= 40
    for hub_id in (
        "mistralai/Mixtral-8x7B-v0.1",
        "Qwen/Qwen3-30B-A3B",
        "meta-llama/Meta-Llama-3-8B",
        "Zyphra/BlackMamba-2.8B",
    ):
        assert hub_id in ModelSpec.load(hub_id).hub_ids


def test_index_repeats_the_names_in_the_files() -> None:
    index = catalog.model_index()
    assert (index.folder / catalog.INDEX_FILE).read_text() == index.index_text()


def test_load_takes_names_aliases_ids_paths_and_dicts(tmp_path: Path) -> None:
    wanted = ModelSpec.load("mixtral-8x7b")
    assert ModelSpec.load("Mixtral_8x7B") is wanted
    assert ModelSpec.load("mistralai/Mixtral-8x7B-Instruct-v0.1") is wanted
    assert ModelSpec.load(wanted) is wanted
    assert ModelSpec.load(catalog.model_index().path("mixtral-8x7b")) == wanted
    for source in (CONFIGS / "mistralai__Mixtral-8x7B-v0.1.json", str(CONFIGS / "mistralai__Mixtral-8x7B-v0.1.json")):
        assert ModelSpec.load(source).shape == wanted.shape
    assert ModelSpec.load(dict(MIXTRAL.config)).shape == wanted.shape
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "mistralai__Mixtral-8x7B-v0.1.json").read_text())
    assert ModelSpec.load(folder).name == "my-model"


def test_a_name_in_no_catalogue_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="mixtral-8x7b"):
        ModelSpec.load("mixtral-8x7")
    with pytest.raises(InvalidInputError, match="int"):
        ModelSpec.load(7)  # type: ignore[arg-type]


def test_looking_up_one_model_reads_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = catalog.read_yaml
    monkeypatch.setattr(catalog, "read_yaml", lambda path: read.append(Path(path).name) or plain(path))
    catalog.model_index.cache_clear()
    ModelSpec.load("qwen3-0.6b")
    ModelSpec.load("Qwen/Qwen3-0.6B")
    assert set(read) <= {"qwen3-0.6b.yaml", "index.yaml"}


def test_spec_survives_json_and_pickle_and_cannot_be_changed() -> None:
    for spec in (MIXTRAL, ModelSpec.load("gemma-3-4b")):
        for other in (ModelSpec.model_validate_json(spec.model_dump_json()), pickle.loads(pickle.dumps(spec))):
            assert other == spec
            assert hash(other) == hash(spec)
            assert other.quantities() == spec.quantities()
    with pytest.raises(TypeError, match="frozen"):
        MIXTRAL.config["hidden_size"] = 1  # type: ignore[index]


def test_spec_file_from_config(tmp_path: Path) -> None:
    tool = Path(__file__).parents[1] / "tools" / "model_spec_from_config.py"
    config = CONFIGS / "Qwen__Qwen3.5-35B-A3B.json"
    out = subprocess.run(
        [sys.executable, str(tool), str(config), "--name", "x", "--source", "config.json", "--date", "2026"],
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "x.yaml").write_text(out.stdout)
    assert ModelSpec.load(tmp_path / "x.yaml").shape == ModelSpec.from_hf(config).shape


# ------------------------------------------------------------------------------------------------------- overrides


def test_overrides_replace_fields_and_rebuild() -> None:
    dense = MIXTRAL.with_overrides({"num_experts_per_tok": 8})
    assert dense.num_active_parameters == dense.num_parameters == MIXTRAL.num_parameters
    short = MIXTRAL.with_overrides({"n_layer": 4})  # any spelling
    assert short.num_hidden_layers == 4
    assert short.name == MIXTRAL.name
    assert "n_layer=4" in short.notes[0]
    assert MIXTRAL.with_overrides({}) is MIXTRAL


@pytest.mark.parametrize(
    ("file", "layers"),
    [
        ("Zyphra__BlackMamba-2.8B", 8),
        ("Qwen__Qwen3.5-35B-A3B", 8),
        ("nvidia__Nemotron-H-56B-Base-8K", 200),
        ("google__gemma-4-26B-A4B", 60),
        ("nvidia__Llama-3_3-Nemotron-Super-49B-v1", 8),
    ],
)
def test_lists_by_layer_follow_a_new_depth(file: str, layers: int) -> None:
    spec = ModelSpec.from_hf(CONFIGS / f"{file}.json")
    changed = spec.with_overrides({"num_hidden_layers": layers})
    assert changed.num_hidden_layers == layers
    assert (changed.num_parameters > spec.num_parameters) == (layers > spec.num_hidden_layers)


@pytest.mark.parametrize("key", ["num_hiden_layers", "colour", "num_experts_per_toke"])
def test_override_of_an_unknown_field_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError, match=key):
        MIXTRAL.with_overrides({key: 2})


def test_blackmamba_takes_more_experts_a_token() -> None:
    spec = ModelSpec.load("blackmamba-2.8b")
    assert spec.num_experts_per_tok == 1
    assert spec.with_overrides({"num_experts_per_tok": 8}).num_active_parameters == spec.num_parameters


# -------------------------------------------------------------------------------------------------------- adapters


def test_module_list_experts_count_once_each() -> None:
    # arXiv:2408.04693 adapts w1, w2, w3 and gate with rank 16 on PEFT 0.7
    assert MIXTRAL.trainable_parameters(16, ["w1", "w2", "w3", "gate"], software="hf-peft-2024") == 228_593_664
    assert MIXTRAL.trainable_parameters(16, ["w1", "w2", "w3"], software="hf-peft-2024") == 226_492_416
    assert MIXTRAL.trainable_parameters(16, "attention", software="hf-peft") == 13_631_488
    assert MIXTRAL.trainable_parameters(16, "all-linear", software="hf-peft-2024") == 228_593_664 + 13_631_488


def test_keywords_and_unmatched_names() -> None:
    shape = MIXTRAL.shape
    match = parameters.match_targets(shape, ["q_proj", "nothing"], experts_as_modules=True)
    assert match.unmatched == ("nothing",)
    assert match.parameters(1) == 32 * 8192
    experts = parameters.match_targets(shape, "experts", experts_as_modules=True)
    assert experts.parameters(16) == 226_492_416
    assert MIXTRAL.trainable_parameters(8, ["nothing"]) == 0
    assert MIXTRAL.trainable_parameters(8, ["self_attn.q_proj"]) == 8 * 32 * 8192
    assert MIXTRAL.trainable_parameters(8, ["proj"]) == 0  # a suffix only after a dot
    assert MIXTRAL.trainable_parameters(8, ["lm_head"]) == 8 * (4096 + 32000)  # the head only by name


def test_fused_gate_and_up_take_twice_the_rank() -> None:
    # 8 experts x (2 r (h + 2 f) + r (f + h)) + router r (h + 8), 32 layers
    h, f = 4096, 14336
    wanted = 32 * 8 * (8 * (2 * (h + 2 * f) + f + h) + (h + 8))
    assert MIXTRAL.trainable_parameters(8, ["w1", "w2", "w3", "gate"]) == wanted
    gpt_oss = ModelSpec.from_hf(CONFIGS / "openai__gpt-oss-20b.json")
    assert gpt_oss.trainable_parameters(8, ["gate_up_proj"]) == 0  # no module of that name
    assert gpt_oss.trainable_parameters(8, ["experts.gate_up_proj"]) == 24 * 32 * 8 * (2880 + 5760)
    assert MIXTRAL.trainable_parameters(8, ["experts.gate_up_proj"]) == 32 * 8 * 8 * (h + 2 * f)
    assert MIXTRAL.trainable_parameters(8, "experts") == 32 * 8 * 8 * (2 * (h + 2 * f) + f + h)
    assert gpt_oss.trainable_parameters(8, "experts") == 24 * 32 * 8 * ((2880 + 5760) + (2880 + 2880))


@pytest.mark.parametrize("rank", [0, -1, True, 1.5])
def test_rank_is_a_positive_whole_number(rank: Any) -> None:
    with pytest.raises(InvalidInputError, match="rank"):
        MIXTRAL.trainable_parameters(rank, "attention")


# ----------------------------------------------------------------------------------------------------------- FLOPs


def test_flops_by_hand() -> None:
    spec = ModelSpec.from_hf(
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 10,
        }
    )
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 10
    square = 3 * 4 * 16 * 16 * 4 * 16  # 4 s^2 a d a layer
    assert spec.flops(16, causal=False).forward == 2 * 16 * weights + square
    assert spec.flops(16).forward == 2 * 16 * weights + square / 2
    assert spec.flops(16).backward == 2 * spec.flops(16).forward
    assert sum(spec.flops(16).by_part.values()) == spec.flops(16).forward


def test_experts_count_by_top_k_and_windows_cut_long_sequences() -> None:
    active = MIXTRAL.num_active_parameters - MIXTRAL.parameters_by_part["embed"] - MIXTRAL.parameters_by_part["norm"]
    assert MIXTRAL.flops(1).forward == pytest.approx(2 * active, rel=1e-4)
    gpt_oss = ModelSpec.from_hf(CONFIGS / "openai__gpt-oss-20b.json")
    core = gpt_oss.flops(4096).by_part["attention_core"]
    full = 4 * 4096**2 * 64 * 64 / 2
    windowed = 4 * (128 * 4096 - 128**2 / 2) * 64 * 64
    assert core == pytest.approx(12 * (full + windowed))


def test_matrix_helpers() -> None:
    matrix = Matrix("expert.w1", "expert", "experts.*.w1", 4, 8, copies=8, copies_per_token=2, bias=8)
    assert matrix.weights == 32
    assert matrix.parameters == 8 * 40
    assert matrix.used_copies == 2
    assert parameters.linear_weights(MIXTRAL.shape) == 46_439_333_888 + 32 * 4096 * 8  # the last term: routers


def test_a_config_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package that fetches is asked for one file; without it, and when it fails, the error says what to do."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[tuple[Any, ...]] = []

    def fetch(repo_id: str, file: str, revision: str | None = None) -> str:
        asked.append((repo_id, file, revision))
        if repo_id == "gone/gone":
            raise OSError("404")
        return str(tmp_path / "config.json")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fetch))
    spec = ModelSpec.from_hub("someone/llama-2", revision="main")
    assert asked == [("someone/llama-2", "config.json", "main")]
    assert (spec.name, spec.num_parameters) == ("someone/llama-2", 6_738_415_616)  # Llama-2-7B as published
    with pytest.raises(MoECostError, match=r"gone/gone.*404"):
        ModelSpec.from_hub("gone/gone")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MoECostError, match=r"moecost\[hub\]"):
        ModelSpec.from_hub("someone/llama-2")
