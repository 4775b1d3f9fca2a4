"""Measured runs from what training tools write, beside the recipe they were run with."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moecost.errors import InvalidInputError, MoECostError
from moecost.job import Job
from moecost.log_lines import LOG_KINDS, LogLines, read_lines, tools_of
from moecost.measured_run import MeasuredRun, refuse_impossible
from moecost.recipe_keys import Keys
from moecost.recipes import check_fields, missing_fields, read_keys, recipe_fields
from moecost.run_files import read_json, read_run_text
from moecost.run_json import SUFFIX, is_runs, read_runs
from moecost.run_tables import is_table, read_table
from moecost.trainer_files import TRAINER_FILES, TrainerRun, adapter_fields, read_trainer

MAX_DEPTH: Final = 8
MAX_ENTRIES: Final = 20_000
"""Files and folders that a search looks at, at most."""
SNIFFED: Final = 100_000
"""Characters of a text file that tell whether it is a log."""
RECIPE_FILES: Final = ("training_args.yaml", "torchtune_config.yaml", "hyperparameters.yaml")
_NO_RECIPE: Final = re.compile(r"(config|adapter_config|generation_config|tokenizer.*|special_tokens_map|vocab"
                               r"|added_tokens|.*index|.*_results|trainer_state)\.json")  # fmt: skip
_CHECKPOINT: Final = re.compile(r"checkpoint-([0-9]+)\Z")

Read = tuple[list[MeasuredRun], list[str]]


def read_logs(path: Path, fields: Mapping[str, Any]) -> Read:
    """(runs, messages of those that were refused) of a log, or of all logs and tables in a folder."""
    check_fields(fields)
    if not os.path.isdir(path):
        if path.suffix.lower() == ".json" and is_runs(read_json(path)):
            return read_runs(path, fields)
        return [_refusing(path, path.parent, fields)], []
    runs: list[MeasuredRun] = []
    refused: list[str] = []
    for found in _sources(path):
        try:
            if found.suffix.lower() == ".csv" or found.name.endswith(SUFFIX):
                more, messages = (read_runs if found.name.endswith(SUFFIX) else read_table)(found, fields)
                runs, refused = runs + more, refused + messages
            else:
                runs.append(_refusing(found, path, fields))
        except MoECostError as error:
            refused.append(str(error))
    if not runs and not refused:
        raise InvalidInputError(
            f"{path}: holds no run that is known; looked for {', '.join(TRAINER_FILES)}, logs of "
            f"{' and '.join(LOG_KINDS)}, and tables with a column of Job and a measured one"
        )
    return runs, refused


def _refusing(path: Path, root: Path, fields: Mapping[str, Any]) -> MeasuredRun:
    """The run of one log; whatever is wrong names the file."""
    try:
        return _read_log(path, root, fields)
    except MoECostError as error:
        text = str(error)
        raise InvalidInputError(text if text.startswith(str(path.parent)) else f"{path}: {text}") from None


def _read_log(path: Path, root: Path, fields: Mapping[str, Any]) -> MeasuredRun:
    if path.suffix.lower() == ".json":
        if path.name not in TRAINER_FILES and "log_history" not in read_json(path):
            raise InvalidInputError(f"{path}: is none of {', '.join(TRAINER_FILES)}")
        run = _of_trainer(path, fields)
    elif path.suffix.lower() in (".yaml", ".yml"):
        raise InvalidInputError(f"{path}: is a recipe, not a log; read its folder, or use Job.from_recipe")
    else:
        run = _of_lines(path, fields)
    place = os.path.relpath(path.parent, root)
    name = path.parent.resolve().name if place == "." else Path(place).as_posix()
    return run.model_copy(update={"id": name if path.suffix.lower() == ".json" else f"{name}/{path.stem}"})


# ------------------------------------------------------------------------------------------------------- the search
def _sources(root: Path) -> Iterator[Path]:
    """Files that stand for a run each, in the order of their names; a checkpoint only where its run left no more."""
    seen = 0
    done: set[Path] = set()
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders.sort()
        seen += len(folders) + len(files)
        if seen > MAX_ENTRIES:
            raise InvalidInputError(f"{root}: has more than {MAX_ENTRIES:,} files; read a folder further down")
        if len(here.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
        ours = [here / name for name in sorted(files) if name.endswith(SUFFIX)]
        state = next((here / name for name in TRAINER_FILES if name in files), None)
        if ours or state is not None:
            done.add(here)
        yield from ours
        if state is not None and not ours:  # else both tell of one run
            yield state
        checkpoints = sorted((int(m[1]), f) for f in folders if (m := _CHECKPOINT.match(f)))
        for _, name in checkpoints if here in done else checkpoints[:-1]:
            folders.remove(name)
        for name in sorted(files):
            if name.lower().endswith((".csv", ".log", ".txt", ".out")) and _is_log(here / name):
                yield here / name


def _is_log(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as stream:
            text = stream.read(SNIFFED)
    except (OSError, ValueError):
        return False
    if path.suffix.lower() == ".csv":
        return is_table(text)
    return bool(tools_of(text))


def _recipe(folders: list[Path], tools: tuple[str, ...]) -> Keys | None:
    """The recipe in the first of the folders that has one: under a known name, else the only one there."""
    for folder in folders:
        for name in RECIPE_FILES:
            if (folder / name).is_file():
                keys, tool = read_keys(folder / name)
                if tool.name in tools:
                    return keys
        found = [other for path in _texts(folder) if (other := _as_recipe(path, tools)) is not None]
        if len(found) > 1:
            raise InvalidInputError(f"{folder}: has several recipes, {found[0].where} and {found[1].where}; leave one")
        if found:
            return found[0]
    return None


def _texts(folder: Path) -> list[Path]:
    names = sorted(p for p in folder.glob("*") if p.suffix.lower() in (".yaml", ".yml", ".json"))
    return [p for p in names if not _NO_RECIPE.match(p.name) and p.is_file()][:50]


def _as_recipe(path: Path, tools: tuple[str, ...]) -> Keys | None:
    try:
        keys, tool = read_keys(path)
    except MoECostError:
        return None
    return keys if tool.name in tools else None


# -------------------------------------------------------------------------------------------- Hugging Face Trainer
def _of_trainer(path: Path, fields: Mapping[str, Any]) -> MeasuredRun:
    folder = path.parent
    log = read_trainer(folder, path)
    keys = _recipe([folder], ("LLaMA-Factory", "axolotl", "TRL"))
    if keys is None:
        keys = Keys({}, str(path), folder)
        keys.fields |= adapter_fields(folder)
        keys.put("micro_batch_size", log.micro_batch_size)
        keys.put("epochs", log.epochs)
    known = {**keys.fields, **fields}
    given = dict(fields)
    gpus = log.num_gpus(known.get("micro_batch_size"), known.get("gradient_accumulation_steps"))
    if "num_gpus" not in known:
        given |= {} if gpus is None else {"num_gpus": gpus}
    elif gpus is not None and gpus != _data_parallel(known):
        raise InvalidInputError(
            f"{path}: num_gpus={known['num_gpus']}, but the log has {log.global_batch} sequences a step, which "
            f"micro_batch_size={known['micro_batch_size']} and "
            f"gradient_accumulation_steps={known['gradient_accumulation_steps']} make on {gpus} data-parallel GPUs"
        )
    elif "gradient_accumulation_steps" not in known and "global_batch_size" not in known and log.global_batch:
        keys.put("global_batch_size", log.global_batch)
    filled = recipe_fields(keys, given)
    measured = log.measured()
    _lengths(filled, fields, measured, log)
    if "num_queries" not in filled and "dataset" not in filled and log.queries:
        filled["num_queries"] = max(round(log.queries / filled.get("epochs", 1.0)), 1)
    if not ({"num_queries", "dataset"} & filled.keys()):
        measured.pop("run_hours", None)
    stack = filled.get("software", "hf-peft")
    return _run(path, keys, filled, measured, f"log of the Hugging Face Trainer ({stack})")


def _data_parallel(fields: Mapping[str, Any]) -> int:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return int(fields["num_gpus"] // math.prod(fields.get(size, 1) for size in sizes))


def _lengths(filled: dict[str, Any], given: Mapping[str, Any], measured: dict[str, Any], log: TrainerRun) -> None:
    """Fill in the length that the speed belongs to; a truncation length alone says nothing of it."""
    packed = filled.get("padding") == "packed"
    if packed and "sequence_length" in filled:
        if filled.pop("dataset", None) is not None:
            filled.pop("num_queries", None)
        if "queries_per_second" in measured:  # rows, each of them full
            measured["tokens_per_second"] = measured["queries_per_second"] * filled["sequence_length"]
    elif not ({"sequence_length", "dataset"} & given.keys()):
        filled.pop("sequence_length", None)
        if log.tokens is not None and log.queries:
            measured.pop("peak_memory_gib", None)  # of the longest batch, which the mean does not tell
            measured.pop("memory_kind", None)
            filled |= {"sequence_length": max(round(log.tokens / log.queries), 1), "padding": "max_length"}


# ------------------------------------------------------------------------------------------------ torchtune, litgpt
def _of_lines(path: Path, fields: Mapping[str, Any]) -> MeasuredRun:
    log: LogLines = read_lines(read_run_text(path), str(path))
    keys = _recipe([path.parent, path.parent / "final", path.parent.parent], (log.tool,))
    keys = keys or Keys({}, str(path), path.parent)
    keys.put("software", log.tool)
    filled = recipe_fields(keys, fields)
    if "sequence_length" not in fields and "dataset" not in fields and filled.get("padding") != "packed":
        filled.pop("sequence_length", None)  # where it is cut, not how long it is
    if filled.get("padding") == "packed":
        filled.pop("dataset", None)
    gpus = fields.get("num_gpus", keys.fields.get("num_gpus"))
    if gpus is None:
        filled.pop("num_gpus", None)
    measured = log.measured(gpus or 1, filled.get("gradient_accumulation_steps") or 1)
    batches = log.batches
    if "num_queries" not in filled and "dataset" not in filled and batches and "micro_batch_size" in filled:
        queries = batches * filled["micro_batch_size"] * (gpus or 1)
        filled["num_queries"] = max(round(queries / filled.get("epochs", 1.0)), 1)
    if not ({"num_queries", "dataset"} & filled.keys()):
        measured.pop("run_hours", None)
    return _run(path, keys, filled, measured, f"log of {log.tool}", log.notes)


# ----------------------------------------------------------------------------------------------------------- the run
def _run(
    path: Path, keys: Keys, filled: dict[str, Any], measured: Mapping[str, Any], source: str, notes: str = ""
) -> MeasuredRun:
    lacking = [name for name in ("num_gpus", "method", "micro_batch_size") if filled.get(name) is None]
    lacking = [*missing_fields(keys, filled), *lacking]
    lacking = list(dict.fromkeys(name.split(" (")[0] for name in lacking))
    if lacking:
        lengths = "sequence_length or dataset"
        why = " (the lengths that were run, not where they are cut)" if lengths in lacking else ""
        give = ", ".join(f"{name.split(' ')[0]}=..." for name in lacking)
        raise InvalidInputError(f"{path}: the log does not tell {', '.join(lacking)}{why}; pass read(path, {give})")
    if not measured:
        raise InvalidInputError(f"{path}: no speed and no memory in it: the run did not end, or was not logged")
    try:
        run = MeasuredRun(
            job=Job(**filled), **measured, outcome="ok", source=source, notes=notes, trust=2 if notes else 3
        )
        refuse_impossible(run)
    except MoECostError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    return run
