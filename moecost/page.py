"""The report of a job as one HTML file to hand around: figures, where they come from, and what else could be done.

The file is whole in itself: no script, no font, picture or style from elsewhere, which its content policy enforces.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

from moecost import catalog
from moecost.calibration import Calibration
from moecost.comparing import Comparison, compare
from moecost.comparison_report import COLUMNS, cells, title
from moecost.errors import MoECostError, OutOfRangeWarning
from moecost.job import Job
from moecost.report import (
    COLOURS,
    HATCHES,
    LEVEL,
    OTHER_COLOUR,
    Row,
    Section,
    chance,
    dollars,
    escaped,
    percent,
    sections,
    significant,
    spread,
)
from moecost.results import Estimate
from moecost.specs import GPUSpec, PriceQuote

OTHER_GPUS: Final = 9
"""GPUs that a job is compared with: those of its vendor with the most on-demand quotes, which are easiest to rent."""


def write_report(path: str | Path, estimate: Estimate, job: Job | None = None) -> None:
    """`report_page` into a file, all at once: the whole page or none.

    Raises
    ------
    InvalidInputError : the file cannot be written.
    """
    catalog.write_text(path, report_page(estimate, job))


def report_page(estimate: Estimate, job: Job | None = None) -> str:
    """The report as one HTML document.

    Parameters
    ----------
    job : what the estimate is of; None: the page has neither alternatives nor the job's file.
    """
    e = estimate
    name = f"{e.model} on {e.num_gpus} x {e.gpu}"
    asked, _, *rest = sections(e)
    parts = [
        _headline(e),
        _section(asked),
        *(_section(section, _memory_bar(e) if section.title.startswith("Memory") else None)
          for section in rest if section.title != "Provenance"),
        *(_alternatives(e, job) if job is not None else ()),
        *_provenance(e, job),
        *([_reproduce(job)] if job is not None else []),
    ]  # fmt: skip
    return _DOCUMENT.format(
        title=escaped(f"{name}: cost of fine-tuning"),
        style=_STYLE,
        patterns=_patterns(),
        heading=escaped(f"Fine-tuning {name}"),
        lead=escaped(_lead(e)),
        body="\n".join(parts),
        foot=escaped(f"Made by moecost {_version()} on {date.today().isoformat()}. Estimates, not offers."),
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("moecost")
    except PackageNotFoundError:  # a bare copy of the tree
        return "(version not known)"


def _lead(e: Estimate) -> str:
    data = f"{e.num_queries:,} queries" + (f" of {e.dataset}" if e.dataset else f" of {e.sequence_length:,} tokens")
    return f"{e.method}, {data}, {e.epochs:g} {'epoch' if e.epochs == 1 else 'epochs'}"


# ------------------------------------------------------------------------------------------------------ headline
def _headline(e: Estimate) -> str:
    m = e.memory
    cards = [
        ("Cost", dollars(e.cost_usd), spread(e, "cost_usd")),
        ("Time", f"{significant(e.hours)} h", spread(e, "hours", "h")),
        ("Queries a second", significant(e.queries_per_second), spread(e, "queries_per_second")),
        ("Memory", f"{significant(m.device_gib)} GiB", spread(e, "memory.device_gib", "GiB")),
        ("Batch", f"{e.micro_batch_size:,} a GPU", _most(e.max_micro_batch_size)),
    ]
    verdict = (
        f"It fits: {significant(m.device_gib)} of {significant(m.usable_gib)} GiB, with a probability of "
        f"{chance(e.fits_probability)}."
        if e.fits
        else f"It does not fit: it needs {significant(m.device_gib)} GiB, the GPU has {significant(m.usable_gib)}. "
        "Every figure is computed as if it did."
    )
    inner = "".join(
        f'<div class="card"><dt>{escaped(name)}</dt><dd>{escaped(value)}<small>{escaped(said)}</small></dd></div>'
        for name, value, said in cards
    )
    return _framed(
        "Answer",
        f'<p class="{"verdict" if e.fits else "verdict bad"}">{escaped(verdict)}</p><dl class="cards">{inner}</dl>'
        f'<p class="fine">Ranges are {100 * LEVEL:.0f} % intervals: what is measured lies inside with that probability.'
        "</p>",
    )


def _most(batch: int) -> str:
    return f"at most {batch:,} fit" if batch > 1 else "no more fit" if batch else "not even one fits"


# ------------------------------------------------------------------------------------------------------ sections
def _framed(name: str, inner: str) -> str:
    """A section of the page, with its heading."""
    key = escaped(name.lower().replace(" ", "-"))
    return f'<section aria-labelledby="{key}"><h2 id="{key}">{escaped(name)}</h2>{inner}</section>'


def _section(section: Section, bar: str | None = None) -> str:
    """A section of the report as heading, bar, table and list."""
    inner = f"<p>{escaped(section.summary)}</p>" if section.summary else ""
    inner += _bar(section) if bar is None else bar
    if section.rows:
        columns = [column for column, _ in section.columns]
        right = [i for i, (_, align) in enumerate(section.columns) if align == ">"]
        rows = [(_swatch(row) + escaped(row.name), list(map(escaped, row.cells))) for row in section.rows]
        inner += _table(section.title, columns, rows, right)
    return _framed(section.title, inner + _list(section.sentences))


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _table(
    name: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], right: Iterable[int] = ()
) -> str:
    """A table that scrolls where there is no room for it. Cells are HTML."""
    side = dict.fromkeys(right, ' class="n"')
    head = "".join(f'<th scope="col"{side.get(i, "")}>{escaped(c)}</th>' for i, c in enumerate(columns))
    head = f"<thead><tr><td></td>{head}</tr></thead>" if any(columns) else ""
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td{side.get(i, '')}>{cell}</td>" for i, cell in enumerate(others))
        + "</tr>"
        for first, others in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(name)}: table">'
        f'<table><caption class="unseen">{escaped(name)}</caption>{head}<tbody>{body}</tbody></table></div>'
    )


# ---------------------------------------------------------------------------------------------------------- bars
_HEIGHT: Final = 26
"""Of a bar. [px]"""


def _parts(section: Section) -> list[Row]:
    return [row for row in section.rows if row.part and row.share is not None]


def _bar(section: Section) -> str:
    """Parts of a whole side by side."""
    parts = _parts(section)
    if not parts:
        return ""
    shares = [_bounded(row.share) for row in parts]
    said = f"{section.title}: " + ", ".join(f"{row.name} {row.cells[1]}" for row in parts)
    return _svg(said, _rectangles([row.name for row in parts], shares, max(1.0, sum(shares))), _HEIGHT)


def _memory_bar(e: Estimate) -> str:
    """Parts of the memory side by side, against what the GPU has, with the interval of their sum."""
    m = e.memory
    low, high = e.interval("memory.device_gib", LEVEL)
    whole = 1.04 * max(m.usable_gib, high)
    section = next(s for s in sections(e) if s.title.startswith("Memory"))
    names = [row.name for row in _parts(section)]
    inner = _rectangles(names, [_bounded(row.share) * m.device_gib for row in _parts(section)], whole)
    ends = [100 * value / whole for value in (low, high)]
    at = 100 * m.usable_gib / whole
    y = _HEIGHT + 8
    anchor, aside = ("end", -0.8) if at > 50 else ("start", 0.8)
    inner += (
        f'<line class="ink" x1="{ends[0]:.2f}%" x2="{ends[1]:.2f}%" y1="{y}" y2="{y}" stroke-width="2"/>'
        + "".join(f'<line class="ink" x1="{x:.2f}%" x2="{x:.2f}%" y1="{y - 4}" y2="{y + 4}"/>' for x in ends)
        + f'<line class="ink" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{_HEIGHT + 24}" stroke-width="2" '
        'stroke-dasharray="4 3"/>'
        f'<text class="label" x="{at + aside:.2f}%" y="{_HEIGHT + 26}" text-anchor="{anchor}">'
        f"usable {escaped(significant(m.usable_gib))} GiB</text>"
    )
    said = (
        f"Memory: {significant(m.device_gib)} GiB ({significant(low)} to {significant(high)}) of "
        f"{significant(m.usable_gib)} GiB usable; "
        + ", ".join(f"{row.name} {row.cells[0]} GiB" for row in _parts(section))
    )
    return _svg(said, inner, _HEIGHT + 30)


def _rectangles(names: Sequence[str], sizes: Sequence[float], whole: float) -> str:
    out, start = "", 0.0
    for name, size in zip(names, sizes, strict=True):
        out += (
            f'<rect x="{100 * start / whole:.3f}%" width="{100 * size / whole:.3f}%" height="{_HEIGHT}" '
            f'fill="url(#{_pattern_id(name)})"><title>{escaped(name)}</title></rect>'
        )
        start += size
    return out


def _svg(said: str, inner: str, height: int) -> str:
    return f'<svg class="bar" role="img" aria-label="{escaped(said)}" width="100%" height="{height}">{inner}</svg>'


def _swatch(row: Row) -> str:
    if not row.part or row.share is None:
        return ""
    return (
        '<svg class="swatch" aria-hidden="true" width="14" height="14">'
        f'<rect width="14" height="14" fill="url(#{_pattern_id(row.name)})"/></svg>'
    )


def _bounded(share: float | None) -> float:
    return 0.0 if share is None or not math.isfinite(share) else min(max(share, 0.0), 1.0)


def _pattern_id(name: str) -> str:
    """Of the known names alone: no text of a user's becomes an id."""
    return f"fill-{name.replace(' ', '-')}" if name in _FILLED else "fill-unknown"


