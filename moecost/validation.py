"""Measured against predicted: how far off estimates are, which way, and how often a measurement lies in the interval.

`validate` predicts each run as its job says. `cross_validate` predicts it by a fit that has not seen its part of the
runs, and `after_one_run` adds one measured run of that part. All three return a `Report`.

An error is `predicted / measured - 1`. Speeds are compared as the seconds of a step, whatever was measured: so an
error of +10 % says that a run is quicker than predicted.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel

from moecost.calibration import Calibration
from moecost.errors import FitError, InvalidInputError, MoECostError, OutOfRangeWarning
from moecost.estimation import estimate_job
from moecost.experts import normal_quantile
from moecost.fitting import (
    FACTOR_LOG_SD,
    FOLDS,
    MEMORY_KINDS,
    NOISE,
    Case,
    Parameter,
    evidence_of,
    group_of,
    left_out_errors,
    solve,
    source_of,
    stack_problem,
)
from moecost.measurements import SPEED_FIELDS, MeasuredRun
from moecost.resolution import Resolved, resolve
from moecost.results import Estimate
from moecost.units import HOUR
from moecost.validation_report import LEVEL as LEVEL
from moecost.validation_report import Outcome as Outcome
from moecost.validation_report import Refusal as Refusal
from moecost.validation_report import Report as Report
from moecost.validation_report import Row as Row
from moecost.validation_report import Summary as Summary

NOT_SAID: Final = "kind not said"
BY: Final = ("group", "source", "gpu", "model")


# ------------------------------------------------------------------------------------------------------ validate
def validate(
    runs: Iterable[MeasuredRun], calibration: str | Path | Calibration | None = None, level: float = LEVEL
) -> Report:
    """Each run predicted as its job says, against what was measured.

    Parameters
    ----------
    runs : measured runs; what `moecost.measurements.read` could not read is counted too.
    calibration : to use for all of them; None: that of the job, else of its software.
    level : probability of the intervals.

    Returns
    -------
    Report : `speed` from the most direct speed that was measured (`step_seconds` before `run_hours`), `memory` by the
        kind that was measured, `hours` where the whole run was, and `outcomes`.

    Raises
    ------
    InvalidInputError : `runs` are no measured runs, or a level that is none.
    """
    given = _checked_runs(runs)
    _check_level(level)
    changes: dict[str, Any] = {"on_oom": "report"}
    if calibration is not None:
        changes["calibration"] = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    refused = [_unread(message) for message in getattr(runs, "refused", ())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        for run in given:
            job = run.job.model_copy(update=changes)
            try:
                of = _of_run(run, resolve(job))
                e = estimate_job(job)
            except MoECostError as error:
                refused.append(_refusal(run, str(error)))
                continue
            rows += [row for row in (_speed(run, e, of, level), _memory(run, e, of, level), _hours(run, e, of, level))
                     if row is not None]  # fmt: skip
            if run.outcome is not None:
                outcomes.append(_outcome(run, e, of, level))
    used = "that of its software" if calibration is None else changes["calibration"].name
    how = f"each run predicted as its job says; calibration: {used}"
    return Report(rows=rows, outcomes=outcomes, refused=refused, level=level, how=how)


def _checked_runs(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    found = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, BaseModel) else [runs]
    if not all(isinstance(run, MeasuredRun) for run in found):
        raise InvalidInputError("runs must be a list of MeasuredRun; moecost.measurements.read() makes them from files")
    return found


def _check_level(level: float) -> None:
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0.0 < level < 1.0:
        raise InvalidInputError(f"level={level!r:.80} must lie between 0 and 1")


def _source(run: MeasuredRun) -> str:
    """A short word for the publisher."""
    if run.group is not None and "/" in run.group:
        return source_of(run)
    return run.source_key or source_of(run)


def _unread(message: str) -> Refusal:
    """Of a message of `read`, which begins with file and line: apart, so that equal reasons are counted together."""
    found = re.match(r"(.+?), line (\d+): (.+)", message, re.DOTALL)
    name, reason = (f"{Path(found[1]).name}, line {found[2]}", found[3]) if found else ("", message)
    return Refusal(id=name, source="", reason=f"not read: {reason}")


def _refusal(run: MeasuredRun, reason: str) -> Refusal:
    return Refusal(id=run.id, source=_source(run), reason=reason)


def _of_run(run: MeasuredRun, resolved: Resolved) -> dict[str, Any]:
    has_experts = any(b.layers.experts is not None for b in resolved.workload.blocks)
    return {
        "id": run.id,
        "source": _source(run),
        "group": group_of(run),
        "model": resolved.model.name,
        "kind": "MoE" if has_experts else "dense",
        "gpu": resolved.gpu.name,
        "num_gpus": run.job.num_gpus,
        "method": run.job.method,
        "software": resolved.profile.name,
        "length": float(resolved.worst_length),
        "trust": run.trust,
    }


def _speed(run: MeasuredRun, e: Estimate, of: Mapping[str, Any], level: float) -> Row | None:
    """Of the most direct field, in seconds of a step; hours of a whole run include what lies beside its steps."""
    field = _speed_field(run)
    if field is None:
        return None
    predicted = e.hours * HOUR / e.steps if field == "run_hours" else e.step.seconds
    value = getattr(run, field)
    if field == "step_seconds":
        measured = value
    elif field == "run_hours":
        measured = value * HOUR / e.steps
    else:  # tokens are measured as processed, padding included
        rate = e.queries_per_second if field == "queries_per_second" else e.padded_tokens_per_second
        measured = predicted * rate / value
    low, high = (predicted / e.step.seconds * bound for bound in e.interval("step.seconds", level))
    return Row(figure="speed", field=field, measured=measured, predicted=predicted, low=low, high=high, **of)


def _speed_field(run: MeasuredRun) -> str | None:
    return next((field for field in SPEED_FIELDS if getattr(run, field) is not None), None)


def _memory(run: MeasuredRun, e: Estimate, of: Mapping[str, Any], level: float) -> Row | None:
    if run.peak_memory_gib is None:
        return None
    name = MEMORY_KINDS[run.memory_kind or "reserved"]
    low, high = e.interval(f"memory.{name}", level)
    return Row(figure="memory", field=run.memory_kind or NOT_SAID, measured=run.peak_memory_gib,
               predicted=getattr(e.memory, name), low=low, high=high, **of)  # fmt: skip


def _hours(run: MeasuredRun, e: Estimate, of: Mapping[str, Any], level: float) -> Row | None:
    if run.run_hours is None:
        return None
    low, high = e.interval("hours", level)
    return Row(figure="hours", field="run_hours", measured=run.run_hours, predicted=e.hours, low=low, high=high, **of)


def _outcome(run: MeasuredRun, e: Estimate, of: Mapping[str, Any], level: float) -> Outcome:
    assert run.outcome is not None
    low, high = e.interval("memory.device_gib", level)
    return Outcome(measured=run.outcome, predicted="ok" if e.fits else "oom", device_gib=e.memory.device_gib,
                   usable_gib=e.memory.usable_gib, low=low, high=high, **of)  # fmt: skip


# ----------------------------------------------------------------------------------------------- left-out parts
def cross_validate(
    runs: Iterable[MeasuredRun],
    by: Literal["group", "source", "gpu", "model"] = "group",
    folds: int | None = None,
    *,
    base: str = "hf-peft",
    level: float = LEVEL,
) -> Report:
    """The speed of each run, predicted by a joint fit (`fit_stacks`) that has not seen its part of the runs.

    Parameters
    ----------
    runs : measured runs; those without a speed are none of its subjects, and `how` counts them.
    by : what the runs of a part share: `group` (repeats and neighbours), `source`, `gpu` or `model`.
    folds : parts that are left out together; None: 5 for `group` and `model`, each source and GPU in turn.
    base : the profile whose priors hold.
    level : probability of the intervals, which are those that an estimate states that has not seen the run's part.

    Notes
    -----
    Which parameters are free is decided once, on all runs. 530 runs take about a minute by group, two by source.
    """
    given = _checked_runs(runs)
    _check_level(level)
    if by not in BY:
        raise InvalidInputError(f"by={by!r:.60} must be one of {', '.join(BY)}")
    if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 2):
        raise InvalidInputError(f"folds={folds!r:.60} must be a whole number of at least 2")
    timed = [run for run in given if _speed_field(run) is not None]
    problem, _, unpredicted = stack_problem(timed, base)
    parts = [_PART[by](case) for case in problem.cases]
    if folds is None:
        folds = FOLDS if by in ("group", "model") else len(set(parts))
    best, _ = solve(problem)
    errors, split = left_out_errors(problem, parts, folds, best)
    if errors is None:
        raise FitError(f"all runs share one {by}, so none can be left out")
    spreads = _spreads(problem.cases, parts)
    rows = [
        _left_out_row(case, float(e), spread, level)
        for case, e, spread in zip(problem.cases, errors, spreads, strict=True)
    ]
    how = f"joint fits without each run's {by} ({split.split(' (')[0]}); {len(timed)} of {len(given)} runs have a speed"
    refused = [_refusal(run, why) for run, why in unpredicted]
    return Report(rows=rows, refused=refused, level=level, how=how)


_PART: Final[Mapping[str, Callable[[Case], str]]] = {
    "group": lambda case: group_of(case.run),
    "source": lambda case: _source(case.run),
    "gpu": lambda case: case.resolved.gpu.name,
    "model": lambda case: case.resolved.model.name,
}


def _spreads(cases: Sequence[Case], parts: Sequence[str]) -> list[float]:
    """Spread of the logarithm of each run's time, as an estimate states it that has no evidence of the run's part."""
    evidence = {
        part: evidence_of([case for case, of in zip(cases, parts, strict=True) if of != part]) for part in set(parts)
    }
    spreads = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        for case, part in zip(cases, parts, strict=True):
            unaware = case.resolved.calibration.model_copy(update={"evidence": evidence[part]})
            job = case.run.job.model_copy(update={"on_oom": "report", "calibration": unaware})
            spreads.append(estimate_job(job).log_sd_time)
    return spreads


def _left_out_row(case: Case, log_error: float, spread: float, level: float) -> Row:
    """`log_error` is the fit's: ln(measured / predicted)."""
    predicted = case.measured_s * math.exp(-log_error)
    factor = math.exp(spread * float(normal_quantile(0.5 + level / 2)))
    field = _speed_field(case.run)
    assert field is not None
    return Row(figure="speed", field=field, measured=case.measured_s, predicted=predicted, low=predicted / factor,
               high=predicted * factor, **_of_run(case.run, case.resolved))  # fmt: skip


