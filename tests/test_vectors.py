"""Numbers of papers and of hand-worked examples against the small formulas, one a line.

Those that stand beside their idea in other files are not repeated: QLoRA and optimizer bytes (test_storage,
test_memory), FLOPs by method (test_operators), kernels (test_roofline), routing (test_experts), laws
(test_scaling_laws), interruptions (test_interruptions).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moecost import ModelSpec
from moecost.communication import all_reduce_bytes, gather_bytes, pipeline_stretch
from moecost.experts import dropped_fraction, expert_capacity
from moecost.flops import attention_flops, gpt_training_flops, query_key_pairs, training_seconds
from moecost.hierarchy import moesys_tiers, offload_efficiency, ring_is_steady, streamed_seconds
from moecost.memory import layer_activations
from moecost.parameters import active, by_part
from moecost.quantities import AttentionCore, DenseFeedForward, Layers
from moecost.roofline import sparse_speedup
from moecost.storage import (
    OPTIMIZERS,
    WEIGHT_FORMATS,
    apollo_elements,
    bitmask_bits,
    galore_elements,
    indexed_bits,
    model_state_bytes,
    semi_structured_bits,
    sparse_delta_bytes,
    sparse_delta_sm3_bytes,
)
from moecost.units import MIB
from moecost.workload import Layout, Recipe

DAY = 86_400.0


def gpt(layers: int, hidden: int, *, vocab: int = 51_200, positions: int = 2048, heads: int = 16) -> ModelSpec:
    return ModelSpec.from_hf(
        {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab,
         "n_positions": positions}
    )  # fmt: skip


# ---------------------------------------------------------------------------------- Narayanan et al., arXiv:2104.04473
# Table 1: parameters (1e9) as printed, heads, width, layers, GPUs, sequences a batch, TFLOP/s a GPU
NARAYANAN = [
    (1.7, 24, 2304, 24, 32, 512, 137),
    (3.6, 32, 3072, 30, 64, 512, 138),
    (7.5, 32, 4096, 36, 128, 512, 142),
    (18.4, 48, 6144, 40, 256, 1024, 135),
    (39.1, 64, 8192, 48, 512, 1536, 138),
    (76.1, 80, 10240, 60, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 3072, 3072, 163),
]


@pytest.mark.parametrize("row", NARAYANAN, ids=lambda row: f"{row[0]:g}B")
def test_parameters_of_gpts(row: Any) -> None:
    """Eq. 2; the smallest is 1.65e9, printed as 1.7."""
    printed, heads, hidden, layers, *_ = row
    spec = gpt(layers, hidden, heads=heads)
    by_formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51_200 + 2048) / (12 * layers * hidden))
    assert spec.num_parameters == pytest.approx(by_formula, rel=1e-5)
    assert spec.num_parameters / 1e9 == pytest.approx(printed, abs=0.051)


def test_parameters_of_the_largest_gpt() -> None:
    assert gpt(128, 25600, heads=160).num_parameters == pytest.approx(1.00804e12, rel=1e-4)


@pytest.mark.parametrize(
    ("layers", "hidden", "seconds", "row"),
    [(24, 2304, 3.53, 0), (36, 4096, 3.70, 2), (80, 12288, 24.82, 6), (128, 25600, 102.63, 9)],
)
def test_step_times_of_gpts(layers: int, hidden: int, seconds: float, row: int) -> None:
    """Eq. 3 at the achieved rate of Table 1."""
    _, _, _, _, gpus, batch, tflops = NARAYANAN[row]
    flops = gpt_training_flops(num_layers=layers, hidden_size=hidden, sequence_length=2048, vocab_size=51_200,
                               tokens=batch * 2048)  # fmt: skip
    assert flops / (gpus * tflops * 1e12) == pytest.approx(seconds, rel=2e-3)


def test_flops_of_a_gpt_are_those_of_its_matrices() -> None:
    """Eq. 3 against the count of the model's own products: layers four times forward, head three times."""
    parts = gpt(32, 4096, vocab=50_257).flops(2048, causal=False).by_part
    head = parts["head"]
    counted = (4 * (sum(parts.values()) - head) + 3 * head) / 2048
    by_formula = gpt_training_flops(num_layers=32, hidden_size=4096, sequence_length=2048, vocab_size=50_257, tokens=1)
    assert by_formula == pytest.approx(counted, rel=1e-9)


