"""Price tables of one's own: the columns of `PriceQuote`, of which few are a must."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from moecost import catalog
from moecost.errors import InvalidInputError, close_matches
from moecost.prices.names import find_gpu
from moecost.prices.rows import Context, Found, RowError, count, number, provider_name, quote, require, without_inverted
from moecost.prices.tables import Table
from moecost.specs import PriceQuote

PRICES: Final = ("usd_per_hour_instance", "usd_per_gpu_hour", "price_per_hour_instance", "price_per_gpu_hour")
"""One is a must. Those in `usd` are dollars; the others are in the `currency` of their row."""
COLUMNS: Final = (
    "provider", "region", "instance_type", "gpu", "gpu_count", *PRICES, "currency", "market", "date", "source", "notes",
)  # fmt: skip
AGREE: Final = 2e-3
"""Price of a machine and of its GPUs differ by no more than rounding. [-]"""
_CURRENCY = re.compile(r"[A-Z]{3}\Z")


def read(table: Table, context: Context) -> Iterator[Found]:
    """Quotes of a table of one's own."""
    check_columns(table.columns, table.name)
    return without_inverted(_found(table, context))


def check_columns(columns: Sequence[str], where: str) -> None:
    """Refuses a table that lacks a column, or has one that nothing reads: it may be a slip of the pen."""
    require(columns, ["gpu_count", "market"], where, "a price table of your own")
    for group in (("gpu", "instance_type"), PRICES):
        if not set(group) & set(columns):
            raise InvalidInputError(f"{where}: has no column {' or '.join(group)}; one of them is a must")
    for name in columns:
        if columns.count(name) > 1:
            raise InvalidInputError(f"{where}: the column {name!r:.60} occurs twice")
        if name not in COLUMNS:
            near = close_matches(name, COLUMNS)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(COLUMNS)}"
            raise InvalidInputError(f"{where}: the column {name!r:.60} is not known{hint}")


def _found(table: Table, context: Context) -> Iterator[Found]:
    for line, cells in table.rows():
        try:
            yield line, cells if isinstance(cells, RowError) else _quote(cells, context)
        except RowError as refused:
            yield line, refused


def _quote(cells: Mapping[str, str], context: Context) -> PriceQuote:
    provider = provider_name(cells.get("provider") or context.provider or "user")
    gpu, gpu_count = _gpu(cells, provider)
    whole, each = _price(cells, "per_hour_instance"), _price(cells, "per_gpu_hour")
    if whole is None and each is None:
        raise RowError("no price", "has no price")
    rate, currency = _rate(cells, context)
    if whole is None or each is None:
        whole = whole if whole is not None else (each or 0.0) * gpu_count
    elif abs(whole - each * gpu_count) > AGREE * whole:
        raise RowError("malformed", f"{whole:g} an hour for {gpu_count} GPUs is not {each:g} for one")
    notes = [cells.get("notes", ""), f"{whole:g} {currency} at {rate:g} $/{currency}" if currency != "USD" else ""]
    return quote(
        provider=provider,
        region=cells.get("region", ""),
        instance_type=cells.get("instance_type", ""),
        gpu=gpu,
        gpu_count=gpu_count,
        usd_per_hour_instance=whole * rate,
        usd_per_gpu_hour=whole * rate / gpu_count,
        market=cells["market"].lower().replace("-", "_"),
        date=cells.get("date") or context.date,
        source=cells.get("source") or context.source,
        notes="; ".join(filter(None, notes)),
    )


def _gpu(cells: Mapping[str, str], provider: str) -> tuple[str, int]:
    """(GPU, number of GPUs), from the row or from its instance type."""
    name, instance_type = cells.get("gpu", ""), cells.get("instance_type", "")
    gpus = count(cells, "gpu_count")
    machine = catalog.instance(instance_type) if instance_type and not (name and gpus) else None
    if name:
        gpu = find_gpu(name, None, instance_type, provider).gpu
    elif machine:
        gpu = machine.gpu
        if gpus and gpus != machine.gpus_per_node:
            raise RowError("malformed", f"gpu_count={gpus}, but {instance_type} has {machine.gpus_per_node} GPUs")
    else:
        gpu = find_gpu(instance_type, None, "", provider).gpu
    gpus = gpus or (machine.gpus_per_node if machine else 0)
    if not gpus:
        raise RowError("malformed", "gpu_count must be 1 or more")
    return gpu, gpus


def _rate(cells: Mapping[str, str], context: Context) -> tuple[float, str]:
    """(dollars for one unit of the row's currency, its name)."""
    said = cells.get("currency", "").upper()
    if said and not _CURRENCY.match(said):
        raise RowError("currency", f"currency must be three letters, as USD or EUR (it is {said!r:.20})")
    in_dollars = any(cells.get(column) for column in PRICES if column.startswith("usd"))
    in_another = any(cells.get(column) for column in PRICES if column.startswith("price"))
    if in_dollars and (in_another or said not in ("", "USD")):
        raise RowError("currency", f"names two currencies: a price in usd, and {said or 'one in another column'}")
    if in_dollars:
        return 1.0, "USD"
    return context.dollars(said or None, "prices without a currency column"), said or context.currency or "USD"


def _price(cells: Mapping[str, str], of: str) -> float | None:
    """The price of a machine or of a GPU, in whichever currency."""
    for column in (f"usd_{of}", f"price_{of}"):
        value = number(cells, column)
        if value == 0:
            raise RowError("placeholder price", f"{column} is 0")
        if value is not None:
            return value
    return None