def without(runs: Iterable[MeasuredRun], held: str | None, *, base: str = "hf-peft") -> tuple[float, float] | None:
    """(median, mean) error of runs whose group a joint fit has not seen, with some parameters held at their priors.

    Parameters
    ----------
    runs : measured runs with a speed.
    held : a coefficient; `hardware` or `stacks`, all their factors; `everything`; None: nothing is held.
    base : the profile whose priors hold.

    Returns
    -------
    None where no free parameter is of that name, so that nothing would change.
    """
    problem, _, _ = stack_problem([run for run in _checked_runs(runs) if _speed_field(run) is not None], base)
    kept = [i for i in problem.free if held is None or not _is_of(problem.parameters[i], held)]
    if held is not None and len(kept) == len(problem.free):
        return None
    fewer = problem.with_free(kept)
    errors, _ = left_out_errors(fewer, [group_of(case.run) for case in fewer.cases])
    if errors is None:
        raise FitError("all runs share one group, so none can be left out")
    shares = np.abs(np.expm1(-errors))
    return float(np.median(shares)), float(np.mean(shares))


def _is_of(parameter: Parameter, held: str) -> bool:
    if held == "hardware":
        return parameter.hardware is not None
    if held == "stacks":
        return parameter.software is not None
    plain = parameter.hardware is None and parameter.software is None
    return held == "everything" or (plain and parameter.coefficient == held)


