"""Keys of a training recipe: read one by one with their kinds, so that what was not understood is known at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moecost.errors import InvalidInputError
from moecost.storage import OPTIMIZER_NAMES, OPTIMIZERS

OFF: Final = (None, False, 0, "", "none", "None", "no", "false", "False", "off")
_TRUE: Final = ("true", "True", "yes", "on", "auto", "full")
_FALSE: Final = ("false", "False", "no", "off", "none", "None", "")
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,18}\Z")
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")


class Keys:
    """A recipe's keys, nested ones with dots, and the fields of `Job` that they were found to mean.

    Attributes
    ----------
    fields : of `Job`.
    doubts : by field of `Job`: why the recipe's value for it cannot be used; moot where the caller gives the field.
    not_modelled : keys whose value matters, and is not a field of `Job`.
    max_steps : optimizer steps after which the run ends; None: its epochs say. [step]
    max_queries : queries that are used of the data set; None: all.
    sharded : weights or states are sharded, over a number of GPUs that the recipe does not tell.
    """

    def __init__(self, data: Mapping[str, Any], where: str, folder: Path | None = None) -> None:
        self.data, self.where, self.folder = data, where, folder
        self.flat = dict(_flatten(data))
        self.used: set[str] = set()
        self.fields: dict[str, Any] = {}
        self.doubts: dict[str, str] = {}
        self.not_modelled: list[str] = []
        self.max_steps: int | None = None
        self.max_queries: int | None = None
        self.sharded = False

    # ------------------------------------------------------------------------------------------------- reading
    def raw(self, name: str) -> Any:
        """Value of a top-level key, nested or not; all of it counts as read."""
        self.used |= {key for key in self.flat if key == name or key.startswith(name + ".")}
        return self.data.get(name)

    def value(self, *names: str) -> Any:
        """First of the keys that is there and not null."""
        self.used |= set(names)
        return next((self.flat[n] for n in names if self.flat.get(n) is not None), None)

    def text(self, *names: str) -> str | None:
        value = self.value(*names)
        if value is None or isinstance(value, str):
            return value or None
        raise self.refusal(names, value, "text")

    def flag(self, *names: str) -> bool | None:
        """A truth value; `auto` counts as true."""
        value = self.value(*names)
        if value is None or isinstance(value, bool):
            return value
        if value in _TRUE or value == 1:
            return True
        if value in _FALSE or value == 0:
            return False
        raise self.refusal(names, value, "true or false")

    def number(self, *names: str) -> float | None:
        value = self.value(*names)
        if value is None:
            return None
        if isinstance(value, str) and _NUMBER.match(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            raise self.refusal(names, value, "a number")
        return float(value)

    def whole(self, *names: str) -> int | None:
        value = self.value(*names)
        if isinstance(value, str) and _WHOLE.match(value):
            value = int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.refusal(names, value, "a whole number")

    def words(self, *names: str) -> list[str] | None:
        """A list of names, or one text with commas."""
        value = self.value(*names)
        if value is None:
            return None
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return [v.strip() for v in value if v.strip()]
        raise self.refusal(names, value, "a list of names")

    def refusal(self, names: tuple[str, ...], value: object, wanted: str) -> InvalidInputError:
        name = next(n for n in names if self.flat.get(n) is not None)
        return InvalidInputError(f"{self.where}: {name}={value!r:.60} must be {wanted}")

    # ------------------------------------------------------------------------------------------------- writing
    def put(self, field: str, value: Any) -> None:
        """Set a field of `Job`, unless the value is None."""
        if value is not None:
            self.fields[field] = value

    def choose(self, field: str, names: tuple[str, ...], table: Mapping[str, str | None]) -> None:
        """Set a field to what the table says of a key's text; a text that it lacks becomes a doubt."""
        said = self.text(*names)
        if said is None:
            return
        if said in table:
            self.put(field, table[said])
        else:
            self.doubts[field] = f"{names[0]}={said!r:.60} has no counterpart; pass {field}="

    def optimizer(self, *names: str) -> None:
        """Set the optimizer from a Hugging Face or bitsandbytes name."""
        said = self.text(*names)
        if said is not None:
            self.set_optimizer(OPTIMIZER_NAMES.get(said.lower(), said.lower()), f"{names[0]}={said!r:.60}")

    def set_optimizer(self, name: str, said: str) -> None:
        if name in OPTIMIZERS:
            self.fields["optimizer"] = name
        else:
            self.doubts["optimizer"] = f"{said} is not modelled; pass optimizer= (one of {', '.join(OPTIMIZERS)})"

    def fuse(self, kernel: str) -> None:
        """Note a fused kernel that the run uses."""
        have = self.fields.get("fused_kernels")
        self.fields["fused_kernels"] = f"{have};{kernel}" if have else kernel

    def unknown(self, ignored: re.Pattern[str]) -> list[str]:
        """Keys that are on, were not read, and are not known to be without effect on time and memory."""
        left = [k for k, v in self.flat.items() if k not in self.used and not ignored.fullmatch(k) and not _off(v)]
        return sorted({*self.not_modelled, *left})


def _off(value: Any) -> bool:
    return (value in OFF if not isinstance(value, list | dict) else not value) or value == "null"


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


DTYPES: Final[Mapping[str, str | None]] = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
    "auto": "bf16",
}  # fmt: skip
"""Names of number types to those of `Job`; `auto` is the type a checkpoint was saved in, nearly always bf16."""


def stop_after(keys: Keys, steps: int | None) -> None:
    """A number of steps, where it is set, overrules the epochs."""
    if steps is not None and steps > 0:
        keys.max_steps = steps
        keys.put("epochs", 1.0)
