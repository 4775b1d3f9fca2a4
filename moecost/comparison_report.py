"""A `Comparison` for people, as plain text and as HTML: a line of figures a job, and why it stands where it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from moecost.comparing import Candidate, Comparison
from moecost.report import LEVEL, MIN_WIDTH, WIDTH, dollars, escaped, printable, significant, spread, wrapped

COLUMNS: Final = ("dollars", f"{100 * LEVEL:.0f} % interval", "hours", "batch", "queries/s", "GiB")
NARROW: Final = ("dollars", "hours", "GiB")
"""Columns where there is little room."""
_SHORTEST_LABEL: Final = 16
_LONGEST_LABEL: Final = 44


def title(c: Comparison) -> str:
    """How many jobs, of which how many fit, and by what they are sorted."""
    fit, by = len(c.estimates), "cost" if c.sorted_by == "cost_usd" else "GPU-hours"
    jobs = "1 job" if len(c) == 1 else f"{len(c)} jobs"
    return f"{jobs}, {fit} of them {'fits' if fit == 1 else 'fit'}, by {by}"


def cells(candidate: Candidate) -> dict[str, str]:
    """Figures of a candidate by column, as words; empty where it has none: rates of a job that does not fit."""
    e = candidate.estimate
    if e is None:
        return dict.fromkeys(COLUMNS, "")
    gib = f"{significant(e.memory.device_gib)} of {significant(e.memory.usable_gib)}"
    if not e.fits:
        return dict.fromkeys(COLUMNS, "") | {"batch": f"{e.micro_batch_size:,}", "GiB": gib}
    return {
        "dollars": dollars(e.cost_usd),
        COLUMNS[1]: spread(e, "cost_usd"),
        "hours": significant(e.hours),
        "batch": f"{e.micro_batch_size:,}",
        "queries/s": significant(e.queries_per_second),
        "GiB": gib,
    }


# ---------------------------------------------------------------------------------------------------------- text
def as_text(c: Comparison, width: int = WIDTH) -> str:
    """The comparison as plain text of at most `width` columns (and at least `MIN_WIDTH`)."""
    return "\n".join(_lines(c, max(width, MIN_WIDTH)))


def _lines(c: Comparison, width: int) -> Iterator[str]:
    columns: tuple[str, ...] = COLUMNS
    sizes = _sizes(c, columns)
    if width - 2 - sum(sizes) - 2 * len(sizes) < _SHORTEST_LABEL:
        columns = NARROW
        sizes = _sizes(c, columns)
    room = width - 2 - sum(sizes) - 2 * len(sizes)
    label = max(1, min(room, _LONGEST_LABEL, max(len(printable(x.label)) for x in c.candidates)))
    yield from wrapped(f"COMPARED: {title(c)}", width, indent="", hang="  ")
    yield _line("", columns, sizes, label)
    for x in c.candidates:
        found = cells(x)
        name = printable(x.label)
        if len(name) > label:  # in whole, above its figures
            yield from wrapped(name, width, indent="  ", hang="    ")
            name = ""
        yield _line(name, [found[column] for column in columns], sizes, label)
        yield from wrapped(x.reason, width, indent="    ", hang="    ")
    for note in c.notes:
        yield from wrapped(note, width, indent="NOTE: ", hang="  ")


def _sizes(c: Comparison, columns: tuple[str, ...]) -> list[int]:
    rows = [cells(x) for x in c.candidates]
    return [max(len(name), *(len(row[name]) for row in rows)) for name in columns]


def _line(name: str, found: list[str] | tuple[str, ...], sizes: list[int], label: int) -> str:
    out = f"  {name:<{label}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(found, sizes, strict=True))
    return out.rstrip()


# ---------------------------------------------------------------------------------------------------------- HTML
_LINE: Final = "1px solid rgba(128,128,128,0.4)"
_CELL: Final = "padding:2px 8px;border:0;background:transparent;color:inherit;vertical-align:top"


def as_html(c: Comparison) -> str:
    """The comparison as one self-contained `<div>`, for notebooks with a light or a dark background."""
    head = (
        _cell("", "th", "left") + "".join(_cell(name, "th", "right") for name in COLUMNS) + _cell("why", "th", "left")
    )
    body = "".join(_row(x) for x in c.candidates)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in c.notes)
    return (
        '<div style="font-size:13px;line-height:1.4;max-width:80em;color:inherit;overflow-x:auto">'
        f'<div style="font-weight:600;border-bottom:{_LINE}">{escaped(title(c))}</div>'
        '<table style="border-collapse:collapse;margin:0;background:transparent;color:inherit;font-size:inherit;'
        f'border:0"><tr>{head}</tr>{body}</table>'
        + (f'<ul style="margin:2px 0;padding-left:20px">{notes}</ul>' if notes else "")
        + "</div>"
    )


def _row(x: Candidate) -> str:
    found = cells(x)
    style = "" if x.status == "fits" else ' style="opacity:0.7"'
    inner = "".join(_cell(found[name], "td", "right") for name in COLUMNS)
    return f"<tr{style}>{_cell(x.label, 'td', 'left')}{inner}{_cell(x.reason, 'td', 'left')}</tr>"


def _cell(text: str, tag: str, side: str) -> str:
    return f'<{tag} style="{_CELL};text-align:{side}">{escaped(text)}</{tag}>'
