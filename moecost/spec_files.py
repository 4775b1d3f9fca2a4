"""Reads spec files of friends and strangers: plain YAML data of bounded size and depth, checked field by field.

The lower half of `moecost.catalog`, which offers these functions as its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from moecost.errors import InvalidInputError, close_matches
from moecost.sources import FROM_FILE

Spec = TypeVar("Spec", bound=BaseModel)

MAX_FILE_BYTES: Final = 2_000_000
"""A spec is a few kilobytes; anything above this is a mistake."""
MAX_DEPTH: Final = 32
MAX_DIGITS: Final = 40


def read_text(path: str | Path) -> str:
    """Text of a regular UTF-8 file of at most `MAX_FILE_BYTES`."""
    if not isinstance(path, str | Path):
        raise InvalidInputError(f"{path!r:.80} is not the path of a file")
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # a pipe or device could hang us
            raise InvalidInputError(f"{path}: is not a file")
        with open(path, "rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{str(path)!r}: cannot be read: {reason}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{path}: is larger than {MAX_FILE_BYTES:,} bytes, too large for a file of this kind")
    return _decoded(raw, str(path))


def filled_text(raw: bytes, where: str) -> str:
    """UTF-8 text of a table or log, of which something is there, and which holds no zero byte."""
    if not raw.strip():
        raise InvalidInputError(f"{where}: is empty")
    text = _decoded(raw, where)
    if "\0" in text:
        raise InvalidInputError(f"{where}: is not text (zero byte at {text.index(chr(0))})")
    return text


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file as `write_whole` does."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write a file all at once: a reader sees the whole of it or none, and what was there stays on failure.

    Parameters
    ----------
    path : of the file.
    write : writes all of it to the path it is given, beside the other.

    Raises
    ------
    InvalidInputError : it cannot be written; the message says why.
    """
    whole = Path(path)
    part = whole.with_name(f".{whole.name}.part") if whole.name else whole
    try:
        write(part)
        os.replace(part, whole)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{path}: cannot be written: {reason}") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            part.unlink(missing_ok=True)


