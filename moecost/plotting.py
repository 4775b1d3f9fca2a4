"""Pictures of results, drawn by Matplotlib (extra `[plot]`), which is imported when the first one is drawn.

Every function takes the axes to draw on (`ax=None`: a new figure) and returns them; none shows, saves or changes a
global setting. Colours are Okabe and Ito's; lightness, hatches, markers or labels tell the same without colour.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moecost.cost import pareto_front
from moecost.errors import InvalidInputError, UnsupportedError, close_matches
from moecost.report import COLOURS, HATCHES, LEVEL, OTHER_COLOUR, percent, printable, seconds, significant
from moecost.results import Estimate
from moecost.units import GB, TERA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORWARD, BACKWARD, DARK, LIGHT, ALARM = "#56B4E9", "#0072B2", "#444444", "#BBBBBB", "#D55E00"
SERIES: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS: Final = "os^Dv<>P"
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Of lines and points, in turn: their numbers have no common divisor, so that no two of 280 lines look alike."""
MOST_LINES: Final = 40
"""More than this no one can read."""
WIDE: Final = 20.0
"""An axis whose numbers span more than this factor is logarithmic."""
SMALL: Final = 8
"""Size of labels inside of a picture. [pt]"""
TITLE_PAD: Final = 16
"""Between a picture and its title, where a label may stand. [pt]"""
LABEL_WIDTH: Final = 32
"""Longest label of a point, line or bar. [character]"""

LAYER_COLOURS: Final[Mapping[str, str]] = {**COLOURS, "optimizer": DARK, "other": LIGHT}
"""Of the time of a step, where the optimizer stands beside the layer kinds."""
LAYERS: Final = ("moe", "mlp", "attention", "mamba", "norm", "embedding", "head", "optimizer", "other")
PARTS: Final = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers",
                "allocator slack", "framework context")  # fmt: skip
"""Order in which layer kinds and parts of the memory are stacked."""


class Columns(Protocol):
    """Named columns of equal length: a sweep, a data frame, a dict of arrays."""

    def __getitem__(self, name: str, /) -> Any: ...


# ------------------------------------------------------------------------------------------------- one estimate
def overview(estimate: Estimate, ax: Sequence[Axes] | None = None) -> Figure:
    """Where the time of a step and the memory go, side by side; see `time_bars` and `memory_bars`.

    Parameters
    ----------
    ax : two axes, as `plt.subplots(1, 2)` gives them; None: a new figure.
    """
    if ax is None:
        figure = _pyplot().figure(figsize=(10, 3.6), layout="constrained")
        ax = figure.subplots(1, 2)
    try:
        left, right = ax
    except (TypeError, ValueError):
        raise InvalidInputError("ax must be two axes, as plt.subplots(1, 2) gives them") from None
    time_bars(estimate, left)
    memory_bars(estimate, right)
    return _figure(left)


def time_bars(estimate: Estimate, ax: Axes | None = None) -> Axes:
    """Seconds of a step by layer kind, forward and backward apart, with the optimizer and what else there is."""
    ax = _axes(ax, 6, 3.6)
    step = estimate.step
    rows = [(name, t.forward, t.seconds - t.forward) for name, t in step.by_layer.items() if t.seconds > 0]
    rows.sort(key=lambda row: -row[1] - row[2])
    rows += [(name, 0.0, s) for name, s in (("optimizer", step.optimizer), ("other", step.other)) if s > 0]
    names = [row[0] for row in rows]
    whole = max((f + b for _, f, b in rows), default=1.0)
    for i, (name, forward, backward) in enumerate(rows):
        late = LAYER_COLOURS[name] if name in ("optimizer", "other") else BACKWARD
        ax.barh(i, forward, color=FORWARD, height=0.7)
        ax.barh(i, backward, left=forward, color=late, height=0.7)
        said = f"{seconds(forward + backward)}, {percent(_share(forward + backward, step.seconds))}"
        ax.text(forward + backward + 0.01 * whole, i, said, va="center", fontsize=SMALL)
    _rows(ax, names)
    ax.set_xlim(0, 1.35 * whole)
    ax.set_xlabel("seconds of a step")
    ax.set_title(f"time: {seconds(step.seconds)} a step, most of it bound by {estimate.bound}", fontsize=10, loc="left",
                 pad=TITLE_PAD)  # fmt: skip
    back = "backward, with recompute" if step.recompute else "backward"
    ax.legend(
        handles=[_patch(FORWARD, "forward"), _patch(BACKWARD, back)], loc="lower right", frameon=False, fontsize=SMALL
    )
    return ax


