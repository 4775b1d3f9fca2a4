"""The pieces of work that a probe times, and the loop that times them.

A `Clock` does a `Task` several times and says how long each took: on a real device it is `TorchClock`; any other law
of time can stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np

from moecost.errors import MoECostError
from moecost.probe_record import Timing

Size = Literal["small", "full"]
"""`small` is for a CPU, where the probe shall end within a minute."""

COLLECTIVES: Final = ("allreduce", "allgather", "alltoall")
PASSES: Final = ("forward", "step", "checkpointed")
"""Forward; forward and backward; forward, recomputed forward and backward."""


@dataclass(frozen=True)
class Task:
    """Work of one kind.

    Attributes
    ----------
    kind : with its sizes,

        * `gemm`: a product of `rows` x `in_features` and `in_features` x `out_features`;
        * `copy`, `add`: `elements` copied, or two arrays of them added into a third;
        * `launch`: an addition to one element;
        * `linear`: `layers` linear modules one after the other on one row, `how` a pass;
        * `dequantize`: `elements` held in NF4 expanded to 16 bits;
        * `attention`: causal, `batch` x `heads` x `length` x `head_dim`, `how` a pass;
        * `optimizer`: an AdamW step on `elements`, one tensor;
        * `eager`, `grouped`: a mixture of `experts` with `top_k`, of `hidden` and `intermediate`, on `tokens`, each
          expert called by itself or all in one product, `how` a pass;
        * `allreduce`, `allgather`, `alltoall`: of a buffer of `bytes` over `num_gpus`.
    dtype : of the operands.
    """

    kind: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    how: str = ""

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value:,}" for name, value in self.sizes)
        return " ".join(filter(None, (self.kind, self.how, self.dtype, sizes)))


class Clock(Protocol):
    """What can say how long a task takes."""

    def measure(self, task: Task) -> Sequence[float]:
        """Seconds of each repeat. Raises `CannotMeasureError` where this device cannot do it."""
        ...


class CannotMeasureError(MoECostError):
    """A task that this machine cannot do (memory, a missing package): it is left out, with the reason."""


def task(kind: str, dtype: str, how: str = "", **sizes: int) -> Task:
    """A `Task` with its sizes by name."""
    return Task(kind, dtype, tuple(sizes.items()), how)


def single_tasks(size: Size, dtypes: Sequence[str]) -> list[Task]:
    """All that one device does by itself; the first data type is the one that coefficients are fitted to."""
    main = dtypes[0]
    small = size == "small"
    products = SMALL_PRODUCTS if small else FULL_PRODUCTS
    out = [
        task("gemm", dtype, rows=m, in_features=k, out_features=n)
        for dtype in dtypes
        for m, k, n in (products if dtype == main else products[:2])
    ]
    traffic = (2**20, 2**22) if small else (2**26, 2**28)
    out += [task(kind, main, elements=n) for kind in ("copy", "add") for n in traffic]
    out += [task("launch", main, elements=1)]
    out += [task("linear", main, how, hidden=64, layers=16) for how in PASSES[:2]]
    weights = (2**18,) if small else (4096 * 4096, 4096 * 14336)
    out += [task("dequantize", main, elements=n) for n in weights]
    shapes = SMALL_ATTENTION if small else FULL_ATTENTION
    out += [
        task("attention", main, how, batch=b, heads=h, length=s, head_dim=d)
        for b, h, s, d in shapes
        for how in PASSES[:2]
    ]
    out += [task("optimizer", "fp32", elements=n) for n in ((2**18, 2**20) if small else (2**26, 2**28))]
    mixtures = SMALL_MIXTURES if small else FULL_MIXTURES
    out += [
        task(kind, main, how, experts=e, top_k=k, hidden=h, intermediate=f, tokens=t)
        for e, k, h, f, t in mixtures
        for kind in ("eager", "grouped")
        for how in PASSES
    ]
    return out


SMALL_PRODUCTS: Final = ((512, 512, 512), (1024, 1024, 1024), (256, 512, 1024), (1, 1024, 2048), (1, 2048, 2048))
FULL_PRODUCTS: Final = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (2048, 4096, 14336)),
    *((16, 4096, 14336), (32, 14336, 4096), (64, 8192, 8192)),
)
"""Rows, input and output width: some bound by compute, the last ones by their weights."""
SMALL_ATTENTION: Final = ((1, 4, 256, 64), (2, 4, 512, 64))
FULL_ATTENTION: Final = ((8, 32, 1024, 128), (4, 32, 2048, 128), (1, 32, 8192, 128))
"""Batch, heads, length, head size."""
SMALL_MIXTURES: Final = ((8, 2, 64, 128, 64), (8, 2, 256, 512, 256))
FULL_MIXTURES: Final = ((8, 2, 256, 512, 64), (16, 4, 2048, 1024, 8192))
"""Experts, top-k, hidden and intermediate width, tokens: one bound by the host, one by the device."""


def collective_tasks(size: Size, dtype: str, num_gpus: int) -> list[Task]:
    """Exchanges between the devices of one machine; none on a single one."""
    if num_gpus < 2:
        return []
    messages = (2**12, 2**18, 2**20) if size == "small" else (2**12, 2**20, 2**24, 2**26, 2**28)
    return [task(kind, dtype, bytes=n, num_gpus=num_gpus) for kind in COLLECTIVES for n in messages]


@dataclass(frozen=True)
class Timed:
    """What a loop over tasks has brought."""

    timings: tuple[Timing, ...]
    left_out: tuple[str, ...] = ()
    complete: bool = True


def time_tasks(
    tasks: Iterable[Task],
    clock: Clock,
    *,
    told: Callable[[Task], object] = lambda task: None,
    keep: Callable[[Timed], object] = lambda so_far: None,
) -> Timed:
    """Time each task; Ctrl-C ends the loop with what there is.

    Parameters
    ----------
    tasks, clock : what is done, and what does it.
    told : is told of each task before it is done.
    keep : gets what there is after the last task of each kind, so that it can be written.
    """
    found: list[Timing] = []
    left_out: list[str] = []
    kind = ""
    try:
        for one in tasks:
            if kind and one.kind != kind:
                keep(Timed(tuple(found), tuple(left_out), False))
            kind = one.kind
            told(one)
            try:
                found.append(timing(one, clock.measure(one)))
            except CannotMeasureError as error:
                left_out.append(f"{one} left out: {error}")
    except KeyboardInterrupt:
        return Timed(tuple(found), tuple(left_out), False)
    return Timed(tuple(found), tuple(left_out))


def timing(one: Task, seconds: Sequence[float]) -> Timing:
    """Median and spread of repeats; those of no time at all are a clock's doing and refused."""
    repeats = np.asarray(seconds, dtype=float)
    if not repeats.size or not np.all(np.isfinite(repeats)) or np.any(repeats <= 0):
        raise CannotMeasureError(f"its times {list(seconds)[:5]} s are no times")
    low, middle, high = np.quantile(repeats, (0.25, 0.5, 0.75))
    return Timing(
        kind=one.kind,
        dtype=one.dtype,
        sizes=dict(one.sizes),
        how=one.how,
        seconds=float(middle),
        spread=float((high - low) / middle),
        repeats=repeats.size,
    )


def task_of(found: Timing) -> Task:
    """The task that was timed."""
    return Task(found.kind, found.dtype, tuple(found.sizes.items()), found.how)
