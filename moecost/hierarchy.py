r"""States in tiers (GPU, host memory, disk): what each holds, and when the traffic between them hides.

For models beyond the memory of their GPUs: ZeRO-Infinity and MoESys. An estimate streams over the host link by
`offload`; these are the papers' own bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float

FULL_STATE_BYTES: Final = 16
"""Of a parameter in mixed precision with AdamW: weight 2, gradient 2, copy 4, moments 4 and 4."""
WORKING_BYTES: Final = 4
"""Of a sparse parameter on the GPU: weight and gradient in 16 bits."""
MASTER_BYTES: Final = 12
"""Of a sparse parameter on disk: copy and two moments in fp32."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes that each tier holds, over all machines. [byte]"""

    gpu: FloatLike
    host: FloatLike
    disk: FloatLike

    def fits(self, *, gpu: FloatLike, host: FloatLike, disk: FloatLike) -> bool | NDArray[np.bool_]:
        """Whether all three hold what they must, given what there is of each over all machines. [byte]"""
        return (self.gpu <= gpu) & (self.host <= host) & (self.disk <= disk)


def moesys_tiers(
    *, dense_parameters: FloatLike, sparse_parameters: FloatLike, num_layers: FloatLike, active_share: FloatLike
) -> Tiers:
    r"""What MoESys keeps where.

    .. math:: 16 D + 4 \alpha S / L \text{ (GPU)}, \quad 16 \alpha S \text{ (host)}, \quad 12 S \text{ (disk)}

    Parameters
    ----------
    dense_parameters : D, that every token passes.
    sparse_parameters : S, of all experts.
    num_layers : L, layers with experts; the sparse states of one are on the GPUs at a time.
    active_share : alpha, chance that a sparse parameter is in use, so that host memory caches it.

    Notes
    -----
    Source: SE-MoE / MoESys, arXiv:2205.10034v3, Eqs 1 and 2.

    >>> tiers = moesys_tiers(dense_parameters=5e9, sparse_parameters=200e9, num_layers=12, active_share=0.1)
    >>> round(float(tiers.gpu) / 1e9, 2), round(float(tiers.host) / 1e9), round(float(tiers.disk) / 1e9)
    (86.67, 320, 2400)
    """
    active = as_float(active_share) * sparse_parameters
    return Tiers(
        gpu=FULL_STATE_BYTES * as_float(dense_parameters) + WORKING_BYTES * active / num_layers,
        host=FULL_STATE_BYTES * active,
        disk=MASTER_BYTES * as_float(sparse_parameters),
    )


def offload_efficiency(*, flops_per_byte: FloatLike, bytes_per_s: FloatLike, peak_flops_per_s: FloatLike) -> FloatLike:
    r"""Share of the peak that is left where compute waits for every transfer.

    .. math:: \frac{a\, W}{a\, W + P}

    Parameters
    ----------
    flops_per_byte : a, done for each byte that is moved: `s b` for weights and gradients, `s b / 4` for optimizer
        states, `24 h c` for activation checkpoints every c layers (s tokens, b sequences, width h).
    bytes_per_s : W, of the slower tier to one GPU. [byte/s]
    peak_flops_per_s : P, of the GPU. [FLOP/s]

    Notes
    -----
    Source: Rajbhandari et al. 2021 (arXiv:2104.07857), section 4. Without overlap; with it, `streamed_seconds`.

    >>> round(float(offload_efficiency(flops_per_byte=1024 * 2, bytes_per_s=70e9, peak_flops_per_s=70e12)), 3)
    0.672
    """
    done = as_float(flops_per_byte) * bytes_per_s
    return done / (done + peak_flops_per_s)


def streamed_seconds(
    *,
    compute_s: FloatLike,
    gathered_bytes: FloatLike = 0.0,
    link_bytes_per_s: FloatLike = np.inf,
    host_bytes: FloatLike = 0.0,
    host_bytes_per_s: FloatLike = np.inf,
    disk_bytes: FloatLike = 0.0,
    disk_bytes_per_s: FloatLike = np.inf,
) -> FloatLike:
    r"""Time of a layer whose weights come one layer ahead: the slowest of compute and three links. [s]

    .. math:: \max\left(t,\; B_{link}/W_{link},\; B_{host}/W_{host},\; B_{disk}/W_{disk}\right)

    Parameters
    ----------
    compute_s : of the layer. [s]
    gathered_bytes, link_bytes_per_s : dense slices from other GPUs.
    host_bytes, host_bytes_per_s : experts from host memory.
    disk_bytes, disk_bytes_per_s : those that host memory did not hold.

    Notes
    -----
    Source: the prefetch of MoESys (arXiv:2205.10034, section 3). The first layer's transfer is exposed.

    >>> float(streamed_seconds(compute_s=19.2e-3, host_bytes=2.5e9, host_bytes_per_s=25e9))
    0.1
    """
    links = [gathered_bytes / as_float(link_bytes_per_s), host_bytes / as_float(host_bytes_per_s)]
    return as_float(np.maximum.reduce(np.broadcast_arrays(compute_s, *links, disk_bytes / as_float(disk_bytes_per_s))))


def ring_is_steady(*, load_s: FloatLike, compute_s: FloatLike, sections: FloatLike) -> bool | NDArray[np.bool_]:
    """Whether a ring of sections of GPU memory never waits: one loads while the others compute.

    Source: inference of MoESys (arXiv:2205.10034, section 3): load <= (K - 1) compute.

    >>> bool(ring_is_steady(load_s=0.3, compute_s=0.1, sections=4))
    True
    """
    return load_s <= (as_float(sections) - 1.0) * compute_s
