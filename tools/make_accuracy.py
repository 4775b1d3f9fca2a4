"""Write docs/accuracy.md: how far estimates are off, on the public runs that ship with moecost.

    python tools/make_accuracy.py            # 10 minutes on two cores; to be run after each refit
    python tools/make_accuracy.py --check    # seconds: only says whether the figures in sample are those of the page

The same runs and calibrations give the same page.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from moecost.calibration import Calibration
from moecost.coefficients import COEFFICIENT_NAMES
from moecost.kernel_timings import fit_collectives, fit_grouped_gemm
from moecost.measurements import Runs, public_runs, runs_behind
from moecost.orderings import orderings
from moecost.validation import Report, Row, Summary, after_one_run, cross_validate, validate, without

PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"
START, END = "<!-- in sample: start -->", "<!-- in sample: end -->"
FEW = 4
"""Runs below which a source has no line of its own in the tables of parts left out."""
WORST = 10

HEAD = """# How far off estimates are

Made by `python tools/make_accuracy.py` (10 minutes) from the public runs in `moecost/data/measurements` and the
calibrations fitted on them: {calibrations}. A run
belongs to the calibration of its stack. What the short names of the sources stand for is in each row of those tables.
A run's error is |predicted / measured - 1|, of the time of a step for speeds; the bias is the median of predicted /
measured - 1, so a positive one says that runs are quicker, or need less, than predicted; inside is the share of
measured values within the 80 % interval of their estimate.

The same for your own runs: `moecost validate runs.csv`.

"""

WRONG = """## What is still wrong, and why

* **A stack that no fit has seen** keeps its own share of fused kernels, host work and communication that is hidden:
  the table above says what that costs, and that one measured run takes back most of it where the misfit is one factor
  on all runs. It is not where runs differ in the link (`fsdpqlora`: boxes without NVLink reach 2 to 14 GB/s, and the
  one run given may come from another box) or in how experts run (`axolotl`).
* **A link that is not described.** Two consumer cards on PCIe without peer-to-peer copies differ by a factor of 6 from
  board to board. The point estimate may miss by 2 to 5, and no software can know it beforehand.
* **4-bit experts as single small linears under FSDP** (`axolotl-023`, `-024`): thousands of units, each with a host
  cost that is not modelled.
* **Grouped kernels of many small experts** reach a tenth of the peak, a figure that is that of few machines; MoE models
  therefore have wider errors than dense ones.
* **Users' reports** (trust 1) leave settings blank; the line without them shows what they cost.
* **Hours of short runs** hold a start-up and a checkpoint that the trainer's own clock (`train_runtime`) does not
  count: the estimate is then a minute or two too long. Where the measured hours hold data preparation, logging or
  evaluation (`peft`), it is too short.
* **Whether it fits.** Runs that ran although they were predicted not to fit are mostly of stacks whose memory nobody
  published (`llmfoundry`, `mlperf`): what activations take without recompute, and the logits of their fused losses, is
  counted as in other stacks and is too much there. A run that ran says no more than that.
* **Experts over several machines.** Dispatchers differ from network to network (on EFA DeepEP is slower than an
  all-to-all at 512 tokens a GPU, on InfiniBand twice as fast), recipes capture launches or hide exchanges without
  saying so (`mbridge`, `aws`, `mcore-gb200`), and fine-grained mixtures are bound by the host where they do not.
* **Many machines.** The runs no fit has seen use up to 64 machines whose network delivered a small part of its nominal
  rate in the same jobs; estimates assume a sound one.
