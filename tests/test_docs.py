"""The documentation: every block of code runs as it stands, the site builds strictly, and its pages load nothing.

A block of a page may name a file (`title="job.yaml"`): the blocks after it find that file beside them, as a reader
would who followed the page from the top.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import moecost
from moecost.errors import OutOfRangeWarning

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*DOCS.rglob("*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
LEFT_OUT = ("pip install", "--install-completion")
"""Commands that change the machine they run on."""


class Fence(NamedTuple):
    language: str
    title: str | None
    text: str
    line: int


def blocks(page: str) -> list[Fence]:
    """Blocks of code of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Fence(found[1], _title(found[2]), found[3], text[: found.start()].count("\n") + 2)
        for found in FENCE.finditer(text)
    ]


def _title(options: str) -> str | None:
    found = re.search(r'title="([^"]+)"', options)
    return found[1] if found else None


def commands(text: str) -> list[str]:
    """Lines after a prompt, those that change the machine apart."""
    lines = (line[2:].removesuffix(" || exit") for line in text.splitlines() if line.startswith("$ "))
    return [line for line in lines if not any(part in line for part in LEFT_OUT)]


def test_the_extractor_sees_blocks() -> None:
    found = {page: [block.language for block in blocks(page)] for page in PAGES}
    assert found["docs/tutorial.md"].count("python") >= 6
    assert found["docs/how-to/prices.md"][:3] == ["console", "python", "csv"]
    assert sum(languages.count("console") for languages in found.values()) >= 10
    assert commands("$ moecost gpus || exit\nA40\n$ pip install x\n$ echo x\n") == ["moecost gpus", "echo x"]


@pytest.mark.parametrize("page", [page for page in PAGES if {"python", "console"} & {b.language for b in blocks(page)}])
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the top, its Python in one namespace and its commands in a shell, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and "(..." not in block.text:  # the README's `estimate(..., more)`
            _run_python(page, block, names)
        elif block.language == "console":
            _run_commands(commands(block.text))


def _run_python(page: str, block: Fence, names: dict[str, Any]) -> None:
    lines = "\n" * (block.line - 1) + block.text  # a traceback names the line of the page
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", OutOfRangeWarning)
        exec(compile(lines, page, "exec"), names)


def _run_commands(lines: list[str]) -> None:
    """In a shell that stops at the first one that fails."""
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", "\n".join(lines)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"


# -------------------------------------------------------------------------------------------------- the site
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error; without the network, should a plugin want it."""
    for package in ("mkdocs", "material", "mkdocstrings", "markdown_exec", "latex2mathml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'moecost[docs]'")
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    assert {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")} <= {
        path.relative_to(site) for path in site.rglob("*.html")
    }


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, pictures and fonts come with the site; a link to a paper is not loaded."""
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//"""
    )
    styles = re.compile(r"""@import\s+["']|url\(["']?(?:https?:)?//""")
    assert [path.name for path in site.rglob("*.html") if loads.search(path.read_text(encoding="utf-8"))] == []
    assert [path.name for path in site.rglob("*.css") if styles.search(path.read_text(encoding="utf-8"))] == []


def inventory(site: Path) -> set[str]:
    """Names that the reference has an entry for, from the index that other sites link by."""
    *header, body = (site / "objects.inv").read_bytes().split(b"\n", 4)
    assert b"zlib" in header[-1]
    return {line.split()[0] for line in zlib.decompress(body).decode().splitlines()}


def test_the_reference_has_every_public_name(site: Path) -> None:
    known = inventory(site)
    missing = [name for name in moecost.__all__ if f"moecost.{name}" not in known]
    assert not missing, f"say under docs/reference where these stand: {missing}"
    assert {
        "moecost.job.Job.lora_targets",
        "moecost.results.Estimate.interval",
        "moecost.roofline.roofline_time",
    } <= known


def test_no_page_shows_its_markup(site: Path) -> None:
    """Docstrings are written for a terminal: what their rewriting missed would stand on the page."""
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        text = re.sub(r"<(script|style|pre|code|math)\b.*?</\1>", "", page, flags=re.DOTALL)
        shown = re.findall(r":math:|\.\. math::|\.\. code-block|-{6,}|\\\(|\\\[|&gt;&gt;&gt;|```|={6,}", text)
        assert not shown, f"{path.name}: {shown[:5]}"


def test_formulas_are_mathml_and_code_was_run(site: Path) -> None:
    formulas = (site / "reference" / "formulas.html").read_text(encoding="utf-8")
    assert formulas.count("<math") > 15
    assert formulas.count('display="block"') > 5
    first = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r"80 % interval \d+\.\d to \d+\.\d", re.sub(r"<[^>]+>", "", first))
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert commands.count("Usage: moecost") >= 10


def test_docstrings_become_markdown(tool: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("griffe")
    pytest.importorskip("latex2mathml")
    script = tool("docs_site")
    text = (
        "Time of :math:`x^2`.\n\n.. math:: t = \\max(a,\n          b)\n\nParameters\n----------\nx, y : how far,\n"
        "    and how long. [m]\n**axes : others.\n\nReturns\n-------\nSeconds. [s]\n\nNotes\n-----\nOf $1 or $2.\n\n"
        ">>> f(1)\n2\n"
    )
    assert script.as_markdown(text).splitlines() == [
        "Time of \\(x^2\\).", "", "\\[t = \\max(a, b)\\]", "", "**Parameters**", "",
        "* `x`, `y`: how far, and how long. [m]", "* `**axes`: others.", "", "**Returns**", "", "Seconds. [s]", "",
        "**Notes**", "", "Of $1 or $2.", "", "```pycon", ">>> f(1)", "2", "```",
    ]  # fmt: skip
    assert script.plain_type("dict[str, Annotated[float, Field(gt=0)]]") == "dict[str, float]"
    mathml = script.on_page_content('<span class="arithmatex">\\(a &lt; b\\)</span>')
    assert mathml.startswith('<span class="formula"><math')
    assert "&lt;" in mathml or "&#x0003C;" in mathml
