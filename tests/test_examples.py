"""Every example runs in a fresh process from another folder, and prints what it promises."""

from __future__ import annotations

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
}


def test_every_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for text in PROMISES[name]:
        assert text in done.stdout
    if name == "shares.py":
        assert (tmp_path / "shares.png").stat().st_size > 20_000
