"""The rows of a sweep in groups that differ in numbers alone.

Values that are no numbers, and numbers that decide habits (GPUs of a run), form groups; each is resolved by the very
code that resolves one job. `sweep_figures` computes a group, here its figures are put where its rows stand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike
from moecost.errors import MoECostError
from moecost.job import Job
from moecost.resolution import Resolved, price, resolve
from moecost.sweep_axes import Axes, loaded, num_rows, withheld
from moecost.sweep_figures import DIMENSIONS, FIGURES, REASONS, figures_of

Picked: TypeAlias = dict[str, list[int]]
"""Positions in each axis: their product is a part of the rows."""

ROWS_AT_ONCE: Final = 2**15
"""Rows evaluated together: their arrays stay in the cache of a core."""
POINTS: Final = 16
"""Lengths of a padded batch that a row is counted as where it has a distribution of them."""


@dataclass(frozen=True)
class Block:
    """Computed columns of a product of axes, and why rows have no rates, by code."""

    figures: dict[str, NDArray[Any]]
    codes: NDArray[np.int32]
    reasons: dict[str, int] = field(default_factory=lambda: {why: code for code, why in enumerate(REASONS)})

    @classmethod
    def of(cls, rows: int) -> Block:
        """Nothing computed yet."""
        return cls({name: np.empty(rows, kind) for name, kind in FIGURES.items()}, np.empty(rows, np.int32))

    def code(self, reason: str) -> int:
        """Of a reason, new or known."""
        return self.reasons.setdefault(reason, len(self.reasons))

    def put(self, start: int, part: Block) -> None:
        """The rows of a part in their place."""
        rows = slice(start, start + len(part.codes))
        for name, column in self.figures.items():
            column[rows] = part.figures[name]
        self.codes[rows] = np.array([self.code(reason) for reason in part.reasons], np.int32)[part.codes]


def evaluate(axes: Axes, advance: Callable[[int], object] = lambda rows: None) -> Block:
    """All rows of a product; `advance` is told how many are done."""
    block = Block.of(num_rows(axes))
    values: Axes = {name: tuple(loaded(name, value) for value in axis) for name, axis in axes.items()}
    for picked in _groups(values):
        _fill(block, values, picked)
        advance(math.prod(map(len, picked.values())))
    return block


def _groups(axes: Axes) -> Iterator[Picked]:
    """Parts of the rows that differ in numbers alone."""
    for combination in itertools.product(*(_kinds(name, values) for name, values in axes.items())):
        yield dict(zip(axes, combination, strict=True))


def _kinds(name: str, values: Sequence[Any]) -> list[list[int]]:
    """Positions of an axis that can be evaluated together: all its numbers, everything else one by one."""
    numbers = [i for i, v in enumerate(values) if name in DIMENSIONS and isinstance(v, int | float)]
    rest = [[i] for i in range(len(values)) if i not in set(numbers)]
    return [numbers, *rest] if numbers else rest


# ------------------------------------------------------------------------------------------------ one group
@dataclass(frozen=True)
class _Member:
    """A resolved job that stands for rows, and what its GPU-hour costs."""

    picked: Picked
    resolved: Resolved
    usd_per_gpu_hour: float | None

    def is_like(self, other: _Member) -> bool:
        """Equal but for the number of GPUs, several in both."""
        alone = any(m.resolved.job.num_gpus == 1 for m in (self, other))
        return not alone and self.usd_per_gpu_hour == other.usd_per_gpu_hour and self._alike == other._alike

    @property
    def _alike(self) -> tuple[Any, ...]:
        r = self.resolved
        layout = replace(r.workload.layout, data_parallel=0.0)
        return replace(r.workload, layout=layout), r.coefficients, r.profile.name, r.padding


def _fill(block: Block, axes: Axes, picked: Picked) -> None:
    """Evaluate the rows of one group and put them in their place."""
    first = {name: axes[name][positions[0]] for name, positions in picked.items()}
    kept_back = withheld(first.get("method", "full"))
    first = {name: value for name, value in first.items() if name not in kept_back}
    members: list[_Member] = []
    for same_gpus in _one_by_one(picked, "num_gpus"):
        gpus = {"num_gpus": axes["num_gpus"][same_gpus["num_gpus"][0]]} if "num_gpus" in picked else {}
        try:
            member = _member(first | gpus, same_gpus)
        except MoECostError as error:
            _place(block, axes, same_gpus, {}, str(error))
            continue
        like = next((m for m in members if m.is_like(member)), None)
        if like is None:
            members.append(member)
        else:
            like.picked["num_gpus"] += same_gpus["num_gpus"]
    for member in members:
        for part in _parts(member):
            numbers = _numbers(axes, part, first)
            _place(block, axes, part, *figures_of(member.resolved, member.usd_per_gpu_hour, numbers))


def _one_by_one(picked: Picked, name: str) -> Iterator[Picked]:
    """The same rows in parts of one value of an axis, where there is that axis."""
    if name not in picked:
        yield picked
        return
    yield from ({**picked, name: [i]} for i in picked[name])


def _member(fields: Mapping[str, Any], picked: Picked) -> _Member:
    """The group's job, resolved; what is said of its batches is left to the arrays."""
    left_out = {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size"}
    number = isinstance(fields.get("price"), int | float)
    job = Job(**{name: value for name, value in fields.items() if name not in left_out})
    resolved = resolve(job)
    usd = None if number else price(job, resolved.gpu, [])[0]
    return _Member(picked, resolved, usd)


def _parts(member: _Member) -> Iterator[Picked]:
    """Parts of bounded size; of one `sequence_length` where that decides which lengths a batch can have."""
    if member.resolved.padding == "longest":
        each = _one_by_one(member.picked, "sequence_length")
        return itertools.chain.from_iterable(_halves(part, ROWS_AT_ONCE // POINTS) for part in each)
    return _halves(member.picked, ROWS_AT_ONCE)


def _halves(picked: Picked, most_rows: int) -> Iterator[Picked]:
    if math.prod(map(len, picked.values())) <= most_rows:
        yield picked
        return
    longest = max(picked, key=lambda name: len(picked[name]))
    middle = len(picked[longest]) // 2
    for half in (picked[longest][:middle], picked[longest][middle:]):
        yield from _halves({**picked, longest: half}, most_rows)


def _numbers(axes: Axes, picked: Picked, fields: Mapping[str, Any]) -> dict[str, FloatLike]:
    """The numbers of the axes, each along its dimension; one alone is plain."""
    out: dict[str, FloatLike] = {}
    for name in DIMENSIONS:
        if name in fields and isinstance(fields[name], int | float):
            out[name] = _along(name, [float(axes[name][i]) for i in picked[name]])
    return out


def _along(dimension: str, values: Sequence[float]) -> FloatLike:
    if len(values) == 1:
        return values[0]
    shape = [1] * len(DIMENSIONS)
    shape[DIMENSIONS.index(dimension)] = len(values)
    return np.array(values).reshape(shape)


def _place(
    block: Block, axes: Axes, picked: Picked, figures: Mapping[str, FloatLike], why: str | NDArray[np.int32]
) -> None:
    """Put values over `DIMENSIONS` into the rows that are picked; without figures none is known."""
    shape = tuple(map(len, axes.values()))
    where = _index([picked[name] for name in axes])
    for name, column in block.figures.items():
        missing = math.nan if column.dtype.kind == "f" else 0
        column.reshape(shape)[where] = _arranged(figures.get(name, missing), axes)
    codes = np.int32(block.code(why)) if isinstance(why, str) else why
    block.codes.reshape(shape)[where] = _arranged(codes, axes)


def _index(picked: Sequence[list[int]]) -> tuple[Any, ...]:
    """Slices, which are quick, where positions lie side by side."""
    if all(positions[-1] - positions[0] + 1 == len(positions) for positions in picked):
        return tuple(slice(positions[0], positions[-1] + 1) for positions in picked)
    return np.ix_(*picked)


def _arranged(values: Any, axes: Axes) -> Any:
    """An array over `DIMENSIONS` as one over the axes, in their order."""
    if np.ndim(values) == 0:
        return values
    dims = [DIMENSIONS.index(name) for name in axes if name in DIMENSIONS]
    moved = values.transpose(dims + [i for i in range(len(DIMENSIONS)) if i not in dims])
    sizes = iter(moved.shape)
    return moved.reshape([next(sizes) if name in DIMENSIONS else 1 for name in axes])
