"""Measured runs from a CSV: its columns are the fields of `Job` and of `MeasuredRun`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from moecost.errors import InvalidInputError, MoECostError, close_matches
from moecost.job import Job
from moecost.measured_run import SPEED_FIELDS, MeasuredRun, refuse_impossible
from moecost.run_files import read_run_text

MEMORY_FIELDS: Final = ("peak_memory_gib",)
TEXT_FIELDS: Final = ("source", "source_key", "date", "group", "id", "notes")
BESIDE: Final = (
    *SPEED_FIELDS, *MEMORY_FIELDS, *TEXT_FIELDS, "memory_kind", "outcome", "trust", "usd", "shape",
    "sequence_length_cap", "mean_length", "usable_speed", "usable_memory",
)  # fmt: skip
"""Columns that are no field of `Job`. `usd` is for the reader alone."""
UNITS: Final[Mapping[str, str]] = {
    "step_seconds": "seconds",
    "run_hours": "hours",
    "peak_memory_gib": "GiB",
    "queries_per_second": "queries a second",
    "tokens_per_second": "tokens a second",
}
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")
_FLAGS: Final[Mapping[str, bool]] = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def read_table(path: str | Path, fields: Mapping[str, Any]) -> tuple[list[MeasuredRun], list[str]]:
    """(runs, messages of the rows that were refused); `fields` replaces what the columns of that name say.

    Raises
    ------
    InvalidInputError : the file is no table of runs at all.
    """
    header, rows = _rows(read_run_text(path), str(path))
    _check_columns(header, fields, str(path))
    runs: list[MeasuredRun] = []
    refused: list[str] = []
    seen: dict[str, int] = {}
    for line, values in rows:
        where = f"{path}, line {line}"
        if isinstance(values, str):
            refused.append(f"{where}: {values}")
            continue
        try:
            name = values.get("id", "")
            if name and seen.setdefault(name, line) != line:
                raise InvalidInputError(f"id={name!r:.60} is also that of line {seen[name]}; ids must differ")
            runs += runs_of_row(values, fields)
        except MoECostError as error:
            refused.append(f"{where}: {error}")
    return runs, refused


def is_table(text: str) -> bool:
    """Whether the first line names columns of a table of runs."""
    first = next(csv.reader(io.StringIO(text[:100_000])), [])
    return bool({"model", "gpu"} & set(first)) and bool({*SPEED_FIELDS, *MEMORY_FIELDS, "outcome"} & set(first))


def runs_of_row(row: Mapping[str, str], fields: Mapping[str, Any]) -> list[MeasuredRun]:
    """The run of a row; two where its speed and its memory belong to different lengths.

    Speed belongs to `sequence_length`, else `mean_length` (as sequences that all have it); memory to
    `sequence_length`, else `sequence_length_cap`. With a data set one job says both. What cannot be used is said in
    `notes`.
    """
    row = {k: v.strip() for k, v in row.items() if v.strip()}
    job = _job_fields(row, fields)
    text = {k: row[k] for k in TEXT_FIELDS if k in row}
    aside: list[str] = []
    speed = {k: _number(row, k) for k in SPEED_FIELDS if k in row} if _usable(row, "usable_speed") else {}
    memory: dict[str, Any] = {}
    if _usable(row, "usable_memory") and "peak_memory_gib" in row:
        kind = row.get("memory_kind", "unknown")
        memory = {
            "peak_memory_gib": _number(row, "peak_memory_gib"),
            "memory_kind": None if kind == "unknown" else kind,
        }
    if "run_hours" in speed and not ({"num_queries", "dataset"} & job.keys()):
        if len(speed) == 1 and not memory and "outcome" not in row:
            raise InvalidInputError("run_hours tells nothing without num_queries or dataset; give one of them")
        aside.append(f"run_hours={speed.pop('run_hours'):g} (num_queries is not known)")

    exact = "sequence_length" in job or "dataset" in job
    cap, mean = (_length(row, k) for k in ("sequence_length_cap", "mean_length"))
    if "dataset" in job and "sequence_length" not in job and cap is not None:
        job["sequence_length"] = cap
    of_speed, of_memory = (None, None) if exact else (mean, cap)
    if speed and not exact and of_speed is None:
        aside += [f"{k}={v:g} (mean_length is not known)" for k, v in speed.items()]
        speed = {}
    if memory and not exact and of_memory is None:
        aside.append(f"peak_memory_gib={memory['peak_memory_gib']:g} (the longest sequence is not known)")
        memory = {}

    outcome = {"outcome": row["outcome"]} if "outcome" in row else {}
    parts: list[tuple[int | None, dict[str, Any]]]
    if speed and memory and of_speed != of_memory:
        parts = [(of_speed, speed), (of_memory, memory | outcome)]
    elif speed or memory or outcome:
        length = of_speed if speed else of_memory if memory else (cap or mean)
        parts = [(length, speed | memory | outcome)]
    else:
        what = f"; set aside: {', '.join(aside)}" if aside else ""
        raise InvalidInputError(f"nothing that can be used was measured{what}")
    if aside:
        text["notes"] = "; ".join(filter(None, [text.get("notes", ""), f"set aside: {', '.join(aside)}"]))
    trust = {"trust": _whole(row, "trust")} if "trust" in row else {}
    return [_run(job, length, measured | text | trust) for length, measured in parts]


def _run(job: Mapping[str, Any], length: int | None, measured: Mapping[str, Any]) -> MeasuredRun:
    if length is not None:
        job = {**job, "sequence_length": length, "padding": "max_length"}
    run = MeasuredRun(job=Job(**job), **measured)
    refuse_impossible(run)
    return run


def _job_fields(row: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {k: _cell(row, k) for k in row if k in Job.model_fields and k not in fields}
    if "shape" in row and "model" not in fields:
        job["model"] = {**_json(row, "shape"), "name": row.get("model", "")}
    if "gradient_accumulation_steps" in job or "gradient_accumulation_steps" in fields:
        job.pop("global_batch_size", None)
    job |= fields
    missing = [k for k in ("model", "gpu") if k not in job]
    if missing:
        raise InvalidInputError(f"{' and '.join(missing)} is missing")
    return job


# --------------------------------------------------------------------------------------------------------- the file
def _rows(text: str, where: str) -> tuple[Sequence[str], list[tuple[int, dict[str, str] | str]]]:
    """(columns, (line, its cells or why it has none) of each row)."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    rows: list[tuple[int, dict[str, str] | str]] = []
    line = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
                if not header:
                    header = [cell.strip() for cell in cells]
                elif len(cells) != len(header):
                    rows.append((line, f"has {len(cells)} cells, the header has {len(header)} columns"))
                else:
                    rows.append((line, dict(zip(header, cells, strict=True))))
            line = reader.line_num + 1
    except csv.Error as error:
        if not header:
            raise InvalidInputError(f"{where}, line {line}: is not valid CSV: {error}") from error
        rows.append((line, f"is not valid CSV from here on: {error}"))
    if not header:
        raise InvalidInputError(f"{where}: is empty")
    if not rows:
        raise InvalidInputError(f"{where}: has columns but no row")
    return header, rows


