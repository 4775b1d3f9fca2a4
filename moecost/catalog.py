"""The only reader of spec files: finds, reads, checks and caches them, and knows names and aliases.

Nothing is read on import, and a look-up reads one file (and an index of the aliases where the name is not a file name).
Files may come from strangers: the reader takes plain YAML data only, of bounded size and depth.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from moecost.errors import InvalidInputError, NoPriceError, UnknownNameError
from moecost.sources import UNDATED
from moecost.spec_files import MAX_FILE_BYTES as MAX_FILE_BYTES
from moecost.spec_files import explain as explain
from moecost.spec_files import load_spec_file as load_spec_file
from moecost.spec_files import looks_like_path as looks_like_path
from moecost.spec_files import parse_yaml as parse_yaml
from moecost.spec_files import read_text as read_text
from moecost.spec_files import read_yaml as read_yaml
from moecost.spec_files import validate as validate
from moecost.spec_files import write_text as write_text
from moecost.spec_files import yaml_text as yaml_text
from moecost.specs import GPUSpec, NodeSpec, PriceQuote

INDEX_FILE: Final = "index.yaml"
PRICES_FILE: Final = "prices.csv"
MARKETS: Final = ("on_demand", "spot", "reserved")

# ---------------------------------------------------------------------------------------------------------- files


@cache
def data_folder(name: str) -> Path:
    """Folder with the data files `gpu_specs`, `model_specs` or `data`.

    Inside the package where moecost is installed, beside it in a checkout and an editable install.
    """
    package = Path(__file__).parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InvalidInputError(f"moecost was installed without its data folder {name!r} (looked beside {package})")


# ---------------------------------------------------------------------------------------------------------- names

VENDOR_WORDS: Final = frozenset({"nvidia", "amd", "intel", "google", "tesla", "geforce", "instinct"})


def normalise(name: str, ignored_words: frozenset[str] = frozenset()) -> str:
    """Name without case, spaces, punctuation and ignored words. A break between two digits stays, as does a point.

    >>> normalise("NVIDIA A100-SXM4-80GB", VENDOR_WORDS), normalise("Qwen2-57B"), normalise("Qwen2.5-7B")
    ('a100sxm4-80gb', 'qwen2-57b', 'qwen2.5-7b')
    """
    out = ""
    for word in re.split(r"[^a-z0-9.]+", name.lower()):
        if word and word not in ignored_words:
            out += "-" + word if out[-1:].isdigit() and word[0].isdigit() else word
    return out


class Index:
    """Names and aliases of the spec files of one folder.

    The name of a spec is its file name. Its other names are the entries of `name_fields` in the file, which
    `index.yaml` repeats so that a look-up need not read every file (`write_index` makes it; files it lacks are read).
    Names match exactly after `normalise`, never by a part.
    """

    name_fields: Final = ("marketing_name", "aliases", "hub_ids")

    def __init__(self, folder: str | Path, kind: str, ignored_words: frozenset[str] = frozenset()) -> None:
        self.folder, self.kind, self.ignored_words = Path(folder), kind, ignored_words
        self._names: tuple[str, ...] | None = None
        self._table: dict[str, str] | None = None
        self._other_names: dict[str, tuple[str, ...]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, sorted."""
        if self._names is None:
            try:
                files = os.listdir(self.folder)
            except OSError as error:
                raise InvalidInputError(f"{self.folder}: cannot be read: {error.strerror}") from error
            self._names = tuple(sorted(f[: -len(".yaml")] for f in files if f.endswith(".yaml") and f != INDEX_FILE))
        return self._names

    def other_names(self) -> dict[str, tuple[str, ...]]:
        """Canonical name to the aliases of the file, from the index or else the file itself."""
        if self._other_names is None:
            indexed = read_yaml(self.folder / INDEX_FILE) if (self.folder / INDEX_FILE).is_file() else {}
            self._other_names = {
                name: tuple(str(n) for n in indexed[name] or ()) if name in indexed else self.names_in_file(name)
                for name in self.names
            }
        return self._other_names

    def names_in_file(self, name: str) -> tuple[str, ...]:
        """The other names that a spec file gives, straight from the file."""
        data = read_yaml(self.path(name))
        found: list[str] = []
        for field in self.name_fields:
            value = data.get(field)
            value = value.get("value") if isinstance(value, dict) else value
            found += [value] if isinstance(value, str) else [str(v) for v in value] if isinstance(value, list) else []
        return tuple(dict.fromkeys(found))

    def get(self, name: str) -> str | None:
        """Canonical name for any name or alias; None where no file has it."""
        if name in self.names:  # the fast path: no index needed
            return name
        return self._by_key().get(normalise(name, self.ignored_words))

    def find(self, name: str, hint: str = "", also: Iterable[str] = ()) -> str:
        """Canonical name for any name or alias; `UnknownNameError` with the nearest where no file has it."""
        found = self.get(name)
        if found is None:
            known = (*self.names, *(alias for names in self.other_names().values() for alias in names), *also)
            raise UnknownNameError(self.kind, name, known, hint)
        return found

    def path(self, name: str) -> Path:
        """File of a canonical name."""
        return self.folder / f"{name}.yaml"

    def _by_key(self) -> dict[str, str]:
        if self._table is None:
            table: dict[str, str] = {}
            for name, others in self.other_names().items():
                for alias in (name, *others):
                    owner = table.setdefault(normalise(alias, self.ignored_words), name)
                    if owner != name:
                        files = f"{self.path(owner)} and {self.path(name)}"
                        raise InvalidInputError(f"the {self.kind} name {alias!r} is claimed by two files: {files}")
            self._table = table
        return self._table

    def index_text(self) -> str:
        """What `index.yaml` should hold, from the files."""
        width = max((len(name) for name in self.names), default=0) + 1
        lines = [
            "# Other names of the spec files of this folder. Made by moecost.catalog.Index.write_index(); do not edit."
        ]
        for name in self.names:
            others = ", ".join(
                '"' + n.replace("\\", "\\\\").replace('"', '\\"') + '"' for n in self.names_in_file(name)
            )
            lines.append(f"{name + ':':<{width}} [{others}]")
        return "\n".join(lines) + "\n"

    def write_index(self) -> None:
        """Bring `index.yaml` up to date with the files."""
        (self.folder / INDEX_FILE).write_text(self.index_text(), encoding="utf-8")


