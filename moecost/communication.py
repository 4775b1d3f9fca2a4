r"""What each layout sends between GPUs, and how long the wire takes for it.

Volumes are bytes that one GPU sends (and receives) over its link, one direction; W is the size of the full buffer and n
the number of GPUs that share it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moecost.arrays import FloatLike

TENSOR_LATENCY_S: Final = 25e-6
"""Latency of a tensor-parallel collective, times log2 of its GPUs; launch included. [s]"""
LINK_RAMP_S: Final = 26e-6
NETWORK_RAMP_S: Final = 300e-6
"""c of `transfer_s`: one set for the collectives of all NVLink GPUs; two p5 machines over EFA (nccl-tests). [s]"""


def transfer_s(*, sent_bytes: FloatLike, bytes_per_s: FloatLike, ramp_s: FloatLike) -> FloatLike:
    r"""Seconds of a large collective beyond its latency, on its way from latency to bandwidth: W / B + sqrt(c W / B).

    Parameters
    ----------
    sent_bytes : what one GPU sends over its link W. [byte]
    bytes_per_s : that large messages reach B. [byte/s]
    ramp_s : c; 0 for a sharp corner between latency and bandwidth. [s]

    Notes
    -----
    Source: NCCL timings of 9 GPUs (`moecost/data/measurements/kernels.csv`): without the root 10 to 15 % off, with
    it 4 to 9 %. `moecost.kernel_timings` fits it.

    >>> round(1e6 * float(transfer_s(sent_bytes=1e9, bytes_per_s=1e12, ramp_s=1e-5)))
    1100
    """
    wire = sent_bytes / bytes_per_s
    return wire + np.sqrt(ramp_s * wire)


def ring_all_reduce_s(
    *, buffer_bytes: FloatLike, num_gpus: FloatLike, bytes_per_s: FloatLike, hop_s: FloatLike
) -> FloatLike:
    r"""Seconds of a ring all-reduce: :math:`2 (n - 1) \alpha + 2 W (n - 1) / (n B)`.

    Source: the alpha-beta model; bandwidth-optimal, Patarasuk & Yuan (2009).

    >>> t = ring_all_reduce_s(buffer_bytes=2.0**30, num_gpus=8, bytes_per_s=450e9, hop_s=5e-6)
    >>> round(1e3 * float(t), 3)
    4.246
    """
    wire = all_reduce_bytes(buffer_bytes=buffer_bytes, num_gpus=num_gpus) / bytes_per_s
    return 2.0 * (num_gpus - 1.0) * hop_s + wire


def tree_all_reduce_s(
    *, buffer_bytes: FloatLike, num_gpus: FloatLike, bytes_per_s: FloatLike, hop_s: FloatLike
) -> FloatLike:
    r"""Seconds of a pipelined double binary tree: :math:`2 \log_2(n)\, \alpha + 2 W / B`; faster for small messages.

    >>> t = tree_all_reduce_s(buffer_bytes=1e6, num_gpus=64, bytes_per_s=50e9, hop_s=5e-6)
    >>> round(1e6 * float(t))
    100
    """
    return 2.0 * np.log2(num_gpus) * hop_s + 2.0 * buffer_bytes / bytes_per_s


def all_reduce_bytes(*, buffer_bytes: FloatLike, num_gpus: FloatLike) -> FloatLike:
    r"""Ring all-reduce: :math:`2 W (n - 1) / n`. [byte]

    Source: NCCL-tests, PERFORMANCE.md.

    >>> all_reduce_bytes(buffer_bytes=8.0, num_gpus=4)
    12.0
    """
    return 2.0 * gather_bytes(buffer_bytes=buffer_bytes, num_gpus=num_gpus)


def gather_bytes(*, buffer_bytes: FloatLike, num_gpus: FloatLike) -> FloatLike:
    r"""All-gather, reduce-scatter or all-to-all of a buffer: :math:`W (n - 1) / n`. [byte]

    Source: NCCL-tests, PERFORMANCE.md.

    >>> gather_bytes(buffer_bytes=8.0, num_gpus=4)
    6.0
    """
    return buffer_bytes * (num_gpus - 1.0) / num_gpus


def tensor_parallel_bytes(
    *, tokens: FloatLike, hidden_size: FloatLike, element_bytes: FloatLike, num_gpus: FloatLike
) -> FloatLike:
    r"""One all-reduce of a layer's output; two a layer forward, two backward.

    Source: Narayanan et al. 2021 (arXiv:2104.04473) sections 2.3, 3.2: 8 b s h (t - 1) / t elements a layer.

    >>> 4 * tensor_parallel_bytes(tokens=4096.0, hidden_size=4096, element_bytes=1, num_gpus=8)
    117440512.0
    """
    return all_reduce_bytes(buffer_bytes=tokens * hidden_size * element_bytes, num_gpus=num_gpus)


def expert_parallel_bytes(*, token_bytes: FloatLike, experts_per_token: FloatLike, num_gpus: FloatLike) -> FloatLike:
    r"""One all-to-all of routed tokens; dispatch and combine forward, both again backward: T k h (e - 1) / e.

    >>> expert_parallel_bytes(token_bytes=4096.0 * 4096 * 2, experts_per_token=2, num_gpus=8)
    58720256.0
    """
    return gather_bytes(buffer_bytes=token_bytes * experts_per_token, num_gpus=num_gpus)


def distinct_machines(*, machines: FloatLike, experts_per_token: FloatLike) -> FloatLike:
    r"""Machines, of `machines` that hold a layer's experts, that a token's experts lie on: :math:`m (1 - (1 - 1/m)^k)`.

    Under uniform routing; a library that sends a token once to each machine sends so many copies, its own included.

    >>> float(distinct_machines(machines=2.0, experts_per_token=2.0))
    1.5
    """
    return machines * (1.0 - (1.0 - 1.0 / machines) ** experts_per_token)


def pipeline_stretch(*, stages: FloatLike, micro_batches: FloatLike, virtual_stages: FloatLike) -> FloatLike:
    r"""Time of a pipelined step over the time without a bubble: :math:`1 + (p - 1) / (v m)`.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.

    >>> pipeline_stretch(stages=8, micro_batches=32, virtual_stages=1)
    1.21875
    """
    return 1.0 + (stages - 1.0) / (virtual_stages * micro_batches)


def tensor_latency(num_gpus: FloatLike, *, gpus_per_node: FloatLike, hop_s: FloatLike) -> FloatLike:
    """Latency of one tensor-parallel all-reduce; 0 on one GPU. [s]

    Beyond one machine its ring takes 2 (n - 1) steps that each wait for the network, `hop_s` long.
    """
    across = np.where(num_gpus > gpus_per_node, 2.0 * (num_gpus - 1.0) * hop_s, 0.0)
    return TENSOR_LATENCY_S * np.log2(num_gpus) + across
