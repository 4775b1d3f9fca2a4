"""SkyPilot's catalogue of prices: one `vms.csv` a cloud, schema versions 6 to 9, read by header. In US dollars.

Source: https://github.com/skypilot-org/skypilot-catalog. A row has an on-demand price and a spot price, either of which
may be missing. Machines without a GPU are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from moecost.errors import InvalidInputError
from moecost.prices.names import find_gpu, slice_chips
from moecost.prices.rows import (
    Context,
    Found,
    RowError,
    below_spot,
    count,
    inverted,
    number,
    provider_name,
    quote,
    require,
)
from moecost.prices.tables import SKYPILOT_FILE, Table
from moecost.specs import PriceQuote

COLUMNS: Final = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")
NO_PRICE: Final = 700.0
"""What stands for "none" among the TPU prices of GCP."""
SAYS_NO_CURRENCY: Final = frozenset({"seeweb"})
"""Clouds that bill in another currency while the interface which the catalogue is made from names none."""
REPEATS_AS_SPOT: Final = frozenset({"runpod"})
"""Clouds whose rows repeat the on-demand price as spot where there is no spot price."""
RESELLERS: Final = frozenset({"shadeform"})
"""Clouds that rent out the machines of others, named in the instance type: `crusoe_L40Sx10`."""
CLOUDS: Final = frozenset({
    "aws", "azure", "gcp", "oci", "ibm", "lambda", "runpod", "cudo", "vast", "nebius", "paperspace", "fluidstack", "do",
    "scp", "hyperbolic", "hyperstack", "seeweb", "shadeform", "primeintellect", "verda", "yotta",
})  # fmt: skip
"""Folders of the catalogue; any name counts beneath a folder `v6` to `v9`."""

GCP_MACHINES: Final[Mapping[tuple[str, int], tuple[str, ...]]] = {
    **{("A100", n): (f"a2-highgpu-{n}g",) for n in (1, 2, 4, 8)},
    ("A100", 16): ("a2-megagpu-16g",),
    **{("A100-80GB", n): (f"a2-ultragpu-{n}g",) for n in (1, 2, 4, 8)},
    **{("H100", n): (f"a3-highgpu-{n}g",) for n in (1, 2, 4)},
    ("H100", 8): ("a3-highgpu-8g", "a3-edgegpu-8g"),
    ("H100-MEGA", 8): ("a3-megagpu-8g",),
    ("H200", 8): ("a3-ultragpu-8g",),
    ("B200", 8): ("a4-highgpu-8g",),
    ("L4", 1): tuple(f"g2-standard-{n}" for n in (4, 8, 12, 16, 32)),
    ("L4", 2): ("g2-standard-24",),
    ("L4", 4): ("g2-standard-48",),
    ("L4", 8): ("g2-standard-96",),
}
"""Machines that GCP builds around a number of GPUs; others are attached to a machine of one's choice.
Source: https://cloud.google.com/compute/docs/gpus."""

_VERSION_FOLDER = re.compile(r"v\d+\Z")
_SIZE = re.compile(r"SizeInMiB\W{1,4}([\d.]+)")
_MIB_ABOVE = 1000.0  # no GPU has a TB, and none has less than a GiB: 80 is GB, 81920 is MiB


def is_skypilot(columns: Sequence[str]) -> bool:
    """Whether a header is that of a `vms.csv`."""
    return bool({"AcceleratorName", "InstanceType"} & set(columns))


def cloud(path: PurePosixPath) -> str | None:
    """The cloud that a path names: `catalogs/v9/aws/vms.csv`."""
    folder = path.parent
    known = folder.name.lower() in CLOUDS or _VERSION_FOLDER.match(folder.parent.name)
    return provider_name(folder.name) if path.name == SKYPILOT_FILE and folder.name and known else None


def read(table: Table, context: Context) -> Iterator[Found]:
    """Quotes of a `vms.csv`."""
    require(table.columns, COLUMNS, table.name, "SkyPilot's vms.csv")
    provider = cloud(table.path) or provider_name(context.provider or "")
    if not provider:
        raise InvalidInputError(
            f"{table.name}: the path does not say whose prices these are; pass provider=, as in provider='aws'"
        )
    return _gcp(table, context) if provider == "gcp" else _rows(table, context, provider)


def _rows(table: Table, context: Context, provider: str) -> Iterator[Found]:
    for line, cells in table.rows():
        try:
            if isinstance(cells, RowError):
                raise cells
            if cells["AcceleratorName"]:
                yield from ((line, found) for found in _quotes(cells, context, provider))
        except RowError as refused:
            yield line, refused


