"""Bytes by part against counted and published numbers, and the largest batches of the founding paper."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import paper_runs
import pytest

from moecost import Job, ModelSpec, estimate
from moecost.memory import MOMENTS, layer_activations, max_micro_batch_size, moments, peak, weight_bytes
from moecost.quantities import AttentionCore, DenseFeedForward, Layers
from moecost.resolution import Resolved, resolve
from moecost.units import GIB, MIB
from moecost.workload import Recipe

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")


def resolved(model: Any, **more: Any) -> Resolved:
    return resolve(Job(**({"model": model, "gpu": "a40", "sequence_length": 512, "on_oom": "report"} | more)))


def recipe(**more: Any) -> Recipe:
    """Full tuning in bf16 without checkpointing."""
    plain = resolved("llama-2-7b", method="full", gradient_checkpointing="none", attention="flash")
    return replace(plain.workload.recipe, **more)


# ------------------------------------------------------------------------------------------------ weights and states


@pytest.mark.parametrize(("weight_dtype", "expected"), [("nf4-dq", 24.484e9), ("nf4", 26.649e9)])
def test_quantized_weights_of_mixtral(mixtral: ModelSpec, weight_dtype: str, expected: float) -> None:
    """46.4393e9 weights of linear layers in 4 bits, 0.2635e9 of embedding, head and norms in 16: QLoRA's storage."""
    found = weight_bytes(resolved(mixtral, method="qlora", weight_dtype=weight_dtype).workload)
    assert found == pytest.approx(expected, rel=1e-3)


def test_experts_in_fused_tensors_stay_in_16_bits(mixtral: ModelSpec) -> None:
    """A 4-bit loader that sees nn.Linear alone passes over them: 45.1e9 of 46.4e9 weights (transformers 5)."""
    modules, fused = (
        weight_bytes(resolved(mixtral, method="qlora", lora_targets="attention", software=stack).workload)
        for stack in ("hf-peft", "hf-v5-grouped")
    )
    assert fused - modules == pytest.approx(32 * 8 * 3 * 4096 * 14336 * (2 - 4.126953125 / 8))


def test_weights_of_mixtral_in_16_bits(mixtral: ModelSpec) -> None:
    """46,702,792,704 parameters as published, 2 bytes each."""
    assert weight_bytes(resolved(mixtral, method="lora").workload) == 2 * 46_702_792_704


@pytest.mark.parametrize(
    ("optimizer", "weight_dtype", "per_parameter"),
    [
        ("adamw", "fp32", 16),  # 4 weight + 4 gradient + 8 moments
        ("adamw", "bf16", 8),  # 2 + 2 + 4: LLaMA-Factory's table, "pure bf16: 8x"
        ("adamw8bit", "bf16", 2 + 2 + 2.03125),  # bitsandbytes
        ("sgd", "bf16", 4),
        ("lion", "fp32", 12),
    ],
)
def test_states_of_full_tuning(optimizer: str, weight_dtype: str, per_parameter: float) -> None:
    found = resolved("llama-2-7b", method="full", optimizer=optimizer, weight_dtype=weight_dtype)
    at = moments(found.workload, found.profile.memory, sequences=1.0, padded_length=512.0)["optimizer"]
    states = at.weights + at.gradients + at.optimizer
    assert states / 6_738_415_616 == pytest.approx(per_parameter, rel=1e-9)  # parameters as published
    assert at.adapters == 0


def test_states_of_fp32_adapters(mixtral: ModelSpec) -> None:
    """228,593,664 adapter weights of the founding paper, 16 bytes each: weight, gradient and two moments in fp32."""
    found = resolve(paper_runs.fixed_job("Mixtral", "sparse", 1))
    at = moments(found.workload, found.profile.memory, sequences=1.0, padded_length=128.0)["gradients"]
    assert at.adapters + at.gradients + at.optimizer == pytest.approx(16 * 228_593_664, rel=1e-12)


# ------------------------------------------------------------------------------------------------ activations


def test_activations_of_a_mixtral_layer(mixtral: ModelSpec) -> None:
    """8h + 4H + 4K + 4a + 8E + k (4h + 8f) with h = H = 4096, K = 1024, a = 32, E = 8, k = 2, f = 14336."""
    (layers,) = mixtral.quantities().layers
    found = layer_activations(layers, recipe(), sequences=1.0, padded_length=4096.0)
    assert found == 4096 * 315_584
    assert found == pytest.approx(1.204 * GIB, rel=1e-3)


