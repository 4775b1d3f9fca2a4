"""Price tables from outside: formats, ambiguous names, what is left out and why, and how a quote prices a job."""

from __future__ import annotations

import csv
import datetime
import json
import os
import socket
import sys
import time
import types
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

import moecost
from moecost import PriceQuote, catalog, prices
from moecost.errors import InvalidInputError, MoECostError, NoPriceError, UnsupportedError
from moecost.prices.names import find_gpu
from moecost.prices.rows import RowError

DATA = Path(__file__).parent / "data" / "prices"
SKYPILOT = DATA / "catalogs"
SKY_HEADER = "InstanceType,AcceleratorName,AcceleratorCount,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
GPUHUNT_HEADER = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size\n"
TODAY = datetime.date(2026, 11, 30)


def table(folder: Path, text: str, name: str = "prices.csv") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def offers(book: prices.PriceBook, *fields: str) -> set[tuple[Any, ...]]:
    return {tuple(getattr(q, f) for f in fields) for q in book.quotes}


def reasons(book: prices.PriceBook) -> list[tuple[int | None, str]]:
    return [(d.line, d.kind) for d in book.dropped]


# --------------------------------------------------------------------------------------------------- of one's own
def test_the_fewest_columns(tmp_path: Path) -> None:
    book = prices.read(table(tmp_path, "gpu,gpu_count,usd_per_gpu_hour,market\nNVIDIA A40,2,0.4,on_demand\n"))
    (q,) = book.quotes
    assert (q.gpu, q.gpu_count, q.usd_per_hour_instance, q.provider, q.date) == ("a40", 2, 0.8, "user", "undated")
    assert str(tmp_path) in q.source
    text = "instance_type,gpu_count,usd_per_hour_instance,market\np5.48xlarge,8,55.04,spot\np4d.24xlarge,,22,reserved\n"
    book = prices.read(table(tmp_path, text), provider="AWS", date="2026-11")
    assert offers(book, "gpu", "gpu_count", "usd_per_gpu_hour", "market", "provider", "date") == {
        ("h100-80gb-sxm", 8, 55.04 / 8, "spot", "aws", "2026-11"),
        ("a100-40gb-sxm", 8, 2.75, "reserved", "aws", "2026-11"),
    }


def test_the_file_that_ships_is_one_of_these() -> None:
    """All of its rows come back as they are in the catalogue."""
    book = prices.read(catalog.data_folder("gpu_specs") / catalog.PRICES_FILE)
    assert not book.dropped
    key = (
        "provider",
        "region",
        "instance_type",
        "gpu",
        "gpu_count",
        "usd_per_hour_instance",
        "market",
        "date",
        "source",
    )
    assert offers(book, *key) == offers(prices.shipped(), *key)


def test_a_saved_book_is_read_as_it_was(tmp_path: Path) -> None:
    book = prices.read(SKYPILOT / "v9", date="2026")
    book.save(tmp_path / "kept.csv")
    again = prices.read(tmp_path / "kept.csv")
    assert again.quotes == book.quotes
    assert again.dropped == ()
    with pytest.raises(InvalidInputError, match="cannot be written"):
        book.save(tmp_path / "nowhere" / "kept.csv")
    assert os.listdir(tmp_path) == ["kept.csv"]


ONE = "gpu,gpu_count,market,usd_per_gpu_hour"


@pytest.mark.parametrize(
    ("header", "row", "kind", "said"),
    [
        (ONE, "a40,1,spot,free", "malformed", "usd_per_gpu_hour must be a number"),
        (ONE, "a40,1,spot,-1", "malformed", "from 0 to"),
        (ONE, "a40,1,spot,nan", "malformed", "nan"),
        (ONE, "a40,1,spot,1e300", "malformed", "1e300"),
        (ONE, "a40,1,spot,0", "placeholder price", "is 0"),
        (ONE, "a40,1,spot,", "no price", "no price"),
        (ONE, "a40,0,spot,1", "malformed", "gpu_count must be 1 or more"),
        (ONE, "a40,0.5,spot,1", "part of a machine", "whole GPUs"),
        (ONE, "a40,1,auction,1", "malformed", "market"),
        (ONE, "a40,1,spot", "malformed", "3 cells, the header has 4"),
        (ONE, "h1000,1,spot,1", "unknown GPU", "near are b100, h100-80gb-sxm"),
        (ONE + ",date", "a40,1,spot,1,soon", "malformed", "date"),
        (ONE + ",usd_per_hour_instance", "a40,2,spot,1,3", "malformed", "3 an hour for 2 GPUs is not 1 for one"),
        (ONE + ",instance_type", ",4,spot,1,p5.48xlarge", "malformed", "p5.48xlarge has 8 GPUs"),
        (ONE + ",currency", "a40,1,spot,1,EUR", "currency", "two currencies: a price in usd, and EUR"),
        (ONE + ",price_per_gpu_hour", "a40,1,spot,1,1", "currency", "two currencies"),
        ("gpu,gpu_count,market,price_per_gpu_hour,currency", "a40,1,spot,1,EUR", "currency", r"pass usd_per={'EUR'"),
        ("gpu,gpu_count,market,price_per_gpu_hour,currency", "a40,1,spot,1,euros", "currency", "three letters"),
    ],
)  # fmt: skip
def test_rows_that_give_no_quote(tmp_path: Path, header: str, row: str, kind: str, said: str) -> None:
    """The row is left out with line, kind and reason; the next one is read."""
    price = header.split(",")[3]
    cells = {"gpu": "l4", "gpu_count": "1", "market": "spot", price: "1", "currency": "USD"}
    good = ",".join(cells.get(column, "") for column in header.split(","))
    book = prices.read(table(tmp_path, f"{header}\n{row}\n{good}\n"))
    assert [q.gpu for q in book.quotes] == ["l4"]
    assert reasons(book) == [(2, kind)]
    assert said in book.dropped[0].reason
    assert str(book.dropped[0]).startswith(f"{tmp_path}/prices.csv, line 2: {kind}: ")


