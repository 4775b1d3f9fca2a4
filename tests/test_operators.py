"""What each operator computes, moves and launches, against hand counts and the founding paper's layers."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import paper_runs
import pytest

from moecost import Calibration, Estimate, Job, estimate
from moecost.operators import operators
from moecost.resolution import resolve
from moecost.workload import Batches

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

TOKENS = 4 * 2048
# 12.8799e9 active parameters of Mixtral, less its norms (266,240) and its input embedding, which is a look-up.
ACTIVE_IN_PRODUCTS = 12_879_925_248 - 266_240 - 32000 * 4096
HEAD = 32000 * 4096


def _mixtral(method: str, checkpointing: str) -> Estimate:
    return estimate(
        "mixtral-8x7b",
        "h100-80gb-sxm",
        method=method,
        gradient_checkpointing=checkpointing,
        sequence_length=2048,
        micro_batch_size=4,
        num_queries=400,
        on_oom="report",
    )


def _product_flops(e: Estimate, *, with_head: bool = True) -> float:
    """FLOPs of the products with the model's own weights."""
    kernels = e.step.by_kernel
    names = [n for n in kernels if n.split(".")[0] in ("attention", "expert", "router", "head")]
    names = [n for n in names if not n.endswith(("core", "rope", "adapter")) and (with_head or n != "head")]
    return sum(kernels[n].flops for n in names)


@pytest.mark.parametrize(
    ("method", "checkpointing", "per_weight"),
    [
        ("full", "none", 6),  # forward, input gradient, weight gradient: 2 each (Kaplan et al. 2020)
        ("lora", "none", 4),  # frozen weights need no weight gradient
        ("full", "full", 8),  # and the forward pass once more
        ("lora", "full", 6),
    ],
)
def test_flops_of_a_token(method: str, checkpointing: str, per_weight: int) -> None:
    """The 2-4-6-8 rule on Mixtral's active parameters; the head is not recomputed."""
    e = _mixtral(method, checkpointing)
    expected = per_weight * ACTIVE_IN_PRODUCTS - (2 * HEAD if checkpointing == "full" else 0)
    assert _product_flops(e) / TOKENS == pytest.approx(expected, rel=1e-9)


def test_a_models_own_experts_per_token_are_used() -> None:
    """OLMoE-1B-7B: 8 of 64 experts, 1.28e9 active parameters as published; 2 FLOPs each forward, 4 backward."""
    e = estimate("olmoe-1b-7b", "h100", method="full", gradient_checkpointing="none", sequence_length=2048,
                 micro_batch_size=4, num_queries=400, on_oom="report")  # fmt: skip
    assert e.experts is not None
    assert (e.experts.num_experts, e.experts.num_experts_per_tok) == (64, 8)
    embedding = 50304 * 2048
    assert _product_flops(e) / TOKENS == pytest.approx(6 * (1.28e9 - embedding), rel=0.01)
    assert e.experts.tokens_per_expert == pytest.approx(TOKENS * 8 / 64, rel=1e-6)


def test_adapters_save_a_third_of_the_flops_or_a_quarter_with_checkpointing() -> None:
    """2/3 and 3/4 of full tuning, layer by layer."""
    for checkpointing, ratio in (("none", 2 / 3), ("full", 3 / 4)):
        lora, full = (_product_flops(_mixtral(m, checkpointing), with_head=False) for m in ("lora", "full"))
        assert lora / full == pytest.approx(ratio, rel=1e-12)


def test_flops_of_adapters_are_those_of_their_weights() -> None:
    """2 forward and 4 backward an adapter weight used: attention q, k, v, o of rank 16, 13,631,488 weights."""
    e = estimate("mixtral-8x7b", "h100", method="lora", lora_targets="attention", gradient_checkpointing="none",
                 sequence_length=2048, micro_batch_size=4, num_queries=400, on_oom="report")  # fmt: skip
    assert e.num_trainable_parameters == 13_631_488
    flops = sum(k.flops for n, k in e.step.by_kernel.items() if n.endswith("adapter"))
    assert flops / TOKENS == pytest.approx(6 * 13_631_488, rel=1e-9)


@pytest.mark.parametrize(("length", "forward"), [(4096, 1.3744e11), (8192, 4 * 1.3744e11)])
def test_flops_of_the_attention_core(length: int, forward: float) -> None:
    """Causal: half of 4 s^2 a d (FlashAttention's own count), a = 32, d = 128, 32 layers; backward 2.5 times."""
    e = estimate("mixtral-8x7b", "h100-80gb-sxm", method="lora", gradient_checkpointing="none", attention="flash",
                 sequence_length=length, micro_batch_size=1, num_queries=1, on_oom="report")  # fmt: skip
    assert e.step.by_kernel["attention.core"].flops == pytest.approx(32 * 3.5 * forward, rel=1e-3)


def test_a_sliding_window_saves_what_lies_outside_of_it() -> None:
    """Pairs of a row: s^2/2 where all is seen, w s - w^2/2 with a window of w tokens (sum of min(i, w))."""
    window, length = 1024, 8192
    config = {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
    }  # fmt: skip
    common: dict[str, Any] = {"method": "lora", "sequence_length": length, "micro_batch_size": 1, "on_oom": "report"}
    seen = [
        estimate(dict(config, sliding_window=w), "h100", **common).step.by_kernel["attention.core"].flops
        for w in (None, window)
    ]
    rows = np.minimum(np.arange(1, length + 1), window)
    assert seen[1] / seen[0] == pytest.approx(rows.sum() / (length**2 / 2), rel=1e-3)


