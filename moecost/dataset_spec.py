"""`DatasetSpec`: how many queries a data set has and how long they are; built in, or from a file of token counts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from moecost.catalog import Index, data_folder, explain, load_spec_file, read_yaml
from moecost.errors import InvalidInputError
from moecost.lengths import MAX_LENGTH, LengthDistribution
from moecost.sources import FROZEN, SourcedSpec
from moecost.units import MEGA

LENGTH_FIELDS: Final = ("length", "num_tokens", "seq_len_tokens", "tokens", "input_ids")
"""Names under which a query's length is looked for, in this order. The last two may be lists of tokens."""
COUNT_FIELDS: Final = ("count", "query_count", "num_queries")
"""Names under which a histogram's number of queries is looked for."""
SUFFIXES: Final = (".jsonl", ".csv", ".txt", ".yaml", ".yml")
MAX_FILE_BYTES: Final = 200 * MEGA
"""Larger files are refused: token counts of ten million queries take less. [byte]"""
MAX_QUERIES: Final = 10**12

_Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
_Count = Annotated[float, Field(ge=0, le=MAX_QUERIES)]


class LengthHistogram(BaseModel):
    """Queries by length.

    Attributes
    ----------
    lengths : lengths that occur. [token]
    counts : queries of each. [query]
    """

    model_config = FROZEN
    lengths: tuple[_Length, ...]
    counts: tuple[_Count, ...]

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.lengths) != len(self.counts):
            raise ValueError(f"{len(self.lengths)} lengths and {len(self.counts)} counts; give one count each.")
        if sum(self.counts) < 1:
            raise ValueError("the counts sum to less than one query.")
        return self


class DatasetSpec(SourcedSpec):
    """A data set, as far as its cost depends on it.

    Attributes
    ----------
    name, aliases, description : what it is called, and is.
    num_queries : training queries of an epoch; where not given, the histogram's sum. [query]
    histogram : queries by length.
    length_ratios : tokens of a query for a `model_type`'s tokenizer, over those of the histogram; 1 where not listed.

    >>> DatasetSpec.load("math-14k").num_queries
    13921
    """

    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    description: str = ""
    num_queries: int = Field(ge=1, le=MAX_QUERIES)
    histogram: LengthHistogram
    length_ratios: dict[str, Annotated[float, Field(gt=0.1, lt=10)]] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _count_queries(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("num_queries") is None:
            return {**data, "num_queries": _sum_of_counts(data.get("histogram"))}
        return data

    @classmethod
    def load(cls, name_or_path: str | Path) -> DatasetSpec:
        """A built-in data set by name or alias, or a file: a spec (YAML), lengths (JSONL, TXT, CSV), a histogram (CSV).

        JSONL and TXT hold one whole number a line, JSONL also objects with one of `LENGTH_FIELDS`. A CSV holds one
        column, or one with such a name; with a column of `COUNT_FIELDS` beside it, a histogram.
        """
        if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip():
            raise InvalidInputError(
                f"dataset is {name_or_path!r}; give a name ({', '.join(dataset_names())}) or a path."
            )
        found = _index().get(name_or_path) if isinstance(name_or_path, str) else None
        if found is not None:
            return _built_in(found)
        path = Path(name_or_path).expanduser()
        if path.suffix.lower() not in SUFFIXES:
            if len(str(path)) < 1000 and path.exists():
                raise InvalidInputError(f"{path}: cannot tell what is in it; name it {', '.join(SUFFIXES)}.")
            hint = f"Known: {', '.join(dataset_names())}; or give the path of a file ({', '.join(SUFFIXES)})."
            return _built_in(_index().find(str(name_or_path), hint))
        _check_file(path)
        if path.suffix.lower() in (".yaml", ".yml"):
            return _from_yaml(path)
        lengths, counts = _read_csv(path) if path.suffix.lower() == ".csv" else (_read_lines(path), None)
        return cls._from_values(lengths, counts, name=path.stem, notes=(f"Lengths read from {path.name}.",))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], name: str = "lengths") -> DatasetSpec:
        """From one length a query. [token]"""
        return cls._from_values(lengths, None, name=name)

    @classmethod
    def fixed(cls, length: int, num_queries: int = 1) -> DatasetSpec:
        """`num_queries` queries, all of `length` tokens.

        >>> DatasetSpec.fixed(512, 1000).longest
        512
        """
        return cls._from_values([length], [num_queries], name=f"fixed-{length}")

    @classmethod
    def _from_values(
        cls, lengths: Sequence[int], counts: Sequence[float] | None, *, name: str, notes: tuple[str, ...] = ()
    ) -> DatasetSpec:
        made = (
            LengthDistribution.from_lengths(lengths)
            if counts is None
            else LengthDistribution.from_histogram(lengths, counts)
        )
        histogram = LengthHistogram(lengths=tuple(made.lengths.tolist()), counts=tuple(made.counts.tolist()))
        return cls(name=name, num_queries=round(made.num_queries), histogram=histogram, notes=notes)

    def lengths(self) -> LengthDistribution:
        """The distribution of its query lengths, its counts scaled to `num_queries`; made once. [token]"""
        return _distribution(self.histogram, self.num_queries, 1.0)

    def lengths_for(self, model_type: str | None) -> tuple[LengthDistribution, str | None]:
        """(lengths in the tokens of a model type's tokenizer, what was assumed for it)."""
        ratio = self.length_ratios.get(model_type or "", 1.0)
        if ratio == 1.0:
            return self.lengths(), None
        origin = self.provenance.get(f"length_ratios.{model_type}")
        why = f" ({origin.doubt})" if origin and origin.doubt else ""
        note = f"lengths of {self.name} are {ratio:g} times its histogram's for the tokenizer of {model_type}{why}"
        return _distribution(self.histogram, self.num_queries, ratio), note

    @property
    def longest(self) -> int:
        """Longest query. [token]"""
        return self.lengths().longest

    @property
    def mean_length(self) -> float:
        """Mean length of a query. [token]"""
        return self.lengths().mean


