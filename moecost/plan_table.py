"""All candidates of a plan with what each costs at each provider: hours, dollars, energy, and status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from moecost.checked import Checked
from moecost.cost import cost_usd, pareto_front
from moecost.field_docs import Described
from moecost.interruptions import InterruptedRun, interrupted_run, job_mtbf
from moecost.plan_figures import Rows
from moecost.plan_layouts import GPULayout
from moecost.plan_offers import Offer
from moecost.units import HOUR

Floats: TypeAlias = NDArray[np.float64]

CHECKPOINT_BYTES: Final = 2.0
"""A weight of a published checkpoint: 16 bits. [byte]"""
STATUSES: Final = ("front", "dominated", "over budget", "too late", "over budget and too late", "does not fit",
                   "no quote")  # fmt: skip
"""What a candidate can be, by code; the first two keep to all limits."""
FRONT, DOMINATED, OVER_BUDGET, TOO_LATE, BOTH, DOES_NOT_FIT, NO_QUOTE = range(7)


class Assumptions(Checked, Described):
    """What a plan assumes of a run beside its steps. None of it is measured: give your own where you know better."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    machine_mtbf_hours: Annotated[float, Field(gt=0, le=1e9)] = 24.0
    """Mean time between interruptions of a spot machine: a round number, no statistic of any provider. [h]"""
    restart_s: Annotated[float, Field(ge=0, le=1e7)] = 300.0
    """Until another spot machine is there; start-up, download and reading the checkpoint come on top. [s]"""
    download_bytes_per_s: Annotated[float, Field(gt=0, le=1e15)] = 0.5e9
    """Rate at which each machine fetches the model's weights, 2 bytes each. [byte/s]"""
    evaluation_queries: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Queries that are evaluated after each epoch, forward pass alone."""
    power_share: Annotated[float, Field(gt=0, le=2)] = 0.8
    """Mean power of a GPU over its TDP while the run is on; hosts, network and cooling are not counted."""
    grid_gco2_per_kwh: Annotated[float, Field(ge=0, le=1e5)] | None = None
    """Carbon intensity of the grid; None: emissions are not told. [g/kWh]"""


@dataclass(frozen=True)
class Limits:
    """What a candidate has to keep to; None: no limit."""

    budget_usd: float | None
    deadline_hours: float | None


@dataclass(frozen=True, eq=False)
class Table:
    """Candidates at providers as columns of one length.

    Attributes
    ----------
    rows : the candidates, whoever rents them out.
    offers : what they are rented for.
    row, offer : positions in both; -1 where there is no offer.
    columns : `hours`, `cost_usd`, `energy_kwh`, `co2e_kg`, `interruptions`, `checkpoint_s`.
    status : code of `STATUSES`.
    """

    rows: Rows
    offers: tuple[Offer, ...]
    row: NDArray[np.intp]
    offer: NDArray[np.intp]
    columns: dict[str, Floats]
    status: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.row)

    def of_rows(self, name: str) -> NDArray[Any]:
        """A column of the candidates, for every line of the table."""
        return self.rows.columns[name][self.row]

    def value(self, name: str, i: int) -> Any:
        """Of the candidate of one line."""
        return self.rows.columns[name][self.row[i]]

    def layout(self, i: int) -> GPULayout:
        return self.rows.layouts[int(self.value("layout", i))]

    def offered(self, i: int) -> Offer | None:
        return self.offers[self.offer[i]] if self.offer[i] >= 0 else None


def priced(
    rows: Rows,
    offers_of: Callable[[int, int], Sequence[Offer]],
    epochs: Sequence[float],
    assumed: Assumptions,
    limits: Limits,
) -> Table:
    """What each candidate costs.

    Parameters
    ----------
    rows : candidates.
    offers_of : what a number of GPUs can be rented for, by position of the GPU.
    epochs : by position of the variant.
    """
    found: list[Offer] = []
    row, offer = [np.flatnonzero(~rows.columns["fits"])], [np.full(int((~rows.columns["fits"]).sum()), -1)]
    pairs = np.stack([rows.columns["gpu"], rows.columns["num_gpus"]], axis=1)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    for i, (gpu, num_gpus) in enumerate(distinct.tolist()):
        here = np.flatnonzero((which.ravel() == i) & rows.columns["fits"])
        offered = offers_of(gpu, num_gpus)
        row.append(np.repeat(here, max(len(offered), 1)))
        at = np.arange(len(found), len(found) + len(offered)) if offered else np.array([-1])
        offer.append(np.tile(at, len(here)))
        found += offered
    where, by = np.concatenate(row).astype(np.intp), np.concatenate(offer).astype(np.intp)
    columns = _columns(rows, tuple(found), where, by, np.array(epochs, dtype=np.float64), assumed)
    return Table(rows, tuple(found), where, by, columns, _status(rows.columns["fits"][where], by, columns, limits))


def _columns(
    rows: Rows, offers: Sequence[Offer], row: NDArray[np.intp], offer: NDArray[np.intp], epochs: Floats, a: Assumptions
) -> dict[str, Floats]:
    c = {name: column[row] for name, column in rows.columns.items()}
    nothing = np.array([np.nan])
    usd_per_hour = np.append([o.usd_per_hour for o in offers], nothing)[offer]
    spot = np.append([o.quote.market == "spot" for o in offers], [False]).astype(bool)[offer]
    once_s = c["startup_s"] + c["parameters"] * CHECKPOINT_BYTES / a.download_bytes_per_s
    evaluated = a.evaluation_queries * np.ceil(epochs)[c["variant"]]
    useful_s = c["hours"] * HOUR - c["startup_s"] + evaluated / c["queries_per_second"] * c["forward_share"]
    wall_s, interruptions, checkpoint_s = useful_s.copy(), np.zeros(len(row)), np.full(len(row), np.nan)
    on_spot = np.flatnonzero(spot)
    if len(on_spot):
        run = _interrupted(rows, {name: column[on_spot] for name, column in c.items()}, useful_s[on_spot],
                           once_s[on_spot], a)  # fmt: skip
        wall_s[on_spot], interruptions[on_spot] = run.wall_s, run.interruptions
        checkpoint_s[on_spot] = run.interval_s
    hours = (once_s + wall_s) / HOUR
    hours = np.where(np.isfinite(hours), hours, np.nan)  # interrupted so often that it never ends
    watts = np.array([rows.specs[g].tdp_w or np.nan if g in rows.specs else np.nan for g in range(_most(c["gpu"]))])
    energy = hours * c["num_gpus"] * watts[c["gpu"]] * a.power_share / 1000.0
    grid = np.nan if a.grid_gco2_per_kwh is None else a.grid_gco2_per_kwh
    return {
        "hours": hours,
        "cost_usd": np.asarray(cost_usd(hours=hours, num_gpus=1.0, usd_per_gpu_hour=usd_per_hour)),
        "energy_kwh": energy,
        "co2e_kg": energy * grid / 1000.0,
        "interruptions": interruptions,
        "checkpoint_s": checkpoint_s,
    }


def _most(positions: NDArray[Any]) -> int:
    return int(positions.max(initial=-1)) + 1


def _interrupted(
    rows: Rows, c: Mapping[str, NDArray[Any]], useful_s: Floats, once_s: Floats, a: Assumptions
) -> InterruptedRun:
    """Spot runs: checkpoints as often as loses least, restarts on another machine."""
    pairs, which = np.unique(np.stack([c["gpu"], c["num_gpus"]], axis=1), axis=0, return_inverse=True)
    machines = np.array([-(-n // rows.per_node[g, n]) for g, n in pairs.tolist()], dtype=np.float64)[which.ravel()]
    return interrupted_run(
        useful_s=useful_s,
        save_s=c["save_s"],
        restart_s=a.restart_s + once_s + c["save_s"],  # a checkpoint is read as quickly as it is written
        mtbf_s=job_mtbf(machine_mtbf_s=a.machine_mtbf_hours * HOUR, num_machines=machines),
    )


def _status(fits: NDArray[np.bool_], offer: NDArray[np.intp], c: Mapping[str, Floats], limits: Limits
            ) -> NDArray[np.int8]:  # fmt: skip
    hours, usd = c["hours"], c["cost_usd"]
    dear = usd > (np.inf if limits.budget_usd is None else limits.budget_usd)
    late = np.isnan(hours) | (hours > (np.inf if limits.deadline_hours is None else limits.deadline_hours))
    status = np.select(
        [~fits, offer < 0, dear & late, dear, late], [DOES_NOT_FIT, NO_QUOTE, BOTH, OVER_BUDGET, TOO_LATE], DOMINATED
    ).astype(np.int8)
    within = np.flatnonzero(status == DOMINATED)
    front = within[pareto_front(hours=hours[within], cost_usd=usd[within])]
    _, first = np.unique(np.stack([hours[front], usd[front]], axis=1), axis=0, return_index=True)
    status[front[first]] = FRONT  # one of several that are equal in both
    return status
