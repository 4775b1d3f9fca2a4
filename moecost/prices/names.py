"""Which GPU of the catalogue an accelerator's name in a price table means.

The names are ambiguous: `A100` is the 40 GB part at AWS and the 80 GB part at Cudo, `H100` is PCIe at RunPod and SXM
elsewhere. So name, memory, instance type and provider are used together, but never a part of a name: `L4` is in `L40S`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from moecost import catalog
from moecost.errors import close_matches
from moecost.prices.rows import RowError
from moecost.specs import GPUSpec

MEMORY_TOLERANCE: Final = 0.15
"""Label, driver's total and GB or GiB of one part differ by a tenth (B300: 262 to 288); 80 and 94 GB by 17 %. [-]"""
_KEY = re.compile(r"(?P<chip>.+?)-\d+gb(-(?P<form>\w+))?\Z")
_FORM = re.compile(r"sxm|pci|nvl(?!ink)")  # two cards with an NVLink bridge are PCIe cards still
_MEMORY_IN_NAME = re.compile(r"(?<!\d)(\d{2,3})gb?(?![a-z])")
_VAST_INSTANCE = re.compile(r"\d+x-(.+)-\d+-\d+\Z")
_SLICE = re.compile(r"(?:tpu-)?(v\d[a-z]*)-(\d+)\Z")
_DEVICE = re.compile(r"(nvidia|amd|tesla) ", re.IGNORECASE)
_AZURE_CARDS = re.compile(r"(standard_)?nc\d+ad", re.IGNORECASE)
_NAMES_MACHINES: Final = frozenset({"aws", "azure", "gcp", "oci"})
"""Providers whose instance types are no GPU's name."""

COUNTED_IN_CORES: Final = frozenset({"v2", "v3", "v4", "v5p"})
"""TPU slices named after their cores, two a chip; later ones (v5e, v6e) are named after chips."""
PCIE_WHERE_UNSAID: Final[Mapping[str, frozenset[str]]] = {
    "runpod": frozenset({"a100", "h100"}),
    "hyperstack": frozenset({"a100", "h100"}),
    "seeweb": frozenset({"a100"}),
    "crusoe": frozenset({"a100"}),
    "cudo": frozenset({"v100"}),
    "scaleway": frozenset({"h100"}),
    "paperspace": frozenset({"a100", "v100"}),
}
"""Chips that a provider has as PCIe cards where it says nothing, as in the catalogue; elsewhere SXM is assumed."""
MEMORY_WHERE_UNSAID: Final[Mapping[tuple[str, str], float]] = {
    ("cudo", "a100"): 80.0, ("seeweb", "a100"): 80.0, ("hyperstack", "a100"): 80.0,
}  # fmt: skip
"""GB of a chip that comes in two sizes, where a provider names only the chip."""


class Match(NamedTuple):
    """A GPU of the catalogue, and a sentence on what was assumed of it."""

    gpu: str
    note: str = ""


@lru_cache(maxsize=10_000)
def find_gpu(name: str, memory_gb: float | None = None, instance_type: str = "", provider: str = "") -> Match:
    """The GPU that a row of a price table means.

    Parameters
    ----------
    name : accelerator name (`A100-80GB`, `H100`, `RTX6000-Ada`).
    memory_gb : memory of one GPU as the table gives it, GB or GiB; None: it gives none. [GB]

    Raises
    ------
    RowError : the catalogue has no such GPU.
    """
    index = catalog.gpu_index()
    if name in index.names:
        return Match(name)
    exact = _exact_name(name, instance_type, provider)
    base = index.get(exact)
    if base is None:
        near = close_matches(exact, index.names)
        raise RowError("unknown GPU", f"{exact!r:.60}" + (f"; near are {', '.join(near)}" if near else ""))
    chip = _chip(base)
    of_instance = _of_instance(instance_type, provider)
    if of_instance and _chip(of_instance) == chip:
        return Match(of_instance)
    said = _MEMORY_IN_NAME.search(exact.lower().replace(" ", ""))
    memory = float(said[1]) if said else memory_gb or MEMORY_WHERE_UNSAID.get((provider, chip))
    fitting = [gpu for gpu in index.names if _chip(gpu) == chip and (memory is None or _holds(gpu, memory))]
    if not fitting:
        raise RowError("unknown GPU", f"{exact:.60} with {memory:g} GB: the catalogue's {base} has another memory")
    return _by_form(base, fitting, f"{exact} {instance_type}".lower(), provider)


def slice_chips(name: str) -> tuple[str, int] | None:
    """(version, chips) of a TPU slice; None for all else.

    >>> slice_chips("tpu-v5p-8"), slice_chips("tpu-v5litepod-256"), slice_chips("H100")
    (('v5p', 4), ('v5litepod', 256), None)
    """
    found = _SLICE.match(name)
    if found is None:
        return None
    version, size = found[1], int(found[2])
    return version, size // 2 if version in COUNTED_IN_CORES else size


def _exact_name(name: str, instance_type: str, provider: str) -> str:
    """The most exact name of a row: Vast's instance types keep what its accelerator names drop."""
    if provider == "vast" and (found := _VAST_INSTANCE.match(instance_type)):
        own = found[1]
        known = catalog.gpu_index().get(own)
        return own if known else re.sub(r"_(SXM\d?|PCIE)\Z", "", own)
    return name


def _of_instance(instance_type: str, provider: str) -> str | None:
    """GPU of an instance type that is a machine's name or a device's own, as RunPod has them at gpuhunt."""
    if _DEVICE.match(instance_type):
        return catalog.gpu_index().get(instance_type)
    if provider not in _NAMES_MACHINES or not instance_type:
        return None
    name = re.sub(r"(?i)\Astandard_", "", instance_type)
    node = catalog.node_for_instance(name)
    return node.gpu if node else catalog.gpu_index().get(name)


def _by_form(base: str, fitting: list[str], text: str, provider: str) -> Match:
    """Of parts with one chip and memory, that of the form factor which the text or the provider says."""
    forms = set(_FORM.findall(text))
    assumed = not forms and len(fitting) > 1
    if not forms and provider == "azure" and _AZURE_CARDS.search(text):
        forms, assumed = {"pci", "nvl"}, False
    elif not forms:
        forms = {"pci"} if _chip(base) in PCIE_WHERE_UNSAID.get(provider, ()) else {"sxm"}
    rest = [gpu for gpu in fitting if _form(gpu)[:3] in forms] or fitting
    gpu = base if base in rest else rest[0]
    return Match(gpu, "form factor assumed" if assumed and _form(gpu) else "")


def _chip(gpu: str) -> str:
    found = _KEY.match(gpu)
    return found["chip"] if found else gpu


def _form(gpu: str) -> str:
    found = _KEY.match(gpu)
    return (found["form"] or "") if found else ""


def _holds(gpu: str, memory: float) -> bool:
    label = GPUSpec.load(gpu).memory_label_gb
    return abs(memory / label - 1) <= MEMORY_TOLERANCE
