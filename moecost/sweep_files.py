"""Files of a sweep: Parquet and CSV, each whole or not there at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moecost.errors import UnsupportedError
from moecost.spec_files import write_whole

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from moecost.sweeping import Sweep

ROWS_AT_ONCE: Final = 2**18
"""Rows that are turned into a table at a time."""


def to_frame(sweep: Sweep, rows: slice = slice(None)) -> pandas.DataFrame:
    """Rows as a data frame; texts as categories."""
    try:
        import pandas
    except ImportError:
        raise UnsupportedError("data frames need pandas: pip install 'moecost[sweep]'") from None

    def column(name: str) -> Any:
        found = sweep.coded(name, rows)
        return (
            found
            if isinstance(found, np.ndarray)
            else pandas.Categorical.from_codes(found[0], categories=pandas.Index(found[1]))
        )

    return pandas.DataFrame({name: column(name) for name in sweep.columns})


def write_parquet(sweep: Sweep, path: str | Path) -> None:
    """All rows as a Parquet file; texts as dictionaries."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError("Parquet files need pyarrow: pip install 'moecost[sweep]'") from None

    def column(name: str, rows: slice) -> pyarrow.Array[Any]:
        found = sweep.coded(name, rows)
        if isinstance(found, np.ndarray):
            return pyarrow.array(found)
        codes, texts = found
        return pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(codes, mask=codes < 0), pyarrow.array(texts, pyarrow.string())
        )

    def table(rows: slice) -> pyarrow.Table:
        return pyarrow.table({name: column(name, rows) for name in sweep.columns})

    def write(part: Path) -> None:
        with pyarrow.parquet.ParquetWriter(part, table(slice(0, 0)).schema) as writer:
            for start in range(0, len(sweep), ROWS_AT_ONCE):
                writer.write_table(table(slice(start, start + ROWS_AT_ONCE)))

    write_whole(path, write)


def write_csv(sweep: Sweep, path: str | Path) -> None:
    """All rows as a CSV file with a header; what is not known is empty."""

    def write(part: Path) -> None:
        with open(part, "w", encoding="utf-8", newline="") as stream:
            for start in range(0, len(sweep), ROWS_AT_ONCE):
                frame = to_frame(sweep, slice(start, start + ROWS_AT_ONCE))
                frame.to_csv(stream, index=False, header=start == 0, lineterminator="\n")

    write_whole(path, write)