def _check_columns(header: Sequence[str], fields: Mapping[str, Any], where: str) -> None:
    known = (*Job.model_fields, *BESIDE)
    for name in header:
        if name and header.count(name) > 1:
            raise InvalidInputError(f"{where}, line 1: the column {name!r:.60} occurs twice")
        if name and name not in known:
            near = close_matches(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            if len(header) == 1 and re.search("[;\t]", name):
                hint = "; columns are separated by commas"
            raise InvalidInputError(f"{where}, line 1: the column {name!r:.60} is not known{hint}")
    missing = [n for n in ("model", "gpu") if n not in header and n not in fields]
    if missing:
        raise InvalidInputError(f"{where}, line 1: no column {' and '.join(missing)}; add it or pass {missing[0]}=")
    measured = (*SPEED_FIELDS, *MEMORY_FIELDS, "outcome")
    if not set(measured) & set(header):
        raise InvalidInputError(f"{where}, line 1: no measured column; give one of {', '.join(measured)}")


# -------------------------------------------------------------------------------------------------------- the cells
def _kinds(annotation: Any) -> set[type]:
    """Plain types that a field of `Job` takes."""
    if isinstance(annotation, type):
        return {annotation}
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kinds(args[0])
    if origin is Literal:
        return {type(a) for a in args}
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(a) for a in args))
    return set()


_KINDS: Final[Mapping[str, set[type]]] = {name: _kinds(field.annotation) for name, field in Job.model_fields.items()}


def _cell(row: Mapping[str, str], name: str) -> Any:
    """Value of a `Job` column."""
    text, kinds = row[name], _KINDS[name]
    if name == "lora_targets":
        return [t.strip() for t in text.split(";") if t.strip()] if ";" in text else text
    if name == "model_overrides" or (dict in kinds and text.startswith("{")):
        return _json(row, name)
    if name == "gradient_checkpointing":
        return _FLAGS.get(text.lower(), text)
    if str in kinds and float in kinds:
        return _number(row, name) if _NUMBER.match(text) else text
    if bool in kinds:
        return _flag(row, name)
    if int in kinds:
        return _whole(row, name)
    return _number(row, name) if float in kinds else text


def _number(row: Mapping[str, str], name: str) -> float:
    text = row[name]
    if not _NUMBER.match(text):
        unit = f", in {UNITS[name]}" if name in UNITS else ""
        raise InvalidInputError(f"{name}={text!r:.60} is not a plain number; write it without a unit{unit}")
    value = float(text)
    if not math.isfinite(value):
        raise InvalidInputError(f"{name}={text!r:.60} is too large")
    return value


def _whole(row: Mapping[str, str], name: str) -> int:
    value = _number(row, name)
    if not value.is_integer():
        raise InvalidInputError(f"{name}={row[name]!r:.60} is not a whole number")
    return int(value)


def _flag(row: Mapping[str, str], name: str) -> bool:
    flag = _FLAGS.get(row[name].lower())
    if flag is None:
        raise InvalidInputError(f"{name}={row[name]!r:.60} must be 1 or 0")
    return flag


def _usable(row: Mapping[str, str], name: str) -> bool:
    return name not in row or _flag(row, name)


def _length(row: Mapping[str, str], name: str) -> int | None:
    return None if name not in row else round(_number(row, name))


def _json(row: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(row[name])
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name}={row[name]!r:.60} is not valid JSON") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{name}={row[name]!r:.60} must be a JSON object")
    return value