def test_other_currencies_are_converted_or_left_out_but_never_mixed(tmp_path: Path) -> None:
    text = "gpu,gpu_count,market,price_per_gpu_hour,currency\na40,1,on_demand,2,EUR\na40,1,on_demand,3,usd\n"
    path = table(tmp_path, text)
    book = prices.read(path)
    assert [q.usd_per_gpu_hour for q in book.quotes] == [3.0]
    assert reasons(book) == [(2, "currency")]
    book = prices.read(path, usd_per={"EUR": 1.5})
    assert [q.usd_per_gpu_hour for q in book.quotes] == [3.0, 3.0]
    assert book.quotes[0].notes == "2 EUR at 1.5 $/EUR"
    path = table(tmp_path, "gpu,gpu_count,market,price_per_hour_instance\na40,4,on_demand,8\n")
    (silent,) = prices.read(path).dropped
    assert (silent.kind, "pass currency=" in silent.reason) == ("currency", True)
    assert prices.read(path, currency="EUR", usd_per={"EUR": 1.5}).quotes[0].usd_per_gpu_hour == 3.0
    assert prices.read(path, currency="USD").quotes[0].usd_per_gpu_hour == 2.0


@pytest.mark.parametrize(
    "wrong",
    [{"currency": "euro"}, {"usd_per": {"EUR": 0.0}}, {"usd_per": {"EUR": float("nan")}}, {"usd_per": {"USD": 2.0}},
     {"date": "soon"}, {"date": "2026-13"}, {"date": "2026-02-31x"}],
)  # fmt: skip
def test_what_is_said_of_a_file_is_checked(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong)).split("_")[0]):
        prices.read(table(tmp_path, ONE + "\na40,1,spot,1\n"), **wrong)


def test_spot_above_on_demand_of_one_machine(tmp_path: Path) -> None:
    text = "gpu,gpu_count,market,usd_per_gpu_hour,region\n" + "".join(
        f"a40,1,{market},{price},{place}\n"
        for place, market, price in [("x", "on_demand", 1), ("x", "spot", 2), ("y", "on_demand", 2), ("y", "spot", 1)]
    )
    book = prices.read(table(tmp_path, text))
    assert {q.region for q in book.quotes} == {"y"}
    assert reasons(book) == [(2, "spot above on-demand"), (3, "spot above on-demand")]
    assert "on demand 1 lies below spot 2" in book.dropped[0].reason


# -------------------------------------------------------------------------------------------------------- SkyPilot
def test_google_adds_machine_and_gpus_up_zone_by_zone() -> None:
    """Sums worked by hand: 0.73948 + 2.93391, 9.46006 + 82.75421, 1.18251 + 9.79655; the first two are list prices."""
    book = prices.read(SKYPILOT / "v9" / "gcp" / "vms.csv")
    found = {(q.instance_type, q.market): q for q in book.quotes}
    whole = found["a2-highgpu-1g", "on_demand"]
    assert whole.usd_per_hour_instance == pytest.approx(3.67339)
    assert (whole.gpu, whole.region, whole.gpu_count) == ("a100-40gb-sxm", "us-central1", 1)
    assert found["a2-highgpu-1g", "spot"].usd_per_hour_instance == pytest.approx(0.38812 + 1.5399)
    whole = found["a3-megagpu-8g", "on_demand"]
    assert whole.usd_per_hour_instance == pytest.approx(92.21427)
    assert whole.usd_per_gpu_hour == pytest.approx(92.21427 / 8)
    assert whole.gpu == "h100-80gb-sxm"
    assert found["a3-highgpu-1g", "on_demand"].usd_per_hour_instance == pytest.approx(10.97906)
    assert found["a3-edgegpu-8g", "on_demand"].usd_per_hour_instance == pytest.approx(9.46006 + 78.37241)


def test_what_google_s_table_says_wrongly() -> None:
    book = prices.read(SKYPILOT / "v9" / "gcp" / "vms.csv")
    assert not [q for q in book.quotes if q.gpu.startswith("h100") and q.region == "us-central1" and q.gpu_count == 1]
    kinds = [d.kind for d in book.dropped]
    assert kinds.count("spot above on-demand") == 1  # H100 4.20 on demand, 5.34 spot
    assert kinds.count("placeholder price") == 3  # 700 thrice
    alone = [d.reason for d in book.dropped if d.kind == "part of a machine"]
    assert len(alone) == 4  # A100 and H100-MEGA in Asia, B200; T4, which goes into a machine of one's choice
    assert any("1 T4 without the machine" in reason for reason in alone)


