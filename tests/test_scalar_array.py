"""One definition serves a number and an array: element by element the same, whole numbers too, and no overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moecost import Job, cost, experts, memory, roofline
from moecost.arrays import as_float
from moecost.coefficients import Coefficients
from moecost.operators import operators
from moecost.resolution import Resolved, resolve
from moecost.step import step_times
from moecost.workload import Batches

EXACT = 1e-12
RNG = np.random.default_rng(0)
N = 200


def some(low: float, high: float) -> np.ndarray:
    """Numbers spread over orders of magnitude, both ends among them."""
    return np.concatenate([[low, high], np.exp(RNG.uniform(np.log(low), np.log(high), N - 2))])


def whole(low: int, high: int) -> np.ndarray:
    return np.round(some(low, high))


EXPERTS = whole(1, 512)
TOP_K = np.minimum(whole(1, 16), EXPERTS)
FORMULAS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ridge_point": (roofline.ridge_point, {"peak_flops_per_s": some(1e12, 1e16), "bytes_per_s": some(1e11, 1e13)}),
    "roofline_time": (
        roofline.roofline_time,
        {"flops": some(1, 1e20), "bytes_moved": some(1, 1e15), "peak_flops_per_s": 1e15, "bytes_per_s": 1e12},
    ),
    "gemm_flops": (
        roofline.gemm_flops,
        {"rows": whole(1, 10**6), "in_features": whole(1, 10**5), "out_features": whole(1, 10**5)},
    ),
    "gemm_compute_time": (
        roofline.gemm_compute_time,
        {
            "rows": whole(1, 10**6),
            "in_features": whole(1, 10**5),
            "out_features": whole(1, 10**5),
            "num_sms": whole(1, 200),
            "flops_per_s": some(1e12, 1e16),
        },
    ),
    "experts_touched": (
        experts.experts_touched,
        {"tokens": whole(1, 10**7), "num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    ),
    "load_variation": (
        experts.load_variation,
        {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "router_skew": some(0.05, 0.43)},
    ),
    "binomial_variation": (
        experts.binomial_variation,
        {"tokens": whole(1, 10**7), "num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    ),
    "load_imbalance": (
        experts.load_imbalance,
        {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "variation": some(1e-3, 10)},
    ),
    "normal_quantile": (experts.normal_quantile, {"probability": np.linspace(1e-6, 1 - 1e-6, N)}),
    "run_hours": (
        cost.run_hours,
        {
            "steps": whole(1, 10**9),
            "step_s": some(1e-3, 1e3),
            "saves": whole(1, 100),
            "save_s": some(1e-3, 1e4),
            "startup_s": 60.0,
        },
    ),
    "cost_usd": (
        cost.cost_usd,
        {"hours": some(1e-3, 1e6), "num_gpus": whole(1, 10**5), "usd_per_gpu_hour": some(0.01, 100)},
    ),
    "save_seconds": (cost.save_seconds, {"saved_bytes": whole(1, 10**13), "bytes_per_s": some(1e6, 1e12)}),
}


def _one(values: dict[str, Any], i: int) -> dict[str, Any]:
    return {k: float(v[i]) if isinstance(v, np.ndarray) else v for k, v in values.items()}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_of_arrays_is_the_formula_of_each(name: str) -> None:
    formula, values = FORMULAS[name]
    found = formula(**values)
    assert found.shape == (N,)
    assert found.dtype == np.float64
    each = [formula(**_one(values, i)) for i in range(N)]
    np.testing.assert_allclose(found, each, rtol=EXACT)
    outer = {k: v[:, None] if isinstance(v, np.ndarray) else v for k, v in values.items()}
    assert formula(**outer).shape == (N, 1)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_of_a_number_is_a_number(name: str) -> None:
    """A float, not an array of no dimensions; the same for what NumPy hands out."""
    formula, values = FORMULAS[name]
    found = formula(**_one(values, 5))
    assert isinstance(found, float)
    as_numpy = {k: np.float64(v) for k, v in _one(values, 5).items()}
    assert formula(**as_numpy) == pytest.approx(found, rel=EXACT)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_leaves_its_arguments_alone(name: str) -> None:
    formula, values = FORMULAS[name]
    before = {k: np.array(v) for k, v in values.items()}
    formula(**values)
    assert all(np.array_equal(before[k], v) for k, v in values.items())


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_takes_whole_numbers(name: str) -> None:
    """int64 columns, as a table has them, give what float64 columns give: nothing is truncated."""
    formula, values = FORMULAS[name]
    columns = {
        k: v.astype(np.int64) if isinstance(v, np.ndarray) and np.array_equal(v, np.round(v)) else v
        for k, v in values.items()
    }
    np.testing.assert_allclose(formula(**columns), formula(**values), rtol=EXACT)


def test_smooth_maximum() -> None:
    a, b = some(1e-6, 1e3), some(1e-6, 1e3)
    a[7] = b[7] = 0.0
    for p in (1.0, 1.5, 3.0):
        found = np.asarray(roofline.smooth_maximum(a, b, p))
        np.testing.assert_allclose(
            found, [roofline.smooth_maximum(float(x), float(y), p) for x, y in zip(a, b, strict=True)], rtol=EXACT
        )
        assert isinstance(roofline.smooth_maximum(3.0, 4.0, p), float)


def test_smooth_maximum_of_whole_numbers() -> None:
    found = np.asarray(roofline.smooth_maximum(np.array([3, 0, 5]), np.array([4, 0, 12]), 2.0))
    np.testing.assert_allclose(found, [5, 0, 13], rtol=EXACT)


def test_large_whole_numbers_do_not_overflow() -> None:
    """6 x 1e12 parameters x 1e7 tokens is 6e19: beyond int64, where NumPy wraps round in silence."""
    big = {"rows": np.array([10**7]), "in_features": np.array([10**6]), "out_features": np.array([3 * 10**6])}
    assert roofline.gemm_flops(**big)[0] == pytest.approx(6e19, rel=EXACT)
    assert as_float(np.array([6 * 10**12]))[()] * 10**7 == pytest.approx(6e19)  # type: ignore[index]
    touched = experts.experts_touched(tokens=np.array([10**12]), num_experts=8, num_experts_per_tok=2)
    assert touched[0] == 8
    hours = cost.run_hours(steps=np.array([10**12]), step_s=np.array([10**8]), saves=0, save_s=0, startup_s=0)
    assert hours[0] == pytest.approx(1e20 / 3600, rel=EXACT)


# ------------------------------------------------------------------------------------------------ memory and step


def resolved(model: str = "mixtral-8x7b", **more: Any) -> Resolved:
    job = {"model": model, "gpu": "a40", "method": "qlora", "sequence_length": 512, "software": "hf-peft-2024"}
    return resolve(Job(**(job | {"on_oom": "report"} | more)))


MODELS = [
    ("mixtral-8x7b", {}),
    ("blackmamba-2.8b", {"method": "full"}),
    ("llama-3.1-8b", {"method": "lora", "software": "hf-peft", "attention": "eager"}),
    ("gemma-2-2b", {"method": "full", "software": "hf-peft", "gradient_accumulation_steps": 4}),
]


@pytest.mark.parametrize(("model", "more"), MODELS)
def test_memory_of_arrays(model: str, more: dict[str, Any]) -> None:
    found = resolved(model, **more)
    habits = found.profile.memory
    batch, length = whole(1, 256), whole(8, 32768)
    most, at = memory.peak(found.workload, habits, sequences=batch, padded_length=length)
    each = [
        memory.peak(found.workload, habits, sequences=b, padded_length=n)[0]
        for b, n in zip(batch.tolist(), length.tolist(), strict=True)
    ]
    np.testing.assert_allclose(most, each, rtol=EXACT)
    for moment, parts in at.items():
        one = memory.peak(found.workload, habits, sequences=batch[9], padded_length=length[9])[1][moment]
        for part in ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers", "allocated"):
            column = np.broadcast_to(getattr(parts, part), batch.shape)
            assert column[9] == pytest.approx(float(getattr(one, part)), rel=EXACT)


@pytest.mark.parametrize(("model", "more"), MODELS)
def test_largest_batch_of_arrays(model: str, more: dict[str, Any]) -> None:
    """Arrays of lengths, of ranks and of device memory, each against one by one, and all three together."""
    found = resolved(model, **more)
    workload, habits = found.workload, found.profile.memory
    length, rank, room = whole(8, 32768), whole(1, 512), some(1e9, 2e12)
    if workload.recipe.trains_all:
        rank = np.zeros(N)

    def largest(n: Any, r: Any, capacity: Any) -> Any:
        asked = replace(
            workload,
            recipe=replace(workload.recipe, rank=r),
            device=replace(workload.device, memory_bytes=capacity),
        )
        return memory.max_micro_batch_size(asked, habits, padded_length=n)

    columns = (length, rank, room)
    middle = (512.0, float(rank[3]), 1e11)
    for varied in ((0,), (1,), (2,), (0, 1, 2)):
        asked = [columns[i] if i in varied else middle[i] for i in range(3)]
        got = np.broadcast_to(largest(*asked), (N,))
        each = [largest(*(float(c[j]) if isinstance(c, np.ndarray) else c for c in asked)) for j in range(N)]
        np.testing.assert_array_equal(got, each)
    grid = largest(length[:, None], 0.0, room[None, :20])
    assert grid.shape == (N, 20)
    assert grid[3, 4] == largest(float(length[3]), 0.0, float(room[4]))
    assert isinstance(largest(512.0, 16.0, 1e11), float)


def test_memory_of_whole_numbers() -> None:
    """int64 columns up to the largest batch and length that a job may have do not overflow."""
    found = resolved()
    batch, length = np.array([1, 3, 2**24]), np.array([128, 1000, 10**8])
    got, _ = memory.peak(found.workload, found.profile.memory, sequences=batch, padded_length=length)
    want, _ = memory.peak(
        found.workload, found.profile.memory, sequences=batch.astype(float), padded_length=length.astype(float)
    )
    np.testing.assert_allclose(got, want, rtol=EXACT)
    np.testing.assert_array_equal(
        memory.max_micro_batch_size(found.workload, found.profile.memory, padded_length=length),
        memory.max_micro_batch_size(found.workload, found.profile.memory, padded_length=length.astype(float)),
    )


def test_infeasible_rows_are_zero_and_do_not_disturb_the_others() -> None:
    found = resolved("mixtral-8x7b")
    got = memory.max_micro_batch_size(found.workload, found.profile.memory, padded_length=np.array([512.0, 1e8, 1024]))
    assert got.tolist() == [8, 0, 4]


def _rows(batch: np.ndarray, length: np.ndarray) -> Batches:
    """Each row a distribution of one batch: the last axis is the support."""
    return Batches(batch[:, None], length[:, None], np.ones((1, 1)))


@pytest.mark.parametrize(("model", "more"), MODELS)
def test_operators_and_step_of_arrays(model: str, more: dict[str, Any]) -> None:
    found = resolved(model, **more)
    batch, length = whole(1, 64), whole(8, 8192)
    batch[1] = 64
    coefficients = found.coefficients
    every = operators(found.workload, _rows(batch, length), found.profile, coefficients)
    step = step_times(found.workload, _rows(batch, length), found.profile, coefficients)
    assert np.shape(step.seconds) == (N,)
    for i in (0, 1, 17, 99):
        one = Batches(batch[i : i + 1], length[i : i + 1], np.ones(1))
        single = operators(found.workload, one, found.profile, coefficients)
        assert [op.kernel for op in single] == [op.kernel for op in every]
        for a, b in zip(every, single, strict=True):
            for work_a, work_b in ((a.forward, b.forward), (a.backward, b.backward)):
                for field in ("seconds", "flops", "bytes", "launches", "host", "host_s", "sm"):
                    column = np.broadcast_to(getattr(work_a, field), (N, 1))
                    value = float(np.squeeze(getattr(work_b, field)))
                    assert float(column[i, 0]) == pytest.approx(value, rel=EXACT), (a.kernel, field)
        alone = step_times(found.workload, one, found.profile, coefficients)
        assert np.asarray(step.seconds)[i] == pytest.approx(float(alone.seconds), rel=EXACT)
        assert np.asarray(step.forward.total)[i] == pytest.approx(float(alone.forward.total), rel=EXACT)


def test_a_distribution_is_the_weighted_mean_of_its_batches() -> None:
    found = resolved()
    length, p = np.array([128.0, 256.0, 512.0]), np.array([0.5, 0.3, 0.2])
    whole_ = step_times(found.workload, Batches(np.full(3, 4.0), length, p), found.profile, found.coefficients)
    each = [
        float(
            step_times(
                found.workload, Batches(np.array([4.0]), np.array([n]), np.ones(1)), found.profile, found.coefficients
            ).seconds
        )
        for n in length
    ]
    assert float(whole_.seconds) == pytest.approx(float(p @ each), rel=EXACT)


def test_whole_numbers_of_tokens() -> None:
    found = resolved()
    batch, length = np.array([1, 3, 64]), np.array([8, 1000, 8192])
    got = step_times(found.workload, _rows(batch, length), found.profile, Coefficients())
    want = step_times(found.workload, _rows(batch.astype(float), length.astype(float)), found.profile, Coefficients())
    np.testing.assert_allclose(got.seconds, want.seconds, rtol=EXACT)
