"""The benchmarks run, and the page has the lines that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def lines(text: str) -> dict[str, tuple[str, str]]:
    """Time and rate by what was timed; a sweep's size apart, which is smaller in a quick run."""
    found = re.findall(r"^\| (.+?) \| ([\d.,]+ m?s) \| (.*?) ?\|$", text, re.MULTILINE)
    return {re.sub(r"[\d,]+ configurations", "configurations", what): (time, rate) for what, time, rate in found}


def test_a_quick_run_prints_the_lines_of_the_page_and_writes_nothing() -> None:
    before = PAGE.stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert PAGE.stat().st_mtime_ns == before
    now, kept = lines(done.stdout), lines(PAGE.read_text(encoding="utf-8"))
    assert len(now) >= 5
    assert set(now) == set(kept), "run `python benchmarks/run.py`"
    assert now["`sweep` of configurations, one process"][1].endswith("rows/s")
