r"""One optimizer step from its operators: forward, recompute and backward, host, optimizer.

.. math:: t_{step} = a\,(t_{forward} + t_{recompute} + t_{backward}) + t_{optimizer} + t_{other}

with a micro-batches a step. Each pass combines GPU time with host time: the host adds where the stack synchronises
with the GPU inside each block, else the two overlap in a power mean. Means are taken over the batches' distribution
*after* the nonlinear terms, not at the mean length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float
from moecost.coefficients import Coefficients
from moecost.communication import pipeline_stretch
from moecost.footprint import trained_elements, trained_on_host, trained_per_gpu
from moecost.operators import NOTHING, Operator, Work, host_bytes_per_s, operators
from moecost.roofline import smooth_maximum
from moecost.software import HostWork, SoftwareProfile
from moecost.workload import Batches, Device, Layout, Workload

HOST_STEP_S: Final = 2.0e-9
"""Time of the host's AdamW a trained weight: 28 bytes at about 14 GB/s, which vectorized CPU optimizers reach. [s]"""
CLIP_PASSES: Final = 3
"""Passes over the gradients of norm clipping: read for the norm, read and written for the scaling."""

Array = NDArray[np.float64]
TIMES: Final = [0, 1, 2, 6]
COUNTS: Final = [3, 4, 5]
"""Rows of `PassTimes` that are times, and that are counts."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass of all micro-batches of a step; arrays run over the operators, means over the batches' distribution.

    Attributes
    ----------
    gpu : GPU time. [s]
    host : time in which the GPU waits for the host, shared out by host work. [s]
    wire : time in which the GPU waits for other GPUs or the host's memory, shared out by transfers. [s]
    launches, flops, bytes : [1], [FLOP], [byte]
    sm_seconds : GPU time times the share of SMs in use. [s]
    """

    gpu: Array
    host: Array
    wire: Array
    launches: Array
    flops: Array
    bytes: Array
    sm_seconds: Array

    @property
    def seconds(self) -> Array:
        """Seconds an operator, host and wire included."""
        return self.gpu + self.host + self.wire

    @property
    def total(self) -> FloatLike:
        """Seconds of the whole pass."""
        return as_float(np.sum(self.seconds, axis=0))


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
    forward_exponent = _forward_exponent(host)
    counts, times = (_of_step(n) for n in passes_of_a_step(workload.layout, batches.per_step))
    beside = _stream_exponent(workload.device)
    first = _one_pass([op.forward for op in ops], batches, coefficients)
    last = _one_pass([op.backward for op in ops], batches, coefficients)
    again = np.array([op.recomputed for op in ops], dtype=float) if recipe.recompute else None
    passes = [
        _mean(first, batches, forward_exponent, beside),
        np.zeros_like(first.plain) if again is None else _mean(first, batches, forward_exponent, beside, again),
        _mean(last, batches, host.overlap_exponent, beside),
    ]
    passes[1] *= recipe.recompute
    for one in passes:  # of one micro-batch so far; launches, FLOPs and bytes know no bubble and no factor
        one[TIMES] *= times
        one[COUNTS] *= counts
    optimizer, clip = optimizer_seconds(workload, profile, coefficients)
    return StepTimes(
        operators=ops,
        forward=PassTimes(*passes[0]),
        recompute=PassTimes(*passes[1]),
        backward=PassTimes(*passes[2]),
        together=PassTimes(*(passes[0] + passes[1] + passes[2])),
        optimizer=_of_step(optimizer),
        other=_of_step(clip) + profile.run.step_overhead_s,
    )


def passes_of_a_step(layout: Layout, per_step: FloatLike) -> tuple[FloatLike, FloatLike]:
    """(micro-batches that one stage of a pipeline runs a step, micro-batch times that it takes, bubble included)."""
    stretch = pipeline_stretch(
        stages=layout.pipeline_parallel, micro_batches=per_step, virtual_stages=layout.virtual_pipeline
    )
    counts = per_step / layout.pipeline_parallel
    return counts, counts * stretch


def micro_batch_seconds(
    workload: Workload, batches: Batches, profile: SoftwareProfile, coefficients: Coefficients
) -> FloatLike:
    """Time of all passes of one micro-batch, the mean of a distribution: `step_times` without its breakdown. [s]

    What each operator adds is summed up in the shape it has, so that a million configurations that share most of
    their operators cost little more than these.
    """
    recipe, host = workload.recipe, profile.host
    ops = operators(workload, batches, profile, coefficients)
    beside, launch_s = _stream_exponent(workload.device), coefficients.launch_s

    def seconds(works: Sequence[Work], exponent: float) -> FloatLike:
        return _total(_summed(works, launch_s), batches, exponent, beside)

    forward_exponent = _forward_exponent(host)
    total = seconds([op.forward for op in ops], forward_exponent)
    total = total + seconds([op.backward for op in ops], host.overlap_exponent)
    if recipe.recompute:
        total = total + recipe.recompute * seconds([op.forward for op in ops if op.recomputed], forward_exponent)
    return total