def memory_bars(estimate: Estimate, ax: Axes | None = None) -> Axes:
    """Parts of the memory at its peak, each beginning where the last ends, against what the GPU has. [GiB]

    The thin line of the sum is its 80 % interval.
    """
    ax = _axes(ax, 6, 3.6)
    m = estimate.memory
    parts = _memory_parts(estimate)
    low, high = estimate.interval("memory.device_gib", LEVEL)
    end = 1.2 * max(m.usable_gib, m.device_gib, high)
    start = 0.0
    for i, (name, size) in enumerate(parts.items()):
        ax.barh(i, size, left=start, height=0.7, **_filling(name, COLOURS))
        start += size
        ax.text(start + 0.01 * end, i, significant(size), va="center", fontsize=SMALL, bbox=_PLATE, zorder=3)
    row = len(parts)
    ax.barh(row, m.device_gib, color=LIGHT if estimate.fits else ALARM, height=0.7)
    ax.plot([low, high], [row, row], color="black", lw=1.2, marker="|", markersize=8)
    ax.text(high + 0.02 * end, row, significant(m.device_gib), va="center", fontsize=SMALL, fontweight="bold")
    ax.axvline(m.usable_gib, color="black", lw=1.2, ls="--", zorder=2)
    _rows(ax, [*parts, "sum"])
    ax.annotate(
        f"usable {significant(m.usable_gib)}", (m.usable_gib, ax.get_ylim()[1]), xytext=(0, 3),
        textcoords="offset points", ha="center", va="bottom", fontsize=SMALL,
    )  # fmt: skip
    ax.set_xlim(0, end)
    ax.set_xlabel("GiB")
    verdict = "fits" if estimate.fits else "does NOT fit"
    ax.set_title(f"memory: {significant(m.device_gib)} GiB, {verdict}", fontsize=10, loc="left", pad=TITLE_PAD)
    return ax


def roofline(estimate: Estimate, ax: Axes | None = None) -> Axes:
    """Kernels of a step under the roof of the GPU: FLOP/s they reach against FLOPs a byte, both logarithmic.

    The area of a point is its share of GPU time. Kernels without FLOPs (copies, norms, 4-bit expansion) have no place
    on these axes; the picture says how much of the time they take.

    Notes
    -----
    Source: Williams et al. (2009), doi:10.1145/1498765.1498785.
    """
    ax = _axes(ax, 7, 4.6)
    points = _kernel_points(estimate)
    peak, rate = estimate.roof.peak_flops_per_s / TERA, estimate.roof.bytes_per_s / TERA
    ridge = peak / rate
    left = min(ridge / 20, *(p.intensity / 2 for p in points))
    right = max(ridge * 20, *(p.intensity * 3 for p in points))
    ax.set(
        xscale="log", yscale="log", xlim=(left, right), ylim=(min(peak / 100, *(p.rate / 2 for p in points)), 3 * peak)
    )
    ax.plot([left, ridge, right], [left * rate, peak, peak], color="black", lw=1.5, zorder=1)
    for i, layer in enumerate(dict.fromkeys(p.layer for p in points)):
        of = [p for p in points if p.layer == layer]
        ax.scatter(
            [p.intensity for p in of], [p.rate for p in of], s=[18 + 400 * p.share for p in of], label=layer,
            marker=MARKERS[i % len(MARKERS)], color=LAYER_COLOURS.get(layer, OTHER_COLOUR), edgecolor="black",
            linewidth=0.5, alpha=0.85, zorder=2,
        )  # fmt: skip
    ax.set_xlabel("arithmetic intensity [FLOP/byte]")
    ax.set_ylabel("rate reached [TFLOP/s]")
    bare = percent(max(1 - sum(p.share for p in points), 0.0))
    title = f"{_cut(estimate.model)} on {_cut(estimate.gpu)}; kernels without FLOPs take {bare} of GPU time"
    ax.set_title(title, fontsize=9, loc="left")
    legend = ax.legend(loc="lower right", frameon=False, fontsize=SMALL, title="area: share of GPU time")
    legend.get_title().set_fontsize(SMALL)
    for handle in legend.legend_handles:
        handle.set_sizes([30])  # type: ignore[union-attr]
    for axis in (ax.xaxis, ax.yaxis):
        _plain_ticks(axis)
    _roof_labels(ax, ridge=ridge, peak=peak, rate=rate)
    along = np.geomspace(left, right, 80)
    roof = list(zip(along, np.minimum(along * rate, peak), strict=True))
    large = sorted(points, key=lambda p: -p.share)[:LABELLED]
    named = [(p.intensity, p.rate, f"{_cut(p.name)} {percent(p.share)}") for p in large]
    _label_points(ax, named, [*((p.intensity, p.rate) for p in points), *roof])
    return ax


