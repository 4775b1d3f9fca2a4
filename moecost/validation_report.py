"""`Report`: figures of measured runs beside their predictions, summed up by group, as text and as a plot.

An error is `predicted / measured - 1`. Speeds are compared as the seconds of a step, whatever was measured: so an
error of +10 % says that a run is quicker than predicted.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from moecost.checked import Checked
from moecost.errors import InvalidInputError, UnsupportedError, close_matches

LEVEL: Final = 0.8
WIDTH: Final = 100
MIN_WIDTH: Final = 75
"""Columns of a terminal, of a table of one figure and of a run's line."""
WORST: Final = 5
"""Rows that are shown beneath the tables."""
REASONS: Final = 5
BAND: Final = 1.2
"""Factor to either side of a plot's diagonal that is shaded."""

Figure = Literal["speed", "memory", "hours"]
UNITS: Final[Mapping[str, str]] = {"speed": "s a step", "memory": "GiB", "hours": "h"}
GROUPS: Final = ("source", "gpu", "method", "kind", "software")


# --------------------------------------------------------------------------------------------------------- parts
class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OfRun(_Frozen):
    """What a row says of its run."""

    id: str
    source: str
    group: str
    model: str
    kind: Literal["dense", "MoE"]
    gpu: str
    num_gpus: int
    method: str
    software: str
    length: float
    """Longest sequence. [token]"""
    trust: int


class Row(OfRun):
    """One figure of one run."""

    figure: Figure
    field: str
    """What was measured: the field of the run, or the kind of memory."""
    measured: float = Field(gt=0)
    """Seconds of a step for `speed`, GiB for `memory`, hours for `hours`."""
    predicted: float = Field(gt=0)
    low: float
    """Interval of the prediction."""
    high: float

    @property
    def log_error(self) -> float:
        """ln(predicted / measured); of time for speeds."""
        return math.log(self.predicted / self.measured)

    @property
    def error(self) -> float:
        """predicted / measured - 1; of time for speeds."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the measured value lies within the interval."""
        return self.low <= self.measured <= self.high

    def times(self, factor: float) -> Self:
        """The same prediction, multiplied."""
        changed = {name: getattr(self, name) * factor for name in ("predicted", "low", "high")}
        return self.model_copy(update=changed)


class Outcome(OfRun):
    """Whether a run ran or ran out of memory, and whether it was predicted to fit."""

    measured: Literal["ok", "oom"]
    predicted: Literal["ok", "oom"]
    device_gib: float
    usable_gib: float
    low: float
    """Interval of `device_gib`."""
    high: float

    @property
    def right(self) -> bool:
        return self.measured == self.predicted

    @property
    def close(self) -> bool:
        """The usable memory lies within the interval of what is needed: either outcome is possible."""
        return self.low <= self.usable_gib <= self.high


class Refusal(_Frozen):
    """A run without a prediction."""

    id: str
    source: str
    reason: str


class Summary(_Frozen):
    """Errors of one figure in one group of runs."""

    name: str
    figure: Figure
    runs: int
    median_error: float
    """Of |predicted / measured - 1|."""
    mean_error: float
    bias: float
    """Median of predicted / measured - 1."""
    coverage: float
    """Share of measured values within their interval."""

    @classmethod
    def of(cls, name: str, figure: Figure, rows: Sequence[Row]) -> Summary:
        errors = [row.error for row in rows]
        sizes = [abs(error) for error in errors]
        return cls(
            name=name,
            figure=figure,
            runs=len(rows),
            median_error=statistics.median(sizes),
            mean_error=math.fsum(sizes) / len(sizes),
            bias=statistics.median(errors),
            coverage=sum(row.inside for row in rows) / len(rows),
        )


class OutcomeSummary(_Frozen):
    """How often `fits` was right, for runs that ran or for runs that ran out of memory."""

    measured: Literal["ok", "oom"]
    runs: int
    right: int
    close: int
    """Of the wrong ones: the usable memory lies within the interval of what is needed."""


