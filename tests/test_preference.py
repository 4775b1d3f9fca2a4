"""Preference tuning counted by hand from the algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moecost.errors import InvalidInputError, UnknownNameError
from moecost.preference import METHODS, models_held, preference_method, query_seconds

FORWARD, TRAIN, GENERATE = 1.0, 3.0, 10.0
"""A backward pass takes two forward ones; writing an answer ten."""


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("sft", 3),
        ("dpo", 2 * 3 + 2),  # two answers trained, two through the reference
        ("orpo", 2 * 3),
        ("kto", 3 + 1 + 2),  # one trained; another's through the policy; both through the reference
        ("reward-model", 2 * 3),
        ("ppo", 4 * (3 + 3) + 4 + 10),  # four passes of policy and value; four models forward; one answer
        ("grpo", 8 * 3 + 8 + 8 + 8 * 10),  # eight answers trained; reference, reward; eight answers written
    ],
)
def test_seconds_of_a_query(name: str, seconds: float) -> None:
    found = query_seconds(preference_method(name), train_s=TRAIN, forward_s=FORWARD, generate_s=GENERATE)
    assert found == seconds


@pytest.mark.parametrize(
    ("name", "full", "adapters"),
    [("sft", 1, 1), ("dpo", 2, 1), ("orpo", 1, 1), ("kto", 2, 1), ("ppo", 4, 3), ("grpo", 3, 2)],
)
def test_models_in_memory(name: str, full: float, adapters: float) -> None:
    """Policy, reference, reward, value; adapters switched off are the reference."""
    assert models_held(METHODS[name], adapters=False) == full
    assert models_held(METHODS[name], adapters=True) == adapters


def test_what_is_left_out() -> None:
    """GRPO by a rule, without a reference: eight answers written and trained. DPO with a reference computed before."""
    common: dict[str, Any] = {"train_s": TRAIN, "forward_s": FORWARD, "precomputed_reference": True}
    assert query_seconds(METHODS["grpo"], **common, generate_s=GENERATE, reward_share=0.0) == 8 * (3 + 10)
    assert query_seconds(METHODS["dpo"], **common) == 6
    assert models_held(METHODS["grpo"], adapters=False, reward_share=0.0) == 2


def test_another_number_of_answers() -> None:
    """DeepSeekMath's 64 take eight times what 8 take."""
    times = {"train_s": TRAIN, "forward_s": FORWARD, "generate_s": GENERATE}
    eight, many = (query_seconds(METHODS["grpo"].of_group(g), **times) for g in (8, 64))
    assert many == 8 * eight == 8 * query_seconds(METHODS["grpo"], **times)
    with pytest.raises(InvalidInputError, match="generates nothing"):
        METHODS["dpo"].of_group(4)
    with pytest.raises(InvalidInputError, match=r"completions=0 must be"):
        METHODS["grpo"].of_group(0)


def test_scalars_and_arrays_agree() -> None:
    train = np.array([3.0, 6.0])
    together = query_seconds(METHODS["dpo"], train_s=train, forward_s=train / 3)
    assert together == pytest.approx([query_seconds(METHODS["dpo"], train_s=t, forward_s=t / 3) for t in train])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'dpo'"):
        preference_method("dpoo")
    with pytest.raises(InvalidInputError, match="train_s=-1"):
        query_seconds(METHODS["dpo"], train_s=-1.0, forward_s=1.0)
    with pytest.raises(InvalidInputError, match="reward_share=-1"):
        query_seconds(METHODS["ppo"], train_s=3.0, forward_s=1.0, reward_share=-1.0)
