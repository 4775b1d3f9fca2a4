"""What the commands do with prices: which quotes are listed, and which one prices a job. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from moecost.errors import InvalidInputError, NoPriceError
from moecost.job import Job
from moecost.prices import PriceBook, PriceRange, age_note, live, read, shipped
from moecost.specs import GPUSpec, PriceQuote

COLUMNS: Final = ("GPU", "market", "provider", "low", "median", "high", "n", "oldest")
NUMBERS: Final = range(3, 7)
"""Columns of numbers."""


def chosen_book(
    path: Path | None,
    *,
    ask: bool,
    gpus: Sequence[str] | None,
    market: str | None,
    provider: str | None,
    date: str | None,
    currency: str | None,
    usd_per: Iterable[str],
) -> PriceBook:
    """Quotes of a file, of today, or those that ship; of some GPUs (None: all), a market and a provider.

    Raises
    ------
    NoPriceError : there are none.
    """
    if path is not None and ask:
        raise InvalidInputError("--file and --live: give one of them")
    if path is None and (date or currency or list(usd_per)):
        raise InvalidInputError("--date, --currency and --usd-per say what a file does not; give --file")
    if path is not None:
        book = read(path, provider=provider, date=date, currency=currency, usd_per=rates(usd_per))
    elif ask:
        only = gpus[0] if gpus is not None and len(gpus) == 1 else None
        book = live(only, provider=provider, market=market)
    else:
        book = shipped()
    quotes = [q for q in book.select(market=market, provider=provider) if gpus is None or q.gpu in gpus]
    if not quotes:
        left_out = f"; {book.dropped_notes()[0]}" if book.dropped else ""
        raise NoPriceError(f"none of {len(book.quotes):,} quotes is of that GPU, market and provider{left_out}")
    return replace(book, quotes=tuple(quotes))


def rates(texts: Iterable[str]) -> dict[str, float]:
    """Dollars by currency, from `EUR=1.1`.

    >>> rates(["EUR=1.1"])
    {'EUR': 1.1}
    """
    found = {}
    for text in texts:
        code, _, rate = text.partition("=")
        try:
            found[code.strip()] = float(rate)
        except ValueError:
            raise InvalidInputError(f"--usd-per {text!r:.40}: write CODE=DOLLARS, for example EUR=1.1") from None
    return found


def cells(row: PriceRange) -> list[str]:
    """A row of the table, of 80 columns with the longest name of a GPU that has a price."""
    prices = [f"{price:,.2f}" if price >= 0.1 else f"{price:.4f}" for price in (row.low, row.median, row.high)]
    return [row.gpu, row.market, row.provider or "all", *prices, f"{row.num_quotes}", (row.first_date or "")[:7]]


def as_json(row: PriceRange) -> Mapping[str, object]:
    """A row for readers of JSON; prices in $/GPU-hour."""
    return row._asdict()


def priced(job: Job, path: Path) -> tuple[Job, list[str], list[str]]:
    """(job with the median quote of a file, notes, warnings). A price in the job wins; a provider is one of the file's.

    The quotes are those of the job's market.
    """
    if isinstance(job.price, int | float | PriceQuote):
        return job, [f"the price that is given wins over those of {path}"], []
    book = read(path)
    gpu = job.gpu if isinstance(job.gpu, GPUSpec) else GPUSpec.load(job.gpu)
    quote = book.median(gpu, job.market, job.price)
    found = book.select(gpu, market=job.market, provider=job.price)
    low, high = found[0].usd_per_gpu_hour, found[-1].usd_per_gpu_hour
    note = (
        f"price {quote.usd_per_gpu_hour:.2f} $/GPU-hour is the median of {len(found)} {job.market} quotes for "
        f"{gpu.name} in {path} ({low:.2f} to {high:.2f})"
    )
    warnings = [*book.dropped_notes(), *filter(None, [age_note(quote)])]
    return job.model_copy(update={"price": quote}), [note], warnings