def after_one_run(left_out: Report) -> Report:
    r"""What one measured run of a new source is worth: its factor on the time, used on the other runs of the source.

    Parameters
    ----------
    left_out : of `cross_validate(runs, by="source")`.

    Returns
    -------
    Report : the speed rows of all other runs. `refused` has the runs that were given, and sources of a single run.

    Notes
    -----
    The run given is the one of median length. The factor is shrunk as a fit would shrink it:

    .. math:: f = \exp\left(\bar e\, \frac{n}{n + (\sigma / s)^2}\right), \quad n = 1

    with the mean log error e, the noise of a measurement `NOISE`, and the prior spread of a factor `FACTOR_LOG_SD`.
    """
    sources: dict[str, list[Row]] = {}
    for row in left_out.rows:
        if row.figure == "speed":
            sources.setdefault(row.source, []).append(row)
    rows: list[Row] = []
    refused = list(left_out.refused)
    for name, of in sources.items():
        if len(of) < 2:
            refused.append(Refusal(id=of[0].id, source=name, reason="the only run of its source"))
            continue
        given = sorted(of, key=lambda row: row.length)[(len(of) - 1) // 2]
        refused.append(Refusal(id=given.id, source=name, reason="the run that the fit was given"))
        factor = math.exp(-given.log_error * shrinkage(1))
        rows += [row.times(factor) for row in of if row is not given]
    return Report(rows=rows, refused=refused, level=left_out.level, how=f"{left_out.how}; then one run of each source")


def shrinkage(runs: int) -> float:
    """Share of a mean log error of `runs` that a stack's factor takes on.

    >>> round(shrinkage(1), 3), round(shrinkage(4), 3)
    (0.962, 0.99)
    """
    return runs / (runs + (NOISE / FACTOR_LOG_SD) ** 2)
