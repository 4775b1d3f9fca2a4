"""A `Plan` for people, as plain text and as HTML: the front, the best of it, why others lost, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from moecost.plan_search import PlanCandidate
from moecost.planning import Plan
from moecost.report import WIDTH, Align, Row, Section, dollars, sections_as_html, sections_as_text, significant

LOST_SHOWN: Final = 10
FRONT_SHOWN: Final = 16
COLUMNS: Final[tuple[tuple[str, Align], ...]] = (
    ("dollars", ">"), ("hours", ">"), ("GiB", ">"), ("kWh", ">"), ("batch", ">"), ("method, layout, provider", "<"),
)  # fmt: skip
_LIMITS: Final = {"budget_usd": "budget", "deadline_hours": "deadline", "memory": "memory", "quotes": "quotes"}


def as_text(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text of at most `width` columns."""
    return sections_as_text(list(_sections(plan)), width)


def as_html(plan: Plan) -> str:
    """The plan as one self-contained `<div>`."""
    return sections_as_html(_sections(plan))


def _sections(plan: Plan) -> Iterator[Section]:
    yield Section("Plan", _summary(plan), (("", "<"),), tuple(_asked(plan)))
    if plan.front:
        yield _front(plan)
    else:
        rows = tuple(Row(_LIMITS[name], (f"{c.label}: {_figures(c)}{c.reason}",)) for name, c in plan.nearest.items())
        yield Section("Nothing will do", "what comes nearest to each limit", (("", "<"),), rows)
    if plan.lost:
        shown = plan.lost[:LOST_SHOWN]
        more = f"the best of each GPU and method; {len(plan.lost) - len(shown)} more are not shown: plan.why(gpu=...)"
        rows = tuple(Row(f"{_place(c)}, {c.method}", (f"{_figures(c)}{_why(c)}",)) for c in shown)
        summary = more if len(shown) < len(plan.lost) else "the best of each GPU and method that has none above"
        yield Section("Lost", summary, (("", "<"),), rows)
    if plan.notes:
        yield Section("Assumed", sentences=plan.notes)


def _summary(plan: Plan) -> str:
    tried = sum(plan.counts.values())
    return f"{tried:,} candidates, {len(plan)} on the front of time and cost"


def _asked(plan: Plan) -> Iterator[Row]:
    yield Row("model", (plan.model + (f" on {plan.dataset}" if plan.dataset else ""),))
    limits = [
        *([] if plan.budget_usd is None else [f"{dollars(plan.budget_usd)} at most"]),
        *([] if plan.deadline_hours is None else [f"{plan.deadline_hours:g} hours at most"]),
        f"{100 * plan.min_memory_headroom:g} % of memory free",
        f"up to {plan.max_gpus} GPUs",
    ]
    yield Row("limits", (", ".join(limits),))
    yield Row("candidates", (", ".join(f"{n:,} {status}" for status, n in plan.counts.items()),))


def _front(plan: Plan) -> Section:
    shown: Sequence[PlanCandidate] = plan.front
    summary = "cheapest first, each faster than the one before"
    if len(shown) > FRONT_SHOWN:  # both ends, and as evenly as can be between
        last = len(shown) - 1
        shown = [shown[round(i * last / (FRONT_SHOWN - 1))] for i in range(FRONT_SHOWN)]
        summary += f"; {FRONT_SHOWN} of {len(plan)}"
    return Section("Front", summary, COLUMNS, tuple(Row(_place(c), _cells(c)) for c in shown))


def _place(c: PlanCandidate) -> str:
    return c.gpu if c.num_gpus is None else f"{c.num_gpus} x {c.gpu}"


def _cells(c: PlanCandidate) -> tuple[str, ...]:
    how = [c.label.removeprefix(f"{_place(c)}, "), *([c.layout] if c.num_gpus != 1 else [])]
    if c.billed_gpus is not None and c.num_gpus is not None and c.billed_gpus > c.num_gpus:
        how.append(f"{c.billed_gpus} paid for")
    batch = "" if c.micro_batch_size is None else f"{c.micro_batch_size:,}"
    return _dollars(c), _number(c.hours), _number(c.device_gib), _number(c.energy_kwh), batch, ", ".join(how)


def _why(c: PlanCandidate) -> str:
    """The reason; what is beyond a limit says so itself."""
    return c.reason if c.status.startswith(("over", "too")) else f"{c.status}: {c.reason}"


def _figures(c: PlanCandidate) -> str:
    """`$12.30, 4.2 hours: `, where they are known."""
    return "" if c.cost_usd is None or c.hours is None else f"{_dollars(c)}, {_number(c.hours)} hours; "


def _dollars(c: PlanCandidate) -> str:
    return "" if c.cost_usd is None else dollars(c.cost_usd)


def _number(value: float | None) -> str:
    return "" if value is None else significant(value)
