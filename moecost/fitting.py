r"""Measured runs in, `Calibration` out.

The residual of a run is the logarithm of measured over predicted time. Coefficients are fitted in logarithms, within
their plausible range, each held to its prior by the prior's spread; a soft-L1 loss keeps single bad runs from ruling.

.. math:: \min_c \sum_i w_i\, \rho\!\left(\frac{\ln t_i - \ln \hat t_i(c)}{\sigma}\right)
          + \sum_j \left(\frac{\ln c_j - \ln c_j^0}{s_j}\right)^2

A coefficient that the runs cannot tell from its prior (its spread would shrink by less than half) is held at the prior
and says so. Errors are reported in sample and for left-out groups of runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecost import cost
from moecost.calibration import Calibration, Coefficient
from moecost.coefficients import COEFFICIENT_NAMES, PLAUSIBLE, Coefficients
from moecost.errors import FitError, close_matches
from moecost.estimation import choose_batch, estimate_job, saved_bytes
from moecost.measurements import SPEED_FIELDS, MeasuredRun
from moecost.resolution import Epoch, Resolved, epoch, resolve
from moecost.software import SoftwareProfile
from moecost.step import step_times

NOISE: Final = 0.04
"""Spread of the logarithm of repeated measurements of one job: half of the repeated public runs differ by over 5 %."""
IDENTIFIED: Final = 0.5
"""A coefficient is fitted where the runs shrink its prior spread below this share."""
LEAST_LOG_SD: Final = 0.03
FOLDS: Final = 5

Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Case:
    """A run ready to be predicted again and again: everything that no coefficient changes is done."""

    run: MeasuredRun
    resolved: Resolved
    times: Epoch
    saves_s: float
    steps: float

    def log_error(self, c: Coefficients) -> float:
        """ln(measured / predicted) of the time that was measured."""
        for name, factors in self.resolved.calibration.architecture_factors.items():
            factor = factors.get(self.resolved.gpu.architecture, 1.0)
            c = replace(c, **{name: getattr(c, name) * factor})
        step = float(step_times(self.resolved.workload, self.times.batches, self.resolved.profile, c).seconds)
        return math.log(self.measured() / (step + self.saves_s / self.steps))

    def measured(self) -> float:
        """Seconds of a step, from whichever figure was measured; of a run, its part of what lies beside the steps."""
        run, r = self.run, self.resolved
        epoch_queries = float(r.num_queries)
        if run.step_seconds is not None:
            return run.step_seconds
        if run.queries_per_second is not None:
            return epoch_queries / run.queries_per_second / self.times.steps
        if run.tokens_per_second is not None:
            b = self.times.batches
            tokens = float(np.sum(b.tokens * b.probability)) * self.times.micro_batches
            return tokens / run.tokens_per_second / self.times.steps
        assert run.run_hours is not None
        return run.run_hours * 3600.0 / self.steps


def fit(
    runs: Iterable[MeasuredRun],
    software: str | None = None,
    hold: Mapping[str, float] | Collection[str] = (),
    *,
    name: str | None = None,
) -> Calibration:
    """Coefficients of the step from measured runs.

    Parameters
    ----------
    runs : with a measured speed (`step_seconds`, `queries_per_second`, `tokens_per_second` or `run_hours`).
    software : the profile they are fitted for; None: the one their jobs name.
    hold : coefficients that are not fitted: names (held at the prior), or a mapping to the values to hold.
    name : of the calibration; None: made of profile and date.

    Returns
    -------
    Calibration : coefficients with their spread, covariance, errors in sample and for left-out groups, and range.

    Raises
    ------
    FitError : no run has a speed, the runs are of several profiles, or a name in `hold` is unknown.
    """
    cases = _cases(list(runs), software)
    held = dict(hold) if isinstance(hold, Mapping) else dict.fromkeys(hold)
    for key in held:
        if key not in COEFFICIENT_NAMES:
            near = close_matches(str(key), COEFFICIENT_NAMES) or list(COEFFICIENT_NAMES)
            raise FitError(f"hold: {key!r} is no coefficient; did you mean {', '.join(near)}?")
    priors = _priors(cases, held)
    weights = _weights([c.run for c in cases])
    free, why = _identified(cases, weights, priors)
    best, covariance = _solve(cases, weights, priors, free)
    errors = np.array([case.log_error(best) for case in cases])
    left_out, by = _left_out(cases, weights, priors, free)
    memory = _memory_errors([c.run for c in cases])
    profile = cases[0].resolved.profile
    coefficients = {
        n: Coefficient(
            value=float(getattr(best, n)),
            log_sd=math.sqrt(covariance[free.index(n), free.index(n)]) if n in free else priors[n].log_sd,
            fitted=n in free,
            why="" if n in free else why[n],
        )
        for n in COEFFICIENT_NAMES
    }
    spread = left_out if left_out is not None else errors
    return Calibration(
        name=name or f"{profile.name}-{date.today().isoformat()}",
        software=profile.name,
        date=date.today().isoformat(),
        coefficients=coefficients,
        covariance={a: {b: float(covariance[i, j]) for j, b in enumerate(free)} for i, a in enumerate(free)},
        architecture_factors=cases[0].resolved.calibration.architecture_factors,
        num_runs=len(cases),
        in_sample_error=_mean_error(errors),
        cross_validated_error=None if left_out is None else _mean_error(left_out),
        cross_validated_by=by,
        log_sd_time=max(float(np.sqrt(np.mean(spread**2))), LEAST_LOG_SD),
        log_sd_memory=(
            max(float(np.sqrt(np.mean(memory**2))), LEAST_LOG_SD)
            if memory.size
            else cases[0].resolved.calibration.log_sd_memory
        ),
        range=_range(cases),
        data=_fingerprint(cases),
        notes=(f"fitted on {len(cases)} runs of {', '.join(sorted({c.run.source or 'no source' for c in cases}))}",),
    )


# ------------------------------------------------------------------------------------------------ preparation
def _cases(runs: Sequence[MeasuredRun], software: str | None) -> list[_Case]:
    runs = [run for run in runs if any(getattr(run, f) is not None for f in SPEED_FIELDS)]
    if not runs:
        raise FitError(f"no run has a measured speed; give one of {', '.join(SPEED_FIELDS)}")
    profiles = {run.job.software for run in runs}
    if software is None and len(profiles) > 1:
        raise FitError(f"the runs are of several profiles ({', '.join(sorted(profiles))}); say which with software=")
    out = []
    for run in runs:
        job = run.job
        changes: dict[str, Any] = {"on_oom": "report", "calibration": None}
        if software is not None:
            changes["software"] = software
        resolved = resolve(job.model_copy(update=changes))
        batch, accumulation = choose_batch(resolved, [])
        times = epoch(resolved, batch, accumulation)
        whole = run.run_hours is not None and all(getattr(run, f) is None for f in SPEED_FIELDS[:-1])
        habits = resolved.profile.run
        saves = math.ceil(job.epochs - 1e-9) if habits.saves_each_epoch else 0
        saving = float(cost.save_seconds(saved_bytes=saved_bytes(resolved), bytes_per_s=habits.save_bytes_per_s))
        beside = saves * saving + habits.startup_s if whole else 0.0
        out.append(_Case(run, resolved, times, beside, math.ceil(job.epochs * times.steps - 1e-9)))
    return out


@dataclass(frozen=True)
class _Prior:
    value: float
    log_sd: float
    why: str


def _priors(cases: Sequence[_Case], held: Mapping[str, float | None]) -> dict[str, _Prior]:
    """What is expected of each coefficient before the runs are seen: the profile's word, else the general one."""
    profile: SoftwareProfile = cases[0].resolved.profile
    general, out = Coefficients(), {}
    for name in COEFFICIENT_NAMES:
        said = profile.priors.get(name)
        value = said.value if said else float(getattr(general, name))
        log_sd = said.log_sd if said else PLAUSIBLE[name].log_sd
        why = f"prior of {profile.name}: {said.source}" if said else "general prior"
        if name in held:
            asked = held[name]
            value, log_sd, why = (value if asked is None else float(asked)), 0.0, "held as asked"
        out[name] = _Prior(value, log_sd, why)
    return out


