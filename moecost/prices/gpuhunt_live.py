"""Prices of today, asked of the package gpuhunt, which fetches what dstack publishes. Only when called."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moecost import catalog
from moecost.errors import InvalidInputError, NoPriceError, UnsupportedError
from moecost.prices.book import Dropped, PriceBook
from moecost.prices.gpuhunt_tables import COLUMNS, quotes_of_rows
from moecost.prices.rows import PROVIDER_NAMES, Context, RowError, provider_name, without_inverted
from moecost.specs import GPUSpec

_SPOT: Final[Mapping[str | None, bool | None]] = {None: None, "on_demand": False, "spot": True}
_THEIR_NAMES: Final = {ours: theirs for theirs, ours in PROVIDER_NAMES.items() if theirs != "datacrunch"}


def live(
    gpu: str | GPUSpec | None = None,
    *,
    provider: str | None = None,
    market: str | None = None,
    cache: str | Path | None = None,
) -> PriceBook:
    """Quotes of today, asked over the network. Needs `pip install 'moecost[prices]'`.

    Parameters
    ----------
    gpu : any name of a GPU, or its spec; None = all.
    provider : a provider that gpuhunt knows; None = all that need no key.
    market : `on_demand` or `spot`; None = both. gpuhunt has no reserved prices.
    cache : file to keep the quotes in, with their date; `moecost.prices.read(cache)` reads them without a network.

    Raises
    ------
    UnsupportedError : gpuhunt is not installed.
    NoPriceError : gpuhunt could not answer. What `cache` holds stays as it is.
    """
    if market not in _SPOT:
        raise InvalidInputError(f"market={market!r} must be on_demand or spot: gpuhunt has no other prices")
    wanted = None if gpu is None else gpu.name if isinstance(gpu, GPUSpec) else catalog.gpu_name(gpu)
    try:
        import gpuhunt
    except ImportError:
        raise UnsupportedError(
            "live prices need gpuhunt: pip install 'moecost[prices]', or read a downloaded catalogue"
        ) from None
    theirs = None if provider is None else _THEIR_NAMES.get(provider_name(provider), provider.lower())
    try:
        items = gpuhunt.query(provider=theirs, spot=_SPOT[market], min_gpu_count=1)
        rows = list(_rows(items))
    except Exception as error:  # whatever a network, a key or another version of gpuhunt does
        kept = f"; {cache} holds what was asked before" if cache is not None and Path(cache).is_file() else ""
        raise NoPriceError(
            f"gpuhunt gave no prices ({type(error).__name__}: {error!s:.200}){kept}. Pass price="
        ) from error
    book = _book(rows, wanted)
    if cache is not None and book.quotes:
        book.save(cache)
    return book


def _rows(items: Any) -> Iterator[tuple[int, Mapping[str, str] | RowError, str]]:
    """(number, cells, provider) of each offer, as the published tables have them."""
    for i, item in enumerate(items, 1):
        values = {column: getattr(item, column) for column in COLUMNS}
        yield i, {k: "" if v is None else str(v) for k, v in values.items()}, provider_name(item.provider)


def _book(rows: list[tuple[int, Mapping[str, str] | RowError, str]], wanted: str | None) -> PriceBook:
    """Of the GPU that is wanted; that other GPUs are not known is then of no interest."""
    context = Context(source="gpuhunt, asked live", date=datetime.date.today().isoformat())
    found = list(without_inverted(quotes_of_rows(iter(rows), context)))
    quotes = [q for _, q in found if not isinstance(q, RowError) and wanted in (None, q.gpu)]
    dropped = [
        Dropped("gpuhunt", i, q.kind, str(q))
        for i, q in found
        if isinstance(q, RowError) and (wanted is None or q.kind != "unknown GPU")
    ]
    return PriceBook(tuple(dict.fromkeys(quotes)), tuple(dropped))
