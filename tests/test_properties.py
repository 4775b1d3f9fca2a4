"""What must hold for every job: monotone memory and time, bounds of physics, and sums that add up."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost import Estimate, GPUSpec, Job, estimate, software_profiles
from moecost.memory import max_micro_batch_size, peak
from moecost.resolution import resolve

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

TINY = 1e-9
MIXTURES = ("mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "blackmamba-2.8b", "qwen1.5-moe-a2.7b")
DENSE = ("llama-3.1-8b", "gemma-2-2b", "qwen2.5-0.5b", "phi-2", "mistral-7b")
OTHERS = ("granite-4.0-h-small", "deepseek-v2-lite", "jamba-1.5-mini", "gpt-oss-20b")
GPUS = ("a40", "a100-80gb-sxm", "h100-80gb-sxm", "rtx-4090", "l4", "mi300x", "b200")

methods = st.sampled_from(
    [
        {"method": "full"},
        {"method": "full", "weight_dtype": "fp32"},
        {"method": "lora"},
        {"method": "lora", "lora_targets": ("attention",)},
        {"method": "qlora"},
        {"method": "qlora", "weight_dtype": "nf4"},
        {"method": "dora"},
    ]
)


@st.composite
def jobs(draw: st.DrawFn, models: tuple[str, ...] = MIXTURES + DENSE + OTHERS) -> dict[str, Any]:
    """A job on one GPU with every figure computed, whether it fits or not."""
    model = draw(st.sampled_from(models))
    method = dict(draw(methods))
    if model in ("blackmamba-2.8b", "granite-4.0-h-small", "jamba-1.5-mini"):
        method.pop("lora_targets", None)
    return {
        "model": model,
        "gpu": draw(st.sampled_from(GPUS)),
        **method,
        **({} if method["method"] == "full" else {"lora_rank": draw(st.sampled_from([1, 8, 16, 64, 256]))}),
        "sequence_length": draw(st.integers(8, 8192)),
        "micro_batch_size": draw(st.integers(1, 64)),
        "num_queries": draw(st.integers(1, 5000)),
        "gradient_accumulation_steps": draw(st.sampled_from([None, 1, 4])),
        "gradient_checkpointing": draw(st.sampled_from([None, "none", "full"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw8bit", "sgd", "lion"])),
        "attention": draw(st.sampled_from([None, "flash", "eager"])),
        "software": draw(st.sampled_from(software_profiles())),
        "price": 1.0,
        "on_oom": "report",
    }


def run(job: dict[str, Any], **more: Any) -> Estimate:
    return estimate(Job(**(job | more)))


# ------------------------------------------------------------------------------------------------ memory


@given(jobs(), st.floats(1, 200), st.floats(0, 100))
def test_more_memory_never_lowers_the_largest_batch(job: dict[str, Any], gib: float, more: float) -> None:
    gpu = GPUSpec.load(job["gpu"])
    small, large = (gpu.model_copy(update={"memory_usable_gib": m}) for m in (gib, gib + more))
    assert run(job, gpu=small).max_micro_batch_size <= run(job, gpu=large).max_micro_batch_size


@given(jobs(), st.floats(0.5, 400))
def test_the_largest_batch_fits_and_one_more_does_not(job: dict[str, Any], gib: float) -> None:
    gpu = GPUSpec.load(job["gpu"]).model_copy(update={"memory_usable_gib": gib})
    found = resolve(Job(**(job | {"gpu": gpu})))
    habits, length = found.profile.memory, float(found.worst_length)
    capacity = found.workload.device.memory_bytes
    best = float(max_micro_batch_size(found.workload, habits, padded_length=length))

    def need(batch: float) -> float:
        return float(peak(found.workload, habits, sequences=batch, padded_length=length)[0])

    assert best == math.floor(best) >= 0
    assert best == 0 or need(best) <= capacity
    assert need(best + 1) > capacity


@given(jobs(), st.integers(1, 4096))
def test_longer_sequences_never_need_less_nor_run_faster(job: dict[str, Any], more: int) -> None:
    short, long = run(job), run(job, sequence_length=job["sequence_length"] + more)
    assert long.memory.device_gib >= short.memory.device_gib * (1 - TINY)
    assert long.max_micro_batch_size <= short.max_micro_batch_size
    assert long.queries_per_second <= short.queries_per_second * (1 + TINY)


@given(jobs(), st.integers(1, 512))
def test_a_larger_rank_never_needs_less_nor_runs_faster(job: dict[str, Any], more: int) -> None:
    if job["method"] == "full":
        job = job | {"method": "lora", "weight_dtype": None, "lora_rank": 16}
    small, large = run(job), run(job, lora_rank=job["lora_rank"] + more)
    assert large.memory.device_gib >= small.memory.device_gib * (1 - TINY)
    assert large.num_trainable_parameters > small.num_trainable_parameters
    assert large.queries_per_second <= small.queries_per_second * (1 + TINY)


@given(jobs(MIXTURES), st.integers(1, 8), st.integers(1, 8))
def test_more_active_experts_never_need_less_nor_run_faster(job: dict[str, Any], k: int, more: int) -> None:
    few, many = run(job, num_experts_per_tok=min(k, 7)), run(job, num_experts_per_tok=min(k + more, 8))
    assert many.memory.device_gib >= few.memory.device_gib * (1 - TINY)
    assert many.queries_per_second <= few.queries_per_second * (1 + TINY)
    assert few.experts is not None
    assert many.experts is not None
    assert many.experts.touched >= few.experts.touched * (1 - TINY)


@given(jobs())
def test_parts_of_memory_sum_to_what_is_allocated(job: dict[str, Any]) -> None:
    e = run(job)
    m = e.memory
    assert sum(m.parts.values()) == pytest.approx(m.allocated_gib, rel=TINY)
    assert all(part >= 0 for part in m.parts.values())
    assert m.allocated_gib <= m.reserved_gib <= m.device_gib
    assert e.fits == (m.device_gib <= m.usable_gib) == (e.micro_batch_size <= e.max_micro_batch_size)


@given(jobs())
def test_recomputing_activations_saves_memory_and_costs_time(job: dict[str, Any]) -> None:
    kept, recomputed = (run(job, gradient_checkpointing=c) for c in ("none", "full"))
    assert recomputed.memory.activations_gib <= kept.memory.activations_gib * (1 + TINY) or (
        recomputed.memory.moment != kept.memory.moment
    )
    assert recomputed.max_micro_batch_size >= kept.max_micro_batch_size
    assert recomputed.step.seconds >= kept.step.seconds * (1 - TINY)


# ------------------------------------------------------------------------------------------------ time


@given(jobs())
def test_a_step_is_the_sum_of_its_parts(job: dict[str, Any]) -> None:
    s = run(job).step
    assert s.seconds == pytest.approx(s.forward + s.backward + s.optimizer + s.other, rel=TINY)
    assert sum(x.seconds for x in s.by_layer.values()) == pytest.approx(s.forward + s.backward, rel=TINY)
    assert sum(x.forward for x in s.by_layer.values()) == pytest.approx(s.forward, rel=TINY)
    gpu = sum(x.seconds for x in s.by_kernel.values())
    assert gpu + s.host == pytest.approx(s.forward + s.backward, rel=1e-6)
    assert 0 <= s.recompute <= s.backward
    assert s.host >= -TINY * s.seconds
    assert all(x.forward <= x.seconds * (1 + TINY) for x in (*s.by_layer.values(), *s.by_kernel.values()))
    for field in ("flops", "bytes", "launches"):
        by_layer = sum(getattr(x, field) for x in s.by_layer.values())
        assert by_layer == pytest.approx(sum(getattr(x, field) for x in s.by_kernel.values()), rel=TINY)


@given(jobs())
def test_no_kernel_and_no_step_beats_the_roofline(job: dict[str, Any]) -> None:
    """Williams et al. (2009): a kernel takes at least its FLOPs over the peak, and its bytes over the bandwidth."""
    e, gpu = run(job), GPUSpec.load(job["gpu"])
    peak_rate, bandwidth = gpu.peak_flops_per_s("bf16"), gpu.bandwidth_bytes_per_s
    for name, kernel in e.step.by_kernel.items():
        least = max(kernel.flops / peak_rate, kernel.bytes / bandwidth)
        assert kernel.seconds >= least * (1 - TINY), name
    assert e.step.seconds >= sum(k.flops for k in e.step.by_kernel.values()) / peak_rate
    assert e.step.seconds >= sum(k.bytes for k in e.step.by_kernel.values()) / bandwidth
    assert 0 < e.mfu <= e.hfu <= 1


@pytest.mark.parametrize("rank", [1024, 4096, 65536])
def test_adapters_of_any_rank_keep_to_the_roofline(rank: int) -> None:
    """Above some 1,000 ranks the products of an adapter are bound by compute, no longer by traffic."""
    e = estimate("llama-3.1-8b", "h100", method="lora", lora_rank=rank, sequence_length=4096, micro_batch_size=4,
                 on_oom="report")  # fmt: skip
    flops = sum(k.flops for n, k in e.step.by_kernel.items() if n.endswith("adapter"))
    seconds = sum(k.seconds for n, k in e.step.by_kernel.items() if n.endswith("adapter"))
    assert seconds >= flops / GPUSpec.load("h100").peak_flops_per_s("bf16")
    assert e.hfu <= 1


@pytest.mark.parametrize("gpu", ["p100-16gb-pcie", "k80"])
def test_scans_keep_to_the_roofline_on_old_gpus(gpu: str) -> None:
    """A selective scan of 128 states does 58 FLOPs a byte: more than the ridge point of GPUs without tensor cores."""
    e = estimate("granite-4.0-h-small", gpu, method="lora", sequence_length=512, micro_batch_size=1, on_oom="report")
    kernel = e.step.by_kernel["mamba.scan"]
    spec = GPUSpec.load(gpu)
    dtype = "fp16" if "fp16" in spec.peak_tflops_dense else "fp32"
    assert kernel.seconds >= kernel.flops / spec.peak_flops_per_s(dtype)


@pytest.mark.parametrize(("model", "kernel"), [("blackmamba-2.8b", "mamba.dt_proj"), ("qwen2.5-0.5b", "attention.q")])
def test_products_with_a_bias_keep_to_the_roofline(model: str, kernel: str) -> None:
    """Bytes that are reported are bytes that take time: those of the bias too."""
    for gpu in ("mi300x", "l4"):
        e = estimate(model, gpu, method="qlora" if model[0] == "q" else "lora", lora_targets="all-linear",
                     sequence_length=8192, micro_batch_size=8, on_oom="report")  # fmt: skip
        found = e.step.by_kernel[kernel]
        assert found.seconds >= found.bytes / GPUSpec.load(gpu).bandwidth_bytes_per_s * (1 - TINY), gpu


@given(jobs())
def test_utilization_is_a_share(job: dict[str, Any]) -> None:
    e = run(job)
    for usage in (e.utilization.moe, e.utilization.step):
        assert 0 <= usage.sm <= 1
        assert 0 <= usage.dram <= 1
    if e.experts is not None:
        assert 1 <= e.experts.load_imbalance <= e.experts.num_experts / e.experts.num_experts_per_tok
        assert e.experts.touched <= e.experts.num_experts


@given(jobs())
def test_rates_agree_with_each_other(job: dict[str, Any]) -> None:
    e = run(job)
    assert e.tokens_per_second <= e.padded_tokens_per_second * (1 + TINY)
    assert e.tokens_per_second == pytest.approx(e.queries_per_second * job["sequence_length"], rel=TINY)
    assert e.steps * e.step.seconds <= e.hours * 3600 * (1 + TINY)
    assert all(math.isfinite(x) for x in (e.queries_per_second, e.hours, e.cost_usd, e.mfu))


# ------------------------------------------------------------------------------------------------ money and spread


@given(jobs(), st.floats(0, 1000), st.floats(0, 1000))
def test_cost_is_linear_in_price(job: dict[str, Any], price: float, factor: float) -> None:
    one, many = run(job, price=price), run(job, price=price * factor)
    assert one.cost_usd == pytest.approx(price * one.gpu_hours, rel=TINY)
    assert many.cost_usd == pytest.approx(factor * one.cost_usd, rel=TINY, abs=1e-12)
    assert many.hours == one.hours


FIGURES = (
    "queries_per_second", "tokens_per_second", "padded_tokens_per_second", "step.seconds", "step.forward", "hours",
    "gpu_hours", "cost_usd", "mfu", "hfu", "memory.allocated_gib", "memory.reserved_gib", "memory.device_gib",
)  # fmt: skip


@given(jobs(), st.sampled_from(FIGURES), st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_an_interval_holds_the_value_and_grows_with_the_level(
    job: dict[str, Any], field: str, level: float, more: float
) -> None:
    e = run(job)
    value: Any = e
    for name in field.split("."):
        value = getattr(value, name)
    low, high = e.interval(field, level)
    wide_low, wide_high = e.interval(field, level + more)
    assert 0 < wide_low < low < value < high < wide_high
    assert low * high == pytest.approx(value**2, rel=TINY)


def test_an_interval_is_that_of_a_log_normal_law() -> None:
    """80 % lie within 1.2816 standard deviations, 95 % within 1.96: time and memory each with their own spread."""
    e = estimate("llama-3.1-8b", "a100", method="lora", sequence_length=512)
    for field, value, sd in (
        ("hours", e.hours, e.log_sd_time),
        ("memory.device_gib", e.memory.device_gib, e.log_sd_memory),
    ):
        assert sd > 0
        for level, z in ((0.8, 1.2816), (0.95, 1.9600)):
            low, high = e.interval(field, level)
            assert math.log(high / value) == pytest.approx(z * sd, rel=1e-3)
            assert math.log(value / low) == pytest.approx(z * sd, rel=1e-3)
    assert e.interval("hours") == e.interval("hours", 0.8)


def test_counted_figures_have_no_interval() -> None:
    e = estimate("llama-3.1-8b", "a100", method="lora", sequence_length=512)
    assert e.interval("num_trainable_parameters") == (e.num_trainable_parameters,) * 2


# ------------------------------------------------------------------------------------------------ there and back


@given(jobs())
def test_an_estimate_survives_json_and_pickle(job: dict[str, Any]) -> None:
    e = run(job)
    assert Estimate.model_validate_json(e.model_dump_json()) == e
    assert Estimate.model_validate(e.model_dump()) == e
    assert pickle.loads(pickle.dumps(e)) == e
    json.loads(e.model_dump_json())


def test_an_estimate_without_a_price_survives_json() -> None:
    """NaN is no JSON, but Python and pydantic write and read it."""
    e = estimate("qwen2.5-0.5b", "k80", method="lora", sequence_length=64, micro_batch_size=1)
    assert math.isnan(e.cost_usd)
    back = Estimate.model_validate_json(e.model_dump_json())
    assert math.isnan(back.cost_usd)
    assert repr(back) == repr(e)


@given(jobs())
def test_a_job_survives_json_and_pickle(job: dict[str, Any]) -> None:
    asked = Job(**job)
    assert Job.model_validate_json(asked.model_dump_json()) == asked
    assert pickle.loads(pickle.dumps(asked)) == asked
    assert hash(asked) == hash(Job(**job))


def test_the_same_job_gives_the_same_estimate() -> None:
    job = Job(model="mixtral-8x7b", gpu="a40", method="qlora", dataset="math-14k", sequence_length=1024)
    assert estimate(job) == estimate(job)
    fields = {k: v for k, v in job.model_dump().items() if k not in ("model", "gpu")}
    assert estimate(job) == estimate(job.model, job.gpu, **fields)


def test_an_estimate_cannot_be_changed() -> None:
    e = estimate("llama-3.1-8b", "a100", method="lora", sequence_length=512)
    with pytest.raises(ValueError, match="frozen"):
        e.hours = 1.0  # type: ignore[misc]


def test_memory_of_a_job_is_that_of_its_worst_batch() -> None:
    """MATH's longest query is 1,470 tokens, cut at 1,024: memory as if all were that long, time as they come."""
    common = {"method": "lora", "micro_batch_size": 4, "num_queries": 1000, "on_oom": "report"}
    real = estimate("llama-3.1-8b", "a100", dataset="math-14k", sequence_length=1024, **common)
    fixed = estimate("llama-3.1-8b", "a100", sequence_length=1024, **common)
    assert real.memory == fixed.memory
    assert real.max_micro_batch_size == fixed.max_micro_batch_size
    assert real.queries_per_second > 2 * fixed.queries_per_second


@given(jobs(), st.integers(1, 5000))
def test_a_longer_run_costs_more(job: dict[str, Any], more: int) -> None:
    short, long = run(job), run(job, num_queries=job["num_queries"] + more)
    assert long.hours >= short.hours * (1 - TINY)
    assert long.steps >= short.steps
    two = run(job, epochs=2.0)
    assert two.hours >= short.hours
    assert two.step == short.step