def test_activations_of_a_dense_layer() -> None:
    """8h + 2H + 4K + 2H + 4a + 8f with f = 14336: 168,064 bytes a token, 41.0 h (Mistral-7B has this shape)."""
    (layers,) = ModelSpec.load("mistral-7b").quantities().layers
    layers = replace(layers, attention=replace(layers.attention, window=None)) if layers.attention else layers
    assert layer_activations(layers, recipe(), sequences=1.0, padded_length=1.0) == 168_064


def _gpt3_layer() -> Layers:
    h, heads = 12288, 96
    return Layers(
        count=96,
        hidden_size=h,
        matrices=(),
        attention=AttentionCore(num_heads=heads, num_key_value_heads=heads, qk_head_dim=128, v_head_dim=128),
        feed_forward=(DenseFeedForward(h, 4 * h, gated=False),),
    )


def test_activations_of_a_gpt_layer() -> None:
    """Korthikanti et al. (arXiv:2205.05198), Table 2, GPT-3 at s = 2048, b = 1: 34 sbh = 816 MiB with the attention
    core recomputed, 34 sbh + 5 a s^2 b = 2736 MiB without.

    Of their 34, two are masks of dropouts that today's models lack (2 sbh = 48 MiB); a flash or eager core keeps a
    log-sum-exp of 4 bytes a head and token besides.
    """
    s, h, a = 2048.0, 12288, 96
    masks, log_sum_exp = 2 * s * h, 4 * a * s
    assert masks == 48 * MIB
    flash = layer_activations(_gpt3_layer(), recipe(attention="flash"), sequences=1.0, padded_length=s)
    eager = layer_activations(_gpt3_layer(), recipe(attention="eager"), sequences=1.0, padded_length=s)
    assert flash == pytest.approx(816 * MIB - masks + log_sum_exp, rel=1e-9)
    assert eager == pytest.approx(2736 * MIB - masks + log_sum_exp, rel=1e-9)


def test_full_checkpointing_keeps_the_layers_inputs(mixtral: ModelSpec) -> None:
    """2 bytes x 4,096 x 32 layers x 4,096 tokens = 1.00 GiB, beside one live layer."""
    found = resolved(mixtral, method="lora", gradient_checkpointing="full", software="hf-peft")
    at = moments(found.workload, found.profile.memory, sequences=1.0, padded_length=4096.0)
    assert at["loss"].activations == GIB
    assert at["gradients"].activations == pytest.approx(1.204 * GIB * found.profile.memory.live_layer, rel=1e-3)


def test_kept_inputs_of_bitsandbytes(mixtral: ModelSpec) -> None:
    """Its 4-bit product of 2024 kept its 16-bit input: h for q, k, v, for o and for the router, h + f an active
    expert, 2 bytes and 32 layers: 3.15 MB a token at top-2, 10.22 MB with all eight."""
    h, f = 4096, 14336
    for mode, k in paper_runs.ACTIVE_EXPERTS.items():
        found = resolve(paper_runs.fixed_job("Mixtral", mode, 1))
        habits = found.profile.memory
        recipe = found.workload.recipe
        assert habits.keeps_quantized_inputs
        assert recipe.keeps_inputs
        shape = {"sequences": 1.0, "padded_length": 1.0}
        kept = moments(found.workload, habits, **shape)["loss"].activations
        lost = moments(replace(found.workload, recipe=replace(recipe, keeps_inputs=False)), habits, **shape)
        assert kept - lost["loss"].activations == 2 * 32 * (3 * h + k * (h + f))
        end = moments(found.workload, habits, **shape)["gradients"].activations  # the last layer to go back
        assert end - lost["gradients"].activations == kept - lost["loss"].activations


def test_logits_are_counted_in_full() -> None:
    """Llama-3, 8,192 tokens x 128,256 words: 1.957 GiB at 2 bytes a logit."""
    found = resolved("llama-3.1-8b", method="lora")
    at = moments(found.workload, found.profile.memory, sequences=1.0, padded_length=8192.0)["loss"]
    assert at.logits / found.profile.memory.logits * 2 == pytest.approx(1.957 * GIB, rel=1e-3)


# ------------------------------------------------------------------------------------------------ moments


def test_the_peak_is_the_fullest_moment() -> None:
    found = resolved("llama-3.1-8b", method="lora")
    for tokens in (8.0, 512.0, 100_000.0):
        most, at = peak(found.workload, found.profile.memory, sequences=1.0, padded_length=tokens)
        assert set(at) == set(MOMENTS)
        assert most == max(float(parts.device(found.profile.memory)) for parts in at.values())


