"""A `Sweep` for people, as plain text and as HTML: what it covers, how much of it fits, and its best rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from moecost.report import (
    WIDTH,
    Row,
    Section,
    dollars,
    percent,
    sections_as_html,
    sections_as_text,
    significant,
)
from moecost.sweeping import BEST, Sweep

REASONS_SHOWN: Final = 4
VALUES_SHOWN: Final = 6


def as_text(sweep: Sweep, width: int = WIDTH) -> str:
    """The sweep as plain text of at most `width` columns."""
    return sections_as_text(list(_sections(sweep)), width)


def as_html(sweep: Sweep) -> str:
    """The sweep as one self-contained `<div>`."""
    return sections_as_html(_sections(sweep))


def _sections(sweep: Sweep) -> Iterator[Section]:
    found = sweep.summary()
    axes = tuple(Row(name, (_values(values),)) for name, values in found["axes"].items())
    yield Section("Sweep", _rows(found["rows"]), (("", "<"),), axes)
    rows = tuple(Row(name, _cells(sweep, found[name])) for name in BEST if name in found)
    share = percent(found["fits"] / found["rows"])
    fit = f"{_rows(found['fits'])} of {found['rows']:,} fit ({share})"
    yield Section(
        "Answer", fit, (("dollars", ">"), ("hours", ">"), ("queries/s", ">"), ("row", "<")) if rows else (), rows
    )
    if found["reasons"]:
        most = sorted(found["reasons"].items(), key=lambda item: -item[1])[:REASONS_SHOWN]
        yield Section("Other rows", sentences=tuple(f"{_rows(n)}: {why}" for why, n in most))


def _rows(n: int) -> str:
    return f"{n:,} {'row' if n == 1 else 'rows'}"


def _values(values: Sequence[object]) -> str:
    if len(values) > VALUES_SHOWN:
        return f"{len(values)} values, {values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def _cells(sweep: Sweep, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Figures of a row and what tells it apart: axes of several values, and the batch."""
    names = [name for name, values in sweep.axes.items() if len(values) > 1]
    apart = ", ".join(f"{name} {row[name]}" for name in dict.fromkeys([*names, "micro_batch_size"]))
    return dollars(row["cost_usd"]), significant(row["hours"]), significant(row["queries_per_second"]), apart
