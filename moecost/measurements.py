"""Measured runs: what one is, and how to get them from tables, from what training tools write, and from moecost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

from moecost.catalog import data_folder
from moecost.errors import InvalidInputError, close_matches
from moecost.job import Job
from moecost.measured_run import SPEED_FIELDS as SPEED_FIELDS
from moecost.measured_run import MeasuredRun as MeasuredRun
from moecost.measured_run import Runs as Runs
from moecost.measured_run import refuse_impossible as refuse_impossible
from moecost.software import SoftwareProfile

PUBLIC: Final = ("finetune", "multi", "fits_or_oom")
"""Tables of public runs that ship with moecost."""

OnError = Literal["raise", "report"]


def read(path: str | Path, on_error: OnError = "raise", **job_fields: Any) -> Runs:
    """Measured runs from a table, a log or a folder of logs.

    A CSV has the fields of `Job` and of `MeasuredRun` as columns (blank: the stack's habit), and may have `shape` (the
    config of a model that is on no hub, JSON), `mean_length`, `sequence_length_cap`, `usable_speed`, `usable_memory`:
    speed belongs to `sequence_length`, else to `mean_length`; memory to `sequence_length`, else to
    `sequence_length_cap`. A row whose speed and memory belong to different lengths becomes two runs with one `id`.
    `run_hours` counts only where `num_queries` or `dataset` is known. What is set aside is said in `notes`.

    Logs are those of the Hugging Face Trainer and what stands on it (`trainer_state.json`, `all_results.json`,
    `train_results.json`), torchtune and litgpt, each beside the recipe it was run with; see `moecost.recipes`.

    Parameters
    ----------
    path : a file, or a folder that is searched for tables and logs.
    on_error : `raise` at the first run that cannot be read, or `report`: the others are returned, and `refused` of
        the list has a message for each that was left out.
    job_fields : fields of `Job` that the file does not tell (`gpu`, `num_gpus`, `dataset`, ...) or that shall
        replace what it says.

    Returns
    -------
    Runs : a list, in the order of the file.

    Raises
    ------
    InvalidInputError : with file, line and value. A speed beyond the GPUs' dense peak counts as an error.
    """
    if on_error not in ("raise", "report"):
        raise InvalidInputError(f"on_error={on_error!r} must be 'raise' or 'report'")
    if not isinstance(path, str | Path) or not str(path).strip():
        raise InvalidInputError(f"path={path!r:.60} must name a file or folder")
    job_fields = {name: value for name, value in job_fields.items() if value is not None}
    for name in job_fields:
        if name not in Job.model_fields:
            near = close_matches(name, Job.model_fields)
            raise InvalidInputError(f"{name} is not a field of Job; did you mean {' or '.join(near) or 'another'}?")
    runs, refused = _read(Path(path), job_fields)
    if refused and on_error == "raise":
        others = f" (and {len(refused) - 1} more; on_error='report' reads the rest)" if len(refused) > 1 else ""
        raise InvalidInputError(refused[0] + others)
    return Runs(runs, refused)


def _read(path: Path, fields: dict[str, Any]) -> tuple[list[MeasuredRun], list[str]]:
    if path.suffix.lower() == ".csv" and not os.path.isdir(path):
        from moecost.run_tables import read_table

        return read_table(path, fields)
    from moecost.run_logs import read_logs

    return read_logs(path, fields)


def runs_behind(calibration: str) -> Runs:
    """The public runs that a shipped calibration of many stacks was fitted on: those of the profiles that name it."""
    tables = [public_runs("finetune"), public_runs("multi")]
    return Runs(run for t in tables for run in t if SoftwareProfile.load(run.job.software).calibration == calibration)


def public_runs(name: str = "finetune") -> Runs:
    """Public measured runs, with their sources; `refused` tells which rows cannot be jobs yet, and why.

    Parameters
    ----------
    name : `finetune` (fine-tuning on 1 to 32 GPUs), `multi` (training on 2 to 11,616 devices) or `fits_or_oom`
        (whether a run fitted).

    >>> len(public_runs("fits_or_oom"))
    126
    """
    if name not in PUBLIC:
        raise InvalidInputError(f"{name!r} is no table of public runs; there are {', '.join(PUBLIC)}")
    return read(data_folder("data") / "measurements" / f"{name}.csv", on_error="report")
