r"""Measured runs in, `Calibration` out.

The residual of a run is the logarithm of measured over predicted time. Coefficients are fitted in logarithms, within
their plausible range, each held to its prior by the prior's spread; a soft-L1 loss keeps single bad runs from ruling.

.. math:: \min_c \sum_i w_i\, \rho\!\left(\frac{\ln t_i - \ln \hat t_i(c)}{\sigma}\right)
          + \sum_j \left(\frac{\ln c_j - \ln c_j^0}{s_j}\right)^2

A coefficient that the runs cannot tell from its prior (its spread would shrink by less than half) is held at the prior
and says so. Errors are reported in sample and for left-out groups of runs.

`fit` serves one stack. It starts from the calibration that the stack's estimates already use: its values are the
priors, its spreads theirs, and one factor on the time, shrunk to that of the stack, takes what a machine has of its
own. `fit_stacks` serves many at once: the coefficients are shared, each stack has one factor on its
time, shrunk to 1, and some coefficients a factor by GPU architecture: what is known of one stack serves the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecost import cost
from moecost.calibration import Calibration, Coefficient
from moecost.coefficients import COEFFICIENT_NAMES, PLAUSIBLE, Coefficients, hardware_key, slowed
from moecost.errors import FitError, FitWarning, MoECostError, close_matches
from moecost.estimation import choose_batch, estimate_job, saved_bytes
from moecost.measurements import SPEED_FIELDS, MeasuredRun
from moecost.probe_record import PROBED
from moecost.resolution import Epoch, Resolved, epoch, resolve
from moecost.schedule import run_saves, run_steps
from moecost.software import SoftwareProfile
from moecost.step import step_times
from moecost.units import HOUR

NOISE: Final = 0.04
"""Spread of the logarithm of repeated measurements of one job: half of the repeated public runs differ by over 5 %."""
SOFT: Final = 2.0
"""Noise spreads beyond which a run's pull grows no further."""
IDENTIFIED: Final = 0.5
"""A coefficient is fitted where the runs shrink its prior spread below this share."""
LEAST_LOG_SD: Final = 0.03
FOLDS: Final = 5
STEP: Final = 0.02
"""Step of finite differences in the logarithm: wide enough to average over waves of tiles."""
FACTOR_LOG_SD: Final = 0.20
"""Prior spread of a stack's factor on its time, and of an architecture's factor on a coefficient."""

OWN_FACTOR_LOG_SD: Final = 0.30
"""Prior spread of the factor that a user's own runs have on their stack's time: their machine, versions and data."""
PRIORS: Final = "priors"
"""`base` of a fit that starts from what the profile expects before any run is seen."""

HARDWARE_FACTORS: Final[dict[str, dict[str, float]]] = {
    "gemm_efficiency": {
        **{"Hopper": 0.80, "Hopper fp8": 0.75, "Hopper fp8-blockwise": 0.60},
        **{"Blackwell": 0.65, "Blackwell fp8": 0.75, "Blackwell mxfp8": 0.65, "Blackwell fp4": 0.58},
        **{"CDNA3": 0.60, "CDNA3 fp8": 0.60, "CDNA4": 0.60, "CDNA4 fp8": 0.60, "CDNA4 fp4": 0.55},
    },
    "elementwise_bandwidth": {"Ada Lovelace": 1.3},
}
"""First values of factors relative to Ampere in 16 bits: newer parts and narrower types reach less of a higher peak;
Ada's large L2 serves elementwise work."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A run ready to be predicted again and again: everything that no coefficient changes is done."""

    run: MeasuredRun
    resolved: Resolved
    times: Epoch
    beside_s: float  # of the run's measured hours, what lies beside its steps. [s]
    steps: float
    cache: dict[str, float] = field(default_factory=dict)

    def log_error(self, c: Coefficients) -> FloatArray:
        """ln(measured / predicted) of the time that was measured; arrays of coefficients have shape (n, 1)."""
        r = self.resolved
        step = step_times(r.workload, self.times.batches, r.profile, c).seconds
        return np.log(self.measured_s / (step + self.beside_s / self.steps))

    @property
    def measured_s(self) -> float:
        """Seconds of a step, from whichever figure was measured; of a run, with what lies beside the steps."""
        if "measured" not in self.cache:
            self.cache["measured"] = self._measured()
        return self.cache["measured"]

    def _measured(self) -> float:
        run, steps = self.run, self.times.steps
        if run.step_seconds is not None:
            return run.step_seconds
        if run.queries_per_second is not None:
            return float(self.resolved.num_queries) / run.queries_per_second / steps
        if run.tokens_per_second is not None:
            b = self.times.batches
            tokens = float(np.sum(b.tokens * b.probability)) * self.times.micro_batches * self.resolved.data_parallel
            return tokens / run.tokens_per_second / steps
        assert run.run_hours is not None
        return run.run_hours * HOUR / self.steps


