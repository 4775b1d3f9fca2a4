"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import paper_runs
import pytest
from typer.testing import CliRunner

import moecost
from moecost import GPUSpec, Job, ModelSpec, catalog
from moecost.cli import app, assignment
from moecost.errors import InvalidInputError
from moecost.report import WIDTH, as_text

CONFIG = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
          "vocab_size": 32000, "name": "tiny"}  # fmt: skip
TINY = ["--set", f"model={json.dumps(CONFIG)}", "--gpu", "a40", "--sequence-length", "512"]
PAPER: dict[str, Any] = {"model": "mixtral-8x7b", "gpu": "a40", **paper_runs.BUDGET}
PAPER_OPTIONS = [
    "--model", "mixtral-8x7b", "--gpu", "a40", "--method", "qlora", "--lora-targets", "w1, w2,w3,gate",
    "--dataset", "math-14k", "--sequence-length", "1024", "--epochs", "10", "--price", "0.79",
    "--software", "hf-peft-2024",
]  # fmt: skip
PLAIN = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "COLUMNS")}


def run(*args: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) in this process."""
    apart: dict[str, Any] = (
        {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    )  # click 8.1
    result = CliRunner(**apart).invoke(app, list(args), prog_name="moecost", env={"COLUMNS": None})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def shell(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The console script as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "moecost", *args], capture_output=True, text=True, env=PLAIN, timeout=120, **kwargs
    )


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(PAPER), encoding="utf-8")  # JSON is YAML
    return path


# ------------------------------------------------------------------------------------------------------ estimate
def test_json_equals_the_library(job_file: Path) -> None:
    expected = moecost.estimate(**PAPER).model_dump(mode="json")
    for args in ([str(job_file)], PAPER_OPTIONS, [str(job_file), "--gpu", "NVIDIA A40"]):
        status, out, _ = run("estimate", *args, "--json")
        assert status == 0
        assert json.loads(out) == expected


def test_json_holds_the_intervals_and_null_for_what_is_not_known() -> None:
    found = json.loads(run("estimate", *PAPER_OPTIONS, "--json")[1])
    e = moecost.estimate(**PAPER)
    assert set(found["intervals"]) == {"queries_per_second", "hours", "cost_usd", "memory.device_gib"}
    for field, interval in found["intervals"].items():
        assert tuple(interval) == e.interval(field, 0.8)
    unpriced = e.model_copy(update={"cost_usd": float("nan")})
    text = unpriced.model_dump_json()
    assert json.loads(text)["intervals"]["cost_usd"] is json.loads(text)["cost_usd"] is None
    assert moecost.Estimate.model_validate_json(text).hours == e.hours


def test_the_table_is_the_printed_estimate() -> None:
    status, out, err = run("estimate", *PAPER_OPTIONS)
    assert status == 0
    assert out == as_text(moecost.estimate(**PAPER)) + "\n"
    assert err == ""
    assert max(map(len, out.splitlines())) <= WIDTH


def test_options_win_over_the_file_and_set_over_options(job_file: Path) -> None:
    def asked(*args: str) -> Any:
        return json.loads(run("estimate", str(job_file), *args, "--json")[1])

    assert asked("--epochs", "1")["epochs"] == 1
    assert asked("--epochs", "1", "--set", "epochs=2")["epochs"] == 2
    assert asked("--method", "lora", "--on-oom", "report")["method"] == "lora"
    assert asked("--set", "price=null")["provenance"]["price"] is not None
    assert asked("--price", "cudo")["provenance"]["price"]["provider"] == "cudo"


def test_files_that_a_job_names_may_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "lengths.csv").write_text("tokens\n100\n200\n", encoding="utf-8")
    (folder / "job.yaml").write_text("model: phi-2\ngpu: a40\nmethod: lora\ndataset: lengths.csv\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    status, out, err = run("estimate", "jobs/job.yaml", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["num_queries"] == 2
    assert moecost.estimate(Job.from_yaml("jobs/job.yaml")).num_queries == 2
    (tmp_path / "lengths.csv").write_text("tokens\n100\n200\n300\n", encoding="utf-8")
    assert moecost.estimate(Job.from_yaml("jobs/job.yaml")).num_queries == 3  # the current folder comes first


RECIPES = Path(__file__).parent / "data" / "recipes"


@pytest.mark.parametrize(
    "name", ["llamafactory_qlora.yaml", "axolotl_qlora.yml", "torchtune_qlora.yaml", "trl_lora.yaml"]
)
def test_a_recipe_is_read_as_one(name: str) -> None:
    path = RECIPES / name
    options = ["--gpu", "h100", "--sequence-length", "1024", "--on-oom", "report", "--json"]
    status, out, err = run("estimate", str(path), *options)
    assert status in (0, 1), err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        e = moecost.estimate(Job.from_recipe(path, gpu="h100", sequence_length=1024, on_oom="report"))
    assert json.loads(out) == e.model_dump(mode="json")
    with pytest.raises(InvalidInputError, match=r"is a recipe of .*; use Job\.from_recipe"):
        Job.from_yaml(path)


def test_a_recipe_lacks_a_gpu() -> None:
    status, _, err = run("estimate", str(RECIPES / "llamafactory_qlora.yaml"))
    assert status == 2
    assert len(err.splitlines()) == 1
    assert err.count("llamafactory_qlora.yaml") == 1
    assert "gpu=" in err


def test_every_option_reaches_the_job() -> None:
    expected = moecost.estimate(
        Job(
            model=CONFIG,
            gpu="a40",
            sequence_length=512,
            method="lora",
            lora_rank=8,
            lora_targets=["q_proj", "v_proj"],
            epochs=1.5,
            num_queries=100,
            micro_batch_size=2,
            gradient_accumulation_steps=4,
            gradient_checkpointing=True,
            price=1.0,
            on_oom="report",
            optimizer="sgd",
            num_gpus=4,
            zero_stage=2,
            calibration="public-2026",
        )
    )
    options = (
        "--method lora --lora-rank 8 --lora-targets q_proj,v_proj --epochs 1.5 --num-queries 100 --micro-batch-size 2 "
        "--gradient-accumulation-steps 4 --gradient-checkpointing true --price 1 --on-oom report --set optimizer=sgd "
        "--num-gpus 4 --zero-stage 2 --calibration public-2026"
    )
    status, out, err = run("estimate", *TINY, *options.split(), "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == expected.model_dump(mode="json")


def test_market_is_asked_for() -> None:
    status, out, _ = run("estimate", *TINY, "--market", "spot", "--json")
    assert status == 0
    assert json.loads(out)["provenance"]["price"]["market"] == "spot"


def test_does_not_fit_is_one() -> None:
    args = ["estimate", "--model", "mixtral-8x7b", "--gpu", "a40", "--sequence-length", "1024"]
    status, out, err = run(*args)
    assert (status, out) == (1, "")
    assert re.match(r"moecost: does not fit: mixtral-8x7b needs [\d.]+ GiB .*\n\Z", err)
    status, out, _ = run(*args, "--on-oom", "report", "--json")
    assert status == 1
    assert json.loads(out)["fits"] is False
    status, out, _ = run(*args, "--on-oom", "report")
    assert status == 1
    assert "NO" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "qloraa"], "did you mean 'qlora'"),
        (["--gpu", "a4"], "unknown GPU 'a4'; did you mean"),
        (["--dataset", "math"], "math-14k"),
        (["--software", "hf-pfet"], "did you mean 'hf-peft'"),
        (["--gradient-checkpointing", "maybe"], "gradient_checkpointing"),
        (["--market", "spots"], "'spot'"),
        (["--on-oom", "die"], "on_oom"),
        (["--price", "nobody"], "no on_demand price of a40 from 'nobody'"),
        (["--lora-rank", "0"], "lora_rank"),
        (["--lora-targets", ","], "lora_targets"),
        (["--epochs", "-1"], "epochs"),
        (["--method", "lora", "--lora-targets", "nope"], "match no module"),
        (["--set", "optimiser=adamw"], "did you mean optimizer?"),
        (["--set", "optimizer"], "write field=value"),
        (["--set", "=1"], "write field=value"),
        (["--set", "price={"], "not valid YAML"),
        (["--set", "price=1\nmodel: x"], "one value"),
        (["--set", "model=nope"], "unknown model 'nope'"),
        (["--set", "num_gpus=yes"], "num_gpus"),
    ],
)
def test_bad_input_is_two_and_one_line(args: list[str], said: str) -> None:
    status, out, err = run("estimate", *TINY, *args)
    assert (status, out) == (2, "")
    assert err.startswith("moecost: error: ")
    assert "None:" not in err
    assert len(err.splitlines()) == 1
    assert said in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["estimate", *TINY, "--sequence-length", "many"], "--sequence-length"),
        (["estimate", *TINY, "--modle", "x"], "--model"),
        (["estimate", *TINY, "two.yaml", "three.yaml"], "three.yaml"),
        (["estimat"], "estimat"),
        (["gpus", "--jsn"], "--jsn"),
    ],
)
def test_wrong_usage_is_two(args: list[str], said: str) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: mixtral-8x7b\ngpuu: a40\n", "gpu is missing; gpuu is not a field; did you mean gpu?"),
        ("model: a\nmodel: b\n", "line 2: the key 'model' occurs twice"),
        ("model: [", "is not valid YAML"),
        ("model: !!python/object:os.system x\n", "not allowed"),
        ("", "is empty"),
        ("- model\n", "must hold fields"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    status, out, err = run("estimate", str(path))
    assert (status, out) == (2, "")
    assert str(path) in err
    assert said in err


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        status, _, err = run("estimate", str(path))
        assert status == 2
        assert str(path) in err


def test_a_warning_goes_to_stderr() -> None:
    status, out, err = run("estimate", *PAPER_OPTIONS, "--sequence-length", "30000", "--micro-batch-size", "1",
                           "--on-oom", "report", "--set", "dataset=null", "--json")  # fmt: skip
    assert status in (0, 1)
    assert json.loads(out)["micro_batch_size"] == 1
    assert re.fullmatch(r"moecost: warning: calibration 'hf-peft-2024' is used outside of .*\n", err)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("micro_batch_size=4", 4),
        ("epochs=2.5", 2.5),
        ("num_queries=1e4", 10_000.0),
        ("compile=true", True),
        ("compile=no", "no"),
        ("price=", None),
        ("price=null", None),
        ("optimizer=adamw8bit", "adamw8bit"),
        ("software='hf-peft'", "hf-peft"),
        ("lora_targets=[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("model_overrides={num_hidden_layers: 2}", {"num_hidden_layers": 2}),
        ("fused_kernels=a=b;c", "a=b;c"),
    ],
)
def test_assignment(text: str, value: Any) -> None:
    name, found = assignment(text)
    assert (name, found) == (text.split("=")[0], value)
    assert type(found) is type(value)


def test_assignment_takes_the_spelling_of_options() -> None:
    assert assignment("lora-rank=8") == ("lora_rank", 8)
    with pytest.raises(InvalidInputError, match="field=value"):
        assignment("lora-rank")


# ---------------------------------------------------------------------------------------------------- catalogues
def test_gpus() -> None:
    status, out, _ = run("gpus", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0
    assert tuple(rows) == moecost.gpus()
    a40 = GPUSpec.load("a40")
    quotes = catalog.quotes("a40", market="on_demand")
    assert rows["a40"]["memory_usable_gib"] == a40.memory_usable_gib
    assert rows["a40"]["bf16_tflops_dense"] == a40.peak_tflops_dense["bf16"]
    assert rows["a40"]["num_quotes"] == len(quotes)
    assert rows["a40"]["median_usd_per_gpu_hour"] == catalog.median_quote("a40").usd_per_gpu_hour
    assert rows["a40"]["first_date"] == min(q.date for q in quotes if q.date[0].isdigit())
    unquoted = next(name for name in moecost.gpus() if not catalog.quotes(name, market="on_demand"))
    assert rows[unquoted]["median_usd_per_gpu_hour"] is None
    _, out, _ = run("gpus")
    assert len(out.splitlines()) == len(rows) + 1
    assert re.search(rf"^{unquoted}\s.* none .*0$", out, re.MULTILINE)


def test_filters() -> None:
    def names(*args: str) -> list[str]:
        return [row["name"] for row in json.loads(run(*args, "--json")[1])]

    assert names("gpus", "NVIDIA A40") == ["a40"]
    assert set(names("gpus", "h100")) >= {"h100-80gb-sxm", "h100-80gb-pcie"}
    assert names("gpus", "p5.48xlarge") == ["h100-80gb-sxm"]
    assert "mixtral-8x7b" in names("models", "mistralai/Mixtral")
    for command in ("gpus", "models"):
        status, out, err = run(command, "mixtrall")
        assert (status, out) == (2, "")
        assert "unknown" in err


def test_models() -> None:
    status, out, _ = run("models", "mixtral-8x7b", "--json")
    (row,) = json.loads(out)
    spec = ModelSpec.load("mixtral-8x7b")
    assert status == 0
    assert row["num_parameters"] == spec.num_parameters == 46_702_792_704
    assert row["num_active_parameters"] == spec.num_active_parameters
    assert row["hub_ids"] == list(spec.hub_ids)
    _, out, _ = run("models", "mixtral-8x7b")
    assert "46.7 B" in out
    assert spec.hub_ids[0] in out
    assert len(run("models")[1].splitlines()) == len(moecost.models()) + 1


def test_software_and_datasets() -> None:
    for command, names in (("software", moecost.software_profiles()), ("datasets", moecost.datasets())):
        status, out, _ = run(command, "--json")
        assert status == 0
        assert tuple(row["name"] for row in json.loads(out)) == names
        table = run(command)[1]
        assert all(re.search(rf"^{re.escape(name)} ", table, re.MULTILINE) for name in names)


def test_help_lists_the_commands_and_options() -> None:
    status, out, _ = run("--help")
    assert status == 0
    for command in ("estimate", "gpus", "models", "software", "datasets", "--version", "--install-completion"):
        assert command in out
    _, out, _ = run("estimate", "--help")
    for option in ("--model", "--lora-targets", "--set", "--json", "--on-oom", "--gradient-checkpointing"):
        assert option in out


def test_version() -> None:
    status, out, _ = run("--version")
    assert status == 0
    assert re.fullmatch(r"moecost \d+\.\d+\.\S+\n", out)


# ----------------------------------------------------------------------------------------------------- processes
def test_exit_statuses_of_the_process() -> None:
    assert shell("estimate", *TINY).returncode == 0
    small = ["estimate", "--model", "mixtral-8x7b", "--gpu", "a40", "--sequence-length", "64"]
    assert shell(*small).returncode == 1
    bad = shell("estimate", "--gpu", "a40")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr
    assert "Usage: moecost" in "".join((shell().stdout, shell().stderr))


def test_output_to_a_pipe_is_plain_and_whole() -> None:
    for args in (["gpus"], ["models"], ["estimate", *TINY], ["--help"]):
        done = shell(*args)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout
        assert "…" not in done.stdout
        assert done.stderr == ""


@pytest.mark.skipif(os.name == "nt", reason="pipes of Windows do not break")
@pytest.mark.parametrize("args", [["gpus", "--json"], ["models"], ["estimate", *TINY], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(args: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = [sys.executable, "-m", "moecost", *args]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=PLAIN, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 0 or args == ["--help"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "moecost", "gpus"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=PLAIN, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("moecost: error: the output cannot be written")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_without_the_characters_of_a_name() -> None:
    model = json.dumps({**CONFIG, "name": "модель"}, ensure_ascii=False)
    command = [sys.executable, "-m", "moecost", "estimate", *TINY, "--set", f"model={model}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**PLAIN, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "\\u043c" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from moecost.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=PLAIN, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"moecost: the command line needs {missing}: pip install 'moecost[cli]'\n"


def test_names_are_completed() -> None:
    env = {**PLAIN, "_MOECOST_COMPLETE": "complete_bash", "COMP_WORDS": "moecost estimate --gpu a4", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-m", "moecost"], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.split() == ["a40"]


def test_help_does_not_import_what_it_does_not_need() -> None:
    code = (
        "import sys\nfrom moecost.__main__ import main\nsys.argv = ['moecost', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=PLAIN, timeout=120)
    loaded = set(done.stderr.split())
    assert "moecost.cli" in loaded
    assert not loaded & {"scipy", "pandas", "matplotlib"}


# -------------------------------------------------------------------------------------------------------- fields
def test_fields_are_listed_with_what_they_mean() -> None:
    status, out, err = run("fields")
    assert (status, err) == (0, "")
    assert all(f"\n{name} " in out for name in Job.model_fields)
    assert "(full, lora, qlora, dora, sparse)" in out
    rows = {row["name"]: row for row in json.loads(run("fields", "--json")[1])}
    assert rows.keys() == Job.model_fields.keys()
    assert rows["lora_rank"]["default"] == 16
    assert all(row["description"] for row in rows.values())
    assert [row["name"] for row in json.loads(run("fields", "lora", "--json")[1])] == ["lora_rank", "lora_targets"]
    assert "cost_usd" in run("fields", "--results")[1]
    assert run("fields", "nothing")[0] == 2


def test_schemas_describe_every_field() -> None:
    for mode in ("validation", "serialization"):
        properties = moecost.Estimate.model_json_schema(mode=mode)["properties"]  # type: ignore[arg-type]
        assert all(properties[name]["description"] for name in moecost.Estimate.model_fields)