def dataset_names() -> tuple[str, ...]:
    """Names of the built-in data sets.

    >>> dataset_names()
    ('commonsense-15k', 'math-14k')
    """
    return _index().names


@lru_cache(maxsize=64)
def _distribution(histogram: LengthHistogram, num_queries: int, ratio: float) -> LengthDistribution:
    total = sum(histogram.counts)
    scale = 1.0 if round(total) == num_queries else num_queries / total
    lengths = [max(1, round(length * ratio)) for length in histogram.lengths]
    return LengthDistribution.from_histogram(lengths, [count * scale for count in histogram.counts])


def _sum_of_counts(histogram: object) -> int:
    """Queries of a histogram not yet checked; 1 where it is wrong, so that its own check names what is."""
    counts = histogram.get("counts") if isinstance(histogram, Mapping) else getattr(histogram, "counts", None)
    if not isinstance(counts, Sequence) or not all(
        isinstance(c, int | float) and 0 <= c <= MAX_QUERIES for c in counts
    ):
        return 1
    return max(1, round(sum(counts)))


@cache
def _index() -> Index:
    return Index(data_folder("data") / "datasets", "data set")


@cache
def _built_in(name: str) -> DatasetSpec:
    return load_spec_file(_index().path(name), DatasetSpec)


def _from_yaml(path: Path) -> DatasetSpec:
    """A data set that someone wrote down: as those that ship, but its numbers need no source."""
    try:
        return DatasetSpec.model_validate(read_yaml(path))
    except ValidationError as error:
        what = explain(error, DatasetSpec)
        raise InvalidInputError(
            f"{path}: {what[:300]}{'...' * (len(what) > 300)} (a data set file has name and histogram: "
            "{lengths: [...], counts: [...]})"
        ) from None


# --- files of token counts


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidInputError(f"{path}: no such file; check the path, or use one of {', '.join(dataset_names())}.")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InvalidInputError(
            f"{path}: {size / MEGA:,.0f} MB, more than the {MAX_FILE_BYTES / MEGA:,.0f} MB read; "
            "give a histogram (columns length,count) instead."
        )


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8.") from None