FloatArray = Any  # a float, or an array over several sets of coefficients


@dataclass(frozen=True)
class Parameter:
    """One number of a fit: a coefficient, or a factor on one for a GPU architecture or a stack."""

    coefficient: str
    value: float
    log_sd: float
    why: str = ""
    hardware: str | None = None  # a GPU architecture, or a compute type
    software: str | None = None

    @property
    def name(self) -> str:
        where = self.hardware or self.software
        return f"{self.coefficient} of {where}" if where else self.coefficient

    @property
    def bounds(self) -> tuple[float, float]:
        """Of its logarithm. A factor may not leave three of its prior spreads."""
        if self.hardware or self.software:
            return math.log(self.value) - 3 * self.log_sd, math.log(self.value) + 3 * self.log_sd
        p = PLAUSIBLE[self.coefficient]
        return math.log(p.low), math.log(p.high)

    def applies(self, case: Case) -> bool:
        if self.hardware is not None:
            return self.hardware == _hardware(case)
        return self.software is None or case.resolved.profile.name == self.software


@dataclass(frozen=True)
class Problem:
    """Cases with their weights, all parameters at their priors, and which of them are free."""

    cases: Sequence[Case]
    weights: Array
    parameters: Sequence[Parameter]
    free: Sequence[int] = ()

    @property
    def start(self) -> Array:
        return np.log([self.parameters[i].value for i in self.free])

    @property
    def spread(self) -> Array:
        return np.array([self.parameters[i].log_sd for i in self.free])

    def coefficients(self, case: Case, x: Array) -> Coefficients:
        """Of one case, at sets of free parameters x of shape (sets, free); arrays of shape (sets, 1)."""
        values: dict[str, Any] = {}
        factor: Any = 1.0
        position = {index: k for k, index in enumerate(self.free)}
        for i, p in enumerate(self.parameters):
            if p.applies(case):
                k = position.get(i)
                value = np.full((len(x), 1), p.value) if k is None else np.exp(x[:, k : k + 1])
                if p.software is not None:
                    factor = value
                else:
                    values[p.coefficient] = values.get(p.coefficient, 1.0) * value
        for name in {p.coefficient for p in self.parameters if p.hardware}:
            values[name] = np.minimum(values[name], PLAUSIBLE[name].high)
        return Coefficients(**slowed(values, factor))

    def log_errors(self, x: Array) -> Array:
        """ln(measured / predicted), shape (sets, cases)."""
        x = np.atleast_2d(x)
        out = np.empty((len(x), len(self.cases)))
        for j, case in enumerate(self.cases):
            out[:, j] = case.log_error(self.coefficients(case, x))
        return out

    def residuals(self, x: Array) -> Array:
        """In noise spreads, weighted; shape (sets, cases)."""
        return np.asarray(self.weights * self.log_errors(x) / NOISE)

    def differences(self, x: Array) -> tuple[Array, Array]:
        """(residuals at x, their derivatives; shape (cases, free)), all sets of one call at once."""
        around = self.residuals(np.vstack([x, x + np.eye(len(x)) * STEP]))
        return around[0], (around[1:] - around[0]).T / STEP

    def with_free(self, free: Sequence[int]) -> Problem:
        return Problem(self.cases, self.weights, self.parameters, tuple(free))

    def without(self, out: NDArray[np.bool_]) -> Problem:
        kept = [case for case, o in zip(self.cases, out, strict=True) if not o]
        return Problem(kept, self.weights[~out], self.parameters, self.free)


