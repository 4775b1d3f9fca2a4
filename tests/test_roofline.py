"""Roofline, tiles and waves against worked numbers and the founding paper's kernels."""

from __future__ import annotations

import paper_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost.roofline import gemm_compute_time, gemm_flops, ridge_point, roofline_time, smooth_maximum

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

A100 = {"peak_flops_per_s": 312e12, "bytes_per_s": 2039e9}  # datasheet, 80 GB SXM


@pytest.mark.parametrize(
    ("peak", "bandwidth", "ridge"),
    [(312e12, 2039e9, 153), (989e12, 3350e9, 295), (989e12, 4800e9, 206), (149.7e12, 696e9, 215)],
)
def test_ridge_points_of_datasheets(peak: float, bandwidth: float, ridge: float) -> None:
    """A100-80 SXM, H100 SXM, H200, A40: dense 16-bit peak over bandwidth, divided by hand."""
    assert ridge_point(peak_flops_per_s=peak, bytes_per_s=bandwidth) == pytest.approx(ridge, abs=0.5)


def test_a_thin_product_on_an_a100_is_bound_by_memory() -> None:
    """128 x 4096 x 14336 in bf16: 15.03 GFLOP and 122.2 MB, so 48.2 us of compute and 59.9 us of traffic."""
    flops = gemm_flops(rows=128, in_features=4096, out_features=14336)
    moved = 2 * (128 * 4096 + 4096 * 14336 + 128 * 14336)
    assert flops == pytest.approx(15.03e9, rel=1e-3)
    assert moved == pytest.approx(122.2e6, rel=1e-3)
    assert roofline_time(flops=flops, bytes_moved=0.0, **A100) == pytest.approx(48.2e-6, rel=1e-2)
    assert roofline_time(flops=0.0, bytes_moved=moved, **A100) == pytest.approx(59.9e-6, rel=1e-2)
    assert roofline_time(flops=flops, bytes_moved=moved, **A100) == pytest.approx(59.9e-6, rel=1e-2)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "sms", "tiles", "waves"),
    [
        (1793, 1793, 4096, 108, 120, 2),  # NVIDIA's matrix multiplication guide, section 3: one column too many
        (8192, 14336, 4096, 132, 3584, 28),  # stas00/ml-engineering: an H100 SXM
        (8192, 14336, 4096, 148, 3584, 25),
        (8192, 14336, 4096, 152, 3584, 24),
    ],
)
def test_tiles_and_waves(rows: int, columns: int, depth: int, sms: int, tiles: int, waves: int) -> None:
    """Time in units of a full wave of 128 x 256 tiles."""
    assert -(-rows // 128) * -(-columns // 256) == tiles
    rate = 1e14
    wave = 2 * 128 * 256 * depth * sms / rate
    t = gemm_compute_time(rows=rows, in_features=depth, out_features=columns, num_sms=sms, flops_per_s=rate)
    assert t == pytest.approx(waves * wave, rel=1e-12)


def test_less_than_a_wave_is_spread_over_all_sms() -> None:
    """1792 x 1792 on 108 SMs is 98 tiles: split-K takes 98/108 of a wave."""
    size = {"rows": 1792, "in_features": 4096, "out_features": 1792}
    t = gemm_compute_time(**size, num_sms=108, flops_per_s=1e14)
    assert t == pytest.approx(98 / 108 * 2 * 128 * 256 * 4096 * 108 / 1e14)
    assert t == pytest.approx(gemm_flops(**size) / 1e14)  # whole tiles: no loss


def test_a_long_reduction_is_split() -> None:
    """Fig. 6 of arXiv:2408.04693: 4096 x 14336 and 14336 x 4096 take the same time (1262 and 1309 us at 1,024 rows)."""
    common = {"rows": 1024, "num_sms": 84, "flops_per_s": 106e12}
    up = gemm_compute_time(in_features=4096, out_features=14336, **common)
    down = gemm_compute_time(in_features=14336, out_features=4096, **common)
    assert down == pytest.approx(up, rel=0.04)


@given(
    rows=st.integers(1, 100_000),
    depth=st.integers(1, 100_000),
    columns=st.integers(1, 300_000),
    sms=st.integers(1, 300),
    more=st.integers(1, 5000),
)
def test_no_product_beats_the_peak_and_more_rows_never_take_less(
    rows: int, depth: int, columns: int, sms: int, more: int
) -> None:
    def seconds(m: int) -> float:
        return float(gemm_compute_time(rows=m, in_features=depth, out_features=columns, num_sms=sms, flops_per_s=1e14))

    least = float(gemm_flops(rows=rows, in_features=depth, out_features=columns)) / 1e14
    assert seconds(rows) >= least * (1 - 1e-12)
    assert seconds(rows + more) >= seconds(rows) * (1 - 1e-12)


@given(a=st.floats(0, 1e3), b=st.floats(0, 1e3), p=st.floats(1, 20))
def test_smooth_maximum_lies_between_maximum_and_sum(a: float, b: float, p: float) -> None:
    found = float(smooth_maximum(a, b, p))
    assert max(a, b) * (1 - 1e-12) <= found <= (a + b) * (1 + 1e-12)
    assert found == pytest.approx(float(smooth_maximum(b, a, p)))


def test_smooth_maximum_by_hand() -> None:
    assert smooth_maximum(3.0, 4.0, 2) == pytest.approx(5.0)
    assert smooth_maximum(3.0, 4.0, 1.0) == 7.0
    assert smooth_maximum(0.0, 0.0, 3) == 0.0


# ------------------------------------------------------------------------------- kernels of arXiv:2408.04693, Fig. 6


def _expert_kernels(kind: str) -> list[tuple[float, float]]:
    pairs = []
    for row in paper_runs.read("kernel_microseconds.csv"):
        name = row["kernel"]
        if row["model"] != "Mixtral" or "router" in name or name.split("_")[0] != kind or name[-2:-1] != "w":
            continue
        key = "expert.dequantize" if kind == "dequant" else f"expert.{name[-2:]}"
        kernel = paper_runs.profiled("Mixtral", row["mode"], int(row["batch_size"])).step.by_kernel[key]
        pairs.append((1e6 * kernel.seconds / kernel.launches, float(row["microseconds"])))
        print(f"{name} {row['mode']} {row['batch_size']}: {pairs[-1][1]:.0f} us, predicted {pairs[-1][0]:.0f}")
    return pairs


@pytest.mark.parametrize(("kind", "tolerance"), [("matmul", 0.10), ("dequant", 0.05)])
def test_expert_kernels_of_the_founding_paper(kind: str, tolerance: float) -> None:
    """15 values each: w1, w2, w3 in five runs at 32 to 1,280 rows on an A40."""
    pairs = _expert_kernels(kind)
    assert len(pairs) == 15
    assert paper_runs.mean_error(pairs) <= tolerance