def test_launches_of_a_quantized_mixture() -> None:
    """Every touched expert: one product a matrix, forward and recompute one each, backward one more where frozen."""
    e = paper_runs.profiled("Mixtral", "dense", 1)
    kernels = e.step.by_kernel
    for name in ("expert.w1", "expert.w2", "expert.w3"):
        assert kernels[name].launches == pytest.approx(32 * 8 * 3)
    assert kernels["expert.dequantize"].launches == pytest.approx(3 * 32 * 8 * 3)
    assert kernels["attention.q"].launches == 32 * 3


def test_traffic_of_dequantization() -> None:
    """An expert matrix of 4096 x 14336: 30.3 MB read in 4 bits, 117.4 MB written in 16."""
    kernel = paper_runs.profiled("Mixtral", "sparse", 1).step.by_kernel["expert.dequantize"]
    assert kernel.bytes / kernel.launches == pytest.approx(30.29e6 + 117.44e6, rel=1e-3)
    assert kernel.bound == "memory"


def test_coefficients_do_what_they_say() -> None:
    """Half the bandwidth or efficiency, twice the time of the kernels it rules and of no others."""
    resolved = resolve(paper_runs.fixed_job("Mixtral", "sparse", 4))
    batches = Batches(np.array([4.0]), np.array([128.0]), np.array([1.0]))
    ruled = {
        "dequantize_bandwidth": ("expert.dequantize", "attention.dequantize"),
        "elementwise_bandwidth": ("norm", "topk", "expert.activation", "attention.rope", "expert.w1.adapter"),
        "attention_efficiency": ("attention.core",),
    }

    def seconds(calibration: Calibration) -> dict[str, float]:
        found = operators(resolved.workload, batches, resolved.profile, calibration.values())
        return {op.kernel: float(np.sum(op.forward.seconds)) for op in found}

    base = seconds(resolved.calibration)
    for name, kernels in ruled.items():
        value = resolved.calibration.coefficients[name].value
        slower = seconds(resolved.calibration.with_values({name: value / 2}))
        changed = {k for k in base if slower[k] != pytest.approx(base[k], rel=1e-12)}
        assert changed >= set(kernels) - {"attention.core"}
        for kernel in kernels:
            assert slower[kernel] >= base[kernel]
        for kernel in set(kernels) & changed:
            assert slower[kernel] == pytest.approx(2 * base[kernel], rel=1e-9)


# ------------------------------------------------------------------------------- layers of arXiv:2408.04693, Fig. 5, 9


def test_share_of_the_experts_in_layer_time() -> None:
    """Mixtral, five runs at 128 tokens; the paper's layer times are forward and recompute, without head and loss."""
    measured: dict[tuple[str, int], dict[str, float]] = {}
    for row in paper_runs.read("layer_seconds.csv"):
        if row["model"] == "Mixtral":
            run = measured.setdefault((row["mode"], int(row["batch_size"])), {})
            run[row["layer"].lower()] = float(row["seconds"])
    assert len(measured) == 5
    differences = []
    for (mode, batch), layers in measured.items():
        found = paper_runs.profiled("Mixtral", mode, batch).step.by_layer
        want = 100 * layers["moe"] / sum(layers.values())
        got = 100 * found["moe"].forward / sum(found[k].forward for k in ("moe", "attention", "norm"))
        print(f"{mode} b={batch}: measured {want:.1f} %, predicted {got:.1f} %")
        differences.append(abs(got - want))
    assert fmean(differences) <= 3


def test_use_of_the_sms_in_the_expert_layers() -> None:
    """Fig. 9, ten runs: weighted by kernel time. Within 8 points in the mean."""
    differences = []
    for row in paper_runs.read("sm_utilization.csv"):
        if "time_weighted" in row["kernel"]:
            e = paper_runs.profiled(row["model"], row["mode"], int(row["batch_size"]))
            want, got = float(row["sm_utilization_percent"]), 100 * e.utilization.moe.sm
            print(f"{row['model']} {row['mode']} b={row['batch_size']}: measured {want:.0f}, predicted {got:.0f}")
            differences.append(abs(got - want))
    assert len(differences) == 10
    assert fmean(differences) <= 8


def test_layers_and_kernels_have_the_promised_names() -> None:
    found = set(paper_runs.profiled("Mixtral", "sparse", 1).step.by_layer)
    assert found == {"attention", "moe", "norm", "embedding", "head"}
    found = set(paper_runs.profiled("BlackMamba", "sparse", 1).step.by_layer)
    assert found == {"mamba", "moe", "norm", "embedding", "head"}
    kernels = set(paper_runs.profiled("Mixtral", "sparse", 1).step.by_kernel)
    assert kernels >= {
        "expert.w1", "expert.w2", "expert.w3", "expert.dequantize", "attention.dequantize", "router", "topk"
    }  # fmt: skip
    e = estimate(Job(model="llama-3.1-8b", gpu="h100", method="lora", sequence_length=512))
    assert set(e.step.by_layer) == {"attention", "mlp", "norm", "embedding", "head"}
    assert e.experts is None
    assert (e.utilization.moe.sm, e.utilization.moe.dram) == (0.0, 0.0)
