"""`plan`: which GPUs, how many, whose, and how laid out, so that a run keeps to a budget and a deadline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr

from moecost.errors import InvalidInputError, UnsupportedError
from moecost.job import Method
from moecost.plan_figures import Question, Rows, evaluate
from moecost.plan_layouts import SIZES
from moecost.plan_offers import Offer, Sellers
from moecost.plan_search import PlanCandidate, Search
from moecost.plan_table import Assumptions, Limits, priced
from moecost.prices import PriceBook, age_note
from moecost.specs import GPUSpec, Market
from moecost.sweep_axes import ADAPTER_FIELDS, Axes, loaded, read_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Drawing
    from pandas import DataFrame

DEFAULT_GLOBAL_BATCH: Final = 64
"""Sequences of an optimizer step where none is given: one for each of 64 GPUs."""
DEFAULT_HEADROOM: Final = 0.05
"""Memory that stays free: predictions of it are off by a few per cent."""
MOST_GPUS: Final = 4096
MARKETS: Final[tuple[Market, ...]] = get_args(Market)
LEFT_TO_THE_PLAN: Final = {
    "gpu": "give gpus=[...]",
    "models": "a plan is of one model",
    "gradient_accumulation_steps": "leave it out: it follows from global_batch_size",
    "on_oom": "leave it out: candidates that do not fit are told as such",
    "node": "leave it out, or name a cloud instance type as one of gpus",
    "gpus_per_node": "leave it out, or name a cloud instance type as one of gpus",
}
"""Fields of a job that a plan does not take, and what to do."""
WITHOUT_MEANING: Final = {"full": (*ADAPTER_FIELDS, "density"), "sparse": ("lora_rank",)}
"""Fields that are not given to variants of these methods; `density` is to sparse tuning alone."""
NAMED: Final = 6
"""Points of the front that a picture names."""
LAYOUT_FIELDS: Final = ("num_gpus", "zero_stage", *SIZES)


class Plan(BaseModel):
    """The Pareto front of time and cost; `print` shows it, a notebook the same as HTML. Empty where nothing will do.

    `len()` is the size of the front; `why(gpu="h100")` says of any other choice what is wrong with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, arbitrary_types_allowed=True)

    front: tuple[PlanCandidate, ...]
    """Those that nothing beats in both time and cost within all limits, cheapest first."""
    lost: tuple[PlanCandidate, ...]
    """The best of each GPU and method that has none on the front, with the reason."""
    nearest: dict[str, PlanCandidate]
    """Where the front is empty: what comes nearest, by limit."""
    counts: dict[str, int]
    """Candidates by status."""
    model: str
    dataset: str | None
    budget_usd: float | None
    deadline_hours: float | None
    min_memory_headroom: float
    max_gpus: int
    global_batch_size: int
    assumptions: Assumptions
    notes: tuple[str, ...]
    _search: Search | None = PrivateAttr(None)

    def __len__(self) -> int:
        return len(self.front)

    @property
    def best(self) -> PlanCandidate | None:
        """The cheapest within all limits; None where there is none."""
        return self.front[0] if self.front else None

    @property
    def fastest(self) -> PlanCandidate | None:
        """The quickest within all limits; None where there is none."""
        return self.front[-1] if self.front else None

    def why(self, **which: Any) -> str:
        """What became of a choice: of the best candidate with these fields, such as `gpu`, `provider`, `num_gpus`.

        >>> found = plan("mistral-7b", sequence_length=512, gpus=["a40", "h100"], methods="qlora", max_gpus=1)
        >>> found.why(gpu="h100").split(":")[0]
        'on the front'
        """
        return self._searched().why(which)

    def to_pandas(self) -> DataFrame:
        """A row for every candidate that was tried at every provider (needs pandas)."""
        try:
            import pandas as pd
        except ImportError:
            raise UnsupportedError("to_pandas needs pandas: pip install 'moecost[sweep]'") from None
        return pd.DataFrame(self._searched().frame())

    def plot(self, ax: Drawing | None = None) -> Drawing:
        """Time against cost of the front, and of the best of each GPU and method that it beats (extra `[plot]`)."""
        from moecost.plotting import pareto

        named = {round(i * (len(self.front) - 1) / max(NAMED - 1, 1)) for i in range(NAMED)}
        within = [c for c in self.lost if c.status == "dominated"] if self.front else list(self.lost)
        shown = [c for c in (*self.front, *within, *self.nearest.values()) if c.cost_usd is not None]
        hours, usd = [c.hours or math.nan for c in shown], [c.cost_usd or math.nan for c in shown]
        few = {self.front[i].label for i in named} if self.front else {c.label for c in self.nearest.values()}
        labels = [f"{c.num_gpus} x {c.gpu}, {c.provider}" if c.label in few else "" for c in shown]
        return pareto(hours=hours, cost_usd=usd, labels=labels, ax=ax)

    def _searched(self) -> Search:
        if self._search is None:
            raise InvalidInputError("this plan was read from JSON, which holds its answers, not all candidates")
        return self._search

    def __str__(self) -> str:
        from moecost.plan_report import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from moecost.plan_report import as_html

        return as_html(self)