LABELLED: Final = 8
"""Kernels of a roofline that have their name beside them."""
SAME_POINT: Final = 0.02
"""Kernels of one layer kind whose logarithms are as near as this are one point."""


@dataclass(frozen=True)
class _Point:
    """A kernel on the roofline, or several that stand on each other."""

    name: str
    intensity: float
    """[FLOP/byte]"""
    rate: float
    """[TFLOP/s]"""
    share: float
    """Of GPU time."""
    layer: str

    def near(self, other: _Point) -> bool:
        apart = (math.log(self.intensity / other.intensity), math.log(self.rate / other.rate))
        return self.layer == other.layer and max(map(abs, apart)) < SAME_POINT

    def with_(self, other: _Point) -> _Point:
        first, last = self.name.split(", ")[0].split("."), other.name.split(".")
        short = ".".join(last[1:] if first[0] == last[0] and len(last) > 1 else last)
        return replace(self, name=f"{self.name}, {short}", share=self.share + other.share)


def _kernel_points(estimate: Estimate) -> list[_Point]:
    """Kernels that have FLOPs; those that would cover each other are put together."""
    kernels = estimate.step.by_kernel
    total = sum(k.seconds for k in kernels.values())
    points: list[_Point] = []
    for name, k in kernels.items():
        if not (k.flops > 0 and k.bytes > 0 and k.seconds > 0):
            continue
        new = _Point(name, k.flops / k.bytes, k.flops / k.seconds / TERA, k.seconds / total, _layer_of(name))
        same = next((i for i, point in enumerate(points) if point.near(new)), None)
        if same is None:
            points.append(new)
        else:
            points[same] = points[same].with_(new)
    if not points:
        raise InvalidInputError("no kernel of this estimate has FLOPs and bytes, so there is nothing to draw")
    return points


def _roof_labels(ax: Axes, *, ridge: float, peak: float, rate: float) -> None:
    """What the roofs are; rates in TFLOP/s and TB/s."""
    (left, right), (bottom, _) = ax.get_xlim(), ax.get_ylim()
    ax.text(right / 1.1, peak * 1.12, f"{significant(peak)} TFLOP/s", ha="right", va="bottom", fontsize=SMALL)
    lowest = max(left, bottom / rate)
    at = math.sqrt(lowest * ridge)
    ax.text(
        at, at * rate * 1.25, f"{significant(rate * TERA / GB)} GB/s", rotation=_slope(ax), rotation_mode="anchor",
        ha="center", va="bottom", fontsize=SMALL,
    )  # fmt: skip
    ax.axvline(ridge, color="0.6", lw=0.8, ls=":", zorder=0)
    ax.text(ridge * 1.05, bottom * 1.2, f"ridge point {significant(ridge)}", fontsize=SMALL, color="0.35", rotation=90)


def _slope(ax: Axes) -> float:
    """Angle on paper of a line of slope 1 in logarithmic axes. [degree]"""
    _figure(ax).draw_without_rendering()
    (x0, x1), (y0, y1) = ax.get_xlim(), ax.get_ylim()
    box = ax.get_window_extent()
    return math.degrees(math.atan2(box.height / math.log(y1 / y0), box.width / math.log(x1 / x0)))


def _layer_of(kernel: str) -> str:
    """Layer kind that a kernel's name tells."""
    first = kernel.split(".")[0]
    return "moe" if first in ("expert", "router", "topk", "shared") else first


