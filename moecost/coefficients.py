"""The fitted numbers of the step, each with its meaning, first value and plausible range."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from moecost.arrays import FloatLike
from moecost.experts import ROUTER_SKEW


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a `Calibration` holds. Shares are of the catalogue's dense peak and bandwidth.

    Attributes
    ----------
    gemm_efficiency : share of the dense peak that a matrix product reaches inside full waves.
    gemm_bandwidth : share of the bandwidth at which a small product reads its operands.
    attention_efficiency : share of the dense peak of the attention core.
    elementwise_bandwidth : share of the bandwidth of elementwise work, with the profile's byte counts.
    dequantize_bandwidth : share of the bandwidth at which quantized weights are expanded.
    optimizer_bandwidth : share of the bandwidth of the optimizer step.
    launch_s : host time of one kernel launch with the Python around it. [s]
    router_skew : spread of the tokens an expert gets, over their mean, at top-2 of 8.
    link_share : share of a GPU's NVLink (or fabric) rate, one way, of transfers that nothing hides.
    pcie_share : share of a GPU's PCIe rate, one way, of transfers between GPUs; no peer-to-peer copies assumed.
    network_share : share of the machine's network, one way, that rings over machines reach.
    exchange_share : share of a GPU's own port to the network, one way, that all-to-alls over machines reach.
    network_hop_s : time of one step of a ring whose GPUs stand in several machines, beyond its bytes. [s]
    host_link_share : share of the PCIe rate, one way, at which weights stream from the host.
    """

    gemm_efficiency: FloatLike = 0.80
    gemm_bandwidth: FloatLike = 0.75
    attention_efficiency: FloatLike = 0.42
    elementwise_bandwidth: FloatLike = 0.75
    dequantize_bandwidth: FloatLike = 0.59
    optimizer_bandwidth: FloatLike = 0.85
    launch_s: FloatLike = 8e-6
    router_skew: FloatLike = ROUTER_SKEW
    link_share: FloatLike = 0.90
    pcie_share: FloatLike = 0.16
    network_share: FloatLike = 0.85
    exchange_share: FloatLike = 0.46
    network_hop_s: FloatLike = 15e-6
    host_link_share: FloatLike = 0.25


@dataclass(frozen=True, slots=True)
class Plausible:
    """Bounds of a coefficient, and the spread of its logarithm where a profile states no prior."""

    log_sd: float
    low: float
    high: float


PLAUSIBLE: Final[dict[str, Plausible]] = {
    "gemm_efficiency": Plausible(0.05, 0.30, 0.95),
    "gemm_bandwidth": Plausible(0.05, 0.40, 1.00),
    "attention_efficiency": Plausible(0.15, 0.15, 0.80),
    "elementwise_bandwidth": Plausible(0.30, 0.20, 1.00),
    "dequantize_bandwidth": Plausible(0.05, 0.20, 0.90),
    "optimizer_bandwidth": Plausible(0.15, 0.20, 1.00),
    "launch_s": Plausible(0.40, 2e-6, 40e-6),
    "router_skew": Plausible(0.30, 0.15, 0.43),
    "link_share": Plausible(0.25, 0.30, 2.00),
    "pcie_share": Plausible(0.50, 0.03, 0.80),
    "network_share": Plausible(0.25, 0.10, 1.20),
    "exchange_share": Plausible(0.25, 0.10, 1.20),
    "network_hop_s": Plausible(0.70, 3e-6, 100e-6),
    "host_link_share": Plausible(0.25, 0.08, 0.90),
}
"""`router_skew` stays below 0.43, where even the least loaded quadrature node of `experts` keeps its tokens."""
RATES: Final = (
    "gemm_efficiency", "gemm_bandwidth", "attention_efficiency", "elementwise_bandwidth", "dequantize_bandwidth",
)  # fmt: skip


def slowed(values: dict[str, Any], factor: FloatLike) -> dict[str, Any]:
    """Coefficients of a stack that takes `factor` times the time: lower rates and longer launches.

    A factor below 1 raises the rates, but none above what is plausible: no stack beats the hardware.
    """
    out = dict(values)
    for name in RATES:
        out[name] = np.minimum(values[name] / factor, PLAUSIBLE[name].high)
    out["launch_s"] = values["launch_s"] * factor
    return out


def hardware_key(architecture: str, compute_dtype: str | None) -> str:
    """What hardware factors are kept by: the architecture in 16 bits, the architecture and type below.

    >>> hardware_key("Blackwell Ultra", "nvfp4"), hardware_key("Hopper", "bf16")
    ('Blackwell fp4', 'Hopper')
    """
    base = {"Blackwell Ultra": "Blackwell"}.get(architecture, architecture)
    narrow = {"nvfp4": "fp4"}.get(compute_dtype or "", compute_dtype)
    return f"{base} {narrow}" if narrow in ("fp8", "fp8-blockwise", "mxfp8", "fp4") else base


COEFFICIENT_NAMES: Final = tuple(f.name for f in fields(Coefficients))
