"""docs/accuracy.md says what its script computes. What is cheap is computed again; parts left out are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("make_accuracy")


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


def test_the_figures_in_sample_are_those_of_the_page(script: ModuleType, page: str) -> None:
    wrong = script.differences(script.in_sample_text(), script.in_sample_of(page))
    assert not wrong, "the page is out of date: run `python tools/make_accuracy.py` (10 minutes)\n" + "\n".join(wrong)


def test_in_sample_and_left_out_have_the_same_runs(page: str) -> None:
    """The tables that are not computed again must be of the same runs."""
    left_out, in_sample = (
        part.partition("\n## ")[0] for part in (page.split("## Left out")[1], page.split("## In sample")[1])
    )
    seen = dict(re.findall(r"^\| (\w+) \| (\d+) \|", in_sample.split("| memory, by")[0], re.MULTILINE))
    left = dict(re.findall(r"^\| (\w+) \| (\d+) \|", left_out, re.MULTILINE))
    assert len(left) > 5
    assert left == {name: runs for name, runs in seen.items() if name in left}


def test_the_comparison_sees_a_wrong_figure(script: ModuleType) -> None:
    text = "| fms | 258 | 4.3 % |\n| all | 527 | -0.5 % |"
    assert script.differences(text, text) == []
    assert script.differences(text, text.replace("4.3", "4.4")) == []  # the last digit may round either way
    assert len(script.differences(text, text.replace("4.3", "4.5"))) == 1
    assert len(script.differences(text, text.replace("fms", "liger"))) == 1
    assert len(script.differences(text, text.replace("527", "530"))) == 1
    assert len(script.differences(text, text.replace("-0.5", "0.5"))) == 1
    assert script.differences(text, text + "\nmore") == ["2 lines for 3"]
