"""An `Estimate` for people, as plain text and as HTML. Both show the same sections; rounding happens here alone."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from moecost.results import Estimate, Memory

WIDTH: Final = 100
"""Columns of the text."""
MIN_WIDTH: Final = 60
LEVEL: Final = 0.8
"""Probability of the intervals shown."""
KERNELS_SHOWN: Final = 5

NOT_KNOWN: Final = "not known"


# ------------------------------------------------------------------------------------------------------- figures
def significant(value: float) -> str:
    """A figure rounded to three significant digits.

    >>> significant(0.78951), significant(34810.2), significant(float("nan"))
    ('0.790', '34,800', 'not known')
    """
    if math.isnan(value):
        return NOT_KNOWN
    if math.isinf(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    if not 1e-3 <= abs(rounded) < 1e12:
        return f"{value:.2e}"
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def counted(number: float) -> str:
    """A large count with its unit; below a million exact.

    >>> counted(46_702_792_704), counted(13_921)
    ('46.7 B', '13,921')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{significant(number / size)} {unit}"
    return f"{number:,.0f}"


def seconds(value: float) -> str:
    """A time in the unit that suits it.

    >>> seconds(3.9886), seconds(0.0451487)
    ('3.99 s', '45.1 ms')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value / 1e-6)} us" if value > 0 else f"{significant(value)} s"


def percent(share: float) -> str:
    """A share in percent; what is too small to matter without its digits.

    >>> percent(0.0123), percent(2e-6)
    ('1.23 %', '<0.01 %')
    """
    if 0 < share < 1e-4:
        return "<0.01 %"
    return f"{significant(100 * share)} %"


def chance(probability: float) -> str:
    """A probability in whole percent, never certain.

    >>> chance(0.572), chance(0.9999), chance(0.001)
    ('57 %', '>99 %', '<1 %')
    """
    if 0.01 <= probability <= 0.99:
        return f"{100 * probability:.0f} %"
    return ">99 %" if probability > 0.5 else "<1 %"


def dollars(value: float) -> str:
    return NOT_KNOWN if math.isnan(value) else f"${significant(value)}"


def price(usd_per_gpu_hour: float) -> str:
    """A price as it is quoted: in cents where it is above some."""
    if usd_per_gpu_hour >= 0.1:
        return f"${usd_per_gpu_hour:,.2f} a GPU-hour"
    return f"{dollars(usd_per_gpu_hour)} a GPU-hour"


def printable(text: str) -> str:
    """Text without line breaks and control characters: names come from users' files.

    >>> printable("llama\\n\\x1b[31m")
    'llama ?[31m'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


# ------------------------------------------------------------------------------------------------------ sections
Align = Literal["<", ">"]


@dataclass(frozen=True)
class Row:
    """A line of a table: its name and cells; `share` of the whole is drawn as a bar."""

    name: str
    cells: tuple[str, ...]
    share: float | None = None
    part: bool = True
    """One of the parts that make up the whole; not a subset of another row, nor a sum."""


@dataclass(frozen=True)
class Section:
    """A table, or a list of sentences, with a title."""

    title: str
    summary: str = ""
    columns: tuple[tuple[str, Align], ...] = ()
    rows: tuple[Row, ...] = ()
    sentences: tuple[str, ...] = ()


def sections(e: Estimate) -> Iterator[Section]:
    """What a report says of an estimate, in its order."""
    yield _asked(e)
    yield _answers(e)
    yield _stages(e)
    yield _layers(e)
    yield _memory(e.memory)
    yield _use(e)
    if e.notes:
        yield Section("Notes", sentences=e.notes)
    yield _provenance(e)


def _asked(e: Estimate) -> Section:
    trained = e.num_trainable_parameters / e.num_parameters if e.num_parameters else math.nan
    of_all = "all trained" if trained == 1 else f"{counted(e.num_trainable_parameters)} trained ({percent(trained)})"
    rows = {
        "model": f"{e.model}: {counted(e.num_parameters)} parameters, {of_all}",
        "GPU": f"{e.num_gpus} x {e.gpu}, {significant(e.memory.usable_gib)} GiB usable",
        "method": f"{e.method}, run by {e.provenance.software}",
        "data": f"{e.dataset or 'queries of one length'}: {_number(e.num_queries, 'query', 'queries')} of at most "
        f"{e.sequence_length:,} tokens x {_number(e.epochs, 'epoch', 'epochs')}",
        "batch": f"{_number(e.micro_batch_size, 'sequence', 'sequences')} a GPU a pass, {e.global_batch_size:,} a step",
    }
    return _facts("Asked", rows)