def plan(
    model: Any,
    dataset: Any = None,
    *,
    budget_usd: float | None = None,
    deadline_hours: float | None = None,
    gpus: Any = None,
    providers: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    market: str | Sequence[str] = "on_demand",
    min_memory_headroom: float = DEFAULT_HEADROOM,
    max_gpus: int = 64,
    prices: PriceBook | None = None,
    grid_gco2_per_kwh: float | None = None,
    assumptions: Assumptions | Mapping[str, Any] | None = None,
    **job_fields: Any,
) -> Plan:
    """Which GPUs, how many, whose, and how laid out: the Pareto front of time and cost within limits.

    Tried are all GPUs, methods, providers, the parallel layouts that the software stack can run on up to `max_gpus`
    GPUs (the rule stands in `moecost.plan_layouts`), and of each the two largest micro-batches that fit.

    Parameters
    ----------
    model, dataset : as in `Job`; the data set, or `sequence_length` and `num_queries`, says what is trained.
    budget_usd : most dollars of the whole run. [$]
    deadline_hours : most hours from start to end. [h]
    gpus : names, instance types or `GPUSpec`s; None: all of the catalogue that have a quote.
    providers : whose quotes may be used; None: all.
    methods : of `Job.method`; None: all.
    market : `on_demand`, `spot` or `reserved`, or several of them. Spot runs are interrupted; see `Assumptions`.
    min_memory_headroom : share of a GPU's memory that stays free. [0..1)
    max_gpus : most GPUs of a run.
    prices : a price table (`moecost.prices.read`) in place of the catalogue's quotes.
    grid_gco2_per_kwh : carbon intensity of the grid, for CO2e. [g/kWh]
    assumptions : what is assumed beside the steps.
    **job_fields : other fields of `Job`. A list is tried value by value. `global_batch_size` is the same for all
        candidates, so that they train the same thing (64 where it is not given); sizes of layouts replace those of the
        rule; `price` in place of quotes.

    Returns
    -------
    Plan : the front, the best, why others lost, and what comes nearest where nothing will do.

    Notes
    -----
    Of each provider the cheapest quote counts that is of a machine with the GPUs that a layout joins. Machines are
    rented whole: one GPU of a machine of 8 costs as much as 8.

    Raises
    ------
    InvalidInputError : a limit that is no positive number, an unknown name, an empty list.

    >>> found = plan("mistral-7b", "math-14k", budget_usd=100, gpus=["a40", "h100"], methods=["qlora"], max_gpus=4)
    >>> found.best is not None and found.best.cost_usd <= 100
    True
    """
    limits = Limits(_limit("budget_usd", budget_usd), _limit("deadline_hours", deadline_hours))
    _check(min_memory_headroom, max_gpus)
    assumed = _assumptions(assumptions, grid_gco2_per_kwh)
    markets = _markets(market)
    fields = dict(job_fields)
    sellers = Sellers.of(prices, fields.pop("price", None), providers, markets)
    for name, what in LEFT_TO_THE_PLAN.items():
        if name in fields:
            raise InvalidInputError(f"{name} is left to the plan; {what}")
    fields |= {} if dataset is None else {"dataset": dataset}
    methods = fields.pop("method", None) if methods is None else methods
    unquoted = 0
    if gpus is None:
        gpus, unquoted = sellers.gpus()
    listed = [gpus] if isinstance(gpus, str | Path | GPUSpec) else gpus
    asked = {"models": [model], "gpus": listed, "method": list(get_args(Method)) if methods is None else methods}
    try:
        axes = read_axes(asked | fields)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).removeprefix("models: ")) from None
    question, raw = _question(axes, min_memory_headroom, max_gpus)
    rows = evaluate(question)
    if not len(rows):
        raise InvalidInputError(_nothing_to_try(question, rows))

    @cache
    def offered(gpu: int, num_gpus: int) -> list[Offer]:
        per_node = rows.per_node[gpu, num_gpus]
        return sellers.offers(question.gpus[gpu], rows.specs[gpu], num_gpus=num_gpus, gpus_per_node=per_node)

    table = priced(rows, offered, [float(variant.get("epochs", 1.0)) for variant in raw], assumed, limits)
    search = Search(table, question, raw, limits, sellers.named)
    front = [search.candidate(i) for i in search.front]
    notes = _notes(question, "global_batch_size" in fields, assumed, markets, search, unquoted)
    found = Plan(
        front=tuple(front),
        lost=tuple(search.lost()),
        nearest={} if front else search.nearest(),
        counts=search.counts(),
        model=str(getattr(question.variants[0]["model"], "name", model)),
        dataset=getattr(question.variants[0].get("dataset"), "name", None),
        budget_usd=limits.budget_usd,
        deadline_hours=limits.deadline_hours,
        min_memory_headroom=question.headroom,
        max_gpus=max_gpus,
        global_batch_size=question.global_batch_size,
        assumptions=assumed,
        notes=tuple(notes),
    )
    found._search = search
    return found


