"""The JSON Schemas that ship: current, standard, and of what is really written and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from moecost import Calibration, DatasetSpec, GPUSpec, Job, ModelSpec, NodeSpec, estimate
from moecost.errors import InvalidInputError
from moecost.specs import PriceQuote

ROOT = Path(__file__).parent.parent
LEAST: dict[str, Any] = {"model": "mistral-7b", "gpu": "a40", "sequence_length": 512}
CONFIG = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 4096,
          "vocab_size": 32000}  # fmt: skip


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((files("moecost") / "data" / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.fixture(scope="module")
def jobs() -> Draft202012Validator:
    return validator("job")


@pytest.fixture(scope="module")
def estimates() -> Draft202012Validator:
    return validator("estimate")


@pytest.fixture(scope="module")
def script(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("make_schemas")


def test_the_files_are_current(script: ModuleType) -> None:
    assert script.outdated() == [], "run `python tools/make_schemas.py`"


def keywords(node: Any) -> set[str]:
    """Keywords of a schema; names of properties and definitions are none."""
    if isinstance(node, list):
        return set().union(*map(keywords, node))
    if not isinstance(node, dict):
        return set()
    found = set(node)
    for word, value in node.items():
        if word in ("properties", "$defs"):
            found |= set().union(*map(keywords, value.values()))
        elif word not in ("default", "enum", "const", "examples"):
            found |= keywords(value)
    return found


@pytest.mark.parametrize("name", ["job", "estimate"])
def test_only_words_of_the_standard(name: str) -> None:
    """A validator passes over words it does not know, so that a bound misspelt would bound nothing."""
    used = keywords(validator(name).schema)
    standard = {"$schema", "$defs", "$ref", "title", "description", "default", "type", "enum", "const", "anyOf",
                "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
                "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format",
                "pattern", "readOnly", "propertyNames", "minProperties"}  # fmt: skip
    assert used <= standard


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method": "qlora", "lora_targets": "w1, w2", "gradient_checkpointing": True, "price": 0.79},
        {"model": CONFIG, "price": "cudo", "weight_dtype": "fp32", "optimizer": "adamw8bit", "compute_dtype": "fp4"},
        {
            "model": ModelSpec.load("mixtral-8x7b"),
            "gpu": GPUSpec.load("h100"),
            "node": NodeSpec.load("dgx-h100"),
            "dataset": DatasetSpec.load("math-14k"),
            "calibration": Calibration.load("public-2026"),
            "price": PriceQuote(usd_per_gpu_hour=2.0, provider="me", market="on_demand", date="2026-01-01"),
        },
    ],
    ids=["least", "adapters", "config", "specs"],
)
def test_a_job_that_is_written_is_valid(jobs: Draft202012Validator, fields: dict[str, Any]) -> None:
    job = Job(**LEAST | fields)
    jobs.validate(json.loads(job.model_dump_json()))
    jobs.validate(yaml.safe_load(job.to_yaml()))


def test_what_people_write_is_valid(jobs: Draft202012Validator) -> None:
    jobs.validate(yaml.safe_load((ROOT / "examples" / "mixtral-a40.yaml").read_text(encoding="utf-8")))
    jobs.validate(LEAST | {"method": "lora", "lora_targets": "attention", "gradient_checkpointing": True})


@pytest.mark.parametrize(
    "wrong",
    [
        {"modell": "mistral-7b"},
        {"num_gpus": 0},
        {"num_gpus": "4"},
        {"epochs": 0},
        {"method": "lorra"},
        {"weight_dtype": "nf5"},
        {"optimizer": "adam w"},
        {"gradient_checkpointing": "half"},
        {"lora_targets": [], "method": "lora"},
        {"gpu": None},
        {"zero_stage": 4},
        {"micro_batch_size": 1.5},
    ],
    ids=str,
)
def test_schema_and_job_refuse_the_same(jobs: Draft202012Validator, wrong: dict[str, Any]) -> None:
    assert not jobs.is_valid(LEAST | wrong)
    with pytest.raises(InvalidInputError):
        Job(**LEAST | wrong)


def test_a_job_needs_model_and_gpu(jobs: Draft202012Validator) -> None:
    assert {e.validator for e in jobs.iter_errors({})} == {"required"}
    assert set(jobs.schema["required"]) == {"model", "gpu"}


@pytest.mark.parametrize(
    "fields",
    [{}, {"model": "mixtral-8x7b", "method": "qlora", "gpu": "h100"}, {"on_oom": "report", "sequence_length": 99_999}],
    ids=["dense", "experts", "does not fit"],
)
def test_an_estimate_that_is_written_is_valid(estimates: Draft202012Validator, fields: dict[str, Any]) -> None:
    defaults = {"method": "lora", "price": 1.0, "on_oom": "report"}
    found = estimate(Job(**LEAST | defaults | fields))
    estimates.validate(json.loads(found.model_dump_json()))
    broken = json.loads(found.model_dump_json()) | {"hours": "1 h"}
    assert [e.json_path for e in estimates.iter_errors(broken)] == ["$.hours"]


def test_a_cost_that_is_not_known_is_null(estimates: Draft202012Validator) -> None:
    own = GPUSpec.load("a40").model_copy(update={"name": "a-card-of-mine", "aliases": (), "prices": ()})
    found = json.loads(estimate("mistral-7b", own, method="lora", sequence_length=512).model_dump_json())
    assert found["cost_usd"] is None
    estimates.validate(found)


def test_every_field_of_a_job_is_described(jobs: Draft202012Validator, estimates: Draft202012Validator) -> None:
    for of in (jobs, estimates):
        assert [name for name, schema in of.schema["properties"].items() if not schema.get("description")] == []
