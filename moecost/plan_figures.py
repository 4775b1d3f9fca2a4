"""The figures of a plan's candidates as columns: what `estimate` computes of each of them, from the same formulas.

A candidate is a GPU, a variant of the job (its method), a layout and a micro-batch. Names are looked up once a GPU
and once a layout, by the code that resolves one job; then candidates that differ in numbers alone are computed together
as arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike
from moecost.coefficients import Coefficients
from moecost.cost import save_seconds
from moecost.errors import MoECostError
from moecost.footprint import trained_elements
from moecost.job import Job
from moecost.plan_layouts import Given, GPULayout, layouts
from moecost.plan_stacks import Floats, Pool, Pools, Positions, each_with_lengths, with_lengths
from moecost.resolution import Resolved, resolve
from moecost.schedule import schedule
from moecost.specs import GPUSpec
from moecost.sweep_figures import hours_of_run, memory_figures, step_seconds, timed, with_support
from moecost.units import GIB
from moecost.workload import Device, Recipe

LARGEST_BATCHES: Final = 2
"""Of the micro-batches that fit, so many of the largest are timed: smaller ones pad less where lengths differ."""
ROWS_AT_ONCE: Final = 2**13
ROWS_OF_LENGTHS: Final = 2**10
"""Candidates that are timed together, so that arrays stay in the cache; the second where batches have many lengths."""
SHARED_STATES: Final = ("shard_group_size", "virtual_pipeline_size", "expert_tensor_parallel_size")
"""Fields that have no meaning on some layouts: they are left to those that are asked about."""


@dataclass(frozen=True)
class Question:
    """What is tried; each job field as `Job` takes it.

    Attributes
    ----------
    gpus : names or specs.
    variants : fields of a job besides GPU, layout and batch; each is tried on everything.
    micro_batch_sizes : those to try; None: divisors of a GPU's share of the global batch.
    headroom : share of a GPU's memory that stays free.
    given : sizes of layouts that were asked for.
    """

    gpus: tuple[Any, ...]
    variants: tuple[dict[str, Any], ...]
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...] | None
    headroom: float
    max_gpus: int
    given: Given


@dataclass
class Rows:
    """Candidates as columns of one length; `refused` are GPUs that a variant cannot be run on at all.

    Attributes
    ----------
    gpu, variant, layout : positions in the question's GPUs and variants, and in `layouts`.
    device_gib, room_gib : what a GPU needs, and what it may use. [GiB]
    hours : of the run as `estimate` counts it; NaN where it does not fit. [h]
    startup_s : of it start-up. [s]
    save_s : time of a checkpoint that a run can go on from. [s]
    forward_share : of the time of a query, what its forward pass takes.
    """

    layouts: list[GPULayout] = field(default_factory=list)
    refused: list[tuple[int, int, str]] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    """What is wrong with layouts that were left out, in words."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    per_node: dict[tuple[int, int], int] = field(default_factory=dict)
    """GPUs of a machine by GPU and number of GPUs."""
    specs: dict[int, GPUSpec] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["gpu"])


def evaluate(question: Question) -> Rows:
    """All candidates of a question that fit, and of each layout that does not its smallest batch."""
    rows, parts = Rows(), list[dict[str, NDArray[Any]]]()
    position: dict[GPULayout, int] = {}
    for i in range(len(question.variants)):
        variant = _Variant(question, i, rows, position)
        found = list(variant.parts(pipelines=False))
        rest = variant.without_room(found)
        parts += [*found, *(variant.parts(pipelines=True, only=rest) if rest else ())]
    rows.layouts = list(position)
    names = parts[0] if parts else dict.fromkeys(COLUMNS, np.empty(0))
    rows.columns = {name: np.concatenate([p[name] for p in parts]) if parts else np.empty(0) for name in names}
    return rows


