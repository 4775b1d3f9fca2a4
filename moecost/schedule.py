"""The batches of a run: sequences of a micro-batch, micro-batches of a step, steps of an epoch.

Numbers may be arrays: one `Asked` stands for one job or for many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moecost.arrays import FloatLike, as_float

DEFAULT_QUERIES: Final = 1000
LARGEST_DEFAULT_BATCH: Final = 1024
"""Where no batch is given and more than this would fit, this is used: no one tunes with more on one GPU."""
ROUNDING: Final = 1e-9
"""A hair above a whole number of steps is that number: epochs come as decimal fractions."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is said of a run's batches; None where it is left open.

    Attributes
    ----------
    micro_batch_size, gradient_accumulation_steps, global_batch_size : as in `Job`.
    data_parallel : GPUs with batches of their own, 1 or more.
    pipeline_parallel : stages.
    """

    micro_batch_size: FloatLike | None
    gradient_accumulation_steps: FloatLike | None
    global_batch_size: FloatLike | None
    data_parallel: FloatLike
    pipeline_parallel: FloatLike = 1.0

    @property
    def likely_accumulation(self) -> FloatLike:
        """Micro-batches a step, as far as is said; where a global batch leaves it open enough that gradients pile up
        and a pipeline is full."""
        if self.gradient_accumulation_steps is not None or self.global_batch_size is None:
            return _or_one(self.gradient_accumulation_steps)
        if self.micro_batch_size is None:
            return np.maximum(self.pipeline_parallel, 2.0)
        return np.maximum(self.global_batch_size / self.data_parallel / self.micro_batch_size, 1.0)

    @property
    def whole_steps(self) -> FloatLike:
        """Queries of the fewest whole steps that are `DEFAULT_QUERIES` or more. Where memory sets the micro-batch,
        steps are counted as of one sequence a micro-batch.

        >>> Asked(3, 2, None, data_parallel=4).whole_steps
        1008
        """
        a_step = self._parts if self.global_batch_size is None else self.global_batch_size
        return -(-DEFAULT_QUERIES // a_step) * a_step

    @property
    def is_whole(self) -> Any:
        """Whether the global batch is the product of what else is said, or can be dealt out to it."""
        if self.global_batch_size is None:
            return True
        if self.micro_batch_size is not None and self.gradient_accumulation_steps is not None:
            return self.global_batch_size == self._parts
        return self.global_batch_size % self._parts == 0

    @property
    def _parts(self) -> FloatLike:
        """Sequences of a step that what is said, the global batch apart, makes at the least."""
        return _or_one(self.micro_batch_size) * _or_one(self.gradient_accumulation_steps) * self.data_parallel

    def micro_batch(self, *, largest: FloatLike, rows: FloatLike) -> FloatLike:
        """Sequences of a micro-batch: as asked, else the most that fit, that an epoch's `rows` fill, that divide a
        global batch, and that anyone would use; 1 where not even one fits."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            return self.global_batch_size // self._parts
        filled = np.ceil(np.floor(rows) / self.data_parallel)
        batch = np.maximum(np.minimum(largest, np.minimum(filled, LARGEST_DEFAULT_BATCH)), 1.0)
        if self.global_batch_size is None:
            return batch
        return largest_divisor(self.global_batch_size // self.data_parallel, at_most=batch)

    def accumulation(self, micro_batch_size: FloatLike) -> FloatLike:
        """Micro-batches of a step."""
        if self.gradient_accumulation_steps is not None or self.global_batch_size is None:
            return _or_one(self.gradient_accumulation_steps)
        return self.global_batch_size // (micro_batch_size * self.data_parallel)


def _or_one(value: FloatLike | None) -> FloatLike:
    return 1 if value is None else value


def largest_divisor(number: FloatLike, *, at_most: FloatLike) -> FloatLike:
    """The largest divisor of a whole number that is no larger than a bound of 1 or more.

    >>> float(largest_divisor(12, at_most=5))
    4.0
    """
    pairs = np.stack(np.broadcast_arrays(np.asarray(number, dtype=np.float64), at_most), axis=-1)
    distinct, where = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    found = [next((b for b in range(int(min(n, most)), 0, -1) if n % b == 0), 1) for n, most in distinct.tolist()]
    return as_float(np.array(found, dtype=np.float64)[where.ravel()].reshape(pairs.shape[:-1]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """An epoch of one GPU: `full` micro-batches, then one of `rest` sequences where that is not 0.

    `per_step` is the mean of the micro-batches of an optimizer step.
    """

    full: FloatLike
    rest: FloatLike
    micro_batches: FloatLike
    steps: FloatLike

    @property
    def per_step(self) -> FloatLike:
        return self.micro_batches / self.steps

    def mean(self, full: FloatLike, rest: FloatLike) -> FloatLike:
        """Mean over the micro-batches of what a full one and the last one have."""
        return (self.full * full + (self.micro_batches - self.full) * rest) / self.micro_batches


def schedule(*, rows: FloatLike, micro_batch_size: FloatLike, accumulation: FloatLike) -> Schedule:
    """An epoch of `rows` sequences a GPU.

    >>> found = schedule(rows=10.0, micro_batch_size=4, accumulation=2)
    >>> found.full, found.rest, float(found.micro_batches), float(found.steps)
    (2.0, 2.0, 3.0, 2.0)
    """
    full = rows // micro_batch_size
    rest = rows - full * micro_batch_size
    micro_batches = as_float(full + (rest > 0))
    return Schedule(full, rest, micro_batches, -(-micro_batches // accumulation))


def run_steps(*, epochs: FloatLike, steps_an_epoch: FloatLike) -> FloatLike:
    """Optimizer steps of a run, 1 or more."""
    return np.maximum(np.ceil(epochs * steps_an_epoch - ROUNDING), 1.0)


def run_saves(*, epochs: FloatLike, saves_each_epoch: bool) -> FloatLike:
    """Checkpoints of a run."""
    return np.ceil(epochs - ROUNDING) if saves_each_epoch else 0.0
