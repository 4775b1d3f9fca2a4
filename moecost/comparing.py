"""`compare`: several jobs beside each other, cheapest first; what lost is there too, with the reason why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from moecost.errors import InvalidInputError, MoECostError, UnsupportedError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.results import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

Status = Literal["fits", "does not fit", "cannot be used"]
SortedBy = Literal["cost_usd", "gpu_hours"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Candidate(_Frozen):
    """One of the jobs that are compared."""

    label: str
    """What tells it from the others."""
    status: Status
    reason: str
    """Why it stands where it does: how many times the cost and hours of the first, or why it cannot be used."""
    estimate: Estimate | None
    """None where the job cannot be used. Of a job that does not fit: every figure as if it did."""
    job: Job | None = Field(repr=False)
    """None where an estimate was given, or fields that make no job."""


class Comparison(_Frozen):
    """Jobs beside each other, the best first; `print` shows a table, a notebook the same as HTML.

    Those that fit come first, by cost (those whose price is not known after the others, by GPU-hours); then those that
    do not fit, then those that cannot be used.
    """

    candidates: tuple[Candidate, ...]
    sorted_by: SortedBy
    """`gpu_hours` where no price is known."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Those that fit, in their order."""
        return tuple(c.estimate for c in self.candidates if c.estimate is not None and c.status == "fits")

    @property
    def best(self) -> Estimate | None:
        """The first of those that fit; None where none does."""
        return next(iter(self.estimates), None)

    def rows(self) -> list[dict[str, Any]]:
        """A flat row a candidate: label, status, reason and main figures.

        Units: `cost_usd` [$], `hours` and `gpu_hours` [h], `device_gib` and `usable_gib` [GiB]. A job that cannot be
        used has no figures (None), one that does not fit only those of memory; a cost that is not known is NaN.
        """
        return [
            {"label": c.label, "status": c.status, "reason": c.reason, **_figures(c.estimate)} for c in self.candidates
        ]

    def to_pandas(self) -> DataFrame:
        """`rows` as a data frame (needs pandas)."""
        try:
            import pandas as pd
        except ImportError:
            raise UnsupportedError("to_pandas needs pandas: pip install pandas") from None
        return pd.DataFrame(self.rows())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Time against cost, and the front of those that nothing beats in both (extra `[plot]`)."""
        from moecost.plotting import pareto

        shown = [c for c in self.candidates if c.estimate is not None]
        return pareto([c.estimate for c in shown if c.estimate], labels=[c.label for c in shown], ax=ax)

    def __str__(self) -> str:
        from moecost.comparison_report import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from moecost.comparison_report import as_html

        return as_html(self)


def compare(jobs: Iterable[Job | Mapping[str, Any] | Estimate], *, labels: Sequence[str] | None = None) -> Comparison:
    """Jobs beside each other, cheapest first, and why the others lost.

    Parameters
    ----------
    jobs : `Job`s, dicts of the fields of a job, or estimates.
    labels : a name for each; None: what tells them apart.

    Returns
    -------
    Comparison : every job, also those that do not fit or cannot be used, which stand at the end with the reason.

    Raises
    ------
    InvalidInputError : there is nothing to compare, or something that is neither a job nor an estimate.

    >>> tuned = {"model": "mistral-7b", "method": "qlora", "sequence_length": 1024, "price": 1.0}
    >>> found = compare([tuned | {"gpu": gpu} for gpu in ("a40", "h100", "t4")])
    >>> [(c.label, c.status) for c in found.candidates]
    [('h100-80gb-sxm', 'fits'), ('a40', 'fits'), ('t4', 'does not fit')]
    """
    given = _listed(jobs)
    if labels is not None and len(labels) != len(given):
        raise InvalidInputError(f"{len(labels)} labels for {len(given)} jobs; give one each, or none")
    tried = [_try(item) for item in given]
    names = _unique(_labels(tried) if labels is None else [str(label) for label in labels])
    by: SortedBy = "cost_usd" if any(t.priced for t in tried if t.status == "fits") else "gpu_hours"
    ordered = sorted(zip(names, tried, strict=True), key=lambda pair: _place(pair[1], by))
    first = ordered[0][1].estimate if ordered[0][1].status == "fits" else None
    found = (
        Candidate(label=name, status=t.status, reason=_reason(t, first), estimate=t.estimate, job=t.job)
        for name, t in ordered
    )
    return Comparison(candidates=tuple(found), sorted_by=by, notes=tuple(_notes(tried)))


@dataclass(frozen=True)
class _Tried:
    """What became of one of the jobs."""

    fields: Mapping[str, Any]
    job: Job | None
    estimate: Estimate | None
    error: str = ""

    @property
    def status(self) -> Status:
        if self.estimate is None:
            return "cannot be used"
        return "fits" if self.estimate.fits else "does not fit"

    @property
    def priced(self) -> bool:
        return self.estimate is not None and not math.isnan(self.estimate.cost_usd)


def _listed(jobs: Any) -> list[Any]:
    one = isinstance(jobs, Job | Estimate | Mapping | str) or not isinstance(jobs, Iterable)
    if one:
        raise InvalidInputError(f"compare takes a list of jobs, not {type(jobs).__name__}: compare([job, job])")
    found = list(jobs)
    if not found:
        raise InvalidInputError("nothing to compare: give at least one job")
    for i, item in enumerate(found):
        if not isinstance(item, Job | Estimate | Mapping):
            raise InvalidInputError(f"jobs[{i}] is {item!r:.80}; give a Job, a dict of its fields, or an Estimate")
    return found


def _try(item: Job | Mapping[str, Any] | Estimate) -> _Tried:
    if isinstance(item, Estimate):
        return _Tried({}, None, item)
    fields: Mapping[str, Any] = {str(k): v for k, v in item.items()} if isinstance(item, Mapping) else dict(item)
    job = item if isinstance(item, Job) else None
    try:
        job = Job(**fields) if job is None else job
        return _Tried(fields, job, estimate_job(job.model_copy(update={"on_oom": "report"})))
    except MoECostError as error:
        return _Tried(fields, job, None, str(error))


# --------------------------------------------------------------------------------------------------------- order
def _place(tried: _Tried, by: SortedBy) -> tuple[float, ...]:
    e = tried.estimate
    if e is None:
        return (2.0,)
    if not e.fits:
        return 1.0, e.memory.device_gib / e.memory.usable_gib  # what nearly fits comes first
    if by == "gpu_hours" or not tried.priced:
        return 0.0, 1.0, e.gpu_hours
    return 0.0, 0.0, e.cost_usd, e.hours


def _notes(tried: Sequence[_Tried]) -> Iterable[str]:
    usable = [t for t in tried if t.status == "fits"]
    unpriced = sum(not t.priced for t in usable)
    if not usable:
        yield "none of the jobs fits"
    elif unpriced == len(usable):
        yield "no price is known, so they are sorted by GPU-hours; pass price= to compare costs"
    elif unpriced:
        yield f"{unpriced} without a known price come after those with one, by GPU-hours; pass price= to compare costs"


# ------------------------------------------------------------------------------------------------------- reasons
def _reason(tried: _Tried, first: Estimate | None) -> str:
    e = tried.estimate
    if e is None:
        return tried.error
    if not e.fits:
        m = e.memory
        largest = "not even one sequence fits" if not e.max_micro_batch_size else f"{e.max_micro_batch_size} would fit"
        return (
            f"does not fit: needs {m.device_gib:.1f} of {m.usable_gib:.1f} GiB at "
            f"micro_batch_size={e.micro_batch_size}; {largest}"
        )
    if first is None or e is first:
        return "the cheapest" if tried.priced else "the fewest GPU-hours"
    return _against(e, first)


def _against(e: Estimate, first: Estimate) -> str:
    """How an estimate compares with the first."""
    field, what = ("cost_usd", "cost") if not math.isnan(e.cost_usd + first.cost_usd) else ("gpu_hours", "GPU-hours")
    said = f"{_times(getattr(e, field), getattr(first, field))} the {what}, {_times(e.hours, first.hours)} the hours"
    if math.isnan(e.cost_usd) and not math.isnan(first.cost_usd):
        said = f"its price is not known; {said}"
    (low, high), (least, most) = e.interval(field), first.interval(field)
    overlap = low <= most and least <= high
    return f"{said}; 80 % intervals of the {what} overlap" if overlap else said


def _times(value: float, of: float) -> str:
    if value == of:
        return "as much as" if not of else "1.00 times"
    return f"{value / of:.2f} times" if of else "more than 0 times"


# -------------------------------------------------------------------------------------------------------- labels
_SAID_ALONE: Final = frozenset({"model", "num_gpus", "gpu", "method"})
"""Fields whose values say what they are."""
_OF_ESTIMATE: Final = ("model", "gpu", "num_gpus", "method", "dataset", "sequence_length")
_LONGEST: Final = 40
"""Of a value in a label. [character]"""


def _labels(tried: Sequence[_Tried]) -> list[str]:
    """The fields in which each differs from the others."""
    facts = [_facts(t) for t in tried]
    differing = [name for name in dict.fromkeys(n for f in facts for n in f) if _differs(name, facts)]
    return [_label(f, differing) for f in facts]


def _facts(tried: _Tried) -> dict[str, Any]:
    """Fields of the job, under the names that the catalogue gives to model and GPU."""
    e = tried.estimate
    fields = dict(tried.fields if tried.job is None else tried.job)
    if e is not None:
        fields |= {name: getattr(e, name) for name in _OF_ESTIMATE} | {"software": e.provenance.software}
    if e is not None and tried.job is None:
        fields |= {"micro_batch_size": e.micro_batch_size, "gradient_accumulation_steps": e.gradient_accumulation_steps}
    return {name: _said(name, value) for name, value in fields.items() if name != "on_oom"}


def _said(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("name", f"a {name}")
    value = getattr(value, "name", value) if not isinstance(value, str) else value
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _differs(name: str, facts: Sequence[Mapping[str, str]]) -> bool:
    return len({f[name] for f in facts if name in f}) > 1


def _label(facts: Mapping[str, str], differing: Sequence[str]) -> str:
    """`model, 2 x gpu, method, field=value`, of what differs; model and GPU where nothing does."""
    shown = {name for name in differing or ("model", "gpu") if name in facts}
    words = [facts["model"]] if "model" in shown else []
    if "num_gpus" in shown:
        words.append(f"{facts['num_gpus']} x {facts.get('gpu', 'a GPU')}")
    elif "gpu" in shown:
        words.append(facts["gpu"])
    words += [facts["method"]] if "method" in shown else []
    words += [f"{name}={facts[name]}" for name in differing if name in shown - _SAID_ALONE and facts[name] != "None"]
    return ", ".join(words) or "a job"


def _unique(labels: Sequence[str]) -> list[str]:
    """Equal labels are numbered."""
    seen: dict[str, int] = {}
    out = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        out.append(label if labels.count(label) == 1 else f"{label} ({seen[label]})")
    return out


# ------------------------------------------------------------------------------------------------------- figures
_ASKED: Final = ("model", "gpu", "num_gpus", "method", "micro_batch_size", "max_micro_batch_size",
                 "global_batch_size")  # fmt: skip
_REACHED: Final = ("queries_per_second", "hours", "gpu_hours", "usd_per_gpu_hour", "cost_usd", "bound")
_COLUMNS: Final = (*_ASKED, *_REACHED, "cost_low", "cost_high", "device_gib", "usable_gib")


def _figures(e: Estimate | None) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(_COLUMNS)
    if e is None:
        return found
    found |= {name: getattr(e, name) for name in _ASKED}
    found |= {"device_gib": e.memory.device_gib, "usable_gib": e.memory.usable_gib}
    if e.fits:
        found |= {name: getattr(e, name) for name in _REACHED}
        found["cost_low"], found["cost_high"] = e.interval("cost_usd")
    return found
