"""Which machine this is: its devices, drivers and versions, and the rates that shares are of."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from moecost.errors import InvalidInputError, UnknownNameError, UnsupportedError
from moecost.probe.clock import torch_module
from moecost.probe.laws import MOVES, sent_bytes
from moecost.probe.tasks import COLLECTIVES, task_of
from moecost.probe_record import Peaks, Timing
from moecost.roofline import gemm_flops
from moecost.specs import GPUSpec, NodeSpec
from moecost.storage import COMPUTE_BYTES

PACKAGES: Final = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "triton", "moecost")
DTYPES: Final = ("bf16", "fp16", "fp32")
MEASURED: Final = "measured"
"""Given as GPU: reckon with the highest rates that are measured, not with those of the catalogue."""


@dataclass(frozen=True)
class Machine:
    """The devices of one machine.

    Attributes
    ----------
    device : as PyTorch names it, `cuda` or `cpu`.
    name : in the catalogue, `cpu`, or the device's own name where it shall not be looked up.
    spec : of the catalogue; None: rates are measured.
    node : what joins the devices, where that is known.
    """

    device: str
    name: str
    device_name: str
    num_devices: int
    driver: str
    spec: GPUSpec | None
    node: NodeSpec | None

    @property
    def architecture(self) -> str:
        return self.spec.architecture if self.spec else ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Data types to time products in, the usual one of training first."""
        if self.device == "cpu":
            return ("fp32", "bf16")  # 16 bits are emulated on many
        if self.spec is None:
            return DTYPES
        return tuple(d for d in DTYPES if d in self.spec.peak_tflops_dense)


def this_machine(device: str | None = None, gpu: str | Path | None = None, node: str | None = None) -> Machine:
    """What PyTorch finds here.

    Parameters
    ----------
    device : `cuda` or `cpu`; None: a GPU where there is one.
    gpu : name or spec file of the GPU, where its own name is not in the catalogue; `measured`: none of these.
    node : machine type, whose links join the GPUs; None: the GPU's reference machine.

    Raises
    ------
    UnsupportedError : no PyTorch, or no CUDA device although one is asked for.
    UnknownNameError : the GPU is in no catalogue.
    """
    torch = torch_module()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise InvalidInputError(f"device={device!r:.80} must be 'cuda' or 'cpu'")
    if device == "cpu":
        if gpu not in (None, MEASURED):
            raise InvalidInputError(f"gpu={str(gpu)!r:.80} has no meaning on the CPU; leave it out, or use a GPU")
        if node is not None:
            raise InvalidInputError(f"node={node!r:.80} has no meaning on the CPU; leave it out, or use a GPU")
        return Machine("cpu", "cpu", cpu_name(), 1, "", None, None)
    if not torch.cuda.is_available():
        raise UnsupportedError(f"PyTorch {torch.__version__} finds no CUDA device here; use device 'cpu'")
    own = str(torch.cuda.get_device_name(0))
    spec = None if gpu == MEASURED else _spec(own, gpu)
    known = node or (spec.reference_node if spec else None)
    return Machine(
        "cuda",
        spec.name if spec else own,
        own,
        int(torch.cuda.device_count()),
        _driver(),
        spec,
        NodeSpec.load(known) if known else None,
    )


def _spec(own: str, gpu: str | Path | None) -> GPUSpec:
    if gpu is not None:
        return GPUSpec.load(gpu)
    try:
        return GPUSpec.load(own)
    except UnknownNameError as error:
        raise InvalidInputError(
            f"this machine's GPU is not in the catalogue: {error} Give --gpu with its name there or with a spec file "
            f"of yours, or --gpu {MEASURED} for shares of the rates that are measured"
        ) from None


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine() or "unknown"


def _driver() -> str:
    """The driver's version; empty where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return lines[0] if lines else ""
    return ""


def versions() -> dict[str, str]:
    """Of Python, the packages that matter, and CUDA."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            out[name] = version(name)
    torch = sys.modules.get("torch")
    cuda = torch.version.cuda if torch else None
    return out | ({"cuda": str(cuda)} if cuda else {})


# ------------------------------------------------------------------------------------------------------- the peaks
def peaks_of(machine: Machine, timings: Iterable[Timing]) -> Peaks:
    """Rates that shares are of: the catalogue's, or the highest that were measured."""
    timings = tuple(timings)
    if machine.spec is None:
        return measured_peaks(timings)
    spec, node = machine.spec, machine.node
    link = node.intra_bytes_per_s_per_gpu_one_way if node else None
    pcie = link is None or (node is not None and node.intra_link in ("pcie", "none"))
    return Peaks(
        flops_per_s={d: spec.peak_flops_per_s(d) for d in machine.dtypes},
        bytes_per_s=spec.bandwidth_bytes_per_s,
        num_sms=spec.num_sms,
        link_bytes_per_s=spec.pcie_bytes_per_s_one_way if pcie else link,
        link_is_pcie=pcie,
    )


def measured_peaks(timings: Iterable[Timing]) -> Peaks:
    """The highest rates of products, by data type, of copies and additions, and of exchanges."""
    flops: dict[str, float] = {}
    moved = link = 0.0
    for t in timings:
        task = task_of(t)
        if t.kind == "gemm":
            sizes = {name: float(value) for name, value in task.sizes}
            flops[t.dtype] = max(flops.get(t.dtype, 0.0), float(gemm_flops(**sizes)) / t.seconds)
        elif t.kind in MOVES:
            each = COMPUTE_BYTES[t.dtype] * MOVES[t.kind]
            moved = max(moved, task["elements"] * each / t.seconds)
        elif t.kind in COLLECTIVES:
            link = max(link, float(sent_bytes(task)) / t.seconds)
    return Peaks(flops_per_s=flops, bytes_per_s=moved or UNKNOWN_BYTES_PER_S, link_bytes_per_s=link or None)


UNKNOWN_BYTES_PER_S: Final = 1.0
"""Where a probe was ended before it had copied anything: then nothing that is a share of it was timed either."""