# Section 5.1: parameters, tokens, GPUs, TFLOP/s, days. Table 2, 300e9 tokens: its days are 1 to 3 % longer.
DAYS = [
    (175e9, 300e9, 1024, 140, 33.91, 1e-3),
    (1.008e12, 450e9, 3072, 163, 83.9, 1e-3),
    (174.6e9, 300e9, 384, 144, 90, 0.035),  # ZeRO-3
    (174.6e9, 300e9, 1536, 44, 74, 0.035),
    (529.6e9, 300e9, 1120, 98, 137, 0.035),
    (174.6e9, 300e9, 384, 153, 84, 0.035),  # tensor, pipeline and data parallel
    (529.6e9, 300e9, 2240, 159, 42, 0.035),
]


@pytest.mark.parametrize("row", DAYS, ids=lambda row: f"{row[0]:g}-{row[2]}-{row[3]}")
def test_days_of_training(row: Any) -> None:
    parameters, tokens, gpus, tflops, days, tolerance = row
    found = training_seconds(parameters=parameters, tokens=tokens, num_gpus=gpus, flops_per_s=tflops * 1e12)
    assert found / DAY == pytest.approx(days, rel=tolerance)


def test_bubble_of_a_pipeline() -> None:
    """Section 2.2: 8 stages and 32 micro-batches, without and with four virtual stages."""
    for virtual, bubble in ((1, 0.21875), (4, 0.0546875)):
        assert pipeline_stretch(stages=8, micro_batches=32, virtual_stages=virtual) - 1 == bubble


# ------------------------------------------------------------------------------------ Artetxe et al., arXiv:2112.10684
ARTETXE = [  # layers, width; ZFLOP for 300e9 tokens of the dense model and of the mixture; parameters of the mixture
    (12, 768, 0.364, 0.432, 14.59e9),
    (24, 1024, 1.059, 1.301, 51.79e9),
    (24, 2048, 3.568, 4.534, 207.07e9),
    (32, 4096, 17.121, 22.275, 1104.0e9),
]


@pytest.mark.parametrize("row", ARTETXE, ids=lambda row: f"{row[4]:g}")
def test_zettaflops_of_dense_models_and_mixtures(row: Any) -> None:
    """512 experts, two a token, in every second layer; recomputation counted, 2,048 tokens, 50,257 words."""
    layers, hidden, dense, sparse, _ = row
    shape = {"num_layers": layers, "hidden_size": hidden, "sequence_length": 2048, "vocab_size": 50_257,
             "tokens": 300e9}  # fmt: skip
    assert gpt_training_flops(**shape) / 1e21 == pytest.approx(dense, rel=2e-3)
    found = gpt_training_flops(**shape, expert_layer_share=0.5, num_experts_per_tok=2)
    assert found / 1e21 == pytest.approx(sparse, rel=2e-3)


def test_the_mixture_of_1100_billion_costs_30_percent_more_than_its_backbone() -> None:
    """Its model card: "30 % more FLOPs" than the dense 6.7B."""
    shape = {"num_layers": 32, "hidden_size": 4096, "sequence_length": 2048, "vocab_size": 50_257, "tokens": 1.0}
    ratio = gpt_training_flops(**shape, expert_layer_share=0.5, num_experts_per_tok=2) / gpt_training_flops(**shape)
    assert ratio == pytest.approx(1.301, abs=1e-3)