# --------------------------------------------------------------------------------------------- several estimates
def shares(
    estimates: Sequence[Estimate],
    labels: Sequence[object],
    of: Literal["time", "memory"] = "time",
    ax: Axes | None = None,
) -> Axes:
    """Stacked shares of the time of a step, or of the memory on the device, a bar an estimate.

    >>> shares([], [], of="cost")
    Traceback (most recent call last):
    moecost.errors.InvalidInputError: of='cost' must be time or memory
    """
    if of not in ("time", "memory"):
        raise InvalidInputError(f"of={of!r:.80} must be time or memory")
    if not estimates or len(estimates) != len(labels):
        raise InvalidInputError(f"{len(estimates)} estimates and {len(labels)} labels; give one label an estimate")
    ax = _axes(ax, 1.6 + 0.9 * len(estimates), 3.8)
    tables = [_time_parts(e) if of == "time" else _memory_parts(e) for e in estimates]
    colours = LAYER_COLOURS if of == "time" else COLOURS
    order = [name for name in (LAYERS if of == "time" else PARTS) if any(name in table for table in tables)]
    order += [name for name in dict.fromkeys(n for t in tables for n in t) if name not in order]
    below = np.zeros(len(estimates))
    for name in order:
        sizes = np.array([100 * _share(table.get(name, 0.0), sum(table.values())) for table in tables])
        style = _filling(name, colours)
        ax.bar(range(len(sizes)), sizes, bottom=below, width=0.8, label=name, **style)
        for i, size in enumerate(sizes):
            if size >= 9:
                ax.text(i, below[i] + size / 2, f"{size:.0f}", ha="center", va="center", fontsize=SMALL, bbox=_PLATE)
        below += sizes
    _word_ticks(ax, [str(label) for label in labels])
    ax.set_ylim(0, 100)
    ax.set_ylabel("share of the time of a step [%]" if of == "time" else "share of the memory [%]")
    handles, names = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=SMALL, frameon=False
    )  # as they are stacked
    _plain(ax)
    return ax


