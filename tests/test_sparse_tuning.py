"""`method="sparse"` (SpIEL, arXiv:2401.16405) against the byte counts of its released code."""

from __future__ import annotations

import pytest

from moecost import Estimate, estimate
from moecost.errors import InvalidInputError

LINEARS = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
"""Weights of Llama-2-7B's linear layers, from its config."""
CHANGES = 159_907_840
"""As many as a LoRA of rank 64 on all linear layers has: 32 x 64 x (4 x 8,192 + 3 x 15,104)."""


def tuned(**fields: object) -> Estimate:
    job = {"sequence_length": 512, "micro_batch_size": 1, "gradient_checkpointing": "full", "price": 1.0}
    return estimate("meta-llama/Llama-2-7b-hf", "a100-80gb-sxm", **(job | fields))


def test_changes_take_24_bytes_and_ten_more_in_a_selection_window() -> None:
    """3.84 GB steady and 5.44 GB in a window in 16 bits, against 2.56 GB for the fp32 LoRA of equal size."""
    sparse, lora = tuned(method="sparse", density=CHANGES / LINEARS), tuned(method="lora", lora_rank=64)
    assert sparse.num_trainable_parameters == pytest.approx(CHANGES, abs=1)
    assert lora.num_trainable_parameters == CHANGES
    gb = 2**30 / 1e9
    states = (sparse.memory.adapters_gib + sparse.memory.gradients_gib + sparse.memory.optimizer_gib) * gb
    assert states == pytest.approx(3.84, abs=0.005)
    assert sparse.memory.moment == "optimizer"  # which makes copies of values and indices, 8 bytes a change
    window = sparse.memory.buffers_gib * gb - 8 * CHANGES / 1e9
    assert states + window == pytest.approx(5.44, abs=0.005)
    of_lora = lora.memory.adapters_gib + lora.memory.gradients_gib + lora.memory.optimizer_gib
    assert of_lora * gb == pytest.approx(2.56, abs=0.005)


def test_products_are_those_of_full_tuning() -> None:
    """The released code forms each whole weight gradient: 1.5 times the products of LoRA, 1.33 with recomputation."""

    def work(method: str, checkpointing: str) -> float:
        kernels = tuned(method=method, gradient_checkpointing=checkpointing, num_queries=64).step.by_kernel
        return sum(kernels[f"mlp.{name}"].flops for name in ("w1", "w2", "w3"))

    assert work("sparse", "none") == pytest.approx(1.5 * work("lora", "none"))
    assert work("sparse", "full") == pytest.approx(4 / 3 * work("lora", "full"))
    assert tuned(method="sparse").step.seconds > tuned(method="lora").step.seconds


def test_a_hundredth_is_the_habit_and_the_notes_say_so() -> None:
    e = tuned(method="sparse", lora_targets=["q_proj", "v_proj"])
    assert e.num_trainable_parameters == int(0.01 * 32 * 2 * 4096 * 4096)
    assert any("SpIEL" in note for note in e.notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "lora", "density": 0.01}, "density=0.01 has no meaning with method='lora'; use method='sparse'"),
        ({"method": "sparse", "lora_rank": 8}, "lora_rank=8 has no meaning with method='sparse'"),
        ({"method": "sparse", "density": 0}, "density"),
        ({"method": "sparse", "density": 1.5}, "density"),
    ],
)
def test_contradictions(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tuned(**fields)