def _weights(runs: Sequence[MeasuredRun]) -> Array:
    """Square roots of weights: each source counts alike, as the square root of its runs."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    weights = np.array([counts[run.source] ** -0.5 for run in runs])
    return np.asarray(np.sqrt(weights / weights.mean()))


# ------------------------------------------------------------------------------------------------ the fit
def _at(priors: Mapping[str, _Prior], free: Sequence[str], x: Array) -> Coefficients:
    values: dict[str, Any] = {name: p.value for name, p in priors.items()}
    return Coefficients(**(values | dict(zip(free, np.exp(x).tolist(), strict=True))))


def _residuals(
    cases: Sequence[_Case], weights: Array, priors: Mapping[str, _Prior], free: Sequence[str]
) -> Callable[[Array], Array]:
    def residuals(x: Array) -> Array:
        c = _at(priors, free, x)
        return np.asarray(weights * np.array([case.log_error(c) for case in cases]) / NOISE)

    return residuals


def _start(priors: Mapping[str, _Prior], free: Sequence[str]) -> tuple[Array, Array]:
    return np.log([priors[n].value for n in free]), np.array([priors[n].log_sd for n in free])


def _identified(
    cases: Sequence[_Case], weights: Array, priors: Mapping[str, _Prior]
) -> tuple[list[str], dict[str, str]]:
    """(coefficients that the runs can determine, why the others are held).

    Weakest first, coefficients are held until the runs shrink the spread of each one that is left.
    """
    why = {name: p.why for name, p in priors.items()}
    free = [name for name, p in priors.items() if p.log_sd > 0]
    if not free:
        return [], why
    x, sd = _start(priors, free)
    residuals = _residuals(cases, weights, priors, free)
    at = residuals(x)
    jacobian = np.stack([(residuals(x + h) - at) / STEP for h in np.eye(len(x)) * STEP], axis=1)
    keep = list(range(len(free)))
    while keep:
        information = jacobian[:, keep].T @ jacobian[:, keep] + np.diag(sd[keep] ** -2.0)
        shrunk = np.sqrt(np.diag(np.linalg.inv(information))) / sd[keep]
        worst = int(np.argmax(shrunk))
        if shrunk[worst] <= IDENTIFIED:
            break
        name = free[keep.pop(worst)]
        why[name] = f"{why[name]}; these runs cannot tell it apart (spread {100 * shrunk[worst]:.0f} % of the prior's)"
    return [free[i] for i in keep], why


STEP: Final = 0.02
"""Step of finite differences in the logarithm: wide enough to average over waves of tiles."""


def _solve(
    cases: Sequence[_Case], weights: Array, priors: Mapping[str, _Prior], free: Sequence[str]
) -> tuple[Coefficients, Array]:
    """(best coefficients, covariance of the logarithms of the free ones)."""
    if not free:
        return _at(priors, free, np.array([])), np.zeros((0, 0))
    from scipy.optimize import least_squares

    start, sd = _start(priors, free)
    low = np.log([PLAUSIBLE[n].low for n in free])
    high = np.log([PLAUSIBLE[n].high for n in free])
    runs = _residuals(cases, weights, priors, free)

    def robust(x: Array) -> Array:
        """Residuals whose square is the soft-L1 loss, so that the priors beside them stay quadratic."""
        r = runs(x) / SOFT
        loss = 2.0 * (np.sqrt(1.0 + r**2) - 1.0)
        return np.concatenate([np.sign(r) * np.sqrt(loss) * SOFT, (x - start) / sd])

    found = least_squares(
        robust,
        np.clip(start, low + 1e-9, high - 1e-9),
        bounds=(low, high),
        x_scale=0.1,
        diff_step=[STEP] * len(free),
        xtol=1e-6,
    )
    spread = max(float(np.mean(runs(found.x) ** 2)), (LEAST_LOG_SD / NOISE) ** 2)
    jacobian = np.asarray(found.jac)[: len(cases)]
    information = jacobian.T @ jacobian / spread + np.diag(sd**-2.0)
    return _at(priors, free, found.x), np.linalg.inv(information)


SOFT: Final = 2.0
"""Noise spreads beyond which a run's pull grows no further."""


