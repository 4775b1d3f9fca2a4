"""Layouts over several GPUs: volumes by hand, rates as measured, and what no layout may do."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moecost import DatasetSpec, Estimate, Job, estimate
from moecost.errors import InvalidInputError, MoECostError, OutOfRangeWarning
from moecost.operators import operators
from moecost.resolution import Resolved, epoch, resolve

LLAMA = "meta-llama/Llama-2-7b-hf"
LLAMA_WEIGHTS = 6_738_415_616
"""Parameters of Llama-2-7B, from its checkpoint's index."""


def quiet(model: Any, gpu: str, **job: Any) -> Estimate:
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


@pytest.fixture
def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers without a ramp between latency and bandwidth: seconds are bytes over a rate."""
    for name in ("LINK_RAMP_S", "NETWORK_RAMP_S"):
        monkeypatch.setattr(f"moecost.operators.{name}", 0.0)


@pytest.mark.usefixtures("sharp")
def test_zero_3_sends_three_times_the_weights() -> None:
    """arXiv:1910.02054, section 7: two gathers and a reduction of the 16-bit weights, (n - 1) / n of each."""
    r = resolved(LLAMA, "a100-80gb-sxm", method="full", sequence_length=512, num_gpus=8, zero_stage=3,
                 micro_batch_size=1, weight_dtype="bf16")  # fmt: skip
    rate = r.workload.device.link_bytes_per_s * r.coefficients.link_share
    found = transfer_seconds(r)
    sent = (found["weights.gather"] + found["gradients.reduce"]) * float(rate)
    vectors = 2 * 32 * 4096 + 4096  # norms are too small to be sent apart
    assert sent == pytest.approx(3 * 2 * (LLAMA_WEIGHTS - vectors) * 7 / 8, rel=1e-3)


@pytest.mark.usefixtures("sharp")
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


@pytest.mark.usefixtures("sharp")
def test_layouts_send_what_is_counted_by_hand() -> None:
    """Vectors T17 to T20 of the literature, through whole jobs: FSDP, tensor parallel, a bubble, expert parallel."""
    llama = {"method": "full", "sequence_length": 4096, "micro_batch_size": 1, "weight_dtype": "bf16",
             "software": "megatron"}  # fmt: skip
    r = resolved(LLAMA, "h100-80gb-sxm", num_gpus=8, tensor_parallel_size=8, zero_stage=0, **llama)
    rate = float(r.workload.device.link_bytes_per_s * r.coefficients.link_share)
    latency = 2 * 2 * 32 * 25e-6 * math.log2(8)  # two a layer and pass
    sent = (transfer_seconds(r)["tensor.allreduce"] - latency) * rate
    assert sent == pytest.approx(32 * 117_440_512 * 2, rel=1e-6)  # Narayanan et al. 2021: 7.516 GB

    r = resolved("mistralai/Mixtral-8x7B-v0.1", "h100-80gb-sxm", num_gpus=8, expert_parallel_size=8, zero_stage=0,
                 moe_dispatch="alltoall", **llama)  # fmt: skip
    own = 4 * 32 * r.workload.layout.dispatch.exchange_s
    sent = (transfer_seconds(r)["experts.alltoall"] - own) * rate
    assert sent == pytest.approx(32 * 4 * 58_720_256, rel=1e-6)  # T k h (e - 1) / e, four times a layer

    piped = {"num_gpus": 8, "pipeline_parallel_size": 8, "gradient_accumulation_steps": 32, **llama}
    steps = [quiet(LLAMA, "h100-80gb-sxm", virtual_pipeline_size=v, **piped).step for v in (1, 4)]
    kernels = [sum(k.seconds for k in step.by_kernel.values()) for step in steps]
    assert kernels[0] / kernels[1] == pytest.approx(1.21875 / 1.0546875, rel=1e-6)


@pytest.mark.usefixtures("sharp")
def test_hybrid_shards_gather_within_and_add_up_across() -> None:
    """16 GPUs in two replicas of 8: gathers stay inside a machine, and a step's shard is reduced between the two."""
    job = {"method": "full", "sequence_length": 512, "num_gpus": 16, "zero_stage": 3, "micro_batch_size": 1,
           "weight_dtype": "bf16"}  # fmt: skip
    r = resolved(LLAMA, "a100-80gb-sxm", shard_group_size=8, **job)
    device, c = r.workload.device, r.coefficients
    inside = float(device.link_bytes_per_s * c.link_share)
    across = min(inside, float(device.network_bytes_per_s * c.network_share))  # one port for each shard's ring
    weights = 2 * (LLAMA_WEIGHTS - 2 * 32 * 4096 - 4096)
    found = transfer_seconds(r)
    assert found["weights.gather"] * inside == pytest.approx(2 * weights * 7 / 8, rel=1e-3)
    by_hand = weights * 7 / 8 / inside + weights / 8 / across
    assert found["gradients.reduce"] == pytest.approx(by_hand, rel=1e-3)
    half, whole = (quiet(LLAMA, "a100-80gb-sxm", shard_group_size=g, **job).memory for g in (8, 16))
    assert half.optimizer_gib == pytest.approx(2 * whole.optimizer_gib)