# -------------------------------------------------------------------------------------------------------- report
class Report(Checked):
    """Measured against predicted. `print` shows tables; `worst`, `by`, `plot` and `to_json` the rest.

    `rows` has one entry a run and figure, `outcomes` one a run that says whether it fitted, and `refused` tells of
    every run that could not be predicted, and why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rows: tuple[Row, ...] = Field(default=(), repr=False)
    outcomes: tuple[Outcome, ...] = Field(default=(), repr=False)
    refused: tuple[Refusal, ...] = Field(default=(), repr=False)
    level: float = LEVEL
    how: str = ""
    """How the predictions were made."""

    @model_validator(mode="before")
    @classmethod
    def _without_summaries(cls, data: Any) -> Any:
        """JSON has the summaries too, for readers that do not reckon; they follow from the rows."""
        return {k: v for k, v in data.items() if k not in cls.model_computed_fields} if isinstance(data, dict) else data

    @computed_field  # type: ignore[prop-decorator]
    @property
    def overall(self) -> tuple[Summary, ...]:
        """One a figure; memory by what was measured."""
        names = dict.fromkeys(_overall_name(row) for row in self.rows)
        order: dict[str, int] = {"speed": 0, "memory": 1, "hours": 2}
        found = [(name, [row for row in self.rows if _overall_name(row) == name]) for name in names]
        found.sort(key=lambda item: (order[item[1][0].figure], -len(item[1])))
        return tuple(Summary.of(name, rows[0].figure, rows) for name, rows in found)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_outcome(self) -> tuple[OutcomeSummary, ...]:
        found = []
        for measured in ("ok", "oom"):
            of = [o for o in self.outcomes if o.measured == measured]
            close = sum(o.close and not o.right for o in of)
            if of:
                found.append(OutcomeSummary(measured=of[0].measured, runs=len(of), right=sum(o.right for o in of),
                                            close=close))  # fmt: skip
        return tuple(found)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_source(self) -> tuple[Summary, ...]:
        return self.by("source")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_gpu(self) -> tuple[Summary, ...]:
        return self.by("gpu")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_method(self) -> tuple[Summary, ...]:
        return self.by("method")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_kind(self) -> tuple[Summary, ...]:
        """Dense and mixture-of-experts models."""
        return self.by("kind")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def by_software(self) -> tuple[Summary, ...]:
        return self.by("software")

    def by(self, key: str) -> tuple[Summary, ...]:
        """Errors of each figure for the runs that share `key` (a field of `Row`), the largest groups first."""
        if key not in OfRun.model_fields:
            near = close_matches(str(key), OfRun.model_fields) or list(GROUPS)
            raise InvalidInputError(f"by={key!r:.60} is nothing that runs share; did you mean {', '.join(near)}?")
        groups: dict[tuple[str, Figure], list[Row]] = {}
        size: Counter[str] = Counter()
        for row in self.rows:
            groups.setdefault((str(getattr(row, key)), row.figure), []).append(row)
            size[str(getattr(row, key))] += 1
        found = sorted(groups.items(), key=lambda item: (-size[item[0][0]], item[0][0], list(UNITS).index(item[0][1])))
        return tuple(Summary.of(name, figure, rows) for (name, figure), rows in found)

    def worst(self, n: int = 10, figure: Figure | None = None) -> tuple[Row, ...]:
        """The rows that are farthest off, in logarithms; of speed and memory where no `figure` is named."""
        if figure is not None and figure not in UNITS:
            raise InvalidInputError(f"figure={figure!r:.60} must be one of {', '.join(UNITS)}")
        wanted = (figure,) if figure else ("speed", "memory")
        rows = [row for row in self.rows if row.figure in wanted]
        return tuple(sorted(rows, key=lambda row: (-abs(row.log_error), row.id))[: max(n, 0)])

    def to_json(self, indent: int | None = 2) -> str:
        """All of it, summaries included; `Report.model_validate_json` reads it back."""
        return self.model_dump_json(indent=indent)

    def __str__(self) -> str:
        return self.text()

    def text(self, worst: int = WORST, width: int = WIDTH) -> str:
        """The tables in at most `width` columns (and at least `MIN_WIDTH`), with as many of the worst rows as asked."""
        width = max(width, MIN_WIDTH)
        return "\n".join(_text(self, worst, width))

    def plot(self, path: str | Path | None = None) -> Any:
        """Predicted against measured on logarithmic axes, a panel a figure; a Matplotlib figure.

        Parameters
        ----------
        path : where to save it (PNG, SVG, PDF by its suffix); None: nowhere.
        """
        return _plot(self, path)


def _overall_name(row: Row) -> str:
    return f"memory, {row.field}" if row.figure == "memory" else row.figure


# ---------------------------------------------------------------------------------------------------------- text
_NAME: Final = 24
_HEAD: Final = f"{'runs':>6}{'median':>8}{'mean':>8}{'bias':>8}{'inside':>8}"


def _text(report: Report, worst: int, width: int) -> Iterable[str]:
    if not report.rows and not report.outcomes:
        yield "MEASURED AGAINST PREDICTED: no run could be compared"
        yield from _refused_text(report, width)
        return
    runs = len({(row.source, row.id) if row.id else (id(row),) for row in (*report.rows, *report.outcomes)})
    sources = {row.source for row in (*report.rows, *report.outcomes)}
    yield f"MEASURED AGAINST PREDICTED: {_some(runs, 'run')} of {_some(len(sources), 'source')}"
    meant = (
        "error |predicted / measured - 1|, bias its median with its sign (speed as time: + is too slow), "
        f"inside: share of measured values within their {100 * report.level:g} % interval"
    )
    for said in (meant, report.how):
        yield from textwrap.wrap(said, width, initial_indent="  ", subsequent_indent="  ")
    if report.rows:
        yield ""
        yield f"{'':<{_NAME}}{_HEAD}"
        yield from (f"{s.name:<{_NAME}}{_cells(s)}" for s in report.overall)
    for o in report.by_outcome:
        said, wrong = ("ran", "as not fitting") if o.measured == "ok" else ("out of memory", "as fitting")
        missed = f"{o.runs - o.right} predicted {wrong}, {o.close} of them within the interval"
        head = f"{said:<{_NAME}}{o.runs:>6}  "
        yield from textwrap.wrap(missed, width, initial_indent=head, subsequent_indent=" " * len(head))
    for key in GROUPS:
        yield from _group_text(report, key, width)
    yield from _worst_text(report.worst(worst), width)
    yield from _refused_text(report, width)


def _group_text(report: Report, key: str, width: int) -> Iterable[str]:
    """Speed and memory beside each other where there is room, else below each other."""
    found: dict[str, dict[str, Summary]] = {}
    for s in report.by(key):
        found.setdefault(s.name, {})[s.figure] = s
    figures = [f for f in ("speed", "memory") if any(f in of for of in found.values())]
    if len(found) < 2 or not figures:
        return
    together = [figures] if _NAME + len(_HEAD) * len(figures) <= width else [[figure] for figure in figures]
    for beside in together:
        yield ""
        yield f"{f'BY {key.upper()}':<{_NAME}}" + "".join(f"{figure:>{len(_HEAD)}}" for figure in beside)
        yield f"{'':<{_NAME}}" + _HEAD * len(beside)
        for name, of in found.items():
            cells = "".join(_cells(of[figure]) if figure in of else " " * len(_HEAD) for figure in beside)
            if cells.strip():
                yield f"{_short(name, _NAME - 1):<{_NAME}}{cells}".rstrip()


def _cells(s: Summary) -> str:
    inside = f"{100 * s.coverage:.0f} %"
    return f"{s.runs:>6}{_percent(s.median_error):>8}{_percent(s.mean_error):>8}{_percent(s.bias):>8}{inside:>8}"


def _worst_text(rows: Sequence[Row], width: int) -> Iterable[str]:
    if not rows:
        return
    yield ""
    yield f"{'FARTHEST OFF':<{_NAME}}{'':8}{'measured':>10}{'predicted':>10}  {'':9}{'error':>8}"
    for row in rows:
        figures = f"{row.measured:>10.4g}{row.predicted:>10.4g}  {UNITS[row.figure]:<9}{_percent(row.error):>8}"
        about = f"{row.model}, {row.num_gpus} x {row.gpu}, {row.method}"
        line = f"{_short(row.id or row.source, _NAME - 1):<{_NAME}}{row.figure:<8}{figures}"
        if width < WIDTH:
            yield from (line, f"    {_short(about, width - 4)}")
        else:
            yield f"{line}  {_short(about, width - len(line) - 2)}"


def _refused_text(report: Report, width: int) -> Iterable[str]:
    if not report.refused:
        return
    yield ""
    yield f"WITHOUT A PREDICTION: {_some(len(report.refused), 'run')}"
    counts = Counter(r.reason for r in report.refused)
    for reason, count in counts.most_common(REASONS):
        yield f"  {count:>4}  {_short(reason, width - 8)}"
    if len(counts) > REASONS:
        yield f"  {sum(n for _, n in counts.most_common()[REASONS:]):>4}  for {len(counts) - REASONS} other reasons"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 1 else f"{100 * share:.0f} %"


def _short(text: str, size: int) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= size else f"{text[: size - 2]}.."


def _some(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------------- plot
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
_MARKERS: Final = "os^Dv<>PXphd8"
"""As many as have no divisor in common with the colours, so that the pairs repeat late."""


def _plot(report: Report, path: str | Path | None) -> Any:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'moecost[plot]'") from None
    figures = [figure for figure in UNITS if any(row.figure == figure for row in report.rows)]
    if not figures:
        raise InvalidInputError("no run could be compared, so there is nothing to plot")
    sources = [name for name, _ in Counter(row.source for row in report.rows).most_common()]
    style = {name: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(sources)}
    canvas = Canvas(figsize=(4.6 * len(figures) + 2.2, 4.8), layout="constrained")
    for i, figure in enumerate(figures):
        axes = canvas.add_subplot(1, len(figures), i + 1)
        _panel(axes, figure, [row for row in report.rows if row.figure == figure], style)
    handles: dict[str, Any] = {}
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = sorted(handles, key=[*sources, *handles].index)
    canvas.legend([handles[n] for n in shown], shown, loc="outside right upper", frameon=False, fontsize=8)
    if path is not None:
        try:
            canvas.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"{path}: the plot cannot be written: {error}") from None
    return canvas


def _panel(axes: Any, figure: str, rows: Sequence[Row], style: Mapping[str, tuple[str, str]]) -> None:
    values = [v for row in rows for v in (row.measured, row.predicted)]
    ends = [min(values) / 1.5, max(values) * 1.5]
    axes.fill_between(ends, [v / BAND for v in ends], [v * BAND for v in ends], color="0.88", lw=0,
                      label=f"within a factor {BAND:g}")  # fmt: skip
    axes.plot(ends, ends, color="0.5", lw=0.8)
    for name, (colour, marker) in style.items():
        of = [row for row in rows if row.source == name]
        if of:
            axes.scatter([row.measured for row in of], [row.predicted for row in of], s=18, marker=marker,
                         facecolor=colour, edgecolor="white", linewidth=0.4, alpha=0.85, label=name)  # fmt: skip
    said = Summary.of("", rows[0].figure, rows)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel=f"measured [{UNITS[figure]}]",
             ylabel=f"predicted [{UNITS[figure]}]")  # fmt: skip
    axes.set_title(f"{figure}: {_some(said.runs, 'run')}, median error {_percent(said.median_error)}", fontsize=10)
