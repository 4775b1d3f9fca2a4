"""Measured runs as JSON: what a probe and a watched run leave behind, and `moecost.measurements.read` reads back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moecost.architecture import ModelSpec
from moecost.catalog import write_text
from moecost.errors import InvalidInputError, MoECostError
from moecost.job import Job
from moecost.measured_run import MeasuredRun, refuse_impossible
from moecost.run_files import read_json
from moecost.specs import GPUSpec

SUFFIX: Final = ".moecost.json"
"""By which a folder's files are known."""
FORMAT: Final = "moecost-runs"


def write_runs(path: str | Path, runs: Sequence[MeasuredRun], record: Mapping[str, Any] | None = None) -> None:
    """Write runs, all at once; `record` is for the reader alone (times by stage, lengths, versions).

    Raises
    ------
    InvalidInputError : the file cannot be written.
    """
    content = {"format": FORMAT, "runs": [_plain(run) for run in runs], "record": dict(record or {})}
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _plain(run: MeasuredRun) -> dict[str, Any]:
    """What was given of a run; specs and data sets are written out."""
    fields = run.model_dump(mode="json", exclude={"job"}, exclude_defaults=True)
    job = run.job.model_dump(mode="json", include=set(run.job.model_fields_set), exclude_none=True)
    for name, kind in (
        ("model", ModelSpec),
        ("gpu", GPUSpec),
    ):  # where this is read, a file may be gone
        if isinstance(job.get(name), str) and Path(job[name]).is_file():
            with contextlib.suppress(MoECostError):
                job[name] = kind.load(job[name]).model_dump(mode="json")
    return {"job": job, **fields}


def is_runs(content: Mapping[str, Any]) -> bool:
    """Whether a JSON file is one of these."""
    return content.get("format") == FORMAT


def read_runs(path: str | Path, fields: Mapping[str, Any]) -> tuple[list[MeasuredRun], list[str]]:
    """(runs, messages of those that were refused); `fields` replaces what the jobs say."""
    content = read_json(path)
    rows = content.get("runs")
    if not is_runs(content) or not isinstance(rows, list):
        raise InvalidInputError(f"{path}: is no file of runs: it lacks format={FORMAT!r} or a list under runs")
    runs: list[MeasuredRun] = []
    refused: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            runs.append(_run(row, fields))
        except MoECostError as error:
            refused.append(f"{path}, run {number}: {error}")
    return runs, refused


def _run(row: Any, fields: Mapping[str, Any]) -> MeasuredRun:
    if not isinstance(row, dict) or not isinstance(row.get("job"), dict):
        raise InvalidInputError(f"{row!r:.60} must be an object with a job")
    measured = {name: value for name, value in row.items() if name != "job"}
    run = MeasuredRun(job=Job(**{**row["job"], **fields}), **measured)
    refuse_impossible(run)
    return run