def pareto(
    estimates: Iterable[Estimate] | None = None,
    *,
    hours: ArrayLike | None = None,
    cost_usd: ArrayLike | None = None,
    labels: Sequence[object] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Time against cost, and the front of those that nothing beats in both.

    Parameters
    ----------
    estimates : those to compare; or else `hours` and `cost_usd` as arrays.
    labels : one a point, "" for none; GPUs of the estimates where nothing is said. Points of the front are labelled,
        and all where they are few.

    Notes
    -----
    Points without a price or time, and estimates that do not fit, are counted in the title and not drawn.
    """
    if (estimates is None) == (hours is None or cost_usd is None):
        raise InvalidInputError("give estimates, or hours and cost_usd")
    given = None if estimates is None else list(estimates)
    if given is not None:
        hours, cost_usd = [e.hours for e in given], [e.cost_usd if e.fits else math.nan for e in given]
        labels = [f"{e.num_gpus} x {e.gpu}" for e in given] if labels is None else labels
    x, y = np.ravel(np.asarray(hours, dtype=float)), np.ravel(np.asarray(cost_usd, dtype=float))
    if len(x) != len(y) or (labels is not None and len(labels) != len(x)):
        raise InvalidInputError(
            f"{len(x)} hours, {len(y)} costs" + ("" if labels is None else f", {len(labels)} labels") + ": one each"
        )
    there = np.isfinite(x) & np.isfinite(y)
    if not there.any():
        raise InvalidInputError("no point has both a time and a cost, so there is nothing to draw")
    names = [_cut(str(label)) for label in labels] if labels is not None else None
    return _draw_pareto(_axes(ax, 6.4, 4.2), x, y, there, names)


FEW: Final = 14
"""So many points are all labelled."""


def _draw_pareto(
    ax: Axes, x: NDArray[np.float64], y: NDArray[np.float64], there: NDArray[np.bool_], names: Sequence[str] | None
) -> Axes:
    front = pareto_front(hours=x, cost_usd=y)
    beaten = there & ~front
    order = np.argsort(x[front], kind="stable")
    ax.set(xlabel="time of the run [h]", ylabel="cost of the run [$]")
    _scale(ax, x[there], y[there])
    ax.scatter(x[beaten], y[beaten], s=22, facecolor="white", edgecolor=DARK, marker="o", label="beaten by another")
    ax.plot(x[front][order], y[front][order], drawstyle="steps-post", color=BACKWARD, lw=1.2, zorder=1)
    ax.scatter(x[front], y[front], s=42, color=BACKWARD, marker="D", label="front", zorder=2)
    ax.margins(0.12)
    ax.legend(loc="best", frameon=False, fontsize=SMALL)
    if names is not None:
        few = there.sum() <= FEW
        obstacles = [*zip(x[there], y[there], strict=True), *_along_steps(ax, x[front][order], y[front][order])]
        shown = [(x[i], y[i], names[i]) for i in range(len(x)) if there[i] and (few or front[i]) and names[i]]
        _label_points(ax, sorted(shown, key=lambda p: p[0]), obstacles)
    if not there.all():
        ax.set_title(f"{int((~there).sum())} of {len(x)} do not fit or have no price", fontsize=9, loc="left")
    return ax


def _along_steps(ax: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """Points along the front, which labels should not cover, as near as letters."""
    inverse = ax.transData.inverted()
    corners = [corner for i in range(len(x) - 1) for corner in ((x[i], y[i]), (x[i + 1], y[i]))]
    corners += [(x[-1], y[-1])] if len(x) else []
    on_paper = np.array([ax.transData.transform(corner) for corner in corners])
    for a, b in itertools.pairwise(on_paper):
        for share in np.linspace(0, 1, 2 + int(np.hypot(*(b - a)) / 6)):
            px, py = inverse.transform(a + share * (b - a))
            yield float(px), float(py)


_LABELS: Final = {
    "cost_usd": "cost of the run [$]",
    "hours": "time of the run [h]",
    "gpu_hours": "GPU-hours of the run",
    "queries_per_second": "queries a second",
    "tokens_per_second": "tokens a second",
    "padded_tokens_per_second": "tokens a second, padding included",
    "step_seconds": "step [s]",
    "usd_per_gpu_hour": "price [$/GPU-hour]",
    "micro_batch_size": "micro-batch [sequence]",
    "max_micro_batch_size": "largest micro-batch [sequence]",
    "global_batch_size": "global batch [sequence]",
    "sequence_length": "sequence length [token]",
    "num_gpus": "GPUs",
    "lora_rank": "rank of the adapters",
}
"""Axis labels of common columns."""


def lines(columns: Columns, *, x: str, y: str, by: str | Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """One column against another, a line for each value of a third.

    Parameters
    ----------
    columns : a sweep, a data frame or a dict of arrays of one length.
    x, y : names of columns; `y` holds numbers. Text on `x` stands in the order it comes.
    by : name, or names, of the columns that tell lines apart.

    Raises
    ------
    InvalidInputError : a column does not exist, or two rows of a line have the same `x`.

    Notes
    -----
    A row where `y` is NaN (it does not fit) leaves a gap.
    """
    groups = [by] if isinstance(by, str) else list(by or ())
    along, up = _column(columns, x), _numbers(columns, y)
    kinds = [_column(columns, name) for name in groups]
    lengths = {len(c) for c in (along, up, *kinds)}
    if len(lengths) > 1 or not len(up):
        raise InvalidInputError(f"columns {', '.join([x, y, *groups])} have {sorted(lengths)} rows; one length, not 0")
    of_line: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(up)):
        of_line.setdefault(tuple(_text(kind[i]) for kind in kinds), []).append(i)
    if len(of_line) > MOST_LINES:
        raise InvalidInputError(f"by={by!r:.80} makes {len(of_line)} lines, more than {MOST_LINES}; narrow the columns")
    ax = _axes(ax, 6.4, 4.0)
    places, ticks = _places(along)
    for n, (names, rows) in enumerate(of_line.items()):
        _line(ax, n, names, places[rows], up[rows], x_name=x)
    _finish_lines(ax, x=x, y=y, ticks=ticks, places=places, values=up, title=", ".join(map(_plain_words, groups)))
    return ax


def _line(
    ax: Axes, n: int, names: Sequence[str], x: NDArray[np.float64], y: NDArray[np.float64], *, x_name: str
) -> None:
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if (np.diff(x) == 0).any():
        where = f" of the line {', '.join(names)}" if names else ""
        raise InvalidInputError(
            f"x={x_name!r}: several rows{where} have the same {x_name}; name what tells them apart in by=, or narrow "
            "the columns"
        )
    ax.plot(
        x, y, label=_cut(", ".join(names)) or None, color=SERIES[n % len(SERIES)], marker=MARKERS[n % len(MARKERS)],
        ls=DASHES[n % len(DASHES)], lw=1.5, markersize=4.5,
    )  # fmt: skip


def _finish_lines(
    ax: Axes, *, x: str, y: str, ticks: Sequence[str] | None, places: NDArray[np.float64], values: NDArray[np.float64],
    title: str,
) -> None:  # fmt: skip
    if ticks is not None:
        _word_ticks(ax, ticks)
    _scale(ax, places if ticks is None else np.ones(1), values)
    if ticks is None and ax.get_xscale() == "log" and len(np.unique(places)) <= 12:
        found = np.unique(places)
        ax.set_xticks(found, [f"{v:g}" for v in found], fontsize=SMALL)
        ax.minorticks_off()
    ax.set_xlabel(_LABELS.get(x, _plain_words(x)))
    ax.set_ylabel(_LABELS.get(y, _plain_words(y)))
    _plain(ax)
    if not title:
        return
    handles, names = ax.get_legend_handles_labels()
    last = [_last(handle) for handle in handles]
    order = sorted(range(len(handles)), key=lambda i: -last[i])  # as the lines end
    legend = ax.legend(
        [handles[i] for i in order], [names[i] for i in order], title=title, loc="center left",
        bbox_to_anchor=(1.0, 0.5), fontsize=SMALL, frameon=False, handlelength=3.2,
    )  # fmt: skip
    legend.get_title().set_fontsize(SMALL)


def _last(line: Any) -> float:
    """Height at which a line ends."""
    found = np.asarray(line.get_ydata(), dtype=float)
    found = found[np.isfinite(found)]
    return float(found[-1]) if len(found) else -math.inf


def _column(columns: Columns, name: str) -> NDArray[Any]:
    known = [str(n) for n in getattr(columns, "columns", columns if isinstance(columns, Mapping) else ())]
    try:
        return np.asarray(columns[name])
    except (KeyError, IndexError, TypeError, ValueError):
        near = close_matches(str(name), known) or known
        raise InvalidInputError(f"no column {name!r:.80}; did you mean {', '.join(near[:12])}?") from None


def _numbers(columns: Columns, name: str) -> NDArray[np.float64]:
    found = _column(columns, name)
    try:
        return found.astype(float)
    except (TypeError, ValueError):
        raise InvalidInputError(f"y={name!r}: the column holds no numbers") from None


def _places(values: NDArray[Any]) -> tuple[NDArray[np.float64], list[str] | None]:
    """Where values stand on an axis, and the words below where they are no numbers."""
    if values.dtype.kind in "iuf":
        return values.astype(float), None
    words = [_text(v) for v in values]
    seen = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return np.array([float(seen[word]) for word in words]), list(seen)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | np.floating) else str(value)


# -------------------------------------------------------------------------------------------------------- pieces
_PLATE: Final = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
"""Behind words on a hatch."""


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise UnsupportedError("plots need matplotlib: pip install 'moecost[plot]'") from None
    return plt


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    """The axes given, or those of a new figure; sizes in inches."""
    plt = _pyplot()
    if ax is None:
        figure = plt.figure(figsize=(width, height), layout="constrained")
        ax = figure.add_subplot()
    if not hasattr(ax, "barh"):
        raise InvalidInputError(f"ax={ax!r:.80} is not Matplotlib axes; plt.subplots() makes some")
    _plain(ax)
    return ax


def _figure(ax: Axes) -> Figure:
    found: Any = ax.figure.canvas.figure  # of axes inside a subfigure too
    return found  # type: ignore[no-any-return]


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL)


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Names of horizontal bars, the first on top."""
    ax.set_yticks(range(len(names)), [_cut(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def _filling(name: str, colours: Mapping[str, str]) -> dict[str, Any]:
    return {"color": colours.get(name, OTHER_COLOUR), "hatch": HATCHES.get(name, ""), "edgecolor": "white",
            "linewidth": 0.5}  # fmt: skip


def _time_parts(e: Estimate) -> dict[str, float]:
    """Seconds of a step: layer kinds, optimizer, the rest."""
    parts = {name: t.seconds for name, t in e.step.by_layer.items()}
    return {name: s for name, s in (parts | {"optimizer": e.step.optimizer, "other": e.step.other}).items() if s > 0}


def _memory_parts(e: Estimate) -> dict[str, float]:
    """Parts of what the driver shows, largest tensors first. [GiB]"""
    m = e.memory
    beside = {"allocator slack": m.reserved_gib - m.allocated_gib, "framework context": m.device_gib - m.reserved_gib}
    return {name: size for name, size in (m.parts | beside).items() if size > 0}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _scale(ax: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Logarithmic where numbers are positive and far apart."""
    for values, scale, axis in ((x, ax.set_xscale, ax.xaxis), (y, ax.set_yscale, ax.yaxis)):
        found = values[np.isfinite(values)]
        if len(found) and found.min() > 0 and found.max() > WIDE * found.min():
            scale("log")
            _plain_ticks(axis)


def _plain_ticks(axis: Axis) -> None:
    """Of a logarithmic axis: 1, 2, 5, 10, ... in plain figures, or powers of ten where those are too many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low) if low > 0 else 1.0
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _word_ticks(ax: Axes, words: Sequence[str]) -> None:
    """Words below an axis, slanted where they would touch each other."""
    slanted = max(map(len, words)) > 10 and len(words) > 2
    ax.set_xticks(range(len(words)), [_cut(word) for word in words], fontsize=SMALL)
    if slanted:
        ax.tick_params(axis="x", labelrotation=25)
        for label in ax.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _cut(text: str) -> str:
    """A label of bearable length; dollar signs are text, not mathematics."""
    text = printable(text)
    text = text if len(text) <= LABEL_WIDTH else text[: LABEL_WIDTH - 3] + "..."
    return text.replace("$", r"\$")


def _plain_words(name: str) -> str:
    return _cut(name.replace("_", " ").replace(".", " "))


def _offsets() -> Iterator[tuple[float, float, str, str]]:
    """Places of a label around its point, the nearest first: (right, up) in points, and how the text stands there."""
    yield from ((7, 0, "left", "center"), (-7, 0, "right", "center"), (0, 8, "center", "bottom"),
                (0, -8, "center", "top"))  # fmt: skip
    for distance in (12, 22, 34, 48, 64, 82, 102):
        for degrees in (45, -45, 135, -135, 20, -20, 160, -160, 70, -70, 110, -110):
            right, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            ha, va = "left" if right > 0 else "right", "bottom" if up > 0 else "top"
            yield distance * right, distance * up, ha, va


LEADER: Final = 15.0
"""From here on a line joins a label to its point. [pt]"""


def _label_points(
    ax: Axes, points: Sequence[tuple[float, float, str]], obstacles: Sequence[tuple[float, float]] = ()
) -> None:
    """Names beside points, each at the nearest place where it covers no other, no point and no word of the picture."""
    from matplotlib.transforms import Bbox

    _figure(ax).draw_without_rendering()  # so that the layout stands
    size = 3 * _figure(ax).dpi / 72
    inside = ax.get_window_extent()
    there = [ax.transData.transform((x, y)) for x, y in (*(p[:2] for p in points), *obstacles)]
    taken = [Bbox.from_bounds(px - size, py - size, 2 * size, 2 * size) for px, py in there]
    legend = ax.get_legend()
    taken += [item.get_window_extent() for item in (*ax.texts, *([legend] if legend else []))]
    for x, y, text in points:
        label = ax.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=SMALL, zorder=3)
        best, least = (0.0, 0.0, "left", "bottom"), math.inf
        for place in _offsets():
            label.set(position=place[:2], ha=place[2], va=place[3])
            box = label.get_window_extent()
            covered = sum(box.overlaps(other) for other in taken)
            outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
            if covered + 2 * outside < least:
                best, least = place, covered + 2 * outside
            if not least:
                break
        right, up, ha, va = best
        label.remove()
        leader = {"arrowstyle": "-", "color": "0.5", "lw": 0.6} if math.hypot(right, up) > LEADER else None
        label = ax.annotate(
            text, (x, y), xytext=(right, up), textcoords="offset points", fontsize=SMALL, zorder=3, ha=ha, va=va,
            arrowprops=leader,
        )  # fmt: skip
        taken.append(label.get_window_extent())
