"""What the readers of price tables share: numbers from cells, quotes from numbers, and why a row gives none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import ValidationError

from moecost.errors import InvalidInputError
from moecost.sources import UNDATED
from moecost.spec_files import explain
from moecost.specs import PriceQuote

Kind = Literal[
    "placeholder price", "no price", "spot above on-demand", "unknown GPU", "part of a machine", "currency",
    "malformed", "missing column", "not read",
]  # fmt: skip
ROUNDING: Final = 1e-3
"""Spot prices come with four decimals, on-demand prices with six: nearer than this is equal. [-]"""
HIGHEST: Final = 1e6
"""No machine costs more an hour, in dollars or euros."""
PROVIDER_NAMES: Final[Mapping[str, str]] = {"lambdalabs": "lambda", "vastai": "vast", "datacrunch": "verda"}
"""Names of other catalogues for providers of ours. DataCrunch took the name Verda."""


class RowError(InvalidInputError):
    """A row, or one of its two prices, that gives no quote."""

    def __init__(self, kind: Kind, reason: str) -> None:
        self.kind: Kind = kind
        super().__init__(reason)


Found = tuple[int, PriceQuote | RowError]
"""Line of a table with what it gives."""


@dataclass(frozen=True)
class Context:
    """What a table does not say of itself."""

    source: str
    provider: str | None = None
    date: str = UNDATED
    currency: str | None = None
    usd_per: Mapping[str, float] = field(default_factory=dict)
    """Dollars for one unit of another currency."""

    def dollars(self, currency: str | None, whose: str) -> float:
        """Dollars for one unit of the currency of some prices; refused where it is not said or has no rate."""
        currency = currency or self.currency
        if currency is None:
            raise RowError("currency", f"{whose} do not say their currency; pass currency=")
        if currency == "USD":
            return 1.0
        if currency not in self.usd_per:
            raise RowError(
                "currency", f"prices in {currency:.20} are not dollars; pass usd_per={{{currency!r:.20}: ...}}"
            )
        return self.usd_per[currency]


def provider_name(name: str) -> str:
    """A provider's name as the catalogue has it."""
    name = name.strip().lower()
    return PROVIDER_NAMES.get(name, name)


def number(cells: Mapping[str, str], column: str) -> float | None:
    """Number in a cell, zero or above; None where it is empty."""
    text = (cells.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= HIGHEST:
        raise RowError("malformed", f"{column} must be a number from 0 to {HIGHEST:,.0f} (it is {text!r:.60})")
    return value


def count(cells: Mapping[str, str], column: str) -> int:
    """GPUs of a machine; 0 where the cell is empty."""
    value = number(cells, column) or 0.0
    if not value.is_integer():
        raise RowError("part of a machine", f"{column} is {value:g}: only whole GPUs are priced")
    return int(value)


def quote(**fields: Any) -> PriceQuote:
    """A quote; what is wrong with it is a reason to leave the row out."""
    try:
        return PriceQuote(**fields)
    except ValidationError as error:
        raise RowError("malformed", explain(error, PriceQuote)) from None


def require(columns: Sequence[str], wanted: Iterable[str], where: str, what: str) -> None:
    """The whole file is in error where it lacks a column."""
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise InvalidInputError(f"{where}: is read as {what}, but has no column {', '.join(missing)}")


def below_spot(on_demand: float, spot: float) -> bool:
    """Whether an on-demand price lies below the spot price of the same machine: then one of them is wrong."""
    return on_demand * (1 + ROUNDING) < spot


def inverted(on_demand: float, spot: float) -> RowError:
    """Why both prices of such a machine are left out."""
    return RowError(
        "spot above on-demand",
        f"on demand {on_demand:g} lies below spot {spot:g} an hour: one of them is wrong, both are left out",
    )


def without_inverted(found: Iterable[Found]) -> Iterator[Found]:
    """Leaves out the on-demand and spot quotes of a machine where spot costs more; for tables of one price a row."""
    found = list(found)
    machines: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for _, q in found:
        if isinstance(q, PriceQuote) and q.usd_per_hour_instance is not None:
            highest = machines[_machine(q)]
            highest[q.market] = max(q.usd_per_hour_instance, highest.get(q.market, 0.0))
    for line, q in found:
        if isinstance(q, PriceQuote) and q.market != "reserved":
            highest = machines[_machine(q)]
            if {"on_demand", "spot"} <= highest.keys() and below_spot(highest["on_demand"], highest["spot"]):
                yield line, inverted(highest["on_demand"], highest["spot"])
                continue
        yield line, q


def _machine(q: PriceQuote) -> tuple[object, ...]:
    return q.provider, q.region, q.instance_type, q.gpu, q.gpu_count, q.date
