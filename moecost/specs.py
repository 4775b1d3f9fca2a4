"""Facts about hardware and its prices: `GPUSpec`, `NodeSpec`, `PriceQuote`.

Fields carry the unit they have on a datasheet; the properties give the same in base units (bytes, FLOP, seconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PositiveFloat, PositiveInt, model_validator

from moecost.errors import InvalidInputError, UnsupportedError, close_matches
from moecost.sources import FROZEN, UNDATED, DateText, FrozenMap, SourcedSpec
from moecost.units import GB, GIB, TERA

PeakType = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
Market = Literal["on_demand", "spot", "reserved"]
Name = Annotated[str, Field(min_length=1, max_length=200)]

PEAK_OF_COMPUTE_DTYPE: Final[Mapping[str, PeakType]] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8-blockwise": "fp8",
    "mxfp8": "fp8",
    "int8": "int8",
    "nvfp4": "fp4",
    "fp4": "fp4",
    "mxfp4": "fp4",
}
"""Which printed peak a compute type runs at."""

USABLE_PER_LABEL: Final[Mapping[str, float]] = {"NVIDIA": 1.059, "AMD": 1.073}
"""Usable bytes over label bytes (GB): median of the catalogue's parts whose driver print-out is known (58 and 7).
Above 1, as most boxes say GB and mean GiB. A vendor without a print-out counts as 1. [-]"""


class GPUSpec(SourcedSpec):
    """One GPU or accelerator, as a driver sees it (a board with two dies may be two of them)."""

    name: Name
    """Canonical key, which is also the file name."""
    marketing_name: Name
    aliases: tuple[Name, ...] = ()
    vendor: Name
    architecture: Name
    compute_capability: str | None = None
    """CUDA compute capability (`8.6`) or AMD's target (`gfx942`)."""
    num_sms: PositiveInt | None = None
    """Streaming multiprocessors; compute units on AMD parts."""
    tensor_cores: Annotated[int, Field(ge=0)] | None = None
    boost_clock_mhz: PositiveFloat | None = None
    memory_label_gb: PositiveFloat
    """As on the box. [GB]"""
    memory_usable_gib: PositiveFloat | None = None
    """Total that the driver gives to a program; None where no print-out was seen. [GiB]"""
    memory_type: str | None = None
    bandwidth_gb_per_s: PositiveFloat
    """Device memory, peak. [GB/s]"""
    l2_cache_mb: PositiveFloat | None = None
    shared_memory_per_sm_kb: PositiveFloat | None = None
    peak_tflops_dense: Annotated[Mapping[PeakType, PositiveFloat], Field(min_length=1), AfterValidator(FrozenMap)]
    """Dense peak with FP32 accumulation (INT32 for int8), never 2:4 sparse; only the types it has. [TFLOP/s]"""
    link_gb_per_s_bidirectional: PositiveFloat | None = None
    """NVLink, Infinity Fabric, RoCE mesh or ICI of one GPU, both directions summed; None: none, or not known. [GB/s]"""
    pcie_gen: PositiveInt | None = None
    pcie_gb_per_s_bidirectional: PositiveFloat | None = None
    """x16, both directions summed, before encoding losses. [GB/s]"""
    tdp_w: PositiveFloat | None = None
    launch_year: Annotated[int, Field(ge=1990, le=2100)] | None = None
    reference_node: str | None = None
    """Machine type it is usually built into, a name in `catalog.nodes()`."""

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Spec of a catalogue name, alias, device name or cloud instance type, or of a YAML file of your own.

        >>> GPUSpec.load("NVIDIA A40").num_sms
        84
        """
        from moecost import catalog

        return catalog.load_gpu(name, cls)

    @property
    def memory_usable_bytes(self) -> float:
        """What a program can get: the driver's total, else label x the vendor's usual ratio. [byte]"""
        if self.memory_usable_gib is not None:
            return self.memory_usable_gib * GIB
        return self.memory_label_gb * GB * USABLE_PER_LABEL.get(self.vendor, 1.0)

    @property
    def memory_usable_note(self) -> str | None:
        """How `memory_usable_bytes` was estimated; None where it is a print-out of the driver."""
        if self.memory_usable_gib is not None:
            return None
        ratio = USABLE_PER_LABEL.get(self.vendor)
        how = f"{ratio:.3f}, the median of {self.vendor} parts" if ratio else "1, as no part of its vendor was seen"
        return (
            f"usable memory of {self.name} is not known: {self.memory_usable_bytes / GIB:.1f} GiB is the label's "
            f"{self.memory_label_gb:g} GB times {how}"
        )

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Peak bandwidth of device memory. [byte/s]"""
        return self.bandwidth_gb_per_s * GB

    @property
    def pcie_bytes_per_s_one_way(self) -> float | None:
        """PCIe, one direction, before encoding losses. [byte/s]"""
        return None if self.pcie_gb_per_s_bidirectional is None else self.pcie_gb_per_s_bidirectional / 2 * GB

    @property
    def link_bytes_per_s_one_way(self) -> float | None:
        """The GPU's own fast link to others, one direction. [byte/s]"""
        return None if self.link_gb_per_s_bidirectional is None else self.link_gb_per_s_bidirectional / 2 * GB

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for a compute type. [FLOP/s]

        Parameters
        ----------
        dtype : `bf16`, `fp16`, `tf32`, `fp32`, `fp8`, `fp8-blockwise`, `mxfp8`, `nvfp4` (= `fp4`, `mxfp4`), `int8`.

        Raises
        ------
        UnsupportedError : the GPU has no such rate, or it is not known; the message lists those there are.
        """
        kind = PEAK_OF_COMPUTE_DTYPE.get(dtype)
        if kind is None:
            near = close_matches(str(dtype), PEAK_OF_COMPUTE_DTYPE) or list(PEAK_OF_COMPUTE_DTYPE)
            raise InvalidInputError(f"compute_dtype={dtype!r} is not a compute type; did you mean {', '.join(near)}?")
        # MXFP8 scales blocks of 32 inside the matrix unit; it came with the parts that also have a 4-bit rate.
        has_it = kind in self.peak_tflops_dense and (dtype != "mxfp8" or "fp4" in self.peak_tflops_dense)
        if not has_it:
            raise UnsupportedError(self._lacks(dtype, kind))
        return self.peak_tflops_dense[kind] * TERA

    def _lacks(self, dtype: str, kind: PeakType) -> str:
        if dtype == "mxfp8" and kind in self.peak_tflops_dense:
            why, instead = "has no block-scaled matrix rate (it has plain fp8)", "fp8 or fp8-blockwise"
        elif self.architecture in _BEFORE_BF16 and dtype in ("bf16", "tf32"):
            why = f"has no {dtype} tensor rate ({self.architecture}: bf16 and tf32 came with Ampere)"
            instead = "fp16" if "fp16" in self.peak_tflops_dense else "fp32"
        else:
            why, instead = f"has no known {dtype} rate", "one of these"
        rates = ", ".join(f"{k} {v:g}" for k, v in self.peak_tflops_dense.items())
        return f"{self.marketing_name} {why}; it has (dense TFLOP/s): {rates}. Choose {instead} as compute_dtype."


_BEFORE_BF16: Final = frozenset({"Kepler", "Maxwell", "Pascal", "Volta", "Turing"})


class NodeSpec(SourcedSpec):
    """A machine type: what joins its GPUs, and what joins it to the next machine."""

    name: Name
    aliases: tuple[Name, ...] = ()
    provider: Name
    """Cloud or vendor; `generic` for a typical build."""
    gpu: Name
    """Canonical key of its GPUs."""
    gpus_per_node: PositiveInt
    intra_link: str
    """`nvlink`, `nvlink-mesh`, `nvlink-bridge`, `infinity-fabric`, `pcie`, `roce-mesh`, `ici-...` or `none`."""
    nvlink_gen: PositiveInt | None = None
    intra_gb_per_s_per_gpu_bidirectional: PositiveFloat | None = None
    """Link of one GPU to the others in the node, both directions summed. [GB/s]"""
    nvswitch: bool | None = None
    """Whether a switch joins every pair at full speed."""
    inter_network: str | None = None
    inter_gb_per_s_per_node_one_way: PositiveFloat | None = None
    """Network of the whole node, one direction. [GB/s]"""
    vcpus: PositiveInt | None = None
    cpu_ram_gb: PositiveFloat | None = None
    local_nvme_tb: PositiveFloat | None = None
    verified: Literal["yes", "partly", "no"]
    """Whether network and host figures were both seen in a source, one of them, or none (general knowledge)."""

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Spec of a machine type by name, or of a YAML file of your own.

        >>> NodeSpec.load("p5.48xlarge").gpu
        'h100-80gb-sxm'
        """
        from moecost import catalog

        return catalog.load_node(name, cls)

    @property
    def intra_bytes_per_s_per_gpu_one_way(self) -> float | None:
        """Link of one GPU inside the node, one direction; None: no link, or not known. [byte/s]"""
        both = self.intra_gb_per_s_per_gpu_bidirectional
        return None if both is None else both / 2 * GB

    @property
    def inter_bytes_per_s_per_node_one_way(self) -> float | None:
        """Network of the node, one direction; None: not known. [byte/s]"""
        speed = self.inter_gb_per_s_per_node_one_way
        return None if speed is None else speed * GB

    @property
    def inter_bytes_per_s_per_gpu_one_way(self) -> float | None:
        """A GPU's share of the node's network, one direction; None: not known. [byte/s]"""
        speed = self.inter_bytes_per_s_per_node_one_way
        return None if speed is None else speed / self.gpus_per_node