def fit(
    runs: Iterable[MeasuredRun],
    software: str | None = None,
    hold: Mapping[str, float] | Collection[str] = (),
    *,
    name: str | None = None,
    base: str | Path | Calibration | None = None,
) -> Calibration:
    """Coefficients of the step of one stack, from its measured runs.

    Parameters
    ----------
    runs : with a measured speed (`step_seconds`, `queries_per_second`, `tokens_per_second` or `run_hours`).
    software : the profile they are fitted for; None: the one their jobs name.
    hold : coefficients that are not fitted: names (held where the fit starts), or a mapping to the values to hold.
    name : of the calibration; None: made of profile and date.
    base : the calibration to start from (itself, its name or path), or `"priors"`: what the profile expects before any
        run is seen. None: the calibration that the profile names; where that was fitted on this stack alone, its
        priors, so that no fit starts from its own runs.

    Returns
    -------
    Calibration : coefficients with their spread, covariance, errors in sample and for left-out groups, and range. From
        a `base`, a factor on the stack's time is always among what is fitted, and `evidence` and `range` include the
        base's. Where the fit meets the runs no better than the base does, be they fitted or each left out in turn, the
        base's numbers are kept and a `FitWarning` says so.

    Raises
    ------
    FitError : no run has a speed, the runs are of several profiles, or a name in `hold` is unknown.
    """
    given = list(runs) if isinstance(runs, Iterable) else [runs]
    runs = _with_speed(given)
    profiles = {run.job.software for run in runs}
    if software is None and len(profiles) > 1:
        raise FitError(f"the runs are of several profiles ({', '.join(sorted(profiles))}); say which with software=")
    cases = [_case(run, software) for run in runs]
    profile, held = cases[0].resolved.profile, _held(hold)
    start = _base(base, profile)
    parameters = _parameters(cases, held) if start is None else _from_base(start, profile.name, held)
    problem, why = _identified(Problem(cases, _weights(runs), parameters), always=f"time of {profile.name}")
    name = name or f"{profile.name}-{date.today().isoformat()}"
    memory = memory_errors(given)
    found = _calibration(problem, why, name, profile.name, memory)
    if start is None:
        return found
    before = _mean_error(problem.log_errors(problem.start)[0])
    if reason := _no_better(problem, found, before):
        text = f"the numbers of {start.name!r} are kept: {reason}"
        warnings.warn(text, FitWarning, stacklevel=2)
        found = _calibration(problem.with_free(()), why, name, profile.name, memory)
        found = found.model_copy(update={"notes": (*found.notes, text)})
    return _continued(found, start, before, len(memory))


def load_probe(path: str | Path) -> Calibration:
    """The calibration in a file that `moecost probe` wrote.

    Raises
    ------
    FitError : it holds another calibration, or something else.
    """
    found = Calibration.load(Path(path))
    if found.probe is None:
        raise FitError(f"{path}: is a calibration, but no probe; a fit starts from it with base=")
    if found.base:
        raise FitError(f"{path}: was fitted to runs from {found.base} already; give the probe's own file, and all runs")
    return found


def fit_probed(
    probes: Sequence[Calibration],
    runs: Iterable[MeasuredRun] = (),
    software: str | None = None,
    *,
    name: str | None = None,
) -> Calibration:
    """A calibration from what was probed on a machine and what was measured of runs there.

    What was probed is what the fit starts from, with its spread; several probes of one device count by theirs. One
    factor on the stack's time takes what a run has beyond its kernels, and one run moves it already.

    Parameters
    ----------
    probes : of one device.
    runs : on that device; none: the probes alone.
    software, name : as for `fit`.

    Raises
    ------
    FitError : no probe, probes of several devices, or runs on another GPU.
    """
    base = _together(probes)
    record, runs = base.probe, list(runs)
    assert record is not None
    for run in runs:
        gpu = resolve(run.job.model_copy(update={"calibration": None, "on_oom": "report"})).gpu
        if gpu.name != record.device:
            raise FitError(f"the probe is of {record.device}, a run of {gpu.name}: fit each GPU by itself")
    if not runs:
        return base if name is None else base.model_copy(update={"name": name})
    return fit(runs, software, name=name, base=base)


