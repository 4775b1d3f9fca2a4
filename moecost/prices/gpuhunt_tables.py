"""Catalogues of gpuhunt (dstack), versions 1 to 3: one `{provider}.csv` a provider, one price a row. In US dollars.

Source: https://github.com/dstackai/gpuhunt. Version 1 lacks `flags` and what follows; no column that it lacks is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from moecost.prices.names import find_gpu, slice_chips
from moecost.prices.rows import Context, Found, RowError, count, number, provider_name, quote, require, without_inverted
from moecost.prices.skypilot import CLOUDS
from moecost.prices.tables import Table
from moecost.specs import PriceQuote

COLUMNS: Final = ("instance_name", "location", "price", "gpu_count", "gpu_name", "gpu_memory", "spot")
PROVIDERS: Final = frozenset({
    "aws", "azure", "gcp", "oci", "verda", "datacrunch", "lambdalabs", "nebius", "runpod", "cloudrift", "crusoe",
    "daytona", "digitalocean", "hotaisle", "jarvislabs", "lium", "seeweb", "vastai", "vultr",
})  # fmt: skip
"""Names of its files."""
_MARKETS: Final = {"true": "spot", "false": "on_demand"}


def is_gpuhunt(columns: Sequence[str]) -> bool:
    """Whether a header is that of a catalogue of gpuhunt."""
    return bool({"instance_name", "gpu_name"} & set(columns))


def read(table: Table, context: Context) -> Iterator[Found]:
    """Quotes of a `{provider}.csv`. A file that bears no provider's name needs one."""
    require(table.columns, COLUMNS, table.name, "a catalogue of gpuhunt")
    stem = table.path.stem.lower()
    provider = provider_name(stem if stem in PROVIDERS | CLOUDS else context.provider or stem)
    return without_inverted(quotes_of_rows(((line, cells, provider) for line, cells in table.rows()), context))


def quotes_of_rows(rows: Iterator[tuple[int, Mapping[str, str] | RowError, str]], context: Context) -> Iterator[Found]:
    """Quotes of (line, cells, provider); machines without a GPU are passed over."""
    for line, cells, provider in rows:
        try:
            if isinstance(cells, RowError):
                raise cells
            if cells["gpu_name"] and (gpus := count(cells, "gpu_count")):
                yield line, _quote(cells, gpus, context, provider)
        except RowError as refused:
            yield line, refused


def _quote(cells: Mapping[str, str], gpus: int, context: Context, provider: str) -> PriceQuote:
    price = number(cells, "price")
    if not price:
        raise RowError("placeholder price" if price == 0 else "no price", "has no price above 0")
    market = _MARKETS.get(cells["spot"].lower())
    if market is None:
        raise RowError("malformed", f"spot must be True or False (it is {cells['spot']!r:.60})")
    name, instance_type = cells["gpu_name"], cells["instance_name"]
    if provider == "gcp" and (chips := slice_chips(instance_type)):
        name, gpus = chips  # gpuhunt counts a slice of TPUs as one
    gpu, assumed = find_gpu(name, number(cells, "gpu_memory") or None, instance_type, provider)
    return quote(
        provider=provider,
        region=cells["location"],
        instance_type=instance_type,
        gpu=gpu,
        gpu_count=gpus,
        usd_per_hour_instance=price,
        market=market,
        date=context.date,
        source=context.source,
        notes=assumed,
    )
