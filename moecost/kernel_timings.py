r"""Public timings of collectives and grouped products, and the laws of `communication` and `roofline` fitted to them.

The step takes the laws' form and the constants `LINK_RAMP_S` and `NETWORK_RAMP_S` from here; what a stack hides of its
transfers, and what its products reach inside a step, is for the calibrations.

.. math:: t_{collective} = a + b \log_2 n + \frac{W}{B} + \sqrt{c \frac{W}{B}}, \qquad
          t_{grouped} = t_0 + E \left(\frac{F}{e P} + \frac{V}{s\,W_{mem}}\right)

One set of numbers a GPU and kind of kernel; weight-gradient products have a share of the peak of their own.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecost.catalog import data_folder
from moecost.communication import all_reduce_bytes, gather_bytes, transfer_s
from moecost.roofline import gemm_flops, grouped_gemm_time
from moecost.specs import GPUSpec
from moecost.units import GB, TERA

COLLECTIVES: Final = ("allreduce", "allgather", "reducescatter", "alltoall")
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelFit:
    """A law fitted to the timings of one GPU: its numbers, and |predicted / measured - 1| in sample."""

    gpu: str
    kind: str
    machines: str  # "one", or what joins several
    values: dict[str, float]
    errors: Array

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))


@cache
def timings() -> tuple[dict[str, str], ...]:
    """Rows of `data/measurements/kernels.csv`; its README has columns and sources."""
    with (data_folder("data") / "measurements" / "kernels.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def fit_collectives(rows: Iterable[dict[str, str]] | None = None) -> list[KernelFit]:
    """The law of each GPU and collective with timings of single messages.

    Rows that are themselves fits, or that name no message size, are left out.
    """
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in timings() if rows is None else rows:
        if row["kind"] in COLLECTIVES and row["bytes"] and "fit" not in row["detail"]:
            where = row["detail"] if "nodes" in row["detail"] else "one"
            groups[row["gpu"], row["kind"], where].append(row)
    return [_collective(*key, group) for key, group in groups.items()]


def _collective(gpu: str, kind: str, machines: str, rows: Sequence[dict[str, str]]) -> KernelFit:
    buffer, n = _column(rows, "bytes"), _column(rows, "num_gpus")
    send = all_reduce_bytes if kind == "allreduce" else gather_bytes
    sent = np.asarray(send(buffer_bytes=buffer, num_gpus=n))
    # bus bandwidth, as nccl-tests has it, is what a GPU sends over the time
    took = np.array([float(r["microseconds"]) * 1e-6 if r["microseconds"] else np.nan for r in rows])
    took = np.where(np.isnan(took), sent / (_column(rows, "achieved") * GB), took)

    def law(latency: Any, hop: Any, rate: Any, ramp: Any) -> Any:
        return latency + hop * np.log2(n) + transfer_s(sent_bytes=sent, bytes_per_s=rate, ramp_s=ramp)

    fastest = float(np.max(sent / took))
    first = {"latency_s": 5e-6, "hop_s": 3e-6, "bytes_per_s": fastest, "ramp_s": 2e-5}
    return _fit(KernelFit(gpu, kind, machines, first, np.zeros(0)), law, took)


def fit_grouped_gemm(rows: Iterable[dict[str, str]] | None = None) -> list[KernelFit]:
    """The law of each GPU with timings of grouped products of known sizes."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in timings() if rows is None else rows:
        if row["kind"] == "grouped_gemm" and row["m"]:
            groups[row["gpu"], row["dtype"]].append(row)
    return [_grouped(gpu, dtype, group) for (gpu, dtype), group in groups.items()]


def _grouped(gpu: str, dtype: str, rows: Sequence[dict[str, str]]) -> KernelFit:
    spec = GPUSpec.load(gpu)
    narrow = dtype.split("-")[0]
    peak = spec.peak_flops_per_s(dtype if dtype in spec.peak_tflops_dense else narrow)
    m, n, k, experts = (_column(rows, name) for name in ("m", "n", "k", "num_experts"))
    flops = np.asarray(gemm_flops(rows=m, in_features=k, out_features=n))
    took = experts * flops / (_column(rows, "achieved") * TERA)
    gradient = np.array(["grad_w" in row["detail"] for row in rows])
    width = 1.0 if narrow == "fp8" else 2.0
    # a weight gradient is written in 4 bytes, other results in 2
    moved = width * m * k + np.where(gradient, 2 * m * n + 4 * n * k, width * n * k + 2 * m * n)

    def law(share: Any, bandwidth: Any, of_gradient: Any, start: Any) -> Any:
        rate = peak * share * np.where(gradient, of_gradient, 1.0)
        reads = spec.bandwidth_bytes_per_s * bandwidth
        each = grouped_gemm_time(flops=flops, bytes_moved=moved, flops_per_s=rate, bytes_per_s=reads)
        return start + experts * each

    first = {"share_of_peak": 0.7, "share_of_bandwidth": 0.6, "gradient_share": 0.8, "start_s": 2e-5}
    return _fit(KernelFit(gpu, f"grouped_gemm {dtype}", "one", first, np.zeros(0)), law, took)


def _column(rows: Sequence[dict[str, str]], name: str) -> Array:
    return np.array([float(row[name] or "nan") for row in rows])


def _fit(start: KernelFit, law: Callable[..., Any], took: Array) -> KernelFit:
    """Least squares of logarithms, robust against single bad timings."""
    from scipy.optimize import least_squares

    names = list(start.values)
    guess = np.log([start.values[name] for name in names])

    def misfit(logs: Array) -> Array:
        return np.asarray(np.log(law(*np.exp(logs)) / took))

    found = least_squares(
        misfit, guess, bounds=(guess - WIDE, guess + WIDE), loss="soft_l1", f_scale=0.1, x_scale="jac"
    )
    values = {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}
    return KernelFit(start.gpu, start.kind, start.machines, values, np.abs(np.expm1(misfit(found.x))))


WIDE: Final = 5.0
"""How far the logarithm of a number may go from where its fit starts."""