# --------------------------------------------------------------------------------------------- GPUs, nodes, models


@cache
def gpu_index() -> Index:
    """Names of the GPUs."""
    return Index(data_folder("gpu_specs"), "GPU", VENDOR_WORDS)


@cache
def node_index() -> Index:
    """Names of the machine types; Azure's `Standard_` prefix may be left out."""
    return Index(data_folder("gpu_specs") / "nodes", "node", frozenset({"standard"}))


@cache
def model_index() -> Index:
    """Names of the models, with Hugging Face Hub ids."""
    return Index(data_folder("model_specs"), "model")


def gpus() -> tuple[str, ...]:
    """Canonical names of the GPUs of the catalogue."""
    return gpu_index().names


def nodes() -> tuple[str, ...]:
    """Names of the machine types of the catalogue."""
    return node_index().names


def models() -> tuple[str, ...]:
    """Canonical names of the models of the catalogue."""
    return model_index().names


class Instance(NamedTuple):
    """What a cloud instance type holds."""

    gpu: str
    gpus_per_node: int
    node: NodeSpec | None
    """None where only its price is known."""


def instance(name: str) -> Instance | None:
    """GPUs of a cloud instance type or machine type; None where the name is not one (a GPU's own name is not)."""
    node = node_for_instance(name)
    if node is not None:
        return Instance(node.gpu, node.gpus_per_node, node)
    found = _instances_with_a_price().get(normalise(name))
    return Instance(*found, None) if found else None