# --------------------------------------------------------------------------------------------------------- input
def _limit(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0.0 < value < math.inf):
        raise InvalidInputError(f"{name}={value!r:.80} must be a number above 0; leave it out for no limit")
    return float(value)


def _check(headroom: float, max_gpus: int) -> None:
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0.0 <= headroom < 1.0:
        raise InvalidInputError(f"min_memory_headroom={headroom!r:.80} must be a share of memory, from 0 to below 1")
    if isinstance(max_gpus, bool) or not isinstance(max_gpus, int) or not 1 <= max_gpus <= MOST_GPUS:
        raise InvalidInputError(f"max_gpus={max_gpus!r:.80} must be a whole number from 1 to {MOST_GPUS:,}")


def _assumptions(given: Assumptions | Mapping[str, Any] | None, grid: float | None) -> Assumptions:
    found = given if isinstance(given, Assumptions) else Assumptions(**(given or {}))
    return found if grid is None else Assumptions(**(dict(found) | {"grid_gco2_per_kwh": grid}))


def _markets(market: Any) -> tuple[Market, ...]:
    listed = (market,) if isinstance(market, str) or not isinstance(market, Iterable) else tuple(market)
    for one in listed or ("",):
        if one not in MARKETS:
            raise InvalidInputError(f"market={one!r:.80} must be one of {', '.join(MARKETS)}, or a list of them")
    return tuple(dict.fromkeys(listed))


