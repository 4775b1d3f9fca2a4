"""Layouts over several GPUs: volumes by hand, rates as measured, and what no layout may do."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from moecost import DatasetSpec, Estimate, Job, estimate
from moecost.errors import OutOfRangeWarning
from moecost.operators import operators
from moecost.resolution import Resolved, epoch, resolve

LLAMA = "meta-llama/Llama-2-7b-hf"
LLAMA_WEIGHTS = 6_738_415_616
"""Parameters of Llama-2-7B, from its checkpoint's index."""


def quiet(model: str, gpu: str, **job: Any) -> Estimate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        return estimate(model, gpu, on_oom="report", **job)


def resolved(model: str, gpu: str, **job: Any) -> Resolved:
    return resolve(Job(model=model, gpu=gpu, on_oom="report", **job))


def transfer_seconds(r: Resolved, micro_batch_size: int = 1) -> dict[str, float]:
    """Seconds of transfers of a micro-batch by kernel, forward and backward."""
    batches = epoch(r, micro_batch_size, 1).batches
    out: dict[str, float] = {}
    for op in operators(r.workload, batches, r.profile, r.coefficients):
        for work in (op.forward, op.backward):
            for part in (work.wire, work.stream):
                if part is not None:
                    out[op.kernel] = out.get(op.kernel, 0.0) + float(np.mean(part))
    return out


def test_zero_3_sends_three_times_the_weights() -> None:
    """arXiv:1910.02054, section 7: two gathers and a reduction of the 16-bit weights, (n - 1) / n of each."""
    r = resolved(LLAMA, "a100-80gb-sxm", method="full", sequence_length=512, num_gpus=8, zero_stage=3,
                 micro_batch_size=1, weight_dtype="bf16")  # fmt: skip
    rate = r.workload.device.link_bytes_per_s * r.coefficients.link_share
    found = transfer_seconds(r)
    sent = (found["weights.gather"] + found["gradients.reduce"]) * float(rate)
    vectors = 2 * 32 * 4096 + 4096  # norms are too small to be sent apart
    assert sent == pytest.approx(3 * 2 * (LLAMA_WEIGHTS - vectors) * 7 / 8, rel=1e-3)


def test_experts_are_gathered_among_the_gpus_that_hold_the_same() -> None:
    """Mixtral on 8 GPUs: at expert parallel 2 four GPUs gather half of the experts each, at 8 nobody gathers any."""
    experts = 32 * 8 * 3 * 4096 * 14336 * 2  # bytes, from its config
    rest = 2 * 46_702_792_704 - experts
    for ep in (1, 2, 8):
        r = resolved("mistralai/Mixtral-8x7B-v0.1", "h100-80gb-sxm", method="full", sequence_length=512, num_gpus=8,
                     zero_stage=3, expert_parallel_size=ep, micro_batch_size=1, weight_dtype="bf16")  # fmt: skip
        rate = float(r.workload.device.link_bytes_per_s * r.coefficients.link_share)
        by_hand = 2 * (rest * 7 / 8 + experts / ep * (1 - ep / 8))
        assert transfer_seconds(r)["weights.gather"] * rate == pytest.approx(by_hand, rel=2e-3)


def test_rings_use_all_ports_of_a_machine_and_exchanges_their_own() -> None:
    """Two machines of 8 H100, a 50 GB/s port each: all-reduces were measured at 437 to 487 GB/s a GPU (AWS p5)."""
    one, two = (
        resolved("meta-llama/Llama-3.1-8B", "h100-80gb-sxm", method="full", sequence_length=512, num_gpus=n,
                 zero_stage=3, micro_batch_size=1, software="generic")
        for n in (8, 16)
    )  # fmt: skip
    slower = transfer_seconds(two)["weights.gather"] / transfer_seconds(one)["weights.gather"]
    assert slower < 2.5  # one port alone would make it 9 times as slow


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_more_gpus_are_never_slower_nor_better_than_so_many_of_one(method: str) -> None:
    """Adapters run on replicas by habit: nothing but small gradients is sent."""
    speeds = [
        quiet("meta-llama/Llama-3.1-8B", "a100-80gb-sxm", method=method, sequence_length=1024, num_gpus=n,
              micro_batch_size=4, gradient_checkpointing="full").queries_per_second
        for n in (1, 2, 4, 8)
    ]  # fmt: skip
    for n, speed in zip((2, 4, 8), speeds[1:], strict=True):
        assert 0.7 * n < speed / speeds[0] < 1.01 * n


