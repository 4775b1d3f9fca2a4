"""Prices of your own and of public catalogues, beside those that ship: `read` files, or ask `live`.

>>> from moecost import prices
>>> prices.shipped().median("a40", provider="cudo").market
'on_demand'

A quote is passed on as it is: `estimate(..., price=prices.read("prices.csv").median("h100", market="spot"))`.
Nothing here is read, and nothing is asked of a network, unless called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moecost import catalog
from moecost.errors import InvalidInputError
from moecost.prices import gpuhunt_tables, own, skypilot
from moecost.prices.book import STALE_AFTER_DAYS, Dropped, PriceBook, PriceRange, age_note
from moecost.prices.gpuhunt_live import live
from moecost.prices.rows import Context, Found, RowError, quote
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
    context = Context("", provider, date or UNDATED, currency, usd_per or {})
    found = find_tables(path)
    quotes: dict[PriceQuote, None] = {}
    dropped: list[Dropped] = []
    for table in found:
        try:
            if isinstance(table, InvalidInputError):
                raise table
            for line, row in _rows(table, context):
                if isinstance(row, RowError):
                    dropped.append(Dropped(table.name, line, row.kind, str(row)))
                else:
                    quotes[row] = None
        except InvalidInputError as error:
            if len(found) == 1:
                raise
            dropped.append(Dropped(str(path), None, "not read", str(error)))
    if not quotes and dropped and all(d.line is None for d in dropped):
        raise InvalidInputError(
            f"{path}: none of its {len(dropped)} tables can be read; the first: {dropped[0].reason}"
        )
    return PriceBook(tuple(quotes), tuple(dropped))


def _rows(table: Table, context: Context) -> Iterator[Found]:
    """What the rows of a table give, read as its header tells."""
    columns = table.columns
    if skypilot.is_skypilot(columns):
        reader, maker = skypilot.read, "SkyPilot "
    elif gpuhunt_tables.is_gpuhunt(columns):
        reader, maker = gpuhunt_tables.read, "gpuhunt "
    elif set(columns) & set(own.COLUMNS):
        reader, maker = own.read, ""
    else:
        raise InvalidInputError(
            f"{table.name}: is no price table: its header has none of {', '.join(own.COLUMNS)}, and is neither "
            "SkyPilot's nor gpuhunt's"
        )
    date = context.date if table.date == UNDATED else table.date
    return reader(table, replace(context, source=maker + table.name, date=date))


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