def test_a_wrong_part_spoils_a_sum_that_looks_right(tmp_path: Path) -> None:
    """The A100 of asia-northeast1 costs 1.706 on demand and 1.7915 spot: with a machine the sum is no longer odd."""
    text = SKY_HEADER + (
        "a2-highgpu-1g,,,,1.0,0.5,asia-northeast1,asia-northeast1-a\n"
        ",A100,1,{'Gpus': [{'MemoryInfo': {'SizeInMiB': 40960}}]},1.70586,1.7915,asia-northeast1,asia-northeast1-a\n"
    )
    book = prices.read(table(tmp_path, text, "gcp/vms.csv"))
    assert book.quotes == ()
    assert reasons(book) == [(3, "spot above on-demand")]


def test_slices_of_tpus_are_priced_by_the_chip() -> None:
    """gpuhunt's table of the same prices, by the chip: v5e 1.20, v5p 4.20, v6e 2.70 on demand."""
    book = prices.read(SKYPILOT / "v9" / "gcp" / "vms.csv")
    found = {
        (q.gpu, q.gpu_count): q.usd_per_gpu_hour for q in book.quotes if "tpu" in q.gpu and q.market == "on_demand"
    }
    assert found == {
        ("tpu-v5e", 256): pytest.approx(1.2),
        ("tpu-v5p", 4): pytest.approx(4.2),
        ("tpu-v6e", 8): pytest.approx(2.7),
        ("tpu-v6e", 16): pytest.approx(2.7),
    }


def test_amazon_s_table() -> None:
    """One on-demand quote a region, a spot quote a zone; a price that is missing is no quote."""
    book = prices.read(SKYPILOT / "v9" / "aws")
    p3 = [(q.market, q.usd_per_gpu_hour, q.notes) for q in book.quotes if q.instance_type == "p3.2xlarge"]
    assert p3 == [("on_demand", 3.589, ""), ("spot", 2.0084, "zone euw2-az2"), ("spot", 3.589, "zone euw2-az3")]
    p5e = [(q.market, q.usd_per_hour_instance) for q in book.quotes if q.instance_type == "p5e.48xlarge"]
    assert p5e == [("spot", 10.0644)]
    assert reasons(book) == [(10, "no price")]
    assert {q.provider for q in book.quotes} == {"aws"}
    assert not [q for q in book.quotes if q.instance_type == "m8i.large"]


@pytest.mark.parametrize(
    ("place", "provider", "instance_type", "gpu"),
    [
        ("v9/aws", "aws", "p4d.24xlarge", {"a100-40gb-sxm"}),
        ("v9/aws", "aws", "p4de.24xlarge", {"a100-80gb-sxm"}),
        ("v9/lambda", "lambda", "gpu_8x_v100", {"v100-16gb-sxm2"}),
        ("v9/nebius", "nebius", "gpu-h100-sxm_8gpu-128vcpu-1600gb", {"h100-80gb-sxm"}),  # memory said to be 0
        ("v9/vast", "vast", "1x-A100_SXM4-32-65536", {"a100-80gb-sxm", "a100-40gb-sxm"}),  # two offers, by memory
        ("v9/vast", "vast", "2x-A100_SXM4-32-65536", {"a100-80gb-sxm", "a100-40gb-sxm"}),  # memory of both GPUs
        ("v9/vast", "vast", "2x-A100_PCIE-32-65536", {"a100-40gb-pcie"}),
        ("v9/vast", "vast", "1x-Tesla_V100-32-65536", {"v100-16gb-sxm2"}),
        ("v8/cudo", "cudo", "epyc-genoa-a100-pcie_1x2v4gb", {"a100-80gb-pcie"}),
        ("v8/cudo", "cudo", "intel-ice-lake-a800-pci_1x2v4gb", {"a800-80gb-pcie"}),
        ("v8/runpod", "runpod", "1x_A100-80GB_SECURE", {"a100-80gb-pcie"}),
        ("v6/runpod", "runpod", "1x_H100_SECURE", {"h100-80gb-pcie"}),
        ("v6/runpod", "runpod", "8x_H100-SXM_SECURE", {"h100-80gb-sxm"}),
        ("v6/runpod", "runpod", "1x_A100-80GB-SXM_SECURE", {"a100-80gb-sxm"}),
        ("v8/verda", "verda", "1B300.30V", {"b300"}),  # GpuInfo is JSON; 262 GiB of 288 GB
        ("v8/verda", "verda", "1RTXPRO6000.30V", {"rtx-pro-6000-server"}),
        ("v8/shadeform", "denvr", "A100-sxm4x8", {"a100-40gb-sxm"}),
        ("v8/shadeform", "crusoe", "A100-80G-sxm4x8", {"a100-80gb-sxm"}),
        ("v8/shadeform", "crusoe", "A100-80GB", {"a100-80gb-pcie"}),
        ("v8/shadeform", "scaleway", "H100x2", {"h100-80gb-pcie"}),
        ("v8/shadeform", "paperspace", "H100", {"h100-80gb-sxm"}),
        ("v8/shadeform", "paperspace", "V100-32GB", {"v100-32gb-pcie"}),
    ],
)
def test_ambiguous_names(place: str, provider: str, instance_type: str, gpu: set[str]) -> None:
    """Name, memory, instance type and provider together; the catalogue's rows were matched by hand, and agree."""
    book = prices.read(SKYPILOT / place)
    assert {q.gpu for q in book.quotes if (q.provider, q.instance_type) == (provider, instance_type)} == gpu
    by_hand = {q.gpu for q in catalog.all_quotes() if (q.provider, q.instance_type) == (provider, instance_type)}
    assert by_hand in (gpu, set())


