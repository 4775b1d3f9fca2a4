r"""From timings to the coefficients that they imply.

.. math:: \min_c \sum_i \rho\!\left(\ln t_i - \ln \hat t_i(c)\right)
          + \sum_j \left(\frac{\ln c_j - \ln c_j^0}{s}\right)^2

over the coefficients that the timings tell, with a spread :math:`s` so wide that the timings rule. All others are
those of the calibration that the software profile names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecost.calibration import Calibration, Coefficient
from moecost.coefficients import COEFFICIENT_NAMES, PLAUSIBLE, hardware_key
from moecost.probe.laws import LATENCY, seconds
from moecost.probe.tasks import COLLECTIVES, Task, task_of
from moecost.probe_record import PROBED, Peaks, ProbeRecord, Timing
from moecost.software import SoftwareProfile

TELLS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemm": ("gemm_efficiency", "gemm_bandwidth"),
    "copy": ("elementwise_bandwidth",),
    "add": ("elementwise_bandwidth",),
    "linear": ("launch_s",),
    "dequantize": ("dequantize_bandwidth",),
    "attention": ("attention_efficiency",),
    "optimizer": ("optimizer_bandwidth",),
    **{kind: ("link_share", LATENCY.format(kind)) for kind in COLLECTIVES},
}
"""Coefficients that each kind of task is timed for. Mixtures check them: they are predicted, not fitted. Nor is a bare
`launch`: the coefficient includes the Python around it, as `linear` does."""
WIDE: Final = 2.0
"""Spread of the logarithm of what is expected of a number before it is probed: nothing."""
FAR: Final = 6.0
"""How far the logarithm of a number may go from where its fit starts."""
SOFT: Final = 0.05
"""Misfit of a logarithm beyond which the pull of a timing grows no further."""
LEAST: Final = 0.02
"""Least spread of a timing's logarithm: clocks of a device wander by as much."""
KNOWN: Final = 0.3
"""A number whose logarithm the timings leave more open than this is not taken from them."""
ALONE_LOG_SD: Final = 0.05
"""What a kernel that runs alone leaves open of the same one inside a step; a judgement."""
STACK_LOG_SD: Final[Mapping[str, float]] = {"elementwise_bandwidth": 0.2, "launch_s": 0.2}
"""The same of numbers that a stack has its part in, by the bytes it moves and the Python around its launches."""
FAR_OUT: Final = math.log(1.25)
"""A value that is farther than this outside of what is plausible tells of something else than of the machine."""
LATENCY_S: Final = 2e-5
"""Where the search for a latency starts. [s]"""

Array = NDArray[np.float64]


def calibration(record: ProbeRecord, profile: SoftwareProfile, base: Calibration, architecture: str) -> Calibration:
    """The base with all that the probe tells in its place, and the probe's timings beside what that predicts.

    Parameters
    ----------
    record : timings and the peaks that shares are of.
    profile : the stack, whose counts of launches and copies give the coefficients their meaning.
    base : of that stack.
    architecture : of the device; the base's factors on what was probed are of other devices, and go.
    """
    start = {name: float(getattr(base.values(architecture, None), name)) for name in COEFFICIENT_NAMES}
    fitted, spreads, vague = _fit(record, profile, start)
    coefficients = dict(base.coefficients)
    notes = [*record.notes, *vague]
    for name, log_sd in spreads.items():
        if name not in COEFFICIENT_NAMES:
            continue
        low, high = PLAUSIBLE[name].low, PLAUSIBLE[name].high
        value = min(max(fitted[name], low), high)
        if abs(math.log(fitted[name] / value)) > FAR_OUT:
            notes.append(
                f"{name} is not taken from the probe: {fitted[name]:.3g} was measured, {low:.3g} to {high:.3g} is "
                "plausible; was the machine busy?"
            )
            continue
        if not math.isclose(value, fitted[name]):
            notes.append(f"{name}={fitted[name]:.3g} was measured; {value:.3g} is the nearest that is plausible")
        coefficients[name] = Coefficient(
            value=value,
            log_sd=math.hypot(log_sd, STACK_LOG_SD.get(name, ALONE_LOG_SD)),
            why=f"{PROBED} on {record.device_name}, {record.date}",
        )
    return base.model_copy(
        update={
            "name": f"probe-{record.device}-{record.date}",
            "software": profile.name,
            "date": record.date,
            "coefficients": coefficients,
            "covariance": {},
            "hardware_factors": _relative_factors(base, architecture, set(spreads)),
            "notes": (
                f"coefficients of kernels that ran alone, over those of {base.name}; no run was seen of this machine",
                *base.notes,
            ),
            "probe": record.model_copy(
                update={"timings": _predicted(record, profile, {**start, **fitted}), "notes": tuple(notes)}
            ),
        }
    )