def _forward_exponent(host: HostWork) -> float:
    """Of the power mean of host and GPU time in the forward pass: 1 where the stack waits for the GPU in each block."""
    return 1.0 if host.synchronises else host.overlap_exponent


def _stream_exponent(device: Device) -> float:
    return SLOW_STREAM_EXPONENT if device.link_is_pcie else STREAM_EXPONENT


def _summed(works: Sequence[Work], launch_s: FloatLike) -> tuple[FloatLike, FloatLike, FloatLike, FloatLike]:
    """GPU time, host work, exposed and overlapped transfers of all operators. [s]"""
    done = [work for work in works if work is not NOTHING]
    return (
        _sum(work.seconds for work in done),
        _sum(work.host * launch_s + work.host_s for work in done),
        _sum(work.wire for work in done if work.wire is not None),
        _sum(work.stream for work in done if work.stream is not None),
    )


def _sum(values: Iterable[FloatLike]) -> FloatLike:
    """Small arrays first: they broadcast to the large ones once."""
    return sum(sorted(values, key=np.size), start=0.0)


def _total(
    summed: tuple[FloatLike, FloatLike, FloatLike, FloatLike], batches: Batches, exponent: float, beside: float
) -> FloatLike:
    """Mean over the batches of one pass: GPU and host combined, what transfers add, waiting for the slowest GPU."""
    gpu, host, wire, stream = summed
    busy = smooth_maximum(gpu, host, exponent)
    seconds = busy + wire
    if np.any(stream):
        seconds = seconds + (smooth_maximum(busy, stream, beside) - busy)
    total = _mean_of(seconds, batches.probability)
    if batches.slowest is not None:
        total = total + _mean_of(busy, batches.slowest - batches.probability)
    return total


def _mean_of(values: FloatLike, weights: FloatLike) -> FloatLike:
    """Weighted sum along the last axis; a single point needs none."""
    weighted = np.asarray(values * weights)
    return as_float(weighted[..., 0] if weighted.shape[-1] == 1 else weighted.sum(axis=-1))


