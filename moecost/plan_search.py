"""What was found among all candidates of a plan: the front, and of any other choice why it lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from moecost import catalog
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.plan_figures import Question
from moecost.plan_offers import GIVEN
from moecost.plan_table import (
    BOTH,
    DOES_NOT_FIT,
    DOMINATED,
    FRONT,
    NO_QUOTE,
    OVER_BUDGET,
    STATUSES,
    TOO_LATE,
    Limits,
    Table,
)
from moecost.results import Estimate
from moecost.specs import Market

CANNOT_BE_USED: Final = "cannot be used"
"""Status of a GPU that a method cannot be run on at all."""
_RANK: Final = np.array([0, 1, 2, 2, 3, 5, 4], dtype=np.int8)
"""Which status is nearer to an answer, by code."""


class PlanCandidate(BaseModel):
    """One way to run the job, and why it won or lost. Figures that it does not have are None."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    label: str
    status: str
    """`front`, or why it is not on it: `dominated`, `over budget`, `too late`, `does not fit`, `no quote`, ..."""
    reason: str
    gpu: str
    num_gpus: int | None = None
    method: str
    layout: str = ""
    """Kinds of parallelism."""
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    provider: str | None = None
    market: Market | None = None
    usd_per_gpu_hour: float | None = None
    """Of a GPU that is paid for. [$/h]"""
    billed_gpus: int | None = None
    """GPUs that are paid for: more than are used where machines are rented whole."""
    queries_per_second: float | None = None
    run_hours: float | None = None
    """As `Estimate.hours`: steps, the stack's checkpoints and start-up, nothing interrupted. [h]"""
    hours: float | None = None
    """From start to end: `run_hours`, download, evaluation, and what interruptions cost. [h]"""
    cost_usd: float | None = None
    """`hours` of all GPUs that are paid for. [$]"""
    energy_kwh: float | None = None
    """Of the GPUs. [kWh]"""
    co2e_kg: float | None = None
    interruptions: float | None = None
    """Expected, on spot machines."""
    checkpoint_s: float | None = None
    """Work between two checkpoints of a spot run. [s]"""
    device_gib: float | None = None
    """Memory needed. [GiB]"""
    room_gib: float | None = None
    """Memory that may be used, head-room apart. [GiB]"""
    job: Job | None = Field(default=None, repr=False)
    """The whole job, as `estimate` takes it; its price is that of a GPU in use."""

    def estimate(self) -> Estimate:
        """All about this way to run the job, before interruptions, download and evaluation."""
        if self.job is None:
            raise InvalidInputError(f"{self.label} is no job: {self.reason}")
        return estimate_job(self.job.model_copy(update={"on_oom": "report"}))