def node_for_instance(name: str) -> NodeSpec | None:
    """Machine type of that name (`p5.48xlarge`); None where there is none, or where the name is that of a GPU."""
    if looks_like_path(name) or name in gpus():
        return None
    found = node_index().get(name)
    return None if found is None else NodeSpec.load(found)


def gpu_name(name: str) -> str:
    """Canonical name of a GPU from any name, alias, device name or cloud instance type."""
    found = gpu_index().get(name)
    if found is None:
        machine = instance(name)
        found = machine.gpu if machine else gpu_index().find(name, "moecost.gpus() lists all.", also=nodes())
    return found


GPUType = TypeVar("GPUType", bound=GPUSpec)
NodeType = TypeVar("NodeType", bound=NodeSpec)


def load_gpu(name: str | Path, cls: type[GPUType]) -> GPUType:
    """See `GPUSpec.load`."""
    return load_spec_file(name, cls) if looks_like_path(name) else _load(gpu_index().path(gpu_name(str(name))), cls)


def load_node(name: str | Path, cls: type[NodeType]) -> NodeType:
    """See `NodeSpec.load`."""
    return (
        load_spec_file(name, cls)
        if looks_like_path(name)
        else _load(node_index().path(node_index().find(str(name), "moecost.nodes() lists all.")), cls)
    )


@cache
def _load(path: Path, cls: type[Any]) -> Any:
    return load_spec_file(path, cls)


# --------------------------------------------------------------------------------------------------------- prices


def quotes(gpu: str | GPUSpec, *, market: str | None = None, provider: str | None = None) -> tuple[PriceQuote, ...]:
    """Price quotes of the catalogue for a GPU, cheapest GPU-hour first; empty where there are none.

    Parameters
    ----------
    gpu : any name of a GPU, or its spec.
    market : `on_demand`, `spot` or `reserved`; None = all.
    provider : a provider's name, in any case; None = all.

    >>> [q.usd_per_gpu_hour for q in quotes("a40", provider="cudo") if q.date == "2024-08"]
    [0.79]
    """
    return pick(_quotes(_name(gpu)), market=market, provider=provider)


def all_quotes() -> tuple[PriceQuote, ...]:
    """Every price quote of the catalogue, GPU by GPU, cheapest GPU-hour first."""
    return tuple(q for gpu in gpus() for q in _quotes(gpu))


def median_quote(gpu: str | GPUSpec, market: str = "on_demand", provider: str | None = None) -> PriceQuote:
    """The quote in the middle by price of a GPU-hour (the lower of two), so that the answer is a real quote.

    Raises
    ------
    NoPriceError : no quote matches; the message lists the quotes there are.
    """
    return middle(quotes(gpu, market=market, provider=provider) or refuse(gpu, market, provider, quotes(gpu)))


def pick(
    found: Iterable[PriceQuote], *, market: str | None = None, provider: str | None = None
) -> tuple[PriceQuote, ...]:
    """Of some quotes those of a market and a provider, in the order they come; None = all."""
    if market is not None and market not in MARKETS:
        raise InvalidInputError(f"market={market!r} must be one of {', '.join(MARKETS)}")
    return tuple(
        q
        for q in found
        if (market is None or q.market == market) and (provider is None or normalise(q.provider) == normalise(provider))
    )


