"""The probe and the short run on a real device, which is the CPU here: that every line runs, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moecost import Calibration, Job, estimate
from moecost.cli import app
from moecost.errors import DoesNotFitError, InvalidInputError, UnsupportedError
from moecost.measurements import read
from moecost.probe import collectives, probe_machine
from moecost.probe.clock import TorchClock
from moecost.probe.collectives import CollectiveClock
from moecost.probe.machine import this_machine
from moecost.probe.mixtures import Mixture, eager, experts_of, grouped
from moecost.probe.tasks import COLLECTIVES, CannotMeasureError, collective_tasks, single_tasks, task

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages, and of jobs that are tiny

SHAPE = {
    "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 256, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
JOB = Job(model=SHAPE, gpu="a40", method="lora", lora_targets=["q_proj", "v_proj"], sequence_length=32,
          micro_batch_size=2, num_gpus=2)  # fmt: skip


def run(*args: str | Path) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) in this process."""
    apart: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    result = CliRunner(**apart).invoke(app, [str(a) for a in args], prog_name="moecost", env={"COLUMNS": None})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.to_yaml())
    return path


# ----------------------------------------------------------------------------------------------------------- the probe
def test_the_whole_probe_runs_on_a_cpu_within_a_minute(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    start = time.monotonic()
    status, text, err = run("probe", "--device", "cpu", "--repeats", "3", "-o", out)
    assert status == 0, err
    assert time.monotonic() - start < 60
    assert [p.name for p in tmp_path.iterdir()] == ["here.yaml"]
    found = Calibration.load(out)
    assert found.name == "here"
    record = found.probe
    assert record is not None
    assert (record.device, record.complete, record.peaks_of) == ("cpu", True, "measured")
    assert record.versions["torch"] == torch.__version__ or record.versions["torch"] == torch.__version__.split("+")[0]
    there = {t.kind for t in record.timings} | {note.split()[0] for note in record.notes if "left out" in note}
    assert there == {t.kind for t in single_tasks("small", ("fp32", "bf16"))} | set(COLLECTIVES)
    assert {t.how for t in record.timings if t.kind == "eager"} == {"forward", "step", "checkpointed"}
    assert not [note for note in record.notes if "left out" in note and "bitsandbytes" not in note]
    assert record.peaks.flops_per_s["fp32"] > 1e9
    assert text.splitlines()[-1] == f"written: {out}"
    with pytest.raises(InvalidInputError, match=r"it was probed on .* \(cpu\)"):
        estimate("mistral-7b", "a40", method="lora", sequence_length=512, calibration=out)


def test_a_clock_tells_the_time_of_a_call() -> None:
    """Sleeping takes its time at least; on a busy machine more."""
    clock, calls = TorchClock("cpu", repeats=3), []

    def work() -> None:
        calls.append(1)
        time.sleep(2e-3)

    times = clock._time(work)
    assert len(times) == 3
    assert all(2e-3 <= t < 0.2 for t in times)
    assert len(calls) >= 2 + 3  # twice to warm up


def test_eager_and_grouped_experts_compute_the_same() -> None:
    """And what a router's weights and the chosen experts say by hand, token by token."""
    sizes = {"experts": 4, "top_k": 2, "hidden": 16, "intermediate": 24, "tokens": 8}
    one = experts_of(task("grouped", "fp32", **sizes), "cpu", torch.float32)
    gate, up = one.up.chunk(2, dim=1)
    modules = []
    for e in range(4):
        layers = [torch.nn.Linear(*shape, bias=False) for shape in ((16, 24), (16, 24), (24, 16))]
        for layer, weight in zip(layers, (gate[e], up[e], one.down[e]), strict=True):
            layer.weight = torch.nn.Parameter(weight.detach().clone())
        modules.append(tuple(layers))
    same = Mixture(one.x, one.router, modules, None, None, 4, 2, one.chosen)
    both = grouped("cpu")(one)
    assert torch.allclose(both, eager(same), atol=1e-5)
    scores = torch.softmax(one.router(one.x), dim=-1)
    token, chosen = 3, one.chosen[3].tolist()
    expected = sum(
        scores[token, e] / scores[token, chosen].sum()
        * (one.down[e] @ (torch.nn.functional.silu(gate[e] @ one.x[token]) * (up[e] @ one.x[token])))
        for e in chosen
    )  # fmt: skip
    assert torch.allclose(both[token], expected, atol=1e-5)


def test_memory_that_runs_out_leaves_a_task_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = TorchClock("cpu", repeats=1)

    def full(one: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")

    monkeypatch.setattr(clock, "_copy", full, raising=False)
    monkeypatch.setattr(clock, "_elementwise", full)
    with pytest.raises(CannotMeasureError, match="the device ran out of memory"):
        clock.measure(task("copy", "fp32", elements=8))
    with pytest.raises(CannotMeasureError, match="the device ran out of memory"):  # the CPU's allocator, in earnest
        clock.measure(task("gemm", "fp32", rows=2**31, in_features=2**20, out_features=2))


def test_a_process_that_is_killed_leaves_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = collective_tasks("small", "fp32", 2)
    clock = CollectiveClock(tasks, "cpu", 2, repeats=2)

    def join(context: Any) -> None:
        """Kill the second process as soon as there is a first result."""
        path = Path(folder[0]) / collectives.RESULTS
        while not (path.exists() and path.read_text().count("\n")):
            assert not context.join(timeout=0.05)
        os.kill(context.processes[1].pid, signal.SIGKILL)
        real(context)

    folder: list[str] = []
    real, temporary = collectives._join, collectives.tempfile.TemporaryDirectory

    class Remembered(temporary):  # type: ignore[misc, valid-type]
        def __enter__(self) -> str:
            folder.append(super().__enter__())
            return folder[0]

    monkeypatch.setattr(collectives.tempfile, "TemporaryDirectory", Remembered)
    monkeypatch.setattr(collectives, "_join", join)
    assert len(clock.measure(tasks[0])) == 2
    done = len(clock.found or {})
    if done < len(tasks):  # else all was done before the signal came
        with pytest.raises(CannotMeasureError, match=r"SIGKILL|terminated|Error"):
            clock.measure(tasks[-1])


def probe_in_a_process(folder: Path, ended_by: signal.Signals) -> subprocess.CompletedProcess[str]:
    """Start a probe, wait until it has written something, and send it a signal."""
    command = [sys.executable, "-m", "moecost", "probe", "--device", "cpu", "--num-gpus", "1", "-o", "here.yaml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (folder / "here.yaml").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(ended_by)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_probe_that_is_ended_keeps_what_it_has(tmp_path: Path, ended_by: signal.Signals) -> None:
    done = probe_in_a_process(tmp_path, ended_by)
    found = Calibration.load(tmp_path / "here.yaml")
    assert found.probe is not None
    assert not found.probe.complete
    assert len(found.probe.timings) >= 7  # the products
    if ended_by == signal.SIGKILL:
        assert done.returncode == -9
        return
    assert done.returncode == 0, done.stderr
    assert "ended early" in done.stdout
    assert "Traceback" not in done.stderr


def test_what_is_there_already_is_not_replaced(tmp_path: Path, job_file: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("mine")
    status, _, err = run("probe", "--device", "cpu", "-o", mine)
    assert (status, mine.read_text()) == (2, "mine")
    assert f"{mine}: is there already; give another name with -o, or --force to replace it" in err
    theirs = tmp_path / "job.moecost.json"
    theirs.write_text("theirs")
    status, _, err = run("probe", "--train", job_file, "--device", "cpu", "-o", theirs)
    assert (status, theirs.read_text()) == (2, "theirs")


@pytest.mark.parametrize(("args", "message"), [
    (["-o", "/proc/no.yaml"], "/proc/no.yaml: cannot be written: "),
    (["-o", "/no/such/folder/a.yaml"], "/no/such/folder/a.yaml: cannot be written: No such file"),
    (["-o", "a.txt"], "a.txt: the name must end in .yaml"),
    (["--device", "tpu"], "device='tpu' must be 'cuda' or 'cpu'"),
    (["--gpu", "a40"], "gpu='a40' has no meaning on the CPU"),
    (["--node", "nosuch"], "node='nosuch' has no meaning on the CPU"),
    (["--num-gpus", "0", "-o", "{tmp}/a.yaml"], "num_gpus=0 must be 1 to"),
    (["--steps", "3", "-o", "{tmp}/a.yaml"], "--steps and --layers belong to --train"),
    (["--train", "{tmp}/j.yaml", "--repeats", "3"], "--repeats are not for --train"),
    (["--software", "hf-paft", "-o", "{tmp}/a.yaml"], "unknown software profile 'hf-paft'; did you mean"),
    (["--layers", "3", "-o", "{tmp}/a.yaml"], "--set, --steps and --layers belong to --train"),
])  # fmt: skip
def test_bad_input_is_one_line(args: list[str], message: str, tmp_path: Path) -> None:
    device = [] if "--device" in args else ["--device", "cpu"]
    status, out, err = run("probe", *device, *(a.format(tmp=tmp_path) for a in args))
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(UnsupportedError, match="finds no CUDA device here; use device 'cpu'"):
        this_machine("cuda")
    with pytest.raises(UnsupportedError, match="finds no CUDA device here"):
        TorchClock("cuda")


def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"needs PyTorch: pip install 'moecost\[probe\]'"):
        probe_machine("cpu")
    status, _, err = run("probe")
    assert status == 2
    assert "needs PyTorch" in err


def test_a_gpu_that_is_in_no_catalogue_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A4O")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InvalidInputError, match=r"is not in the catalogue: .*Give --gpu .* or --gpu measured"):
        this_machine("cuda")
    assert this_machine("cuda", "measured").spec is None
    known = this_machine("cuda", "a40")
    assert (known.name, known.num_devices, known.dtypes) == ("a40", 3, ("bf16", "fp16", "fp32"))
    with pytest.raises(InvalidInputError, match="num_gpus=4 must be 1 to the 3 that are here"):
        probe_machine("cuda", "a40", num_gpus=4)


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Calibration, path: Path) -> None:
        raise InvalidInputError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(Calibration, "save", full)
    tasks = single_tasks("small", ("fp32",))[:3]
    monkeypatch.setattr("moecost.probe.single_tasks", lambda size, dtypes: tasks)
    status, out, err = run("probe", "--device", "cpu", "--num-gpus", "1", "--repeats", "2", "-o", tmp_path / "a.yaml")
    assert status == 2
    assert err.count("No space left on device") == 1
    found = Calibration.model_validate_json(out)
    assert found.probe is not None
    assert len(found.probe.timings) == 3


# ------------------------------------------------------------------------------------------------------- a short run
@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("peft")
    return pytest.importorskip("transformers")


def test_a_short_run_is_a_measured_run(transformers: Any, tmp_path: Path, job_file: Path) -> None:
    out = tmp_path / "mine.moecost.json"
    status, text, err = run(
        "probe", "--train", job_file, "--steps", "10", "--device", "cpu", "--layers", "2", "-o", out
    )
    assert status == 0, err
    (found,) = read(out)
    job = found.job
    assert found.step_seconds is not None
    assert (job.method, job.micro_batch_size, job.sequence_length, job.num_gpus) == ("lora", 2, 32, 1)
    assert job.model_overrides == {"num_hidden_layers": 2}
    assert getattr(job.gpu, "name", None) == "cpu"
    for said in ("2 of 4 layers", "run on one of 2 GPUs", "run in fp32 on the CPU", "random weights"):
        assert said in found.notes
    record = json.loads(out.read_text())["record"]
    assert set(record["stage_seconds"]) == {"forward", "backward", "optimizer"}
    assert len(record["step_seconds"]) == 6  # 10, less 2 of warm-up and 2 by stage
    assert "SHORT RUN on " in text
    assert f"written: {out}" in text


def test_what_is_trained_is_what_the_estimate_counts(transformers: Any) -> None:
    """The same number of trained parameters in PEFT's model and in ours, at the depth that was run."""
    from moecost.probe.training import _as_run, _Loop

    for changes in (
        {},
        {"method": "full", "lora_targets": ("all-linear",)},
        {"lora_targets": ("attention",), "lora_rank": 3},
    ):
        job, shape = _as_run(JOB.model_copy(update=changes), this_machine("cpu"), 3, 5, [])
        loop = _Loop(job, shape, "cpu")
        loop.build()
        assert sum(p.numel() for p in loop.trained) == estimate(job).num_trainable_parameters


def test_four_bits_are_held_and_adapters_beside_them_trained(transformers: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from moecost.probe.training import _as_run, _Loop

    wide = SHAPE | {"hidden_size": 128}
    job, shape = _as_run(JOB.model_copy(update={"method": "qlora", "model": wide}), this_machine("cpu"), 2, 5, [])
    loop = _Loop(job, shape, "cpu")
    loop.build()
    held = [m for m in loop.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(held) == 2 * 4  # q, k, v and o of two layers; experts lie in fused tensors, the head stays
    assert all(m.weight.dtype == torch.uint8 for m in held)
    assert sum(p.numel() for p in loop.trained) == estimate(job).num_trainable_parameters
    times = loop.step(staged=True)
    assert min(times.values()) > 0
    assert all(torch.isfinite(p).all() for p in loop.trained)


def test_without_bitsandbytes_it_says_so(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from moecost.probe import training

    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="needs the package bitsandbytes here: pip install bitsandbytes"):
        training.train_briefly(JOB.model_copy(update={"method": "qlora"}), 3, device="cpu")


def test_another_model_is_not_run_in_its_place(transformers: Any) -> None:
    """A field that the transformers of the test does not know takes its default, and makes another model."""
    from moecost.probe.training import _as_run, _Loop

    job, (spec, found) = _as_run(JOB, this_machine("cpu"), None, 5, [])
    loop = _Loop(job, (spec, found.model_copy(update={"num_parameters": 2 * found.num_parameters})), "cpu")
    with pytest.raises(UnsupportedError, match=r"makes .* parameters of the config of .*, moecost counts "):
        loop.build()


def test_steps_train(transformers: Any) -> None:
    """The loss of a batch that is seen again and again falls: the steps are real."""
    from moecost.probe.training import _as_run, _Loop

    changes = {"method": "full", "lora_targets": ("all-linear",), "gradient_checkpointing": "full"}
    job, shape = _as_run(JOB.model_copy(update=changes), this_machine("cpu"), None, 5, [])
    loop = _Loop(job, shape, "cpu")
    loop.build()
    for group in loop.optimizer.param_groups:
        group["lr"] = 1e-2
    before = float(loop._loss())
    for _ in range(5):
        loop.step(staged=True)
    assert float(loop._loss()) < 0.9 * before


def test_memory_that_runs_out_in_the_middle_is_an_outcome(
    transformers: Any, tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moecost.probe.training import _Loop

    real, left = _Loop.step, iter(range(6))

    def step(self: Any, staged: bool) -> Any:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, staged)

    monkeypatch.setattr(_Loop, "step", step)
    out = tmp_path / "mine.moecost.json"
    status, text, _ = run("probe", "--train", job_file, "--steps", "10", "--device", "cpu", "-o", out)
    assert status == 0
    assert "ended by out of memory" in text
    (found,) = read(out)
    assert found.outcome == "oom"
    assert found.step_seconds is not None
    assert json.loads(out.read_text())["record"]["ended_by"] == "out of memory"


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"weight_dtype": "int8"}, UnsupportedError, "weight_dtype='int8', compute_dtype=None: a short run has fp32, bf16"),
    ({"optimizer": "muon"}, UnsupportedError, "optimizer='muon' is not run here; use adamw or sgd"),
    ({"lora_targets": ("w1",)}, InvalidInputError, "lora_targets"),
    ({"sequence_length": 4_000_000}, DoesNotFitError, "not even one layer of .* fits: .* GiB at micro_batch_size=2"),
    ({"model": "blackmamba-2.8b", "method": "full", "lora_targets": ("all-linear",)}, UnsupportedError,
     "transformers .* cannot build blackmamba-2.8b"),
])  # fmt: skip
def test_jobs_that_cannot_be_run(
    transformers: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    from moecost.probe.training import train_briefly

    with pytest.raises(error, match=message):
        train_briefly(JOB.model_copy(update=changes), 3, device="cpu")


def test_too_few_steps_and_too_many_layers_are_refused(transformers: Any) -> None:
    from moecost.probe.training import train_briefly

    with pytest.raises(InvalidInputError, match="steps=2 must be 3 or more: the first 2 are not counted"):
        train_briefly(JOB, 2, device="cpu")
    with pytest.raises(InvalidInputError, match=r"layers=5: .* has 4; use 1 to 4"):
        train_briefly(JOB, 3, device="cpu", layers=5)


def test_the_depth_is_the_largest_that_fits(transformers: Any) -> None:
    from moecost.probe.training import _deepest

    for limit in range(12):
        assert _deepest(10, lambda n, limit=limit: n <= limit) == min(limit, 10)