def _together(probes: Sequence[Calibration]) -> Calibration:
    """Probes of one device as one: means of logarithms, weighted by their spreads."""
    if not probes or any(one.probe is None for one in probes):
        raise FitError("give at least one calibration that `moecost probe` made")
    devices = sorted({one.probe.device for one in probes if one.probe is not None})
    if len(devices) > 1:
        raise FitError(f"the probes are of several devices ({', '.join(devices)}): fit each by itself")
    last = max(probes, key=lambda one: one.date)
    coefficients = dict(last.coefficients)
    for coefficient in coefficients:
        seen = [c for one in probes if (c := one.coefficients[coefficient]).why.startswith(PROBED) and c.log_sd > 0]
        if len(seen) < 2:
            coefficients[coefficient] = seen[0] if seen else coefficients[coefficient]
            continue
        weights = np.array([c.log_sd**-2 for c in seen])
        mean = float(np.exp(np.average(np.log([c.value for c in seen]), weights=weights)))
        # probes of one machine share what their kernels leave open: their mean is no surer than the best of them
        log_sd = min(c.log_sd for c in seen)
        coefficients[coefficient] = Coefficient(value=mean, log_sd=log_sd, why=f"{PROBED} in {len(seen)} probes")
    return last.model_copy(update={"coefficients": coefficients})


def fit_stacks(runs: Iterable[MeasuredRun], *, name: str, base: str = "hf-peft") -> Calibration:
    """One calibration for many stacks: shared coefficients with factors by architecture and by stack.

    Parameters
    ----------
    runs : with a measured speed and each its own `software`.
    name : of the calibration.
    base : the profile whose priors hold.

    Runs that cannot be resolved (a model or GPU that is not known) are left out; `Calibration.notes` counts them.
    """
    runs = list(runs)
    problem, why, refused = stack_problem(runs, base)
    found = _calibration(problem, why, name, base, memory_errors(runs))
    return found.model_copy(update={"notes": (*found.notes, f"{len(refused)} runs could not be predicted")})


def stack_problem(
    runs: Iterable[MeasuredRun], base: str = "hf-peft"
) -> tuple[Problem, dict[str, str], list[tuple[MeasuredRun, str]]]:
    """(what `fit_stacks` solves, why its other parameters are held, the runs that cannot be predicted and why)."""
    cases: list[Case] = []
    refused: list[tuple[MeasuredRun, str]] = []
    for run in _with_speed(runs):
        try:
            cases.append(_case(run, None))
        except MoECostError as error:
            refused.append((run, str(error)))
    if not cases:
        raise FitError("none of the runs can be predicted; estimate() says why of each")
    problem = Problem(cases, _weights([c.run for c in cases]), stack_parameters(cases, base))
    return *_identified(problem), refused


def stack_parameters(cases: Sequence[Case], base: str) -> list[Parameter]:
    """Shared coefficients at the priors of `base`, factors by architecture and by stack where runs have them."""
    profile = SoftwareProfile.load(base)
    out = [_parameter(n, profile, {}) for n in COEFFICIENT_NAMES]
    seen = {_hardware(c) for c in cases}
    for coefficient, factors in HARDWARE_FACTORS.items():
        for hardware, value in factors.items():
            log_sd = FACTOR_LOG_SD if hardware in seen else 0.0
            out.append(Parameter(coefficient, value, log_sd, "relative to Ampere in 16 bits", hardware=hardware))
    stacks = sorted({c.resolved.profile.name for c in cases})
    return out + [Parameter("time", 1.0, FACTOR_LOG_SD, "shrunk to 1", software=s) for s in stacks]


def _hardware(case: Case) -> str:
    return hardware_key(case.resolved.gpu.architecture, case.resolved.job.compute_dtype)