_FILLED: Final = tuple(dict.fromkeys((*COLOURS, *HATCHES)))
_HATCH: Final[Mapping[str, tuple[str, int]]] = {
    "": ("", 0), "//": ("M0 0V8", 45), "\\\\": ("M0 0V8", -45), "||": ("M0 0V8", 0), "--": ("M0 0H8", 0),
    "++": ("M0 0H8M0 0V8", 0), "xx": ("M0 0H8M0 0V8", 45), "..": ("M2 4h2", 0),
}  # fmt: skip
"""Path and turn of a hatch, within a tile of 8 pixels."""


def _patterns() -> str:
    """Colour and hatch of every part, once for the whole page."""
    out = ""
    for name in (*_FILLED, "unknown"):
        path, turn = _HATCH[HATCHES.get(name, "")]
        stroke = f'<path d="{path}" stroke="#fff" stroke-width="2" opacity="0.8"/>' if path else ""
        out += (
            f'<pattern id="fill-{name.replace(" ", "-")}" width="8" height="8" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({turn})"><rect width="8" height="8" '
            f'fill="{COLOURS.get(name, OTHER_COLOUR)}"/>{stroke}</pattern>'
        )
    return f'<svg aria-hidden="true" width="0" height="0" style="position:absolute"><defs>{out}</defs></svg>'