@pytest.mark.parametrize(
    ("name", "memory", "instance_type", "provider", "gpu"),
    [
        ("A100-80GB", 80.0, "Standard_NC48ads_A100_v4", "azure", "a100-80gb-pcie"),
        ("A100-80GB", 80.0, "Standard_ND96amsr_A100_v4", "azure", "a100-80gb-sxm"),
        ("H100", 94.0, "Standard_NC40ads_H100_v5", "azure", "h100-94gb-nvl"),
        ("H100", 80.0, "p4d.24xlarge", "aws", "h100-80gb-sxm"),  # a machine of another chip says nothing
        ("A100", None, "ECS1GPU3", "seeweb", "a100-80gb-pcie"),
        ("H100", None, "n3-H100x8-NVLink", "hyperstack", "h100-80gb-pcie"),  # bridges, not SXM
        ("H100", 80.0, "NVIDIA H100 80GB HBM3", "runpod", "h100-80gb-sxm"),  # a device name wins over the habit
        ("A100", 80.0, "whatever", "nobody", "a100-80gb-sxm"),
        ("H200NVL", 141.0, "", "nobody", "h200-141gb-nvl"),
        ("L4", 24.0, "", "nobody", "l4"),
        ("L40S", 48.0, "", "nobody", "l40s"),
        ("GH200", 96.0, "", "nobody", "gh200-96gb"),
        ("MI300X", 192.0, "", "nobody", "mi300x"),
    ],
)
def test_names_of_other_tables(name: str, memory: float | None, instance_type: str, provider: str, gpu: str) -> None:
    assert find_gpu(name, memory, instance_type, provider).gpu == gpu


def test_a_gpu_that_is_not_the_one_of_its_name() -> None:
    """Vast calls the 3060 Ti RTX3060 and the 4070 Ti Super RTX4070; the RTX 3060 of 8 GB is not that of 12 GB."""
    book = prices.read(SKYPILOT / "v9" / "vast")
    assert [(d.line, d.kind, d.reason.split("'")[1]) for d in book.dropped] == [
        (3, "unknown GPU", "RTX_5880Ada"), (10, "unknown GPU", "RTX_4070S_Ti"), (12, "unknown GPU", "RTX_3060_Ti"),
    ]  # fmt: skip
    with pytest.raises(RowError, match="RTX3060 with 8 GB"):
        find_gpu("RTX3060", 8.0)


def test_spot_prices_that_are_none() -> None:
    """0.00 at Vast, that of on demand at RunPod, empty at Lambda."""
    for place in ("v9/vast", "v8/runpod", "v9/lambda"):
        book = prices.read(SKYPILOT / place)
        assert book.quotes
        assert not book.select(market="spot")
    a40 = prices.read(SKYPILOT / "v6" / "runpod").select("a40")
    assert [(q.market, q.usd_per_gpu_hour) for q in a40] == [("spot", 0.49), ("on_demand", 0.79)]


def test_resellers_are_told_apart() -> None:
    q = prices.read(SKYPILOT / "v8" / "shadeform").cheapest("h100", provider="paperspace")
    assert (q.usd_per_gpu_hour, q.notes) == (5.99, "as resold by Shadeform; form factor assumed")


def test_a_folder_of_clouds() -> None:
    book = prices.read(SKYPILOT / "v9")
    assert {q.provider for q in book.quotes} == {"aws", "gcp", "vast", "nebius", "lambda"}
    alone = [prices.read(folder) for folder in (SKYPILOT / "v9").iterdir()]
    assert sum(len(one.quotes) for one in alone) == len(book.quotes)
    assert sum(len(one.dropped) for one in alone) == len(book.dropped)
    assert {q.date for q in prices.read(SKYPILOT / "v9", date="2026-11-30").quotes} == {"2026-11-30"}


def test_whose_prices_a_table_has(tmp_path: Path) -> None:
    text = SKY_HEADER + "1x,A40,1,,0.5,,US,\n"
    with pytest.raises(InvalidInputError, match="does not say whose prices these are; pass provider="):
        prices.read(table(tmp_path, text, "downloads/vms.csv"))
    assert prices.read(tmp_path / "downloads" / "vms.csv", provider="RunPod").quotes[0].provider == "runpod"
    assert prices.read(table(tmp_path, text, "v9/newcloud/vms.csv"), provider="x").quotes[0].provider == "newcloud"