# --------------------------------------------------------------------------------------- DS-MoE, arXiv:2404.05567
@pytest.mark.parametrize(
    ("hidden", "layers", "kv_heads", "millions"), [(2048, 24, 2, 1019.2), (3072, 28, 4, 2708.5), (4096, 36, 4, 6190.8)]
)
def test_parameters_of_the_dense_models(hidden: int, layers: int, kv_heads: int, millions: float) -> None:
    """Without embeddings: L (2 h^2 + 2 h kv + 2 h f); printed 1017, 2705 and 6186."""
    spec = ModelSpec.from_hf({"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 32,
                              "num_key_value_heads": kv_heads, "intermediate_size": 4 * hidden, "vocab_size": 8,
                              "gated_mlp": False})  # fmt: skip
    parts = spec.parameters_by_part
    assert (parts["attn"] + parts["other"]) / 1e6 == pytest.approx(millions, rel=1e-4)


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "hours", "mfu"),
    [(1067e6, 30e9, 8, 24, 0.281), (2846e6, 100e9, 32, 64, 0.234), (6343e6, 100e9, 32, 124, 0.269)],
)
def test_utilization_of_dense_training(parameters: float, tokens: float, gpus: int, hours: float, mfu: float) -> None:
    """All experts of a mixture run: 6 N of *all* parameters, over the hours printed, of the H100's 989 TFLOP/s. With
    the active ones alone it would be 3.5 times less for the largest."""
    at_peak = training_seconds(parameters=parameters, tokens=tokens, num_gpus=gpus, flops_per_s=989e12,
                               flops_per_parameter=6)  # fmt: skip
    assert at_peak / (3600 * hours) == pytest.approx(mfu, rel=1e-2)


def test_deepseek_v3s_achieved_rate() -> None:
    """2.664e6 H800-hours for 14.8e12 tokens and 37e9 active parameters: 343 TFLOP/s a GPU, 34.6 % of the bf16 peak."""
    at_peak = training_seconds(parameters=37e9, tokens=14.8e12, num_gpus=1, flops_per_s=989e12, flops_per_parameter=6)
    share = at_peak / (2.664e6 * 3600)
    assert share == pytest.approx(0.346, abs=1e-3)
    assert share * 989 == pytest.approx(343, abs=1)


def test_a_job_with_all_experts_is_trained_densely(mixtral: ModelSpec) -> None:
    """`num_experts_per_tok` of all experts: every parameter is active, 46.7e9 of Mixtral."""
    dense = mixtral.with_overrides({"num_experts_per_tok": 8})
    assert dense.num_active_parameters == dense.num_parameters
    parts = dense.flops(1).by_part
    products = sum(flops for name, flops in parts.items() if name != "attention_core")
    weights = 46_702_792_704 - by_part(mixtral.shape)["embed"] - by_part(mixtral.shape)["norm"]
    assert products == 2 * weights


# ------------------------------------------------------------------------------------------------ counts and FLOPs
def test_parameters_of_mixtral_without_norms(mixtral: ModelSpec) -> None:
    norms = by_part(mixtral.shape)["norm"]
    assert mixtral.num_parameters - norms == pytest.approx(46.7025e9, rel=1e-4)
    assert active(mixtral.shape) - norms == pytest.approx(12.8797e9, rel=1e-4)


def test_attention_of_one_sequence() -> None:
    """FlashAttention's own count: 4 s^2 a d, half of it causal."""
    core = AttentionCore(32, 32, 128, 128)
    assert attention_flops(core, 4096, causal=True) == pytest.approx(1.37439e11, rel=1e-5)
    assert attention_flops(core, 4096, causal=False) == pytest.approx(2.7488e11, rel=1e-4)


def test_packing_saves_attention() -> None:
    """Documents of 1000, 2000 and 1096 tokens instead of one of 4096: 0.3696 of the scores."""
    apart = sum(query_key_pairs(n, None, causal=True) for n in (1000, 2000, 1096))
    assert apart / query_key_pairs(4096, None, causal=True) == pytest.approx(0.3696, abs=5e-5)


