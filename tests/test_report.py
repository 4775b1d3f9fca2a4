"""The report of an estimate: shows its figures, fits a width, and lets nothing of a user's names through."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import paper_runs
import pytest

from moecost import Estimate, GPUSpec, PriceQuote, estimate
from moecost.report import (
    COLOURS,
    MIN_WIDTH,
    WIDTH,
    as_html,
    as_text,
    chance,
    counted,
    dollars,
    percent,
    price,
    printable,
    seconds,
    significant,
)

DENSE = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
         "vocab_size": 32000, "name": "tiny"}  # fmt: skip
SPARSE = {**DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
PAPER = paper_runs.BUDGET


@pytest.fixture(scope="module")
def paper() -> Estimate:
    return estimate("mixtral-8x7b", "a40", **PAPER)


@pytest.fixture(scope="module")
def dense() -> Estimate:
    return estimate(DENSE, "a40", sequence_length=512)


@pytest.fixture(scope="module")
def too_large() -> Estimate:
    return estimate("mixtral-8x7b", "a40", sequence_length=1024, on_oom="report")


def line_of(text: str, start: str, nth: int = 0) -> str:
    return [line for line in text.splitlines() if line.strip().startswith(start)][nth]


def html_text(source: str) -> str:
    """Text of HTML; every element must be closed, and in order."""
    found: list[str] = []
    open_: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag in {"div", "span", "table", "tr", "td", "th", "ul", "li"}
            assert {name for name, _ in attrs} <= {"style", "title", "role", "aria-label"}
            open_.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_.pop() == tag

        def handle_data(self, data: str) -> None:
            found.append(data)

    parser = Parser()
    parser.feed(source)
    parser.close()
    assert not open_
    return " ".join(found)


# ------------------------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1.00"), (0.99961, "1.00"), (9.996, "10.0"), (99.96, "100"), (34810.2, "34,800"),
     (0.0012345, "0.00123"), (1.23456e-7, "1.23e-07"), (1.2e15, "1.20e+15"), (-2.5, "-2.50"),
     (math.inf, "inf"), (math.nan, "not known")],
)  # fmt: skip
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_units_suit_the_size() -> None:
    assert [seconds(v) for v in (0.0, 2e-6, 0.0451487, 3.9886, 7200.0)] == ["0 s", "2.00 us", "45.1 ms", "3.99 s",
                                                                           "7,200 s"]  # fmt: skip
    assert [counted(n) for n in (999_999, 1_500_000, 46_702_792_704, 1.04e12)] == ["999,999", "1.50 M", "46.7 B",
                                                                                  "1.04 T"]  # fmt: skip
    assert percent(0.36349) == "36.3 %"
    assert dollars(1234.5) == "$1,230"
    assert dollars(math.nan) == "not known"
    assert price(0.79) == "$0.79 a GPU-hour"
    assert price(12.345) == "$12.35 a GPU-hour"
    assert price(0.0123) == "$0.0123 a GPU-hour"


# ---------------------------------------------------------------------------------------------------------- text
def test_answers_are_the_estimate_s(paper: Estimate) -> None:
    text = as_text(paper)
    low, high = paper.interval("cost_usd")
    dollar_line = line_of(text, "dollars")
    assert f"${significant(paper.cost_usd)}" in dollar_line
    assert f"{significant(low)} to {significant(high)}" in dollar_line
    assert "$0.79 a GPU-hour" in dollar_line
    low, high = paper.interval("queries_per_second", 0.8)
    assert f"{significant(paper.queries_per_second)}  {significant(low)} to {significant(high)}" in text
    assert significant(paper.hours) in line_of(text, "hours")
    assert f"{paper.steps:,} steps" in line_of(text, "hours")
    assert line_of(text, "fits").split()[1] == "yes"
    assert line_of(text, "largest batch").split()[2] == str(paper.max_micro_batch_size) == "4"


def test_says_what_was_asked(paper: Estimate) -> None:
    text = as_text(paper)
    assert "mixtral-8x7b: 46.7 B parameters" in line_of(text, "model")
    assert "1 x a40" in line_of(text, "GPU")
    assert "qlora, run by hf-peft-2024" in line_of(text, "method")
    assert "math-14k: 13,921 queries of at most 1,024 tokens x 10 epochs" in line_of(text, "data")
    assert "4 sequences a GPU a pass" in line_of(text, "batch")


def test_time_and_memory_show_every_part(paper: Estimate) -> None:
    text = as_text(paper)
    for stage in ("forward", "backward", "optimizer", "other"):
        assert seconds(getattr(paper.step, stage)) in line_of(text, stage)
    assert seconds(paper.step.recompute) in line_of(text, "- of it recompute")
    assert f"{seconds(paper.step.host)}" in line_of(text, "TIME OF A STEP")
    for name, layer in paper.step.by_layer.items():
        line = line_of(text, name)
        assert seconds(layer.seconds) in line
        assert percent(layer.seconds / paper.step.seconds) in line
        assert layer.bound in line
    at = text.index("MEMORY AT ITS PEAK")
    for name, size in paper.memory.parts.items():
        if size:
            assert line_of(text[at:], name).split()[1] == significant(size)
    assert significant(paper.memory.device_gib) in line_of(text, "all on the device")
    assert {"backward": "in the backward pass"}[paper.memory.moment] in text
    assert max(paper.step.by_kernel, key=lambda k: paper.step.by_kernel[k].seconds) in text


def test_utilization_experts_notes_and_provenance(paper: Estimate) -> None:
    text = as_text(paper)
    assert percent(paper.utilization.step.sm) in line_of(text, "kernels")
    assert percent(paper.utilization.moe.dram) in line_of(text, "MoE kernels")
    assert percent(paper.mfu) in line_of(text, "FLOPs")
    assert paper.experts is not None
    assert significant(paper.experts.tokens_per_expert) in text
    flat = " ".join(text.split())
    for note in paper.notes:
        assert " ".join(note.split()) in flat
    assert "as given" in line_of(text, "price")
    assert paper.provenance.calibration in line_of(text, "calibration")


def test_calibration_tells_its_left_out_error(paper: Estimate) -> None:
    with_error = paper.provenance.model_copy(update={"calibration_error": 0.0512})
    assert "left-out runs 5.12 %" in as_text(paper.model_copy(update={"provenance": with_error}))
    without = paper.provenance.model_copy(update={"calibration_error": None})
    assert "no runs were left out" in as_text(paper.model_copy(update={"provenance": without}))


def test_price_quote_is_named(dense: Estimate) -> None:
    quote = dense.provenance.price
    assert isinstance(quote, PriceQuote)
    assert quote.provider in " ".join(as_text(dense).split("PROVENANCE")[1].split())
    assert quote.date in " ".join(as_text(dense).split("PROVENANCE")[1].split())


def test_a_price_that_is_not_known(paper: Estimate) -> None:
    unpriced = paper.model_copy(update={"cost_usd": math.nan, "usd_per_gpu_hour": math.nan})
    text = as_text(unpriced)
    assert "not known" in line_of(text, "dollars")
    assert "not known" in line_of(text, "price")
    for shown in (text, html_text(as_html(unpriced))):
        assert not re.search(r"\bnan\b", shown, re.IGNORECASE)


def test_a_dense_model_has_no_experts_section(dense: Estimate) -> None:
    assert dense.experts is None
    text = as_text(dense)
    assert "expert" not in text.split("NOTES")[0]
    assert "MoE" not in text.split("NOTES")[0]
    assert "all trained" in text
    html_text(as_html(dense))


def test_a_job_that_does_not_fit_says_so(too_large: Estimate) -> None:
    text = as_text(too_large)
    assert line_of(text, "fits").split()[1] == "NO"
    assert "GiB too much" in " ".join(text.split())


def test_shares_are_drawn_as_bars(paper: Estimate) -> None:
    bar = line_of(as_text(paper), "moe").count("#")
    assert bar == round(20 * paper.step.by_layer["moe"].seconds / paper.step.seconds)


@pytest.mark.parametrize("width", [MIN_WIDTH, 80, WIDTH, 140])
def test_fits_its_width(paper: Estimate, dense: Estimate, too_large: Estimate, width: int) -> None:
    for e in (paper, dense, too_large):
        assert max(map(len, as_text(e, width).splitlines())) <= width
    assert all(line == line.rstrip() for line in as_text(paper, width).splitlines())


def test_long_and_strange_names_keep_the_width(paper: Estimate) -> None:
    name = "x" * 300 + "\n\x1b[31mred\u202e"
    named = paper.model_copy(update={"model": name, "notes": ("word " * 200, "y" * 500, "\x07\x00")})
    for width in (MIN_WIDTH, WIDTH):
        text = as_text(named, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(c.isprintable() or c == "\n" for c in text)
    assert printable("a\tb\x1b") == "a b?"


def test_print_shows_the_text(paper: Estimate) -> None:
    assert str(paper) == as_text(paper)
    assert paper._repr_html_() == as_html(paper)


def test_extreme_figures_do_not_break_it(paper: Estimate) -> None:
    step = paper.step.model_copy(update={"seconds": 0.0, "by_layer": {}, "by_kernel": {}})
    odd = paper.model_copy(update={"step": step, "hours": math.inf, "mfu": 0.0, "notes": (), "num_parameters": 0})
    assert "inf" in line_of(as_text(odd), "hours")
    assert "NOTES" not in as_text(odd)
    html_text(as_html(odd))


def test_long_and_short_runs_are_put_in_words(paper: Estimate) -> None:
    assert "10.0 days" in as_text(paper.model_copy(update={"hours": 240.0}))
    assert "30.0 minutes" in as_text(paper.model_copy(update={"hours": 0.5}))
    one = as_text(paper.model_copy(update={"steps": 1, "epochs": 1.0, "num_queries": 1, "micro_batch_size": 1}))
    assert "x 1 epoch" in one
    assert "1 step of" in one
    assert "1 sequence a GPU" in one
    assert "2.5 epochs" in as_text(paper.model_copy(update={"epochs": 2.5}))


def test_waiting_for_the_wire_is_told(paper: Estimate) -> None:
    step = paper.step.model_copy(update={"communication": 0.5})
    assert "500 ms" in as_text(paper.model_copy(update={"step": step, "bound": "communication"})).split("forward")[0]


# ---------------------------------------------------------------------------------------------------------- HTML
def test_html_shows_the_same_figures(paper: Estimate) -> None:
    source = as_html(paper)
    said = " ".join(html_text(source).split())
    for word in as_text(paper).replace("#", " ").split():
        assert word.lower().strip("-:") in said.lower(), word
    assert source.startswith("<div")
    assert source.endswith("</div>")
    assert "<style" not in source
    assert "url(" not in source


def test_html_bars_fill_the_whole(paper: Estimate, too_large: Estimate) -> None:
    for e in (paper, too_large):
        for bar in as_html(e).split('role="img"')[1:]:
            widths = [float(found) for found in re.findall(r"width:([0-9.]+)%", bar.split("</div>")[0])]
            assert sum(widths) <= 100 + 1e-2 * len(widths)
            assert sum(widths) == pytest.approx(100, abs=3) or "layer kind" in bar


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_html_escapes_names() -> None:
    nasty = """<script>alert(1)</script>"'&amp;<img src=x onerror=alert(1)>"""
    e = estimate({**SPARSE, "name": nasty}, "a40", sequence_length=128)
    quote = PriceQuote(usd_per_gpu_hour=1.0, provider=nasty, source=nasty)
    layers = {nasty: e.step.by_layer["moe"]}
    e = e.model_copy(
        update={
            "notes": (nasty,),
            "gpu": nasty,
            "step": e.step.model_copy(update={"by_layer": layers, "by_kernel": layers}),
            "provenance": e.provenance.model_copy(update={"price": quote, "calibration": nasty, "software": nasty}),
        }
    )
    source = as_html(e)
    assert "<script" not in source
    assert "<img" not in source
    assert nasty in html_text(source)  # as text, through a parser that refuses any other element or attribute