def test_a_cloud_that_names_no_currency(tmp_path: Path) -> None:
    path = table(tmp_path, SKY_HEADER + "ECS1GPU7,L40S,1,,0.85,,it-fr2,\n", "seeweb/vms.csv")
    book = prices.read(path)
    assert (book.quotes, reasons(book)) == ((), [(2, "currency")])
    book = prices.read(path, currency="EUR", usd_per={"EUR": 2.0})
    assert [q.usd_per_gpu_hour for q in book.quotes] == [1.7]


@pytest.mark.parametrize("column", ["AcceleratorName", "AcceleratorCount", "Price", "Region", "InstanceType"])
def test_a_missing_column_of_skypilot_s(tmp_path: Path, column: str) -> None:
    path = table(tmp_path, SKY_HEADER.replace(column, "X" + column, 1) + "1x,A40,1,,0.5,,US,\n", "aws/vms.csv")
    with pytest.raises(InvalidInputError, match=f"has no column {column}"):
        prices.read(path)


# --------------------------------------------------------------------------------------------------------- gpuhunt
def test_gpuhunt_s_tables() -> None:
    book = prices.read(DATA / "gpuhunt")
    assert offers(book, "provider", "instance_type", "gpu", "gpu_count", "usd_per_hour_instance", "market") == {
        ("verda", "1B300.30V", "b300", 1, 6.99, "on_demand"),
        ("verda", "1B300.30V", "b300", 1, 2.447, "spot"),
        ("verda", "2B300.60V", "b300", 2, 4.893, "spot"),
        ("aws", "p3.2xlarge", "v100-16gb-sxm2", 1, 3.589, "on_demand"),
        ("aws", "p3.2xlarge", "v100-16gb-sxm2", 1, 2.0084, "spot"),
        ("aws", "p4d.24xlarge", "a100-40gb-sxm", 8, 30.09784, "on_demand"),
        ("aws", "p4d.24xlarge", "a100-40gb-sxm", 8, 30.0978, "spot"),
    }
    assert {q.date for q in book.quotes} == {"2026-08-19"}  # from `version`
    assert book.dropped == ()


def archive(folder: Path, members: dict[str, bytes], **options: Any) -> Path:
    path = folder / "catalog.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return path


def test_an_archive_is_the_folder(tmp_path: Path) -> None:
    members = {path.name: path.read_bytes() for path in (DATA / "gpuhunt").iterdir()}
    book = prices.read(archive(tmp_path, members))
    key = ("provider", "instance_type", "gpu", "usd_per_hour_instance", "market", "date", "region")
    assert offers(book, *key) == offers(prices.read(DATA / "gpuhunt"), *key)


def test_version_1_and_odd_rows(tmp_path: Path) -> None:
    text = GPUHUNT_HEADER + (
        "NVIDIA A100-SXM4-80GB,US,1.5,8,64,1,A100,80.0,False,\n"
        "m5.large,us-east-1,0.096,2,8,0,,,False,\n"
        "v5p-8,us-east5,16.8,208,448,1,tpu-v5p,0,False,\n"
        "x,US,0,8,64,1,A100,80,False,\n"
        "y,US,1,8,64,1,A100,80,maybe,\n"
        "z,US,1,8,64,1,MI9000,80,True,\n"
        "w,US,1,8,64,1,A40,48,False,\n"
        "w,US,2,8,64,1,A40,48,True,\n"
    )
    book = prices.read(table(tmp_path, text, "gcp.csv"))
    assert offers(book, "provider", "gpu", "gpu_count", "usd_per_gpu_hour") == {
        ("gcp", "a100-80gb-sxm", 1, 1.5),
        ("gcp", "tpu-v5p", 4, 4.2),
    }
    assert reasons(book) == [
        (5, "placeholder price"), (6, "malformed"), (7, "unknown GPU"), (8, "spot above on-demand"),
        (9, "spot above on-demand"),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- files of strangers
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not UTF-8 text"),
        (b"gpu,market\0\n", "is not text"),
        (b"# only comments\n", "is no price table"),
        (b"name,price tag\nx,1\n", "is no price table"),
        (b"gpu,usd_per_gpu_hour\na40,1\n", "has no column gpu_count, market"),
        (b"gpu,gpu_count,market\na40,1,spot\n", "has no column usd_per_hour_instance or usd_per_gpu_hour"),
        (b"gpu_count,market,usd_per_gpu_hour\n1,spot,1\n", "has no column gpu or instance_type"),
        (ONE.encode() + b",colour\na40,1,spot,1,red\n", "the column 'colour' is not known"),
        (ONE.encode() + b",gpu\na40,1,spot,1,a40\n", "the column 'gpu' occurs twice"),
        (b"instance_name,price,gpu_name\nx,1,A100\n", "has no column location, gpu_count, gpu_memory, spot"),
        (b'gpu,"' + b"x" * 200_000 + b'"\n', "is not valid CSV"),
        (b"PK\x05\x06" + b"\0" * 18, "holds no .csv"),
    ],
)
def test_files_that_are_no_price_tables(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError) as caught:
        prices.read(path)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert len(text) < 1000
    assert str(path) in text


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        prices.read(tmp_path / "nothing.csv")
    with pytest.raises(InvalidInputError, match=r"has no price table"):
        prices.read(tmp_path)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InvalidInputError, match="is not a file"):
        prices.read(tmp_path / "pipe.csv")