def _relative_factors(base: Calibration, architecture: str, probed: set[str]) -> dict[str, dict[str, float]]:
    """Factors by hardware: of what was probed only those of narrower types on this device, over its own in 16 bits."""
    own = hardware_key(architecture, None)
    out = {}
    for name, factors in base.hardware_factors.items():
        if name in probed:
            narrow = {k: f / factors.get(own, 1.0) for k, f in factors.items() if k.startswith(f"{own} ")}
            factors = narrow
        if factors:
            out[name] = dict(factors)
    return out


def _predicted(record: ProbeRecord, profile: SoftwareProfile, values: Mapping[str, float]) -> tuple[Timing, ...]:
    return tuple(
        t.model_copy(update={"predicted": seconds(task_of(t), record.peaks, profile, values)}) for t in record.timings
    )


def _fit(
    record: ProbeRecord, profile: SoftwareProfile, start: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """(values of what the timings tell, spreads of their logarithms, what they leave open)."""
    from scipy.optimize import least_squares

    peaks = record.peaks
    used = [(t, task_of(t)) for t in record.timings if t.kind in TELLS and _is_main(t, record.timings)]
    used = [(t, task) for t, task in used if seconds(task, peaks, profile, start) is not None]
    names = list(dict.fromkeys(_own(name, peaks) for t, _ in used for name in TELLS[t.kind]))
    if not names:
        return {}, {}, []
    took = np.log([t.seconds for t, _ in used])
    noise = np.array([max(LEAST, t.spread / IQR_OF_NORMAL) for t, _ in used])
    first = np.log([start.get(name, LATENCY_S) for name in names])

    def misfit(x: Array) -> Array:
        values = {**start, **dict(zip(names, np.exp(x), strict=True))}
        lawful = np.array([seconds(task, peaks, profile, values) for _, task in used], dtype=float)
        return np.asarray((took - np.log(lawful)) / noise)

    def all_of(x: Array) -> Any:
        u = misfit(x) * noise / SOFT  # the square of the root below is the soft-L1 loss
        robust = np.sign(u) * np.sqrt(2.0 * (np.sqrt(1.0 + u**2) - 1.0)) * SOFT / noise
        return np.concatenate([robust, (x - first) / WIDE])

    found = least_squares(all_of, first, bounds=(first - FAR, first + FAR), diff_step=[1e-4], xtol=1e-8, ftol=1e-10)
    slopes = np.asarray(found.jac)[: len(used)]
    covariance = np.linalg.inv(slopes.T @ slopes + np.eye(len(names)) / WIDE**2)
    spreads = dict(zip(names, np.sqrt(np.diag(covariance)), strict=True))
    left = misfit(found.x) * noise
    values, sure, vague = {}, {}, []
    for name, x in zip(names, found.x, strict=True):
        spread = math.hypot(spreads[name], _typical_misfit(name, used, left, peaks))
        if spread <= KNOWN:
            values[name], sure[name] = float(np.exp(x)), spread
        elif name in COEFFICIENT_NAMES:
            vague.append(f"{name} is not taken from the probe: its timings leave a spread of {100 * spread:.0f} %")
    return values, sure, vague


IQR_OF_NORMAL: Final = 1.349
"""Interquartile range of a normal law of spread 1."""


def _own(name: str, peaks: Peaks) -> str:
    return "pcie_share" if name == "link_share" and peaks.link_is_pcie else name


def _is_main(t: Timing, all_of_them: Sequence[Timing]) -> bool:
    """Products in the first data type alone: other types have rates of their own."""
    return t.kind != "gemm" or t.dtype == next(other.dtype for other in all_of_them if other.kind == "gemm")


def _typical_misfit(name: str, used: Sequence[tuple[Timing, Task]], left: Array, peaks: Peaks) -> float:
    """Median misfit of the tasks that a number is fitted to: what its law does not say of this device."""
    of_it = [abs(left[i]) for i, (t, _) in enumerate(used) if name in {_own(n, peaks) for n in TELLS[t.kind]}]
    return float(np.median(of_it))