# ------------------------------------------------------------------------------------------------------ activations
def _gpt3_layer() -> Layers:
    core = AttentionCore(96, 96, 128, 128)
    return Layers(96, 12288, (), attention=core, feed_forward=(DenseFeedForward(12288, 4 * 12288, gated=False),))


@pytest.mark.parametrize(
    ("attention", "sequence_parallel", "printed", "masks"),
    [("eager", False, 552, 48), ("eager", True, 342, 6), ("flash", True, 102, 6)],
)
def test_activations_under_tensor_parallelism(
    mixtral_recipe: Recipe, attention: str, sequence_parallel: bool, printed: int, masks: int
) -> None:
    """Korthikanti et al. (arXiv:2205.05198), Table 2, GPT-3 at 2,048 tokens over 8 GPUs, in MiB.

    Of it dropout's two masks, which today's models lack; a log-sum-exp of 4 bytes a head and token besides.
    """
    recipe = replace(mixtral_recipe, attention=attention)
    layout = Layout(tensor_parallel=8.0, sequence_parallel=sequence_parallel)
    found = layer_activations(_gpt3_layer(), recipe, layout, sequences=1.0, padded_length=2048.0)
    assert found == pytest.approx((printed - masks) * MIB + 4 * 96 * 2048 / 8, rel=1e-9)


@pytest.fixture
def mixtral_recipe() -> Recipe:
    """Full tuning in bf16."""
    from moecost import Job
    from moecost.resolution import resolve

    job = Job(model="mixtral-8x7b", gpu="a40", sequence_length=512, method="full", on_oom="report")
    return resolve(job).workload.recipe


# ------------------------------------------------------------------------------------------------- between GPUs
def test_collectives_by_hand() -> None:
    """A GiB over eight GPUs at 450 GB/s, 14 hops of 5 us: 4.2457 ms. ZeRO-3 of 7e9 bf16 weights: 36.75 GB a GPU."""
    seconds = all_reduce_bytes(buffer_bytes=2.0**30, num_gpus=8) / 450e9 + 2 * 7 * 5e-6
    assert seconds == pytest.approx(4.2457e-3, rel=1e-4)
    assert 3 * gather_bytes(buffer_bytes=2 * 7e9, num_gpus=8) == 36.75e9
    assert all_reduce_bytes(buffer_bytes=2 * 7e9, num_gpus=8) == 24.5e9


# ------------------------------------------------------------------------------------------------- states in memory
def test_zero_by_stage() -> None:
    """arXiv:1910.02054, Fig. 1: 7.5e9 parameters over 64 GPUs, 120, 31.4, 16.6 and 1.9 GB."""
    found = [model_state_bytes(7.5e9, zero_stage=z, data_parallel=64) / 1e9 for z in range(4)]
    assert found == pytest.approx([120, 31.41, 16.64, 1.875], rel=1e-3)
    together = model_state_bytes(7.5e9, zero_stage=np.arange(4.0), data_parallel=64) / 1e9
    assert together == pytest.approx(found, rel=1e-12)


def test_states_of_other_stacks() -> None:
    """Megatron's distributed optimizer: 6 + 12 / 64 bytes. QLoRA's 65B in full, over 780 GB: 12 bytes, no fp32 copy.
    Its 4-bit weights: 33.5 GB of the 48 that it needs."""
    megatron = model_state_bytes(1.0, zero_stage=1, data_parallel=64, gradient_bytes=4)
    assert megatron == 6.1875
    assert model_state_bytes(65e9, optimizer_bytes=8) == 780e9
    assert 65e9 * WEIGHT_FORMATS["nf4-dq"].bytes == pytest.approx(33.5e9, rel=2e-3)