def _read_lines(path: Path) -> list[int]:
    """One length a line of a JSONL or TXT file."""
    lengths = []
    for number, line in enumerate(_text_lines(path), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            raise InvalidInputError(f"{where}: blank; give one token count a line, and remove blank lines.")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidInputError(
                f"{where}: {_shown(line)} is not JSON; give a whole number, or an object with {_any_of(LENGTH_FIELDS)}."
            ) from None
        lengths.append(_length_of(value, where))
    if not lengths:
        raise InvalidInputError(f"{path}: empty; give one token count a line.")
    return lengths


def _length_of(value: object, where: str) -> int:
    if isinstance(value, dict):
        name = next((field for field in LENGTH_FIELDS if field in value), None)
        if name is None:
            has = _shown(", ".join(value)) if value else "nothing"
            raise InvalidInputError(f"{where}: an object with {has}; it needs one of {_any_of(LENGTH_FIELDS)}.")
        value, where = value[name], f"{where}, {name}"
        if isinstance(value, list) and name in ("tokens", "input_ids"):
            value = len(value)
    return _whole(value, where, least=1, most=MAX_LENGTH, unit="tokens")


def _whole(value: object, where: str, *, least: int, most: int, unit: str) -> int:
    """A whole number within limits; 12.0 passes, 12.5, '12', true and null do not."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or value != int(value)
    ):
        raise InvalidInputError(
            f"{where}: {_shown(value)} is not a whole number of {unit} from {least} to {most:,}; correct or remove it."
        )
    return int(value)


def _read_csv(path: Path) -> tuple[list[int], list[float] | None]:
    """Lengths, and their counts if the CSV is a histogram."""
    rows = _csv_rows(path)
    first = next(rows, None)
    if first is None:
        raise InvalidInputError(f"{path}: empty; give a column of token counts, or the columns length,count.")
    number, cells = first
    body: Iterable[tuple[int, list[str]]] = rows
    names = [cell.strip().lower() for cell in cells]
    if any(_number(cell) is not None for cell in cells) or not any(names):
        if len(cells) > 1:
            raise InvalidInputError(
                f"{path}, line {number}: {len(cells)} columns and no header; name the length column "
                f"{_any_of(LENGTH_FIELDS[:-1])}, and a histogram's number of queries {_any_of(COUNT_FIELDS)}."
            )
        names, body = [LENGTH_FIELDS[0]], _chain_first(first, rows)
    length_at = 0 if len(names) == 1 else _column(names, LENGTH_FIELDS[:-1])
    count_at = _column(names, COUNT_FIELDS)
    if length_at is None:
        raise InvalidInputError(
            f"{path}, line {number}: columns {_shown(','.join(names))}, none of them {_any_of(LENGTH_FIELDS[:-1])}; "
            "rename the column of token counts."
        )
    lengths, counts = [], []
    for line, row in body:
        if len(row) != len(names):
            what = "blank" if not row else f"{len(row)} cells, the header has {len(names)}"
            raise InvalidInputError(f"{path}, line {line}: {what}; give each query its line and remove blank ones.")
        where = f"{path}, line {line}"
        lengths.append(_cell(row[length_at], where, least=1, most=MAX_LENGTH, unit="tokens"))
        if count_at is not None and count_at != length_at:
            counts.append(float(_cell(row[count_at], where, least=0, most=MAX_QUERIES, unit="queries")))
    if not lengths:
        raise InvalidInputError(f"{path}: a header and nothing beneath it; give one token count a line.")
    if counts and not any(counts):
        raise InvalidInputError(f"{path}: all counts are 0; a data set needs at least one query.")
    return lengths, counts or None


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_text_lines(path))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInputError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from None


def _chain_first(
    first: tuple[int, list[str]], rest: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rest


def _column(names: list[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _cell(text: str, where: str, *, least: int, most: int, unit: str) -> int:
    value = _number(text)
    return _whole(text if value is None else value, where, least=least, most=most, unit=unit)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: object) -> str:
    text = value.strip() if isinstance(value, str) else value
    return f"{text!r:.60}" if text != "" else "a blank"


def _any_of(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
