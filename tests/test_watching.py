"""A watched run: what is recorded of it and shown, that it costs nothing, and that nothing of it reaches the loop."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import moecost
from moecost import Job, estimate
from moecost.callback import MoECostCallback
from moecost.errors import InvalidInputError
from moecost.fitting import fit
from moecost.measurements import read
from moecost.watching import Watch, free_name

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

JOB = Job(model="llama-2-7b", gpu="a100-80gb-sxm", method="lora", sequence_length=512, micro_batch_size=2, price=2.0)

TINY = JOB.model_copy(
    update={
        "model": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vocab_size": 32,
        },
    }
)  # fmt: skip
"""A job whose steps may take a microsecond: a faster one is refused where its file is read."""


def ready(run: Watch) -> None:
    """Wait for the estimate, which is made beside the loop."""
    assert run.thread is not None
    run.thread.join(20)


# --------------------------------------------------------------------------------------------------- own loops
def test_a_watched_loop_becomes_a_measured_run(tmp_path: Path) -> None:
    out = tmp_path / "mine.moecost.json"
    with moecost.watch(TINY, steps=8, out=out, say=lambda line: None) as run:
        for _ in range(8):
            time.sleep(0.02)
            run.step(rows=2, length=512)
    (found,) = read(out)
    assert found.job == TINY.model_copy(update={"padding": "max_length"})
    assert found.step_seconds is not None
    assert 0.02 <= found.step_seconds < 0.2  # a busy machine sleeps longer
    assert (found.outcome, found.notes, found.source_key) == ("ok", "", "own")
    record = json.loads(out.read_text())["record"]
    assert record["steps"] == 8
    assert record["complete"]
    assert record["batches"] == [[2, 512, 8]]
    assert record["sequences_by_padded_length"] == {"512": 16}


def test_time_belongs_to_the_mean_length(tmp_path: Path) -> None:
    """Batches of 2 x 100 and 1 x 400 tokens: 200 in the mean of three sequences."""
    out = tmp_path / "run.moecost.json"
    with moecost.watch(TINY, out=out, say=lambda line: None) as run:
        for rows, length in [(2, 100), (1, 400)] * 4:
            run.step(rows, length)
    (found,) = read(out)  # no GPU here, so no memory
    assert found.job.sequence_length == 200
    assert run.mean_and_longest() == (200, 400)


def test_pauses_are_no_steps() -> None:
    run = Watch(JOB, out=None, say=lambda line: None)
    run.start()
    for number in range(6):
        if number == 4:
            time.sleep(0.3)
            run.pause()
        run.step()
    run.finish()
    assert run.count == 6
    assert len(run.times) == 4  # without two of warm-up
    assert run.paused >= 0.3
    assert max(run.times) < 0.25


def test_hours_and_dollars_against_the_estimate() -> None:
    """Of 100 steps, 50 at 36 s: half an hour spent, half an hour left, at 2 $/h."""
    lines: list[str] = []
    run = Watch(JOB, steps=100, out=None, say=lines.append)
    run.start()
    ready(run)
    run.started -= 1800.0
    run.count = 50
    run.times.extend([36.0] * 48)
    spent, left = run.hours()
    assert spent == pytest.approx(0.5, abs=0.01)
    assert left == pytest.approx(0.5)
    assert "step 50 of 100: 30.0 min and $1.00 spent, 30.0 min and $1.00 left, 1.00 h and $2.00 in all" in run.status()
    e = estimate(JOB)
    expected = run.expected_hours()
    assert expected is not None
    assert expected[0] == pytest.approx(e.step.seconds * 100 / 3600)  # of the steps alone, as they are watched
    run.finish()
    assert any("has left the 80 % interval of its estimate: it is slower, 1.00 h in all" in line for line in lines)


def test_a_run_within_its_interval_is_not_blamed() -> None:
    lines: list[str] = []
    run = Watch(JOB, steps=100, out=None, say=lines.append)
    run.start()
    ready(run)
    expected = run.expected_hours()
    assert expected is not None
    run.started -= expected[0] * 1800.0
    run.count = 50
    run.times.extend([expected[0] * 36.0] * 48)
    run.finish()
    assert len(lines) == 1
    assert "estimated" in lines[0]


def test_what_goes_wrong_in_the_loop_goes_through_and_what_there_is_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "run.moecost.json"

    def train() -> None:
        with moecost.watch(TINY, steps=100, out=out, say=lambda line: None) as run:
            for number in range(10):
                run.step(2, 512)
                _ = 1 / (6 - number)

    with pytest.raises(ZeroDivisionError):
        train()
    (found,) = read(out)
    assert found.notes == "ended after 7 steps"


def test_out_of_memory_is_an_outcome(tmp_path: Path) -> None:
    class OutOfMemoryError(RuntimeError):
        """As PyTorch names its own."""

    out = tmp_path / "run.moecost.json"

    def train() -> None:
        with moecost.watch(JOB, out=out, say=lambda line: None) as run:
            run.batch(2, 512)
            raise OutOfMemoryError

    with pytest.raises(OutOfMemoryError):
        train()
    (found,) = read(out)
    assert (found.outcome, found.step_seconds) == ("oom", None)


def test_a_process_that_ends_in_the_middle_leaves_its_run(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TINY.to_yaml())
    code = (
        "import moecost, sys\n"
        "run = moecost.watch('job.yaml',"
        " out='run.moecost.json')\n"
        "run.start()\n"
        "for _ in range(5): run.step()\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    (found,) = read(tmp_path)
    assert found.notes == "ended after 5 steps"


def test_a_killed_process_leaves_what_was_written_last(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TINY.to_yaml())
    code = (
        "import moecost, os, signal\n"
        "run = moecost.watch('job.yaml',"
        " out='run.moecost.json', every=0.0)\n"
        "run.start()\n"
        "for _ in range(5): run.step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == -9
    (found,) = read(tmp_path / "run.moecost.json")
    assert found.notes == "ended after 5 steps"


def test_nothing_of_the_users_is_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "run.moecost.json"
    mine.write_text("mine")
    with moecost.watch(TINY, out=mine, say=lambda line: None) as run:
        for _ in range(4):
            run.step()
    assert mine.read_text() == "mine"
    assert len(read(tmp_path / "run-2.moecost.json")) == 1
    assert free_name(mine).name == "run-3.moecost.json"


def test_a_disk_that_fails_is_told_of_once_and_the_loop_goes_on() -> None:
    lines: list[str] = []
    with moecost.watch(JOB, out="/proc/no/such/folder/run.moecost.json", every=0.0, say=lines.append) as run:
        for _ in range(6):
            run.step(2, 512)
    assert run.count == 6
    assert len([line for line in lines if "is not written" in line]) == 1


def test_an_estimate_that_fails_is_told_of_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("moecost.estimation.estimate_job", broken)
    lines: list[str] = []
    with moecost.watch(JOB, steps=4, out=None, say=lines.append) as run:
        for _ in range(4):
            run.step()
    assert run.count == 4
    assert any("no estimate to compare with: RuntimeError: no such luck" in line for line in lines)


def test_watching_that_fails_ends_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Watch, "status", lambda self: 1 / 0)
    with moecost.watch(JOB, out=None, every=0.0, say=lines.append) as run:
        for _ in range(4):
            run.step()
    assert lines == ["moecost: watching ends: ZeroDivisionError: division by zero; the run is not concerned"]


def test_a_say_that_fails_is_no_matter(tmp_path: Path) -> None:
    def say(line: str) -> None:
        raise OSError("no terminal")

    with moecost.watch(JOB, out=tmp_path / "run.moecost.json", every=0.0, say=say) as run:
        for _ in range(4):
            run.step()
    assert run.count == 4
    assert not run.broken


def test_a_job_that_cannot_be_is_refused_before_the_loop(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="sequence_lenght"):
        moecost.watch({"model": "llama-2-7b", "gpu": "a40", "sequence_length": 64, "sequence_lenght": 3})


def test_other_processes_of_a_run_are_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    lines: list[str] = []
    with moecost.watch(JOB, out=tmp_path / "run.moecost.json", every=0.0, say=lines.append) as run:
        for _ in range(4):
            run.step()
    assert lines == []
    assert list(tmp_path.iterdir()) == []


def test_two_watches_of_one_file_keep_two_runs(tmp_path: Path) -> None:
    out = tmp_path / "run.moecost.json"
    with (
        moecost.watch(TINY, out=out, say=lambda line: None) as a,
        moecost.watch(TINY, out=out, say=lambda line: None) as b,
    ):
        for _ in range(4):
            a.step(2, 512)
            b.step(2, 512)
    assert {p.name for p in tmp_path.iterdir()} == {"run.moecost.json", "run-2.moecost.json"}
    assert {a.out, b.out} == {out, tmp_path / "run-2.moecost.json"}


def test_what_the_loop_tells_otherwise_than_the_job_is_taken_and_noted(tmp_path: Path) -> None:
    """Two micro-batches of 8 a step, where the job says one of 2."""
    out = tmp_path / "run.moecost.json"
    with moecost.watch(TINY, steps=6, out=out, say=lambda line: None) as run:
        for _ in range(6):
            run.batch(8, 512)
            run.step(8, 512)
    (found,) = read(out)
    assert (found.job.micro_batch_size, found.job.gradient_accumulation_steps) == (8, 2)
    assert found.notes == "micro_batch_size=2 in the job, 8 in the loop"
    assert run.estimate is not None
    assert run.estimate.step.seconds == estimate(found.job).step.seconds


def test_more_shapes_than_are_told_apart_are_no_shorter_steps() -> None:
    """Four micro-batches a step stay four, though after some thousand lengths no more are told apart."""
    run = Watch(JOB.model_copy(update={"gradient_accumulation_steps": 4}), out=None, say=lambda line: None)
    run.start()
    for length in range(1, 8_001):
        run.batch(2, length)
        if length % 4 == 0:
            run.step()
    found = run.runs()
    assert [r.job.gradient_accumulation_steps for r in found] == [4] * len(found)
    assert {r.notes for r in found} == {""}
    run.finish()


def test_the_estimate_is_of_the_batches_that_are_seen() -> None:
    """A job that leaves the micro-batch open is no run of the largest that fits."""
    open_job = JOB.model_copy(update={"micro_batch_size": None})
    with moecost.watch(open_job, steps=5, out=None, say=lambda line: None) as run:
        for _ in range(5):
            run.step(2, 512)
    assert run.estimate is not None
    assert run.estimate.micro_batch_size == 2


def test_a_loop_that_is_left_early_is_not_complete(tmp_path: Path) -> None:
    out = tmp_path / "run.moecost.json"
    with moecost.watch(TINY, steps=100, out=out, say=lambda line: None) as run:
        for _ in range(5):
            run.step(2, 512)
    assert read(out)[0].notes == "ended after 5 steps"
    assert not json.loads(out.read_text())["record"]["complete"]


def test_time_after_the_last_step_of_a_broken_run_is_not_spent() -> None:
    run = Watch(JOB, steps=10, out=None, say=lambda line: None)
    run.start()
    run.step()
    time.sleep(0.3)
    run.finish(complete=False)
    assert run.hours()[0] * 3600 < 0.2


def test_a_job_that_does_not_fit_is_told_of() -> None:
    lines: list[str] = []
    job = {"model": "mixtral-8x7b", "gpu": "a40", "method": "full", "sequence_length": 512, "micro_batch_size": 1}
    with moecost.watch(job, steps=5, out=None, say=lines.append) as run:
        run.step(1, 512)
    assert any("by the estimate this job does not fit" in line for line in lines)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -5}, {"level": 2.0}])
def test_wrong_options_are_refused_before_the_loop(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        moecost.watch(JOB, **wrong)


def test_wrong_fields_are_refused_before_the_loop_though_others_are_missing() -> None:
    with pytest.raises(InvalidInputError, match="wrong"):
        moecost.watch({"model": "llama-2-7b", "method": "wrong"})


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory. Tried"), RuntimeError("[enforce fail] can't allocate memory")],
)
def test_running_out_of_memory_is_known_by_word_and_class(error: Exception, tmp_path: Path) -> None:
    out = tmp_path / "run.moecost.json"

    def train() -> None:
        with moecost.watch(JOB, out=out, say=lambda line: None) as run:
            run.batch(2, 512)
            raise error

    with pytest.raises(type(error)):
        train()
    assert read(out)[0].outcome == "oom"


def test_a_run_of_a_model_file_can_be_read_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert isinstance(TINY.model, dict)
    Path("cfg.json").write_text(json.dumps(TINY.model))
    with moecost.watch(
        TINY.model_copy(update={"model": "./cfg.json"}), out="run.moecost.json", say=lambda line: None
    ) as run:
        for _ in range(4):
            run.step(2, 512)
    monkeypatch.chdir(tmp_path)
    (found,) = read(tmp_path / "here" / "run.moecost.json")
    assert estimate(found.job).num_parameters == estimate(TINY).num_parameters


def test_a_step_takes_less_than_a_tenth_of_a_millisecond() -> None:
    run = Watch(JOB, steps=10_000, out=None, say=lambda line: None)
    run.start()
    ready(run)
    start = time.perf_counter()
    for _ in range(5_000):
        run.step(2, 512)
    assert (time.perf_counter() - start) / 5_000 < 1e-4
    run.finish()


# --------------------------------------------------------------------------------------------- Hugging Face Trainer
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LENGTHS = (24, 32, 40)


def train(folder: Path, *callbacks: Any, steps: int = 12, resume: bool | None = None, **more: Any) -> list[float]:
    """Losses of a LoRA run of a tiny Mixtral, by the Trainer itself."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**SHAPE))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    data = [{"input_ids": torch.arange(n) % 256, "labels": torch.arange(n) % 256} for n in LENGTHS for _ in range(40)]
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=1, logging_steps=1, report_to=[],
        disable_tqdm=True, seed=3, use_cpu=True, learning_rate=1e-3, **({"save_strategy": "no"} | more),
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=options, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