def test_sparse_deltas() -> None:
    """SpIEL's released code, arXiv:2401.16405: 24 bytes a delta, 10 or 16 more while choosing; 159,907,840 deltas are
    as many as a LoRA of rank 64 on Llama-2-7B has."""
    assert sparse_delta_bytes(1e8) == 2.4e9
    assert sparse_delta_bytes(1e8, selecting=True) == 3.4e9
    assert sparse_delta_bytes(1e8, selecting=True, gradient_dtype="fp32") == 4.0e9
    deltas = ModelSpec.load("llama-2-7b").trainable_parameters(64, "all-linear")
    assert deltas == 159_907_840
    assert sparse_delta_bytes(deltas) == pytest.approx(3.84e9, rel=1e-3)
    assert sparse_delta_bytes(deltas, selecting=True) == pytest.approx(5.44e9, rel=1e-3)
    assert sparse_delta_sm3_bytes(0.0, rows=4096, columns=14336) / (4096 * 14336) == pytest.approx(0.00126, abs=5e-6)


def test_low_rank_optimizers_of_llama_7b() -> None:
    """APOLLO's project page, optimizer memory of LLaMA-7B's linear weights: 8-bit Adam 13 GB, 8-bit GaLore at rank 1024
    4.9 (counted 4 % more), APOLLO at 256 in bf16 1.6, APOLLO-Mini 0.0."""
    spec = ModelSpec.load("llama-2-7b")  # the same shape
    matrices = [(g.count, m.in_features, m.out_features) for g in spec.layers for m in g.matrices]
    weights = sum(n * rows * columns for n, rows, columns in matrices)
    assert weights == pytest.approx(6.476e9, rel=1e-4)
    adam = weights * OPTIMIZERS["adamw8bit"].states * (OPTIMIZERS["adamw8bit"].element_bytes or 0)
    assert adam == pytest.approx(13e9, rel=0.04)
    galore = sum(n * galore_elements(rows=r, columns=c, rank=1024).moments for n, r, c in matrices)
    projectors = sum(n * galore_elements(rows=r, columns=c, rank=1024).projector for n, r, c in matrices)
    assert galore + 2 * projectors == pytest.approx(4.9e9, rel=0.05)  # 8-bit moments, bf16 projectors
    apollo = sum(n * apollo_elements(rows=r, columns=c, rank=256) for n, r, c in matrices)
    assert 2 * apollo == pytest.approx(1.619e9, rel=1e-3)
    mini = sum(n * apollo_elements(rows=r, columns=c, rank=1) for n, r, c in matrices)
    assert 2 * mini < 0.01e9
    one = galore_elements(rows=4096, columns=14336, rank=1024)
    assert 4 * (one.projector + one.moments) / (4096 * 14336) == pytest.approx(2.286, abs=5e-4)


# ------------------------------------------------------------------------------------------------- pruned weights
def test_bits_of_pruned_weights() -> None:
    """NVIDIA's 2:4: 9 bits in bf16, 0.5625 of it, and 5 in int8; bitmask and index at 70 % zeros: 5.8 and 9.6."""
    assert semi_structured_bits(16) / 16 == 0.5625
    assert semi_structured_bits(8) == 5.0
    assert bitmask_bits(16, sparsity=0.7) == pytest.approx(5.8)
    assert indexed_bits(16, sparsity=0.7) == pytest.approx(9.6)


@pytest.mark.parametrize(("sparsity", "speedup"), [(0.7, 2.99), (0.5, 1.90)])
def test_speed_up_of_pruned_weights(sparsity: float, speedup: float) -> None:
    """arXiv:2405.03594: "up to 3x" on CPUs at 70 %, with 95 % of the time in sparse products. On GPUs, which gain
    bytes alone, 1.7 times of the 2.76 that the bytes of a bitmask allow."""
    assert sparse_speedup(sparsity=sparsity, share=0.95) == pytest.approx(speedup, abs=5e-3)
    assert 1.7 < 16 / bitmask_bits(16, sparsity=0.7) == pytest.approx(2.76, abs=5e-3)


