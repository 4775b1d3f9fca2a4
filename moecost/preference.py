r"""Tuning by preferences and rewards, in multiples of plain fine-tuning: passes, models held, generated tokens.

What an estimate gives for a plain run (seconds to train on a sequence, and of its forward pass alone) becomes the time
of a query here. Counted from the algorithms, with the defaults of TRL where a number is free; no run was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from moecost.arrays import FloatLike, as_float
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.validity import positive


@dataclass(frozen=True, slots=True)
class PreferenceMethod:
    """What one query of a method needs; a query is a prompt with its answer, pair of answers, or group of them.

    Attributes
    ----------
    trained : sequences that are passed forward and backward through the policy.
    passes : times that these are trained on before new ones are made.
    policy_forwards, reference_forwards, reward_forwards, value_forwards : sequences passed forward alone, by model.
    generated : answers that the policy writes.
    trains_value : a value model is trained on the same sequences.
    holds_reference, holds_reward : models beside the policy.
    source : of the algorithm, and what was assumed.
    """

    trained: float
    source: str
    passes: float = 1.0
    policy_forwards: float = 0.0
    reference_forwards: float = 0.0
    reward_forwards: float = 0.0
    value_forwards: float = 0.0
    generated: float = 0.0
    trains_value: bool = False
    holds_reference: bool = False
    holds_reward: bool = False

    def of_group(self, completions: int) -> PreferenceMethod:
        """The same with so many answers to a prompt: a method that generates, of GRPO's kind."""
        if isinstance(completions, bool) or not isinstance(completions, int) or completions < 1:
            raise InvalidInputError(f"completions={completions!r:.40} must be a whole number of at least 1")
        if self.generated == 0.0:
            raise InvalidInputError(f"completions={completions}: this method generates nothing; leave it out")
        factor = completions / self.generated
        return replace(
            self,
            trained=self.trained * factor,
            policy_forwards=self.policy_forwards * factor,
            reference_forwards=self.reference_forwards * factor,
            reward_forwards=self.reward_forwards * factor,
            value_forwards=self.value_forwards * factor,
            generated=float(completions),
        )


METHODS: Final[Mapping[str, PreferenceMethod]] = MappingProxyType(
    {
        "sft": PreferenceMethod(1, "plain fine-tuning"),
        "dpo": PreferenceMethod(
            2,
            "arXiv:2305.18290: chosen and rejected answer, each also through the frozen reference",
            reference_forwards=2,
            holds_reference=True,
        ),
        "orpo": PreferenceMethod(2, "arXiv:2403.07691: chosen and rejected answer, no reference"),
        "kto": PreferenceMethod(
            1,
            "arXiv:2402.01306: one answer, and one of another prompt through policy and reference for the KL term",
            policy_forwards=1,
            reference_forwards=2,
            holds_reference=True,
        ),
        "reward-model": PreferenceMethod(2, "Bradley-Terry loss on chosen and rejected answer (arXiv:2203.02155)"),
        "ppo": PreferenceMethod(
            1,
            "arXiv:2203.02155: old probabilities, reference, reward and value of each answer; 4 passes as TRL has",
            passes=4,
            policy_forwards=1,
            reference_forwards=1,
            reward_forwards=1,
            value_forwards=1,
            generated=1,
            trains_value=True,
            holds_reference=True,
            holds_reward=True,
        ),
        "grpo": PreferenceMethod(
            8,
            "arXiv:2402.03300: a group of 8 answers (TRL's default) with reference and reward model, no value model; "
            "on policy, so that one pass needs no old probabilities",
            reference_forwards=8,
            reward_forwards=8,
            generated=8,
            holds_reference=True,
            holds_reward=True,
        ),
    }
)


def preference_method(name: str) -> PreferenceMethod:
    """A method by its name.

    >>> preference_method("dpo").trained
    2
    """
    if name not in METHODS:
        raise UnknownNameError("preference method", str(name), METHODS, f"Known: {', '.join(METHODS)}.")
    return METHODS[name]


def query_seconds(
    method: PreferenceMethod,
    *,
    train_s: FloatLike,
    forward_s: FloatLike,
    generate_s: FloatLike = 0.0,
    reward_share: FloatLike = 1.0,
    value_share: FloatLike = 1.0,
    precomputed_reference: bool = False,
) -> FloatLike:
    """Time of one query. [s]

    Parameters
    ----------
    train_s : to train on one sequence, forward and backward. [s]
    forward_s : of its forward pass alone. [s]
    generate_s : to write one answer, of all that are written at once: `moecost.serving` has it. [s]
    reward_share, value_share : size of these models over the policy's; 0 where a rule gives the reward.
    precomputed_reference : the reference's probabilities are computed once before, and are not counted.

    >>> float(query_seconds(METHODS["dpo"], train_s=3.0, forward_s=1.0))  # twice 3, and twice 1
    8.0
    """
    positive(train_s=train_s, forward_s=forward_s)
    positive(zero=True, generate_s=generate_s, reward_share=reward_share, value_share=value_share)
    m = method
    reference = 0.0 if precomputed_reference else m.reference_forwards
    forwards = m.policy_forwards + reference + m.reward_forwards * reward_share + m.value_forwards * value_share
    trained = m.trained * m.passes * (1.0 + (value_share if m.trains_value else 0.0))
    return as_float(trained * train_s + forwards * forward_s + m.generated * generate_s)


def models_held(
    method: PreferenceMethod, *, adapters: bool, reward_share: float = 1.0, value_share: float = 1.0
) -> float:
    """Copies of the policy's weights in memory; with adapters the reference is the base model without them.

    >>> models_held(METHODS["ppo"], adapters=False), models_held(METHODS["dpo"], adapters=True)
    (4.0, 1.0)
    """
    reference = 1.0 if method.holds_reference and not adapters else 0.0
    reward = reward_share if method.holds_reward else 0.0
    return 1.0 + reference + reward + (value_share if method.trains_value else 0.0)