@dataclass(frozen=True, eq=False)
class Search:
    """All candidates, and what can be said of each.

    Attributes
    ----------
    table : the candidates.
    question : what was tried.
    variants : fields of the job besides GPU, layout and batch, as they were given.
    sellers : whose quotes were looked at, in words.
    """

    table: Table
    question: Question
    variants: tuple[dict[str, Any], ...]
    limits: Limits
    sellers: str

    @property
    def gives_price(self) -> bool:
        """All candidates have one price, that was given."""
        return any(offer.quote.provider == GIVEN for offer in self.table.offers)

    @cached_property
    def front(self) -> list[int]:
        """The front by cost, cheapest first."""
        found = np.flatnonzero(self.table.status == FRONT)
        return [int(i) for i in found[np.argsort(self.table.columns["cost_usd"][found], kind="stable")]]

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """All lines, those nearest to an answer first: by status, then cost, or what memory they lack."""
        t = self.table
        lacks = t.of_rows("device_gib") / t.of_rows("room_gib")
        by = np.where(np.isnan(t.columns["cost_usd"]), lacks, t.columns["cost_usd"])
        return np.lexsort((by, _RANK[t.status]))

    def counts(self) -> dict[str, int]:
        """Lines by status."""
        numbers = np.bincount(self.table.status, minlength=len(STATUSES)).tolist()
        found = {name: n for name, n in zip(STATUSES, numbers, strict=True) if n}
        refused = len(self.table.rows.refused)
        return found | ({CANNOT_BE_USED: refused} if refused else {})

    def lost(self) -> list[PlanCandidate]:
        """The best of each GPU and method that has none on the front, nearest to an answer first."""
        t = self.table
        pair = t.of_rows("gpu") * len(self.variants) + t.of_rows("variant")
        won = set(pair[self.front].tolist())
        _, first = np.unique(pair[self._order], return_index=True)
        best = [int(i) for i in self._order[np.sort(first)] if int(pair[i]) not in won]
        return [*map(self.candidate, best), *(self._refused(*one) for one in t.rows.refused)]

    def nearest(self) -> dict[str, PlanCandidate]:
        """Where nothing keeps to all limits: what comes nearest to each."""
        t = self.table
        hours, usd = t.columns["hours"], t.columns["cost_usd"]
        out: dict[str, int] = {}
        known = np.flatnonzero(~np.isnan(hours + usd))
        if not len(known):
            first = int(self._order[0])
            out[{DOES_NOT_FIT: "memory", NO_QUOTE: "quotes"}.get(int(t.status[first]), "deadline_hours")] = first
        if len(known) and self.limits.budget_usd is not None:
            out["budget_usd"] = _least(usd, known, hours, self.limits.deadline_hours)
        if len(known) and self.limits.deadline_hours is not None:
            out["deadline_hours"] = _least(hours, known, usd, self.limits.budget_usd)
        return {name: self.candidate(i) for name, i in out.items()}

    def why(self, which: Mapping[str, Any]) -> str:
        """Of the best candidate that has these values."""
        chosen = np.ones(len(self.table), dtype=bool)
        frame = self.frame()
        for name, value in which.items():
            if name not in frame:
                raise UnknownNameError("column", name, frame, f"There are {', '.join(frame)}.")
            chosen &= np.asarray(frame[name] == _wanted(name, value))
        found = self._order[chosen[self._order]]
        asked = ", ".join(f"{name}={value!r:.80}" for name, value in which.items())
        if len(found):
            c = self.candidate(int(found[0]))
            return f"{'on the front' if c.status == 'front' else c.status}: {c.label}: {c.reason}"
        for refused in (self._refused(*one) for one in self.table.rows.refused):
            if all(getattr(refused, name, None) == _wanted(name, value) for name, value in which.items()):
                return f"{refused.status}: {refused.label}: {refused.reason}"
        raise InvalidInputError(f"nothing was tried with {asked}")

    # ------------------------------------------------------------------------------------------- one candidate
    def candidate(self, i: int) -> PlanCandidate:
        """A line of the table, with its reason."""
        t = self.table
        offer, layout, variant = t.offered(i), t.layout(i), self.variants[int(t.value("variant", i))]
        job = self._job(i)
        return PlanCandidate(
            label=self.label(i),
            status=STATUSES[t.status[i]],
            reason=self._reason(i),
            gpu=self._gpu(i),
            num_gpus=layout.num_gpus,
            method=str(variant.get("method")),
            layout=str(layout),
            micro_batch_size=int(t.value("micro_batch_size", i)),
            global_batch_size=self.question.global_batch_size,
            provider=None if offer is None else offer.quote.provider,
            market=None if offer is None else offer.quote.market,
            usd_per_gpu_hour=None if offer is None else offer.quote.usd_per_gpu_hour,
            billed_gpus=None if offer is None else offer.billed_gpus,
            queries_per_second=_known(t.value("queries_per_second", i)),
            run_hours=_known(t.value("hours", i)),
            device_gib=float(t.value("device_gib", i)),
            room_gib=float(t.value("room_gib", i)),
            job=job,
            **{name: _known(column[i]) for name, column in t.columns.items()},
        )

    def _job(self, i: int) -> Job:
        offer = self.table.offered(i)
        money = {} if offer is None else {"price": offer.price, "market": offer.quote.market}
        return Job(
            **self.variants[int(self.table.value("variant", i))],
            gpu=self.question.gpus[int(self.table.value("gpu", i))],
            **self.table.layout(i).fields(),
            micro_batch_size=int(self.table.value("micro_batch_size", i)),
            global_batch_size=self.question.global_batch_size,
            **money,
        )

    def _gpu(self, i: int) -> str:
        return self.table.rows.specs[int(self.table.value("gpu", i))].name

    def label(self, i: int) -> str:
        """`8 x gpu, method, provider`, and what tells variants of the job apart."""
        t = self.table
        offer, variant = t.offered(i), int(t.value("variant", i))
        words = [f"{t.layout(i).num_gpus} x {self._gpu(i)}", self._variant(variant)]
        if offer is not None and offer.quote.provider != GIVEN:
            spot = "" if offer.quote.market == "on_demand" else f" {offer.quote.market}"
            words.append(f"{offer.quote.provider}{spot}")
        return ", ".join(words)

    def _variant(self, variant: int) -> str:
        fields = self.variants[variant]
        apart = [f"{name}={fields[name]}" for name in self._differing if name in fields]
        return ", ".join([str(fields.get("method")), *apart])

    @cached_property
    def _differing(self) -> list[str]:
        """Fields besides the method in which variants differ that have them."""
        names = dict.fromkeys(name for v in self.variants for name in v if name != "method")
        return [n for n in names if len({str(v[n]) for v in self.variants if n in v}) > 1]

    def _refused(self, gpu: int, variant: int, why: str) -> PlanCandidate:
        name = self.question.gpus[gpu]
        name = str(getattr(name, "name", name))
        return PlanCandidate(
            label=f"{name}, {self._variant(variant)}",
            status=CANNOT_BE_USED,
            reason=why,
            gpu=name,
            method=str(self.variants[variant].get("method")),
        )

    # ------------------------------------------------------------------------------------------------ reasons
    def _reason(self, i: int) -> str:
        t, status = self.table, int(self.table.status[i])
        if status == DOES_NOT_FIT:
            need, room = t.value("device_gib", i), t.value("room_gib", i)
            spared = f", {100 * self.question.headroom:.0f} % kept free" if self.question.headroom else ""
            batch = int(t.value("micro_batch_size", i))
            return f"needs {need:.1f} of {room:.1f} GiB{spared} at micro_batch_size={batch}"
        if status == NO_QUOTE:
            return f"no quote of {self.sellers} for {self._gpu(i)}"
        whole = self._whole_machines(i)
        if status in (OVER_BUDGET, TOO_LATE, BOTH):
            return "; ".join([*self._beyond(i), *whole])
        if status == DOMINATED:
            return "; ".join([self._dominated(i), *whole])
        place = {self.front[0]: "the cheapest", self.front[-1]: "the fastest"}
        if len(self.front) == 1:
            return "; ".join(["the cheapest and the fastest", *whole])
        return "; ".join([place.get(i, "nothing is both as fast and as cheap"), *whole])

    def _whole_machines(self, i: int) -> Iterator[str]:
        offer = self.table.offered(i)
        if offer is not None and offer.billed_gpus > offer.num_gpus:
            yield f"{offer.billed_gpus} GPUs are paid for, machines of {offer.quote.gpu_count} are rented whole"

    def _beyond(self, i: int) -> Iterator[str]:
        hours, usd = self.table.columns["hours"][i], self.table.columns["cost_usd"][i]
        if math.isnan(hours):
            yield "interrupted so often that it never ends"
        if self.limits.budget_usd is not None and usd > self.limits.budget_usd:
            yield f"over budget by ${usd - self.limits.budget_usd:,.2f}"
        if self.limits.deadline_hours is not None and hours > self.limits.deadline_hours:
            yield f"too late by {hours - self.limits.deadline_hours:,.3g} hours"

    def _dominated(self, i: int) -> str:
        """By the cheapest of the front that is as fast and as cheap."""
        hours, usd = self.table.columns["hours"], self.table.columns["cost_usd"]
        by = next((f for f in self.front if hours[f] <= hours[i] and usd[f] <= usd[i]), None)
        if by is None:  # of equal figures the first is on the front
            return "as fast and as cheap as one on the front"
        saved, sooner = usd[i] - usd[by], hours[i] - hours[by]
        ways = [f"${saved:,.2f} cheaper"] if saved > 0 else ["as cheap"]
        ways.append(f"{sooner:,.3g} hours sooner" if sooner > 0 else "as fast")
        return f"{self.label(by)} is {' and '.join(ways)}"

    # ------------------------------------------------------------------------------------------------- columns
    def frame(self) -> dict[str, Any]:
        """All lines as columns."""
        t = self.table
        specs = [t.rows.specs.get(i) for i in range(len(self.question.gpus))]
        quotes = [o.quote for o in t.offers]
        shapes = t.rows.layouts
        layout = t.of_rows("layout")
        out: dict[str, Any] = {
            "gpu": np.array([spec and spec.name for spec in specs], object)[t.of_rows("gpu")],
            "num_gpus": t.of_rows("num_gpus"),
            "method": np.array([str(v.get("method")) for v in self.variants], object)[t.of_rows("variant")],
        }
        for name in self._differing:
            out[name] = np.array([str(v.get(name)) for v in self.variants], object)[t.of_rows("variant")]
        for name in ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
                     "expert_parallel_size", "data_parallel_size"):  # fmt: skip
            out[name] = np.array([getattr(s, name) for s in shapes], np.int64)[layout]
        out |= {
            "micro_batch_size": t.of_rows("micro_batch_size").astype(np.int64),
            "provider": np.array([*(q.provider for q in quotes), None], object)[t.offer],
            "market": np.array([*(q.market for q in quotes), None], object)[t.offer],
            "usd_per_gpu_hour": np.array([*(q.usd_per_gpu_hour for q in quotes), np.nan])[t.offer],
            "billed_gpus": np.array([*(o.billed_gpus for o in t.offers), 0])[t.offer],
            "status": np.array(STATUSES, object)[t.status],
            "device_gib": t.of_rows("device_gib"),
            "room_gib": t.of_rows("room_gib"),
            "queries_per_second": t.of_rows("queries_per_second"),
            "run_hours": t.of_rows("hours"),
            **t.columns,
        }
        return out


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _least(of: NDArray[np.float64], known: NDArray[np.intp], other: NDArray[np.float64], limit: float | None) -> int:
    """The line with the least of a figure: among those that keep to the other's limit where some do."""
    within = known if limit is None else known[other[known] <= limit]
    among = within if len(within) else known
    return int(among[np.argmin(of[among])])


def _wanted(name: str, value: Any) -> Any:
    """A value as columns have it: of a GPU's aliases its name."""
    return (catalog.gpu_index().get(value) or value) if name == "gpu" and isinstance(value, str) else value