# -------------------------------------------------------------------------------------------------- alternatives
def _alternatives(e: Estimate, job: Job) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)  # the page says where the job itself is out of range
        gpus, batches = other_gpus(job), other_batches(job, e)
    said = "The same job on other GPUs, each with its largest batch" if job.micro_batch_size is None else (
        "The same job on other GPUs, with the same batch"
    )  # fmt: skip
    prices = "this one at the price given, the others" if job.price is not None else "all"
    yield _compared(
        "Other GPUs", f"{said}; {prices} at the median of the catalogue's {job.market} quotes. {title(gpus)}.", gpus
    )
    if batches is not None:
        yield _compared("Other batch sizes", "The same job and GPU, by sequences a GPU a pass.", batches)


def likely_gpus(gpu: GPUSpec, count: int = OTHER_GPUS) -> list[str]:
    """Other GPUs of the same vendor, those with the most on-demand quotes first."""
    quoted = {name: len(catalog.quotes(name, market="on_demand")) for name in catalog.gpus()}
    found: list[str] = []
    for name in sorted(quoted, key=lambda name: (-quoted[name], name)):
        if len(found) == count or not quoted[name]:
            break
        if name != gpu.name and GPUSpec.load(name).vendor == gpu.vendor:
            found.append(name)
    return found


