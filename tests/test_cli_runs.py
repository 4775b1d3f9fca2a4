"""`moecost fit` and `moecost validate`: from a file of measured runs to a calibration and to errors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moecost import Job, estimate
from moecost.calibration import Calibration
from moecost.cli import app
from moecost.fitting import fit, fit_stacks
from moecost.measurements import read
from moecost.report import WIDTH
from moecost.validation import Report, validate

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

HEADER = "id,model,gpu,method,sequence_length,micro_batch_size,software,step_seconds,source,group\n"


def run(*args: str | Path) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) in this process."""
    apart: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    result = CliRunner(**apart).invoke(app, [str(a) for a in args], prog_name="moecost", env={"COLUMNS": None})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def write_runs(path: Path, softwares: Sequence[str] = ("hf-peft",), bad: int = 0) -> Path:
    """Eight runs a stack, slower than predicted by 10 %."""
    lines = [HEADER]
    for software in softwares:
        for length in (512, 1024, 2048, 4096):
            for batch in (1, 2):
                fields: dict[str, Any] = {"sequence_length": length, "micro_batch_size": batch, "software": software}
                job = Job(model="llama-2-7b", gpu="a100-80gb-sxm", method="lora", **fields)
                seconds = estimate(job.model_copy(update={"on_oom": "report"})).step.seconds * 1.1
                name = f"{software}-{length}-{batch}"
                lines.append(
                    f"{name},llama-2-7b,a100-80gb-sxm,lora,{length},{batch},{software},{seconds!r},me,g{length}\n"
                )
    lines += [f"bad{i},no-such-model,a40,lora,512,1,hf-peft,1,me,\n" for i in range(bad)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs.csv")


# ----------------------------------------------------------------------------------------------------------- fit
def test_fit_writes_what_the_library_fits(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    status, text, err = run("fit", runs, "-o", out)
    assert (status, err) == (0, "")
    mine = Calibration.load(out)
    assert mine == fit(read(runs), name="mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml", "runs.csv"]
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "CALIBRATION mine: fitted on 8 runs, base hf-peft"
    assert lines[-1] == f"written: {out}"
    for name, c in mine.coefficients.items():
        (line,) = [line for line in lines if line.split()[:1] == [name] and "by hardware" not in line]
        assert ("fitted, spread" in line) is c.fitted
        assert c.fitted or "held: " in line
    assert any(line.strip().startswith("in sample") for line in lines)
    assert any(line.strip().startswith("runs left out") for line in lines)
    error = validate(read(runs), mine).overall[0].mean_error
    assert error < validate(read(runs)).overall[0].mean_error


def test_fit_without_a_file_keeps_nothing(runs: Path, tmp_path: Path) -> None:
    status, text, _ = run("fit", runs, "--name", "try")
    assert status == 0
    assert text.startswith("CALIBRATION try: ")
    assert text.endswith("not written; -o mine.yaml keeps it\n")
    assert [p.name for p in tmp_path.iterdir()] == ["runs.csv"]


def test_fit_as_json_is_the_calibration(runs: Path, tmp_path: Path) -> None:
    status, text, _ = run("fit", runs, "-o", tmp_path / "mine.yaml", "--name", "x", "--json")
    assert status == 0
    assert Calibration.model_validate_json(text) == Calibration.load(tmp_path / "mine.yaml")
    assert json.loads(text)["name"] == "x"


def test_several_stacks_are_fitted_jointly_or_as_one(tmp_path: Path) -> None:
    path = write_runs(tmp_path / "runs.csv", ("hf-peft", "torchtune"))
    joint = Calibration.model_validate_json(run("fit", path, "--json")[1])
    assert joint == fit_stacks(read(path), name="joint")
    assert set(joint.software_factors) == {"hf-peft", "torchtune"}
    assert "time by stack: hf-peft" in run("fit", path)[1]
    one = Calibration.model_validate_json(run("fit", path, "--software", "hf-peft", "--name", "one", "--json")[1])
    assert one == fit(read(path), "hf-peft", name="one")


def test_a_calibration_is_replaced_whole_or_not_at_all(
    runs: Path, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "mine.yaml"
    out.write_text("what was there", encoding="utf-8")

    with full_disk():
        status, text, err = run("fit", runs, "-o", out)
    assert (status, text) == (2, "")
    assert err == f"moecost: error: {out}: cannot be written: No space left on device\n"
    assert out.read_text(encoding="utf-8") == "what was there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml", "runs.csv"]
    assert run("fit", runs, "-o", out)[0] == 0
    assert Calibration.load(out).name == "mine"


@pytest.mark.parametrize("name", ["mine.txt", "mine", "no/such/mine.yaml", "."])
def test_a_place_that_cannot_be_written_is_said_before_the_work(
    runs: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moecost.fitting.fit", lambda *_, **__: pytest.fail("fitted in vain"))
    status, text, err = run("fit", runs, "-o", tmp_path / name)
    assert (status, text) == (2, "")
    assert err.startswith("moecost: error: ")
    assert len(err.splitlines()) == 1


def test_rows_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    path = write_runs(tmp_path / "runs.csv", bad=5)
    for command in ("fit", "validate"):
        status, text, err = run(command, path)
        assert status == 0
        assert "8 runs" in text
        assert err.count("moecost: warning: left out: ") == 4
        assert f"{path}, line 10: unknown model 'no-such-model'" in err
        assert "left out: 2 more" in err


# ------------------------------------------------------------------------------------------------------ validate
def test_validate_prints_the_report(runs: Path) -> None:
    status, text, err = run("validate", runs)
    assert (status, err) == (0, "")
    assert text == f"{validate(read(runs))}\n"
    assert run("validate", runs, "--rows", "0")[1] == validate(read(runs)).text(0) + "\n"
    assert run("validate", runs, "--rows", "3")[1].count("llama-2-7b") == 3


def test_validate_as_json(runs: Path) -> None:
    status, text, _ = run("validate", runs, "--json")
    assert status == 0
    assert Report.model_validate_json(text) == validate(read(runs))
    assert json.loads(text)["overall"][0]["bias"] == pytest.approx(1 / 1.1 - 1, rel=1e-6)


def test_validate_with_a_calibration_and_a_plot(runs: Path, tmp_path: Path) -> None:
    assert run("fit", runs, "-o", tmp_path / "mine.yaml")[0] == 0
    status, text, _ = run(
        "validate", runs, "--calibration", tmp_path / "mine.yaml", "--plot", tmp_path / "p.png", "--json"
    )
    assert status == 0
    assert json.loads(text)["how"].endswith("calibration: mine")
    assert math.isclose(json.loads(text)["overall"][0]["bias"], 0, abs_tol=0.05)
    assert (tmp_path / "p.png").stat().st_size > 10_000


# ----------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fit", "{here}/none.csv"], "none.csv"),
        (["validate", "{here}/none.csv"], "none.csv"),
        (["validate", "{here}/empty.csv"], "empty"),
        (["validate", "{here}/bad.csv"], "unknown model 'no-such-model'"),
        (["fit", "{here}/bad.csv"], "unknown model 'no-such-model'"),
        (["fit", "{here}/runs.csv", "--software", "hf-pfet"], "did you mean 'hf-peft'"),
        (["validate", "{here}/runs.csv", "--calibration", "nope"], "unknown calibration 'nope'"),
        (["validate", "{here}/runs.csv", "--calibration", "{here}/nope.yaml"], "nope.yaml"),
        (["validate", "{here}/runs.csv", "--plot", "{here}/no/such.png"], "no such folder"),
        (["validate", "{here}/runs.csv", "--plot", "{here}/plot.nonsense"], "cannot be written"),
        (["fit", "{here}/memory.csv"], "no run has a measured speed"),
    ],
)
def test_bad_input_is_two_and_one_line(args: list[str], said: str, tmp_path: Path) -> None:
    write_runs(tmp_path / "runs.csv")
    write_runs(tmp_path / "bad.csv", (), bad=1)
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    columns = "model,gpu,method,sequence_length,micro_batch_size,peak_memory_gib,memory_kind\n"
    (tmp_path / "memory.csv").write_text(f"{columns}llama-2-7b,a40,lora,512,1,20,reserved\n", encoding="utf-8")
    status, text, err = run(*(a.format(here=tmp_path) for a in args))
    assert (status, text) == (2, "")
    assert err.startswith("moecost: error: ")
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.parametrize("args", [["fit", "a.csv", "b.csv"], ["validate", "a.csv", "--rows", "-1"], ["fit", "--jsn"]])
def test_wrong_usage_is_two(args: list[str]) -> None:
    assert run(*args)[:2] == (2, "")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(runs: Path, tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o500)
    assert run("fit", runs, "-o", shut / "mine.yaml")[0] == 2


def test_help_lists_both() -> None:
    text = run("-h")[1]
    assert "fit " in text
    assert "validate " in text