* **Noise.** Repeats of one run differ by more than 5 % in half of the groups of repeats; no estimate does better.
"""


# -------------------------------------------------------------------------------------------------------- the cheap
CALIBRATIONS = ("public-2026", "megatron-2026")


@cache
def known_runs() -> Runs:
    """What the calibrations were fitted on."""
    tables = [public_runs("finetune"), public_runs("multi")]
    return Runs([run for table in tables for run in table], [why for table in tables for why in table.refused])


@cache
def in_sample() -> Report:
    return validate(known_runs())


def in_sample_text() -> str:
    """What a test holds the page to."""
    report, unseen = in_sample(), validate(public_runs("fits_or_oom"))
    return "\n".join(
        [
            "## In sample",
            "",
            "Runs that the shipped calibrations were fitted on, as `estimate` predicts them. Memory is counted by the",
            "rules of each stack, not fitted, so that no fit could leave it out.",
            "",
            *_by_source(report),
            "",
            *_table(["memory, by what was measured", "runs", "median", "mean", "bias", "inside"],
                    [[s.name.removeprefix("memory, "), *_cells(s)] for s in report.overall if s.figure == "memory"]),
            "",
            *_hours(report),
            "",
            "### Runs no fit has seen",
            "",
            "`fits_or_oom.csv`: whether runs fitted; speeds and memory of a pre-training sweep on up to 512 H100s.",
            "",
            *_table(["", "runs", "median", "mean", "bias", "inside"], [[s.name, *_cells(s)] for s in unseen.overall]),
            "",
            "### Does it fit?",
            "",
            *_outcomes(report, unseen),
            "",
            "### Which layout is faster?",
            "",
            "Pairs of layouts of the same model, stack and release on the same GPUs whose measured speeds differ by",
            "more than 10 %: how many of them are ordered rightly.",
            "",
            *_orderings(),
            "",
            "### Kernels",
            "",
            "Laws of `moecost.kernel_timings` against the timings they are fitted to (`kernels.csv`): collectives as",
            "latency, hops, bandwidth and a ramp, grouped products of experts as FLOPs plus traffic.",
            "",
            *_kernels(),
            "",
            "### Worst rows",
            "",
            *_worst(report.worst(WORST, "speed")),
            "",
            *_worst(report.worst(WORST, "memory")),
            "",
            *_refused(report),
        ]
    )  # fmt: skip


def _by_source(report: Report) -> Iterable[str]:
    found: dict[str, dict[str, Summary]] = {}
    for s in report.by_source:
        found.setdefault(s.name, {})[s.figure] = s
    rows = [[name, *_cells(of.get("speed")), *_cells(of.get("memory"))] for name, of in found.items()
            if {"speed", "memory"} & of.keys()]  # fmt: skip
    sound = Report(rows=[row for row in report.rows if row.trust > 1])
    for name, some in (("**all**", report), ("**all but users' reports**", sound)):
        cells = [_overall(some, figure) for figure in ("speed", "memory")]
        rows.append([name, *_cells(cells[0]), *_cells(cells[1])])
    columns = ["source", *("speed: runs", "median", "mean", "bias", "inside"),
               *("memory: runs", "median", "mean", "bias", "inside")]  # fmt: skip
    yield from _table(columns, rows)


def _overall(report: Report, figure: str) -> Summary | None:
    rows = [row for row in report.rows if row.figure == figure]
    return Summary.of(figure, rows[0].figure, rows) if rows else None


def _hours(report: Report) -> Iterable[str]:
    found = [s for s in report.by_source if s.figure == "hours"]
    yield from _table(["hours of whole runs", "runs", "median", "mean", "bias", "inside"],
                      [[s.name, *_cells(s)] for s in found])  # fmt: skip


def _outcomes(*reports: Report) -> Iterable[str]:
    outcomes = [o for report in reports for o in report.outcomes]
    rows = []
    for source, _ in Counter(o.source for o in outcomes).most_common():
        cells = [source]
        for measured in ("ok", "oom"):
            of = [o for o in outcomes if o.source == source and o.measured == measured]
            wrong = [o for o in of if not o.right]
            cells += [f"{len(of)}", f"{len(wrong)}", f"{sum(o.close for o in wrong)}"] if of else ["", "", ""]
        rows.append(cells)
    columns = ["source", "ran", "predicted not to fit", "of them within the interval",
               "out of memory", "predicted to fit", "of them within the interval"]  # fmt: skip
    yield from _table(columns, rows)


def _orderings() -> Iterable[str]:
    found = orderings(known_runs())
    rows = [[o.source, f"{o.pairs}", f"{o.right}"] for o in found]
    pairs, right = sum(o.pairs for o in found), sum(o.right for o in found)
    rows.append(["**all**", f"{pairs}", f"{right} ({_percent(right / pairs)})"])
    yield from _table(["source", "pairs", "right"], rows)


def _kernels() -> Iterable[str]:
    fits = [*fit_collectives(), *fit_grouped_gemm()]
    by: dict[tuple[str, str], list[float]] = {}
    for fit in fits:
        kind = fit.kind.split()[0] if fit.machines == "one" else f"{fit.kind}, {fit.machines}"
        by.setdefault((fit.gpu, kind), []).extend(fit.errors.tolist())
    rows = [[gpu, kind, f"{len(errors)}", _percent(statistics.median(errors))] for (gpu, kind), errors in by.items()]
    every = [error for errors in by.values() for error in errors]
    rows.append(["**all**", "", f"{len(every)}", _percent(statistics.median(every))])
    yield from _table(["GPU", "kernel", "timings", "median error"], rows)


def _worst(rows: Sequence[Row]) -> Iterable[str]:
    yield from _table(
        [rows[0].figure if rows else "", "run", "measured", "predicted", "error"],
        [[row.id, f"{row.model}, {row.num_gpus} x {row.gpu}, {row.method}, {row.software}", f"{row.measured:.4g}",
          f"{row.predicted:.4g}", _percent(row.error)] for row in rows],
    )  # fmt: skip


def _refused(report: Report) -> Iterable[str]:
    if not report.refused:
        yield "Every row could be read and predicted."
        return
    yield f"{len(report.refused)} rows have no prediction:"
    yield ""
    for reason, count in Counter(r.reason.split(". ")[0] for r in report.refused).most_common():
        yield f"* {count}: {reason}"


# ---------------------------------------------------------------------------------------------------- the expensive
def _left_out(what: tuple[str, str]) -> Report:
    calibration, by = what
    folds = SOURCE_FOLDS if by == "source" else None
    return cross_validate(runs_behind(calibration), by, folds)  # type: ignore[arg-type]


SOURCE_FOLDS = 7
"""Folds that sources are dealt out over: each alone would take half an hour."""


def left_out_text() -> str:
    """Two kinds of fits of each calibration without parts of the runs, side by side."""
    asked = [(name, by) for by in ("source", "group") for name in CALIBRATIONS]
    with ProcessPoolExecutor(len(asked)) as pool:
        found = list(pool.map(_left_out, asked))
    half = len(CALIBRATIONS)
    by_source, by_group = (Report(rows=[row for r in some for row in r.rows]) for some in (found[:half], found[half:]))
    after = after_one_run(by_source)
    seen = in_sample()
    by_name = [
        {s.name: s for s in report.by_source if s.figure == "speed"} for report in (seen, by_group, by_source, after)
    ]
    rows = []
    for name, shipped in by_name[0].items():
        if shipped.runs >= FEW:
            _, group, source, one = (of.get(name) for of in by_name)
            errors = map(_median, (shipped, group, source))
            rows.append([name, f"{shipped.runs}", *errors, _inside(source), _median(one), _inside(one)])
    overall = [_overall(report, "speed") for report in (seen, by_group, by_source, after)]
    plain, group, source, one = overall
    assert plain is not None
    rows.append(["**all**, median error", f"{plain.runs}", *map(_median, (plain, group, source)), _inside(source),
                 _median(one), _inside(one)])  # fmt: skip
    rows.append(["**all**, mean error", "", *(_percent(s.mean_error) for s in (plain, group, source) if s), "",
                 _percent(one.mean_error) if one else "", ""])  # fmt: skip
    middles: list[float] = [statistics.median(s.median_error for s in of.values()) for of in by_name]
    rows.append(["**median of sources**", f"{len(by_name[0])} sources", *map(_percent, middles[:3]), "",
                 _percent(middles[3]), ""])  # fmt: skip
    rows.append(_many_gpus(by_name))
    columns = ["speed", "runs", "in sample", "group left out", "source left out", "inside", "after one run", "inside"]
    return "\n".join(
        [
            "## Left out",
            "",
            "Median error of speed, of joint fits that have not seen the run's group (repeats, and neighbours that "
            "differ in the",
            "batch; 5 folds), or anything of its source (7 folds). *Inside*: share within the 80 % interval that an",
            "estimate states of a stack it has no evidence of. *After one run*: the same fits, given one measured run",
            "of the source (that of median length) for a factor on its time; errors are of its other runs. Sources of",
            f"fewer than {FEW} runs count in the last lines alone.",
            "",
            *_table(columns, rows),
        ]
    )


def _many_gpus(by_name: Sequence[dict[str, Summary]]) -> list[str]:
    """Medians over the sources of `multi.csv` that have three runs or more."""
    counted = Counter(run.source_key for run in public_runs("multi"))
    sources = [name for name in by_name[0] if counted[name] >= 3 and by_name[0][name].runs >= 3]
    middles = [statistics.median(of[name].median_error for name in sources if name in of) for of in by_name]
    return ["**median of many-GPU sources**", f"{len(sources)} sources", *map(_percent, middles[:3]), "",
            _percent(middles[3]), ""]  # fmt: skip


HELD = (None, *COEFFICIENT_NAMES, "hardware", "stacks", "everything")


def _without(held: str | None) -> tuple[float, float] | None:
    return without(runs_behind(CALIBRATIONS[0]), held)


def bought_text() -> str:
    with ProcessPoolExecutor() as pool:
        found = dict(zip(HELD, pool.map(_without, HELD), strict=True))
    names = {None: "nothing", "hardware": "factors of architectures", "stacks": "factors of stacks"}
    rows = [[str(names.get(held, held)), *map(_percent, errors)] for held, errors in found.items() if errors]
    return "\n".join(
        [
            "## What each coefficient bought",
            "",
            f"Error of runs whose group the fit of `{CALIBRATIONS[0]}` has not seen, when one coefficient is held at",
            "its prior and the others are fitted anew. Coefficients that are not named are held in any case: these",
            "runs cannot tell them from their priors.",
            "",
            *_table(["held at the prior", "median", "mean"], rows),
        ]
    )


def _median(s: Summary | None) -> str:
    return "" if s is None else _percent(s.median_error)


def _inside(s: Summary | None) -> str:
    return "" if s is None else f"{100 * s.coverage:.0f} %"


# ------------------------------------------------------------------------------------------------------------ text
def _cells(s: Summary | None) -> list[str]:
    if s is None:
        return [""] * 5
    return [
        f"{s.runs}",
        _percent(s.median_error),
        _percent(s.mean_error),
        _percent(s.bias),
        f"{100 * s.coverage:.0f} %",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) < 1 else f"{100 * share:.0f} %"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def page() -> str:
    used = [Calibration.load(name) for name in CALIBRATIONS]
    head = HEAD.format(calibrations=", ".join(f"`{c.name}` of {c.date} ({c.num_runs} runs)" for c in used))
    return f"{head}{left_out_text()}\n\n{bought_text()}\n\n{START}\n{in_sample_text()}\n{END}\n\n{WRONG}"


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def differences(text: str, other: str) -> list[str]:
    """Lines that differ in words, or in a number by more than its last digit."""
    lines, others = text.splitlines(), other.splitlines()
    if len(lines) != len(others):
        return [f"{len(lines)} lines for {len(others)}"]
    return [f"{a}\n  for {b}" for a, b in zip(lines, others, strict=True) if not _alike(a, b)]


def _alike(a: str, b: str) -> bool:
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return all(abs(float(x) - float(y)) <= 1.01 * 10.0 ** -len(x.partition(".")[2]) for x, y in pairs if x != y)


def in_sample_of(text: str) -> str:
    return text.partition(f"{START}\n")[2].partition(f"\n{END}")[0]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/accuracy.md.")
    parser.add_argument("--check", action="store_true", help="only compare the figures in sample with the page's")
    if parser.parse_args(args).check:
        wrong = differences(in_sample_text(), in_sample_of(PAGE.read_text(encoding="utf-8")))
        print("\n".join(wrong) or "the figures in sample are those of the page")
        return 1 if wrong else 0
    text = page()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