def _answers(e: Estimate) -> Section:
    m = e.memory
    cost = "no price known" if math.isnan(e.cost_usd) else f"{significant(e.gpu_hours)} GPU-hours at "
    cost += "" if math.isnan(e.cost_usd) else price(e.usd_per_gpu_hour)
    need = f"{significant(m.device_gib)} of {significant(m.usable_gib)} GiB"
    tokens = f"{significant(e.tokens_per_second)} tokens/s, {significant(e.padded_tokens_per_second)} with padding"
    rows = (
        Row(
            "fits",
            (
                f"{'yes' if e.fits else 'NO'} ({chance(e.fits_probability)})",
                spread(e, "memory.device_gib", "GiB"),
                need,
            ),
        ),
        Row("largest batch", (f"{e.max_micro_batch_size:,}", "", "sequences a GPU a pass")),
        Row("queries/s", (significant(e.queries_per_second), spread(e, "queries_per_second"), tokens)),
        Row("hours", (significant(e.hours), spread(e, "hours"), _run(e))),
        Row("dollars", (dollars(e.cost_usd), spread(e, "cost_usd"), cost)),
    )
    return Section("Answer", "", (("", ">"), (f"{100 * LEVEL:.0f} % interval", "<"), ("", "<")), rows)


def spread(e: Estimate, field: str, unit: str = "") -> str:
    """The interval of a figure in words; empty where the figure is not known."""
    low, high = e.interval(field, LEVEL)
    if math.isnan(low):
        return ""
    return f"{significant(low)} to {significant(high)} {unit}".rstrip()


def _run(e: Estimate) -> str:
    steps = f"{_number(e.steps, 'step', 'steps')} of {seconds(e.step.seconds)}"
    if e.hours >= 48:
        return f"{significant(e.hours / 24)} days: {steps}"
    return f"{significant(e.hours * 60)} minutes: {steps}" if e.hours < 1 else steps


_BOUND: Final = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "host": "the host, for which the GPU waits",
    "communication": "communication between GPUs",
}


def _stages(e: Estimate) -> Section:
    step = e.step
    waits = [
        f"{seconds(found)} ({percent(_ratio(found, step.seconds))}) wait for {what}"
        for what, found in (("the host", step.host), ("the wire", step.communication))
        if found
    ]
    rows = [_time("forward", step.forward, step.seconds), _time("backward", step.backward, step.seconds)]
    if step.recompute:
        rows.append(_time("- of it recompute", step.recompute, step.seconds, part=False))
    rows += [_time("optimizer", step.optimizer, step.seconds), _time("other", step.other, step.seconds)]
    summary = "; ".join([f"{seconds(step.seconds)}, most of it bound by {_BOUND[e.bound]}", *waits])
    return Section("Time of a step", summary, (("time", ">"), ("share", ">")), tuple(rows))


def _layers(e: Estimate) -> Section:
    step = e.step
    found = sorted(step.by_layer.items(), key=lambda item: -item[1].seconds)
    rows = [
        Row(
            name,
            (seconds(t.seconds), percent(_ratio(t.seconds, step.seconds)), f"{t.launches:,.0f}", t.bound),
            _ratio(t.seconds, step.seconds),
        )
        for name, t in found
    ]
    columns: tuple[tuple[str, Align], ...] = (("time", ">"), ("share", ">"), ("launches", ">"), ("bound by", "<"))
    return Section("Time by layer kind", _kernels(e), columns, tuple(rows))


def _kernels(e: Estimate) -> str:
    """The kernels that take the most GPU time, in one line."""
    kernels = e.step.by_kernel
    total = sum(t.seconds for t in kernels.values())
    largest = sorted(kernels.items(), key=lambda item: -item[1].seconds)[:KERNELS_SHOWN]
    if not total:
        return ""
    return "Largest kernels: " + ", ".join(f"{n} {percent(t.seconds / total)}" for n, t in largest) + " of GPU time"


def _time(name: str, value: float, whole: float, part: bool = True) -> Row:
    share = _ratio(value, whole)
    return Row(name, (seconds(value), percent(share)), share, part)


_MOMENT: Final = {
    "loss": "at the loss",
    "backward": "in the backward pass",
    "gradients": "with all gradients there",
    "optimizer": "in the optimizer step",
}


def _memory(m: Memory) -> Section:
    parts = {name: size for name, size in m.parts.items() if size}
    parts["allocator slack"] = m.reserved_gib - m.allocated_gib
    parts["framework context"] = m.device_gib - m.reserved_gib
    rows = [_gib(name, size, m.device_gib) for name, size in parts.items()]
    rows.append(_gib("all on the device", m.device_gib, m.device_gib, part=False))
    free = m.usable_gib - m.device_gib
    left = f"{significant(free)} GiB left" if free >= 0 else f"{significant(-free)} GiB too much"
    summary = f"{significant(m.device_gib)} of {significant(m.usable_gib)} GiB {_MOMENT[m.moment]}, {left}"
    return Section("Memory at its peak", summary, (("GiB", ">"), ("share", ">")), tuple(rows))