def test_one_bad_table_of_a_folder_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    table(tmp_path, SKY_HEADER + "1x,A40,1,,0.5,,US,\n", "v9/runpod/vms.csv")
    table(tmp_path, "InstanceType,Price\nx,1\n", "v9/oci/vms.csv")
    (tmp_path / "v9" / "ibm").mkdir()
    (tmp_path / "v9" / "ibm" / "vms.csv").write_bytes(b"\xff\xfe")
    book = prices.read(tmp_path / "v9")
    assert len(book.quotes) == 1
    assert [(d.line, d.kind) for d in book.dropped] == [(None, "not read"), (None, "not read")]
    assert any("oci/vms.csv: is read as SkyPilot's vms.csv, but has no column" in str(d) for d in book.dropped)
    (tmp_path / "v9" / "runpod" / "vms.csv").unlink()
    with pytest.raises(InvalidInputError, match="none of its 2 tables can be read"):
        prices.read(tmp_path / "v9")


def test_a_zip_bomb_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MB of zeros in 100 kB are refused before they are unpacked, and so are many tables that add up."""
    started = time.perf_counter()
    with pytest.raises(InvalidInputError, match="more than 64,000,000 bytes"):
        prices.read(archive(tmp_path, {"aws.csv": b"0" * 100_000_000}))
    assert time.perf_counter() - started < 5
    monkeypatch.setattr("moecost.prices.tables.MAX_ARCHIVE_BYTES", 2000)
    good = (GPUHUNT_HEADER + "w,US,1,8,64,1,A40,48,False,\n" * 50).encode()
    with pytest.raises(InvalidInputError, match="bytes, too many for a price table"):
        prices.read(archive(tmp_path, {"aws.csv": good, "gcp.csv": good}))
    with pytest.raises(InvalidInputError, match="holds 300 tables, more than 200"):
        prices.read(archive(tmp_path, {f"p{i}.csv": b"x" for i in range(300)}))


def test_an_archive_leads_nowhere(tmp_path: Path) -> None:
    good = (GPUHUNT_HEADER + "w,US,1,8,64,1,A40,48,False,\n").encode()
    inside = tmp_path / "inside"
    inside.mkdir()
    book = prices.read(
        archive(inside, {"../outside.csv": good, "/etc/x.csv": good, "a\\..\\b.csv": good, "aws.csv": good})
    )
    assert {q.provider for q in book.quotes} == {"aws"}
    assert len(book.dropped) == 3
    assert all("lies in a folder of the archive" in d.reason for d in book.dropped)
    assert sorted(os.listdir(tmp_path)) == ["inside"]
    assert os.listdir(inside) == ["catalog.zip"]


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = archive(tmp_path, {"aws.csv": (GPUHUNT_HEADER * 50).encode()})
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + b"\0" * 20 + whole[60:])
    with pytest.raises(InvalidInputError, match=r"zip archive|is empty"):
        prices.read(path)


# ------------------------------------------------------------------------------------------------- what a book does
def test_a_quote_of_a_book_prices_an_estimate() -> None:
    """The paper's Mixtral run on an A40 at RunPod's 0.79 $/hour costs as much as at CUDO's."""
    job: dict[str, Any] = {"method": "qlora", "sequence_length": 512, "software": "hf-peft-2024"}
    quote = prices.read(SKYPILOT / "v6").median("a40")
    e = moecost.estimate("mixtral-8x7b", "a40", price=quote, **job)
    assert e.provenance.price == quote
    assert e.cost_usd == moecost.estimate("mixtral-8x7b", "a40", price=0.79, **job).cost_usd
    spot = prices.read(SKYPILOT / "v6").cheapest("a40", market="spot")
    assert moecost.estimate("mixtral-8x7b", "a40", price=spot, **job).cost_usd == pytest.approx(
        e.cost_usd * 0.49 / 0.79
    )


