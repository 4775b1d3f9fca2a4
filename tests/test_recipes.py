"""Recipes of training tools become jobs: each fixture has its tool's own format, and the fields were worked by hand."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost import Job, MoECostError
from moecost.errors import InvalidInputError, UnsupportedError
from moecost.recipe_native import torchtune_model
from moecost.recipes import RecipeWarning, model_name, read_recipe
from moecost.software import software_profiles

RECIPES = Path(__file__).parent / "data" / "recipes"
GPU = "a100-80gb-sxm"


def profile(name: str) -> str:
    return name if name in software_profiles() else "hf-peft"


def fields(job: Job, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(job, name) for name in names}


# file, fields the recipe cannot tell -> fields of the job, keys that matter and are not understood
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "llamafactory_qlora.yaml": (
        {},
        {
            "model": "mistralai/Mixtral-8x7B-v0.1", "method": "qlora", "weight_dtype": "nf4", "compute_dtype": "bf16",
            "lora_rank": 32, "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "attention": "flash",
            "sequence_length": 1024, "padding": "packed", "micro_batch_size": 4, "gradient_accumulation_steps": 8,
            "epochs": 3.0, "gradient_checkpointing": "full", "fused_kernels": "liger", "optimizer": "adamw",
            "num_queries": None, "software": profile("llama-factory"),
        },
        ["additional_target", "max_samples"],  # how many packed rows 1,000 samples fill is not known
    ),
    "llamafactory_full_ds3.yaml": (
        {"num_gpus": 4},
        {
            "model": "meta-llama/Meta-Llama-3-8B-Instruct", "method": "full", "weight_dtype": "fp32",
            "zero_stage": 3, "offload": "optimizer", "gradient_checkpointing": "none", "epochs": 1.0,
            "num_queries": 800,  # 100 steps x 1 sequence x 2 micro-batches x 4 GPUs
        },
        [],
    ),
    "axolotl_qlora.yml": (
        {},
        {
            "model": "mistralai/Mistral-7B-v0.1", "method": "qlora", "weight_dtype": "nf4-dq", "lora_rank": 32,
            "lora_targets": ("all-linear", "gate_proj", "down_proj", "up_proj"), "sequence_length": 8192,
            "padding": "packed", "micro_batch_size": 2, "gradient_accumulation_steps": 4, "epochs": 1.0,
            "optimizer": "adamw8bit", "compute_dtype": "bf16", "attention": "flash", "gradient_checkpointing": "full",
            "software": profile("axolotl"),
        },
        ["relora"],
    ),
    "axolotl_full_fsdp.yml": (
        {"num_gpus": 8},
        {
            "method": "full", "weight_dtype": "fp32", "zero_stage": 2, "offload": "parameters", "compile": True,
            "attention": "sdpa", "padding": "max_length", "sequence_length": 4096, "fused_kernels": "liger",
            "epochs": 2.0, "gradient_checkpointing": "full", "num_gpus": 8,
        },
        ["gradient_checkpointing"],  # its recomputation keeps inputs on the host
    ),
    "trl_lora.yaml": (
        {},
        {
            "method": "qlora", "weight_dtype": "nf4-dq", "lora_rank": 64, "lora_targets": ("all-linear",),
            "sequence_length": 2048, "padding": None, "micro_batch_size": 8, "gradient_accumulation_steps": 2,
            "epochs": 2.0, "optimizer": "paged_adamw8bit", "attention": "flash", "gradient_checkpointing": "full",
            "software": "hf-peft",
        },
        ["padding_free"],
    ),
    "trl_full.json": (
        {},
        {
            "method": "full", "weight_dtype": "fp32", "compute_dtype": "fp16", "num_gpus": 16, "gpus_per_node": 8,
            "zero_stage": 3, "offload": "parameters", "padding": "packed", "sequence_length": 1024, "epochs": 1.0,
            "num_queries": 64_000,  # 500 steps x 2 rows x 4 micro-batches x 16 GPUs
        },
        [],
    ),
    "fsdp_accelerate.yaml": (
        {},
        {"num_gpus": 4, "zero_stage": 2, "compute_dtype": "bf16", "method": "full", "sequence_length": 8192,
         "epochs": 3.0, "micro_batch_size": 1},
        [],
    ),
    "torchtune_qlora.yaml": (
        {},
        {
            "model": "meta-llama/Llama-3.1-8B", "method": "qlora", "weight_dtype": "nf4-dq", "lora_rank": 64,
            "lora_targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "sequence_length": 4096, "padding": "packed", "micro_batch_size": 2, "gradient_accumulation_steps": 8,
            "compile": True, "gradient_checkpointing": "full", "fused_kernels": "chunked-ce",
            "num_queries": 400,  # 25 steps x 2 rows x 8 micro-batches
            "software": profile("torchtune"),
        },
        ["enable_activation_offloading"],
    ),
    "torchtune_full.yaml": (
        {"sequence_length": 512},
        {"model": "google/gemma-2-9b", "method": "full", "weight_dtype": "bf16", "optimizer": "paged_adamw8bit",
         "epochs": 3.0, "micro_batch_size": 4, "gradient_checkpointing": "none", "padding": None},
        ["optimizer_in_bwd"],
    ),
    "litgpt_lora.yaml": (
        {},
        {
            "model": "google/gemma-2b", "method": "qlora", "weight_dtype": "nf4", "lora_rank": 8, "num_gpus": 2,
            "lora_targets": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
            "gradient_accumulation_steps": 4,  # 16 / (2 sequences x 2 GPUs)
            "sequence_length": 512, "epochs": 2.0, "zero_stage": 3, "software": profile("litgpt"),
        },
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_fields_by_hand(name: str) -> None:
    more, wanted, unknown = EXPECTED[name]
    job, found = read_recipe(RECIPES / name, gpu=GPU, **more)
    assert fields(job, wanted) == wanted
    assert found == unknown


def test_every_fixture_is_expected() -> None:
    assert {p.name for p in RECIPES.iterdir()} - {"ds_z3_offload_config.json"} == set(EXPECTED)


def test_from_recipe_warns_of_what_it_did_not_understand() -> None:
    with pytest.warns(RecipeWarning, match="relora"):
        job = Job.from_recipe(RECIPES / "axolotl_qlora.yml", gpu=GPU)
    assert job.sequence_length == 8192
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Job.from_recipe(RECIPES / "trl_full.json", gpu=GPU)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("axolotl_qlora.yml", "gpu"),
        ("llamafactory_full_ds3.yaml", "num_gpus"),
        ("torchtune_full.yaml", "sequence_length"),
    ],
)
def test_what_a_recipe_cannot_say_is_asked_for_by_name(name: str, lacking: str) -> None:
    with pytest.raises(InvalidInputError, match=f"does not tell .*{lacking}") as info:
        read_recipe(RECIPES / name)
    assert name in str(info.value)


def test_the_callers_fields_count() -> None:
    job, _ = read_recipe(RECIPES / "trl_lora.yaml", gpu="a40", dataset="math-14k", lora_rank=4, software="hf-peft-2024")
    assert (job.gpu, job.dataset, job.lora_rank, job.software) == ("a40", "math-14k", 4, "hf-peft-2024")
    with pytest.raises(InvalidInputError, match=r"lora_rnak is not a field; did you mean lora_rank"):
        read_recipe(RECIPES / "trl_lora.yaml", gpu="a40", lora_rnak=4)
    with pytest.raises(InvalidInputError, match="num_gpus"):
        read_recipe(RECIPES / "llamafactory_full_ds3.yaml", gpu="a40", num_gpus="4")


def write(folder: Path, data: dict[str, Any], name: str = "recipe.json") -> Path:
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder / name


LLAMA_FACTORY = {"model_name_or_path": "Qwen/Qwen2-7B", "finetuning_type": "lora", "cutoff_len": 512}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear",), "epochs": 3.0, "micro_batch_size": 8}),
        ({"max_samples": 500}, {"num_queries": 500, "padding": None}),
        ({"quantization_bit": 4}, {"method": "qlora", "weight_dtype": "nf4-dq"}),
        ({"quantization_bit": "8"}, {"method": "qlora", "weight_dtype": "int8"}),
        ({"use_dora": True}, {"method": "dora"}),
        ({"pure_bf16": True, "finetuning_type": "full"}, {"method": "full", "weight_dtype": "bf16"}),
        ({"use_unsloth": True}, {"fused_kernels": "unsloth", "software": profile("unsloth")}),
        ({"stage": "pt"}, {"padding": "packed"}),
        ({"fp16": True}, {"compute_dtype": "fp16"}),
        ({"bf16": False, "fp16": False}, {"compute_dtype": "fp32"}),
        ({"flash_attn": "disabled"}, {"attention": "eager"}),
        ({"flash_attn": "auto"}, {"attention": None}),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw8bit"}),
        ({"model_name_or_path": "TheBloke/Mistral-7B-v0.1-GPTQ"}, {"method": "qlora", "weight_dtype": "int4-gptq"}),
        ({"model_name_or_path": "/models/Qwen/Qwen2-7B"}, {"model": "Qwen/Qwen2-7B"}),
        ({"deepspeed": "cache/ds_z2_config.json"}, {"zero_stage": 2, "offload": "none"}),
        ({"deepspeed": "cache/ds_z3_offload_config.json"}, {"zero_stage": 3, "offload": "parameters"}),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, {"zero_stage": 1}),
    ],
)  # fmt: skip
def test_llama_factory_keys(tmp_path: Path, more: dict[str, Any], wanted: dict[str, Any]) -> None:
    job, unknown = read_recipe(write(tmp_path, LLAMA_FACTORY | more), gpu=GPU, num_gpus=2)
    assert fields(job, wanted) == wanted
    assert unknown == []


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (LLAMA_FACTORY | {"stage": "dpo"}, UnsupportedError, "stage='dpo'"),
        (LLAMA_FACTORY | {"finetuning_type": "freeze"}, UnsupportedError, "freeze"),
        (LLAMA_FACTORY | {"max_samples": "two"}, InvalidInputError, "max_samples='two' must be a whole number"),
        (LLAMA_FACTORY | {"lora_rank": 0.5}, InvalidInputError, "lora_rank=0.5"),
        (LLAMA_FACTORY | {"optim": "sophia"}, InvalidInputError, "optim='sophia' is not modelled; pass optimizer="),
        (LLAMA_FACTORY | {"deepspeed": "ds.json"}, InvalidInputError, "pass zero_stage="),
        (LLAMA_FACTORY | {"use_peft": True}, InvalidInputError, "keys of LLaMA-Factory and TRL"),
        ({"learning_rate": 1e-4}, InvalidInputError, "no training tool that is known"),
        ({}, InvalidInputError, "no training tool"),
        ({"base_model": "x", "rl": "dpo"}, UnsupportedError, "rl='dpo'"),
        ({"base_model": "x", "adapter": "llama-adapter"}, UnsupportedError, "adapter="),
        ({"base_model": "x", "adapter": "lora"}, InvalidInputError, "pass lora_targets="),
        ({"model": {"_component_": "mine.model"}, "batch_size": 1}, InvalidInputError, "mine.model"),
    ],
)  # fmt: skip
def test_one_clear_error(tmp_path: Path, data: dict[str, Any], error: type[Exception], text: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(error) as info:
        read_recipe(path, gpu=GPU, num_gpus=1)
    assert text in str(info.value)
    assert "recipe.json" in str(info.value)


def test_a_doubt_is_moot_where_the_caller_says(tmp_path: Path) -> None:
    job, _ = read_recipe(write(tmp_path, LLAMA_FACTORY | {"optim": "sophia"}), gpu=GPU, optimizer="adamw")
    assert job.optimizer == "adamw"


def test_packed_rows_of_a_limited_run_hold_several_queries(tmp_path: Path) -> None:
    data = LLAMA_FACTORY | {"packing": True, "max_steps": 10, "per_device_train_batch_size": 1, "cutoff_len": 1024}
    job, _ = read_recipe(write(tmp_path, data), gpu=GPU, dataset="math-14k")
    assert job.num_queries is not None
    assert job.num_queries > 20  # math-14k: 187 tokens in the mean, so about five a row of 1,024


def test_torchtune_builders() -> None:
    assert torchtune_model("llama2_70b") == "meta-llama/Llama-2-70b-hf"
    assert torchtune_model("lora_llama3_8b") == "meta-llama/Meta-Llama-3-8B"
    assert torchtune_model("qwen2_5_1_5b_base") == "Qwen/Qwen2.5-1.5B"
    assert torchtune_model("code_llama2_7b") == "codellama/CodeLlama-7b-hf"


def test_a_local_model_is_its_config(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model_name("mine", tmp_path) == str(tmp_path / "mine" / "config.json")
    assert model_name("nobody/knows", tmp_path) == "nobody/knows"


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.text(max_size=3))


@given(data=st.data(), name=st.sampled_from([n for n in EXPECTED if not n.startswith("llamafactory_full")]))
def test_any_value_of_a_key_gives_a_job_or_one_error(
    data: st.DataObject, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from moecost.spec_files import read_yaml

    recipe = read_yaml(RECIPES / name)
    inner = data.draw(st.sampled_from([recipe, *(v for v in recipe.values() if isinstance(v, dict) and v)]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(VALUES)
    path = write(tmp_path_factory.mktemp("fuzz"), recipe)
    start = time.perf_counter()
    with contextlib.suppress(MoECostError):
        read_recipe(path, gpu=GPU, num_gpus=1, sequence_length=64)
    assert time.perf_counter() - start < 1.0


@given(cut=st.integers(0, 400), name=st.sampled_from(sorted(EXPECTED)))
def test_a_truncated_recipe_gives_a_job_or_one_error(
    cut: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / name
    path.write_bytes((RECIPES / name).read_bytes()[:cut])
    with contextlib.suppress(MoECostError):
        read_recipe(path, gpu=GPU, num_gpus=1, sequence_length=64)