def _gib(name: str, size: float, whole: float, part: bool = True) -> Row:
    share = _ratio(size, whole)
    return Row(name, (significant(size), percent(share)), share if part else None, part)


def _use(e: Estimate) -> Section:
    rows = {
        "kernels": f"{percent(e.utilization.step.sm)} of the SMs, {percent(e.utilization.step.dram)} of the memory "
        "bandwidth (while kernels run)"
    }
    if e.experts is not None:
        x = e.experts
        rows["MoE kernels"] = (
            f"{percent(e.utilization.moe.sm)} of the SMs, {percent(e.utilization.moe.dram)} of the memory bandwidth"
        )
        rows["experts"] = (
            f"a micro-batch reaches {significant(x.touched)} of {x.num_experts} in a layer, {x.num_experts_per_tok:g} "
            f"a token; {significant(x.tokens_per_expert)} tokens each, the busiest "
            f"{significant(x.load_imbalance)} times the mean"
        )
    rows["FLOPs"] = f"MFU {percent(e.mfu)} without recompute, HFU {percent(e.hfu)} with it, of the dense peak"
    return _facts("Use of the GPU", rows)


def _provenance(e: Estimate) -> Section:
    p = e.provenance
    error = "no runs were left out to test it"
    if p.calibration_error is not None:
        error = f"mean error of left-out runs {percent(p.calibration_error)}"
    given = NOT_KNOWN if math.isnan(e.usd_per_gpu_hour) else f"{price(e.usd_per_gpu_hour)}, as given"
    return _facts(
        "Provenance",
        {"price": str(p.price) if p.price is not None else given, "calibration": f"{p.calibration}: {error}"},
    )


def _facts(title: str, rows: Mapping[str, str]) -> Section:
    return Section(title, "", (("", "<"),), tuple(Row(name, (text,)) for name, text in rows.items()))


def _number(n: float, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}" if isinstance(n, int) else f"{n:g} {one if n == 1 else many}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---------------------------------------------------------------------------------------------------------- text
BAR: Final = 20
"""Longest bar. [column]"""
INDENT: Final = 2
GAP: Final = 2


def as_text(estimate: Estimate, width: int = WIDTH) -> str:
    """The estimate as plain text of at most `width` columns (and at least `MIN_WIDTH`)."""
    return sections_as_text(list(sections(estimate)), width)


def sections_as_text(found: Sequence[Section], width: int = WIDTH) -> str:
    """Sections one below the other, their rows' names in one column."""
    width = max(width, MIN_WIDTH)
    label = max(len(row.name) for section in found for row in section.rows)
    return "\n\n".join("\n".join(_text(section, label, width)) for section in found)


def _text(section: Section, label: int, width: int) -> Iterator[str]:
    head = section.title.upper() + (f": {section.summary}" if section.summary else "")
    yield from wrapped(head, width, indent="", hang=" " * INDENT)
    for sentence in section.sentences:
        yield from wrapped(sentence, width, indent=" " * INDENT + "- ", hang=" " * (INDENT + 2))
    yield from _text_table(section, label, width)


def _text_table(section: Section, label: int, width: int) -> Iterator[str]:
    lines = [Row("", tuple(name for name, _ in section.columns)), *section.rows]
    if not any(lines[0].cells):
        del lines[0]
    sizes = [max((len(r.cells[i]) for r in lines), default=0) for i in range(len(section.columns))]
    for row in lines:
        out = " " * INDENT + f"{row.name:<{label}}"
        for (_, align), size, cell in list(zip(section.columns, sizes, row.cells, strict=True))[:-1]:
            out += " " * GAP + f"{printable(cell):{align}{size}}"
        out += " " * GAP
        if section.columns[-1][1] == ">" or row.share is not None:
            out += f"{row.cells[-1]:{section.columns[-1][1]}{sizes[-1]}}" + " " * GAP
            yield (out + "#" * round(min(BAR, width - len(out)) * drawn(row.share))).rstrip()
        else:
            yield from wrapped(row.cells[-1], width, indent=out, hang=" " * len(out))


def wrapped(text: str, width: int, *, indent: str, hang: str) -> Iterable[str]:
    lines = textwrap.wrap(printable(text), width, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False)
    return [line.rstrip() for line in lines] or [indent.rstrip()]


def drawn(share: float | None) -> float:
    """A share as a length of a bar."""
    return 0.0 if share is None or not math.isfinite(share) else min(max(share, 0.0), 1.0)