def test_a_library_that_sends_tokens_once_a_machine_sends_less() -> None:
    """Top-8 on 4 machines: 3/4 of 8 copies leave with an all-to-all, 3/4 of 4 (1 - (3/4)^8) = 3.6 with DeepEP."""
    seconds = {}
    for name in ("alltoall", "deepep"):
        r = resolved("Qwen/Qwen3-30B-A3B", "h100-80gb-sxm", method="full", sequence_length=4096, num_gpus=32,
                     expert_parallel_size=32, zero_stage=1, micro_batch_size=1, moe_dispatch=name,
                     software="megatron")  # fmt: skip
        own = 4 * 48 * r.workload.layout.dispatch.exchange_s
        seconds[name] = transfer_seconds(r)["experts.alltoall"] - own
    assert seconds["alltoall"] / seconds["deepep"] == pytest.approx(8 / (4 * (1 - 0.75**8)), rel=1e-6)
    port = float(r.workload.device.network_bytes_per_s * r.coefficients.exchange_share)
    assert seconds["alltoall"] == pytest.approx(4 * 48 * 4096 * 8 * 2048 * 2 * 0.75 / port, rel=1e-6)


def test_hidden_exchanges_cost_less_than_exposed_ones() -> None:
    steps = [
        quiet("Qwen/Qwen3-30B-A3B", "h100-80gb-sxm", method="full", sequence_length=4096, num_gpus=32,
              expert_parallel_size=32, micro_batch_size=1, comm_overlap=hidden, software="megatron").step
        for hidden in (False, True)
    ]  # fmt: skip
    assert steps[1].seconds < steps[0].seconds
    assert steps[1].communication < 0.6 * steps[0].communication


def test_capacity_bounds_the_busiest_and_padding_fills_it() -> None:
    job = {"method": "full", "sequence_length": 4096, "num_gpus": 8, "expert_parallel_size": 8, "micro_batch_size": 1}

    def flops(**more: Any) -> float:
        kernels = quiet("mistralai/Mixtral-8x7B-v0.1", "h200-141gb-sxm", **job, **more).step.by_kernel
        return sum(kernels[f"expert.{m}"].flops for m in ("w1", "w2", "w3"))

    all_tokens = flops(software="megatron")
    assert all_tokens == pytest.approx(4096 * 2 * 32 * 3 * 2 * 4096 * 14336 * 3, rel=1e-6)
    assert flops(software="megatron", capacity_factor=1.0) < 0.96 * all_tokens  # those above the mean are dropped
    assert flops(software="megatron", capacity_factor=4.0) == pytest.approx(all_tokens)  # none comes to four times it
    padded = flops(software="deepspeed", capacity_factor=1.25)
    assert padded == pytest.approx(1.25 * flops(software="deepspeed"), rel=1e-6)