quiet = pytest.mark.filterwarnings("ignore")


@quiet
def test_the_callback_changes_nothing_and_knows_what_was_run(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    lines: list[str] = []
    callback = MoECostCallback(gpu="a40", price=1.0, every=0.0, say=lines.append)
    assert train(tmp_path / "watched", callback) == plain
    watch = callback.watch
    assert watch is not None
    assert watch.count == len(plain) == 12
    assert not watch.broken
    (found,) = read(tmp_path / "watched")
    job = found.job
    assert (job.method, job.lora_rank, job.lora_targets) == ("lora", 4, ("q_proj", "v_proj"))
    assert (job.micro_batch_size, job.optimizer, job.num_queries) == (1, "adamw", 12)
    assert job.sequence_length is not None
    assert min(LENGTHS) <= job.sequence_length <= max(LENGTHS)
    assert job.gpu == "a40"
    assert found.step_seconds is not None
    assert any("step 12 of 12" in line and "estimated" in line for line in lines)
    assert estimate(job).num_trainable_parameters == 2 * 4 * ((64 + 64) + (64 + 32))  # q and v of two layers


@quiet
def test_evaluating_and_saving_after_each_step_leaves_the_steps(tmp_path: Path) -> None:
    callback = MoECostCallback(gpu="a40", say=lambda line: None)
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(tmp_path, callback, steps=8, **often)
    assert callback.watch is not None
    assert len(callback.watch.times) == 6  # without two of warm-up
    assert len(read(tmp_path / "run.moecost.json")) == 1


@quiet
def test_a_run_that_goes_on_from_a_checkpoint_has_the_steps_that_are_left(tmp_path: Path) -> None:
    train(tmp_path, steps=6, save_strategy="steps", save_steps=6)
    lines: list[str] = []
    callback = MoECostCallback(gpu="a40", every=0.0, say=lines.append)
    train(tmp_path, callback, steps=12, resume=True, save_strategy="steps", save_steps=6)
    assert any("step 6 of 6" in line and "0.0 s" in line for line in lines)
    assert json.loads((tmp_path / "run.moecost.json").read_text())["record"]["complete"]


@quiet
def test_a_run_that_raised_ends_where_it_did_and_leaves_the_next_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lines: list[str] = []
    callback = MoECostCallback(gpu="a40", say=lines.append)

    class Breaks(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 6:
                raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        train(tmp_path, callback, Breaks())
    train(tmp_path, callback)
    notes = {p.name: read(p)[0].notes for p in tmp_path.glob("*.moecost.json")}
    assert notes == {"run.moecost.json": "ended after 6 steps", "run-2.moecost.json": ""}
    record = json.loads((tmp_path / "run-2.moecost.json").read_text())["record"]
    assert sum(count for _, _, count in record["batches"]) == record["steps"] == 12  # no hook was left behind


@quiet
@pytest.mark.parametrize("as_file", [True, False])
def test_fields_beside_a_job_replace_its_own(as_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.to_yaml())
    given: Any = path if as_file else {name: getattr(JOB, name) for name in JOB.model_fields_set}
    callback = MoECostCallback(given, gpu="h100", say=lambda line: None)
    train(tmp_path, callback, steps=4)
    assert {run.job.gpu for run in read(tmp_path / "run.moecost.json")} == {"h100"}


@quiet
def test_at_its_usual_pace_the_callback_costs_next_to_nothing(tmp_path: Path) -> None:
    per_step: list[float] = []

    class Meter(MoECostCallback):
        """Reads the account at the end of the last step, before the run is written."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            super().on_step_end(args, state, control, **others)
            assert self.watch is not None
            per_step.append(self.watch.own_seconds)

    callback = Meter(gpu="a40", say=lambda line: None)
    train(tmp_path, callback, steps=30)
    assert (per_step[-1] - per_step[4]) / 25 < 1e-3


@quiet
def test_without_a_gpu_and_a_job_it_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    train(tmp_path, MoECostCallback(say=lines.append), steps=3)
    assert any("pass job= or gpu=" in line for line in lines)
    assert not list(tmp_path.glob("*.moecost.json"))


@quiet
def test_a_callback_that_cannot_start_does_not_stop_the_training(tmp_path: Path, capsys: Any) -> None:
    assert (
        len(train(tmp_path, MoECostCallback({"model": "llama-2-7b", "gpu": "a40", "sequence_length": -1}), steps=3))
        == 3
    )
    assert "this run is not watched: InvalidInputError: sequence_length: input should be" in capsys.readouterr().err


def test_unknown_options_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="gppu"):
        MoECostCallback(gppu="a40")


def test_events_of_later_releases_are_answered() -> None:
    callback = MoECostCallback()
    assert callback.on_something_new(None, None, None, model=None) is None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = callback.nothing_of_the_kind


# -------------------------------------------------------------------------------------------------------- learning
def test_one_watched_run_corrects_the_estimate(tmp_path: Path) -> None:
    """A machine that takes 1.5 times the estimated time: after one run of it, another job is met within 10 %."""
    slow = 1.5
    path = tmp_path / "run.moecost.json"
    run = Watch(JOB, out=path, say=lambda line: None)
    run.start()
    run.count = 30
    run.times.extend([slow * estimate(JOB).step.seconds] * 28)
    run.finish()
    other = JOB.model_copy(update={"sequence_length": 1024, "micro_batch_size": 4})
    truth = slow * estimate(other).step.seconds
    mine = fit(read(path))
    before = abs(estimate(other).step.seconds / truth - 1)
    after = abs(estimate(other.model_copy(update={"calibration": mine})).step.seconds / truth - 1)
    assert before == pytest.approx(1 / 3)
    assert after < 0.1