COLUMNS: Final = (
    "gpu", "variant", "layout", "num_gpus", "micro_batch_size", "device_gib", "room_gib", "fits", "step_seconds",
    "queries_per_second", "hours", "startup_s", "save_s", "forward_share", "num_queries", "parameters",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ one variant
@dataclass(frozen=True)
class _Machine:
    """GPUs of a kind as a run sees them; `alike` is one number for those that make the same recipe of a job."""

    device: Device
    coefficients: Coefficients
    resolved: Resolved
    alike: int


class _Variant:
    """A variant of the job on all GPUs and layouts."""

    def __init__(self, question: Question, i: int, rows: Rows, position: dict[GPULayout, int]) -> None:
        self.question, self.i, self.rows, self.position = question, i, rows, position
        self.fields = question.variants[i]
        self.alone = {name: value for name, value in self.fields.items() if name not in SHARED_STATES}
        self.machines: dict[tuple[int, int], _Machine | None] = {}
        self.alike: dict[Recipe, int] = {}
        self.sizes: dict[tuple[int, float], list[int]] = {}
        self.plans: dict[tuple[int, GPULayout], Resolved | None] = {}

    def machine(self, gpu: int, num_gpus: int) -> _Machine | None:
        """What a run on so many GPUs says of them; None where it cannot be.

        Where the fewest that are several and the most see the same device, so do all between.
        """
        key, few, most = (gpu, num_gpus), (gpu, 2), (gpu, max(self.question.max_gpus, num_gpus))
        if key in self.machines:
            return self.machines[key]
        if self.machines.get((gpu, 1), True) is None:
            return None
        if 2 < num_gpus < most[1]:
            ends = self.machine(*few), self.machine(*most)
            if ends[0] is not None and ends[1] is not None and ends[0].device == ends[1].device:
                self._keep(key, ends[0])
                return ends[0]
        try:
            stage = {"zero_stage": 0} if num_gpus > 1 else {}
            found = resolve(Job(gpu=self.question.gpus[gpu], num_gpus=num_gpus, **self.alone, **stage))
        except MoECostError as error:
            if not any((gpu, self.i) == told[:2] for told in self.rows.refused):
                self.rows.refused.append((gpu, self.i, str(error)))
            self.machines[key] = None
            return None
        recipe = replace(found.workload.recipe, gradient_accumulation_steps=1.0)
        alike = self.alike.setdefault(recipe, len(self.alike))
        self.rows.specs[gpu] = found.gpu
        self._keep(key, _Machine(found.workload.device, found.coefficients, found, alike))
        return self.machines[key]

    def _keep(self, key: tuple[int, int], found: _Machine) -> None:
        self.machines[key] = found
        self.rows.per_node[key] = int(found.device.gpus_per_node)

    def plan(self, gpu: int, layout: GPULayout, machine: _Machine) -> tuple[int, GPULayout] | None:
        """The key of a layout on GPUs like this one, resolved on the first of them; None where it cannot be."""
        key = machine.alike, layout
        if key not in self.plans:
            try:
                name = self.question.gpus[gpu]
                batch = {"global_batch_size": self.question.global_batch_size}
                self.plans[key] = resolve(Job(gpu=name, **self.fields, **layout.fields(), **batch))
            except MoECostError as error:
                self.plans[key] = None
                self.rows.contradictions.append(str(error))
        return None if self.plans[key] is None else key

    def parts(self, *, pipelines: bool, only: set[tuple[int, int]] | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        """Columns of candidates, those that differ in numbers alone together."""
        q = self.question
        first = next((m for g in range(len(q.gpus)) if (m := self.machine(g, 1)) is not None), None)
        if first is None:
            return
        tried = list(
            layouts(
                first.resolved.model,
                first.resolved.job.software,
                max_gpus=q.max_gpus,
                global_batch_size=q.global_batch_size,
                given=q.given,
                pipelines=pipelines,
            )
        )
        units, plans, machines = self._units(tried, only)
        if not units:
            return
        pools = Pools(
            Pool([m.device for m in machines]),
            Pool([m.coefficients for m in machines]),
            Pool([p.workload.layout for p in plans]),
            Pool([p.workload.recipe for p in plans]),
        )
        table = np.array(units, dtype=np.intp)
        shape = table[:, 3]  # position of the layout
        kinds, known = pools.kinds(table[:, 1], table[:, 2]), list(self.position)
        for kind in np.unique(kinds):
            chosen = np.flatnonzero(kinds == kind)
            sample = plans[table[chosen[0], 2]]
            yield self._computed(sample, pools, table[chosen], [known[i] for i in shape[chosen]])

    def _units(
        self, tried: Iterable[GPULayout], only: set[tuple[int, int]] | None
    ) -> tuple[list[tuple[int, int, int, int]], list[Resolved], list[_Machine]]:
        """(GPU, its machine, plan, layout) by position of every candidate; the plans, and the machines."""
        units: list[tuple[int, int, int, int]] = []
        plans, machines = dict[Any, int](), dict[tuple[int, int], int]()
        for layout in tried:
            for gpu in range(len(self.question.gpus)):
                key = gpu, layout.num_gpus
                if only is not None and key not in only:
                    continue
                machine = self.machine(*key)
                if machine is None or layout.tensor_parallel_size > self._joined(machine, layout):
                    continue
                plan = self.plan(gpu, layout, machine)
                if plan is None or not self._sizes(layout.data_parallel_size, machine.resolved.rows_per_epoch):
                    continue
                where = self.position.setdefault(layout, len(self.position))
                at = machines.setdefault(key, len(machines))
                units.append((gpu, at, plans.setdefault(plan, len(plans)), where))
        resolved = [one for name in plans if (one := self.plans[name]) is not None]
        return units, resolved, [found for key in machines if (found := self.machines[key]) is not None]

    def _joined(self, machine: _Machine, layout: GPULayout) -> float:
        """GPUs over which products may be cut: those of a machine, any number where that was asked for."""
        if "tensor_parallel_size" in self.question.given:
            return float(layout.num_gpus)
        return float(machine.device.gpus_per_node)

    def without_room(self, found: Sequence[Mapping[str, NDArray[Any]]]) -> set[tuple[int, int]]:
        """GPUs, and numbers of them, on which nothing fits so far."""
        have = {pair for p in found for pair in zip(p["gpu"][p["fits"]], p["num_gpus"][p["fits"]], strict=True)}
        return {key for key, machine in self.machines.items() if machine is not None and key not in have}

    # -------------------------------------------------------------------------------------------- one kind
    def _computed(
        self, r: Resolved, pools: Pools, units: Positions, shapes: Sequence[GPULayout]
    ) -> dict[str, NDArray[Any]]:
        """Columns of candidates of one kind, at each micro-batch; units are (GPU, machine, plan, layout)."""
        q = self.question
        which, batch = self._batches(shapes, r.rows_per_epoch)
        share = np.array([q.global_batch_size / s.data_parallel_size for s in shapes])[which]
        w, _ = pools.workload(r.workload, units[which], share / batch)
        device_gib = np.broadcast_to(
            memory_figures(w, r.profile.memory, batch, float(r.worst_length))["device_gib"], batch.shape
        )
        usable = np.broadcast_to(np.asarray(w.device.memory_bytes) / GIB, batch.shape)
        room = usable * (1.0 - q.headroom)
        fits = device_gib <= room
        kept = np.flatnonzero(_largest_or_first(which, fits))
        which, batch, fits, share = which[kept], batch[kept], fits[kept], share[kept]
        times = {name: np.full(len(kept), np.nan) for name in ("step_seconds", "queries_per_second", "hours", "save_s")}
        at_once = ROWS_OF_LENGTHS if r.padding == "longest" else ROWS_AT_ONCE
        timed_rows = np.flatnonzero(fits)
        for start in range(0, len(timed_rows), at_once):
            some = timed_rows[start : start + at_once]
            for name, values in self._times(r, pools, units[which[some]], batch[some], share[some]).items():
                times[name][some] = values
        n = len(kept)
        return {
            "gpu": units[which, 0],
            "variant": np.full(n, self.i),
            "layout": units[which, 3],
            "num_gpus": np.array([s.num_gpus for s in shapes])[which],
            "micro_batch_size": batch,
            "device_gib": device_gib[kept],
            "room_gib": room[kept],
            "fits": fits,
            **times,
            "startup_s": np.full(n, r.profile.run.startup_s),
            "forward_share": np.full(n, _forward_share(r.workload.recipe)),
            "num_queries": np.full(n, float(r.num_queries)),
            "parameters": np.full(n, float(r.model.num_parameters)),
        }

    def _sizes(self, ranks: int, rows: float) -> list[int]:
        """Sequences of a micro-batch to try, ascending: no more than a GPU's share of an epoch fills."""
        key = ranks, rows
        if key not in self.sizes:
            share, asked = self.question.global_batch_size // ranks, self.question.micro_batch_sizes
            filled = max(-(-int(rows) // ranks), 1)
            open_ = [b for b in doubling_divisors(share) if b <= filled]
            self.sizes[key] = open_ if asked is None else sorted({b for b in asked if share % b == 0})
        return self.sizes[key]

    def _batches(self, shapes: Sequence[GPULayout], rows: float) -> tuple[Positions, Floats]:
        """(unit, sequences of a micro-batch) of each candidate, ascending in both."""
        each = [self._sizes(s.data_parallel_size, rows) for s in shapes]
        which = np.repeat(np.arange(len(shapes)), [len(batches) for batches in each])
        return which, np.array([b for batches in each for b in batches], dtype=np.float64)

    def _times(self, r: Resolved, pools: Pools, units: Positions, batch: Floats, share: Floats) -> dict[str, FloatLike]:
        """Seconds of a step and of a checkpoint, queries a second and hours of the run, of candidates that fit."""
        w, coefficients = pools.workload(r.workload, units, share / batch)
        ranks = np.broadcast_to(w.layout.data_parallel, batch.shape)
        epoch = schedule(
            rows=np.ceil(r.rows_per_epoch / ranks), micro_batch_size=batch, accumulation=np.round(share / batch)
        )
        cut, per_step = float(r.sequence_length), with_support(np.broadcast_to(epoch.per_step, batch.shape))
        full, rest = np.asarray(epoch.full), np.asarray(epoch.rest)
        sizes = np.where(full > 0, batch, rest)
        seconds, _ = timed(r, with_lengths(w), each_with_lengths(coefficients), with_support(sizes), cut, per_step)
        seconds = np.broadcast_to(seconds, batch.shape)
        last = seconds.copy()
        smaller = np.flatnonzero((rest > 0) & (full > 0))
        if len(smaller):  # the last micro-batch of an epoch
            part, its = pools.workload(r.workload, units[smaller], (share / batch)[smaller])
            part, its = with_lengths(part), each_with_lengths(its)
            last[smaller], _ = timed(r, part, its, with_support(rest[smaller]), cut, per_step[smaller])
        r = replace(r, workload=w, coefficients=coefficients)
        step_s = step_seconds(r, w, epoch, epoch.mean(seconds, last))
        trained, _, width = trained_elements(w)
        states = trained * (width + w.recipe.optimizer_bytes)
        return {
            "step_seconds": step_s,
            "queries_per_second": r.num_queries / (epoch.steps * step_s),
            "hours": hours_of_run(w, r.profile, r.job.epochs, epoch, step_s),
            "save_s": save_seconds(saved_bytes=states, bytes_per_s=r.profile.run.save_bytes_per_s),
        }


def _forward_share(recipe: Recipe) -> float:
    """Of the work of a query, what its forward pass is: the backward pass takes as much again for the gradients of the
    inputs, and where weights have gradients as well for those."""
    weights = recipe.trains_all or recipe.density > 0
    return 1.0 / (2.0 + recipe.recompute + (1.0 if weights else 0.0))


def doubling_divisors(number: int) -> list[int]:
    """Divisors from 1 upwards, each at least twice the one before, and the number itself.

    >>> doubling_divisors(24), doubling_divisors(45)
    ([1, 2, 4, 8, 24], [1, 3, 9, 45])
    """
    found = [1]
    for n in range(2, number // 2 + 1):
        if number % n == 0 and n >= 2 * found[-1]:
            found.append(n)
    return [*found, number] if number > 1 else found


def _largest_or_first(which: Positions, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of each unit the largest batches that fit; its smallest where none does."""
    if not len(which):
        return np.zeros(0, dtype=bool)
    so_far = np.cumsum(fits)
    last = np.append(np.flatnonzero(np.diff(which)), len(which) - 1)  # of each unit
    first = np.append(0, last[:-1] + 1)
    unit = np.repeat(np.arange(len(last)), last - first + 1)
    larger = so_far[last][unit] - so_far
    none = (so_far[last] - so_far[first] + fits[first] == 0)[unit]
    kept: NDArray[np.bool_] = (fits & (larger < LARGEST_BATCHES)) | (none & (np.arange(len(which)) == first[unit]))
    return kept