# ------------------------------------------------------------------------------------------------ errors
def _mean_error(log_errors: Array) -> float:
    return float(np.mean(np.abs(np.expm1(-log_errors))))


def group_of(run: MeasuredRun) -> str:
    """Text that runs which belong on one side of a split share: their group, else all of the job but its batch."""
    if run.group is not None:
        return run.group.split("#")[0]
    job = run.job
    k = job.num_experts_per_tok
    return f"{run.source}|{_model_name(run)}|{job.gpu}|{job.dataset}|{job.sequence_length}|{job.method}|{k}"


def _model_name(run: MeasuredRun) -> str:
    model = run.job.model
    return model if isinstance(model, str) else str(getattr(model, "name", model))


def _left_out(
    cases: Sequence[_Case], weights: Array, priors: Mapping[str, _Prior], free: Sequence[str]
) -> tuple[Array | None, str]:
    """(log errors of each run, predicted by a fit without its group; how the runs were split)."""
    groups = [group_of(c.run) for c in cases]
    names = sorted(set(groups))
    if len(names) < 2:
        return None, ""
    folds = [names[i :: min(FOLDS, len(names))] for i in range(min(FOLDS, len(names)))]
    errors = np.empty(len(cases))
    for fold in folds:
        out = np.array([g in fold for g in groups])
        kept = [case for case, o in zip(cases, out, strict=True) if not o]
        best, _ = _solve(kept, weights[~out], priors, free)
        for i, case in enumerate(cases):
            if out[i]:
                errors[i] = case.log_error(best)
    return errors, f"{len(folds)} folds of {len(names)} groups (runs that differ in their batch alone are one group)"


def _memory_errors(runs: Sequence[MeasuredRun]) -> Array:
    kinds = {"allocated": "allocated_gib", "reserved": "reserved_gib", "nvidia-smi": "device_gib"}
    errors = []
    for run in runs:
        if run.peak_memory_gib is not None:
            e = estimate_job(run.job.model_copy(update={"on_oom": "report"}))
            errors.append(math.log(run.peak_memory_gib / getattr(e.memory, kinds[run.memory_kind or "reserved"])))
    return np.array(errors)


def _range(cases: Sequence[_Case]) -> dict[str, tuple[float, float]]:
    batches = [float(np.max(c.times.batches.sequences)) for c in cases]
    shortest = [float(np.min(c.times.batches.padded_length)) for c in cases]
    longest = [float(c.resolved.worst_length) for c in cases]
    return {
        "micro_batch_size": (min(batches), max(batches)),
        "sequence_length": (min(shortest), max(longest)),
    }


def _fingerprint(cases: Sequence[_Case]) -> str:
    """Hash of the runs, so that a calibration can be traced to its data."""
    text = "\n".join(sorted(repr(c.run.model_dump(exclude={"job": {"model", "calibration"}})) for c in cases))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
