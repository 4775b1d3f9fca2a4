"""The rows of a sweep, evaluated as arrays.

Values that are no numbers, and numbers that decide habits (GPUs of a run), form groups; each is resolved by the very
code that resolves one job. Within a group numbers are arrays in the formulas, each along a dimension of its own: what
does not depend on a number is computed once for all its values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moecost import cost
from moecost.arrays import FloatLike
from moecost.errors import MoECostError
from moecost.estimation import saved_bytes
from moecost.job import Job
from moecost.lengths import mean_cut_length, padded_batch, worst_padded_length
from moecost.memory import max_micro_batch_size, peak, shown
from moecost.resolution import Resolved, longest_of, price, resolve, waited_for
from moecost.schedule import Asked, Schedule, run_saves, run_steps, schedule
from moecost.step import micro_batch_seconds, optimizer_seconds, passes_of_a_step
from moecost.sweep_axes import ADAPTER_FIELDS, Axes, loaded, num_rows
from moecost.units import GIB
from moecost.workload import Batches, Workload

Array: TypeAlias = NDArray[np.float64]
Picked: TypeAlias = dict[str, list[int]]
"""Positions in each axis: their product is a part of the rows."""

DIMENSIONS: Final = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "num_queries",
    "sequence_length",
    "lora_rank",
    "num_gpus",
    "epochs",
    "price",
)
"""Numbers that are arrays in the formulas, each along its own dimension."""
ROWS_AT_ONCE: Final = 2**15
"""Rows evaluated together: their arrays stay in the cache of a core."""
POINTS: Final = 16
"""Lengths of a padded batch that a row is counted as where it has a distribution of them."""

FIGURES: Final[Mapping[str, type]] = {
    "micro_batch_size": np.int32,
    "max_micro_batch_size": np.int32,
    "queries_per_second": np.float64,
    "tokens_per_second": np.float64,
    "padded_tokens_per_second": np.float64,
    "step_seconds": np.float64,
    "hours": np.float64,
    "cost_usd": np.float64,
    "allocated_gib": np.float64,
    "reserved_gib": np.float64,
    "device_gib": np.float64,
}
"""Computed columns and how they are kept."""
FITS, DOES_NOT_FIT, NOT_WHOLE = range(3)
REASONS: Final = (
    "",
    "does not fit",
    "global_batch_size is no whole number of micro-batches on every GPU, or not the one asked for",
)
"""Why a row has no rates, by code; what groups are refused for comes behind."""


@dataclass(frozen=True)
class Block:
    """Computed columns of a product of axes, and why rows have no rates: codes into `reasons`."""

    figures: dict[str, NDArray[Any]]
    codes: NDArray[np.int32]
    reasons: list[str] = field(default_factory=lambda: list(REASONS))

    @classmethod
    def of(cls, rows: int) -> Block:
        """Nothing computed yet."""
        return cls({name: np.empty(rows, kind) for name, kind in FIGURES.items()}, np.empty(rows, np.int32))

    def code(self, reason: str) -> int:
        """Of a reason, new or known."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)

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
    """A resolved job that stands for a group, what its GPU-hour costs, and the GPUs it may have: positions."""

    resolved: Resolved
    usd_per_gpu_hour: float | None
    gpus: list[int]

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
    if first.get("method", "full") == "full":
        first = {name: value for name, value in first.items() if name not in ADAPTER_FIELDS}
    members: list[_Member] = []
    for i in picked.get("num_gpus", [0]):
        if "num_gpus" in picked:
            first["num_gpus"] = axes["num_gpus"][i]
        try:
            member = _member(first, i)
        except MoECostError as error:
            _place(block, axes, {**picked, **({"num_gpus": [i]} if "num_gpus" in picked else {})}, {}, str(error))
            continue
        like = next((m for m in members if m.is_like(member)), None)
        if like is None:
            members.append(member)
        else:
            like.gpus.append(i)
    for member in members:
        one = {**picked, "num_gpus": member.gpus} if "num_gpus" in picked else picked
        for part in _parts(one, padded_to_longest=member.resolved.padding == "longest"):
            _place(block, axes, part, *_figures(member, _numbers(axes, part, first)))


