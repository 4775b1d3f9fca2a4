"""Measured runs from tables and logs: figures worked by hand, and one clear error for whatever is wrong."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost import Job, MoECostError
from moecost.errors import InvalidInputError
from moecost.measurements import MeasuredRun, public_runs, read, refuse_impossible
from moecost.recipes import RecipeWarning
from moecost.run_files import MAX_RUN_FILE_BYTES
from moecost.trainer_files import TrainerRun

RUNS = Path(__file__).parent / "data" / "runs"
GPU = "a100-80gb-sxm"


def table(folder: Path, *lines: str, name: str = "runs.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------------------------- tables
def test_a_row_is_a_job_and_its_figures(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "id,model,gpu,num_gpus,method,lora_targets,compile,model_overrides,capacity_factor,sequence_length,padding,"
        "micro_batch_size,gradient_accumulation_steps,global_batch_size,step_seconds,peak_memory_gib,memory_kind,"
        "source,group,trust,notes,price",
        'r1,mixtral-8x7b,NVIDIA A40,2,lora,w1;w2,1,"{""num_hidden_layers"": 8}",1.25,512,packed,4,2,16,3.5,40.25,'
        "reserved,mine,g#1,2,a note,0.79",
        "r2,mixtral-8x7b,a40,1,qlora,attention,0,,,512,,,,8,,,,,,,,vast",
    )
    with pytest.raises(InvalidInputError, match=r"runs.csv, line 3: nothing that can be used was measured"):
        read(path)
    runs = read(path, on_error="report")
    assert len(runs) == 1
    assert len(runs.refused) == 1
    run = runs[0]
    job = run.job
    assert (job.num_gpus, job.lora_targets, job.compile, job.model_overrides) == (
        2, ("w1", "w2"), True, {"num_hidden_layers": 8}
    )  # fmt: skip
    assert (job.capacity_factor, job.padding, job.price, job.sequence_length) == (1.25, "packed", 0.79, 512)
    assert job.global_batch_size is None  # accumulation says it
    assert (run.id, run.group, run.trust, run.notes, run.source) == ("r1", "g#1", 2, "a note", "mine")
    assert (run.step_seconds, run.peak_memory_gib, run.memory_kind) == (3.5, 40.25, "reserved")


def test_a_shape_is_a_model_of_its_own(tmp_path: Path) -> None:
    shape = '"{""hidden_size"": 64, ""num_hidden_layers"": 2, ""num_attention_heads"": 4, ""intermediate_size"": 128, '
    shape += '""vocab_size"": 100}"'
    path = table(tmp_path, "model,shape,gpu,sequence_length,step_seconds", f"tiny,{shape},a40,32,0.1")
    model = read(path)[0].job.model
    assert isinstance(model, dict)
    assert (model["name"], model["hidden_size"]) == ("tiny", 64)


HEADER = "id,model,gpu,sequence_length,sequence_length_cap,mean_length,tokens_per_second,peak_memory_gib,outcome"


def test_speed_and_memory_of_different_lengths_become_two_runs(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER, "a,llama-2-7b,a40,,1024,200.4,500,40,ok", "b,llama-2-7b,a40,512,,,500,40,ok")
    speed, memory, both = read(path)
    assert (speed.id, memory.id, both.id) == ("a", "a", "b")
    assert (speed.job.sequence_length, speed.job.padding) == (200, "max_length")
    assert (speed.tokens_per_second, speed.peak_memory_gib, speed.outcome) == (500, None, None)
    assert (memory.job.sequence_length, memory.tokens_per_second, memory.peak_memory_gib) == (1024, None, 40)
    assert memory.outcome == "ok"
    assert (both.tokens_per_second, both.peak_memory_gib, both.job.padding) == (500, 40, None)


def test_what_has_no_length_is_set_aside_and_said(tmp_path: Path) -> None:
    path = table(tmp_path, HEADER, "a,llama-2-7b,a40,,,200,500,40,", "b,llama-2-7b,a40,,1024,,500,40,")
    of_mean, of_cap = read(path)
    assert of_mean.peak_memory_gib is None
    assert "peak_memory_gib=40" in of_mean.notes
    assert of_cap.tokens_per_second is None
    assert "tokens_per_second=500" in of_cap.notes


def test_usable_flags_are_honoured(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "model,gpu,sequence_length,step_seconds,peak_memory_gib,outcome,usable_speed,usable_memory",
        "llama-2-7b,a40,512,1,30,ok,1,0",
        "llama-2-7b,a40,512,1,30,ok,0,1",
        "llama-2-7b,a40,512,1,30,oom,0,0",
    )
    one, two, three = read(path)
    assert (one.step_seconds, one.peak_memory_gib) == (1, None)
    assert (two.step_seconds, two.peak_memory_gib) == (None, 30)
    assert (three.step_seconds, three.peak_memory_gib, three.outcome) == (None, None, "oom")


def test_hours_need_the_queries(tmp_path: Path) -> None:
    header = "model,gpu,sequence_length,num_queries,epochs,run_hours,step_seconds"
    rows = ["llama-2-7b,a40,512,1000,2,1.5,", "llama-2-7b,a40,512,,,1.5,2", "llama-2-7b,a40,512,,,1.5,"]
    runs = read(table(tmp_path, header, *rows), on_error="report")
    assert [run.run_hours for run in runs] == [1.5, None]
    assert "run_hours=1.5 (num_queries is not known)" in runs[1].notes
    assert "run_hours tells nothing without num_queries" in runs.refused[0]
    whole = read(table(tmp_path, header, rows[2]), dataset="math-14k")[0]
    assert whole.run_hours == 1.5


def test_fields_of_the_caller_replace_the_columns(tmp_path: Path) -> None:
    path = table(tmp_path, "model,gpu,sequence_length,step_seconds", "llama-2-7b,a40,512,1")
    run = read(path, gpu="h100-80gb-sxm", software="hf-peft-2024")[0]
    assert (run.job.gpu, run.job.software) == ("h100-80gb-sxm", "hf-peft-2024")
    with pytest.raises(InvalidInputError, match=r"gpuu is not a field of Job; did you mean gpu"):
        read(path, gpuu="a40")


GOOD = "good,llama-2-7b,a40,512,,,500,40,ok"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("x,llama-2-7b,a40,512,,,500,12GB,ok", "peak_memory_gib='12GB' is not a plain number; write it without a unit"),
        ("x,llama-2-7b,a40,512,,,3 h,,ok", "tokens_per_second='3 h'"),
        ("x,llama-2-7b,a40,512,,,NaN,,ok", "tokens_per_second='NaN'"),
        ("x,llama-2-7b,a40,512,,,inf,,ok", "tokens_per_second='inf'"),
        ("x,llama-2-7b,a40,512,,,1e999,,ok", "tokens_per_second='1e999' is too large"),
        ("x,llama-2-7b,a40,512,,,-5,,ok", "tokens_per_second: input should be greater than 0 (it is -5.0)"),
        ("x,llama-2-7b,a40,512,,,0,,ok", "tokens_per_second: input should be greater than 0"),
        ('x,llama-2-7b,a40,512,,,"1,234",,ok', "tokens_per_second='1,234'"),
        ("x,llama-2-7b,a40,51.5,,,500,,ok", "sequence_length='51.5' is not a whole number"),
        ("x,llama-2-7b,a40,512,,,500,40,fine", "outcome: input should be 'ok' or 'oom' (it is 'fine')"),
        ("x,lama-2-7b,a40,512,,,500,40,ok", "unknown model 'lama-2-7b'; did you mean 'llama-2-7b'"),
        ("x,llama-2-7b,a41,512,,,500,40,ok", "unknown GPU 'a41'"),
        ("x,,a40,512,,,500,40,ok", "model is missing"),
        ("x,llama-2-7b,a40,,,,500,40,", "nothing that can be used was measured"),
        ("x,llama-2-7b,a40,512,,,5e6,,ok", "tokens_per_second=5e+06 is 5e+06 tokens/s and takes"),
        ("good,llama-2-7b,a40,512,,,500,,ok", "id='good' is also that of line 2"),
        ("x,llama-2-7b,a40", "has 3 cells, the header has 9 columns"),
        ('x,llama-2-7b,a40,512,,,"500,,ok', "line 3: is not valid CSV"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_kept(tmp_path: Path, row: str, text: str) -> None:
    path = table(tmp_path, HEADER, GOOD, row)
    with pytest.raises(InvalidInputError) as info:
        read(path)
    assert str(info.value).startswith(f"{path}, line 3: ")
    assert text in str(info.value)
    runs = read(path, on_error="report")
    assert [run.id for run in runs] == ["good"]
    assert text in runs.refused[0]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["model,gpu,step_second", "a,b,1"], "'step_second' is not known; did you mean step_seconds"),
        (["model;gpu;step_seconds", "a;b;1"], "columns are separated by commas"),
        (["model,model,gpu,step_seconds", "a,a,b,1"], "the column 'model' occurs twice"),
        (["model,step_seconds", "a,1"], "no column gpu"),
        (["model,gpu,epochs", "a,b,1"], "no measured column"),
        (["model,gpu,step_seconds"], "has columns but no row"),
        ([""], "is empty"),
    ],
)
def test_a_file_that_is_no_table_of_runs(tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(InvalidInputError) as info:
        read(table(tmp_path, *lines), on_error="report")
    assert text in str(info.value)
    assert "runs.csv" in str(info.value)


# ---------------------------------------------------------------------------------------------- what is not possible
def run_of(**fields: Any) -> MeasuredRun:
    measured = {k: fields.pop(k) for k in ("tokens_per_second", "queries_per_second", "step_seconds", "run_hours")
                if k in fields}  # fmt: skip
    return MeasuredRun(job=Job(**{"model": "llama-2-7b", "gpu": GPU, "sequence_length": 1000, **fields}), **measured)


def test_the_least_work_of_a_token_by_hand() -> None:
    """Llama-2-7B without its embedding has 6,607,343,616 weights in matrices; the A100 does 312 TFLOP/s in bf16."""
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    full, frozen = 312e12 / (3 * 2 * matrices), 312e12 / (2 * 2 * matrices)
    for limit, method in ((full, "full"), (frozen, "lora")):
        refuse_impossible(run_of(tokens_per_second=0.999 * limit, method=method))
        refuse_impossible(run_of(tokens_per_second=3.99 * limit, method=method, num_gpus=4))
        for speed in (
            {"tokens_per_second": 1.001 * limit},
            {"queries_per_second": 1.001 * limit / 1000},
            {"step_seconds": 8000 / (1.001 * limit), "micro_batch_size": 4, "gradient_accumulation_steps": 2},
            {"run_hours": 2 * 500 * 1000 / (1.001 * limit) / 3600, "num_queries": 500, "epochs": 2},
        ):
            with pytest.raises(InvalidInputError, match=r"FLOP/s at least .* 1 x a100-80gb-sxm have 3.12e\+14 \(bf16"):
                refuse_impossible(run_of(**speed, method=method))


def test_experts_that_a_token_does_not_pass_cost_nothing() -> None:
    sparse = run_of(model="mixtral-8x7b", method="lora", tokens_per_second=5_000)
    refuse_impossible(sparse)  # 12.6e9 active weights: 2.5e14 FLOP/s
    dense = sparse.model_copy(update={"job": sparse.job.model_copy(update={"num_experts_per_tok": 8})})
    with pytest.raises(InvalidInputError, match="FLOP/s at least"):
        refuse_impossible(dense)


def test_a_type_that_the_gpu_lacks_runs_no_faster_than_those_it_has() -> None:
    refuse_impossible(run_of(gpu="v100-32gb-sxm2", tokens_per_second=1000))  # no bf16: fp16 at 125 TFLOP/s
    with pytest.raises(InvalidInputError, match="fp16, dense"):
        refuse_impossible(run_of(gpu="v100-32gb-sxm2", tokens_per_second=5000))


def test_an_outcome_alone_is_a_measurement() -> None:
    job = Job(model="llama-2-7b", gpu=GPU, sequence_length=512)
    assert MeasuredRun(job=job, outcome="oom").outcome == "oom"
    with pytest.raises(InvalidInputError, match="nothing was measured"):
        MeasuredRun(job=job)


# ------------------------------------------------------------------------------------------------------------- logs
def test_llama_factory_folder() -> None:
    """100 steps of 2 x 4 sequences a GPU in 3,200 s at 0.5 sequences/s: 1,600 rows, 16 a step, so two GPUs."""
    runs = read(RUNS / "llamafactory", gpu=GPU)
    assert len(runs) == 1  # its checkpoint is not a run of its own
    run, job = runs[0], runs[0].job
    assert (job.num_gpus, job.micro_batch_size, job.gradient_accumulation_steps) == (2, 2, 4)
    assert (job.method, job.lora_rank, job.weight_dtype, job.padding) == ("qlora", 16, "nf4-dq", "packed")
    assert (job.sequence_length, job.num_queries, job.epochs) == (1024, 800, 2.0)
    assert run.step_seconds == pytest.approx(32.0)
    assert run.queries_per_second == pytest.approx(0.5)
    assert run.tokens_per_second == pytest.approx(512.0)
    assert run.run_hours == pytest.approx(3200 / 3600)
    assert (run.id, run.trust, run.outcome) == ("mixtral", 3, "ok")
    for name in ("all_results.json", "trainer_state.json"):
        assert read(RUNS / "llamafactory" / "mixtral" / name, gpu=GPU) == runs


def test_trainer_folder_without_a_recipe() -> None:
    with pytest.raises(InvalidInputError, match=r"does not tell gpu, sequence_length or dataset, num_gpus") as info:
        read(RUNS / "trainer")
    assert "pass read(path, gpu=..., sequence_length=..., num_gpus=...)" in str(info.value)
    run = read(RUNS / "trainer", gpu="a40", sequence_length=512, num_gpus=2)[0]
    assert (run.job.model, run.job.method, run.job.lora_rank) == ("Qwen/Qwen2-7B", "lora", 8)
    assert run.job.lora_targets == ("q_proj", "v_proj")
    assert (run.job.micro_batch_size, run.job.global_batch_size) == (4, 8)  # 4.0 sequences/s over 0.5 steps/s
    assert run.job.num_queries == 2000
    assert run.step_seconds == pytest.approx(2.0)
    assert (run.peak_memory_gib, run.memory_kind) == (23.25, "reserved")


def test_gpus_follow_from_the_rates_where_accumulation_is_known() -> None:
    run = read(RUNS / "trainer", gpu="a40", dataset="math-14k", gradient_accumulation_steps=1)[0]
    assert run.job.num_gpus == 2
    assert run.job.dataset == "math-14k"


def test_gpus_are_not_guessed_where_several_numbers_fit() -> None:
    seven_steps = TrainerRun(100.0, 7.0, 100.0, None, 1.0, 8, None, None)
    assert seven_steps.num_gpus(8, 1) == 2  # 14.3 sequences a step, the last step smaller
    two_steps = TrainerRun(100.0, 2.0, 100.0, None, 1.0, 8, None, None)
    assert two_steps.num_gpus(8, 1) is None


def test_counted_tokens_give_the_mean_length(tmp_path: Path) -> None:
    state = json.loads((RUNS / "trainer" / "trainer_state.json").read_text())
    state["num_input_tokens_seen"] = 800_000
    shutil.copy(RUNS / "trainer" / "adapter_config.json", tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    run = read(tmp_path, gpu="a40", num_gpus=2)[0]
    assert (run.job.sequence_length, run.job.padding) == (400, "max_length")  # of 2,000 sequences
    assert run.tokens_per_second == pytest.approx(1600.0)
    assert run.peak_memory_gib is None  # of the longest batch, which is not known


def test_torchtune_log() -> None:
    with pytest.raises(InvalidInputError, match=r"log_1735689600.txt: the log does not tell num_gpus"):
        read(RUNS / "torchtune", gpu=GPU)
    run = read(RUNS / "torchtune" / "log_1735689600.txt", gpu=GPU, num_gpus=2)[0]
    assert run.tokens_per_second == 4000.0  # the median of 1980, 2000, 2010 on each of two GPUs; step 1 warms up
    assert (run.peak_memory_gib, run.memory_kind) == (17.5, "allocated")
    assert (run.job.method, run.job.sequence_length, run.job.padding) == ("qlora", 4096, "packed")
    assert run.job.zero_stage == 3 or run.job.software != "torchtune"
    assert "label" in run.notes
    assert run.trust == 2


def test_litgpt_log() -> None:
    run = read(RUNS / "litgpt", gpu="a40", sequence_length=512)[0]
    assert run.step_seconds == pytest.approx(0.4)  # two micro-batches of 200 ms; the first one warms up
    assert run.peak_memory_gib == pytest.approx(10.74e9 / 2**30)
    assert run.memory_kind == "allocated"
    assert run.run_hours == pytest.approx(1.8 / 3600)
    assert run.job.num_queries == 4  # four micro-batches of two, two epochs
    assert (run.job.model, run.job.method) == ("google/gemma-2b", "qlora")
    assert run.id == "litgpt/train"


def test_a_folder_of_all_of_them(tmp_path: Path) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    table(tmp_path / "runs", HEADER, GOOD)
    (tmp_path / "runs" / "metrics.csv").write_text("epoch,iter,loss\n1,1,2.0\n")
    (tmp_path / "runs" / "notes.txt").write_text("nothing to see\n")
    runs = read(tmp_path, gpu=GPU, sequence_length=512, num_gpus=1, on_error="report")
    assert [run.id for run in runs] == ["good", "runs/litgpt/train", "runs/torchtune/log_1735689600", "runs/trainer"]
    assert len(runs.refused) == 1
    assert "llamafactory" in runs.refused[0]
    assert "num_gpus=1, but the log has 16 sequences a step" in runs.refused[0]


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("torchtune/log_1735689600.txt", "1980.0", "nan", "line 2: tokens_per_second_per_gpu='nan'"),
        ("torchtune/log_1735689600.txt", "alloc:17.5", "alloc:17.5GB", "line 2: peak_memory_alloc='17.5GB'"),
        ("torchtune/log_1735689600.txt", "per_gpu:", "per_gpu:9", "FLOP/s at least"),
        ("litgpt/train.log", "190.00 ms", "0.19 s", "line 8: iter time is in 's', not in ms"),
        ("litgpt/train.log", "1.80s", "-1.80s", "line 10: Training time='-1.80'"),
        ("llamafactory/mixtral/train_results.json", "3200.0", '"3200 s"', "train_runtime='3200 s'"),
        ("llamafactory/mixtral/train_results.json", "3200.0", "Infinity", "train_runtime=inf"),
        ("llamafactory/mixtral/train_results.json", "3200.0", "-1", "train_runtime=-1"),
        ("llamafactory/mixtral/trainer_state.json", '"max_steps": 100,', "", None),
        ("llamafactory/mixtral/trainer_state.json", '"log_history": [', '"log_history": 7, "x": [', "log_history=7"),
        ("llamafactory/mixtral/trainer_state.json", '"step": 100,', '"step": 100', "line 13: is not valid JSON"),
        ("llamafactory/mixtral/training_args.yaml", "stage: sft", "stage: dpo", "stage='dpo'"),
    ],
)
def test_a_log_with_a_flaw(tmp_path: Path, name: str, old: str, new: str, text: str | None) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    path = tmp_path / "runs" / name
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    fields: dict[str, Any] = {"gpu": GPU, "num_gpus": 1, "sequence_length": 4096}
    if "llamafactory" in name:
        fields = {"gpu": GPU}
    if text is None:
        assert len(read(path.parent, **fields)) == 1
        return
    with pytest.raises(InvalidInputError) as info:
        read(path.parent, **fields)
    assert text in str(info.value)
    assert str(path.parent.name) in str(info.value)


def test_a_run_that_did_not_end(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "llamafactory" / "mixtral", tmp_path / "run")
    for name in ("trainer_state.json", "train_results.json", "all_results.json"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(InvalidInputError, match=r"checkpoint-100.*(did not end|does not tell)"):
        read(tmp_path, gpu=GPU, num_gpus=2, model="mixtral-8x7b", method="lora", sequence_length=512)


# --------------------------------------------------------------------------------------------- what is no run at all
def test_nothing_to_read(tmp_path: Path) -> None:
    for path, text in (
        (tmp_path, "holds no run that is known"),
        (tmp_path / "absent.csv", "cannot be read: No such file"),
        (tmp_path / "absent", "cannot be read: No such file"),
        ("", "must name a file or folder"),
        ("x" * 5000, "cannot be read"),
        ("/dev/null", "is not a file"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            read(path)
    with pytest.raises(InvalidInputError, match="must be 'raise' or 'report'"):
        read(tmp_path, on_error="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".txt", ".log", ""])
@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"\x89PNG\r\n\x1a\n\0\0\xff", b"\0" * 100, b"[1, 2", b"{}", b"a" * 1000, b"[" * 100_000]
)
def test_junk(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"trainer_state{suffix}"
    path.write_bytes(content)
    with pytest.raises(MoECostError) as info:
        read(path, gpu=GPU)
    assert "trainer_state" in str(info.value)
    assert len(str(info.value)) < 700


@pytest.mark.parametrize("name", ["runs.csv", "trainer_state.json", "train.log"])
def test_a_file_of_200_mb_is_refused_unread(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as stream:
        stream.truncate(200_000_000)
    start = time.perf_counter()
    with pytest.raises(InvalidInputError, match=f"200,000,000 bytes, too large .* \\({MAX_RUN_FILE_BYTES:,}\\)"):
        read(path, gpu=GPU)
    assert time.perf_counter() - start < 0.5


def test_links_that_go_in_circles_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    with pytest.raises(InvalidInputError, match="holds no run"):
        read(tmp_path)


def test_a_recipe_is_no_log() -> None:
    with pytest.raises(InvalidInputError, match=r"is a recipe, not a log; .*Job.from_recipe"):
        read(RUNS / "llamafactory" / "mixtral" / "training_args.yaml")


CELL = st.one_of(
    st.text(max_size=12),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["12GB", "3 h", "nan", "-1", "1e400", '"', "a,b", "{}", "[1]", "\x00", "9" * 400, "0x10", "１２"]),
)


@given(column=st.integers(0, 8), cell=CELL)
def test_any_cell_gives_runs_or_one_error(column: int, cell: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cells = GOOD.split(",")
    cells[column] = cell
    path = tmp_path_factory.mktemp("fuzz") / "runs.csv"
    path.write_bytes("\n".join([HEADER, ",".join(cells)]).encode("utf-8", "surrogatepass"))
    start = time.perf_counter()
    with contextlib.suppress(MoECostError):
        for run in read(path):
            assert run.tokens_per_second is None or math.isfinite(run.tokens_per_second)
    assert time.perf_counter() - start < 1.0


FILES = sorted(p.relative_to(RUNS).as_posix() for p in RUNS.rglob("*") if p.is_file())


@given(name=st.sampled_from(FILES), cut=st.floats(0, 1))
def test_a_truncated_file_gives_a_run_or_one_error(
    name: str, cut: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut") / "runs"
    shutil.copytree(RUNS / name.split("/")[0], folder)
    path = folder / "/".join(name.split("/")[1:])
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    start = time.perf_counter()
    with contextlib.suppress(MoECostError):
        read(folder, gpu=GPU, sequence_length=512, num_gpus=2)
    assert time.perf_counter() - start < 1.0


# ------------------------------------------------------------------------------------------------------ public runs
def test_public_runs() -> None:
    runs = public_runs()
    assert len({run.id for run in runs}) + len(runs.refused) == 684
    assert len(runs) >= 669
    assert len({run.source_key for run in runs}) == 17
    by_id = {run.id: run for run in runs}
    first = by_id["automodelft-001"]
    assert (first.step_seconds, first.job.gpu, first.job.sequence_length) == (10.51, "h100-80gb-sxm", 4096)
    assert sum(run.outcome == "ok" for run in runs) == len(runs)
    mean = next(run for run in runs if run.source_key == "peft")
    assert mean.job.padding == "max_length"
    assert mean.job.sequence_length == 210  # 209.9 tokens in the mean


def test_public_runs_that_tell_only_whether_they_fitted() -> None:
    runs = public_runs("fits_or_oom")
    assert (len(runs), len(runs.refused)) == (126, 0)
    assert sum(run.outcome == "oom" for run in runs) == 87
    assert sum(run.step_seconds is not None for run in runs) == 37
    with pytest.raises(InvalidInputError, match="no table of public runs"):
        public_runs("other")


def test_no_warning_is_lost() -> None:
    assert issubclass(RecipeWarning, UserWarning)
