"""Measured runs as JSON: they come back as they were, and what is no such file is refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moecost import GPUSpec, Job, MeasuredRun, ModelSpec
from moecost.errors import InvalidInputError
from moecost.measurements import read
from moecost.run_json import write_runs

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
          "vocab_size": 256}  # fmt: skip
OWN_GPU = GPUSpec(name="mine", marketing_name="Mine", vendor="me", architecture="own", memory_label_gb=10.0,
                  bandwidth_gb_per_s=100.0, peak_tflops_dense={"fp32": 1.0})  # fmt: skip
RUNS = [
    MeasuredRun(job=Job(model="mistral-7b", gpu="a40", method="lora", sequence_length=512, micro_batch_size=2),
                step_seconds=1.5, peak_memory_gib=20.0, memory_kind="allocated", group="g", notes="two words"),
    MeasuredRun(job=Job(model=ModelSpec.from_hf(CONFIG), gpu=OWN_GPU, sequence_length=64, compute_dtype="fp32"),
                outcome="oom"),
]  # fmt: skip


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.moecost.json"
    write_runs(path, RUNS, {"anything": [1, 2]})
    assert read(path) == RUNS
    assert read(tmp_path) == RUNS
    assert read(path, gpu="h100", num_gpus=2)[0].job.num_gpus == 2


def test_a_folder_counts_a_run_once(tmp_path: Path) -> None:
    """What the Trainer wrote of the run beside it tells of the same steps."""
    write_runs(tmp_path / "a.moecost.json", RUNS[:1])
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [], "global_step": 3}))
    assert read(tmp_path) == RUNS[:1]


@pytest.mark.parametrize(("change", "message"), [
    ({"runs": None}, "is no file of runs: it lacks format='moecost-runs' or a list under runs"),
    ({"runs": [3]}, "run 1: 3 must be an object with a job"),
    ({"runs": [{"job": {"model": "mistral-7b"}, "step_seconds": 1.0}]}, "run 1: gpu is missing|run 1: gpu"),
    ({"runs": [{"job": {"model": "mistral-7b", "gpu": "a40", "sequence_length": 8}, "step_seconds": -1.0}]},
     "run 1: step_seconds"),
    ({"runs": [{"job": {"model": "mistral-7b", "gpu": "a40", "sequence_length": 8}, "step_secs": 1.0}]},
     "run 1: .*step_secs"),
    ({"runs": [{"job": {"model": "mistral-7b", "gpu": "a40", "sequence_length": 4096, "micro_batch_size": 64},
                "step_seconds": 1e-6}]}, "run 1: step_seconds=1e-06 is .* tokens/s and takes"),
])  # fmt: skip
def test_what_is_no_run_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.moecost.json"
    path.write_text(json.dumps({"format": "moecost-runs", "runs": []} | change))
    with pytest.raises(InvalidInputError, match=message):
        read(path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.moecost.json"
    write_runs(path, RUNS)
    path.write_text(path.read_text()[:200])
    with pytest.raises(InvalidInputError, match="is not valid JSON"):
        read(path)


def test_a_folder_that_takes_no_file_is_told_of() -> None:
    with pytest.raises(InvalidInputError, match="cannot be written"):
        write_runs("/proc/a.moecost.json", RUNS)