def other_gpus(job: Job) -> Comparison:
    """A job beside the same on other GPUs, machine and price of which are the catalogue's."""
    gpu = job.gpu if isinstance(job.gpu, GPUSpec) else GPUSpec.load(job.gpu)
    fields = _given(job, drop=("gpu", "node", "gpus_per_node", "price"))
    names = likely_gpus(gpu)
    jobs: list[Any] = [job, *(fields | {"gpu": name} for name in names)]
    return compare(jobs, labels=[f"{gpu.name} (this job)", *names])


def other_batches(job: Job, e: Estimate) -> Comparison | None:
    """A job beside the same with other micro-batches, ascending; None where it has but one."""
    largest = max(e.max_micro_batch_size, e.micro_batch_size)
    sizes = {2**i for i in range(largest.bit_length())} | {e.micro_batch_size, e.max_micro_batch_size} - {0}
    if job.global_batch_size is not None:
        ranks = max(job.data_parallel_size, 1)
        sizes = {size for size in sizes if job.global_batch_size % (size * ranks) == 0} | {e.micro_batch_size}
    if len(sizes) < 2:
        return None
    drop = ("gradient_accumulation_steps",) if job.global_batch_size is not None else ()
    fields = _given(job, drop=drop)
    found = compare(
        [fields | {"micro_batch_size": size} for size in sorted(sizes)],
        labels=[f"{size:,}" + (" (this job)" if size == e.micro_batch_size else "") for size in sorted(sizes)],
    )
    ascending = sorted(found.candidates, key=lambda c: int(c.label.split()[0].replace(",", "")))
    return found.model_copy(update={"candidates": tuple(ascending)})


def _given(job: Job, drop: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.model_fields_set if name not in drop}


def _compared(name: str, said: str, found: Comparison) -> str:
    rows = [
        (escaped(c.label), [*(escaped(cells(c)[column]) for column in COLUMNS), escaped(c.reason)])
        for c in found.candidates
    ]
    table = _table(name, [*COLUMNS, "beside the cheapest"], rows, right=range(len(COLUMNS)))
    return _framed(name, f"<p>{escaped(said)}</p>{table}{_list(found.notes)}")


# ---------------------------------------------------------------------------------------------------- provenance
def _provenance(e: Estimate, job: Job | None) -> Iterator[str]:
    p = e.provenance
    yield _facts("Price", _price(p.price) if p.price is not None else {"price": _given_price(e)})
    yield _facts("Calibration", _calibration(e, job))
    if p.sources:
        yield _facts("Sources", p.sources)


def _given_price(e: Estimate) -> str:
    if math.isnan(e.usd_per_gpu_hour):
        return "not known: pass price= for the cost"
    return f"${e.usd_per_gpu_hour:g} a GPU-hour, as given"


def _price(quote: PriceQuote) -> dict[str, str]:
    rows = {
        "price": f"${quote.usd_per_gpu_hour:g} a GPU-hour, {quote.market}",
        "provider": " ".join(part for part in (quote.provider, quote.region) if part),
        "machine": f"{quote.instance_type} ({quote.gpu_count} GPUs)" if quote.instance_type else "",
        "date": quote.date,
        "source": quote.source,
        "notes": quote.notes,
    }
    return {name: text for name, text in rows.items() if text}