def test_real_routing_waits_for_the_busiest_gpu_and_a_forced_balance_does_not() -> None:
    free, forced = (
        quiet("mistralai/Mixtral-8x7B-v0.1", "h200-141gb-sxm", method="full", sequence_length=4096, num_gpus=8,
              expert_parallel_size=8, micro_batch_size=1, forced_balance=balance, software="megatron")
        for balance in (False, True)
    )  # fmt: skip
    assert free.step.seconds > 1.05 * forced.step.seconds
    assert free.memory.activations_gib > 1.05 * forced.memory.activations_gib


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 3, "num_gpus": 6}, "does not divide the 32 attention heads .* use 2 or 4"),
        ({"pipeline_parallel_size": 64, "num_gpus": 64}, "has 32 layers; use 32 or less"),
        ({"virtual_pipeline_size": 2, "num_gpus": 8}, "needs a pipeline"),
        ({"virtual_pipeline_size": 9, "pipeline_parallel_size": 4, "num_gpus": 8}, "use 8 or less"),
        ({"expert_parallel_size": 3, "num_gpus": 6}, "does not divide the 8 experts .* use 2 or 4"),
        ({"expert_parallel_size": 8, "num_gpus": 4}, "does not divide the 4 GPUs of a pipeline stage.* use 2 or 4"),
        ({"shard_group_size": 3, "num_gpus": 8, "zero_stage": 3}, "does not divide the 8 .* use 2 or 4"),
        ({"shard_group_size": 4, "num_gpus": 8, "zero_stage": 0}, "no meaning with zero_stage=0"),
        ({"tensor_parallel_size": 4, "num_gpus": 6}, "no multiple .* use 4"),
        ({"expert_tensor_parallel_size": 3, "num_gpus": 8}, "=3 does not divide the 8 GPUs .* use 2 or 4"),
        ({"context_parallel_size": 1024, "num_gpus": 1024}, "more than the 512 tokens of a sequence; use 512 or less"),
    ],
)
def test_layouts_that_do_not_go_together_name_the_nearest_that_do(fields: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        estimate("mistralai/Mixtral-8x7B-v0.1", "h100-80gb-sxm", sequence_length=512, method="lora", **fields)


@pytest.mark.parametrize("field", ["expert_parallel_size", "expert_tensor_parallel_size"])
def test_experts_of_a_dense_model_are_refused(field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{field}=8: .* no routed experts; leave it out"):
        estimate(LLAMA, "h100", sequence_length=512, method="lora", num_gpus=8, **{field: 8})


def test_fields_of_routed_experts_change_nothing_about_a_dense_model_and_a_note_says_so() -> None:
    job = {"sequence_length": 512, "method": "lora", "num_gpus": 8, "micro_batch_size": 1}
    given = quiet(LLAMA, "h100", capacity_factor=1.25, moe_dispatch="deepep", **job)
    assert given.step == quiet(LLAMA, "h100", **job).step
    assert any(n.startswith("capacity_factor, moe_dispatch change nothing: ") for n in given.notes)


def test_a_misspelt_machine_type_is_refused_on_one_gpu_too() -> None:
    with pytest.raises(MoECostError, match=r"did you mean.*p5\.48xlarge"):
        estimate(LLAMA, "h100", sequence_length=512, method="lora", node="p5.48xlarg")


def test_two_gpus_each_read_half_of_the_experts_from_the_host_and_gain_no_more_than_that() -> None:
    """A GPU reads its share over its own PCIe link and gathers the rest (bandwidth-centric partitioning,
    arXiv:2104.07857): at most a rate twice as high on each of two, what else a step does not shrinking with it."""
    job = {"method": "lora", "sequence_length": 512, "micro_batch_size": 4, "offload": "experts"}
    one, two = (
        quiet("mistralai/Mixtral-8x7B-v0.1", "h100-80gb-sxm", num_gpus=n, **job).queries_per_second for n in (1, 2)
    )
    assert one < two / 2 <= 2 * one


def test_a_machine_type_sets_links_network_and_price() -> None:
    """p5.48xlarge: 8 H100 with NVLink, 3,200 Gb/s of network a machine, so 50 GB/s a GPU one way (AWS)."""
    job = {"method": "full", "sequence_length": 2048, "num_gpus": 64, "zero_stage": 3, "micro_batch_size": 1}
    r = resolved("meta-llama/Llama-3.1-70B", "h100-80gb-sxm", node="p5.48xlarge", **job)
    assert r.workload.device.gpus_per_node == 8
    assert r.workload.device.network_bytes_per_s == pytest.approx(50e9)
    by_name = quiet("meta-llama/Llama-3.1-70B", "p5.48xlarge", **job)
    by_node = quiet("meta-llama/Llama-3.1-70B", "h100-80gb-sxm", node="p5.48xlarge", **job)
    assert by_name.step.seconds == by_node.step.seconds
    assert by_name.cost_usd == pytest.approx(by_name.hours * 64 * by_name.usd_per_gpu_hour)
    slow = quiet("meta-llama/Llama-3.1-70B", "a100-80gb-sxm", node="p4de.24xlarge", **job)  # 400 Gb/s
    fast = quiet("meta-llama/Llama-3.1-70B", "a100-80gb-sxm", node="dgx-a100-640gb", **job)  # 1,600 Gb/s
    assert slow.step.communication > 1.5 * fast.step.communication


def test_drives_are_slower_than_the_hosts_memory_which_is_slower_than_none() -> None:
    steps = [
        quiet("meta-llama/Llama-3.1-8B", "a100-80gb-sxm", method="full", sequence_length=512, micro_batch_size=1,
              offload=where).step.seconds
        for where in ("none", "optimizer", "parameters", "nvme")
    ]  # fmt: skip
    assert steps == sorted(steps)
    held = [quiet("meta-llama/Llama-3.1-8B", "a100-80gb-sxm", method="full", sequence_length=512, micro_batch_size=1,
                  offload=where).memory.device_gib for where in ("none", "optimizer", "nvme")]  # fmt: skip
    assert held == sorted(held, reverse=True)


def test_experts_in_the_hosts_memory_leave_the_gpu_and_stream_in() -> None:
    """Mixtral: 90.2 GB of experts in 16 bits, by its config; a layer at a time streams in (MoESys, 2205.10034)."""
    job = {"method": "lora", "lora_targets": ["q_proj"], "sequence_length": 4096, "micro_batch_size": 1,
           "gradient_checkpointing": "full"}  # fmt: skip
    here, away = (quiet("mistralai/Mixtral-8x7B-v0.1", "h200-141gb-sxm", offload=o, **job) for o in ("none", "experts"))
    gb = 2**30 / 1e9
    experts = 32 * 8 * 3 * 4096 * 14336 * 2 / 1e9
    assert (here.memory.weights_gib - away.memory.weights_gib) * gb == pytest.approx(experts, rel=1e-6)
    r = resolved("mistralai/Mixtral-8x7B-v0.1", "h200-141gb-sxm", offload="experts", **job)
    link = float(r.workload.device.host_link_bytes_per_s * r.coefficients.host_link_share)
    assert transfer_seconds(r)["weights.stream"] == pytest.approx(2 * experts * 1e9 / link, rel=1e-6)
    assert away.step.seconds > here.step.seconds
    full, dense = (quiet("mistralai/Mixtral-8x7B-v0.1", "b300", method="full", sequence_length=512, offload=o,
                         micro_batch_size=1).memory for o in ("none", "experts"))  # fmt: skip
    assert dense.optimizer_gib / full.optimizer_gib == pytest.approx(1 - experts / 2 / 46.702792704, rel=1e-6)


def test_a_tpu_slice_is_one_fast_domain() -> None:
    """Honeycrisp-like 3B on v5p: AXLearn says 1.48 s on 512 chips and 0.47 s on 2,048 for 2,048 sequences of 4,096."""
    model = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
             "intermediate_size": 8192, "vocab_size": 128256}  # fmt: skip
    seconds = [
        quiet(model, "tpu-v5p", method="full", sequence_length=4096, num_gpus=n, micro_batch_size=2048 // n,
              zero_stage=0, software="axlearn").step.seconds
        for n in (512, 2048)
    ]  # fmt: skip
    assert 0.5 < seconds[0] / 1.48 < 2.0
    assert 2.5 < seconds[0] / seconds[1] <= 4.0  # 3.1 measured


@pytest.mark.usefixtures("sharp")
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


MODELS = ("meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B")
LAYOUTS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "gpu": st.sampled_from(["a100-80gb-sxm", "h100-80gb-sxm", "mi300x", "l40s", "b200"]),
        "method": st.sampled_from(["full", "lora"]),
        "software": st.sampled_from(["hf-peft", "deepspeed", "megatron", "torchtitan"]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "context_parallel_size": st.sampled_from([1, 2]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "sequence_length": st.sampled_from([512, 2048]),
        "offload": st.sampled_from(["none", "none", "optimizer", "parameters"]),
    }
)


def spread(layout: dict[str, Any], replicas: int, **more: Any) -> Estimate:
    inner = math.prod(layout[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "context"))
    accumulation = 64 // (replicas * layout["micro_batch_size"])  # 64 sequences a step, however many share them
    return quiet(**layout, num_gpus=replicas * inner, gradient_accumulation_steps=accumulation, num_queries=640, **more)


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.sampled_from([1, 2, 4, 8]))
def test_more_replicas_are_never_faster_than_ideal_nor_fuller(layout: dict[str, Any], replicas: int) -> None:
    # shards streamed from the host are read by all PCIe links together: ZeRO-Infinity scales better than ideal
    assume(not (layout["offload"] == "parameters" and layout["zero_stage"] == 3))
    few, many = spread(layout, replicas), spread(layout, 2 * replicas)
    assert many.step.seconds >= 0.999 * few.step.seconds / 2
    buffers = 2.0 if few.num_gpus == 1 else 0.0  # of the collectives, which one GPU alone does not need [GiB]
    assert many.memory.device_gib <= few.memory.device_gib + buffers + 1e-9


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.sampled_from(["tensor", "pipeline", "context"]))
def test_sharing_a_replica_is_never_better_than_ideal(layout: dict[str, Any], kind: str) -> None:
    name = f"{kind}_parallel_size"
    one, two = (spread(layout | {name: n * layout[name]}, 2) for n in (1, 2))
    assert two.step.seconds >= 0.97 * one.step.seconds / 2  # smaller products may fill their last wave better
    buffers = 2.0 if one.num_gpus == 1 else 0.0
    assert two.memory.weights_gib <= one.memory.weights_gib + 1e-9
    if kind != "pipeline":  # stages hold several micro-batches in flight
        assert two.memory.device_gib <= one.memory.device_gib + buffers + 0.05


@settings(max_examples=30, deadline=None)
@given(LAYOUTS.filter(lambda x: x["model"] != MODELS[0]), st.sampled_from([2, 4, 8]))
def test_dealing_out_experts_leaves_all_of_them_and_their_work(layout: dict[str, Any], ep: int) -> None:
    plain, dealt = (spread(layout, 8, expert_parallel_size=n, forced_balance=True) for n in (1, ep))
    assert dealt.memory.weights_gib <= plain.memory.weights_gib + 1e-9
    work = [sum(k.flops for name, k in e.step.by_kernel.items() if name in ("expert.w1", "expert.w2", "expert.w3"))
            for e in (plain, dealt)]  # fmt: skip
    assert work[1] == pytest.approx(work[0], rel=1e-6)
    assert dealt.step.communication >= 0.0
