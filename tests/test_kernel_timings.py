"""Laws of collectives and grouped products against public timings."""

from __future__ import annotations

import numpy as np
import pytest

from moecost.communication import LINK_RAMP_S, NETWORK_RAMP_S
from moecost.kernel_timings import KernelFit, fit_collectives, fit_grouped_gemm, timings

BOXES_WITHOUT_A_LAW = {"l40s"}
"""20 GB/s on 2 cards, 5 on 4, 2 on 8: PCIe switches of one machine, which no bandwidth describes."""


@pytest.fixture(scope="module")
def collectives() -> list[KernelFit]:
    return fit_collectives()


@pytest.fixture(scope="module")
def grouped() -> list[KernelFit]:
    return fit_grouped_gemm()


def test_the_laws_are_within_ten_percent_of_the_timings(collectives: list[KernelFit], grouped: list[KernelFit]) -> None:
    every = np.concatenate([fit.errors for fit in [*collectives, *grouped]])
    assert len(every) == 1027 + 130  # single messages, and grouped products of known sizes
    assert np.median(every) <= 0.10
    assert np.median(np.concatenate([fit.errors for fit in grouped])) <= 0.10
    for fit in collectives:
        assert fit.gpu in BOXES_WITHOUT_A_LAW or fit.median_error <= 0.14, fit


def test_numbers_are_physical(collectives: list[KernelFit], grouped: list[KernelFit]) -> None:
    links = {"a100-80gb-sxm": 300e9, "h100-80gb-sxm": 450e9, "b200": 900e9, "gb300": 900e9}  # NVLink, one way
    for fit in collectives:
        if fit.gpu in links and fit.machines == "one":
            assert 0.5 < fit.values["bytes_per_s"] / links[fit.gpu] < 1.0
            assert fit.values["ramp_s"] == pytest.approx(LINK_RAMP_S, rel=1.0)
        if "p5.48xlarge" in fit.machines:  # 8 ports of 50 GB/s; nccl-tests measured up to 487
            assert 437e9 < fit.values["bytes_per_s"] < 600e9
            assert fit.values["ramp_s"] == pytest.approx(NETWORK_RAMP_S, rel=0.1)
    for fit in grouped:
        assert 0.4 < fit.values["share_of_peak"] < 0.95


def test_a_law_comes_back_from_timings_made_by_it() -> None:
    made = []
    for n in (2, 4, 8):
        for size in np.geomspace(1e4, 1e9, 8):
            sent = size * (n - 1) / n
            seconds = 4e-6 + 2e-6 * np.log2(n) + sent / 300e9 + np.sqrt(2e-5 * sent / 300e9)
            made.append({"gpu": "x", "kind": "allgather", "bytes": str(size), "num_gpus": str(n), "detail": "one node",
                         "microseconds": str(float(seconds) * 1e6), "achieved": ""})  # fmt: skip
    (fit,) = fit_collectives(made)
    assert fit.values == pytest.approx({"latency_s": 4e-6, "hop_s": 2e-6, "bytes_per_s": 300e9, "ramp_s": 2e-5}, 0.01)


def test_every_timing_has_a_source() -> None:
    assert all(row["source"] for row in timings())