def test_a_second_machine_does_not_make_the_first_faster() -> None:
    speeds = [
        quiet("meta-llama/Llama-3.1-70B", "h100-80gb-sxm", method="full", sequence_length=2048, num_gpus=n,
              micro_batch_size=1, zero_stage=3, software="hf-peft").queries_per_second
        for n in (8, 16)
    ]  # fmt: skip
    assert 1.5 < speeds[1] / speeds[0] < 2.05


def test_no_weight_is_lost_between_the_gpus() -> None:
    """Expert groups that reach across tensor-parallel GPUs still hold every expert."""
    whole = 46_702_792_704 * 2 / 2**30
    for tp, ep, stage in ((8, 8, 0), (4, 2, 0), (2, 4, 1), (8, 8, 3), (1, 8, 3)):
        e = quiet("mistralai/Mixtral-8x7B-v0.1", "h100-80gb-sxm", method="full", sequence_length=512, num_gpus=8,
                  tensor_parallel_size=tp, expert_parallel_size=ep, zero_stage=stage, software="megatron",
                  micro_batch_size=1)  # fmt: skip
        assert 8 * e.memory.weights_gib >= 0.999 * whole, (tp, ep, stage)


def test_mfu_of_a_pipeline_is_that_of_its_tokens() -> None:
    """Model FLOPs a token are 6 a weight and 6 h s a layer (attention, causal, forward and backward)."""
    e = quiet("meta-llama/Llama-3.1-8B", "h100-80gb-sxm", method="full", sequence_length=4096, num_gpus=8,
              pipeline_parallel_size=8, micro_batch_size=1, gradient_accumulation_steps=64, zero_stage=0,
              software="megatron")  # fmt: skip
    weights = 8_030_261_248 - 128_256 * 4096  # the embedding is looked up
    per_token = 6 * weights + 6 * 32 * 4096 * 4096
    assert e.mfu == pytest.approx(e.padded_tokens_per_second * per_token / (8 * 989.4e12), rel=0.05)


def test_all_gpus_wait_for_the_longest_batch() -> None:
    """Half of the queries have 128 tokens, half 256, one a GPU: the longer of two has 3/4 x 256 + 1/4 x 128 = 224."""
    data = DatasetSpec.from_lengths([128, 256] * 500)
    job = {"method": "lora", "dataset": data, "micro_batch_size": 1, "padding": "longest"}
    alone, two = (epoch(resolved(LLAMA, "a100-80gb-sxm", num_gpus=n, **job), 1, 1).batches for n in (1, 2))
    assert alone.slowest is None
    assert float(np.sum(two.padded_length * two.probability)) == pytest.approx(192)
    assert float(np.sum(two.padded_length * two.slowest)) == pytest.approx(224)
    summed = epoch(resolved(LLAMA, "a100-80gb-sxm", num_gpus=2, **job), 1, 4).batches
    assert float(np.sum(summed.padded_length * summed.slowest)) == pytest.approx(192 + 32 / math.sqrt(4))


def test_deepspeed_steps_fp32_copies() -> None:
    """arXiv:1910.02054, section 3.1: 16 bytes a weight."""
    e = quiet("meta-llama/Llama-3.1-8B", "h200-141gb-sxm", method="full", sequence_length=512, micro_batch_size=1,
              software="deepspeed")  # fmt: skip
    held = e.memory.weights_gib + e.memory.gradients_gib + e.memory.optimizer_gib
    assert held == pytest.approx(16 * 8_030_261_248 / 2**30, rel=1e-3)