class PriceQuote(BaseModel):
    """A price that a provider asked on a date."""

    model_config = FROZEN

    usd_per_gpu_hour: PositiveFloat
    provider: str = "user"
    region: str = ""
    instance_type: str = ""
    gpu: str = ""
    gpu_count: PositiveInt = 1
    usd_per_hour_instance: PositiveFloat | None = None
    """Filled in from `usd_per_gpu_hour` and `gpu_count` where it is not given."""
    market: Market = "on_demand"
    date: DateText = UNDATED
    source: str = "given by the user"
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_the_other_price(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        each, whole, count = (data.get(k) for k in ("usd_per_gpu_hour", "usd_per_hour_instance", "gpu_count"))
        count = 1 if count is None else count
        if not (isinstance(count, int) and count > 0):
            return data  # validation says what is wrong
        if whole is None and isinstance(each, int | float):
            return {**data, "usd_per_hour_instance": each * count}
        if each is None and isinstance(whole, int | float):
            return {**data, "usd_per_gpu_hour": whole / count}
        return data

    def __str__(self) -> str:
        place = " ".join(p for p in (self.provider, self.region, self.instance_type) if p)
        return f"${self.usd_per_gpu_hour:g} a GPU-hour, {self.market}, {place}, {self.date} ({self.source})"
