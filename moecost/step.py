r"""One optimizer step from its operators: forward, recompute and backward, host, optimizer.

.. math:: t_{step} = a\,(t_{forward} + t_{recompute} + t_{backward}) + t_{optimizer} + t_{other}

with a micro-batches a step. Each pass combines GPU time with host time: the host adds where the stack synchronises
with the GPU inside each block, else the two overlap in a power mean. Means are taken over the batches' distribution
*after* the nonlinear terms, not at the mean length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float
from moecost.coefficients import Coefficients
from moecost.operators import NOTHING, Operator, Work, operators
from moecost.roofline import smooth_maximum
from moecost.software import SoftwareProfile
from moecost.workload import Batches, Workload

CLIP_PASSES: Final = 3
"""Passes over the gradients of norm clipping: read for the norm, read and written for the scaling."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass of all micro-batches of a step; arrays run over the operators, means over the batches' distribution.

    Attributes
    ----------
    gpu : GPU time. [s]
    seconds : with the share of the exposed host time. [s]
    launches, flops, bytes : [1], [FLOP], [byte]
    sm_seconds : GPU time times the share of SMs in use. [s]
    """

    gpu: Array
    seconds: Array
    launches: Array
    flops: Array
    bytes: Array
    sm_seconds: Array

    @property
    def total(self) -> FloatLike:
        """Seconds of the whole pass."""
        return as_float(np.sum(self.seconds, axis=0))

    @property
    def host(self) -> FloatLike:
        """Seconds in which the GPU waits for the host."""
        return as_float(np.sum(self.seconds - self.gpu, axis=0))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one optimizer step by stage; `backward` is the gradient pass alone, `together` all three passes."""

    operators: Sequence[Operator]
    forward: PassTimes
    recompute: PassTimes
    backward: PassTimes
    together: PassTimes
    optimizer: FloatLike
    other: FloatLike

    @property
    def seconds(self) -> FloatLike:
        return self.together.total + self.optimizer + self.other


def step_times(workload: Workload, batches: Batches, profile: SoftwareProfile, coefficients: Coefficients) -> StepTimes:
    """Time of one optimizer step, averaged over the distribution of its batches. [s]"""
    recipe, host = workload.recipe, profile.host
    ops = operators(workload, batches, profile, coefficients)
    forward_exponent = 1.0 if host.synchronises else host.overlap_exponent
    scale = coefficients.time_factor * batches.per_step

    first = _table([op.forward for op in ops], batches, coefficients)
    again = first * np.reshape([op.recomputed for op in ops], (1, -1) + (1,) * (first.ndim - 2))
    last = _table([op.backward for op in ops], batches, coefficients)
    p = batches.probability
    passes = [
        _mean(first, p, forward_exponent) * scale,
        _mean(again, p, forward_exponent) * (scale * recipe.recompute),
        _mean(last, p, host.overlap_exponent) * scale,
    ]
    optimizer, clip = optimizer_seconds(workload, profile, coefficients)
    return StepTimes(
        operators=ops,
        forward=PassTimes(*passes[0]),
        recompute=PassTimes(*passes[1]),
        backward=PassTimes(*passes[2]),
        together=PassTimes(*(passes[0] + passes[1] + passes[2])),
        optimizer=optimizer,
        other=clip + profile.run.step_overhead_s,
    )


def _table(works: Sequence[Work], batches: Batches, c: Coefficients) -> Array:
    """The rows of `PassTimes` for one pass; host seconds stand in the second. Shape (rows, operators, ..., support)."""
    shape = np.broadcast_shapes(np.shape(batches.tokens), np.shape(batches.probability))
    table = np.zeros((6, len(works), *shape))
    gpu, host, launches, flops, moved, sm = table
    for i, work in enumerate(works):
        if work is not NOTHING:
            gpu[i] = work.seconds
            host[i] = work.host * c.launch_s + work.host_s
            launches[i], flops[i], moved[i], sm[i] = work.launches, work.flops, work.bytes, work.sm
    sm *= gpu
    return table


def _mean(table: Array, probability: FloatLike, exponent: float) -> Array:
    """Means over the batches, GPU and host time combined; the exposed host time is shared out by host work."""
    gpu, host = table[0].sum(axis=0), table[1].sum(axis=0)
    exposed = smooth_maximum(gpu, host, exponent) - gpu
    share = np.divide(exposed, host, out=np.zeros_like(exposed), where=host > 0)
    mean = np.asarray((table * probability).sum(axis=-1))
    mean[1] = mean[0] + (table[1] * (share * probability)).sum(axis=-1)
    return mean


def optimizer_seconds(
    workload: Workload, profile: SoftwareProfile, coefficients: Coefficients
) -> tuple[FloatLike, FloatLike]:
    """(optimizer, gradient clipping) seconds a step: both bound by memory traffic and by the number of tensors.

    An unfused AdamW reads and writes every element `foreach_copies` times, in the element sizes of weights,
    gradients and states; arXiv:2408.04693 Fig. 4 measured 0.21 s for 2.8e9 bf16 weights on an A40. Optimizers with
    other states scale with their bytes.
    """
    recipe, habits, device = workload.recipe, profile.optimizer, workload.device
    trained, tensors, width = trained_elements(workload)
    rate = device.bytes_per_s * coefficients.optimizer_bandwidth
    copies = habits.foreach_copies * (width + recipe.gradient_bytes + recipe.optimizer_bytes) / 4.0
    seconds = trained * copies / rate + tensors * habits.seconds_per_tensor
    clip = trained * CLIP_PASSES * recipe.gradient_bytes / rate if habits.clips_gradients else 0.0
    return seconds, clip


def trained_elements(workload: Workload) -> tuple[FloatLike, int, float]:
    """(trained weights, tensors, bytes of one) of the adapters or of the whole model."""
    recipe = workload.recipe
    if recipe.trains_all:
        count, tensors = all_parameters(workload), sum(n * use.matrix.copies for n, use in workload.uses())
        return float(count), tensors, recipe.weight_bytes
    adapted = [(n * u.matrix.copies, u.matrix) for n, u in workload.uses() if u.adapted]
    size = recipe.rank * sum(n * (m.in_features + m.out_features) for n, m in adapted)
    if recipe.decomposes_weights:
        size = size + sum(n * m.out_features for n, m in adapted)
    return size, 2 * sum(n for n, _ in adapted), recipe.adapter_bytes


def all_parameters(workload: Workload) -> int:
    """Parameters of the model, tied weights once."""
    matrices = sum(n * use.matrix.parameters for n, use in workload.uses())
    vectors = sum(block.count * block.layers.vector_parameters for block in workload.blocks)
    return matrices + vectors + workload.model.extra_parameters
