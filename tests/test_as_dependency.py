"""What another program may count on: results travel between processes, threads do not meet, nothing else changes."""

from __future__ import annotations

import locale
import logging
import os
import pickle
import random
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from moecost import Calibration, Comparison, Estimate, Job, Sweep, compare, estimate, sweep

JOB: dict[str, Any] = {"model": "mixtral-8x7b", "gpu": "a40", "method": "qlora", "sequence_length": 512,
                       "software": "hf-peft-2024", "price": 0.79}  # fmt: skip
AXES: dict[str, Any] = {"models": "mistral-7b", "gpus": ["a40", "t4"], "method": "qlora", "sequence_length": [256, 512],
                        "micro_batch_size": [1, 64]}  # fmt: skip

COLD = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from moecost import estimate

jobs = [dict(model=model, gpu=gpu, method=method, sequence_length=length)
        for model in ("mixtral-8x7b", "mistral-7b") for gpu in ("a40", "h100")
        for method in ("lora", "qlora") for length in (256, 512)]

def run(job):
    return estimate(**job, on_oom="report").model_dump_json()

sys.setswitchinterval(1e-5)  # threads meet as often as they can
start = threading.Barrier(8)  # all at once, while nothing has been read yet
with ThreadPoolExecutor(8, initializer=start.wait) as pool:
    together = list(pool.map(run, jobs * 2))
alone = [run(job) for job in jobs]
assert together == alone * 2, [a == b for a, b in zip(together, alone * 2)]
print(len(set(alone)))
"""


def back(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))


# -------------------------------------------------------------------------------------------------- pickling
@pytest.mark.parametrize("fields", [{}, {"model": {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
                                                   "intermediate_size": 1024, "vocab_size": 1000},
                                         "micro_batch_size": 4}])  # fmt: skip
def test_a_job_travels(fields: dict[str, Any]) -> None:
    job = Job(**JOB | fields)
    assert back(job) == job
    assert back(job).model_fields_set == job.model_fields_set
    assert estimate(back(job)) == estimate(job)


def test_an_estimate_travels() -> None:
    e = estimate(Job(**JOB))
    other = back(e)
    assert isinstance(other, Estimate)
    assert other == e
    assert str(other) == str(e)
    assert other.interval("cost_usd") == e.interval("cost_usd")


def test_a_calibration_travels() -> None:
    c = Calibration.load("public-2026")
    assert back(c) == c
    assert back(c).values("Hopper") == c.values("Hopper")


def test_a_sweep_travels() -> None:
    s = sweep(**AXES)
    other = back(s)
    assert isinstance(other, Sweep)
    assert other.columns == s.columns
    assert 0 < s["fits"].sum() < len(s)
    for name in s.columns:
        np.testing.assert_array_equal(other[name], s[name])
    assert other.estimate(0) == s.estimate(0)
    with pytest.raises(ValueError, match="read-only"):
        other["cost_usd"][0] = 0.0


def test_a_comparison_travels() -> None:
    c = compare([JOB, JOB | {"gpu": "h100"}, JOB | {"gpu": "t4"}, JOB | {"gpu": "no such"}])
    other = back(c)
    assert isinstance(other, Comparison)
    assert other == c
    assert {candidate.status for candidate in other.candidates} == {"fits", "does not fit", "cannot be used"}


def test_results_come_back_from_another_process() -> None:
    jobs = [Job(**JOB | {"sequence_length": length}) for length in (256, 512)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(estimate, jobs)) == [estimate(job) for job in jobs]


@pytest.mark.parametrize("fields", [{"sequence_length": 99_999}, {"gpu": "a41"}, {"num_gpus": 0}])
def test_errors_come_back_from_another_process_too(fields: dict[str, Any]) -> None:
    """A pool sends an exception by pickle; one that cannot be read back hangs or breaks the pool."""
    with pytest.raises(Exception, match=r".") as caught:
        estimate(**JOB | fields)
    other = back(caught.value)
    assert type(other) is type(caught.value)
    assert str(other) == str(caught.value)


# --------------------------------------------------------------------------------------------------- threads
def test_threads_of_a_cold_process_find_what_one_finds() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COLD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 16


def test_threads_sweep_and_compare_alike() -> None:
    def run(i: int) -> tuple[list[float], str]:
        s = sweep(**AXES | {"lora_rank": 8 + i})
        return s["step_seconds"].tolist(), str(compare([JOB, JOB | {"lora_rank": 8 + i}]))

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(16)))
    np.testing.assert_equal(together, [run(i) for i in range(16)])


# ----------------------------------------------------------------------------------------------- global state
def state() -> dict[str, Any]:
    """What a library could change under its user's feet."""
    root = logging.getLogger()
    return {
        "warnings": list(warnings.filters),
        "numpy errors": np.geterr(),
        "numpy prints": np.get_printoptions(),
        "numpy random": repr(np.random.get_state()),  # noqa: NPY002 - the global one is what could change
        "random": random.getstate(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": (root.level, list(root.handlers)),
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.displayhook, sys.stdout, sys.stderr),
    }


def test_nothing_else_changes(capfd: pytest.CaptureFixture[str]) -> None:
    before = state()
    e = estimate(Job(**JOB))
    str(e), e._repr_html_(), e.model_dump_json()
    str(sweep(**AXES)), str(compare([JOB, JOB | {"gpu": "h100"}]))
    assert state() == before
    assert capfd.readouterr() == ("", "")


def test_what_is_passed_in_stays_as_it_was() -> None:
    targets, model = ["q_proj"], {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
                                  "intermediate_size": 1024, "vocab_size": 1000}  # fmt: skip
    given = {"lora_targets": targets, "model": model, "gpu": "a40", "method": "lora", "sequence_length": 128,
             "micro_batch_size": 4}  # fmt: skip
    before = pickle.dumps(given)
    estimate(**given)
    compare([given])
    sweep(models=[model], gpus=["a40"], method="lora", lora_targets=targets, sequence_length=[128])
    assert pickle.dumps(given) == before


def test_one_estimate_does_not_change_the_next() -> None:
    first = estimate(Job(**JOB))
    for fields in ({"gpu": "h100"}, {"model": "blackmamba-2.8b", "method": "full"}, {"calibration": "public-2026"}):
        estimate(Job(**JOB | fields))
    assert estimate(Job(**JOB)) == first