class _PlainDumper(yaml.SafeDumper):
    """Writes values out where they occur again: `parse_yaml` takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        """In quotes where `parse_yaml` would take it for a number, which PyYAML does not."""
        number = _INT.match(data) or _FLOAT.match(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="'" if number else None)


_PlainDumper.add_representer(str, _PlainDumper.represent_str)


def yaml_text(fields: Mapping[str, Any]) -> str:
    """Plain data as YAML that `parse_yaml` reads back as it was.

    >>> yaml_text({"lora_targets": ["w1", "w2"], "price": 0.79})
    'lora_targets: [w1, w2]\\nprice: 0.79\\n'
    """
    return yaml.dump(
        dict(fields), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; see `parse_yaml` for what is refused."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str = "YAML text") -> dict[str, Any]:
    """A mapping of plain data from YAML text.

    Numbers, truth values and null as in YAML 1.2 (`1e9` is a number; `no`, `12:30` and dates are text). Refused, with
    file and line: tags, anchors and aliases, equal keys, keys that are not text, more than `MAX_DEPTH` levels.

    >>> parse_yaml("rate: 1e9\\nanswer: no")
    {'rate': 1000000000.0, 'answer': 'no'}
    """
    try:
        value = _build(yaml.parse(text, Loader=_YAML_LOADER), where)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise InvalidInputError(f"{where}{line}: is not valid YAML: {problem}") from error
    if value is None:
        raise InvalidInputError(f"{where}: is empty")
    if not isinstance(value, dict):
        raise InvalidInputError(f"{where}: must hold fields (name: value), holds {value!r:.60}")
    return value


_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: Final[Mapping[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def _build(events: Iterator[Any], where: str) -> Any:
    """Data from YAML events. Events are flat: no recursion, no constructors, nothing that a file could call."""

    def refusal(why: str) -> InvalidInputError:
        return InvalidInputError(f"{where}, line {event.start_mark.line + 1}: {why}")

    root: list[Any] = []
    open_: list[dict[str, Any] | list[Any]] = [root]
    keys: list[str | None] = [None]  # of each open mapping: the key that waits for its value
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise refusal("anchors and aliases are not allowed; write the value out")
        if getattr(event, "tag", None) is not None:
            raise refusal(f"the tag {event.tag!r:.80} is not allowed; plain data only")
        if isinstance(event, yaml.DocumentStartEvent) and root:
            raise refusal("a second document begins; one a file")
        if isinstance(event, yaml.CollectionEndEvent):
            open_.pop()
            keys.pop()
            continue
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            continue
        inside, key = open_[-1], keys[-1]
        if isinstance(inside, dict) and key is None:
            if not isinstance(event, yaml.ScalarEvent):
                raise refusal("a key must be text, not a mapping or list")
            if event.value in inside:
                raise refusal(f"the key {event.value!r:.80} occurs twice")
            keys[-1] = event.value
            continue
        value = _scalar(event, refusal) if isinstance(event, yaml.ScalarEvent) else _container(event)
        if isinstance(inside, list):
            inside.append(value)
        elif key is not None:
            inside[key] = value
            keys[-1] = None
        if isinstance(value, dict | list):
            if len(open_) > MAX_DEPTH:
                raise refusal(f"more than {MAX_DEPTH} levels deep")
            open_.append(value)
            keys.append(None)
    return root[0] if root else None


def _container(event: Any) -> dict[str, Any] | list[Any]:
    return {} if isinstance(event, yaml.MappingStartEvent) else []


def _scalar(event: Any, refusal: Callable[[str], InvalidInputError]) -> Any:
    text: str = event.value
    if not event.implicit[0]:  # quoted or a block: always text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if not (_INT.match(text) or _FLOAT.match(text)):
        return text
    if len(text) > MAX_DIGITS:
        raise refusal(f"{text:.20}... has too many digits for a number; quote it if it is text")
    return int(text) if _INT.match(text) else float(text)


def load_spec_file(path: str | Path, cls: type[Spec]) -> Spec:
    """Read a spec file; errors name the file, and all fields that are wrong, in one message."""
    return validate(read_yaml(path), cls, str(path))


def validate(data: Mapping[str, Any], cls: type[Spec], where: str) -> Spec:
    """A spec from the content of a file, in which every number must have a source."""
    try:
        return cls.model_validate(data, context=FROM_FILE)
    except ValidationError as error:
        raise InvalidInputError(f"{where}: {explain(error, cls)}") from error


def explain(error: ValidationError, cls: type[BaseModel] | None = None) -> str:
    """A validation error in one line: field, what is wrong, value."""
    lines = []
    for e in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in e["loc"] if part != "[key]")
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "missing":
            lines.append(f"{field} is missing")
        elif e["type"] == "extra_forbidden":
            elsewhere: Mapping[str, str] = getattr(cls, "NAMES_ELSEWHERE", {})
            if hint := elsewhere.get(field.lower().replace("-", "_")):
                lines.append(f"{field} is not a field; {hint}")
                continue
            near = close_matches(field, cls.model_fields) if cls else []
            lines.append(f"{field} is not a field" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        elif e["type"] == "value_error":
            lines.append(f"{field}: {message}" if field else message)
        else:
            lines.append(f"{field}: {message[:1].lower()}{message[1:]} (it is {e['input']!r:.60})")
    shown = "; ".join(line[:MAX_LINE] for line in lines[:MAX_LINES])
    return shown if len(lines) <= MAX_LINES else f"{shown}; and {len(lines) - MAX_LINES} more"


MAX_LINES: Final = 8
MAX_LINE: Final = 220


def looks_like_path(name: str | Path) -> bool:
    """Whether a name is meant as a spec file: a Path, or text that ends in .yaml or .yml."""
    return isinstance(name, Path) or str(name).lower().endswith((".yaml", ".yml"))