# ------------------------------------------------------------------------------------------------ tiers of storage
def test_tiers_of_moesys() -> None:
    """arXiv:2205.10034, Eqs 1 and 2: 5e9 dense and 200e9 sparse parameters, 12 layers, a tenth in use."""
    tiers = moesys_tiers(dense_parameters=5e9, sparse_parameters=200e9, num_layers=12, active_share=0.1)
    assert tiers.gpu == pytest.approx(86.67e9, rel=1e-3)
    assert tiers.host == pytest.approx(320e9)
    assert tiers.disk == 2400e9
    assert tiers.fits(gpu=2 * 80e9, host=512e9, disk=4e12)
    assert not tiers.fits(gpu=80e9, host=512e9, disk=4e12)


@pytest.mark.parametrize(
    ("flops_per_byte", "bandwidth", "efficiency"),
    [
        (1024 * 2, 70e9, 0.672),  # weights: sequences of 1024, batch 2
        (1024 * 2 / 4, 1.5e12, 0.916),  # optimizer states
        (24 * 8192, 1e9, 0.737),  # activation checkpoints of width 8192
    ],
)
def test_efficiency_of_zero_infinity(flops_per_byte: float, bandwidth: float, efficiency: float) -> None:
    """arXiv:2104.07857, section 4, at a peak of 70 TFLOP/s."""
    found = offload_efficiency(flops_per_byte=flops_per_byte, bytes_per_s=bandwidth, peak_flops_per_s=70e12)
    assert found == pytest.approx(efficiency, abs=1e-3)


def test_prefetch_of_experts() -> None:
    """A Mixtral layer's experts in bf16, 2.819 GB, take 112.7 ms at 25 GB/s; 4,096 tokens compute for 19.2 ms at 150
    TFLOP/s, so that about 24,000 tokens hide them."""
    experts = 2.0 * 8 * 3 * 4096 * 14336
    assert experts == pytest.approx(2.819e9, rel=1e-3)

    def layer(tokens: float) -> tuple[float, float]:
        compute = 2 * tokens * 2 * 3 * 4096 * 14336 / 150e12
        return compute, float(streamed_seconds(compute_s=compute, host_bytes=experts, host_bytes_per_s=25e9))

    compute, took = layer(4096)
    assert compute == pytest.approx(19.2e-3, abs=5e-5)
    assert took == pytest.approx(112.7e-3, rel=1e-3)
    compute, took = layer(24_500)
    assert took == compute
    assert ring_is_steady(load_s=112.7e-3, compute_s=19.2e-3, sections=7)
    assert not ring_is_steady(load_s=112.7e-3, compute_s=19.2e-3, sections=6)


# ------------------------------------------------------------------------------------------------- dropped tokens
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "factor", "dropped", "simulated"),
    [
        (64, 1, 4096, 1.0, 0.0495, 0.0490),
        (64, 1, 4096, 1.25, 0.0010, 0.0013),
        (128, 1, 1024, 1.0, 0.1405, 0.1404),
        (128, 1, 1024, 1.25, 0.0495, 0.0539),
        (64, 8, 4096, 1.0, 0.0165, 0.0162),
    ],
)
def test_dropped_tokens(experts: int, top_k: int, tokens: int, factor: float, dropped: float, simulated: float) -> None:
    """By hand, and by simulated routers: within a tenth where anything to speak of is dropped."""
    shape = {"tokens": tokens, "num_experts": experts, "num_experts_per_tok": top_k}
    found = float(dropped_fraction(**shape, capacity_factor=factor))
    assert found == pytest.approx(dropped, abs=6e-5)
    assert found == pytest.approx(simulated, rel=0.1, abs=4e-4)


def test_dropped_tokens_of_a_router_simulated_here() -> None:
    rng = np.random.default_rng(0)
    shape = {"tokens": 2048, "num_experts": 32, "num_experts_per_tok": 2}
    room = int(expert_capacity(**shape, capacity_factor=1.0))
    lost = 0
    for _ in range(200):
        chosen = np.argsort(rng.random((2048, 32)), axis=-1)[:, :2]
        lost += np.maximum(np.bincount(chosen.ravel(), minlength=32) - room, 0).sum()
    found = float(dropped_fraction(**shape, capacity_factor=1.0))
    assert found == pytest.approx(lost / (200 * 4096), rel=0.03)
