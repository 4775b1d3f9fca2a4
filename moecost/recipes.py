"""Jobs from the training files people already have: LLaMA-Factory, axolotl, TRL/accelerate, torchtune, litgpt."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moecost import catalog
from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError
from moecost.job import Job
from moecost.lengths import queries_per_packed_row
from moecost.recipe_keys import Keys
from moecost.recipe_tools import TOOLS, Tool, tools_of
from moecost.run_files import read_json
from moecost.software import software_profiles
from moecost.spec_files import read_yaml

DEFAULT_SOFTWARE: Final = "hf-peft"
_PREQUANTIZED: Final = (
    (re.compile(r"gptq[-_]?(int)?8|8bit[-_]gptq", re.I), "int8-gptq"),
    (re.compile("gptq", re.I), "int4-gptq"),
    (re.compile("awq", re.I), "int4-awq"),
)
"""Marks in the names of checkpoints that are quantized already."""


class RecipeWarning(UserWarning):
    """A recipe has keys that may change time or memory and are not understood."""


def read_recipe(path: str | Path, **fields: Any) -> tuple[Job, list[str]]:
    """A job from a training file (YAML or JSON), and the keys that matter and were not understood.

    The tool is known by its keys. Keys it leaves out have the tool's defaults; keys known to change neither time nor
    memory (paths, logging, seeds, learning rates) are passed over.

    Parameters
    ----------
    path : of the file. A DeepSpeed configuration that it names is read where it lies beside it.
    fields : fields of `Job` that it cannot tell, such as `gpu` and `dataset`, or that shall replace what it says.

    Raises
    ------
    InvalidInputError : a key has an impossible value, a field is missing (asked for by name), or the file has the
        marks of no tool or of several.
    UnsupportedError : it is valid, but no plain training (preference tuning, freezing of layers ...).
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    check_fields(fields)
    keys, tool = read_keys(path)
    filled = recipe_fields(keys, fields)
    lacking = missing_fields(keys, filled)
    if lacking:
        give = ", ".join(f"{name.split(' ')[0]}=..." for name in lacking)
        raise InvalidInputError(f"{path}: the recipe does not tell {', '.join(lacking)}; pass {give}")
    try:
        return Job(**filled), keys.unknown(tool.ignored)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def recipe_tool(content: Mapping[str, Any]) -> str | None:
    """Name of the tool whose recipe a file holds; None where it is a job's own fields, or cannot be told."""
    if "gpu" in content or isinstance(content.get("model"), str) or content.keys() <= Job.model_fields.keys():
        return None
    tools = tools_of(Keys(content, "recipe"))
    return tools[0].name if len(tools) == 1 else None


def check_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields of `Job` that are impossible whatever a recipe says beside them."""
    alone = {name: value for name, value in given.items() if name != "global_batch_size"}
    stand_in: dict[str, Any] = {"model": "any", "gpu": "any", "method": "lora"}
    if "dataset" not in given:
        stand_in["sequence_length"] = 1
    Job(**{**stand_in, **alone})


def warn_of(unknown: list[str], path: str | Path) -> None:
    """Warn of keys that were not understood, if there are any, in the name of the caller's caller."""
    if unknown:
        text = f"{path}: may change time or memory, and not understood: {', '.join(unknown)}"
        warnings.warn(text, RecipeWarning, stacklevel=3)


def read_keys(path: str | Path) -> tuple[Keys, Tool]:
    """(keys of a recipe, translated; the tool it is for)."""
    path = Path(path)
    data = read_json(path) if path.suffix.lower() == ".json" else read_yaml(path)
    keys = Keys(data, str(path), path.parent)
    tools = tools_of(keys)
    if len(tools) != 1:
        if tools:
            why = f"has keys of {' and '.join(tool.name for tool in tools)}"
        else:
            why = f"has the keys of no training tool that is known ({', '.join(tool.name for tool in TOOLS)})"
        raise InvalidInputError(f"{path}: {why}; it begins with {', '.join(list(keys.flat)[:5])!r:.120}")
    tools[0].translate(keys)
    return keys, tools[0]


def recipe_fields(keys: Keys, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Job` that a recipe and its caller tell together; the caller's count."""
    for field, why in keys.doubts.items():
        if field not in given:
            raise InvalidInputError(f"{keys.where}: {why}")
    fields = {**keys.fields, **given}
    if "software" not in given and fields.get("software") not in software_profiles():
        fields["software"] = DEFAULT_SOFTWARE
    if "model" in keys.fields and "model" not in given:
        fields["model"] = model_name(str(keys.fields["model"]), keys.folder)
    _prequantized(fields, given)
    if fields.get("software") == "torchtune" and fields.get("num_gpus", 1) != 1:
        fields.setdefault("zero_stage", 3)
    if "num_queries" not in given:
        _queries(keys, fields)
    return fields


def missing_fields(keys: Keys, fields: Mapping[str, Any]) -> list[str]:
    """What a job needs and neither the recipe nor its caller tells."""
    lacking = [name for name in ("model", "gpu") if fields.get(name) is None]
    if fields.get("sequence_length") is None and fields.get("dataset") is None:
        lacking.append("sequence_length or dataset")
    if keys.sharded and "num_gpus" not in fields:
        lacking.append("num_gpus (it shards the model)")
    return lacking


def model_name(said: str, folder: Path | None) -> str:
    """A model as a recipe writes it: a name of the catalogue where it is one, also as the end of a local path."""
    index = catalog.model_index()
    if index.get(said):
        return said
    for place in (folder, Path()):
        if place is not None and os.path.isfile(place / said / "config.json"):
            return str(place / said / "config.json")
    parts = re.split(r"[/\\]+", said.rstrip("/\\"))
    return next((name for name in ("/".join(parts[-2:]), parts[-1]) if index.get(name)), said)


def _prequantized(fields: dict[str, Any], given: Mapping[str, Any]) -> None:
    """A checkpoint that its name says to be quantized makes an adapter run on quantized weights."""
    if fields.get("method") != "lora" or {"method", "weight_dtype"} & given.keys():
        return
    for mark, held in _PREQUANTIZED:
        if mark.search(str(fields.get("model", ""))):
            fields |= {"method": "qlora", "weight_dtype": held}
            return


def _queries(keys: Keys, fields: dict[str, Any]) -> None:
    """Queries of an epoch where the recipe limits the steps or the samples."""
    packed, dataset = fields.get("padding") == "packed", fields.get("dataset")
    spec = dataset if dataset is None or isinstance(dataset, DatasetSpec) else DatasetSpec.load(dataset)
    if keys.max_steps:
        ranks = fields.get("num_gpus", 1)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            ranks //= fields.get(name, 1)
        rows = keys.max_steps * max(ranks, 1) * (fields.get("micro_batch_size") or 1)
        rows *= fields.get("gradient_accumulation_steps") or 1
        if packed and spec is not None:
            rows = round(rows * queries_per_packed_row(spec.lengths(), fields.get("sequence_length") or spec.longest))
        fields["num_queries"] = rows
    elif keys.max_queries and keys.max_queries > 0:
        if spec is not None:
            fields["num_queries"] = min(keys.max_queries, spec.num_queries)
        elif packed:
            keys.not_modelled.append("max_samples")  # how many rows they fill is not known
        else:
            fields["num_queries"] = keys.max_queries