def middle(found: Sequence[PriceQuote]) -> PriceQuote:
    """The quote in the middle of those given cheapest first, the lower of two."""
    return found[(len(found) - 1) // 2]


def refuse(
    gpu: str | GPUSpec,
    market: str | None,
    provider: str | None,
    there: Iterable[PriceQuote],
    whose: str = "the catalogue",
) -> NoReturn:
    """Raises `NoPriceError`: no quote matches; `there` are the quotes of that GPU, cheapest first."""
    groups: dict[tuple[str, str], list[PriceQuote]] = {}
    for q in there:
        groups.setdefault((q.provider, q.market), []).append(q)
    named = [
        f"{seller} {kind} ${found[0].usd_per_gpu_hour:g}"
        + (f"-{found[-1].usd_per_gpu_hour:g} ({len(found)} quotes)" if len(found) > 1 else f" ({found[0].date})")
        for (seller, kind), found in sorted(groups.items())
    ]
    kind = "" if market is None else f" {market}"
    wish = f"no{kind} price of {_name(gpu)}" + (f" from {provider!r:.80}" if provider is not None else "")
    known = f"quotes there are, per GPU-hour: {', '.join(named)}" if named else f"{whose} has no quote of it at all"
    raise NoPriceError(
        f"{wish}; {known}. Pass price=<$/GPU-hour>" + (" or another market or provider." if named else ".")
    )


def _name(gpu: str | GPUSpec) -> str:
    return gpu.name if isinstance(gpu, GPUSpec) else gpu_name(gpu)


@cache
def _quotes(gpu: str) -> tuple[PriceQuote, ...]:
    rows = _price_rows().get(gpu, ())
    found = [_quote(row, f"{data_folder('gpu_specs') / PRICES_FILE}, line {line}") for line, row in rows]
    return tuple(sorted(found, key=lambda q: (q.usd_per_gpu_hour, q.provider, q.region, q.instance_type, q.date)))


@cache
def _price_rows() -> dict[str, list[tuple[int, dict[str, str]]]]:
    """Rows of the price file by GPU, as text: only those asked for are validated."""
    path = data_folder("gpu_specs") / PRICES_FILE
    by_gpu: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for line, row in _csv_rows(read_text(path), str(path)):
        by_gpu.setdefault(row.get("gpu", ""), []).append((line, row))
    return by_gpu


_CLOUDS: Final = frozenset({"aws", "azure", "gcp", "oci"})
"""Providers who name machines; elsewhere an "instance type" such as `H100` may be just the GPU."""


@cache
def _instances_with_a_price() -> dict[str, tuple[str, int]]:
    """Instance types of the price file that stand for one GPU type and count, and are not a GPU's own name."""
    seen: dict[str, set[tuple[str, int]]] = {}
    for gpu, rows in _price_rows().items():
        for _, row in rows:
            if row["provider"] in _CLOUDS or gpu_index().get(row["instance_type"]) is None:
                seen.setdefault(normalise(row["instance_type"]), set()).add((gpu, int(row["gpu_count"])))
    return {name: next(iter(found)) for name, found in seen.items() if len(found) == 1 and name}


def _csv_rows(text: str, where: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and cells by column of each row; lines that begin with # are comments."""
    header: Sequence[str] | None = None
    reader = csv.reader(text.splitlines())
    try:
        for cells in reader:
            if not cells or cells[0].startswith("#"):
                continue
            if header is None:
                header = cells
                if len(set(header)) < len(header):
                    raise InvalidInputError(f"{where}: a column occurs twice: {', '.join(header)}")
            elif len(cells) != len(header):
                raise InvalidInputError(f"{where}, line {reader.line_num}: {len(cells)} cells, not {len(header)}")
            else:
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InvalidInputError(f"{where}, line {reader.line_num}: is not valid CSV: {error}") from error


_QUOTE_NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {
    "gpu_count": int,
    "usd_per_hour_instance": float,
    "usd_per_gpu_hour": float,
}


def _quote(row: Mapping[str, str], where: str) -> PriceQuote:
    data: dict[str, Any] = {k: v for k, v in row.items() if v != ""}
    for column, kind in _QUOTE_NUMBERS.items():
        if column in data:
            try:
                data[column] = kind(data[column])
            except ValueError as error:
                raise InvalidInputError(f"{where}: {column} must be a number (it is {data[column]!r:.60})") from error
    data.setdefault("date", UNDATED)
    return validate(data, PriceQuote, where)
