"""Every example runs in a fresh process from another folder, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "table_iv.py": ["a100-80gb-pcie", "32.7"],
    "which_gpu.py": ["80 % interval", "h100"],
    "dense_or_sparse.py": ["experts a token"],
    "mixture_or_dense.py": ["dense model of", "paid back after"],
    "shares.py": ["sequence length", "written to"],
    "as_dependency.py": ['{"submit": true, "reasons": []'],
}


def test_every_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(PROMISES)


def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", PROMISES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr
    for text in PROMISES[name]:
        assert text in done.stdout
    if name == "shares.py":
        assert (tmp_path / "shares.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("job", "arguments", "status", "reasons"),
    [
        ("price: 1.0", ["--budget", "1000"], 0, []),
        ("price: 1.0", ["--budget", "0.01"], 1, ["the budget is $0.01"]),
        ("price: 1.0", ["--deadline-hours", "0.01"], 1, ["the deadline is 0.0 h"]),
        ("price: 1.0\nmicro_batch_size: 4096", ["--budget", "1e9"], 1, ["needs"]),
        ("price: 1.0", ["--budget", "0.01", "--deadline-hours", "0.01"], 1, ["the budget", "the deadline"]),
        ("prise: 1.0", [], 2, ["price"]),
        ("price: [", [], 2, ["job.yaml"]),
    ],
)
def test_the_guard_of_a_queue(job: str, arguments: list[str], status: int, reasons: list[str], tmp_path: Path) -> None:
    """Its exit status and its line of JSON are what another tool acts on."""
    text = f"model: mistral-7b\ngpu: a40\nmethod: lora\nsequence_length: 512\n{job}\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    done = run("as_dependency.py", tmp_path, "job.yaml", *arguments)
    assert (done.returncode, done.stderr) == (status, "")
    verdict = json.loads(done.stdout)
    assert verdict["submit"] == (status == 0)
    assert len(verdict["reasons"]) == len(reasons)
    assert all(part in said for part, said in zip(reasons, verdict["reasons"], strict=True))
    if status != 2:
        assert 0 < verdict["cost_usd"] < verdict["cost_usd_at_most"]