def test_gradients_live_through_accumulation() -> None:
    """With accumulation they are there at the next loss; without, full tuning has none when the loss is computed."""
    for steps, share in ((1, 0.0), (4, 1.0)):
        found = resolved("llama-2-7b", method="full", gradient_accumulation_steps=steps)
        at = moments(found.workload, found.profile.memory, sequences=1.0, padded_length=512.0)
        assert at["loss"].gradients == share * at["optimizer"].gradients


def test_slack_and_context_come_on_top() -> None:
    found = resolved("llama-3.1-8b", method="lora")
    habits = found.profile.memory
    parts = moments(found.workload, habits, sequences=4.0, padded_length=512.0)["loss"]
    transient = parts.activations + parts.logits + parts.buffers
    assert parts.reserved(habits) == pytest.approx(parts.allocated + (habits.allocator - 1) * transient)
    assert parts.device(habits) == pytest.approx(parts.reserved(habits) + habits.context_bytes)


def test_the_largest_batch_of_a_gpu_that_is_full_is_none() -> None:
    found = resolved("mixtral-8x7b", method="full")
    assert max_micro_batch_size(found.workload, found.profile.memory, padded_length=512.0) == 0


def test_an_exact_fit_is_a_fit() -> None:
    """floor() of the closed form is one too low in a fifth of exact fits: the solver must not be."""
    found = resolved("llama-3.1-8b", method="lora")
    habits = found.profile.memory
    for length in (128.0, 200.0, 333.0, 512.0, 1000.0):
        for batch in range(1, 40):
            need, _ = peak(found.workload, habits, sequences=float(batch), padded_length=length)
            for room, expected in ((need, batch), (math.nextafter(float(need), 0), batch - 1)):
                workload = replace(found.workload, device=replace(found.workload.device, memory_bytes=room))
                assert max_micro_batch_size(workload, habits, padded_length=length) == expected


# --------------------------------------------------------------------------- the largest batches of arXiv:2408.04693

# Figs 4, 8, 13 and 14. Left out: 17 and 5 at 80 GB, whose 1,000 queries never reached the 1,024 tokens that are the
# cut, and BlackMamba dense 6 at 512, which the paper's own 30 at 128 tokens contradicts.
LARGEST = [
    ("Mixtral", "sparse", 512, 8, "a40"),
    ("Mixtral", "dense", 512, 2, "a40"),
    ("Mixtral", "sparse", 1024, 4, "a40"),
    ("Mixtral", "dense", 1024, 1, "a40"),
    ("Mixtral", "sparse", 128, 32, "a40"),
    ("Mixtral", "dense", 128, 10, "a40"),
    ("Mixtral", "sparse", 512, 6, "a100-40gb-pcie"),
    ("Mixtral", "sparse", 1024, 3, "a100-40gb-pcie"),
    ("Mixtral", "sparse", 512, 27, "a100-80gb-pcie"),
    ("BlackMamba", "sparse", 512, 20, "a40"),
    ("BlackMamba", "sparse", 1024, 10, "a40"),
    ("BlackMamba", "dense", 1024, 3, "a40"),
    ("BlackMamba", "sparse", 128, 84, "a40"),
    ("BlackMamba", "dense", 128, 30, "a40"),
]


def test_largest_batches_of_the_founding_paper() -> None:
    """At least 85 % exact, within one or within 10 %; 1.15 the mean factor off."""
    hits, factors = 0, []
    for model, mode, length, measured, gpu in LARGEST:
        found = estimate(paper_runs.fixed_job(model, mode, None, length=length, gpu=gpu)).max_micro_batch_size
        print(f"{model} {mode} {gpu} at {length}: measured {measured}, predicted {found}")
        hits += abs(found - measured) <= max(1, 0.1 * measured)
        factors.append(abs(math.log(max(found, 0.5) / measured)))
    assert hits / len(LARGEST) >= 0.85
    assert math.exp(fmean(factors)) <= 1.15


def test_the_batch_chosen_is_the_largest_that_fits() -> None:
    e = estimate(paper_runs.fixed_job("Mixtral", "sparse", None, length=1024))
    assert e.fits
    assert e.micro_batch_size == e.max_micro_batch_size
    assert not estimate(paper_runs.fixed_job("Mixtral", "sparse", e.max_micro_batch_size + 1, length=1024)).fits
