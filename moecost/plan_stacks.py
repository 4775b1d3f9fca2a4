"""Workloads that differ in numbers alone side by side, as one workload of arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moecost.coefficients import Coefficients
from moecost.sweep_figures import with_support
from moecost.workload import Device, Layout, Recipe, Workload

Floats: TypeAlias = NDArray[np.float64]
Positions: TypeAlias = NDArray[np.intp]

_T = TypeVar("_T", bound=Device | Layout | Recipe | Coefficients)


class Pool(Generic[_T]):
    """Dataclasses of plain numbers that can stand side by side as one of arrays, where all else in them is equal."""

    def __init__(self, items: Sequence[_T]) -> None:
        self.items = items
        kind: Any = type(items[0])
        may = [f.name for f in fields(kind) if "FloatLike" in str(f.type)]
        rest = [f.name for f in fields(kind) if f.name not in may]
        self.numbers: dict[str, Floats] = {}
        known: dict[Hashable, int] = {}
        kinds = []
        for item in items:
            absent = tuple(getattr(item, name) is None for name in may)
            key = (*absent, *(getattr(item, name) for name in rest))
            kinds.append(known.setdefault(key, len(known)))
        self.kind = np.array(kinds)
        """Equal where items differ in numbers alone."""
        for name in may:
            values = [getattr(item, name) for item in items]
            self.numbers[name] = np.array([np.nan if v is None else v for v in values], dtype=np.float64)

    def stacked(self, which: Positions) -> _T:
        """Items of one kind as one; what is equal in all of them stays a plain number."""
        changes: dict[str, Any] = {}
        sample = self.items[which[0]]
        for name, column in self.numbers.items():
            if getattr(sample, name) is None:
                continue
            values = column[which]
            changes[name] = float(values[0]) if np.all(values == values[0]) else values
        found: Any = sample
        return cast(_T, replace(found, **changes))


@dataclass(frozen=True)
class Pools:
    """What candidates are made of: those of machines, and those of plans."""

    device: Pool[Device]
    coefficients: Pool[Coefficients]
    layout: Pool[Layout]
    recipe: Pool[Recipe]

    def kinds(self, machines: Positions, plans: Positions) -> Positions:
        """One number for what must be equal among candidates that are computed together."""
        layout = self.layout
        # a kind of parallelism that is there has operators of its own
        there = [column[plans] > 1.0 for column in layout.numbers.values()]
        columns = [self.device.kind[machines], self.coefficients.kind[machines], layout.kind[plans],
                   self.recipe.kind[plans], *there]  # fmt: skip
        found: Positions = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].ravel()
        return found

    def workload(self, like: Workload, units: Positions, accumulation: Floats) -> tuple[Workload, Coefficients]:
        """The workload of candidates; units are (GPU, machine, plan, layout)."""
        recipe = replace(self.recipe.stacked(units[:, 2]), gradient_accumulation_steps=np.maximum(accumulation, 1.0))
        device, layout = self.device.stacked(units[:, 1]), self.layout.stacked(units[:, 2])
        return replace(like, device=device, layout=layout, recipe=recipe), self.coefficients.stacked(units[:, 1])


def with_lengths(w: Workload) -> Workload:
    """With the last axis that the lengths of a batch run along."""
    device, layout, recipe = each_with_lengths(w.device), each_with_lengths(w.layout), each_with_lengths(w.recipe)
    return replace(w, device=device, layout=layout, recipe=recipe)


def each_with_lengths(item: _T) -> _T:
    """The same of one of its parts."""
    found: Any = item
    changes = {f.name: with_support(v) for f in fields(found) if isinstance(v := getattr(item, f.name), np.ndarray)}
    return cast(_T, replace(found, **changes))
