"""Routing statistics against closed forms and simulated routers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from moecost.experts import (
    LOAD_WEIGHTS,
    binomial_variation,
    experts_touched,
    load_imbalance,
    load_variation,
    normal_quantile,
    rows_of_experts,
)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "touched"),
    [
        (8, 2, 1, 2.0),  # E (1 - (1 - k/E)^T), worked by hand
        (8, 2, 2, 3.5),
        (8, 2, 4, 5.469),
        (8, 2, 8, 7.199),
        (8, 2, 16, 7.920),
        (128, 8, 4, 29.123),
        (128, 8, 16, 82.423),
        (128, 8, 64, 125.942),
        (256, 8, 64, 222.442),
        (8, 8, 1, 8.0),
    ],
)
def test_distinct_experts(experts: int, top_k: int, tokens: int, touched: float) -> None:
    found = experts_touched(tokens=tokens, num_experts=experts, num_experts_per_tok=top_k)
    assert found == pytest.approx(touched, rel=1e-4)


def _loads(experts: int, top_k: int, tokens: int, draws: int) -> np.ndarray:
    """Tokens that each expert gets in `draws` batches of uniformly routed tokens."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((draws, tokens, experts)), axis=-1)[..., :top_k]
    return np.stack([np.bincount(c.ravel(), minlength=experts) for c in chosen])


def test_distinct_experts_and_their_spread_of_a_simulated_router() -> None:
    loads = _loads(64, 8, 16, 400)
    shape = {"tokens": 16.0, "num_experts": 64, "num_experts_per_tok": 8}
    assert experts_touched(**shape) == pytest.approx((loads > 0).sum(axis=1).mean(), rel=0.01)
    assert binomial_variation(**shape) == pytest.approx(loads.std() / loads.mean(), rel=0.03)


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "blom"),
    [
        (8, 2, 16, 1.62),  # 1 + c z with z = quantile of (E - 0.375) / (E + 0.25): Blom's expected maximum
        (8, 2, 128, 1.22),
        (8, 2, 1024, 1.078),
        (8, 2, 8192, 1.027),
        (64, 8, 128, 1.55),
        (64, 8, 1024, 1.193),
        (64, 8, 8192, 1.068),
        (128, 8, 128, 1.89),
        (128, 8, 1024, 1.313),
        (128, 8, 8192, 1.111),
    ],
)
def test_imbalance_by_chance(experts: int, top_k: int, tokens: int, blom: float) -> None:
    shape = {"num_experts": experts, "num_experts_per_tok": top_k}
    found = load_imbalance(variation=binomial_variation(tokens=float(tokens), **shape), **shape)
    assert found == pytest.approx(blom, rel=1e-2)


def test_imbalance_of_a_simulated_router() -> None:
    loads = _loads(64, 8, 512, 60)
    shape = {"num_experts": 64, "num_experts_per_tok": 8}
    found = load_imbalance(variation=binomial_variation(tokens=512.0, **shape), **shape)
    assert found == pytest.approx((loads.max(axis=1) / loads.mean(axis=1)).mean(), rel=0.03)


def test_imbalance_has_its_ceiling_where_one_expert_gets_every_token() -> None:
    assert load_imbalance(num_experts=8, num_experts_per_tok=2, variation=100.0) == 4.0
    assert load_imbalance(num_experts=8, num_experts_per_tok=8, variation=0.0) == 1.0
    assert load_imbalance(num_experts=1, num_experts_per_tok=1, variation=0.3) == 1.0


def test_router_skew_is_the_spread_at_two_of_eight_and_none_in_a_dense_run() -> None:
    assert load_variation(num_experts=8, num_experts_per_tok=2, router_skew=0.35) == pytest.approx(0.35)
    assert load_variation(num_experts=8, num_experts_per_tok=8, router_skew=0.35) == 0.0


@given(mean=st.floats(1, 1e6), variation=st.floats(0, 0.43))
def test_quadrature_keeps_mean_and_spread(mean: float, variation: float) -> None:
    nodes = rows_of_experts(mean_rows=mean, variation=variation)
    assert np.all(nodes > 0)
    average = float(LOAD_WEIGHTS @ nodes)
    assert average == pytest.approx(mean, rel=1e-12)
    assert float(LOAD_WEIGHTS @ (nodes - mean) ** 2) ** 0.5 == pytest.approx(variation * mean, rel=1e-9, abs=1e-6)


@given(st.floats(1e-6, 1 - 1e-6))
def test_normal_quantile_within_its_stated_error(p: float) -> None:
    """Abramowitz and Stegun 26.2.23: absolute error below 4.5e-4."""
    assert normal_quantile(p) == pytest.approx(norm.ppf(p), abs=4.5e-4)


@given(
    experts=st.integers(1, 512),
    k=st.integers(1, 512),
    tokens=st.integers(1, 10**7),
    more=st.integers(1, 10**6),
)
def test_touched_experts_are_bounded_and_grow_with_tokens(experts: int, k: int, tokens: int, more: int) -> None:
    k = min(k, experts)

    def touched(t: int) -> float:
        return float(experts_touched(tokens=t, num_experts=experts, num_experts_per_tok=k))

    assert k * (1 - 1e-9) <= touched(tokens) <= min(experts, k * tokens) * (1 + 1e-9)
    assert touched(tokens + more) >= touched(tokens) * (1 - 1e-12)
