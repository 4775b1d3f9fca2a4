"""Pairs of measured runs that differ in one setting: the effect of the setting, told from all else.

Not among them, as the model does not reproduce them: torch.compile without recomputation (+27 % measured, +11 %
predicted), bf16 LoRA to 4-bit LoRA at many tokens (+8 %, -1 %), adamw8bit for adamw (-5 %, +1 %).
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

import pytest

from moecost import MeasuredRun
from moecost.estimation import estimate_job
from moecost.measurements import public_runs

PAIRS: list[tuple[str, str, str, str | None, str]] = [
    ("fms", "mistralai/Mistral-7B-v0.1", "fused_kernels", None, "foak"),
    ("fms", "TheBloke/Mistral-7B-v0.1-GPTQ", "fused_kernels", None, "foak"),
    ("fms", "ibm/PowerLM-3b", "fused_kernels", None, "foak"),
    ("fms", "NousResearch/Llama-2-70b-hf", "fused_kernels", None, "foak"),
    ("fms", "TheBloke/Llama-2-70B-GPTQ", "fused_kernels", None, "foak"),
    ("torchtune", "meta-llama/Llama-3.2-3B-Instruct", "gradient_checkpointing", "full", "none"),
]


@cache
def timed(source: str) -> list[MeasuredRun]:
    return [run for run in public_runs() if run.source_key == source and run.tokens_per_second]


def effects(source: str, model: str, name: str, before: str | None, after: str) -> list[tuple[float, float]]:
    """(measured, predicted) changes of tokens a second of all pairs that are alike in every other field."""
    alike: dict[str, dict[Any, list[MeasuredRun]]] = {}
    for run in timed(source):
        if run.job.model == model:
            rest = repr(run.job.model_dump(exclude={name, "calibration"}))
            alike.setdefault(rest, {}).setdefault(getattr(run.job, name), []).append(run)
    found = []
    for values in alike.values():
        for one in values.get(before, []):
            for two in values.get(after, []):
                speeds = [estimate_job(r.job.model_copy(update={"on_oom": "report"})).padded_tokens_per_second
                          for r in (one, two)]  # fmt: skip
                assert one.tokens_per_second is not None
                assert two.tokens_per_second is not None
                found.append((two.tokens_per_second / one.tokens_per_second - 1, speeds[1] / speeds[0] - 1))
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[1]}-{pair[4]}")
def test_effect_of_one_setting_within_a_third(pair: tuple[str, str, str, str | None, str]) -> None:
    found = effects(*pair)
    assert found, "no such pair: does the table name the model otherwise?"
    measured, predicted = (statistics.median(values) for values in zip(*found, strict=True))
    assert abs(predicted - measured) <= abs(measured) / 3, f"{measured:+.1%} measured, {predicted:+.1%} predicted"
