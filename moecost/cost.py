"""Hours and dollars of a run from the seconds of its steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moecost.arrays import FloatLike, as_float
from moecost.units import HOUR


def run_hours(
    *, steps: FloatLike, step_s: FloatLike, saves: FloatLike, save_s: FloatLike, startup_s: FloatLike
) -> FloatLike:
    """Wall time of a run: its steps, the checkpoints it waits for, and its start. [h]

    >>> float(run_hours(steps=3600, step_s=1.0, saves=1, save_s=0.0, startup_s=0.0))
    1.0
    """
    return (as_float(steps) * step_s + as_float(saves) * save_s + startup_s) / HOUR


def cost_usd(*, hours: FloatLike, num_gpus: FloatLike, usd_per_gpu_hour: FloatLike) -> FloatLike:
    """Dollars of a run at a price a GPU-hour.

    >>> cost_usd(hours=2.0, num_gpus=8, usd_per_gpu_hour=2.5)
    40.0
    """
    return hours * num_gpus * usd_per_gpu_hour


def save_seconds(*, saved_bytes: FloatLike, bytes_per_s: FloatLike) -> FloatLike:
    """Time a run waits for one checkpoint. [s]"""
    return saved_bytes / bytes_per_s


def pareto_front(*, hours: ArrayLike, cost_usd: ArrayLike) -> NDArray[np.bool_]:
    """Which of some runs no other beats: none is as quick and cheaper, or as cheap and quicker.

    Parameters
    ----------
    hours, cost_usd : one a run. A run with a NaN is not on the front, and beats none.

    >>> pareto_front(hours=[1, 2, 2, 3], cost_usd=[9, 5, 6, 7]).tolist()
    [True, True, False, False]
    """
    points = np.stack([np.ravel(np.asarray(hours, dtype=float)), np.ravel(np.asarray(cost_usd, dtype=float))], axis=1)
    known = ~np.isnan(points).any(axis=1)
    front = np.zeros(len(points), dtype=bool)
    distinct, which = np.unique(points[known], axis=0, return_inverse=True)  # by hours, then cost; equal runs once
    cheapest_before = np.minimum.accumulate(np.append(np.inf, distinct[:, 1]))[:-1]
    front[known] = (distinct[:, 1] < cheapest_before)[np.ravel(which)]
    return front