# ---------------------------------------------------------------------------------------------------------- HTML
COLOURS: Final[Mapping[str, str]] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#E69F00",
    "attention": "#0072B2",
    "mamba": "#009E73",
    "moe": "#D55E00",
    "mlp": "#E69F00",
    "norm": "#56B4E9",
    "embedding": "#F0E442",
    "head": "#CC79A7",
    "weights": "#0072B2",
    "adapters": "#56B4E9",
    "gradients": "#F0E442",
    "activations": "#D55E00",
    "logits": "#CC79A7",
    "buffers": "#009E73",
    "framework context": "#666666",
}
"""Okabe and Ito's palette, which colour-blind readers can tell apart. The same part has the same colour everywhere."""
HATCHES: Final[Mapping[str, str]] = {
    "attention": "", "mamba": "..", "moe": "//", "mlp": "\\\\", "norm": "xx", "embedding": "++", "head": "--",
    "optimizer": "||", "other": "",
    "weights": "", "adapters": "xx", "gradients": "++", "activations": "//", "logits": "--", "buffers": "..",
    "allocator slack": "", "framework context": "",
}  # fmt: skip
"""The same without colour, as Matplotlib names hatches."""
OTHER_COLOUR: Final = "#999999"

_LINE = "1px solid rgba(128,128,128,0.4)"
_TABLE = "border-collapse:collapse;margin:0;background:transparent;color:inherit;font-size:inherit;border:0"
_CELL = "padding:1px 8px;border:0;background:transparent;color:inherit;vertical-align:top;max-width:48em"


def as_html(estimate: Estimate) -> str:
    """The estimate as one self-contained `<div>`, for notebooks with a light or a dark background."""
    return sections_as_html(sections(estimate))


def sections_as_html(found: Iterable[Section]) -> str:
    """Sections as one self-contained `<div>`."""
    body = "".join(_html(section) for section in found)
    return f'<div style="font-size:13px;line-height:1.4;max-width:64em;color:inherit">{body}</div>'


def _html(section: Section) -> str:
    out = f'<div style="font-weight:600;margin-top:10px;border-bottom:{_LINE}">{escaped(section.title)}</div>'
    if section.summary:
        out += f'<div style="margin:2px 0">{escaped(section.summary)}</div>'
    out += _html_bar(section)
    if section.rows:
        head = "".join(_html_cell(name, align, "th") for name, align in (("", "<"), *section.columns))
        head = f"<tr>{head}</tr>" if any(name for name, _ in section.columns) else ""
        body = "".join(_html_row(section, row) for row in section.rows)
        out += f'<table style="{_TABLE}">{head}{body}</table>'
    if section.sentences:
        items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in section.sentences)
        out += f'<ul style="margin:2px 0;padding-left:20px">{items}</ul>'
    return out


def _html_row(section: Section, row: Row) -> str:
    aligns = [align for _, align in section.columns]
    cells = "".join(_html_cell(cell, align) for cell, align in zip(row.cells, aligns, strict=True))
    return f"<tr>{_html_name(row)}{cells}</tr>"


def _html_name(row: Row) -> str:
    swatch = ""
    if row.part and row.share is not None:
        colour = COLOURS.get(row.name, OTHER_COLOUR)
        swatch = f'<span style="display:inline-block;width:9px;height:9px;margin-right:6px;background:{colour}"></span>'
    return f'<td style="{_CELL};text-align:left;white-space:nowrap">{swatch}{escaped(row.name)}</td>'


def _html_cell(text: str, align: str, tag: Literal["td", "th"] = "td") -> str:
    side = "right" if align == ">" else "left"
    return f'<{tag} style="{_CELL};text-align:{side}">{escaped(text)}</{tag}>'


def _html_bar(section: Section) -> str:
    """The parts of the whole side by side, each with its name on hover."""
    parts = [row for row in section.rows if row.part and row.share is not None]
    if not parts:
        return ""
    whole = max(1.0, sum(drawn(row.share) for row in parts))
    inner = "".join(
        f'<span title="{escaped(f"{row.name} {row.cells[1]}")}" style="display:inline-block;height:12px;'
        f'width:{100 * drawn(row.share) / whole:.3f}%;background:{COLOURS.get(row.name, OTHER_COLOUR)}"></span>'
        for row in parts
    )
    said = escaped(f"{section.title}: " + ", ".join(f"{row.name} {row.cells[1]}" for row in parts))
    return (
        f'<div role="img" aria-label="{said}" style="display:flex;height:12px;max-width:36em;margin:4px 0;'
        f'border:{_LINE}">{inner}</div>'
    )


def escaped(text: str) -> str:
    """Text for the inside of an element or an attribute: nothing of it is markup."""
    return html.escape(printable(text), quote=True)
