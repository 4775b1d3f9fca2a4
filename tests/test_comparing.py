"""`compare`: every job is there, in the order of cost, with a reason that its own figures bear out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run
from test_report import html_text

import moecost
from moecost import Comparison, Estimate, Job, compare, estimate
from moecost.comparing import Candidate
from moecost.comparison_report import as_html, as_text
from moecost.errors import InvalidInputError
from moecost.report import MIN_WIDTH, WIDTH

TUNED: dict[str, Any] = {"model": "mistral-7b", "method": "qlora", "sequence_length": 1024, "price": 1.0}


def on(gpu: str, **fields: Any) -> dict[str, Any]:
    return TUNED | {"gpu": gpu} | fields


@pytest.fixture(scope="module")
def mixed() -> Comparison:
    """Two that fit, one that does not, one whose GPU nobody knows, one that is no job."""
    return compare([on("t4"), on("a40"), on("nosuch"), on("h100"), on("a40", methd="lora")])


def reasons(c: Comparison) -> dict[str, str]:
    return {x.label: x.reason for x in c.candidates}


# --------------------------------------------------------------------------------------------------------- order
def test_nothing_is_dropped_and_what_fits_comes_first(mixed: Comparison) -> None:
    assert len(mixed) == 5
    assert [c.status for c in mixed.candidates] == [
        "fits", "fits", "does not fit", "cannot be used", "cannot be used",
    ]  # fmt: skip
    costs = [e.cost_usd for e in mixed.estimates]
    assert costs == sorted(costs)
    assert mixed.best is mixed.estimates[0]
    assert mixed.sorted_by == "cost_usd"


def test_the_estimates_are_those_of_estimate(mixed: Comparison) -> None:
    for c in mixed.candidates:
        if c.estimate is not None:
            assert c.job is not None
            assert c.estimate == estimate(c.job.model_copy(update={"on_oom": "report"}))


def test_reasons_are_borne_out_by_the_figures(mixed: Comparison) -> None:
    first, second = mixed.estimates
    why = mixed.candidates[1].reason
    found = re.match(r"([0-9.]+) times the cost, ([0-9.]+) times the hours", why)
    assert found
    assert float(found[1]) == pytest.approx(second.cost_usd / first.cost_usd, abs=0.006)
    assert float(found[2]) == pytest.approx(second.hours / first.hours, abs=0.006)
    overlap = first.interval("cost_usd")[1] >= second.interval("cost_usd")[0]
    assert ("overlap" in why) == overlap
    unfit = mixed.candidates[2]
    assert unfit.estimate is not None
    memory = unfit.estimate.memory
    assert f"needs {memory.device_gib:.1f} of {memory.usable_gib:.1f} GiB" in unfit.reason
    assert mixed.candidates[0].reason == "the cheapest"


def test_errors_are_the_reason(mixed: Comparison) -> None:
    said = [c.reason for c in mixed.candidates if c.status == "cannot be used"]
    assert any("methd is not a field; did you mean method?" in text for text in said)
    assert any("unknown GPU 'nosuch'" in text for text in said)


def test_a_price_that_is_not_known() -> None:
    unpriced = on("mi300x", price=None)
    some = compare([unpriced, on("a40")])
    assert [c.label.split(",")[0] for c in some.candidates] == ["a40", "mi300x"]
    assert "its price is not known" in some.candidates[1].reason
    assert "1 without a known price" in some.notes[0]
    none = compare([unpriced | {"num_gpus": 2}, unpriced])
    assert none.sorted_by == "gpu_hours"
    assert "no price is known" in none.notes[0]
    hours = [e.gpu_hours for e in none.estimates]
    assert hours == sorted(hours)
    assert none.candidates[0].reason == "the fewest GPU-hours"
    assert "not known" in as_text(some)


def test_jobs_dicts_and_estimates_are_the_same() -> None:
    fields = on("a40")
    found = compare([fields, Job(**fields), estimate(**fields)])
    assert len({c.estimate.cost_usd for c in found.candidates if c.estimate}) == 1
    assert [c.job is None for c in found.candidates] == [False, False, True]
    assert len(reasons(found)) == 3  # labels differ


def test_none_fits() -> None:
    found = compare([on("t4"), on("t4", sequence_length=4096)])
    assert found.best is None
    assert found.estimates == ()
    assert found.notes == ("none of the jobs fits",)
    need = [c.estimate.memory.device_gib for c in found.candidates if c.estimate]
    assert need == sorted(need)  # what nearly fits first


@settings(max_examples=15)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "gpu": st.sampled_from(["a40", "t4", "h100", "mi300x", "nonsense"]),
                "num_gpus": st.sampled_from([1, 2]),
                "price": st.sampled_from([1.0, 5.0, None]),
                "micro_batch_size": st.sampled_from([1, 4, 64]),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_order_whatever_is_compared(changes: list[dict[str, Any]]) -> None:
    found = compare([TUNED | change for change in changes])
    assert len(found) == len(changes)
    rank = {"fits": 0, "does not fit": 1, "cannot be used": 2}
    ranks = [rank[c.status] for c in found.candidates]
    assert ranks == sorted(ranks)
    known = [e.cost_usd for e in found.estimates if not math.isnan(e.cost_usd)]
    assert known == sorted(known)
    assert all(math.isnan(e.cost_usd) for e in found.estimates[len(known) :])
    assert all(c.reason for c in found.candidates)
    assert len({c.label for c in found.candidates}) == len(changes)
    for width in (MIN_WIDTH, WIDTH):
        assert max(map(len, as_text(found, width).splitlines())) <= width


# -------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize(
    ("jobs", "labels"),
    [
        ([on("a40"), on("h100")], {"a40", "h100-80gb-sxm"}),
        ([on("a40"), on("a40", num_gpus=2)], {"1 x a40", "2 x a40"}),
        ([on("a40"), on("a40", method="lora")], {"qlora", "lora"}),
        ([on("a40"), on("a40", epochs=2)], {"epochs=1.0", "epochs=2.0"}),
        ([on("a40")], {"mistral-7b, a40"}),
        ([on("a40"), on("a40")], {"mistral-7b, a40 (1)", "mistral-7b, a40 (2)"}),
    ],
)
def test_labels_say_what_differs(jobs: list[dict[str, Any]], labels: set[str]) -> None:
    assert set(reasons(compare(jobs))) == labels


def test_own_labels() -> None:
    assert [c.label for c in compare([on("h100"), on("a40")], labels=["b", "a"]).candidates] == (
        ["b", "a"] if estimate(**on("h100")).cost_usd < estimate(**on("a40")).cost_usd else ["a", "b"]
    )
    with pytest.raises(InvalidInputError, match="1 labels for 2 jobs"):
        compare([on("h100"), on("a40")], labels=["b"])


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "nothing to compare"),
        (on("a40"), "takes a list of jobs, not dict"),
        ("a40", "takes a list of jobs, not str"),
        (None, "takes a list of jobs, not NoneType"),
        ([on("a40"), 3], re.escape("jobs[1] is 3")),
    ],
)
def test_what_cannot_be_compared(jobs: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compare(jobs)


# ------------------------------------------------------------------------------------------------------- display
def test_display_shows_every_job_and_reason(mixed: Comparison) -> None:
    text, said = " ".join(str(mixed).split()), " ".join(html_text(as_html(mixed)).split())
    for c in mixed.candidates:
        for shown in (text, said):
            assert " ".join(c.reason.split()) in shown
        assert c.label in said
    assert mixed._repr_html_() == as_html(mixed)
    assert "5 jobs, 2 of them fit, by cost" in text


def test_a_job_that_does_not_fit_shows_no_cost(mixed: Comparison) -> None:
    unfit = compare([on("t4")])
    assert "$" not in as_text(unfit)
    (row,) = unfit.rows()
    assert row["cost_usd"] is row["hours"] is row["queries_per_second"] is None
    assert row["device_gib"] > row["usable_gib"]
    assert {frozenset(row) for row in mixed.rows()} == {frozenset(row)}  # columns of every row


def test_strange_names_are_text(mixed: Comparison) -> None:
    nasty = "<script>alert(1)</script>\x1b[31m\n" + "x" * 300
    odd = mixed.model_copy(
        update={"candidates": tuple(c.model_copy(update={"label": nasty, "reason": nasty}) for c in mixed.candidates)}
    )
    assert "<script" not in as_html(odd)
    assert max(map(len, as_text(odd, MIN_WIDTH).splitlines())) <= MIN_WIDTH
    assert all(c.isprintable() or c == "\n" for c in as_text(odd))


def test_it_is_frozen_and_goes_through_json(mixed: Comparison) -> None:
    with pytest.raises(ValueError, match="frozen"):
        mixed.sorted_by = "gpu_hours"  # type: ignore[misc]
    back = Comparison.model_validate_json(mixed.model_dump_json())
    assert back == mixed  # no price is unknown here
    assert isinstance(back.candidates[0], Candidate)
    assert set(Comparison.model_json_schema()["properties"]) == set(Comparison.model_fields)


def test_pandas(mixed: Comparison) -> None:
    pytest.importorskip("pandas")
    frame = mixed.to_pandas()
    assert list(frame["status"]) == [c.status for c in mixed.candidates]
    assert frame["cost_usd"].notna().sum() == 2


def test_plot(mixed: Comparison) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert mixed.plot(ax) is ax
    assert {t.get_text() for t in ax.texts} == {c.label for c in mixed.candidates if c.status == "fits"}


# -------------------------------------------------------------------------------------------------- command line
@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    out = {}
    for name, fields in {"small": on("a40"), "large": on("h100"), "big": on("t4")}.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(fields), encoding="utf-8")
        out[name] = str(path)
    return out


def test_command(files: dict[str, str]) -> None:
    status, out, err = run("compare", *files.values())
    assert (status, err) == (0, "")
    expected = compare([on("a40"), on("h100"), on("t4")], labels=["small", "large", "big"])
    assert out == as_text(expected) + "\n"
    found = json.loads(run("compare", *files.values(), "--json")[1])
    assert found == expected.model_dump(mode="json")


def test_command_on_several_gpus(files: dict[str, str], tmp_path: Path) -> None:
    """A price in the file is that of its own GPU."""
    status, out, _ = run("compare", files["small"], "--gpu", "a40", "--gpu", "h100", "--json")
    assert status == 0
    prices = {c["label"]: c["estimate"]["usd_per_gpu_hour"] for c in json.loads(out)["candidates"]}
    assert prices == {"a40": 1.0, "h100": moecost.catalog.median_quote("h100").usd_per_gpu_hour}
    table = tmp_path / "prices.csv"
    table.write_text("gpu,gpu_count,market,usd_per_gpu_hour,provider\nh100,1,on_demand,7,mine\n", encoding="utf-8")
    out = run("compare", files["small"], "--gpu", "h100", "--prices", str(table), "--json")[1]
    assert json.loads(out)["candidates"][0]["estimate"]["usd_per_gpu_hour"] == 7
    out = run("compare", files["small"], "--gpu", "h100", "--set", "price=9", "--json")[1]
    assert json.loads(out)["candidates"][0]["estimate"]["usd_per_gpu_hour"] == 9
    out = run("compare", files["small"], files["large"], "--gpu", "a40", "--gpu", "l40s", "--json")[1]
    assert {c["label"] for c in json.loads(out)["candidates"]} == {
        "small on a40", "small on l40s", "large on a40", "large on l40s",
    }  # fmt: skip


def test_command_s_exit_status(files: dict[str, str], tmp_path: Path) -> None:
    assert run("compare", files["big"])[0] == 1
    assert run("compare", files["big"], files["small"])[0] == 0
    status, out, _ = run("compare", files["small"], "--gpu", "a4z")
    assert (status, "did you mean 'a40'" in out) == (2, True)
    status, out, err = run("compare", files["small"], str(tmp_path / "none.yaml"))
    assert (status, out) == (2, "")
    assert "none.yaml" in err
    assert err.count("\n") == 1


def test_an_estimate_is_kept_as_it_is() -> None:
    e = estimate(**on("a40"))
    (only,) = compare([e]).candidates
    assert only.estimate is e
    assert isinstance(only.estimate, Estimate)
