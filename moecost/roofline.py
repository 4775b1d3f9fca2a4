r"""How long one operator takes on a device: the roofline, and matrix products in tiles and waves."""

from __future__ import annotations

from typing import Final

import numpy as np

from moecost.arrays import FloatLike, as_float
from moecost.units import FLOPS_PER_MAC

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 256
"""The output tile of one thread block; cuBLAS's usual choice for large 16-bit products on Ampere and later."""
TILE_DEPTH: Final = 4096
"""Longest run of the reduction that one thread block takes: longer ones are split (split-K) and fill idle SMs.

Seen in arXiv:2408.04693, Fig. 6: expert products of 4096 x 14336 and of 14336 x 4096 take the same time.
"""


def ridge_point(*, peak_flops_per_s: FloatLike, bytes_per_s: FloatLike) -> FloatLike:
    """Arithmetic intensity above which a device is bound by compute. [FLOP/byte]

    Source: Williams et al. (2009), doi:10.1145/1498765.1498785.

    >>> round(float(ridge_point(peak_flops_per_s=312e12, bytes_per_s=2039e9)))
    153
    """
    return peak_flops_per_s / bytes_per_s


def roofline_time(
    *, flops: FloatLike, bytes_moved: FloatLike, peak_flops_per_s: FloatLike, bytes_per_s: FloatLike
) -> FloatLike:
    r"""Least time an operator can take on a device.

    .. math:: t = \max(F / P,\; B / W)

    Parameters
    ----------
    flops : floating-point operations done. [FLOP]
    bytes_moved : traffic to and from device memory. [byte]
    peak_flops_per_s : dense peak for the data type used. [FLOP/s]
    bytes_per_s : memory bandwidth. [byte/s]

    Notes
    -----
    Source: Williams et al. (2009), doi:10.1145/1498765.1498785 (the roofline bound).
    Assumes that compute and traffic overlap fully. A lower bound: measured kernels take longer.

    >>> float(roofline_time(flops=2e12, bytes_moved=1e9, peak_flops_per_s=1e14, bytes_per_s=1e12))
    0.02
    """
    return np.maximum(flops / peak_flops_per_s, bytes_moved / bytes_per_s)


def gemm_flops(*, rows: FloatLike, in_features: FloatLike, out_features: FloatLike) -> FloatLike:
    """FLOPs of `rows` vectors through one weight matrix. [FLOP]"""
    return float(FLOPS_PER_MAC) * rows * in_features * out_features


def gemm_compute_time(
    *, rows: FloatLike, in_features: FloatLike, out_features: FloatLike, num_sms: FloatLike, flops_per_s: FloatLike
) -> FloatLike:
    r"""Seconds of tensor-core work of `C[rows, out] = A[rows, in] B[in, out]`, tile and wave quantization included.

    .. math:: t = w \frac{2\, T_m T_n \min(k, T_k)\, S}{P}, \quad
              u = \lceil m / T_m \rceil \lceil n / T_n \rceil \max(1, k / T_k), \quad
              w = \begin{cases} u / S & u < S \\ \lceil u / S \rceil & \text{else} \end{cases}

    Parameters
    ----------
    rows, in_features, out_features : m, k, n.
    num_sms : streaming multiprocessors S.
    flops_per_s : what all SMs together reach inside a full wave P. [FLOP/s]

    Notes
    -----
    Source: tile and wave quantization as in NVIDIA's Matrix Multiplication Background guide. Less than one wave is
    taken to be spread over all SMs (split-K), since small products in the founding paper are bound by their weights
    and never by idle SMs. Checked on the 15 expert kernels of arXiv:2408.04693, Fig. 6 (32 to 1,280 rows).

    >>> t = gemm_compute_time(rows=1024.0, in_features=4096, out_features=14336, num_sms=84, flops_per_s=106.3e12)
    >>> round(t * 1e6)  # measured on an A40: 1262 us
    1273
    """
    unit = FLOPS_PER_MAC * TILE_ROWS * TILE_COLUMNS * np.minimum(in_features, TILE_DEPTH) * num_sms / flops_per_s
    columns = np.ceil(out_features / TILE_COLUMNS) * np.maximum(1.0, in_features / TILE_DEPTH)
    share = np.ceil(rows / TILE_ROWS) * columns / num_sms
    return as_float(np.where(share < 1.0, share, np.ceil(share)) * unit)


def grouped_gemm_time(
    *, flops: FloatLike, bytes_moved: FloatLike, flops_per_s: FloatLike, bytes_per_s: FloatLike
) -> FloatLike:
    r"""Seconds of one expert's share of a grouped matrix product: its FLOPs and its traffic do not overlap.

    .. math:: t = F / P + B / W

    Parameters
    ----------
    flops : floating-point operations of the expert's product. [FLOP]
    bytes_moved : its weights, inputs and outputs. [byte]
    flops_per_s, bytes_per_s : what grouped products reach. [FLOP/s], [byte/s]

    Notes
    -----
    Source: training kernels of SimuMax (A100, B200) and DeepGEMM (H800), where the sum fits 2 to 11 % and a maximum,
    with tiles or with padded rows, 9 to 15 %. Half of the peak at about 290 rows on a B200 follows from the weights.

    >>> round(1e6 * float(grouped_gemm_time(flops=2e9, bytes_moved=4e6, flops_per_s=1e15, bytes_per_s=4e12)), 1)
    3.0
    """
    return flops / flops_per_s + bytes_moved / bytes_per_s


def smooth_maximum(a: FloatLike, b: FloatLike, exponent: float) -> FloatLike:
    r"""Power mean :math:`(a^p + b^p)^{1/p}`: the sum at p = 1, the maximum as p grows."""
    if exponent == 1.0:
        return a + b
    larger = np.asarray(np.maximum(a, b), dtype=np.float64)
    ratio = np.divide(np.minimum(a, b), larger, out=np.zeros_like(larger), where=larger > 0)
    return as_float(larger * (1.0 + ratio**exponent) ** (1.0 / exponent))


def sparse_speedup(*, sparsity: FloatLike, share: FloatLike) -> FloatLike:
    r"""Speed-up of a device that skips zero weights, where products with them take `share` of the time.

    .. math:: \frac{1}{1 - z\,\varphi}

    Notes
    -----
    Source: Amdahl's law. Holds for devices that skip any zero (CPU engines, Cerebras); a GPU gains bytes alone from
    unstructured zeros. arXiv:2405.03594 reports "up to 3x" at z = 0.7.

    >>> round(sparse_speedup(sparsity=0.7, share=0.95), 2), round(sparse_speedup(sparsity=0.5, share=0.95), 2)
    (2.99, 1.9)
    """
    return 1.0 / (1.0 - sparsity * share)