def _calibration(e: Estimate, job: Job | None) -> dict[str, str]:
    p = e.provenance
    rows = {"software": p.software, "calibration": p.calibration}
    found = _loaded_calibration(p.calibration, job)
    if found is not None:
        rows["fitted on"] = f"{found.num_runs:,} runs"
    if p.calibration_error is not None:
        how = f" ({found.cross_validated_by})" if found is not None and found.cross_validated_by else ""
        rows["error of left-out runs"] = f"{percent(p.calibration_error)} in the mean{how}"
    else:
        rows["error of left-out runs"] = "not known: no runs were left out"
    rows["spread of this job"] = f"{percent(e.log_sd_time)} of time, {percent(e.log_sd_memory)} of memory"
    return rows


def _loaded_calibration(name: str, job: Job | None) -> Calibration | None:
    asked = None if job is None else job.calibration
    if isinstance(asked, Calibration):
        return asked
    try:
        return Calibration.load(name if asked is None else asked)
    except MoECostError:  # one that was made in Python, or is a file that went away
        return None


def _facts(name: str, rows: Mapping[str, str]) -> str:
    return _framed(name, _table(name, [""], [(escaped(field), [escaped(text)]) for field, text in rows.items()]))


def _reproduce(job: Job) -> str:
    lines = "\n".join(map(escaped, job.to_yaml().splitlines()))
    return _framed(
        "Reproduce",
        "<p>Put this into <code>job.yaml</code> and run <code>moecost report job.yaml</code>. Files that it names are "
        "not part of this page.</p>"
        f'<pre tabindex="0" role="region" aria-label="The job as YAML"><code>{lines}</code></pre>',
    )


# ------------------------------------------------------------------------------------------------------ document
_STYLE: Final = """
:root { --ink: #1a1a1a; --paper: #fff; --soft: #5a5a5a; --rule: #d0d0d0; --tint: #f4f6f8; --bad: #a33b00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --soft: #a8adb3; --rule: #3a3f45; --tint: #22262b; --bad: #ff9d5c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid var(--rule); }
p { margin: 0.4rem 0; }
ul { margin: 0.4rem 0; padding-left: 1.2rem; }
.lead, .fine, small, footer { color: var(--soft); }
.fine, footer { font-size: 0.85rem; }
footer { margin-top: 2rem; border-top: 1px solid var(--rule); padding-top: 0.5rem; }
.verdict { font-weight: 600; }
.bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 0.6rem; margin: 0.8rem 0; }
.card { background: var(--tint); border: 1px solid var(--rule); border-radius: 6px; padding: 0.6rem 0.8rem; }
dt { color: var(--soft); font-size: 0.85rem; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
small { display: block; font-size: 0.85rem; font-weight: 400; min-height: 1.2em; }
.scroll { overflow-x: auto; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid var(--rule); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 400; white-space: nowrap; max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
td:nth-child(8) { min-width: 12rem; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { display: block; margin: 0.5rem 0; overflow: visible; }
.bar rect { stroke: var(--paper); }
.swatch { margin-right: 0.5rem; vertical-align: -2px; }
.bar, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.ink { stroke: var(--ink); }
.label { fill: var(--ink); font-size: 12px; }
pre { background: var(--tint); border: 1px solid var(--rule); padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media print {
  :root { --ink: #000; --paper: #fff; --soft: #333; --rule: #999; --tint: #fff; --bad: #000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2 { break-after: avoid; }
  tr, .card, .bar { break-inside: avoid; }
  .scroll, pre { overflow: visible; white-space: normal; }
  pre { white-space: pre-wrap; }
  .n, tbody th { white-space: normal; }
}
""".strip()

_DOCUMENT: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{patterns}
<header><h1>{heading}</h1><p class="lead">{lead}</p></header>
<main>
{body}
</main>
<footer>{foot}</footer>
</body>
</html>
"""
