"""Every data file on hardware and prices: valid, sourced, in agreement with itself and with facts from outside."""

from __future__ import annotations

import statistics

import pytest

from moecost import catalog
from moecost.specs import USABLE_PER_LABEL, GPUSpec, NodeSpec
from moecost.units import GB, GIB

GPUS = catalog.gpus()
NODES = catalog.nodes()

# FLOP a cycle and SM of the FP32 lanes and of the FP16 matrix units (dense, FP32 accumulation), from the architecture
# whitepapers: V100, Turing, GA100 and GA102, Ada, H100; CDNA 2, 3 and 4 count compute units. "8.6" is GA10x.
FP32_RATE = {"Kepler": 384, "Pascal": 128, "Volta": 128, "Turing": 128, "8.0": 128, "CDNA2": 128}
FP32_RATE_ELSE = 256
FP16_RATE = {
    "Pascal": 256,
    "Volta": 1024,
    "Turing": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "Ada Lovelace": 1024,
    "Hopper": 4096,
    "Blackwell": 8192,
    "Blackwell Ultra": 8192,
    "Blackwell RTX": 1024,
    "CDNA2": 1024,
    "CDNA3": 2048,
    "CDNA4": 4096,
}
HALF_RATE = {"a10g", "l40"}
"""Besides GeForce: accumulation in FP32 at half the rate of the die."""