def _question(axes: Axes, headroom: float, max_gpus: int) -> tuple[Question, tuple[dict[str, Any], ...]]:
    """What is tried, and the fields of each variant of the job as they were given."""
    batch = _one("global_batch_size", axes.pop("global_batch_size", (DEFAULT_GLOBAL_BATCH,)))
    micro = tuple(b for b in axes.pop("micro_batch_size", ()) if b is not None)
    given = {name: tuple(v for v in axes.pop(name) if v is not None) for name in LAYOUT_FIELDS if name in axes}
    gpus = tuple(dict.fromkeys(axes.pop("gpu")))
    raw = tuple(_fields(axes, values) for values in itertools.product(*axes.values()))
    question = Question(
        gpus=gpus,
        variants=tuple({name: loaded(name, value) for name, value in variant.items()} for variant in raw),
        global_batch_size=batch,
        micro_batch_sizes=micro or None,
        headroom=float(headroom),
        max_gpus=max_gpus,
        given={name: values for name, values in given.items() if values},
    )
    return question, raw


def _one(name: str, values: Sequence[Any]) -> int:
    if len(values) != 1 or values[0] is None:
        raise InvalidInputError(f"{name}={list(values)!r:.80}: give one number, so that all candidates train the same")
    return int(values[0])


def _fields(axes: Axes, values: Sequence[Any]) -> dict[str, Any]:
    """Fields of a variant of the job, without those that have no meaning with its method."""
    found = dict(zip(axes, values, strict=True))
    without = WITHOUT_MEANING.get(found["method"], ("density",))
    return {name: value for name, value in found.items() if name not in without}


def _nothing_to_try(question: Question, rows: Rows) -> str:
    first = next(iter([*(why for _, _, why in rows.refused), *rows.contradictions]), None)
    if first is not None:
        return first
    sizes = ", ".join(f"{name}={list(values)}" for name, values in question.given.items())
    micro = question.micro_batch_sizes
    batch = f"global_batch_size={question.global_batch_size}" + (f", micro_batch_size={list(micro)}" if micro else "")
    return f"no layout on up to {question.max_gpus} GPUs has {', '.join(filter(None, [sizes, batch]))}; allow others"


# --------------------------------------------------------------------------------------------------------- notes
def _notes(
    question: Question, batch_given: bool, a: Assumptions, markets: Sequence[Market], search: Search, unquoted: int
) -> Iterator[str]:
    """What was assumed, in sentences."""
    if not batch_given:
        yield f"global_batch_size was not given: {question.global_batch_size}, so that all train the same thing"
    if unquoted:
        yield f"{unquoted} GPUs of the catalogue have no quote of {search.sellers} and were not tried"
    if any(o.billed_gpus > o.num_gpus for o in search.table.offers):
        yield "machines are rented whole: GPUs of them that are not used are paid for as well"
    if any(o.quote.gpu_count == 1 < o.num_gpus for o in search.table.offers):
        yield "providers of whom single GPUs alone are quoted are taken to rent several joined, each at that price"
    yield (
        f"hours include fetching the weights, 2 bytes each, at {a.download_bytes_per_s / 1e9:g} GB/s a machine "
        "(assumed)" + ("" if a.evaluation_queries else "; no evaluation (evaluation_queries=0)")
    )
    if a.evaluation_queries:
        yield f"hours include the forward pass of {a.evaluation_queries:,} queries after each epoch"
    if "spot" in markets:
        yield (
            f"spot machines are taken to be interrupted every {a.machine_mtbf_hours:g} hours each, at random, and "
            f"replaced after {a.restart_s:g} s: an assumption (assumptions={{'machine_mtbf_hours': ...}}), no "
            "provider's statistic; checkpoints with the optimizer's state as often as loses least (Daly 2006)"
        )
    grid = "" if a.grid_gco2_per_kwh is None else f", {a.grid_gco2_per_kwh:g} g CO2e a kWh"
    yield f"energy is that of the GPUs alone, at {100 * a.power_share:g} % of their TDP (assumed){grid}"
    offer = search.table.offered(search.front[0]) if search.front else None
    if offer is not None and not search.gives_price and (old := age_note(offer.quote)):
        yield old
