"""The axes of a sweep: read and checked one by one, before any row is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from moecost.architecture import ModelSpec
from moecost.calibration import Calibration
from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError, UnknownNameError, close_matches
from moecost.job import Job
from moecost.software import SoftwareProfile
from moecost.spec_files import explain
from moecost.specs import GPUSpec, NodeSpec

Axes: TypeAlias = dict[str, tuple[Any, ...]]
"""Values by field of `Job`, the last axis fastest."""

PLURAL: Final = {"models": "model", "gpus": "gpu"}
MOST_VALUES: Final = 1_000_000
ADAPTER_FIELDS: Final = ("lora_rank", "lora_targets", "density")


def withheld(method: str) -> frozenset[str]:
    """Fields of adapters that rows of a method do not get: it has no use for them, and would refuse them.

    >>> sorted(withheld("lora")), sorted(withheld("sparse"))
    (['density'], ['lora_rank'])
    """
    used = {"full": (), "sparse": ("lora_targets", "density")}.get(method, ("lora_rank", "lora_targets"))
    return frozenset(ADAPTER_FIELDS) - frozenset(used)


def read_axes(given: Mapping[str, Any]) -> Axes:
    """Axes by field name, in the order given; each value as `Job` holds it.

    Raises
    ------
    InvalidInputError : a name that is no axis, an axis without values, a value that no job can have.
    """
    for plural, field in PLURAL.items():
        if plural not in given:
            hint = f"; write {plural}= in place of {field}=" if field in given else f": {plural}=['...'] names some"
            raise InvalidInputError(f"{plural} is missing{hint}")
    axes = {PLURAL.get(name, name): _axis(name, value) for name, value in given.items()}
    if all(value is None for name in ("dataset", "sequence_length") for value in axes.get(name, ())):
        raise InvalidInputError("sequence_length is missing: give it, or a dataset to take it from")
    if "method" not in axes:
        for name in ADAPTER_FIELDS:  # the job's own message: a method is missing
            if name in axes:
                Job(model="any", gpu="any", sequence_length=1, **{name: axes[name][0]})
    return axes


def _axis(name: str, given: Any) -> tuple[Any, ...]:
    field = PLURAL.get(name, name)
    if field not in Job.model_fields or name in PLURAL.values():
        raise InvalidInputError(_no_axis(name))
    values = _values(field, given)
    if not values:
        raise InvalidInputError(f"{name} is an axis without values; give at least one, or leave it out")
    return tuple(_checked(name, field, value) for value in values)


def _no_axis(name: str) -> str:
    if elsewhere := Job.NAMES_ELSEWHERE.get(name.lower()):
        return f"{name} is no axis; {elsewhere}"
    near = close_matches(name, [*(f for f in Job.model_fields if f not in PLURAL.values()), *PLURAL])
    return f"{name} is no axis" + (f"; did you mean {' or '.join(near)}?" if near else "; an axis is a field of Job")


def _values(field: str, given: Any) -> list[Any]:
    """The values of an axis; what is no list is one value, and so are names of `lora_targets` in a list."""
    if isinstance(given, str | bytes | Mapping | BaseModel | Path) or not isinstance(given, Sized):
        if hasattr(given, "__next__") or isinstance(given, Callable):  # type: ignore[arg-type]
            raise InvalidInputError(f"{field} is {given!r:.80}; give its values as a list")
        return [given.item() if isinstance(given, np.generic) else given]
    if isinstance(given, set | frozenset):
        raise InvalidInputError(f"{field} is a set, which has no order; give its values as a list")
    if len(given) > MOST_VALUES:
        raise InvalidInputError(f"{field} has {len(given):,} values; an axis has {MOST_VALUES:,} at most")
    values = given.tolist() if hasattr(given, "tolist") else list(given)  # type: ignore[call-overload]
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    return [values] if field == "lora_targets" and all(isinstance(v, str) for v in values) else values


def _checked(name: str, field: str, value: Any) -> Any:
    """The value as the job holds it, and what it names found; an error names axis and value."""
    try:
        found = _adapter(field).validate_python(value)
    except ValidationError as error:
        why = explain(error).lstrip(".:, ")
        raise InvalidInputError(f"{name}: {_shown(value)} cannot be a value of this axis: {why}") from None
    try:
        loaded(field, found)
    except (InvalidInputError, UnknownNameError) as error:
        raise InvalidInputError(f"{name}: {_shown(value)}: {error}") from None
    return found


def _shown(value: Any) -> str:
    return f"{value.name if isinstance(value, ModelSpec | GPUSpec) else value!r:.80}"


@cache
def _adapter(field: str) -> TypeAdapter[Any]:
    """Checks one field of `Job` alone."""
    info = Job.model_fields[field]
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


_LOADERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "model": ModelSpec.load,
    "gpu": GPUSpec.load,
    "node": NodeSpec.load,
    "dataset": DatasetSpec.load,
    "calibration": Calibration.load,
    "software": SoftwareProfile.load,
}
_BY_NAME: Final = ("gpu", "software")
"""Fields that stay names: a GPU's may be that of a cloud instance, which tells the machine too."""


def loaded(field: str, value: Any) -> Any:
    """What a name or path stands for, so that no file is read again for each row."""
    if value is None or field not in _LOADERS or isinstance(value, BaseModel):
        return value
    found = _LOADERS[field](value)
    return value if field in _BY_NAME and isinstance(value, str) else found


def num_rows(axes: Axes) -> int:
    """Rows of the product."""
    return math.prod(map(len, axes.values()))


def split(axes: Axes, most_rows: int) -> Iterator[Axes]:
    """Products of at most `most_rows` rows that, one after the other, are the rows of the whole."""
    names, inner, cut = list(axes), 1, len(axes)
    while cut and inner * len(axes[names[cut - 1]]) <= most_rows:
        cut -= 1
        inner *= len(axes[names[cut]])
    if not cut:
        yield axes
        return
    name = names[cut - 1]
    values = axes[name]
    pieces = -(-len(values) // max(most_rows // inner, 1))
    step = -(-len(values) // pieces)
    for outer in itertools.product(*(axes[n] for n in names[: cut - 1])):
        fixed = {n: (value,) for n, value in zip(names, outer, strict=False)}
        for start in range(0, len(values), step):
            yield {**fixed, name: values[start : start + step], **{n: axes[n] for n in names[cut:]}}