def test_colours_are_told_apart_by_section() -> None:
    layers = ["attention", "mamba", "moe", "mlp", "norm", "embedding", "head"]
    parts = ["weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers", "framework context"]
    for names in (layers, parts, ["forward", "backward", "optimizer"]):
        assert len({COLOURS[name] for name in names}) == len(names)


TOSS_UP: dict[str, Any] = {"model": "mistral-7b", "method": "qlora", "sequence_length": 1024, "price": 1.0}


def with_little_to_spare(batch: int) -> GPUSpec:
    """An A40 whose memory is 1 % more than what a batch needs."""
    a40 = GPUSpec.load("a40")
    need = estimate(**TOSS_UP, gpu="h200", micro_batch_size=batch, on_oom="report").memory.device_gib
    return a40.model_copy(update={"memory_usable_gib": 1.01 * need})


def test_a_toss_up_says_so_and_names_the_batch_that_is_safe() -> None:
    gpu = with_little_to_spare(16)
    e = estimate(**TOSS_UP, gpu=gpu)
    assert e.max_micro_batch_size == 16
    assert 0.5 < e.fits_probability < 0.8
    assert f"yes ({100 * e.fits_probability:.0f} %)" in line_of(str(e), "fits")
    (note,) = [n for n in e.notes if n.startswith("fits with")]
    found = re.search(r"micro_batch_size=(\d+) is the largest that does with 90 %", note)
    assert found
    safe = int(found[1])
    surely = estimate(**TOSS_UP, gpu=gpu, micro_batch_size=safe)
    assert surely.fits_probability >= 0.9
    assert not any(n.startswith("fits with") for n in surely.notes)
    assert estimate(**TOSS_UP, gpu=gpu, micro_batch_size=safe + 1).fits_probability < 0.9


def test_a_toss_up_with_no_safe_batch() -> None:
    e = estimate(**TOSS_UP, gpu=with_little_to_spare(1))
    assert any("not even one sequence does with 90 %" in note for note in e.notes)


def test_chances_are_never_certain() -> None:
    assert [chance(p) for p in (0.0, 0.004, 0.5, 0.991, 1.0)] == ["<1 %", "<1 %", "50 %", ">99 %", ">99 %"]


def test_tiny_shares_have_no_digits() -> None:
    assert [percent(s) for s in (0.0, 1e-9, 9.9e-5, 1e-4)] == ["0 %", "<0.01 %", "<0.01 %", "0.0100 %"]
