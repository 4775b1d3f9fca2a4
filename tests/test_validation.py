"""Measured against predicted: runs whose errors are known give exactly those, and no run is dropped in silence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moecost import Job, MeasuredRun, estimate
from moecost.calibration import Calibration
from moecost.errors import FitError, InvalidInputError, MoECostError
from moecost.fitting import FACTOR_LOG_SD, NOISE, stack_problem
from moecost.measurements import Runs, read
from moecost.results import Estimate
from moecost.units import HOUR
from moecost.validation import Report, Row, after_one_run, cross_validate, shrinkage, validate
from moecost.validation_report import BAND, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

TINY = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 32000, "name": "tiny"}  # fmt: skip


def job(**fields: Any) -> Job:
    return Job(**({"model": TINY, "gpu": "a40", "sequence_length": 512, "micro_batch_size": 2} | fields))


def predicted(asked: Job) -> Estimate:
    return estimate(asked.model_copy(update={"on_oom": "report"}))


def timed(error: float, asked: Job | None = None, **fields: Any) -> MeasuredRun:
    """A run whose step is predicted with that error: predicted / measured - 1."""
    asked = asked or job()
    return MeasuredRun(job=asked, step_seconds=predicted(asked).step.seconds / (1 + error), **fields)


# ------------------------------------------------------------------------------------------------------- figures
def test_errors_bias_and_coverage_are_those_of_the_runs() -> None:
    errors = [-0.05, -0.02, 0.0, 0.03, 0.10, 0.40, 3.0]
    report = validate([timed(e, source="me", id=f"r{i}") for i, e in enumerate(errors)])
    (speed,) = report.overall
    assert (speed.name, speed.figure, speed.runs) == ("speed", "speed", 7)
    assert speed.median_error == pytest.approx(0.05, rel=1e-9)
    assert speed.mean_error == pytest.approx(sum(map(abs, errors)) / 7, rel=1e-9)
    assert speed.bias == pytest.approx(0.03, rel=1e-9)
    low, high = predicted(job()).interval("step.seconds", 0.8)
    within = [e for e in errors if low <= predicted(job()).step.seconds / (1 + e) <= high]
    assert 0 < len(within) < 7
    assert speed.coverage == pytest.approx(len(within) / 7)
    assert [row.log_error for row in report.rows] == pytest.approx([math.log1p(e) for e in errors], abs=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_a_run_lies_inside_up_to_the_ends_of_the_interval(level: float) -> None:
    e = predicted(job())
    for figure, value, field in (("speed", "step.seconds", "step_seconds"), ("hours", "hours", "run_hours")):
        for bound, outwards in zip(e.interval(value, level), (-1, 1), strict=True):
            for factor, inside in ((math.exp(-1e-6 * outwards), True), (math.exp(1e-6 * outwards), False)):
                report = validate([MeasuredRun(job=job(), **{field: bound * factor})], level=level)
                (row,) = [row for row in report.rows if row.figure == figure]
                assert row.inside is inside


SPEEDS: dict[str, Callable[[Estimate], float]] = {
    "step_seconds": lambda e: e.step.seconds / 1.25,
    "queries_per_second": lambda e: e.queries_per_second * 1.25,
    "tokens_per_second": lambda e: e.padded_tokens_per_second * 1.25,
    "run_hours": lambda e: e.hours / 1.25,
}


@pytest.mark.parametrize("field", SPEEDS)
def test_every_speed_is_an_error_of_time(field: str) -> None:
    """A run 1.25 times as fast as predicted: its time is predicted 25 % too long. The fit sees the same error."""
    asked = job(dataset="math-14k", sequence_length=256, software="hf-peft-2024", epochs=2, micro_batch_size=3)
    run = MeasuredRun(job=asked, **{field: SPEEDS[field](predicted(asked))})
    (row,) = [row for row in validate([run]).rows if row.figure == "speed"]
    assert row.field == field
    assert row.error == pytest.approx(0.25, rel=1e-9)
    e = predicted(asked)
    at = e.hours * HOUR / e.steps if field == "run_hours" else e.step.seconds
    assert row.predicted == pytest.approx(at, rel=1e-9)
    problem, _, _ = stack_problem([run], "hf-peft-2024")
    assert problem.cases[0].measured_s == pytest.approx(row.measured, rel=1e-9)


def test_the_most_direct_speed_counts() -> None:
    e = predicted(job())
    run = MeasuredRun(job=job(), step_seconds=e.step.seconds, queries_per_second=99 * e.queries_per_second,
                      run_hours=e.hours / 2)  # fmt: skip
    speed, hours = validate([run]).rows
    assert (speed.field, speed.error) == ("step_seconds", pytest.approx(0, abs=1e-12))
    assert (hours.figure, hours.error) == ("hours", pytest.approx(1.0, rel=1e-9))


@pytest.mark.parametrize(
    ("kind", "figure"),
    [
        ("allocated", "allocated_gib"),
        ("reserved", "reserved_gib"),
        ("nvidia-smi", "device_gib"),
        (None, "reserved_gib"),
    ],
)
def test_memory_is_compared_by_its_kind(kind: Any, figure: str) -> None:
    memory = predicted(job()).memory
    run = MeasuredRun(job=job(), peak_memory_gib=getattr(memory, figure) / 1.1, memory_kind=kind)
    (row,) = validate([run]).rows
    assert (row.figure, row.field) == ("memory", kind or "kind not said")
    assert row.error == pytest.approx(0.1, rel=1e-9)
    assert (row.low, row.high) == predicted(job()).interval(f"memory.{figure}")
    assert validate([run]).overall[0].name == f"memory, {kind or 'kind not said'}"


def test_outcomes_are_compared_with_fits() -> None:
    small, large = job(), job(micro_batch_size=100_000)
    runs = [
        MeasuredRun(job=small, outcome="ok"),
        MeasuredRun(job=small, outcome="oom"),
        MeasuredRun(job=large, outcome="oom"),
    ]
    report = validate(runs)
    assert [(o.measured, o.predicted, o.right, o.close) for o in report.outcomes] == [
        ("ok", "ok", True, False),
        ("oom", "ok", False, False),
        ("oom", "oom", True, False),
    ]
    assert [(s.measured, s.runs, s.right, s.close) for s in report.by_outcome] == [("ok", 1, 1, 0), ("oom", 2, 1, 0)]
    assert report.rows == ()
    assert "1 predicted as fitting" in str(report)


def test_a_calibration_can_be_named_given_or_read(tmp_path: Path) -> None:
    runs = [timed(0.0)]
    other = Calibration.load("hf-peft-2024")
    other.save(tmp_path / "other.yaml")
    error = estimate(job(calibration=other)).step.seconds / predicted(job()).step.seconds - 1
    assert abs(error) > 0.005
    for given in (other, "hf-peft-2024", tmp_path / "other.yaml"):
        assert validate(runs, given).rows[0].error == pytest.approx(error, rel=1e-9)


# -------------------------------------------------------------------------------------------------------- groups
def test_groups() -> None:
    moe = {**TINY, "num_experts": 8, "num_experts_per_tok": 2}
    runs = [
        timed(0.1, source="a"),
        timed(0.3, source_key="a"),
        timed(-0.2, job(model=moe, gpu="h100", method="lora"), group="b/x#1"),
        timed(0.0, job(gpu="h100", software="torchtune"), source="elsewhere", group="b/y"),
    ]
    report = validate(runs)
    assert [(s.name, s.runs, round(s.bias, 9)) for s in report.by_source] == [("a", 2, 0.2), ("b", 2, -0.1)]
    assert [(s.name, s.runs) for s in report.by_gpu] == [("a40", 2), ("h100-80gb-sxm", 2)]
    assert [(s.name, s.runs) for s in report.by_method] == [("full", 3), ("lora", 1)]
    assert [(s.name, s.runs) for s in report.by_kind] == [("dense", 3), ("MoE", 1)]
    assert [(s.name, s.runs) for s in report.by_software] == [("hf-peft", 3), ("torchtune", 1)]
    assert [s.name for s in report.by("num_gpus")] == ["1"]
    with pytest.raises(InvalidInputError, match="did you mean source"):
        report.by("sourc")


def test_worst_are_the_farthest_off_in_logarithms() -> None:
    report = validate([timed(e, id=str(e)) for e in (0.5, -0.4, 0.1, -0.1)])
    assert [row.id for row in report.worst(3)] == ["-0.4", "0.5", "-0.1"]
    assert len(report.worst()) == 4
    assert report.worst(2, "memory") == ()
    assert report.worst(0) == ()
    with pytest.raises(InvalidInputError, match="speed, memory, hours"):
        report.worst(1, "sped")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ nothing is lost
def test_runs_that_cannot_be_predicted_are_counted_with_their_reason(tmp_path: Path) -> None:
    bad = MeasuredRun(job=job(gpu="no-such-gpu"), step_seconds=1.0, source="me", id="bad")
    worse = MeasuredRun(job=job(num_gpus=3, tensor_parallel_size=2), step_seconds=1.0, source="me", id="worse")
    report = validate([timed(0.0, source="me"), bad, worse])
    assert len(report.rows) == 1
    assert [(r.id, r.source) for r in report.refused] == [("bad", "me"), ("worse", "me")]
    assert "no-such-gpu" in report.refused[0].reason
    assert "WITHOUT A PREDICTION: 2 runs" in str(report)
    assert "no-such-gpu" in str(report)


def test_rows_that_could_not_be_read_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,gpu,sequence_length,step_seconds\nllama-2-7b,a40,512,3\nnope,a40,512,3\nnope,a40,512,4\n")
    report = validate(read(path, on_error="report"))
    assert len(report.rows) == 1
    assert [r.id for r in report.refused] == ["runs.csv, line 3", "runs.csv, line 4"]
    assert len({r.reason for r in report.refused}) == 1
    assert str(tmp_path) not in str(report)
    assert validate(Runs([], ["something odd"])).refused[0].reason == "not read: something odd"


def test_a_report_of_nothing() -> None:
    report = validate([])
    assert (
        report.rows == report.outcomes == report.refused == report.overall == report.by_source == report.worst() == ()
    )
    assert str(report) == "MEASURED AGAINST PREDICTED: no run could be compared"
    assert Report.model_validate_json(report.to_json()) == report
    with pytest.raises(InvalidInputError, match="nothing to plot"):
        report.plot()


@pytest.mark.parametrize("level", [0, 1, -1, True, "0.8", math.nan])
def test_a_level_that_is_none(level: Any) -> None:
    with pytest.raises(InvalidInputError, match="level="):
        validate([], level=level)


@pytest.mark.parametrize("runs", [["a run"], "runs.csv", 3, [None]])
def test_what_is_no_run(runs: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a list of MeasuredRun"):
        validate(runs)


def test_a_single_run_is_a_list_of_one() -> None:
    assert len(validate(timed(0.1)).rows) == 1  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- presentation
@pytest.fixture(scope="module")
def report() -> Report:
    runs = [timed(e, job(gpu=g), source=s, id=f"{s}-{g}-{e}") for g in ("a40", "h100") for s in ("a", "b" * 60)
            for e in (0.05, -0.6, 12.0)]  # fmt: skip
    runs += [MeasuredRun(job=job(), peak_memory_gib=9.0, memory_kind="reserved", source="a", outcome="ok")]
    runs += [MeasuredRun(job=job(gpu="nothing\nlike it"), step_seconds=1.0)]
    return validate(runs)


def test_text_is_a_table_of_at_most_100_columns(report: Report) -> None:
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() and line.isprintable() for line in lines)
    for said in ("speed", "memory, reserved", "BY SOURCE", "BY GPU", "FARTHEST OFF", "WITHOUT A PREDICTION", "ran"):
        assert any(line.startswith(said) for line in lines)
    assert "BY METHOD" not in str(report)  # all are of one method
    assert "FARTHEST" not in report.text(0)


@pytest.mark.parametrize("width", [75, 80, 99])
def test_text_fits_a_narrow_terminal_and_says_the_same(report: Report, width: int) -> None:
    narrow = report.text(width=width)
    assert max(map(len, narrow.splitlines())) <= width
    shares, wide = (set(re.findall(r"[0-9.]+\s+%", text)) for text in (narrow, str(report)))
    assert {" ".join(share.split()) for share in shares} == {" ".join(share.split()) for share in wide}


def test_json_there_and_back(report: Report) -> None:
    text = report.to_json()
    assert Report.model_validate_json(text) == report
    found = json.loads(text)
    assert found["by_source"][0]["runs"] == report.by_source[0].runs
    assert Report.model_validate(found) == report
    with pytest.raises(InvalidInputError):
        Report.model_validate({"rows": [], "nonsense": 1})


def test_reports_are_frozen(report: Report) -> None:
    with pytest.raises(ValueError, match="frozen"):
        report.level = 0.5
    with pytest.raises(ValueError, match="frozen"):
        report.rows[0].measured = 0.5


def test_plot(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "runs.png"
    canvas = report.plot(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.stat().st_size > 20_000
    speed, memory = canvas.axes
    assert speed.get_xscale() == speed.get_yscale() == "log"
    assert speed.get_xlim() == speed.get_ylim()
    assert "12 runs" in speed.get_title()
    assert "GiB" in memory.get_xlabel()
    names = [text.get_text() for text in canvas.legends[0].get_texts()]
    assert names == ["a", "b" * 60, f"within a factor {BAND:g}"]
    with pytest.raises(InvalidInputError, match="cannot be written"):
        report.plot(tmp_path / "no" / "such.png")


def test_plot_without_matplotlib_says_what_to_install(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MoECostError, match=r"moecost\[plot\]"):
        report.plot()


# -------------------------------------------------------------------------------------------------- left-out parts
@cache
def two_sources() -> Report:
    """Source `slow` takes 1.5 times as long as predicted, all else is as predicted."""
    runs = [
        timed(0.0 if source == "usual" else 1 / 1.5 - 1, job(sequence_length=n, gpu=gpu, software=software),
              source=source, id=f"{source}-{n}")
        for source, gpu, software in (("usual", "a40", "hf-peft"), ("slow", "a100-80gb-sxm", "torchtune"))
        for n in (512, 1024, 2048, 4096, 8192)
    ]  # fmt: skip
    return cross_validate(runs, by="source")


def test_a_source_left_out_is_predicted_without_it() -> None:
    report = two_sources()
    assert len(report.rows) == 10
    assert {s.name: s.runs for s in report.by_source} == {"slow": 5, "usual": 5}
    slow = next(s for s in report.by_source if s.name == "slow")
    assert slow.bias == pytest.approx(1 / 1.5 - 1, abs=0.1)
    assert "without each run's source" in report.how


def test_intervals_of_a_source_left_out_know_that_nothing_was_seen_of_it() -> None:
    row = next(row for row in two_sources().rows if row.source == "slow")
    plain = predicted(job(sequence_length=512, gpu="a100-80gb-sxm", software="torchtune")).log_sd_time
    assert math.log(row.high / row.low) > 2 * 1.28 * plain


def test_after_one_run_the_others_are_near() -> None:
    after = after_one_run(two_sources())
    assert len(after.rows) == 8
    assert [(r.id, r.reason) for r in after.refused] == [
        ("usual-2048", "the run that the fit was given"),
        ("slow-2048", "the run that the fit was given"),
    ]
    slow = next(s for s in after.by_source if s.name == "slow")
    before = next(s for s in two_sources().by_source if s.name == "slow")
    assert slow.median_error < 0.3 * before.median_error


def row_of(error: float, length: float, source: str = "s") -> Row:
    return Row(id=f"{source}{length:g}", source=source, group="", model="m", kind="dense", gpu="g", num_gpus=1,
               method="full", software="x", length=length, trust=3, figure="speed", field="step_seconds",
               measured=1.0, predicted=1 + error, low=(1 + error) / 2, high=(1 + error) * 2)  # fmt: skip


def test_the_factor_of_one_run_is_shrunk() -> None:
    """By hand: the middle run is predicted at twice its time, so all are divided by 2 ** (1 / (1 + 0.04))."""
    rows = (row_of(0.2, 300), row_of(1.0, 200), row_of(3.0, 100), row_of(0.5, 100, "alone"))
    after = after_one_run(Report(rows=rows))
    share = 1 / (1 + (NOISE / FACTOR_LOG_SD) ** 2)
    assert shrinkage(1) == share
    assert [row.id for row in after.rows] == ["s300", "s100"]
    assert [row.predicted for row in after.rows] == pytest.approx([1.2 / 2**share, 4.0 / 2**share])
    assert [row.high / row.predicted for row in after.rows] == pytest.approx([2, 2])
    assert [r.reason for r in after.refused] == ["the run that the fit was given", "the only run of its source"]
    assert after_one_run(Report()).rows == ()


def test_parts_by_group_gpu_and_model() -> None:
    runs = [timed(0.05 * (-1) ** i, job(gpu=gpu, sequence_length=512 * n), group=f"g{n}", source="s")
            for i, gpu in enumerate(("a40", "h100")) for n in (1, 2, 3)]  # fmt: skip
    runs.append(MeasuredRun(job=job(), peak_memory_gib=3.0))
    assert "3 folds of 3 groups" in cross_validate(runs).how
    assert "6 of 7 runs have a speed" in cross_validate(runs).how
    assert "2 folds of 3 groups" in cross_validate(runs, folds=2).how
    assert "2 folds of 2 groups" in cross_validate(runs, by="gpu").how
    with pytest.raises(FitError, match="all runs share one model"):
        cross_validate(runs, by="model")
    bad = MeasuredRun(job=job(gpu="no-such-gpu"), step_seconds=1.0, id="bad")
    assert [r.id for r in cross_validate([*runs, bad]).refused] == ["bad"]


@pytest.mark.parametrize("wrong", [{"by": "colour"}, {"folds": 1}, {"folds": 2.5}, {"folds": True}, {"level": 2}])
def test_cross_validation_asked_for_wrongly(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        cross_validate([timed(0.1)], **wrong)
