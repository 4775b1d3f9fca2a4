"""Checkpoint intervals and expected wall times: worked by hand, by simulation and against a published run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost.errors import InvalidInputError
from moecost.interruptions import (
    break_even_price_ratio,
    daly_interval,
    interrupted_run,
    job_mtbf,
    overhead_share,
    wall_seconds,
    wall_seconds_unsaved,
    young_interval,
)

HOUR = 3600.0
DELTA, MTBF, RESTART = 60.0, 10_800.0, 120.0


def test_intervals_of_young_and_daly() -> None:
    """A minute's checkpoint, an interruption every three hours."""
    assert young_interval(save_s=DELTA, mtbf_s=MTBF) == pytest.approx(1138.42, rel=1e-4)
    assert daly_interval(save_s=DELTA, mtbf_s=MTBF) == pytest.approx(1098.77, rel=1e-4)
    assert daly_interval(save_s=3 * MTBF, mtbf_s=MTBF) == MTBF  # beyond twice the MTBF


@pytest.mark.parametrize(("interval", "inflation"), [(300, 1.2339), (1138.4, 1.1258), (1098.8, 1.1257), (3600, 1.2237)])
def test_wall_time_by_hand(interval: float, inflation: float) -> None:
    found = wall_seconds(useful_s=1.0, interval_s=interval, save_s=DELTA, restart_s=RESTART, mtbf_s=MTBF)
    assert found == pytest.approx(inflation, abs=6e-5)


@pytest.mark.parametrize("restart_fails", [True, False])
def test_wall_time_of_simulated_runs(restart_fails: bool) -> None:
    """Four thousand runs with interruptions drawn from the exponential law."""
    rng = np.random.default_rng(0)
    useful, interval, save, restart, mtbf = 20_000.0, 2_000.0, 200.0, 600.0, 6_000.0

    def run() -> float:
        clock, done = 0.0, 0.0
        while done < useful:
            until = rng.exponential(mtbf)
            if until >= interval + save:  # memoryless: each attempt draws anew
                clock, done = clock + interval + save, done + interval
                continue
            clock += until
            while restart_fails and (lost := rng.exponential(mtbf)) < restart:
                clock += lost
            clock += restart
        return clock

    walls = [run() for _ in range(4000)]
    found = wall_seconds(useful_s=useful, interval_s=interval, save_s=save, restart_s=restart, mtbf_s=mtbf,
                         restart_fails=restart_fails)  # fmt: skip
    assert found == pytest.approx(np.mean(walls), rel=4 * np.std(walls) / np.mean(walls) / 4000**0.5)


def test_wall_time_without_checkpoints_of_simulated_runs() -> None:
    rng = np.random.default_rng(1)
    useful, restart, mtbf = 3_000.0, 300.0, 6_000.0

    def run() -> float:
        clock = 0.0
        while (until := rng.exponential(mtbf)) < useful:
            clock += until + restart
        return clock + useful

    walls = [run() for _ in range(8000)]
    found = wall_seconds_unsaved(useful_s=useful, restart_s=restart, mtbf_s=mtbf)
    assert found == pytest.approx(np.mean(walls), rel=4 * np.std(walls) / np.mean(walls) / 8000**0.5)


@given(save=st.floats(1, 600), mtbf=st.floats(3600, 1e6), factor=st.floats(0.2, 5))
def test_no_other_interval_is_much_better_than_dalys(save: float, mtbf: float, factor: float) -> None:
    """Of all intervals, 0.2 to 5 times as long; save at most a sixth of the MTBF. Young's is nearly as good."""
    common: dict[str, Any] = {"useful_s": 1.0, "save_s": save, "restart_s": 0.0, "mtbf_s": mtbf}
    best = daly_interval(save_s=save, mtbf_s=mtbf)
    chosen = wall_seconds(interval_s=best, **common)
    assert chosen <= wall_seconds(interval_s=best * factor, **common) * (1 + 1e-3)
    young = wall_seconds(interval_s=young_interval(save_s=save, mtbf_s=mtbf), **common)
    assert chosen <= young * (1 + 1e-6)


