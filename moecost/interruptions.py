r"""Runs that are interrupted: how often to save, how long they take, and when spot machines pay.

Interruptions come at random, at a constant rate: M seconds apart in the mean, over all machines of the job. A job on n
machines is interrupted n times as often as one machine. All is expectation: a single run may do better or worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moecost.arrays import FloatLike, as_float
from moecost.cost import cost_usd
from moecost.errors import InvalidInputError
from moecost.units import HOUR
from moecost.validity import positive

Rule = Literal["young", "daly"]


def job_mtbf(*, machine_mtbf_s: FloatLike, num_machines: FloatLike) -> FloatLike:
    """Mean time between interruptions of a job whose machines are interrupted independently. [s]

    >>> job_mtbf(machine_mtbf_s=86400.0, num_machines=8)
    10800.0
    """
    return machine_mtbf_s / num_machines


def young_interval(*, save_s: FloatLike, mtbf_s: FloatLike) -> FloatLike:
    r"""Useful time between two checkpoints that loses least, to first order. [s]

    .. math:: \tau = \sqrt{2\, \delta\, M}

    Parameters
    ----------
    save_s : time that a checkpoint blocks the run, delta. [s]
    mtbf_s : mean time between interruptions of the whole job, M. [s]

    Notes
    -----
    Source: Young (1974), doi:10.1145/361147.361115. For delta much below M.

    >>> round(float(young_interval(save_s=60.0, mtbf_s=10800.0)), 1)
    1138.4
    """
    return np.sqrt(2.0 * as_float(save_s) * mtbf_s)


def daly_interval(*, save_s: FloatLike, mtbf_s: FloatLike) -> FloatLike:
    r"""Useful time between two checkpoints that loses least, to higher order. [s]

    .. math:: \tau = \sqrt{2 \delta M} \left[1 + \tfrac13 \sqrt{\tfrac{\delta}{2M}}
              + \tfrac19 \tfrac{\delta}{2M}\right] - \delta \;\text{ for } \delta < 2M, \text{ else } M

    Notes
    -----
    Source: Daly (2006), doi:10.1016/j.future.2004.11.016. Arguments as for `young_interval`.

    >>> round(float(daly_interval(save_s=60.0, mtbf_s=10800.0)), 1)
    1098.8
    """
    save, mtbf = as_float(save_s), as_float(mtbf_s)
    share = save / (2.0 * mtbf)
    interval = np.sqrt(2.0 * save * mtbf) * (1.0 + np.sqrt(share) / 3.0 + share / 9.0) - save
    return as_float(np.where(share < 1.0, interval, mtbf))


def wall_seconds(
    *,
    useful_s: FloatLike,
    interval_s: FloatLike,
    save_s: FloatLike,
    restart_s: FloatLike,
    mtbf_s: FloatLike,
    restart_fails: bool = True,
) -> FloatLike:
    r"""Expected wall time of a run that saves after every `interval_s` of useful work. [s]

    .. math:: T_w = M e^{R/M} \left(e^{(\tau + \delta)/M} - 1\right) \frac{T_s}{\tau}

    Parameters
    ----------
    useful_s : time the run would take alone, T_s. [s]
    interval_s : useful time between checkpoints, tau; no more than `useful_s`. [s]
    save_s : time that a checkpoint blocks the run, delta. [s]
    restart_s : from an interruption to work again, R: a new machine, start-up, reading the checkpoint. [s]
    mtbf_s : mean time between interruptions of the job, M. [s]
    restart_fails : a restart may be interrupted too; otherwise :math:`M e^{R/M}` becomes :math:`M + R`.

    Notes
    -----
    Source: Daly (2006), doi:10.1016/j.future.2004.11.016. Infinite where no interval is ever got through.

    >>> t = wall_seconds(useful_s=1.0, interval_s=3600.0, save_s=60.0, restart_s=120.0, mtbf_s=10800.0)
    >>> round(float(t), 4)
    1.2237
    """
    mtbf, restart = as_float(mtbf_s), as_float(restart_s)
    with np.errstate(over="ignore"):  # longer than forever
        again = mtbf * np.exp(restart / mtbf) if restart_fails else mtbf + restart
        return as_float(again * np.expm1((as_float(interval_s) + save_s) / mtbf) * useful_s / interval_s)


def wall_seconds_unsaved(*, useful_s: FloatLike, restart_s: FloatLike, mtbf_s: FloatLike) -> FloatLike:
    r"""Expected wall time of a run that saves nothing and begins anew at each interruption. [s]

    .. math:: (M + R) \left(e^{T_s/M} - 1\right)

    Fit for runs shorter than the interval between checkpoints.

    >>> round(float(wall_seconds_unsaved(useful_s=600.0, restart_s=0.0, mtbf_s=10800.0)))  # about T (1 + T / 2M)
    617
    """
    with np.errstate(over="ignore"):
        return as_float((as_float(mtbf_s) + restart_s) * np.expm1(as_float(useful_s) / mtbf_s))


def overhead_share(*, interval_s: FloatLike, save_s: FloatLike, restart_s: FloatLike, mtbf_s: FloatLike) -> FloatLike:
    r"""Time lost over useful time, to first order: :math:`\delta/\tau + (\tau/2 + R)/M`.

    Source: Young (1974). Arguments as for `wall_seconds`.

    >>> overhead_share(interval_s=1000.0, save_s=50.0, restart_s=500.0, mtbf_s=20000.0)
    0.1
    """
    return save_s / interval_s + (interval_s / 2.0 + restart_s) / mtbf_s


def break_even_price_ratio(*, useful_s: FloatLike, wall_s: FloatLike) -> FloatLike:
    """Share of the on-demand price below which spot machines are cheaper: useful over expected wall time.

    >>> break_even_price_ratio(useful_s=3600.0, wall_s=4500.0)
    0.8
    """
    return useful_s / wall_s


@dataclass(frozen=True, slots=True)
class InterruptedRun:
    """What interruptions make of a run, in expectation.

    Attributes
    ----------
    interval_s : useful time between checkpoints; that of the whole run where none is worth its while. [s]
    saves : checkpoints that block the run.
    interruptions : expected over the whole run.
    wall_s : expected time from start to end. [s]
    inflation : wall time over the time of a run left alone, T_w / T_s.
    """

    interval_s: FloatLike
    saves: FloatLike
    interruptions: FloatLike
    wall_s: FloatLike
    inflation: FloatLike

    @property
    def break_even_price_ratio(self) -> FloatLike:
        """Share of the on-demand price below which this run is cheaper on spot machines."""
        return 1.0 / self.inflation

    def spot_usd(self, *, num_gpus: FloatLike, usd_per_gpu_hour: FloatLike) -> FloatLike:
        """Dollars of the run at a spot price. [$]"""
        return cost_usd(hours=self.wall_s / HOUR, num_gpus=num_gpus, usd_per_gpu_hour=usd_per_gpu_hour)


def interrupted_run(
    *,
    useful_s: FloatLike,
    save_s: FloatLike,
    restart_s: FloatLike,
    mtbf_s: FloatLike,
    interval_s: FloatLike | None = None,
    rule: Rule = "daly",
    restart_fails: bool = True,
) -> InterruptedRun:
    """A run under interruptions, with checkpoints as often as loses least.

    Parameters
    ----------
    useful_s, save_s, restart_s, mtbf_s, restart_fails : as for `wall_seconds`. A checkpoint that is written beside the
        work counts with the time for which it blocks it, and must be through before the next one.
    interval_s : useful time between checkpoints; None: by `rule`. [s]
    rule : `daly` or `young`.

    Notes
    -----
    A run shorter than the interval saves nothing: `wall_seconds_unsaved`.

    >>> run = interrupted_run(useful_s=36000.0, save_s=120.0, restart_s=600.0, mtbf_s=4 * 3600.0)
    >>> round(float(run.interval_s)), round(float(run.inflation), 3)
    (1780, 1.19)
    """
    positive(useful_s=useful_s, mtbf_s=mtbf_s)
    positive(zero=True, save_s=save_s, restart_s=restart_s)
    useful = as_float(useful_s)
    if interval_s is None:
        interval_s = _interval(rule, save_s, mtbf_s)
    positive(interval_s=interval_s)
    saved = wall_seconds(
        useful_s=useful,
        interval_s=interval_s,
        save_s=save_s,
        restart_s=restart_s,
        mtbf_s=mtbf_s,
        restart_fails=restart_fails,
    )
    short = np.asarray(useful) <= interval_s
    unsaved = wall_seconds_unsaved(useful_s=useful, restart_s=restart_s, mtbf_s=mtbf_s)
    wall = as_float(np.where(short, unsaved, saved))
    return InterruptedRun(
        interval_s=as_float(np.where(short, useful, interval_s)),
        saves=as_float(np.where(short, 0.0, np.ceil(useful / interval_s) - 1.0)),
        interruptions=wall / mtbf_s,
        wall_s=wall,
        inflation=wall / useful,
    )


def _interval(rule: Rule, save_s: FloatLike, mtbf_s: FloatLike) -> FloatLike:
    if np.any(np.asarray(save_s) == 0.0):
        raise InvalidInputError("save_s=0: checkpoints that cost nothing have no best interval; give interval_s")
    if rule == "daly":
        return daly_interval(save_s=save_s, mtbf_s=mtbf_s)
    if rule == "young":
        return young_interval(save_s=save_s, mtbf_s=mtbf_s)
    raise InvalidInputError(f"rule={rule!r:.40} must be 'daly' or 'young'")
