"""`sweep`: the estimates of all combinations of some values, as columns of arrays."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python

from moecost.errors import InvalidInputError, MoECostError, UnknownNameError, WorkerError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.progress import progress_bar
from moecost.results import Estimate
from moecost.spec_files import write_text
from moecost.specs import PriceQuote
from moecost.sweep_axes import ADAPTER_FIELDS, PLURAL, Axes, num_rows, read_axes, split
from moecost.sweep_blocks import Block, evaluate
from moecost.sweep_figures import FIGURES, FITS
from moecost.sweep_files import to_frame, write_csv, write_parquet

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes as PlotAxes

MOST_ROWS: Final = 100_000_000
"""More do not fit into the memory of most machines: about 100 bytes a row."""
ROWS_OF_A_PART: Final = 1_000_000
ROWS_OF_A_TASK: Final = (2**13, 2**18)
"""Fewest and most rows that a worker gets at a time."""
TASKS: Final = 64
"""Parts that a sweep is dealt out in, and most that are under way at a time."""
BEST: Final = {"cheapest": "cost_usd", "fastest": "queries_per_second"}
"""Rows that a summary names, and the figure that each has the best of."""
FIGURE_OF: Final = {"memory": "{}", "step": "step_{}"}
"""Columns named as an `Estimate` names them: `memory.device_gib`, `step.seconds`."""
MISSING: Final = -1
"""Code of None."""
Coded: TypeAlias = NDArray[Any] | tuple[NDArray[np.int32], list[Any]]
"""Numbers; or codes into texts, `MISSING` where there is none."""
SHOWN_PARTS: Final = 5


def sweep(*, executor: Executor | None = None, progress: bool | None = None, **axes: Any) -> Sweep:
    """The estimates of the product of all axes.

    Parameters
    ----------
    executor : any `concurrent.futures.Executor` (a process pool; `dask.distributed.Client.get_executor()`): blocks
        of rows are computed there.
    progress : a bar on stderr; None: on long sweeps where stderr is a terminal.
    **axes : `models` and `gpus`, and any other field of `Job` by its name; a list of values is an axis, a plain value
        an axis of one. Rows are in the order of `itertools.product` of the axes as given: the last one varies
        fastest. Names of `lora_targets` in one list are one value. Where `method` is `full`, `lora_rank` and
        `lora_targets` are not given to the row.

    Returns
    -------
    Sweep : columns of the very figures that `estimate` gives row by row. A row that does not fit has `fits` False and
        NaN for rates, hours and cost (unless `on_oom="report"`); one that contradicts itself has no figures, and a
        `reason`.

    Raises
    ------
    InvalidInputError : an axis that no job could have: a name that is no field, no value, a value that is refused.
    WorkerError : a worker of the executor failed.

    >>> s = sweep(models="mixtral-8x7b", gpus=["a40", "h100"], method="qlora", sequence_length=[512, 1024],
    ...           micro_batch_size=[1, 2, 4, 8, 16])
    >>> len(s), s["gpu"][-1], s["fits"][:5].tolist()
    (20, 'h100', [True, True, False, False, False])
    """
    read = read_axes(axes)
    rows = num_rows(read)
    if rows > MOST_ROWS:
        raise InvalidInputError(f"{rows:,} rows do not fit into memory; use moecost.sweep_to_parquet(folder, ...)")
    with progress_bar(rows, "rows", progress) as advance:
        if executor is None:
            return Sweep(read, evaluate(read, advance))
        block = Block.of(rows)
        fewest, most = ROWS_OF_A_TASK
        parts = split(read, min(max(rows // TASKS, fewest), most))
        with closing(_computed(_with_starts(parts), executor)) as found:
            for start, _, part in found:
                block.put(start, part)
                advance(len(part.codes))
        return Sweep(read, block)


def sweep_to_parquet(
    folder: str | Path,
    *,
    rows_of_a_part: int = ROWS_OF_A_PART,
    executor: Executor | None = None,
    progress: bool | None = None,
    **axes: Any,
) -> list[Path]:
    """A sweep of any size as Parquet files in a folder, of which each is whole as soon as it is there.

    A sweep that was broken off goes on where it stopped when it is called again with the same axes.

    Parameters
    ----------
    folder : made if it is not there. `sweep.json` in it says which sweep it holds.
    rows_of_a_part : most rows of a file.
    executor, progress, **axes : as for `sweep`.

    Returns
    -------
    Paths of all files, in the order of the rows.

    Raises
    ------
    InvalidInputError : as for `sweep`; the folder holds another sweep; a file cannot be written (the disk is full):
        the message names the files that are missing, those that are finished can be read.
    """
    read = read_axes(axes)
    if isinstance(rows_of_a_part, bool) or not isinstance(rows_of_a_part, int) or rows_of_a_part < 1:
        raise InvalidInputError(f"rows_of_a_part={rows_of_a_part!r:.80} must be a whole number, 1 or more")
    where = Path(folder)
    _claim(where, read, rows_of_a_part)
    parts = {where / f"part-{i:06d}.parquet": part for i, part in enumerate(split(read, rows_of_a_part))}
    missing = {path: part for path, part in parts.items() if not path.exists()}
    with (
        progress_bar(sum(map(num_rows, missing.values())), "rows", progress) as advance,
        closing(_computed(missing.items(), executor)) as found,
    ):
        for path, part, block in found:
            try:
                write_parquet(Sweep(part, block), path)
            except InvalidInputError as error:
                left = [path for path in missing if not path.exists()]
                raise InvalidInputError(_not_written(error, left, len(parts))) from error
            advance(len(block.codes))
    return list(parts)


def _claim(folder: Path, axes: Axes, rows_of_a_part: int) -> None:
    """Write down which sweep a folder holds, or see that it is this one."""
    shown = {name: [to_jsonable_python(value, fallback=str) for value in values] for name, values in axes.items()}
    text = json.dumps({"rows_of_a_part": rows_of_a_part, "axes": shown}, indent=1)
    said = folder / "sweep.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = said.read_text(encoding="utf-8") if said.exists() else None
        used = known is None and any(folder.glob("part-*.parquet"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{folder}: cannot be used: {error}") from error
    if used or known not in (None, text):
        raise InvalidInputError(f"{folder}: holds another sweep; give another folder, or the same axes")
    write_text(said, text)


def _not_written(error: Exception, missing: list[Path], all_parts: int) -> str:
    names = ", ".join(path.name for path in missing[:SHOWN_PARTS])
    more = f" and {len(missing) - SHOWN_PARTS} more" if len(missing) > SHOWN_PARTS else ""
    return (
        f"{error}; of {all_parts} parts {len(missing)} are missing: {names}{more}. The others can be read; the same "
        "call goes on from there"
    )


# ------------------------------------------------------------------------------------------------ workers
_Key = TypeVar("_Key")


def _with_starts(parts: Iterable[Axes]) -> Iterator[tuple[int, Axes]]:
    """Each part with the row it begins at."""
    start = 0
    for part in parts:
        yield start, part
        start += num_rows(part)


def _computed(
    parts: Iterable[tuple[_Key, Axes]], executor: Executor | None
) -> Generator[tuple[_Key, Axes, Block], None, None]:
    """Parts as they are done; what is under way is cancelled where one fails or the caller stops."""
    if executor is None:
        yield from ((key, part, evaluate(part)) for key, part in parts)
        return
    waiting, under_way = iter(parts), dict[Future[Block], tuple[_Key, Axes]]()
    try:
        while True:
            for key, part in itertools.islice(waiting, TASKS - len(under_way)):
                under_way[executor.submit(evaluate, part)] = key, part
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                key, part = under_way.pop(future)
                yield key, part, future.result()
    except MoECostError:
        raise
    except Exception as error:  # whatever a worker, or the way to it, fails with
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise WorkerError(f"a worker of executor={executor!r:.80} failed: {why:.500}; no rows are returned") from error
    finally:
        for future in under_way:
            future.cancel()


# ------------------------------------------------------------------------------------------------ the result
@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """Rows of a sweep: `len()` of them, `sweep["cost_usd"]` is a column.

    `columns` names the axes, then `fits`, `reason` (why a row has no rates; empty where it fits) and the figures:
    `micro_batch_size` and `max_micro_batch_size`; `queries_per_second`, `tokens_per_second`,
    `padded_tokens_per_second`, `step_seconds`, `hours`, `cost_usd`; `allocated_gib`, `reserved_gib`, `device_gib`.
    They mean what they mean in `Estimate`; memory is given for rows that do not fit as well.

    Attributes
    ----------
    axes : values by field of `Job`, the last axis fastest.
    """

    axes: Axes
    _block: Block

    def __post_init__(self) -> None:
        for column in (*self._block.figures.values(), self._block.codes):
            column.flags.writeable = False

    def __reduce__(self) -> tuple[type[Sweep], tuple[Axes, Block]]:
        return Sweep, (self.axes, self._block)  # made anew, so that a copy's columns are read-only too

    def __len__(self) -> int:
        return num_rows(self.axes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return (*(name for name in self.axes if name not in FIGURES), "fits", "reason", *FIGURES)

    def __getitem__(self, name: str) -> NDArray[Any]:
        found = self.coded(name)
        if isinstance(found, np.ndarray):
            return found
        codes, texts = found
        return np.array([*texts, None], dtype=object)[codes]  # `MISSING` is the last

    def coded(self, name: str, rows: slice = slice(None)) -> Coded:
        """A column, or (codes, texts) of one that holds texts, which takes less memory.

        Parameters
        ----------
        name : of a column; as an `Estimate` says it (`memory.device_gib`) as well.
        rows : which of them.
        """
        name = _column(name)
        if name in FIGURES:
            return self._block.figures[name][rows]
        if name == "fits":
            return np.asarray(self._block.codes[rows] == FITS)
        if name == "reason":
            return self._block.codes[rows], list(self._block.reasons)
        if name not in self.axes:
            raise UnknownNameError("column", str(name), self.columns, f"There are {', '.join(self.columns)}.")
        values = self.axes[name]
        positions = self._positions(name, np.arange(*rows.indices(len(self))))
        if all(isinstance(value, bool | int | float) for value in values):
            return np.array(values)[positions]
        if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
            return np.array(values, dtype=np.float64)[positions]  # None as NaN
        texts = [_text(value) for value in values]
        distinct = [text for text in dict.fromkeys(texts) if text is not None]
        codes = [MISSING if text is None else distinct.index(text) for text in texts]
        return np.array(codes, np.int32)[positions], distinct

    def _positions(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of rows in the values of an axis."""
        inner = math.prod(len(values) for values in list(self.axes.values())[list(self.axes).index(name) + 1 :])
        return rows // inner % len(self.axes[name])

    def _row(self, i: int) -> int:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not -len(self) <= i < len(self):
            raise InvalidInputError(f"row {i!r:.40} is none of the {len(self):,} rows")
        return int(i) % len(self)

    def row(self, i: int) -> dict[str, Any]:
        """One row by column; a negative number counts from the end."""
        i = self._row(i)
        block, code = self._block, int(self._block.codes[i])
        axes = {name: _plain(value) for name, value in self._values(i).items() if name not in FIGURES}
        figures = {name: column[i].item() for name, column in block.figures.items()}
        return {**axes, "fits": code == FITS, "reason": list(block.reasons)[code], **figures}

    def _values(self, i: int) -> dict[str, Any]:
        """Of the axes in one row, as `Job` holds them."""
        row = np.array([i])
        return {name: values[self._positions(name, row)[0]] for name, values in self.axes.items()}

    def job(self, i: int) -> Job:
        """The job of a row; what contradicts itself is no job and raises."""
        fields = self._values(self._row(i))
        full = fields.get("method", "full") == "full"
        return Job(**{name: value for name, value in fields.items() if not (full and name in ADAPTER_FIELDS)})

    def estimate(self, i: int) -> Estimate:
        """All about a row, whether it fits or not."""
        return estimate_job(self.job(i).model_copy(update={"on_oom": "report"}))

    def why(self, i: int) -> str:
        """What `estimate` says of a row that has no rates, with amounts and what to try; empty where it has."""
        try:
            estimate_job(self.job(i))
        except MoECostError as error:
            return str(error)
        return ""

    def best(self, by: str = "cost_usd") -> int:
        """The row that fits and has the least of a figure (the most of one a second); the first of equals."""
        sign = -1.0 if by.endswith("per_second") else 1.0
        column = self[by]
        if column.dtype.kind not in "if":
            raise InvalidInputError(f"by={by!r:.80} is no figure; use one of {', '.join(FIGURES)}")
        values = np.where(self["fits"], sign * column, np.nan)
        if np.isnan(values).all():
            raise InvalidInputError(f"{by} is known of no row that fits")
        return int(np.nanargmin(values))

    def summary(self) -> dict[str, Any]:
        """Axes, numbers of rows by reason, and the best rows: plain data, as JSON has it."""
        counts = np.bincount(self._block.codes, minlength=len(self._block.reasons)).tolist()
        best = {}
        for name, by in BEST.items():
            with contextlib.suppress(InvalidInputError):  # of a figure that no row has
                best[name] = self.row(self.best(by))
        return {
            "axes": {name: [_plain(value) for value in values] for name, values in self.axes.items()},
            "rows": len(self),
            "fits": counts[FITS],
            "reasons": {why: n for why, n in zip(self._block.reasons, counts, strict=True) if why and n},
            **best,
        }

    def plot(self, *, x: str, y: str, by: str | Sequence[str] | None = None, ax: PlotAxes | None = None) -> PlotAxes:
        """One column against another, a line for each value of others (extra `[plot]`); see `plotting.lines`.

        `by` that is left out: all other axes with more than one value.
        """
        from moecost.plotting import lines

        others = [name for name, values in self.axes.items() if len(values) > 1 and name != x]
        return lines(self, x=x, y=y, by=others if by is None else by, ax=ax)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame; texts as categories. Needs the extra `[sweep]`."""
        return to_frame(self)

    def to_parquet(self, path: str | Path) -> None:
        """A Parquet file, whole or not at all. Needs the extra `[sweep]`."""
        write_parquet(self, path)

    def to_csv(self, path: str | Path) -> None:
        """A CSV file, whole or not at all. Needs the extra `[sweep]`."""
        write_csv(self, path)

    def __str__(self) -> str:
        from moecost.sweep_report import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from moecost.sweep_report import as_html

        return as_html(self)


def _column(name: str) -> str:
    """Its name here, of an axis in the plural or a figure as `Estimate` says it."""
    name = PLURAL.get(name, name)
    part, dot, figure = name.partition(".")
    return FIGURE_OF[part].format(figure) if dot and part in FIGURE_OF else name


def _plain(value: Any) -> Any:
    """A value of an axis in a table: numbers as they are, all else as text."""
    return value if isinstance(value, bool | int | float | None) else _text(value)


def _text(value: Any) -> str | None:
    """Names of specs, names in a list divided by semicolons; None is none."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return ";".join(value)
    if isinstance(value, PriceQuote):
        return f"{value.provider} {value.usd_per_gpu_hour:g}"
    if isinstance(value, Mapping):
        return str(value.get("name") or json.dumps(to_jsonable_python(value, fallback=str)))
    return str(getattr(value, "name", value))
