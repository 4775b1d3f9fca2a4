"""Pictures: what they show is the estimate's, they leave the caller's settings alone, and survive a lack of colour."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import paper_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost import Estimate, GPUSpec, estimate, plotting
from moecost.cost import pareto_front
from moecost.errors import InvalidInputError
from moecost.report import COLOURS, HATCHES

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(scope="module")
def paper() -> Estimate:
    return estimate("mixtral-8x7b", "a40", **paper_runs.BUDGET)


@pytest.fixture(scope="module")
def too_large() -> Estimate:
    return estimate("mixtral-8x7b", "a40", sequence_length=1024, on_oom="report")


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    plt.close("all")
    yield
    plt.close("all")


def widths(ax: Any) -> list[float]:
    return [patch.get_width() for patch in ax.patches if patch.get_width() > 0]


# ------------------------------------------------------------------------------------------------- one estimate
def test_bars_of_time_are_the_step(paper: Estimate) -> None:
    ax = plotting.time_bars(paper)
    assert sum(widths(ax)) == pytest.approx(paper.step.seconds, rel=1e-9)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[0] == max(paper.step.by_layer, key=lambda name: paper.step.by_layer[name].seconds)
    assert {"optimizer", "other"} <= set(names)


def test_bars_of_memory_begin_where_the_last_ends(paper: Estimate) -> None:
    ax = plotting.memory_bars(paper)
    *parts, whole = [p for p in ax.patches if p.get_width() > 0]
    assert (
        sum(p.get_width() for p in parts) == pytest.approx(whole.get_width()) == pytest.approx(paper.memory.device_gib)
    )
    for before, after in itertools.pairwise(parts):
        assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    usable = [line for line in ax.lines if set(line.get_xdata()) == {paper.memory.usable_gib}]
    assert len(usable) == 1
    (spread,) = [line for line in ax.lines if line.get_marker() == "|"]
    assert tuple(spread.get_xdata()) == paper.interval("memory.device_gib")


def test_what_does_not_fit_is_said_in_words(paper: Estimate, too_large: Estimate) -> None:
    assert "NOT" in plotting.memory_bars(too_large).get_title(loc="left")
    assert "NOT" not in plotting.memory_bars(paper).get_title(loc="left")


def test_plot_takes_two_axes_and_returns_their_figure(paper: Estimate) -> None:
    figure, axes = plt.subplots(1, 2)
    assert paper.plot(axes) is figure
    assert paper.plot() is not figure
    for wrong in (axes[0], [axes[0]], 3):
        with pytest.raises(InvalidInputError, match="two axes"):
            paper.plot(wrong)
    with pytest.raises(InvalidInputError, match="not Matplotlib axes"):
        paper.plot([1, 2])


def test_no_kernel_beats_the_roof(paper: Estimate) -> None:
    """The A40 of the datasheet: 149.7 TFLOP/s dense in bf16, 696 GB/s."""
    assert (paper.roof.peak_flops_per_s, paper.roof.bytes_per_s) == (149.7e12, 696e9)
    ax = paper.plot_roofline()
    points = np.concatenate([np.asarray(c.get_offsets()) for c in ax.collections])
    assert len(points) > 5
    assert (points[:, 1] <= np.minimum(points[:, 0] * 0.696, 149.7) * (1 + 1e-9)).all()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    roof = ax.lines[0]
    assert roof.get_xdata()[1] == pytest.approx(149.7e12 / 696e9)
    assert roof.get_ydata()[0] == pytest.approx(roof.get_xdata()[0] * 0.696)


def test_the_roofline_tells_all_gpu_time(paper: Estimate) -> None:
    """Points carry the share that the title does not give to kernels without FLOPs."""
    ax = paper.plot_roofline()
    (bare,) = re.findall(r"take ([0-9.]+) %", ax.get_title(loc="left"))
    kernels = paper.step.by_kernel.values()
    expected = sum(k.seconds for k in kernels if not k.flops) / sum(k.seconds for k in kernels)
    assert float(bare) == pytest.approx(100 * expected, rel=0.01)
    sizes = np.concatenate([c.get_sizes() for c in ax.collections])
    assert (sizes - 18).sum() / 400 == pytest.approx(1 - expected, rel=1e-6)


def test_the_roof_is_the_gpu_s_own() -> None:
    mine = GPUSpec.load("a40").model_copy(update={"name": "mine", "bandwidth_gb_per_s": 1000.0})
    e = estimate("mistral-7b", mine, method="qlora", sequence_length=512, price=1.0)
    assert e.roof.bytes_per_s == 1000e9
    executed = sum(k.flops for k in e.step.by_kernel.values())
    assert e.hfu * e.roof.peak_flops_per_s == pytest.approx(executed / e.step.seconds)


def test_kernels_that_stand_on_each_other_are_one_point(paper: Estimate) -> None:
    ax = paper.plot_roofline()
    said = [text.get_text() for text in ax.texts]
    assert any(text.startswith("expert.w1, w3, w2 ") for text in said), said


# --------------------------------------------------------------------------------------------- several estimates
@pytest.mark.parametrize("of", ["time", "memory"])
def test_shares_fill_each_bar(paper: Estimate, too_large: Estimate, of: Any) -> None:
    ax = plotting.shares([paper, too_large], ["a", "b"], of=of)
    for i in range(2):
        bars = [p for p in ax.patches if abs(p.get_x() + p.get_width() / 2 - i) < 0.1]
        assert sum(p.get_height() for p in bars) == pytest.approx(100)
    with pytest.raises(InvalidInputError, match="one label"):
        plotting.shares([paper], ["a", "b"])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    """Against the definition, pair by pair."""
    hours, cost = [p[0] for p in points], [p[1] for p in points]

    def beaten(p: tuple[int, int]) -> bool:
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)

    assert pareto_front(hours=hours, cost_usd=cost).tolist() == [not beaten(p) for p in points]


def test_what_is_not_known_is_not_on_the_front() -> None:
    nan, inf = float("nan"), float("inf")
    assert pareto_front(hours=[1, 2, nan], cost_usd=[nan, 3, 1]).tolist() == [False, True, False]
    assert pareto_front(hours=[], cost_usd=[]).tolist() == []
    assert not pareto_front(hours=[1.0, 2.0], cost_usd=[1.0, inf])[1]


def test_pareto_draws_the_front_and_counts_what_it_leaves_out() -> None:
    ax = plotting.pareto(hours=[1, 2, 3, 4], cost_usd=[9, 5, 6, float("nan")], labels=["a", "b", "c", "d"])
    beaten, front = (np.asarray(c.get_offsets()).tolist() for c in ax.collections)
    assert (beaten, front) == ([[3.0, 6.0]], [[1.0, 9.0], [2.0, 5.0]])
    assert {t.get_text() for t in ax.texts} == {"a", "b", "c"}
    assert ax.get_title(loc="left").startswith("1 of 4")


def test_pareto_of_estimates(paper: Estimate, too_large: Estimate) -> None:
    ax = plotting.pareto([paper, too_large])
    assert [t.get_text() for t in ax.texts] == ["1 x a40"]
    assert ax.get_title(loc="left").startswith("1 of 2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give estimates"),
        ({"hours": [1.0]}, "give estimates"),
        ({"hours": [1.0, 2.0], "cost_usd": [1.0]}, "2 hours, 1 costs"),
        ({"hours": [1.0], "cost_usd": [1.0], "labels": ["a", "b"]}, "2 labels"),
        ({"hours": [1.0], "cost_usd": [float("nan")]}, "no point"),
    ],
)
def test_pareto_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        plotting.pareto(**arguments)


# --------------------------------------------------------------------------------------------------------- lines
TABLE = {
    "gpu": np.array(["a40", "a40", "h100", "h100", "h100"]),
    "micro_batch_size": np.array([2, 1, 4, 1, 2]),
    "cost_usd": np.array([2.0, 1.0, np.nan, 3.0, 4.0]),
    "rank": np.array([8, 8, 8, 8, 8]),
}


def test_lines_are_sorted_and_broken_where_nothing_fits() -> None:
    ax = plotting.lines(TABLE, x="micro_batch_size", y="cost_usd", by="gpu")
    drawn = {line.get_label(): line for line in ax.lines}
    assert list(drawn) == ["a40", "h100"]
    assert drawn["a40"].get_xdata().tolist() == [1, 2]
    assert drawn["a40"].get_ydata().tolist() == [1, 2]
    np.testing.assert_equal(drawn["h100"].get_ydata(), [3, 4, np.nan])
    assert ax.get_ylabel() == "cost of the run [$]"
    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["h100", "a40"]  # as the lines end
    assert legend.get_title().get_text() == "gpu"


def test_lines_over_words_keep_their_order() -> None:
    ax = plotting.lines({"gpu": ["b", "a", "c"], "hours": [3, 1, 2]}, x="gpu", y="hours")
    assert [t.get_text() for t in ax.get_xticklabels()] == ["b", "a", "c"]
    assert ax.get_legend() is None


def test_lines_of_a_data_frame() -> None:
    pd = pytest.importorskip("pandas")
    ax = plotting.lines(pd.DataFrame(TABLE), x="micro_batch_size", y="cost_usd", by=["gpu", "rank"])
    assert [line.get_label() for line in ax.lines] == ["a40, 8", "h100, 8"]
    with pytest.raises(InvalidInputError, match="did you mean cost_usd"):
        plotting.lines(pd.DataFrame(TABLE), x="micro_batch_size", y="costusd")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": "micro_batch_size", "y": "cost_usd"}, "several rows have the same micro_batch_size"),
        ({"x": "rank", "y": "cost_usd", "by": "gpu"}, "several rows of the line a40"),
        ({"x": "micro_batch", "y": "cost_usd", "by": "gpu"}, "no column 'micro_batch'; did you mean micro_batch_size"),
        ({"x": "rank", "y": "cost_usd", "by": "nonsense"}, "no column 'nonsense'"),
        ({"x": "rank", "y": "gpu", "by": "micro_batch_size"}, "holds no numbers"),
    ],
)
def test_lines_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        plotting.lines(TABLE, **arguments)
    assert not plt.get_fignums() or message.startswith("several")


def test_too_many_lines_and_columns_of_two_lengths_are_refused() -> None:
    many = {"x": np.ones(100), "y": np.ones(100), "n": np.arange(100)}
    with pytest.raises(InvalidInputError, match="100 lines"):
        plotting.lines(many, x="x", y="y", by="n")
    with pytest.raises(InvalidInputError, match="one length"):
        plotting.lines({"x": [1, 2], "y": [1]}, x="x", y="y")
    with pytest.raises(InvalidInputError, match="one length"):
        plotting.lines({"x": [], "y": []}, x="x", y="y")


# ------------------------------------------------------------------------------------------------------- manners
def all_pictures(e: Estimate) -> list[Any]:
    return [
        e.plot(),
        e.plot_roofline(),
        plotting.shares([e], ["a"]),
        plotting.pareto([e]),
        plotting.lines(TABLE, x="micro_batch_size", y="cost_usd", by="gpu"),
    ]


def test_no_setting_is_changed_and_nothing_is_shown(paper: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    plt.figure()
    before = dict(matplotlib.rcParams)
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("show() was called"))
    all_pictures(paper)
    assert dict(matplotlib.rcParams) == before


def test_given_axes_are_drawn_on(paper: Estimate) -> None:
    _, axes = plt.subplots(2, 2)
    a, b, c, d = axes.ravel()
    assert plotting.roofline(paper, ax=a) is a
    assert plotting.pareto([paper], ax=b) is b
    assert plotting.shares([paper], ["x"], ax=c) is c
    assert plotting.lines(TABLE, x="micro_batch_size", y="cost_usd", by="gpu", ax=d) is d
    assert len(plt.get_fignums()) == 1
    part = plt.figure().subfigures(1, 2)[0]
    plotting.roofline(paper, ax=part.subplots())


def test_strange_names_are_drawn_as_they_are(paper: Estimate) -> None:
    """Dollar signs would begin mathematics, which may not parse."""
    odd = paper.model_copy(update={"model": r"$\frac{$" + "x" * 300, "gpu": "a\n$b"})
    for picture in (odd.plot_roofline(), plotting.pareto([odd]), plotting.shares([odd], ["$x_$"])):
        picture.figure.canvas.draw()


def test_lines_differ_without_colour() -> None:
    styles = [
        (plotting.MARKERS[n % len(plotting.MARKERS)], str(plotting.DASHES[n % len(plotting.DASHES)]))
        for n in range(plotting.MOST_LINES)
    ]
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize("names", [plotting.LAYERS, plotting.PARTS])
def test_neighbours_differ_without_colour(names: tuple[str, ...]) -> None:
    """By hatch, or by a lightness that is 0.1 apart (of 1, as the eye weighs red, green and blue)."""
    from matplotlib.colors import to_rgb

    colours = plotting.LAYER_COLOURS if "moe" in names else COLOURS

    def lightness(name: str) -> float:
        return float(np.dot(to_rgb(colours.get(name, "#999999")), (0.2126, 0.7152, 0.0722)))

    for a, b in itertools.pairwise(names):
        assert HATCHES[a] != HATCHES[b] or abs(lightness(a) - lightness(b)) > 0.1, (a, b)
    assert len({(HATCHES[n], colours.get(n)) for n in names}) == len(names)


def test_without_matplotlib_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.pyplot'] = None\n"
        "from moecost import MoECostError, estimate\n"
        "e = estimate('phi-2', 'a40', method='lora', sequence_length=256)\n"
        "try: e.plot_roofline()\n"
        "except MoECostError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'moecost[plot]'" in done.stdout