def _of_step(value: FloatLike) -> FloatLike:
    """A number of the whole step; arrays lose the axis of the batches' support, over which they do not vary."""
    return value if np.ndim(value) == 0 else as_float(np.asarray(value)[..., 0])


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of a micro-batch, operator by operator.

    Attributes
    ----------
    plain : means over the batches of the rows of `PassTimes`, as if nothing waited; shape (rows, operators, ...).
    gpu, host, stream : GPU time, host work and overlapped transfers by batch; shape (operators, ..., support). [s]
    """

    plain: Array
    gpu: Array
    host: Array
    stream: Array | None


def _one_pass(works: Sequence[Work], batches: Batches, c: Coefficients) -> _Pass:
    """Only what is combined with other operators batch by batch is kept so; of all else the mean is enough."""
    weights = batches.probability
    shape = np.broadcast_shapes(np.shape(batches.tokens), np.shape(weights), np.shape(c.launch_s))
    gpu, host = np.zeros((len(works), *shape)), np.zeros((len(works), *shape))
    stream: Array | None = None
    plain = np.zeros((7, len(works), *shape[:-1]))
    _, _, wire, launches, flops, moved, sm = plain
    first: dict[int, int] = {}  # siblings share one work
    for i, work in enumerate(works):
        like = first.setdefault(id(work), i)
        if like != i:
            gpu[i], host[i], plain[:, i] = gpu[like], host[like], plain[:, like]
        elif work is not NOTHING:
            gpu[i] = work.seconds
            if not _is_nothing(work.host):
                host[i] = work.host * c.launch_s
            if not _is_nothing(work.host_s):
                host[i] += work.host_s
            launches[i], flops[i] = _over(work.launches, weights), _over(work.flops, weights)
            moved[i], sm[i] = _over(work.bytes, weights), _over(work.sm * gpu[i], weights)
            if work.wire is not None:
                wire[i] = _over(work.wire, weights)
        if work.stream is not None:
            stream = np.zeros_like(gpu) if stream is None else stream
            stream[i] = work.stream
    plain[0] = _over(gpu, weights)
    return _Pass(plain, gpu, host, stream)


def _is_nothing(value: FloatLike) -> bool:
    """A plain 0: the table has zeros already, and a write costs more than this question."""
    return value.__class__ is float and value == 0.0


def _over(values: FloatLike, weights: FloatLike) -> FloatLike:
    """Weighted sums along the last axis, of weights that sum to 1: what does not vary along it is its own mean."""
    if not isinstance(values, np.ndarray):
        return values
    assert isinstance(weights, np.ndarray)
    if values.shape[-1] != weights.shape[-1]:  # the same for all batches
        return as_float(values[..., 0])
    found: FloatLike = values.dot(weights) if weights.ndim == 1 else (values * weights).sum(axis=-1)
    return found


def _mean(done: _Pass, batches: Batches, exponent: float, beside: float, part: Array | None = None) -> Array:
    """Means over the batches of the rows of `PassTimes`; `part` are the operators that run, None all of them.

    GPU and host time are combined; transfers that overlap join them in a power mean, the others add. What is exposed
    beyond the GPU's own time is shared out by host work and by transfers. Waiting for the slowest GPU is `wire`.
    """
    probability = batches.probability

    def together(values: Array) -> Array:
        return values.sum(axis=0) if part is None else np.tensordot(part, values, 1)

    gpu, host = together(done.gpu), together(done.host)
    busy = smooth_maximum(gpu, host, exponent)
    host_share = np.divide(busy - gpu, host, out=np.zeros_like(gpu), where=host > 0)
    mean = done.plain.copy()
    mean[1] = _weighted(done.host, host_share * probability)
    if batches.slowest is not None:
        mean[2] += _weighted(done.gpu + done.host * host_share, batches.slowest - probability)
    if done.stream is not None:
        stream = together(done.stream)
        waits = smooth_maximum(busy, stream, beside) - busy
        share = np.divide(waits, stream, out=np.zeros_like(stream), where=stream > 0)
        mean[2] += _weighted(done.stream, share * probability)
    return mean if part is None else mean * part.reshape(-1, *(1,) * (mean.ndim - 2))


def _weighted(values: Array, weights: FloatLike) -> Array:
    """Sums along the last axis, weights of any sum."""
    return np.asarray(values @ weights if np.ndim(weights) == 1 else (values * weights).sum(axis=-1))


SLOW_STREAM_EXPONENT: Final = 2.0
STREAM_EXPONENT: Final = 4.0
"""Power means in which overlapped transfers join GPU and host time: over PCIe a hard maximum fits public runs worse,
stacks that gather ahead over fast links come near it."""


def optimizer_seconds(
    workload: Workload, profile: SoftwareProfile, coefficients: Coefficients
) -> tuple[FloatLike, FloatLike]:
    """(optimizer, gradient clipping) seconds a step: both bound by memory traffic and by the number of tensors.

    An unfused AdamW reads and writes every element `foreach_copies` times, in the element sizes of weights,
    gradients and states; arXiv:2408.04693 Fig. 4 measured 0.21 s for 2.8e9 bf16 weights on an A40. Optimizers with
    other states scale with their bytes.
    """
    recipe, habits, device = workload.recipe, profile.optimizer, workload.device
    _, tensors, width = trained_elements(workload)
    trained = trained_per_gpu(workload, sharded=workload.layout.zero_stage >= 1)
    rate = device.bytes_per_s * coefficients.optimizer_bandwidth
    copies = habits.foreach_copies * (width + recipe.gradient_bytes + recipe.optimizer_bytes) / 4.0
    layout = workload.layout
    away = trained_on_host(workload, sharded=layout.zero_stage >= 1)
    seconds = (trained - away) * copies / rate
    if layout.offload in ("none", "experts"):
        seconds = seconds + tensors * habits.seconds_per_tensor
    if layout.offload != "none":  # gradients go to the host, which steps there, and weights come back
        rate_of_host = host_bytes_per_s(device, replace(layout, offload="parameters"), coefficients)
        seconds = seconds + away * (recipe.gradient_bytes + width) / rate_of_host + away * HOST_STEP_S
        if layout.offload == "nvme":  # the states are read, and written back
            drives = host_bytes_per_s(device, layout, coefficients)
            seconds = seconds + 2.0 * away * recipe.optimizer_bytes / drives
    clip = trained * CLIP_PASSES * recipe.gradient_bytes / rate if habits.clips_gradients else 0.0
    return seconds, clip