# ------------------------------------------------------------------------------------------------ preparation
def _with_speed(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    runs = list(runs) if isinstance(runs, Iterable) else [runs]
    if not all(isinstance(run, MeasuredRun) for run in runs):
        raise FitError("runs must be a list of MeasuredRun; moecost.measurements.read() makes them from files")
    found = [run for run in runs if any(getattr(run, f) is not None for f in SPEED_FIELDS)]
    if not found:
        raise FitError(f"no run has a measured speed; give one of {', '.join(SPEED_FIELDS)}")
    return found


def _case(run: MeasuredRun, software: str | None) -> Case:
    job = run.job
    changes: dict[str, Any] = {"on_oom": "report", "calibration": None}
    if software is not None:
        changes["software"] = software
    resolved = resolve(job.model_copy(update=changes))
    times = epoch(resolved, *choose_batch(resolved, []))
    whole = run.run_hours is not None and all(getattr(run, f) is None for f in SPEED_FIELDS[:-1])
    habits = resolved.profile.run
    saves = run_saves(epochs=job.epochs, saves_each_epoch=habits.saves_each_epoch)
    saved = saved_bytes(resolved.workload, resolved.profile)
    saving = cost.save_seconds(saved_bytes=saved, bytes_per_s=habits.save_bytes_per_s)
    beside = float(saves * saving + habits.startup_s) if whole else 0.0
    steps = int(run_steps(epochs=job.epochs, steps_an_epoch=times.steps))
    return Case(run, resolved, times, beside, steps)


def _held(hold: Mapping[str, float] | Collection[str]) -> dict[str, float | None]:
    if isinstance(hold, str):
        hold = [hold]
    held: dict[str, float | None] = dict(hold) if isinstance(hold, Mapping) else dict.fromkeys(hold)
    for key, value in held.items():
        if key not in COEFFICIENT_NAMES:
            near = close_matches(str(key), COEFFICIENT_NAMES) or list(COEFFICIENT_NAMES)
            raise FitError(f"hold: {key!r} is no coefficient; did you mean {', '.join(near)}?")
        low, high = PLAUSIBLE[key].low, PLAUSIBLE[key].high
        if value is not None and not (isinstance(value, int | float) and low <= value <= high):
            raise FitError(f"hold: {key}={value!r} is not plausible; it lies between {low:g} and {high:g}")
    return held


def _parameters(cases: Sequence[Case], held: Mapping[str, float | None]) -> list[Parameter]:
    """The coefficients at the priors of the cases' profile; architecture factors of its calibration are fixed."""
    first = cases[0].resolved
    out = [_parameter(n, first.profile, held) for n in COEFFICIENT_NAMES]
    for coefficient, factors in first.calibration.hardware_factors.items():
        out += [Parameter(coefficient, v, 0.0, hardware=h) for h, v in factors.items()]
    return out


def _base(base: str | Path | Calibration | None, profile: SoftwareProfile) -> Calibration | None:
    """Where a fit starts; None: at the profile's priors."""
    if base == PRIORS:
        return None
    if base is not None:
        return base if isinstance(base, Calibration) else Calibration.load(base)
    shipped = Calibration.load(profile.calibration)
    return shipped if shipped.shared else None


def _from_base(base: Calibration, software: str, held: Mapping[str, float | None]) -> list[Parameter]:
    """The numbers of a calibration with their spreads, its architecture factors fixed, and one factor on the time."""
    out = []
    for n in COEFFICIENT_NAMES:
        c, asked = base.coefficients[n], held.get(n)
        value, log_sd = (c.value, c.log_sd) if n not in held else (c.value if asked is None else float(asked), 0.0)
        out.append(Parameter(n, value, log_sd, "held as asked" if n in held else f"of {base.name}"))
    for coefficient, factors in base.hardware_factors.items():
        out += [Parameter(coefficient, v, 0.0, hardware=h) for h, v in factors.items()]
    factor = base.software_factors.get(software, 1.0)
    return [*out, Parameter("time", factor, OWN_FACTOR_LOG_SD, f"of {base.name}", software=software)]


def _no_better(problem: Problem, found: Calibration, before: float) -> str:
    """Why a fit is worth less than what it started from, on its own runs or on each when left out; else empty."""
    each, _ = left_out_errors(problem, [str(i) for i in range(len(problem.cases))])
    errors = {
        "fitted": found.in_sample_error or 0.0,
        "each left out in turn": 0.0 if each is None else _mean_error(each),
    }
    for how, error in errors.items():
        if error > before:
            count = len(problem.cases)
            return f"they meet the {count} runs within {100 * before:.1f} %, a fit {100 * error:.1f} % ({how})"
    return ""


def _continued(found: Calibration, base: Calibration, before: float, measured_peaks: int) -> Calibration:
    """A fit with what it owes to the calibration that it started from."""
    evidence = {
        kind: {k: found.evidence.get(kind, {}).get(k, 0) + base.evidence.get(kind, {}).get(k, 0) for k in sorted(both)}
        for kind in found.evidence
        if (both := {**found.evidence.get(kind, {}), **base.evidence.get(kind, {})})
    }
    spans = {k: (min(a, base.range.get(k, (a, b))[0]), max(b, base.range.get(k, (a, b))[1]))
             for k, (a, b) in found.range.items()}  # fmt: skip
    return found.model_copy(
        update={
            "base": base.name,
            "base_error": before,
            "software_factors": {**base.software_factors, **found.software_factors},
            "evidence": evidence,
            "range": spans,
            "log_sd_time": _pooled(found.log_sd_time, found.num_runs, base.log_sd_time),
            "log_sd_memory": _pooled(found.log_sd_memory, measured_peaks, base.log_sd_memory),
            "probe": base.probe,
        }
    )


def _pooled(log_sd: float, runs: int, before: float) -> float:
    """Spread of own runs beside that of the base, which counts as `SPREAD_RUNS` runs."""
    return math.sqrt((runs * log_sd**2 + SPREAD_RUNS * before**2) / (runs + SPREAD_RUNS))


SPREAD_RUNS: Final = 5
"""A spread is poorly known from fewer runs: that of 5 by 30 %."""


def _parameter(name: str, profile: SoftwareProfile, held: Mapping[str, float | None]) -> Parameter:
    """What is expected of a coefficient before the runs are seen: the profile's word, else the general one."""
    said = profile.priors.get(name)
    value = said.value if said else float(getattr(Coefficients(), name))
    if name in held:
        asked = held[name]
        return Parameter(name, value if asked is None else float(asked), 0.0, "held as asked")
    if said:
        return Parameter(name, said.value, said.log_sd, f"prior of {profile.name}: {said.source}")
    return Parameter(name, value, PLAUSIBLE[name].log_sd, "general prior")


def _weights(runs: Sequence[MeasuredRun]) -> Array:
    """Square roots of weights: each source counts alike, as the square root of its runs."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[source_of(run)] = counts.get(source_of(run), 0) + 1
    weights = np.array([counts[source_of(run)] ** -0.5 * TRUST[run.trust] for run in runs])
    return np.asarray(np.sqrt(weights / weights.mean()))


TRUST: Final = {1: 0.3, 2: 1.0, 3: 1.0}
"""Weight of a run by its trust: a user's report may leave out what matters."""


# ------------------------------------------------------------------------------------------------ the fit
def _identified(problem: Problem, always: str = "") -> tuple[Problem, dict[str, str]]:
    """(the problem with what the runs can determine set free, why the others are held).

    Weakest first, parameters are held until the runs shrink the prior spread of each one that is left; `always` names
    one that stays free.
    """
    why = {p.name: p.why for p in problem.parameters}
    problem = problem.with_free([i for i, p in enumerate(problem.parameters) if p.log_sd > 0])
    if not problem.free:
        return problem, why
    _, jacobian = problem.differences(problem.start)
    keep, spread = list(range(len(problem.free))), problem.spread
    names = [problem.parameters[i].name for i in problem.free]
    while keep:
        information = jacobian[:, keep].T @ jacobian[:, keep] + np.diag(spread[keep] ** -2.0)
        shrunk = np.sqrt(np.diag(np.linalg.inv(information))) / spread[keep]
        shrunk[[names[k] == always for k in keep]] = 0.0
        worst = int(np.argmax(shrunk))
        if shrunk[worst] <= IDENTIFIED:
            break
        name = names[keep.pop(worst)]
        why[name] = f"{why[name]}; these runs cannot tell it apart (spread {100 * shrunk[worst]:.0f} % of the prior's)"
    return problem.with_free([problem.free[k] for k in keep]), why


def solve(problem: Problem, near: Array | None = None) -> tuple[Array, Array]:
    """(logarithms of the free parameters at the best fit, their covariance); `near` is where to start the search."""
    if not problem.free:
        return np.zeros(0), np.zeros((0, 0))
    from scipy.optimize import least_squares

    start, spread = problem.start, problem.spread
    low, high = np.transpose([problem.parameters[i].bounds for i in problem.free])
    last: dict[bytes, tuple[Any, Any]] = {}

    def both(x: Any) -> tuple[Any, Any]:
        """Residuals whose square is the soft-L1 loss, so that the priors beside them stay quadratic; derivatives."""
        key = x.tobytes()
        if key not in last:
            last.clear()
            r, jacobian = problem.differences(x)
            u = r / SOFT
            root = np.sqrt(1.0 + u**2)
            size = np.sqrt(2.0 * (root - 1.0))
            slope = np.divide(np.abs(u), root * size, out=np.ones_like(u), where=size > 1e-9)
            robust = np.concatenate([np.sign(r) * size * SOFT, (x - start) / spread])
            last[key] = robust, np.vstack([slope[:, None] * jacobian, np.diag(1.0 / spread)])
        return last[key]

    def residuals(x: Any) -> Any:
        return both(x)[0]

    def jacobian(x: Any) -> Any:
        return both(x)[1]

    found = least_squares(
        residuals,
        np.clip(start if near is None else near, low + 1e-9, high - 1e-9),
        jac=jacobian,
        bounds=(low, high),
        x_scale=0.1,
        xtol=1e-5,
        ftol=1e-7,
    )
    left, slopes = problem.differences(found.x)
    noise = max(float(np.mean(left**2)), (LEAST_LOG_SD / NOISE) ** 2)
    return np.asarray(found.x), np.asarray(np.linalg.inv(slopes.T @ slopes / noise + np.diag(spread**-2.0)))


def _calibration(problem: Problem, why: Mapping[str, str], name: str, software: str, memory: Array) -> Calibration:
    best, covariance = solve(problem)
    cases, runs = problem.cases, [c.run for c in problem.cases]
    errors = problem.log_errors(best)[0]
    left_out, by = left_out_errors(problem, [group_of(run) for run in runs])
    first = cases[0].resolved.calibration
    spread = left_out if left_out is not None else errors
    free = {index: k for k, index in enumerate(problem.free)}
    coefficients: dict[str, Coefficient] = {}
    hardware: dict[str, dict[str, float]] = {}
    stacks: dict[str, float] = {}
    for i, p in enumerate(problem.parameters):
        value = float(np.exp(best[free[i]])) if i in free else p.value
        if p.hardware is not None:
            hardware.setdefault(p.coefficient, {})[p.hardware] = value
        elif p.software is not None:
            stacks[p.software] = value
        else:
            coefficients[p.coefficient] = Coefficient(
                value=value,
                log_sd=math.sqrt(covariance[free[i], free[i]]) if i in free else p.log_sd,
                fitted=i in free,
                why="" if i in free else why[p.name],
            )
    names = [problem.parameters[i].name for i in problem.free]
    return Calibration(
        name=name,
        software=software,
        date=date.today().isoformat(),
        coefficients=coefficients,
        covariance={a: {b: float(covariance[i, j]) for j, b in enumerate(names)} for i, a in enumerate(names)},
        hardware_factors=hardware,
        software_factors=stacks,
        num_runs=len(cases),
        in_sample_error=_mean_error(errors),
        cross_validated_error=None if left_out is None else _mean_error(left_out),
        cross_validated_by=by,
        log_sd_time=max(_robust_spread(spread), LEAST_LOG_SD),
        log_sd_memory=max(_robust_spread(memory), LEAST_LOG_SD) if memory.size else first.log_sd_memory,
        range=_range(cases),
        evidence=evidence_of(cases),
        data=_fingerprint(cases),
        notes=(f"fitted on {len(cases)} runs of {', '.join(sorted({source_of(run) for run in runs}))}",),
    )


# ------------------------------------------------------------------------------------------------ errors
def _mean_error(log_errors: Array) -> float:
    return float(np.mean(np.abs(np.expm1(-log_errors))))


def _robust_spread(log_errors: Array) -> float:
    """Standard deviation of a normal law with the same 80 % quantile of |log error|: a few wild runs do not rule it."""
    if log_errors.size < FEW:
        return float(np.sqrt(np.mean(log_errors**2)))
    return float(np.quantile(np.abs(log_errors), 0.8)) / Z80


FEW: Final = 10
"""Runs below which a quantile says less than the mean square."""


Z80: Final = 1.2816
"""|z| that a normal variable stays below with probability 0.8."""


def source_of(run: MeasuredRun) -> str:
    """The publisher of a run: its key, else the first part of its group, else its source."""
    if run.source_key:
        return run.source_key
    if run.group is not None and "/" in run.group:
        return run.group.split("/")[0]
    return run.source or "no source"


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


def left_out_errors(
    problem: Problem, groups: Sequence[str], folds: int = FOLDS, near: Array | None = None
) -> tuple[Array | None, str]:
    """(log errors of each run, predicted by a fit without its group; how the runs were split).

    `near` is where each fit starts its search: the best fit of all runs saves up to 40 % of the time.
    """
    names = sorted(set(groups))
    if len(names) < 2:
        return None, ""
    split = [names[i :: min(folds, len(names))] for i in range(min(folds, len(names)))]
    errors = np.empty(len(problem.cases))
    for fold in split:
        out = np.array([g in fold for g in groups])
        best, _ = solve(problem.without(out), near)
        errors[out] = problem.without(~out).log_errors(best)[0]
    return errors, f"{len(split)} folds of {len(names)} groups (runs that differ in their batch alone are one group)"


def memory_errors(runs: Iterable[MeasuredRun]) -> Array:
    """ln(measured / predicted) of the peaks of runs that have one and can be predicted; no coefficient is fitted."""
    errors = []
    for run in runs:
        if run.peak_memory_gib is None:
            continue
        with contextlib.suppress(MoECostError):
            memory = estimate_job(run.job.model_copy(update={"on_oom": "report"})).memory
            errors.append(math.log(run.peak_memory_gib / getattr(memory, MEMORY_KINDS[run.memory_kind or "reserved"])))
    return np.array(errors)


MEMORY_KINDS: Final = {"allocated": "allocated_gib", "reserved": "reserved_gib", "nvidia-smi": "device_gib"}
"""How memory was read, and the figure of `Memory` that it is compared with."""


def _range(cases: Sequence[Case]) -> dict[str, tuple[float, float]]:
    batches = [float(np.max(c.times.batches.sequences)) for c in cases]
    shortest = [float(np.min(c.times.batches.padded_length)) for c in cases]
    longest = [float(c.resolved.worst_length) for c in cases]
    return {
        "micro_batch_size": (min(batches), max(batches)),
        "sequence_length": (min(shortest), max(longest)),
    }


def evidence_of(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """How many runs of each stack, GPU architecture and method there were."""
    out: dict[str, dict[str, int]] = {"software": {}, "architecture": {}, "method": {}}
    for c in cases:
        r = c.resolved
        for kind, value in (
            ("software", r.profile.name),
            ("architecture", r.gpu.architecture),
            ("method", r.job.method),
        ):
            out[kind][value] = out[kind].get(value, 0) + 1
    return {kind: dict(sorted(counts.items())) for kind, counts in out.items()}


def _fingerprint(cases: Sequence[Case]) -> str:
    """Hash of the runs, so that a calibration can be traced to its data."""
    text = "\n".join(sorted(repr(c.run.model_dump(exclude={"job": {"model", "calibration"}})) for c in cases))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
