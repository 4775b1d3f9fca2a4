"""Finds and reads price tables: a CSV, a folder of them, or a zip archive, which is never unpacked to disk.

They may come from strangers. Each is bounded in size before and while it is read.
"""

from __future__ import annotations

import csv
import io
import lzma
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from moecost.errors import InvalidInputError
from moecost.prices.rows import RowError
from moecost.sources import UNDATED
from moecost.spec_files import filled_text

MAX_TABLE_BYTES: Final = 64_000_000
"""A row of SkyPilot's table of AWS takes 300 bytes: room for 200,000."""
MAX_ARCHIVE_BYTES: Final = 256_000_000
"""All tables of an archive or folder, unpacked."""
MAX_TABLES: Final = 200
SKYPILOT_FILE: Final = "vms.csv"
VERSION_FILE: Final = "version"
_DAMAGED = (OSError, RuntimeError, NotImplementedError, EOFError, zlib.error, lzma.LZMAError)
_VERSION = re.compile(r"(20\d\d)(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])\b")


@dataclass(frozen=True)
class Table:
    """A CSV with a header; its rows are read as they are asked for."""

    name: str
    """Path, or archive and member."""
    path: PurePosixPath
    text: str
    date: str = UNDATED
    """Of the snapshot, where a `version` beside the table says it."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the first row that is no comment."""
        return next((cells for _, cells in self._lines()), [])

    def rows(self) -> Iterator[tuple[int, dict[str, str] | RowError]]:
        """Line and cells by column of each row, or why it has none."""
        columns: list[str] = []
        for line, cells in self._lines():
            if not columns:
                columns = cells
            elif len(cells) != len(columns):
                yield line, RowError("malformed", f"has {len(cells)} cells, the header has {len(columns)} columns")
            else:
                yield line, dict(zip(columns, cells, strict=True))

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(io.StringIO(self.text, newline=""))
        line = 1
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
                    yield line, [cell.strip() for cell in cells]
                line = reader.line_num + 1
        except csv.Error as error:
            raise InvalidInputError(f"{self.name}, line {line}: is not valid CSV: {error}") from None


def find_tables(path: str | Path) -> list[Table | InvalidInputError]:
    """The price tables at a path; inside of a folder or archive, an error for each that cannot be read.

    Raises
    ------
    InvalidInputError : nothing can be read there.
    """
    place = Path(path)
    mode = _mode(place)
    if stat.S_ISDIR(mode):
        return _of_folder(place)
    if not stat.S_ISREG(mode):  # a pipe or device could hang us
        raise InvalidInputError(f"{place}: is not a file")
    if zipfile.is_zipfile(place):
        return _of_archive(place)
    return [_of_file(place)]


def _mode(place: Path) -> int:
    try:
        return os.stat(place).st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{str(place)!r:.200}: cannot be read: {reason}") from None


def _of_file(place: Path) -> Table:
    if not stat.S_ISREG(_mode(place)):
        raise InvalidInputError(f"{place}: is not a file")
    try:
        with open(place, "rb") as stream:
            text = _text(stream, str(place), MAX_TABLE_BYTES)
    except OSError as error:
        raise InvalidInputError(f"{place}: cannot be read: {error.strerror}") from None
    return Table(str(place), PurePosixPath(place.absolute().as_posix()), text, _date_beside(place))


def _date_beside(place: Path) -> str:
    beside = place.with_name(VERSION_FILE)
    try:
        with open(beside, "rb") as stream:
            return version_date(stream.read(64).decode("ascii", "replace")) if beside.is_file() else UNDATED
    except OSError:
        return UNDATED


def version_date(text: str) -> str:
    """Date in a version of gpuhunt, `YYYYMMDD-run`.

    >>> version_date("20260819-101"), version_date("latest")
    ('2026-08-19', 'undated')
    """
    found = _VERSION.match(text.strip())
    return "-".join(found.groups()) if found else UNDATED


def _of_folder(place: Path) -> list[Table | InvalidInputError]:
    """SkyPilot's tables lie a folder or two deep beside others that hold no prices; all else lies side by side."""
    skypilot = [place / SKYPILOT_FILE, *place.glob(f"*/{SKYPILOT_FILE}"), *place.glob(f"*/*/{SKYPILOT_FILE}")]
    files = sorted(file for file in skypilot if file.is_file()) or sorted(place.glob("*.csv"))
    if not files:
        raise InvalidInputError(f"{place}: has no price table: no {SKYPILOT_FILE} and no other .csv")
    _check_number(len(files), str(place))
    found: list[Table | InvalidInputError] = []
    left = MAX_ARCHIVE_BYTES
    for file in files:
        try:
            table = _of_file(file)
        except InvalidInputError as error:
            found.append(error)
            continue
        left -= len(table.text)
        if left < 0:
            raise InvalidInputError(
                f"{place}: its tables have more than {MAX_ARCHIVE_BYTES:,} bytes; give a part of it"
            )
        found.append(table)
    return found


def _of_archive(place: Path) -> list[Table | InvalidInputError]:
    try:
        with zipfile.ZipFile(place) as archive:
            return _members(archive, place)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, *_DAMAGED) as error:
        raise InvalidInputError(f"{place}: is no zip archive that can be read: {error}") from None


def _members(archive: zipfile.ZipFile, place: Path) -> list[Table | InvalidInputError]:
    """Tables at the top of an archive. Names only label them: nothing is written, so none can lead elsewhere."""
    infos = [info for info in archive.infolist() if info.filename.lower().endswith(".csv")]
    if not infos:
        raise InvalidInputError(f"{place}: the archive holds no .csv")
    _check_number(len(infos), str(place))
    date = UNDATED
    if VERSION_FILE in archive.namelist():
        with archive.open(VERSION_FILE) as stream:
            date = version_date(stream.read(64).decode("ascii", "replace"))
    found: list[Table | InvalidInputError] = []
    left = MAX_ARCHIVE_BYTES
    for info in infos:
        name = f"{place}/{info.filename:.80}"
        member = PurePosixPath(info.filename)
        if len(member.parts) > 1 or "\\" in info.filename:
            found.append(InvalidInputError(f"{name}: lies in a folder of the archive, and is not read"))
            continue
        with archive.open(info) as stream:
            text = _text(stream, name, min(MAX_TABLE_BYTES, left))
        left -= len(text)
        found.append(Table(name, member, text, date))
    return found


def _check_number(files: int, where: str) -> None:
    if files > MAX_TABLES:
        raise InvalidInputError(f"{where}: holds {files:,} tables, more than {MAX_TABLES}; give a part of it")


def _text(stream: IO[bytes], where: str, limit: int) -> str:
    """Text of a stream. What a header says of its size is not believed: reading stops at the limit."""
    raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise InvalidInputError(f"{where}: has more than {limit:,} bytes, too many for a price table")
    return filled_text(raw, where)
