"""The report page: whole in itself, says what the estimate says, and lets nothing of a user's names through."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import paper_runs
import pytest
from test_cli import run

import moecost
from moecost import Estimate, GPUSpec, Job, PriceQuote, estimate
from moecost.catalog import parse_yaml, write_text, yaml_text
from moecost.errors import InvalidInputError
from moecost.page import likely_gpus, other_batches, other_gpus, report_page, write_report
from moecost.report import dollars, percent, significant

NASTY = """<script>alert(1)</script>"'&amp;<img src=http://example.invalid/x.png onerror=alert(1)></pre>"""
VOID = {"meta", "link", "rect", "line", "path"}
# An element or attribute that is not here could load, link to or run something.
ELEMENTS = {
    *("html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "section"),
    *("h1", "h2", "p", "ul", "li", "dl", "dt", "dd", "div", "small", "code", "pre"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
    *("svg", "defs", "pattern", "rect", "line", "path", "text"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "rel", "class", "id", "role", "tabindex", "scope", "style"),
    *("aria-labelledby", "aria-label", "aria-hidden", "width", "height", "x", "y", "x1", "x2", "y1", "y2", "d"),
    *("fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "text-anchor"),
    *("patternunits", "patterntransform", "href"),
}


class Page(HTMLParser):
    """Elements, text and headings of a page; fails on what is not allowed or not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.ids, self.images, self.headings = "", [], [], []  # type: ignore[var-annotated]
        self.references: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.references += re.findall(r"url\(([^)]*)\)", str(found.get("fill", "")))
        self.references += [str(found["href"])] if "href" in found else []
        if tag == "svg" and found.get("role") == "img":
            self.images.append(found.get("aria-label") or "")
        elif tag == "svg":
            assert found.get("aria-hidden") == "true"
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "section":
            self.references.append(f"#{found['aria-labelledby']}")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data + " "


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(model="mixtral-8x7b", gpu="a40", **paper_runs.BUDGET)


@pytest.fixture(scope="module")
def paper(job: Job) -> Estimate:
    return estimate(job)


@pytest.fixture(scope="module")
def source(paper: Estimate, job: Job) -> str:
    return report_page(paper, job)


def said(source: str) -> str:
    return " ".join(Page(source).text.split())


# ------------------------------------------------------------------------------------------------------- content
def test_headline_figures_have_their_intervals(source: str, paper: Estimate) -> None:
    text = said(source)
    for field, shown in (("cost_usd", dollars(paper.cost_usd)), ("hours", significant(paper.hours)),
                         ("queries_per_second", significant(paper.queries_per_second)),
                         ("memory.device_gib", significant(paper.memory.device_gib))):  # fmt: skip
        low, high = paper.interval(field)
        assert shown in text
        assert f"{significant(low)} to {significant(high)}" in text


def test_notes_sources_and_calibration_are_told(source: str, paper: Estimate) -> None:
    text = said(source)
    for told in (*paper.notes, *paper.provenance.sources.values(), paper.provenance.calibration):
        assert " ".join(told.split()) in text
    assert paper.provenance.calibration_error is not None
    assert percent(paper.provenance.calibration_error) in text
    assert "$0.79 a GPU-hour, as given" in text


def test_the_quote_is_named() -> None:
    job = Job(model="mistral-7b", gpu="a40", method="qlora", sequence_length=512)
    e = estimate(job)
    quote = e.provenance.price
    assert quote is not None
    text = said(report_page(e, job))
    for told in (quote.provider, quote.date, quote.source):
        assert told in text


def test_the_job_reads_back(source: str, job: Job, tmp_path: Path) -> None:
    """What stands in the page's last block is the job."""
    block = source.split("<pre")[1].split("<code>")[1].split("</code>")[0]
    from html import unescape

    path = tmp_path / "job.yaml"
    path.write_text(unescape(block), encoding="utf-8")
    assert Job.from_yaml(path) == job


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_alternatives_are_those_of_compare(source: str, job: Job, paper: Estimate) -> None:
    text = said(source)
    gpus, batches = other_gpus(job), other_batches(job, paper)
    assert batches is not None
    own = next(c for c in gpus.candidates if "this job" in c.label)
    assert own.estimate == paper
    for c in (*gpus.candidates, *batches.candidates):
        assert c.label in text
        assert c.reason in text
    others = [c for c in gpus.candidates if c is not own]
    assert all(c.estimate is None or c.estimate.usd_per_gpu_hour != 0.79 for c in others)
    sizes = [c.estimate.micro_batch_size for c in batches.candidates if c.estimate]
    assert sizes == [1, 2, 4]


def test_likely_gpus_are_those_most_quoted() -> None:
    """Of the price file, counted by hand of code: its rows by GPU."""
    import collections
    import csv

    from moecost.catalog import data_folder

    lines = (data_folder("gpu_specs") / "prices.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    counted = collections.Counter(row["gpu"] for row in rows if row["market"] == "on_demand")
    found = likely_gpus(GPUSpec.load("a40"), 5)
    nvidia = [g for g in counted if g != "a40" and GPUSpec.load(g).vendor == "NVIDIA"]
    assert {counted[g] for g in found} == set(sorted((counted[g] for g in nvidia), reverse=True)[:5])
    assert likely_gpus(GPUSpec.load("mi300x"), 3) == [] or all(
        GPUSpec.load(g).vendor == "AMD" for g in likely_gpus(GPUSpec.load("mi300x"), 3)
    )


def test_batches_keep_the_global_batch() -> None:
    job = Job(model="mistral-7b", gpu="h100", method="qlora", sequence_length=512, global_batch_size=12, price=1.0)
    found = other_batches(job, estimate(job))
    assert found is not None
    assert all(c.estimate and c.estimate.global_batch_size == 12 for c in found.candidates)
    assert all(c.status == "fits" for c in found.candidates)


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_a_job_that_does_not_fit_says_so_first() -> None:
    job = Job(model="mixtral-8x7b", gpu="a40", sequence_length=1024, on_oom="report")
    text = said(report_page(estimate(job), job))
    assert text.index("It does not fit") < text.index("Asked")


def test_an_estimate_alone_has_a_page_too(paper: Estimate) -> None:
    text = said(report_page(paper))
    assert "Other GPUs" not in text
    assert "Reproduce" not in text
    assert "Calibration" in text


def test_a_price_that_is_not_known() -> None:
    job = Job(model="mistral-7b", gpu="mi300x", method="qlora", sequence_length=512)
    text = said(report_page(estimate(job), job))
    assert "not known" in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)


# ---------------------------------------------------------------------------------------------------------- form
def test_nothing_comes_from_elsewhere(source: str) -> None:
    page = Page(source)
    assert page.references
    assert all(found.startswith("#") or found == "data:," for found in page.references)
    assert {found[1:] for found in page.references if found[0] == "#"} <= set(page.ids)
    style = source.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in source
    assert "http" not in source.replace("http-equiv", "").split("<pre")[0] or not re.search(r'(src|href)="http', source)


def test_it_is_accessible(source: str) -> None:
    page = Page(source)
    assert page.headings[0] == 1
    assert set(page.headings[1:]) == {2}
    assert len(page.ids) == len(set(page.ids))
    assert len(page.images) == 3
    assert all("%" in text or "GiB" in text for text in page.images)
    assert '<html lang="en">' in source
    assert source.count("<table") == source.count("<caption") == source.count('role="region" tabindex="0" aria-label=')
    assert "@media print" in source
    assert "prefers-color-scheme: dark" in source


def test_bars_lie_within_their_picture(source: str, paper: Estimate) -> None:
    """And those of the memory sum up to its share of the scale."""
    for bar in source.split('class="bar"')[1:]:
        found = re.findall(r'<rect x="([0-9.]+)%" width="([0-9.]+)%"', bar.split("</svg>")[0])
        ends = [float(x) + float(width) for x, width in found]
        assert ends
        assert max(ends) <= 100.001
    high = max(paper.memory.usable_gib, paper.interval("memory.device_gib")[1])
    assert ends[-1] == pytest.approx(100 * paper.memory.device_gib / (1.04 * high), abs=0.01)


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_names_of_users_are_text(paper: Estimate) -> None:
    config = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
              "vocab_size": 32000, "name": NASTY}  # fmt: skip
    gpu = GPUSpec.load("a40").model_copy(update={"name": NASTY, "marketing_name": NASTY})
    quote = PriceQuote(usd_per_gpu_hour=1.0, provider=NASTY, region=NASTY, instance_type=NASTY, source=NASTY)
    job = Job(model=config, gpu=gpu, sequence_length=128, price=quote)
    e = estimate(job)
    e = e.model_copy(
        update={
            "notes": (NASTY,),
            "dataset": NASTY,
            "step": e.step.model_copy(update={"by_layer": {NASTY: e.step.by_layer["mlp"]}}),
            "provenance": e.provenance.model_copy(
                update={"calibration": NASTY, "software": NASTY, "sources": {NASTY: NASTY}}
            ),
        }
    )
    source = report_page(e, job)
    page = Page(source)  # refuses every other element and attribute
    assert "<script" not in source
    assert "<img" not in source
    assert page.text.count("<script>alert(1)</script>") > 10
    assert all(found.startswith("#") or found == "data:," for found in page.references)


# ------------------------------------------------------------------------------------------------------- writing
def test_a_page_is_written_whole_or_not_at_all(
    paper: Estimate, job: Job, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "r.html"
    out.write_text("what was there", encoding="utf-8")

    message = r"r\.html: cannot be written: No space left on device"
    with full_disk(), pytest.raises(InvalidInputError, match=message):
        write_report(out, paper, job)
    assert out.read_text(encoding="utf-8") == "what was there"
    assert os.listdir(tmp_path) == ["r.html"]
    paper.to_html(out, job)
    assert out.read_text(encoding="utf-8") == report_page(paper, job)
    assert os.listdir(tmp_path) == ["r.html"]


def test_a_folder_that_cannot_be_written_is_one_clear_message(
    paper: Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, text: str, encoding: str) -> None:  # a read-only folder stops everyone but root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(InvalidInputError, match=r"^\S+r\.html: cannot be written: Permission denied$"):
        paper.to_html(tmp_path / "r.html")


@pytest.mark.parametrize("name", ["no/such/r.html", "", ".", "a\0b.html"])
def test_paths_that_are_none(paper: Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        paper.to_html(name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "value",
    ["1e9", "0x10", "no", "", "~", "a: b", "# c", "- d", "12:30", "2024-01-01", "é\n中", " x ", "1.5", "'", '"', "&a",
     "*a", "!tag", "null", "True", "-", "[x", "{", "%", "@", 1, 1.5, 1e-30, 1e300, True, None, [1, ["x"]],
     {"k": {"l": []}}],
)  # fmt: skip
def test_yaml_reads_back_what_it_wrote(value: Any) -> None:
    shared = [value]
    fields = {"a": value, "b": shared, "c": shared}  # one object twice: no alias
    found = parse_yaml(yaml_text(fields))
    assert found == fields
    assert type(found["a"]) is type(value)


def test_a_written_file_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("a", "b"):
        write_text(tmp_path / "f", text)
        assert (tmp_path / "f").read_text() == text
    assert os.listdir(tmp_path) == ["f"]


# -------------------------------------------------------------------------------------------------- command line
def test_command(job: Job, paper: Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(job.to_yaml(), encoding="utf-8")
    assert run("report", "my.yaml") == (0, "written: my.html\n", "")
    assert Path("my.html").read_text(encoding="utf-8") == report_page(paper, job)
    status, out, _ = run("report", "my.yaml", "-o", "x.html", "--set", "epochs=1", "--json")
    assert status == 0
    assert json.loads(out)["epochs"] == 1
    assert "1 epoch" in said(Path("x.html").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_command_s_exit_status(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job.to_yaml(), encoding="utf-8")
    status, _, _ = run("report", str(path), "-o", str(tmp_path / "t4.html"), "--set", "gpu=t4")
    assert status == 1
    assert "It does not fit" in (tmp_path / "t4.html").read_text(encoding="utf-8")
    for out, message in (("x.pdf", "must end in .html"), ("no/x.html", "no such folder")):
        status, _, err = run("report", str(path), "-o", str(tmp_path / out))
        assert (status, message in err, err.count("\n")) == (2, True, 1)
    assert sorted(os.listdir(tmp_path)) == ["job.yaml", "t4.html"]


# ------------------------------------------------------------------------------------------------------- browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [f"--{flag}" for flag in (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-extensions", "disable-default-apps", "enable-logging=stderr",
    "virtual-time-budget=2000",
)]  # fmt: skip


def browse(page: Path, profile: Path) -> tuple[str, list[str], list[str]]:
    """(document as rendered, messages of its console, addresses that it asked for) of a real browser without network.

    What the browser asks for on its own has no origin in its log.
    """
    log = profile.with_suffix(".json")
    done = subprocess.run(
        [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", f"--log-net-log={log}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    by_page = [line for line in lines if '"initiator":"' in line and '"initiator":"not an origin"' not in line]
    asked = [url for line in by_page for url in re.findall(r'"url":"([^"]+)"', line)]
    return done.stdout, console, asked


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    return tmp_path_factory.mktemp("profiles")


def test_a_browser_renders_it_and_asks_for_nothing(source: str, paper: Estimate, profiles: Path) -> None:
    page = profiles / "page.html"
    page.write_text(source, encoding="utf-8")
    rendered, console, asked = browse(page, profiles / "one")
    assert console == []
    assert [url for url in asked if not url.startswith("data:")] == []
    for shown in (dollars(paper.cost_usd), significant(paper.hours), "It fits", "Other GPUs", "Reproduce"):
        assert shown in rendered


def test_the_policy_stops_what_would_be_asked_for(source: str, profiles: Path) -> None:
    """So that silence means something: what is slipped in is refused aloud, and asked for without the policy."""
    slipped = (
        '<img src="https://example.invalid/x.png"><script src="https://example.invalid/x.js"></script>'
        '<script>document.title = "run"</script><link rel="stylesheet" href="https://example.invalid/x.css">'
    )
    bad = source.replace("<footer>", slipped + "<footer>")
    page, loose = profiles / "bad.html", profiles / "loose.html"
    page.write_text(bad, encoding="utf-8")
    loose.write_text(without_policy(bad), encoding="utf-8")
    rendered, console, asked = browse(page, profiles / "two")
    assert len(console) >= 4
    assert asked == []
    assert "<title>run" not in rendered
    rendered, _, asked = browse(loose, profiles / "three")
    assert {f"https://example.invalid/x.{kind}" for kind in ("png", "js", "css")} <= set(asked)
    assert "<title>run" in rendered


def without_policy(source: str) -> str:
    return re.sub(r"<meta http-equiv[^>]*>", "", source)


@pytest.mark.parametrize("width", [400, 1200])
def test_it_has_room_at_any_width(source: str, profiles: Path, width: int) -> None:
    """Nothing but tables and code, which scroll by themselves, is wider than the window; measured in a frame."""
    page, frame = profiles / f"p{width}.html", profiles / f"frame{width}.html"
    measure = (
        "<script>const root = document.documentElement;"
        "parent.postMessage({over: root.scrollWidth - root.clientWidth, room: innerWidth}, '*')</script>"
    )
    loose = without_policy(source)  # it would stop the measuring
    page.write_text(loose.replace("</body>", measure + "</body>"), encoding="utf-8")
    frame.write_text(
        "<!doctype html><script>addEventListener('message', e => document.title = JSON.stringify(e.data))</script>"
        f'<iframe src="{page.name}" style="border:0;width:{width}px;height:900px"></iframe>',
        encoding="utf-8",
    )
    rendered, _, _ = browse(frame, profiles / f"w{width}")
    found = re.search(r"<title>(\{.*?\})</title>", rendered)
    assert found, rendered[:500]
    assert json.loads(found[1]) == {"over": 0, "room": width}


def test_version_is_told(source: str) -> None:
    assert f"moecost {moecost.__version__}" in source
