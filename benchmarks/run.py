"""Time what people wait for, and write docs/benchmarks.md.

    python benchmarks/run.py            # a minute; prints the table and writes the page
    python benchmarks/run.py --quick    # seconds: once each and a small sweep, nothing is written

Each figure is the best of several repeats: on a machine that others use too, the least time is the one that says most
of the code.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import moecost
from moecost import Job, compare, estimate, sweep

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
REPEATS = 15
ESTIMATES = 50
"""No two alike, so that none is answered by a cache."""
JOB: Mapping[str, Any] = {
    "model": "mixtral-8x7b", "gpu": "a40", "method": "qlora", "lora_targets": ["w1", "w2", "w3", "gate"],
    "dataset": "math-14k", "sequence_length": 1024, "epochs": 10, "software": "hf-peft-2024", "price": 0.79,
}  # fmt: skip
AXES: Mapping[str, Sequence[Any]] = {
    "models": ["mixtral-8x7b", "qwen3-30b-a3b"],
    "gpus": ["a40", "a100-80gb-sxm", "h100-80gb-sxm", "h200-141gb-sxm"],
    "method": ["lora", "qlora"],
    "sequence_length": range(256, 8193, 256),
    "micro_batch_size": range(1, 65),
    "num_gpus": [1, 2, 4, 8],
    "lora_rank": [8, 16, 32, 64],
}


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    seconds: float
    of: int = 1
    """Rows or calls in that time."""
    unit: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        rate = f"{self.of / self.seconds:,.0f} {self.unit}/s" if self.unit else ""
        return self.what, _time(self.seconds if self.unit else self.seconds / self.of), rate


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def best_of(repeats: int, run: Callable[[], float]) -> float:
    """The least of some times. [s]"""
    return min(run() for _ in range(repeats))


def timed(call: Callable[[], object]) -> float:
    """Of one call. [s]"""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ what is timed
def cold(repeats: int) -> tuple[float, float]:
    """Seconds from the start of a fresh process until moecost is imported, and until it has made a first estimate.

    The best of some processes; Python's own start does not count. Modules are compiled before, as an installer does.
    """
    code = f"""if True:
        import time
        start = time.perf_counter()
        from moecost import estimate
        imported = time.perf_counter()
        estimate(**{dict(JOB)!r})
        print(imported - start, time.perf_counter() - start)"""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = folder
        command = [sys.executable, "-W", "ignore", "-c", code]
        runs = [
            tuple(
                map(float, subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split())
            )
            for _ in range(repeats + 1)
        ][1:]  # the first one writes the compiled modules
    return min(run[0] for run in runs), min(run[1] for run in runs)


def many_estimates() -> float:
    """Seconds of `ESTIMATES` warm ones."""
    jobs = [dict(JOB, gpu=("a40", "h100-80gb-sxm")[i % 2], micro_batch_size=1 + i % 4, lora_rank=8 + i, on_oom="report")
            for i in range(ESTIMATES)]  # fmt: skip
    return timed(lambda: [estimate(**job) for job in jobs])


def measured(quick: bool) -> list[Line]:
    """All lines of the table."""
    repeats = 1 if quick else REPEATS
    imported, first = cold(repeats)
    lines = [
        Line("`from moecost import estimate`, cold process", imported),
        Line("the same and the first estimate, cold process", first),
    ]
    many_estimates()  # reads the files, which stay in memory
    lines.append(Line("one estimate, warm", best_of(repeats, many_estimates), ESTIMATES))
    gpus = ["a40", "l40s", "a100-80gb-sxm", "h100-80gb-sxm", "h200-141gb-sxm"]
    jobs = [Job(**dict(JOB, gpu=gpu, price=1.0)) for gpu in gpus]
    lines.append(Line(f"`compare` of {len(jobs)} jobs", best_of(repeats, lambda: timed(lambda: compare(jobs)))))
    axes = dict(AXES, micro_batch_size=[1, 8]) if quick else AXES
    rows = math.prod(map(len, axes.values()))
    axes = {name: list(values) for name, values in axes.items()}
    took = best_of(repeats, lambda: timed(lambda: sweep(**axes, progress=False)))
    lines.append(Line(f"`sweep` of {rows:,} configurations, one process", took, rows, "rows"))
    if hasattr(moecost, "plan"):
        plan = lambda: moecost.plan("mixtral-8x7b", "math-14k", sequence_length=1024)  # noqa: E731
        plan()
        lines.append(Line("`plan` over all GPUs, methods and layouts", best_of(repeats, lambda: timed(plan))))
    return lines


# ------------------------------------------------------------------------------------------------ what is written
def machine() -> str:
    """Processor, number of cores, Python and numpy."""
    import numpy

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = named[0] if named else cpu
    return (f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
            f"numpy {numpy.__version__}")  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    """As Markdown."""
    rows = [("what", "time", "rate"), ("---", "--:", "--:"), *(line.cells for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(lines: Sequence[Line]) -> str:
    """docs/benchmarks.md"""
    return f"""# Benchmarks

Made by `python benchmarks/run.py` on {date.today().isoformat()}, on a machine that others used too, so each time is the
best of {REPEATS}: {machine()}.

{table(lines)}

An estimate is timed over {ESTIMATES} jobs of which no two are alike. The sweep is over 2 models, 4 GPUs, 2 methods, 32
sequence lengths, 64 batches, 4 numbers of GPUs and 4 ranks; every row has all figures and a reason where it does not
fit.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once each and a small sweep; write nothing")
    quick = parser.parse_args(arguments).quick
    lines = measured(quick)
    print(machine(), table(lines), sep="\n\n")
    if not quick:
        PAGE.write_text(page(lines), encoding="utf-8")
        print(f"\nwritten: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
