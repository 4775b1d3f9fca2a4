"""The figures of a sweep's rows: what `estimate` computes of one job, from the same formulas, of many at once.

Numbers are arrays, each along a dimension of its own: what does not depend on a number is computed once for all its
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moecost import cost
from moecost.arrays import FloatLike
from moecost.coefficients import Coefficients
from moecost.estimation import saved_bytes
from moecost.lengths import mean_cut_length, padded_batch, worst_padded_length
from moecost.memory import max_micro_batch_size, peak, shown
from moecost.resolution import Resolved, longest_of, waited_for
from moecost.schedule import Asked, Schedule, run_saves, run_steps, schedule
from moecost.software import MemoryHabits, SoftwareProfile
from moecost.step import micro_batch_seconds, optimizer_seconds, passes_of_a_step
from moecost.units import GIB
from moecost.workload import Batches, Workload

Array: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Mapping[str, FloatLike]

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


def figures_of(
    r: Resolved, usd_per_gpu_hour: float | None, numbers: Numbers
) -> tuple[dict[str, FloatLike], NDArray[np.int32]]:
    """Figures over `DIMENSIONS`, and codes of the reasons why rows have no rates.

    Parameters
    ----------
    r : a job that stands for all rows.
    usd_per_gpu_hour : its price, where `numbers` have none; None: not known.
    numbers : fields in which the rows differ from it, each a number or an array along its dimension.
    """
    if isinstance(length := numbers.get("sequence_length"), float):
        r = replace(r, sequence_length=int(length))
    gpus, rank = numbers.get("num_gpus", float(r.job.num_gpus)), numbers.get("lora_rank")
    said = _asked(r, numbers, gpus // r.job.model_parallel_size)
    ranks = said.data_parallel
    cut, mean_length, worst_length = _lengths(r, numbers.get("sequence_length"))
    queries = numbers.get("num_queries", float(r.dataset.num_queries) if r.dataset else said.whole_steps)
    rows = np.ceil(queries * mean_length / cut) if r.padding == "packed" else queries
    workload = _with_numbers(r.workload, rank, ranks, said.likely_accumulation)

    largest = max_micro_batch_size(workload, r.profile.memory, padded_length=worst_length)
    whole = said.is_whole
    batch = np.where(whole, said.micro_batch(largest=largest, rows=rows), 1.0)[()]
    accumulation = np.where(whole, said.accumulation(batch), 1.0)[()]
    memory = memory_figures(workload, r.profile.memory, batch, worst_length)
    fits = memory["device_gib"] <= workload.device.memory_bytes / GIB
    codes = np.where(whole, np.where(fits, FITS, DOES_NOT_FIT), NOT_WHOLE).astype(np.int32)

    epoch = schedule(rows=np.ceil(rows / ranks), micro_batch_size=batch, accumulation=accumulation)
    micro_s, its_tokens = _micro_batches(r, rank, ranks, batch, epoch, cut)
    step_s = step_seconds(r, workload, epoch, micro_s)
    step_s = np.where(whole if r.job.on_oom == "report" else codes == FITS, step_s, np.nan)
    epoch_s = epoch.steps * step_s
    hours = hours_of_run(workload, r.profile, numbers.get("epochs", r.job.epochs), epoch, step_s)
    usd = numbers.get("price", math.nan if usd_per_gpu_hour is None else usd_per_gpu_hour)
    return {
        "micro_batch_size": np.where(whole, batch, 0.0)[()],
        "max_micro_batch_size": np.where(whole, largest, 0.0)[()],
        "queries_per_second": queries / epoch_s,
        "tokens_per_second": queries * mean_length / epoch_s,
        "padded_tokens_per_second": its_tokens * epoch.micro_batches * ranks / epoch_s,
        "step_seconds": step_s,
        "hours": hours,
        "cost_usd": cost.cost_usd(hours=hours, num_gpus=gpus, usd_per_gpu_hour=usd),
        **{name: np.where(whole, size, np.nan)[()] for name, size in memory.items()},
    }, codes


def _asked(r: Resolved, numbers: Numbers, ranks: FloatLike) -> Asked:
    return Asked(
        numbers.get("micro_batch_size"),
        numbers.get("gradient_accumulation_steps"),
        numbers.get("global_batch_size"),
        ranks,
        float(r.job.pipeline_parallel_size),
    )


def memory_figures(
    workload: Workload, habits: MemoryHabits, batch: FloatLike, worst_length: FloatLike
) -> dict[str, FloatLike]:
    """Memory at its peak with batches of some sizes, by column. [GiB]"""
    _, at = peak(workload, habits, sequences=batch, padded_length=worst_length)
    allocated, reserved, device = shown(at, habits)
    return {"allocated_gib": allocated / GIB, "reserved_gib": reserved / GIB, "device_gib": device / GIB}


def step_seconds(r: Resolved, workload: Workload, epoch: Schedule, micro_batch_s: FloatLike) -> FloatLike:
    """Seconds of an optimizer step from those of a micro-batch. [s]"""
    _, times = passes_of_a_step(workload.layout, epoch.per_step)
    optimizer, clip = optimizer_seconds(workload, r.profile, r.coefficients)
    return times * micro_batch_s + (optimizer + clip + r.profile.run.step_overhead_s)


def hours_of_run(
    workload: Workload, profile: SoftwareProfile, epochs: FloatLike, epoch: Schedule, step_s: FloatLike
) -> FloatLike:
    """Hours of the whole run from the seconds of a step. [h]"""
    saved = saved_bytes(workload, profile)
    return cost.run_hours(
        steps=run_steps(epochs=epochs, steps_an_epoch=epoch.steps),
        step_s=step_s,
        saves=run_saves(epochs=epochs, saves_each_epoch=profile.run.saves_each_epoch),
        save_s=cost.save_seconds(saved_bytes=saved, bytes_per_s=profile.run.save_bytes_per_s),
        startup_s=profile.run.startup_s,
    )


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
    rank, ranks, sizes, cut, per_step = (with_support(x) for x in (rank, ranks, sizes, cut, per_step))
    return timed(r, _with_numbers(r.workload, rank, ranks), r.coefficients, sizes, cut, per_step)


def timed(
    r: Resolved,
    workload: Workload,
    coefficients: Coefficients,
    sizes: FloatLike,
    cut: FloatLike,
    per_step: FloatLike,
) -> tuple[FloatLike, FloatLike]:
    """(seconds, tokens) of micro-batches of some sizes; arrays have a last axis for the lengths of a batch.

    Parameters
    ----------
    r : whose data the batches are of.
    workload, coefficients : what runs them; may be arrays as well.
    sizes : sequences of a micro-batch.
    cut : where queries are cut. [token]
    per_step : micro-batches of an optimizer step.
    """
    probability, slowest = np.ones(1), None
    ranks = workload.layout.data_parallel
    if r.padding == "longest":
        cut, probability = _padded(r, sizes)
        if np.any(np.asarray(ranks) > 1):
            longest = longest_of(probability, num_gpus=ranks)
            slowest = waited_for(probability, longest, per_step=per_step, layout=workload.layout)
    batches = Batches(sizes, cut, probability, per_step, slowest)
    tokens = (batches.tokens * probability).sum(axis=-1)
    return micro_batch_seconds(workload, batches, r.profile, coefficients), tokens


def with_support(value: Any) -> Any:
    """With the last axis that the lengths of a batch run along."""
    return value if np.ndim(value) == 0 else value[..., None]


def _padded(r: Resolved, sizes: FloatLike) -> tuple[Array, Array]:
    """(padded lengths, probability of each for every size): each size by itself, as one estimate has it."""
    distinct, which = np.unique(np.ravel(sizes), return_inverse=True)
    found = [
        padded_batch(
            r.lengths,
            micro_batch_size=size,
            sequence_length=r.sequence_length,
            padding=r.padding,
            multiple=r.padding_multiple,
        )
        for size in distinct.tolist()
    ]
    lengths = np.unique(np.concatenate([one.padded_length for one in found]))
    each = np.zeros((len(found), len(lengths)))
    for row, one in zip(each, found, strict=True):
        row[np.searchsorted(lengths, one.padded_length)] = one.probability
    probability = each[which.ravel()]
    return lengths, probability.reshape(*np.shape(sizes)[:-1], len(lengths)) if np.ndim(sizes) else probability[0]