def test_median_and_cheapest_keep_markets_apart() -> None:
    book = prices.read(SKYPILOT / "v9")
    h100 = sorted(q.usd_per_gpu_hour for q in book.quotes if q.gpu == "h100-80gb-sxm" and q.market == "on_demand")
    assert book.cheapest("H100").usd_per_gpu_hour == h100[0]
    assert book.median("H100").usd_per_gpu_hour == h100[(len(h100) - 1) // 2]
    assert book.median("H100", "spot", "AWS").market == "spot"
    with pytest.raises(NoPriceError, match=r"no reserved price of h100-80gb-sxm; quotes there are.*aws spot"):
        book.median("h100", "reserved")
    with pytest.raises(NoPriceError, match=r"no on_demand price of k80; this price book has no quote of it at all"):
        book.cheapest("k80")
    with pytest.raises(InvalidInputError, match="market='cheap' must be one of"):
        book.select(market="cheap")


def test_the_shipped_book_agrees_with_the_default_price() -> None:
    for gpu in ("a40", "h100", "a100-80gb-pcie"):
        assert prices.shipped().median(gpu) == catalog.median_quote(gpu)


def test_ranges_worked_by_hand() -> None:
    rows = [("aws", 4.0, "2026"), ("aws", 2.0, "undated"), ("aws", 3.0, "2025-01"), ("gcp", 1.0, "undated")]
    book = prices.PriceBook(
        tuple(PriceQuote(usd_per_gpu_hour=p, provider=who, gpu="a40", date=d) for who, p, d in rows)
    )
    assert book.ranges() == (
        ("a40", "on_demand", "aws", 2.0, 3.0, 4.0, 3, "2025-01", "2026"),
        ("a40", "on_demand", "gcp", 1.0, 1.0, 1.0, 1, None, None),
        ("a40", "on_demand", None, 1.0, 2.0, 4.0, 4, "2025-01", "2026"),
    )
    assert len(book.ranges(provider="GCP")) == 1


@pytest.mark.parametrize(
    ("date", "old"),
    [
        ("2026-11-30", False), ("2026-06-03", False), ("2026-06-02", True),  # 180 and 181 days before
        ("2026-07", False), ("2026-05", True), ("2026", True), ("2025", True), ("2026-02-31", True), ("undated", True),
    ],
)  # fmt: skip
def test_old_quotes_are_told(date: str, old: bool) -> None:
    quote = PriceQuote(usd_per_gpu_hour=1.0, date=date)
    note = prices.age_note(quote, TODAY)
    assert (note is not None) == old
    assert bool(prices.PriceBook((quote,)).age_notes(TODAY)) == old
    if note:
        assert ("no date" in note) == (date == "undated")


# ------------------------------------------------------------------------------------------------------------ live
@dataclass
class Item:
    """As `gpuhunt.CatalogItem` has it."""

    provider: str
    instance_name: str
    location: str
    price: float
    gpu_count: int
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool


ITEMS = [
    Item("vastai", "123", "US", 1.6, 2, "H100", 80.0, False),
    Item("lambdalabs", "gpu_1x_h100_pcie", "us-west-3", 2.49, 1, "H100", 80.0, False),
    Item("aws", "p5.48xlarge", "use1-az6", 17.0, 8, "H100", 80.0, True),
    Item("runpod", "NVIDIA RTX 9090", "US", 1.0, 1, "RTX9090", 48.0, False),
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """gpuhunt without its network: answers with `answer`, keeps what it was asked in `asked`."""
    module = types.ModuleType("gpuhunt")
    module.answer, module.asked = ITEMS, []  # type: ignore[attr-defined]

    def query(**asked: Any) -> list[Item]:
        module.asked.append(asked)
        if isinstance(module.answer, Exception):
            raise module.answer
        return [i for i in module.answer if asked["spot"] in (None, i.spot)]

    module.query = query  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpuhunt", module)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a test must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return module


def test_live_quotes_are_of_today(fake: Any, tmp_path: Path) -> None:
    book = prices.live("h100-80gb-sxm", cache=tmp_path / "kept.csv")
    assert offers(book, "provider", "usd_per_gpu_hour", "market") == {
        ("vast", 0.8, "on_demand"),
        ("aws", 2.125, "spot"),
    }
    assert {q.date for q in book.quotes} == {datetime.date.today().isoformat()}
    assert {q.source for q in book.quotes} == {"gpuhunt, asked live"}
    assert not book.dropped  # other GPUs are not of interest
    assert prices.read(tmp_path / "kept.csv").quotes == book.quotes
    assert [d.kind for d in prices.live().dropped] == ["unknown GPU"]
    assert {q.gpu for q in prices.live(market="on_demand").quotes} == {"h100-80gb-sxm", "h100-80gb-pcie"}
    prices.live(provider="lambda")
    assert [a["provider"] for a in fake.asked] == [None, None, None, "lambdalabs"]
    assert [a["spot"] for a in fake.asked] == [None, None, False, None]
    with pytest.raises(InvalidInputError, match="market='reserved' must be on_demand or spot"):
        prices.live(market="reserved")


def test_live_fails_clearly(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.csv"
    kept.write_text("mine", encoding="utf-8")
    fake.answer = OSError("no route to host")
    with pytest.raises(NoPriceError, match=r"OSError: no route to host\); .*kept\.csv holds what was asked before"):
        prices.live("h100", cache=kept)
    fake.answer = [object()]  # another version of gpuhunt
    monkeypatch.setattr(fake, "query", lambda **_: fake.answer)
    with pytest.raises(NoPriceError, match="AttributeError"):
        prices.live("h100", cache=kept)
    assert kept.read_text(encoding="utf-8") == "mine"
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'moecost\[prices\]'"):
        prices.live("h100")


def test_nothing_is_asked_unless_called(fake: Any) -> None:
    prices.shipped()
    prices.read(SKYPILOT / "v9")
    moecost.estimate("phi-2", "a40", method="lora", sequence_length=128)
    assert fake.asked == []


# ------------------------------------------------------------------------------------------------ the command line
def test_prices_are_listed() -> None:
    status, out, err = run("prices", "h100", "--market", "spot", "--provider", "aws", "--json")
    (row,) = json.loads(out)
    quotes = catalog.quotes("h100", market="spot", provider="aws")
    assert status == 0
    assert (row["gpu"], row["market"], row["provider"]) == ("h100-80gb-sxm", "spot", "aws")
    assert (row["low"], row["high"], row["num_quotes"]) == (
        quotes[0].usd_per_gpu_hour, quotes[-1].usd_per_gpu_hour, len(quotes),
    )  # fmt: skip
    assert "warning: 15 of 15 quotes may be more than 180 days old (dated 2026)" in err
    status, out, _ = run("prices", "h100")
    lines = out.splitlines()
    assert lines[0].split() == ["GPU", "market", "provider", "low", "median", "high", "n", "oldest"]
    assert max(map(len, lines)) <= 80 + 7  # a terminal of 80 columns takes one space between columns, not two
    assert any(line.split()[:3] == ["h100-80gb-sxm", "on_demand", "all"] for line in lines)


def test_prices_of_a_file(tmp_path: Path) -> None:
    out_file = tmp_path / "kept.csv"
    status, out, err = run(
        "prices", "--file", str(SKYPILOT / "v9"), "--date", "2026-11-30", "-o", str(out_file), "--json"
    )
    assert status == 0
    assert {row["provider"] for row in json.loads(out)} >= {"aws", "gcp", "vast"}
    assert "left out: " in err
    assert "line 3: unknown GPU: 'RTX_5880Ada'" in err
    assert "and 2 more: unknown GPU" in err
    with open(out_file, encoding="utf-8", newline="") as stream:
        assert {row["date"] for row in csv.DictReader(stream)} == {"2026-11-30"}
    assert run("prices", "--file", str(out_file), "--json")[1] == out
    euro = table(tmp_path, "gpu,gpu_count,market,price_per_gpu_hour,currency\na40,1,spot,2,EUR\n", "euro.csv")
    assert json.loads(run("prices", "--file", str(euro), "--usd-per", "EUR=1.5", "--json")[1])[0]["low"] == 3.0
    vast = table(tmp_path, SKY_HEADER + "1x,A40,1,,0.5,,US,\n", "vms.csv")
    assert (
        json.loads(run("prices", "--file", str(vast), "--provider", "runpod", "--json")[1])[0]["provider"] == "runpod"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--file", "nothing.csv"], "nothing.csv': cannot be read"),
        (["h1000"], "unknown GPU 'h1000'"),
        (["h100", "--provider", "nobody"], "none of 593 quotes is of that GPU, market and provider"),
        (["--market", "auction"], "must be one of on_demand, spot, reserved"),
        (["--file", "x", "--live"], "give one of them"),
        (["--date", "2026"], "give --file"),
        (["--file", "x", "--usd-per", "EUR"], "write CODE=DOLLARS"),
        (["-o", "/nowhere/x.csv"], "no such folder"),
    ],
)
def test_bad_input_of_prices_is_two_and_one_line(args: list[str], said: str) -> None:
    status, out, err = run("prices", *args)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_live_prices_on_the_command_line(fake: Any) -> None:
    status, out, _ = run("prices", "h100-80gb-pcie", "--live", "--json")
    assert status == 0
    assert [(row["provider"], row["low"]) for row in json.loads(out)] == [("lambda", 2.49)]


def test_an_estimate_is_priced_from_a_file(tmp_path: Path) -> None:
    job = ["--model", "phi-2", "--gpu", "a40", "--method", "lora", "--sequence-length", "128", "--json"]
    text = ONE + ",provider,date\n" + "".join(
        f"a40,1,{market},{price},{who},{datetime.date.today()}\n"
        for market, price, who in [("on_demand", 0.5, "x"), ("on_demand", 0.7, "y"), ("on_demand", 0.9, "y"),
                                   ("spot", 0.1, "x")]
    )  # fmt: skip
    file = str(table(tmp_path, text))

    def asked(*args: str) -> tuple[float, str]:
        status, out, err = run("estimate", *job, "--prices", file, *args)
        assert status == 0
        return json.loads(out)["usd_per_gpu_hour"], err

    price, err = asked()
    assert price == 0.7
    assert "note: price 0.70 $/GPU-hour is the median of 3 on_demand quotes for a40 in " in err
    assert "(0.50 to 0.90)" in err
    assert "warning" not in err
    assert asked("--price", "x")[0] == 0.5
    assert asked("--market", "spot")[0] == 0.1
    price, err = asked("--price", "3")
    assert price == 3.0
    assert "the price that is given wins" in err
    status, _, err = run("estimate", *job, "--prices", file, "--price", "cudo")
    assert status == 2
    assert "no on_demand price of a40 from 'cudo'; quotes there are" in err


def test_errors_are_ours() -> None:
    assert issubclass(RowError, MoECostError)
    with pytest.raises(AttributeError):
        prices.PriceBook().quotes = ()  # type: ignore[misc]