def _quotes(cells: Mapping[str, str], context: Context, provider: str) -> Iterator[PriceQuote | RowError]:
    """On-demand and spot of a row that names its machine and its GPUs."""
    gpus = count(cells, "AcceleratorCount")
    if not gpus:
        raise RowError("malformed", "AcceleratorCount must be 1 or more")
    currency = None if provider in SAYS_NO_CURRENCY else "USD"
    rate = context.dollars(currency, f"prices of {provider}")
    instance_type, notes = cells["InstanceType"], ""
    memory = _memory_gb(cells, gpus if provider == "vast" else 1)
    if provider in RESELLERS:
        seller, _, instance_type = instance_type.partition("_")
        notes = f"as resold by {provider.title()}"
        provider = provider_name(seller)
    gpu, assumed = find_gpu(cells["AcceleratorName"], memory, instance_type, provider)
    notes = "; ".join(filter(None, [notes, assumed]))
    for market, price in _prices(cells, provider):
        if isinstance(price, RowError):
            yield price
            continue
        zone = cells.get("AvailabilityZone", "") if market == "spot" else ""
        yield quote(
            provider=provider,
            region=cells["Region"],
            instance_type=instance_type,
            gpu=gpu,
            gpu_count=gpus,
            usd_per_hour_instance=price * rate,
            market=market,
            date=context.date,
            source=context.source,
            notes="; ".join(filter(None, [notes, zone and f"zone {zone}"])),
        )


def _prices(cells: Mapping[str, str], provider: str) -> Iterator[tuple[str, float | RowError]]:
    """(market, price of the machine or why there is none)."""
    on_demand, spot = number(cells, "Price"), number(cells, "SpotPrice") or None
    if spot == on_demand and provider in REPEATS_AS_SPOT:
        spot = None
    if on_demand is None and spot is None:
        raise RowError("no price", "has neither an on-demand nor a spot price")
    for column, price in (("Price", on_demand), ("SpotPrice", spot)):
        if price in (0, NO_PRICE):
            yield column, RowError("placeholder price", f"{column} {price:g} stands for none")
    good_on_demand, good_spot = (price if price not in (0, NO_PRICE) else None for price in (on_demand, spot))
    if good_on_demand and good_spot and below_spot(good_on_demand, good_spot):
        raise inverted(good_on_demand, good_spot)
    if good_on_demand:
        yield "on_demand", good_on_demand
    if good_spot:
        yield "spot", good_spot


def _memory_gb(cells: Mapping[str, str], over: int) -> float | None:
    """Memory of one GPU as `GpuInfo` gives it: MiB or GB, in Python's or JSON's spelling, or not at all."""
    found = _SIZE.search(cells.get("GpuInfo", ""))
    try:
        size = float(found[1]) if found else 0.0
    except ValueError:
        return None
    return (size / 1024 if size > _MIB_ABOVE else size) / over or None


# ----------------------------------------------------------------------------------------------------------- Google
def _gcp(table: Table, context: Context) -> Iterator[Found]:
    """GCP prices machine and GPUs in rows of their own, which add up zone by zone."""
    hosts: dict[tuple[str, str], Mapping[str, str]] = {}
    parts: list[tuple[int, Mapping[str, str]]] = []
    for line, cells in table.rows():
        if isinstance(cells, RowError):
            yield line, cells
        elif cells["AcceleratorName"]:
            parts.append((line, cells))
        elif cells["InstanceType"]:
            hosts[_zone(cells), cells["InstanceType"]] = cells
    for line, part in parts:
        try:
            wholes = [_tpu(part)] if slice_chips(part["AcceleratorName"]) else _machines(part, hosts)
        except RowError as refused:
            yield line, refused
            continue
        for whole in wholes:
            try:
                yield from ((line, found) for found in _quotes(whole, context, "gcp"))
            except RowError as refused:
                yield line, refused


def _zone(cells: Mapping[str, str]) -> str:
    return cells.get("AvailabilityZone") or cells["Region"]


def _tpu(cells: Mapping[str, str]) -> Mapping[str, str]:
    """A slice with its chips counted; its price includes its hosts."""
    version, chips = slice_chips(cells["AcceleratorName"]) or ("", 0)
    name = cells["AcceleratorName"]
    return {**cells, "InstanceType": name, "AcceleratorName": version, "AcceleratorCount": str(chips), "GpuInfo": ""}


def _machines(part: Mapping[str, str], hosts: Mapping[tuple[str, str], Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The GPUs of a row with each machine of their zone that is built around them."""
    name, gpus = part["AcceleratorName"], count(part, "AcceleratorCount")
    types = GCP_MACHINES.get((name, gpus))
    if types is None:
        raise RowError("part of a machine", f"is the price of {gpus} {name:.40} without the machine to attach them to")
    found = [host for kind in types if (host := hosts.get((_zone(part), kind)))]
    if not found:
        raise RowError(
            "part of a machine", f"is the price of GPUs alone: no row of {' or '.join(types)} in {_zone(part)}"
        )
    return [_sum(part, host) for host in found]


def _sum(part: Mapping[str, str], host: Mapping[str, str]) -> Mapping[str, str]:
    """One row of both, refused where either has prices that cannot be."""
    sums: dict[str, str] = {}
    of_part, of_host = (_good_prices(cells) for cells in (part, host))
    for market, column in (("on_demand", "Price"), ("spot", "SpotPrice")):
        both = market in of_part and market in of_host
        sums[column] = repr(of_part[market] + of_host[market]) if both else ""
    return {**part, **sums, "InstanceType": host["InstanceType"]}


def _good_prices(cells: Mapping[str, str]) -> dict[str, float]:
    """Prices of a part by market; one that stands for none spoils the sum."""
    found = {}
    for market, price in _prices(cells, "gcp"):
        if isinstance(price, RowError):
            raise price
        found[market] = price
    return found