def expected_rates(gpu: GPUSpec) -> dict[str, int]:
    """FLOP a cycle and SM by data type, of the types whose rate the architecture fixes."""
    family = gpu.architecture if gpu.architecture != "Ampere" else str(gpu.compute_capability)
    known = {"fp32": FP32_RATE.get(family, FP32_RATE_ELSE)}
    if family in FP16_RATE:
        geforce = "GeForce" in gpu.marketing_name
        full = FP16_RATE[family]
        fp16 = full // 2 if geforce or gpu.name in HALF_RATE else full
        int8 = full if family == "CDNA2" else 2 * full if geforce else 2 * fp16
        known |= {"fp16": fp16, "bf16": fp16, "tf32": fp16 // 2, "fp8": 2 * fp16, "int8": int8}
        known["fp4"] = 4 * full if geforce else 4 * fp16
    return known


@pytest.mark.parametrize("name", GPUS)
def test_gpu_file(name: str) -> None:
    gpu = catalog.load_spec_file(
        catalog.gpu_index().path(name), GPUSpec
    )  # refuses numbers without source, idle sources
    assert gpu.name == name
    assert {s.date == "undated" or s.date[:2] == "20" for s in gpu.sources.values()} == {True}
    for dtype in gpu.peak_tflops_dense:
        assert gpu.origin(f"peak_tflops_dense.{dtype}") is not None
    for field in ("num_sms", "memory_label_gb", "memory_usable_gib", "bandwidth_gb_per_s", "tdp_w"):
        assert (gpu.origin(field) is None) == (getattr(gpu, field) is None)
    if gpu.memory_usable_gib is not None:
        assert gpu.memory_usable_gib * GIB < 1.08 * gpu.memory_label_gb * GB
    assert gpu.reference_node is None or NodeSpec.load(gpu.reference_node).gpu == name


@pytest.mark.parametrize("name", NODES)
def test_node_file(name: str) -> None:
    node = catalog.load_spec_file(catalog.node_index().path(name), NodeSpec)
    assert node.name == name
    assert node.gpu in GPUS
    assert node.sources
    if node.intra_link in ("nvlink", "infinity-fabric"):  # the node's link is the GPU's
        assert node.intra_gb_per_s_per_gpu_bidirectional == GPUSpec.load(node.gpu).link_gb_per_s_bidirectional


@pytest.mark.parametrize("name", GPUS)
def test_peak_is_sms_times_rate_times_clock_or_the_doubt_is_written(name: str) -> None:
    gpu = GPUSpec.load(name)
    if gpu.num_sms is None or gpu.boost_clock_mhz is None:
        pytest.skip("SMs or clock not known")
    checked = 0
    for dtype, rate in expected_rates(gpu).items():
        printed = gpu.peak_tflops_dense.get(dtype)  # type: ignore[call-overload]
        if printed is None:
            continue
        checked += 1
        computed = gpu.num_sms * rate * gpu.boost_clock_mhz / 1e6
        origin = gpu.origin(f"peak_tflops_dense.{dtype}")
        assert origin is not None
        assert computed == pytest.approx(printed, rel=0.02) or origin.doubt, f"{dtype}: {printed} against {computed}"
    assert checked


def test_most_peaks_are_reproduced() -> None:
    """Doubts must stay the exception: the check above would otherwise be empty."""
    good = total = 0
    for gpu in map(GPUSpec.load, GPUS):
        for dtype, rate in expected_rates(gpu).items():
            printed = gpu.peak_tflops_dense.get(dtype)  # type: ignore[call-overload]
            if printed and gpu.num_sms and gpu.boost_clock_mhz:
                total += 1
                good += abs(gpu.num_sms * rate * gpu.boost_clock_mhz / 1e6 / printed - 1) < 0.02
    assert total > 250
    assert good / total > 0.8


@pytest.mark.parametrize(
    ("name", "sms", "bandwidth", "bf16", "fp8", "link", "label", "watts"),
    [  # NVIDIA and AMD datasheets
        ("a40", 84, 696, 149.7, None, 112.5, 48, 300),
        ("a100-80gb-sxm", 108, 2039, 312, None, 600, 80, 400),
        ("h100-80gb-sxm", 132, 3350, 989.4, 1978.9, 900, 80, 700),
        ("h100-80gb-pcie", 114, 2039, 756, 1513, 600, 80, 350),
        ("h200-141gb-sxm", 132, 4800, 989.4, 1978.9, 900, 141, 700),
        ("l40s", 142, 864, 362.05, 733, None, 48, 350),
        ("l4", 58, 300, 121, 242.5, None, 24, 72),
        ("mi300x", 304, 5300, 1307.4, 2614.9, 896, 192, 750),
        ("rtx-a6000", 84, 768, 154.8, None, 112.5, 48, 300),
    ],
)
def test_datasheet_figures(
    name: str,
    sms: int,
    bandwidth: float,
    bf16: float,
    fp8: float | None,
    link: float | None,
    label: float,
    watts: float,
) -> None:
    gpu = GPUSpec.load(name)
    assert (gpu.num_sms, gpu.bandwidth_gb_per_s, gpu.memory_label_gb, gpu.tdp_w) == (sms, bandwidth, label, watts)
    assert gpu.peak_tflops_dense["bf16"] == bf16
    assert gpu.peak_tflops_dense.get("fp8") == fp8
    assert gpu.link_gb_per_s_bidirectional == link


def test_usable_share_of_the_label_is_the_median_of_the_catalogue() -> None:
    for vendor, ratio in USABLE_PER_LABEL.items():
        known = [
            gpu.memory_usable_gib * GIB / (gpu.memory_label_gb * GB)
            for gpu in map(GPUSpec.load, GPUS)
            if gpu.vendor == vendor and gpu.memory_usable_gib is not None
        ]
        assert ratio == pytest.approx(statistics.median(known), abs=5e-4)


def test_no_name_belongs_to_two_files() -> None:
    for index in (catalog.gpu_index(), catalog.node_index()):
        owner: dict[str, str] = {}
        for name in index.names:
            for alias in (name, *index.names_in_file(name)):
                key = catalog.normalise(alias, index.ignored_words)
                assert owner.setdefault(key, name) == name, f"{alias} is claimed by {owner[key]} and {name}"


@pytest.mark.parametrize("index", [catalog.gpu_index(), catalog.node_index()], ids=["gpus", "nodes"])
def test_index_is_up_to_date(index: catalog.Index) -> None:
    """Otherwise run: python -c "from moecost import catalog as c; c.gpu_index().write_index()"."""
    assert (index.folder / catalog.INDEX_FILE).read_text(encoding="utf-8") == index.index_text()


def test_every_alias_leads_to_its_file() -> None:
    for name, others in catalog.gpu_index().other_names().items():
        assert {catalog.gpu_name(other) for other in others} <= {name}
