"""Pairs of layouts: which of two is said to be faster."""

from __future__ import annotations

import warnings
from typing import Any

from moecost import Job, MeasuredRun
from moecost.errors import OutOfRangeWarning
from moecost.measurements import public_runs
from moecost.orderings import Pairs, orderings


def run(tokens_per_second: float, date: str = "2026-01", **layout: Any) -> MeasuredRun:
    job = Job(model="meta-llama/Llama-3.1-8B", gpu="h100", num_gpus=8, sequence_length=4096, software="megatron",
              micro_batch_size=1, **layout)  # fmt: skip
    return MeasuredRun(job=job, tokens_per_second=tokens_per_second, source_key="bench", date=date)


PIPELINE = {"pipeline_parallel_size": 8, "gradient_accumulation_steps": 8}
"""A bubble of 7/8 of the step: slower than data parallelism, whoever measures it."""


def test_of_two_layouts_the_faster_one_is_named() -> None:
    assert orderings([run(90_000), run(50_000, **PIPELINE)]) == [Pairs("bench", 1, 1)]
    assert orderings([run(50_000), run(90_000, **PIPELINE)]) == [Pairs("bench", 1, 0)]


def test_only_clear_differences_of_the_layout_alone_count() -> None:
    assert orderings([run(90_000), run(85_000, **PIPELINE)]) == []  # within 10 %
    assert orderings([run(90_000), run(50_000)]) == []  # repeats of one layout
    assert orderings([run(90_000), run(50_000, date="2026-02", **PIPELINE)]) == []  # another release
    assert orderings([run(90_000), run(50_000, compute_dtype="fp8", **PIPELINE)]) == []  # not the layout alone


def test_public_layouts_are_ordered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        found = orderings(public_runs("multi"))
    pairs, right = sum(o.pairs for o in found), sum(o.right for o in found)
    assert pairs > 500
    assert right / pairs >= 0.90
