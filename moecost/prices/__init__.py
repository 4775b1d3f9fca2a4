"""Prices of your own and of public catalogues, beside those that ship: `read` files, or ask `live`.

>>> from moecost import prices
>>> prices.shipped().median("a40", provider="cudo").market
'on_demand'

A quote is passed on as it is: `estimate(..., price=prices.read("prices.csv").median("h100", market="spot"))`.
Nothing here is read, and nothing is asked of a network, unless called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from moecost import catalog
from moecost.errors import InvalidInputError
from moecost.prices import gpuhunt_tables, own, skypilot
from moecost.prices.book import STALE_AFTER_DAYS, Dropped, PriceBook, PriceRange, age_note
from moecost.prices.gpuhunt_live import live
from moecost.prices.rows import Context, RowError, quote
from moecost.prices.tables import Table, find_tables
from moecost.sources import UNDATED
from moecost.specs import PriceQuote

__all__ = ["STALE_AFTER_DAYS", "Dropped", "PriceBook", "PriceRange", "age_note", "live", "read", "shipped"]


def shipped() -> PriceBook:
    """The quotes of the catalogue that comes with moecost."""
    return PriceBook(catalog.all_quotes())


def read(
    path: str | Path,
    *,
    provider: str | None = None,
    date: str | None = None,
    currency: str | None = None,
    usd_per: Mapping[str, float] | None = None,
) -> PriceBook:
    """Quotes from a price table; what kind it is shows in its header.

    * A CSV of your own with columns `gpu` or `instance_type`, `gpu_count`, `market` and one price
      (`usd_per_gpu_hour`, `usd_per_hour_instance`, or `price_per_gpu_hour`, `price_per_hour_instance` with `currency`);
      beside them `provider`, `region`, `date`, `source`, `notes`.
    * SkyPilot's `vms.csv`, versions 6 to 9, or a folder of them (`catalogs/v9`).
    * gpuhunt's `{provider}.csv`, versions 1 to 3, a folder of them or its `catalog.zip`.

    Parameters
    ----------
    path : file, folder or zip archive.
    provider : who asks these prices, where neither the rows nor the path say it.
    date : of the snapshot (`2026`, `2026-11` or `2026-11-30`), where the file does not say it.
    currency : of prices whose currency is not said (`EUR`).
    usd_per : dollars for one unit of another currency (`{"EUR": 1.1}`). Prices in a currency without a rate are left
        out: none is ever taken for dollars.

    Returns
    -------
    The quotes, and in `dropped` each row that gave none with its line and reason. Equal quotes (a region's zones with
    one price) count once.

    Raises
    ------
    InvalidInputError : the file cannot be read, or lacks a column.
    """
    _check(date, currency, usd_per)
    found = find_tables(path)
    quotes: dict[PriceQuote, None] = {}
    dropped: list[Dropped] = []
    for table in found:
        try:
            if isinstance(table, InvalidInputError):
                raise table
            _read(table, provider, date, currency, usd_per, quotes, dropped)
        except InvalidInputError as error:
            if len(found) == 1:
                raise
            dropped.append(Dropped(str(path), None, "not read", str(error)))
    if not quotes and dropped and all(d.line is None for d in dropped):
        raise InvalidInputError(
            f"{path}: none of its {len(dropped)} tables can be read; the first: {dropped[0].reason}"
        )
    return PriceBook(tuple(quotes), tuple(dropped))


def _read(
    table: Table,
    provider: str | None,
    date: str | None,
    currency: str | None,
    usd_per: Mapping[str, float] | None,
    quotes: dict[PriceQuote, None],
    dropped: list[Dropped],
) -> None:
    """Add a table's quotes and dropped rows to those there are."""
    columns = table.columns
    reader, kind = (
        (skypilot.read, "SkyPilot")
        if skypilot.is_skypilot(columns)
        else (gpuhunt_tables.read, "gpuhunt")
        if gpuhunt_tables.is_gpuhunt(columns)
        else (own.read, "")
    )
    if not set(columns) & set(own.COLUMNS) and not kind:
        raise InvalidInputError(
            f"{table.name}: is no price table: its header has none of {', '.join(own.COLUMNS)}, and is neither "
            "SkyPilot's nor gpuhunt's"
        )
    when = table.date if table.date != UNDATED else date or UNDATED
    source = f"{kind} {table.name}".strip()
    for line, found in reader(table, Context(source, provider, when, currency, usd_per or {})):
        if isinstance(found, RowError):
            dropped.append(Dropped(table.name, line, found.kind, str(found)))
        else:
            quotes[found] = None


def _check(date: str | None, currency: str | None, usd_per: Mapping[str, float] | None) -> None:
    try:
        quote(usd_per_gpu_hour=1.0, date=date or UNDATED)
    except RowError:
        raise InvalidInputError(f"date={date!r:.40} must be a year, month or day, such as 2026-11-30") from None
    for code in filter(None, [currency, *(usd_per or {})]):
        if not (len(code) == 3 and code.isascii() and code.isupper()):
            raise InvalidInputError(f"currency {code!r:.20} must be three capital letters, such as EUR")
    for code, rate in (usd_per or {}).items():
        if not (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0) or (code == "USD" and rate != 1):
            raise InvalidInputError(f"usd_per[{code!r}]={rate!r:.40} must be dollars for one {code}, above 0")
