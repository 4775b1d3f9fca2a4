"""Reads what training tools write: text and JSON of bounded size, with numbers that are numbers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moecost.errors import InvalidInputError
from moecost.spec_files import filled_text

LARGEST: Final = 1e15
"""No count, time or rate of a training run is larger."""
MAX_RUN_FILE_BYTES: Final = 32_000_000
"""A log of a hundred thousand steps takes about 20 MB."""


def read_run_text(path: str | Path) -> str:
    """Text of a regular UTF-8 file of at most `MAX_RUN_FILE_BYTES`, which is checked before a byte is read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe or device could hang us
            raise InvalidInputError(f"{path}: is not a file")
        if found.st_size > MAX_RUN_FILE_BYTES:
            raise InvalidInputError(
                f"{path}: has {found.st_size:,} bytes, too large for a table or log of runs ({MAX_RUN_FILE_BYTES:,})"
            )
        with open(path, "rb") as stream:
            raw = stream.read(MAX_RUN_FILE_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{str(path)!r:.200}: cannot be read: {reason}") from error
    return filled_text(raw, str(path))


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_run_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path}, line {error.lineno}: is not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path}: must hold an object (name: value), holds {value!r:.60}")
    return value


def positive(values: Mapping[str, Any], name: str, where: str) -> float | None:
    """A positive finite number; None where it is absent or zero (a count that was not kept)."""
    value = values.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= LARGEST:  # NaN fails too
        raise InvalidInputError(f"{where}: {name}={value!r:.60} must be a positive finite number")
    return float(value) or None