def test_the_first_order_overhead_comes_near_where_interruptions_are_rare() -> None:
    common: dict[str, Any] = {"interval_s": 1200.0, "save_s": 5.0, "restart_s": 60.0, "mtbf_s": 1e6}
    share = overhead_share(**common)
    assert wall_seconds(useful_s=1.0, **common) - 1 == pytest.approx(share, rel=1e-2)


def test_spot_machines_by_hand() -> None:
    """Two minutes' checkpoint, ten minutes' restart, an interruption every four hours: 1,780 s, 19 % longer, so that
    35 % of the price is 41.6 % of the cost, and 84.1 % of it the border."""
    run = interrupted_run(useful_s=100 * HOUR, save_s=120.0, restart_s=600.0, mtbf_s=4 * HOUR)
    assert run.interval_s == pytest.approx(1780, abs=1)
    assert run.inflation == pytest.approx(1.190, abs=1e-3)
    assert run.break_even_price_ratio == pytest.approx(0.841, abs=1e-3)
    assert break_even_price_ratio(useful_s=100 * HOUR, wall_s=run.wall_s) == pytest.approx(run.break_even_price_ratio)
    on_demand = 100 * 8 * 2.0
    assert run.spot_usd(num_gpus=8, usd_per_gpu_hour=0.35 * 2.0) / on_demand == pytest.approx(0.416, abs=1e-3)
    assert run.saves == 202  # 360,000 s in intervals of 1,780: 203 pieces
    assert run.interruptions == pytest.approx(119.0 / 4, rel=2e-3)


def test_a_run_shorter_than_the_interval_saves_nothing() -> None:
    run = interrupted_run(useful_s=600.0, save_s=120.0, restart_s=60.0, mtbf_s=4 * HOUR)
    assert run.saves == 0
    assert run.interval_s == 600
    assert run.wall_s == wall_seconds_unsaved(useful_s=600.0, restart_s=60.0, mtbf_s=4 * HOUR)


def test_llama_3_405b_was_interrupted_every_three_hours() -> None:
    """419 unexpected interruptions in 54 days on 16,384 H100, 8 a machine (Meta, 2024): once in 3.1 hours, so a machine
    once in 264 days."""
    mtbf = 54 * 24 * HOUR / 419
    assert mtbf / HOUR == pytest.approx(3.1, abs=0.05)
    machine = mtbf * 16_384 / 8
    assert job_mtbf(machine_mtbf_s=machine, num_machines=2048) == pytest.approx(mtbf)
    assert machine / (24 * HOUR) == pytest.approx(264, rel=0.01)


def test_runs_that_never_end_take_forever() -> None:
    assert wall_seconds(useful_s=1e9, interval_s=1e9, save_s=1.0, restart_s=1.0, mtbf_s=60.0) == np.inf
    assert wall_seconds_unsaved(useful_s=1e9, restart_s=1.0, mtbf_s=60.0) == np.inf


def test_scalars_and_arrays_agree() -> None:
    mtbf = np.array([3600.0, 36_000.0, 360_000.0])
    together = interrupted_run(useful_s=20_000.0, save_s=120.0, restart_s=600.0, mtbf_s=mtbf)
    for i, m in enumerate(mtbf):
        apart = interrupted_run(useful_s=20_000.0, save_s=120.0, restart_s=600.0, mtbf_s=float(m))
        assert np.asarray(together.wall_s)[i] == pytest.approx(apart.wall_s, rel=1e-12)
        assert np.asarray(together.saves)[i] == apart.saves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"useful_s": 0.0}, "useful_s=0 must be a finite number above 0"),
        ({"mtbf_s": float("inf")}, "mtbf_s=inf"),
        ({"restart_s": -1.0}, "restart_s=-1 must be a finite number of at least 0"),
        ({"save_s": 0.0}, "give interval_s"),
        ({"interval_s": -5.0}, "interval_s=-5"),
        ({"rule": "guess"}, "'daly' or 'young'"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    run: dict[str, Any] = {"useful_s": 3600.0, "save_s": 60.0, "restart_s": 60.0, "mtbf_s": 10_800.0}
    with pytest.raises(InvalidInputError, match=message):
        interrupted_run(**(run | change))