def _member(fields: Mapping[str, Any], gpus: int) -> _Member:
    """The group's job, resolved; what is said of its batches is left to the arrays."""
    left_out = {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size"}
    number = isinstance(fields.get("price"), int | float)
    job = Job(**{name: value for name, value in fields.items() if name not in left_out})
    resolved = resolve(job)
    usd = None if number else price(job, resolved.gpu, [])[0]
    return _Member(resolved, usd, [gpus])


def _parts(picked: Picked, padded_to_longest: bool) -> Iterator[Picked]:
    """Parts of bounded size; of one `sequence_length` where that decides which lengths a batch can have."""
    if padded_to_longest:
        positions = picked.get("sequence_length", [0])
        each = [{**picked, "sequence_length": [i]} for i in positions] if len(positions) > 1 else [picked]
        return itertools.chain.from_iterable(_halves(part, ROWS_AT_ONCE // POINTS) for part in each)
    return _halves(picked, ROWS_AT_ONCE)


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


# ------------------------------------------------------------------------------------------------ the formulas
def _figures(member: _Member, numbers: Mapping[str, FloatLike]) -> tuple[dict[str, FloatLike], NDArray[np.int32]]:
    """Figures over `DIMENSIONS` and the codes of their reasons: as `estimate` computes one, from the same formulas."""
    r = member.resolved
    if isinstance(length := numbers.get("sequence_length"), float):
        r = replace(r, sequence_length=int(length))
    job, profile, habits = r.job, r.profile, r.profile.memory
    gpus = numbers.get("num_gpus", float(job.num_gpus))
    ranks = gpus // job.model_parallel_size
    said = Asked(
        numbers.get("micro_batch_size"),
        numbers.get("gradient_accumulation_steps"),
        numbers.get("global_batch_size"),
        ranks,
        float(job.pipeline_parallel_size),
    )
    cut, mean_length, worst_length = _lengths(r, numbers.get("sequence_length"))
    queries = numbers.get("num_queries", float(r.dataset.num_queries) if r.dataset else said.whole_steps)
    rows = np.ceil(queries * mean_length / cut) if r.padding == "packed" else queries
    workload = _with_numbers(r.workload, numbers.get("lora_rank"), ranks, said.likely_accumulation)

    largest = max_micro_batch_size(workload, habits, padded_length=worst_length)
    whole = said.is_whole
    batch = np.where(whole, said.micro_batch(largest=largest, rows=rows), 1.0)[()]
    accumulation = np.where(whole, said.accumulation(batch), 1.0)[()]
    _, at = peak(workload, habits, sequences=batch, padded_length=worst_length)
    allocated, reserved, device = shown(at, habits)
    fits = device <= workload.device.memory_bytes
    codes = np.where(whole, np.where(fits, FITS, DOES_NOT_FIT), NOT_WHOLE).astype(np.int32)

    epoch = schedule(rows=np.ceil(rows / ranks), micro_batch_size=batch, accumulation=accumulation)
    a_micro_batch, its_tokens = _micro_batches(r, numbers.get("lora_rank"), ranks, batch, epoch, cut)
    _, times = passes_of_a_step(workload.layout, epoch.per_step)
    optimizer, clip = optimizer_seconds(workload, profile, r.coefficients)
    step_s = times * a_micro_batch + (optimizer + clip + profile.run.step_overhead_s)
    has_rates = whole if job.on_oom == "report" else codes == FITS
    step_s = np.where(has_rates, step_s, np.nan)

    epochs = numbers.get("epochs", job.epochs)
    epoch_s = epoch.steps * step_s
    saved = saved_bytes(workload, profile)
    hours = cost.run_hours(
        steps=run_steps(epochs=epochs, steps_an_epoch=epoch.steps),
        step_s=step_s,
        saves=run_saves(epochs=epochs, saves_each_epoch=profile.run.saves_each_epoch),
        save_s=cost.save_seconds(saved_bytes=saved, bytes_per_s=profile.run.save_bytes_per_s),
        startup_s=profile.run.startup_s,
    )
    usd = numbers.get("price", math.nan if member.usd_per_gpu_hour is None else member.usd_per_gpu_hour)
    memory = {"allocated_gib": allocated, "reserved_gib": reserved, "device_gib": device}
    figures = {
        "micro_batch_size": np.where(whole, batch, 0)[()],
        "max_micro_batch_size": largest,
        "queries_per_second": queries / epoch_s,
        "tokens_per_second": queries * mean_length / epoch_s,
        "padded_tokens_per_second": its_tokens * epoch.micro_batches * ranks / epoch_s,
        "step_seconds": step_s,
        "hours": hours,
        "cost_usd": cost.cost_usd(hours=hours, num_gpus=gpus, usd_per_gpu_hour=usd),
        **{name: np.where(whole, size / GIB, np.nan)[()] for name, size in memory.items()},
    }
    return figures, codes


def _lengths(r: Resolved, asked: FloatLike | None) -> tuple[FloatLike, FloatLike, FloatLike]:
    """(length where queries are cut, their mean length, longest padded length) by sequence length. [token]"""
    cut = float(r.sequence_length) if asked is None else asked
    if r.dataset is None:
        return cut, cut, cut

    def each(of: Callable[[int], float]) -> FloatLike:
        if np.ndim(cut) == 0:
            return float(of(int(cut)))
        return np.array([of(int(n)) for n in np.ravel(cut)], dtype=np.float64).reshape(np.shape(cut))

    how: dict[str, Any] = {"padding": r.padding, "multiple": r.padding_multiple}
    return (
        cut,
        each(lambda n: mean_cut_length(r.lengths, n)),
        each(lambda n: worst_padded_length(r.lengths, sequence_length=n, **how)),
    )


def _with_numbers(
    workload: Workload, rank: FloatLike | None, ranks: FloatLike, accumulation: FloatLike = 1.0
) -> Workload:
    """One workload for all numbers of a group."""
    recipe = replace(workload.recipe, gradient_accumulation_steps=accumulation)
    if rank is not None:
        recipe = replace(recipe, rank=rank)
    return replace(workload, recipe=recipe, layout=replace(workload.layout, data_parallel=ranks))


def _micro_batches(
    r: Resolved, rank: FloatLike | None, ranks: FloatLike, batch: FloatLike, epoch: Schedule, cut: FloatLike
) -> tuple[FloatLike, FloatLike]:
    """(seconds, tokens) of a micro-batch, the mean of an epoch.

    Full micro-batches and smaller last ones are computed once for each size and length, whatever rows have them.
    """
    per_step = np.unique(epoch.per_step)
    last_ones = np.any(epoch.rest)
    along_its_own = np.ndim(batch) == 0 or np.size(batch) == np.shape(batch)[0]
    if not last_ones and len(per_step) == 1 and along_its_own:
        return _timed(r, rank, ranks, batch, cut, float(per_step[0]))
    # codes of size, length and micro-batches a step; equal ones are one case
    lengths, steps = np.ravel(cut), len(per_step)
    at_length = np.arange(len(lengths)).reshape(np.shape(cut))
    at_step = np.searchsorted(per_step, epoch.per_step)

    def code(size: FloatLike) -> NDArray[np.int64]:
        found: NDArray[np.int64] = (np.asarray(size, np.int64) * len(lengths) + at_length) * steps + at_step
        return found

    both = [code(batch), code(np.where(epoch.rest > 0, epoch.rest, batch))]
    # without a full micro-batch its place is taken by the last one: nothing is computed for batches that no row has
    both[0] = np.where(epoch.full > 0, *both)
    cases = np.unique(np.concatenate([codes.ravel() for codes in both]))
    shape = (-1, *(1,) * (len(DIMENSIONS) - 1))
    seconds, tokens = _timed(
        r,
        rank,
        ranks,
        (cases // steps // len(lengths)).astype(np.float64).reshape(shape),
        lengths[cases // steps % len(lengths)].reshape(shape),
        per_step[cases % steps].reshape(shape),
    )
    full, rest = (np.searchsorted(cases, codes) for codes in both)
    return (
        epoch.mean(_taken(seconds, full), _taken(seconds, rest)),
        epoch.mean(_taken(tokens, full), _taken(tokens, rest)),
    )


def _taken(values: FloatLike, cases: NDArray[np.intp]) -> Array:
    """Values of cases, which stand along the first dimension, in the rows that have them."""
    others = [
        np.arange(size).reshape([-1 if j == i else 1 for j in range(len(DIMENSIONS))]) if size > 1 else 0
        for i, size in enumerate(np.shape(values)[1:], start=1)
    ]
    found: Array = np.asarray(values)[(cases.reshape([1] * (len(DIMENSIONS) - cases.ndim) + [*cases.shape]), *others)]
    return found


def _timed(
    r: Resolved, rank: FloatLike | None, ranks: FloatLike, sizes: FloatLike, cut: FloatLike, per_step: FloatLike
) -> tuple[FloatLike, FloatLike]:
    """(seconds, tokens) of micro-batches of some sizes; the mean over the lengths they are padded to."""
    rank, ranks, sizes, cut, per_step = (_with_support(x) for x in (rank, ranks, sizes, cut, per_step))
    workload = _with_numbers(r.workload, rank, ranks)
    probability, slowest = np.ones(1), None
    if r.padding == "longest":
        cut, probability = _padded(r, sizes)
        if np.any(np.asarray(ranks) > 1):
            longest = longest_of(probability, num_gpus=ranks)
            slowest = waited_for(probability, longest, per_step=per_step, layout=workload.layout)
    batches = Batches(sizes, cut, probability, per_step, slowest)
    tokens = (batches.tokens * probability).sum(axis=-1)
    return micro_batch_seconds(workload, batches, r.profile, r.coefficients), tokens


def _with_support(value: Any) -> Any:
    """With the last axis that the lengths of a batch run along."""
    return value if np.ndim(value) == 0 else value[..., None]


def _padded(r: Resolved, sizes: FloatLike) -> tuple[Array, Array]:
    """(padded lengths, probability of each for every size): each size by itself, as one estimate has it."""
    found = [
        padded_batch(
            r.lengths,
            micro_batch_size=size,
            sequence_length=r.sequence_length,
            padding=r.padding,
            multiple=r.padding_multiple,
        )
        for size in np.ravel(sizes).tolist()
    ]
    lengths = np.unique(np.concatenate([one.padded_length for one in found]))
    probability = np.zeros((len(found), len(lengths)))
    for row, one in zip(probability, found, strict=True):
        row[np.searchsorted(lengths, one.padded_length)] = one.probability
    return lengths, probability.reshape(*np.shape(sizes)[:-1], len(lengths)) if np.ndim(sizes) else probability[0]
