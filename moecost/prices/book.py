"""Price quotes gathered from somewhere, with what was left out; `book.median("h100")` is a price for `estimate`."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from moecost import catalog
from moecost.errors import InvalidInputError
from moecost.prices.rows import Kind
from moecost.sources import UNDATED
from moecost.specs import GPUSpec, PriceQuote

STALE_AFTER_DAYS: Final = 180
"""CUDO asked 0.79 $/hour for an A40 in August 2024 and 0.37 in 2026 (both in the catalogue): where prices halve in two
years, half a year moves them by a sixth. [day]"""
SAVED: Final = (
    "provider", "region", "instance_type", "gpu", "gpu_count", "usd_per_hour_instance", "usd_per_gpu_hour", "market",
    "date", "source", "notes",
)  # fmt: skip
"""Columns of a saved book: those of the catalogue's price file."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that gave no quote, or one price of it; a whole file where there is no line."""

    file: str
    line: int | None
    kind: Kind
    reason: str

    def __str__(self) -> str:
        if self.line is None:
            return self.reason  # names the file itself
        return f"{self.file}, line {self.line}: {self.kind}: {self.reason}"


class PriceRange(NamedTuple):
    """What a provider asks for a GPU-hour in a market."""

    gpu: str
    market: str
    provider: str | None
    """None: all of them together, where there are several."""
    low: float
    """[$/GPU-hour]"""
    median: float
    """Of the quote in the middle, the lower of two. [$/GPU-hour]"""
    high: float
    """[$/GPU-hour]"""
    num_quotes: int
    first_date: str | None
    """None: no quote has a date."""
    last_date: str | None


@dataclass(frozen=True)
class PriceBook:
    """Quotes, and the rows that gave none, each with its reason. Every price is in dollars."""

    quotes: tuple[PriceQuote, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    def select(
        self, gpu: str | GPUSpec | None = None, *, market: str | None = None, provider: str | None = None
    ) -> tuple[PriceQuote, ...]:
        """Quotes of a GPU (any of its names), a market and a provider, cheapest GPU-hour first; None = all."""
        found: Iterable[PriceQuote] = self.quotes
        if gpu is not None:
            name = gpu.name if isinstance(gpu, GPUSpec) else catalog.gpu_name(gpu)
            found = (q for q in found if q.gpu == name)
        picked = catalog.pick(found, market=market, provider=provider)
        return tuple(sorted(picked, key=lambda q: (q.usd_per_gpu_hour, q.provider, q.region, q.instance_type, q.date)))

    def median(self, gpu: str | GPUSpec, market: str = "on_demand", provider: str | None = None) -> PriceQuote:
        """The quote in the middle by price of a GPU-hour (the lower of two): a real quote, to be passed as `price=`.

        Raises
        ------
        NoPriceError : no quote matches; the message lists the quotes there are.
        """
        return catalog.middle(self._found(gpu, market, provider))

    def cheapest(self, gpu: str | GPUSpec, market: str = "on_demand", provider: str | None = None) -> PriceQuote:
        """The quote with the lowest price of a GPU-hour, to be passed as `price=`; errors as `median`."""
        return self._found(gpu, market, provider)[0]

    def _found(self, gpu: str | GPUSpec, market: str, provider: str | None) -> tuple[PriceQuote, ...]:
        found = self.select(gpu, market=market, provider=provider)
        return found or catalog.refuse(gpu, market, provider, self.select(gpu), "this price book")

    def ranges(
        self, gpu: str | GPUSpec | None = None, *, market: str | None = None, provider: str | None = None
    ) -> tuple[PriceRange, ...]:
        """Low, median and high by GPU, market and provider, sorted; several providers are followed by all of them."""
        groups: dict[tuple[str, str], dict[str, list[PriceQuote]]] = defaultdict(lambda: defaultdict(list))
        for q in self.select(gpu, market=market, provider=provider):
            groups[q.gpu, q.market][q.provider].append(q)
        out = []
        for (name, kind), by_provider in sorted(groups.items()):
            out += [_range(name, kind, seller, found) for seller, found in sorted(by_provider.items())]
            if len(by_provider) > 1:
                every = sorted((q for found in by_provider.values() for q in found), key=lambda q: q.usd_per_gpu_hour)
                out.append(_range(name, kind, None, every))
        return tuple(out)

    def age_notes(self, today: datetime.date | None = None) -> tuple[str, ...]:
        """Sentences for quotes that are old or have no date; none where all are fresh."""
        undated = sum(q.date == UNDATED for q in self.quotes)
        old = [q.date for q in self.quotes if q.date != UNDATED and _days(q.date, today) > STALE_AFTER_DAYS]
        notes = []
        if old:
            notes.append(
                f"{len(old)} of {len(self.quotes)} quotes may be more than {STALE_AFTER_DAYS} days old "
                f"(dated {' to '.join(dict.fromkeys((min(old), max(old))))}); prices may have moved"
            )
        if undated:
            notes.append(f"{undated} of {len(self.quotes)} quotes have no date, and may be old")
        return tuple(notes)

    def dropped_notes(self) -> tuple[str, ...]:
        """One sentence a kind of rows left out: how many, and the first of them."""
        counts = Counter(d.kind for d in self.dropped)
        first = {d.kind: d for d in reversed(self.dropped)}
        return tuple(
            f"left out: {first[kind]}" + (f"; and {number - 1:,} more: {kind}" if number > 1 else "")
            for kind, number in counts.most_common()
        )

    def save(self, path: str | Path) -> None:
        """Write the quotes as a CSV that `read` reads, the whole file or none.

        Raises
        ------
        InvalidInputError : the file cannot be written.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(SAVED)
        writer.writerows([getattr(q, column) for column in SAVED] for q in self.quotes)
        whole = Path(path)
        part = whole.with_name(f".{whole.name}.part")
        try:
            part.write_text(out.getvalue(), encoding="utf-8")
            os.replace(part, whole)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


def age_note(quote: PriceQuote, today: datetime.date | None = None) -> str | None:
    """A sentence where a quote may be older than `STALE_AFTER_DAYS` or has no date; None where it is fresh."""
    if quote.date == UNDATED:
        return f"the price has no date ({quote}); it may have moved"
    if _days(quote.date, today) <= STALE_AFTER_DAYS:
        return None
    return f"the price may be more than {STALE_AFTER_DAYS} days old ({quote}); it may have moved"


def _days(date: str, today: datetime.date | None) -> int:
    """Days since a date; a year or month is taken from its first day, as the quote may be that old."""
    parts = [int(part) for part in date.split("-")]
    year, month, day = (*parts, 1, 1)[:3]
    first_of_next = datetime.date(year + month // 12, month % 12 + 1, 1)
    last = (first_of_next - datetime.timedelta(days=1)).day  # 2026-02-31 has the form of a date
    return ((today or datetime.date.today()) - datetime.date(year, month, min(day, last))).days


def _range(gpu: str, market: str, provider: str | None, found: list[PriceQuote]) -> PriceRange:
    """Of quotes that come cheapest first."""
    dates = sorted(q.date for q in found if q.date != UNDATED)
    low, mid, high = (q.usd_per_gpu_hour for q in (found[0], catalog.middle(found), found[-1]))
    return PriceRange(
        gpu, market, provider, low, mid, high, len(found), dates[0] if dates else None, dates[-1] if dates else None
    )
