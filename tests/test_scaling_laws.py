"""Published scaling laws against the tables and worked examples of their papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost import scaling_laws as laws
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.scaling_laws import (
    ABNAR,
    BESIROGLU,
    CLARK_HASH,
    CLARK_RL_R,
    CLARK_S_BASE,
    HOFFMANN,
    HOFFMANN_UNROUNDED,
    KRAJEWSKI_16,
    KRAJEWSKI_64,
    KRAJEWSKI_DENSE,
    LUDZIEJEWSKI,
    Sizes,
    YunLaw,
    compute_optimal,
    effective_experts,
    fine_grained_flops,
    fine_grained_parameters,
)

CHINCHILLA_BUDGET = 5.76e23
"""FLOP of Gopher and Chinchilla, arXiv:2203.15556; beyond the fitted runs."""


# ------------------------------------------------------------------------------------------------------ dense models
@pytest.mark.parametrize(
    ("fit", "tokens_per_parameter"),
    [(HOFFMANN, 92.7), (HOFFMANN_UNROUNDED, 59.1), (BESIROGLU, 18.4)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_tokens_a_parameter_at_chinchillas_budget(fit: Any, tokens_per_parameter: float) -> None:
    """Worked by hand from the three sets of coefficients; about 20 is what Chinchilla was trained on."""
    n, d = fit.optimum(flops=CHINCHILLA_BUDGET, extrapolate=True)
    assert d / n == pytest.approx(tokens_per_parameter, rel=2e-3)
    assert 6 * n * d == pytest.approx(CHINCHILLA_BUDGET, rel=1e-12)


@pytest.mark.parametrize(
    ("flops", "parameters", "tokens", "loss"),
    [(5.76e23, 7.225e10, 1.329e12, 1.9744), (1e21, 2.778e9, 5.999e10, 2.3055)],
)
def test_compute_optimal_models_by_the_refit(flops: float, parameters: float, tokens: float, loss: float) -> None:
    n, d = BESIROGLU.optimum(flops=flops, extrapolate=True)
    assert n == pytest.approx(parameters, rel=1e-3)
    assert d == pytest.approx(tokens, rel=1e-3)
    assert BESIROGLU.loss(parameters=n, tokens=d, extrapolate=True) == pytest.approx(loss, rel=1e-4)


def test_loss_of_chinchilla_itself() -> None:
    """70B parameters, 1.4e12 tokens; by the refit and by approach 3 as rounded."""
    chinchilla = {"parameters": 70e9, "tokens": 1.4e12, "extrapolate": True}
    assert BESIROGLU.loss(**chinchilla) == pytest.approx(1.9739, rel=1e-4)
    assert HOFFMANN.loss(**chinchilla) == pytest.approx(1.9366, rel=1e-4)


@pytest.mark.parametrize(
    ("parameters", "flops", "tokens"),
    [(1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12), (175e9, 3.85e24, 3.7e12)],
)
def test_the_refit_comes_near_hoffmanns_first_approach(parameters: float, flops: float, tokens: float) -> None:
    """arXiv:2203.15556, approach 1: read off its training curves, without a law; the refit lies within a quarter."""
    n, d = BESIROGLU.optimum(flops=flops, extrapolate=True)
    assert n == pytest.approx(parameters, rel=0.25)
    assert d == pytest.approx(tokens, rel=0.25)


@given(st.floats(1e19, 1e25))
def test_the_closed_form_and_the_search_agree(flops: float) -> None:
    n, d = BESIROGLU.optimum(flops=flops, extrapolate=True)
    found = compute_optimal(lambda n, d: BESIROGLU.loss(parameters=n, tokens=d, extrapolate=True), flops=flops)
    assert found == (pytest.approx(n, rel=1e-5), pytest.approx(d, rel=1e-5))


def test_tokens_for_a_loss_undo_the_loss() -> None:
    for n in (1e9, 7e9):
        loss = HOFFMANN.loss(parameters=n, tokens=2e11)
        assert HOFFMANN.tokens_for(loss=loss, parameters=n) == pytest.approx(2e11, rel=1e-9)
    assert HOFFMANN.tokens_for(loss=1.7, parameters=1e9) == np.inf


# ------------------------------------------------------------------------------------------------------------- Clark
def test_clarks_routed_models() -> None:
    """arXiv:2202.01169, Table 3, worked by hand: 1.3B with 1 and 64 experts."""
    assert effective_experts(experts=1, start=1.847, most=314.478) == pytest.approx(1.847, rel=1e-9)
    assert effective_experts(experts=64, start=1.847, most=314.478) == pytest.approx(53.77, rel=1e-4)
    assert CLARK_S_BASE.loss(parameters=1.3e9, experts=1) == pytest.approx(2.2374, rel=1e-4)
    assert CLARK_S_BASE.loss(parameters=1.3e9, experts=64) == pytest.approx(2.0498, rel=1e-4)


def test_clarks_effective_parameters_and_cutoffs() -> None:
    """5e6 with 128 experts is worth about 55e6 dense; routing ends at 937e9, 85e9 and 83e9 (c has three digits)."""
    worth = CLARK_S_BASE.effective_parameters(parameters=5e6, experts=128, extrapolate=True)
    assert worth == pytest.approx(51.8e6, rel=2e-3)
    assert worth == pytest.approx(55e6, rel=0.1)
    assert CLARK_S_BASE.effective_parameters(parameters=1e9, experts=1) == pytest.approx(1e9, rel=1e-9)
    assert CLARK_S_BASE.cutoff == pytest.approx(937e9, rel=0.08)
    for fit, c_low, c_high, printed in ((CLARK_RL_R, 0.0115, 0.0125, 85e9), (CLARK_HASH, 0.0115, 0.0125, 83e9)):
        assert 10 ** (-fit.b / c_high) <= printed <= 10 ** (-fit.b / c_low)


def test_clark_has_no_term_for_tokens() -> None:
    with pytest.raises(InvalidInputError, match=r"tokens=2e\+11 lies outside of clark-s-base"):
        CLARK_S_BASE.loss(parameters=1e9, experts=8, tokens=2e11, extrapolate=True)


# ----------------------------------------------------------------------------------------------------- fine-grained
# arXiv:2402.07871, compute-optimal models: active size, tokens, granularity, FLOPs, loss. Width is 64 times the depth.
OPTIMAL = [
    (100e6, 4.37e9, 8, 2.95e18, 3.133),
    (1e9, 28.94e9, 16, 1.93e20, 2.491),
    (3e9, 72.9e9, 16, 1.41e21, 2.245),
    (7e9, 137.6e9, 32, 6.46e21, 2.076),
    (70e9, 941e9, 32, 4.16e23, 1.694),
    (300e9, 2.96e12, 64, 5.69e24, 1.503),
    (1e12, 7.94e12, 64, 4.97e25, 1.367),
]


@pytest.mark.parametrize("row", OPTIMAL, ids=lambda row: f"64x{row[0]:g}")
def test_compute_optimal_fine_grained_mixtures(row: tuple[float, float, int, float, float]) -> None:
    """FLOPs within half a percent; losses 0.011 to 0.023 low, as the coefficients have three digits."""
    active, tokens, granularity, flops, loss = row
    layers = (active / (12 * 64**2)) ** (1 / 3)
    shape = {"hidden_size": 64 * layers, "num_layers": layers, "expansion": 64}
    found = fine_grained_flops(**shape, granularity=granularity, tokens=tokens)
    assert found == pytest.approx(flops, rel=5e-3)
    n = fine_grained_parameters(**shape)
    predicted = KRAJEWSKI_64.loss(parameters=n, tokens=tokens, granularity=granularity, extrapolate=True)
    assert 0.010 <= loss - predicted <= 0.024


@pytest.mark.parametrize(("hidden", "share"), [(512, 0.1628), (4096, 0.02373)])
def test_share_of_the_router(hidden: float, share: float) -> None:
    """64-fold, granularity 8: h E G 14 over all, by hand."""
    shape = {"hidden_size": hidden, "num_layers": 1, "expansion": 64, "granularity": 8, "tokens": 1.0}
    whole = fine_grained_flops(**shape)
    assert 1 - fine_grained_flops(**shape, routing_flops=0.0) / whole == pytest.approx(share, rel=1e-3)


def test_finer_experts_help_and_mixtures_beat_dense_models() -> None:
    size = {"parameters": 2e9, "tokens": 50e9}
    losses = [float(KRAJEWSKI_64.loss(**size, granularity=g)) for g in (1, 2, 4, 8, 16)]
    assert losses == sorted(losses, reverse=True)
    active = {"parameters": 2e9 * 12 / (8 * 16 + 4), "tokens": 50e9}
    assert KRAJEWSKI_16.loss(**size, granularity=1) < KRAJEWSKI_DENSE.loss(**active)


# ------------------------------------------------------------------------------------------------------------- joint
@pytest.mark.parametrize(
    ("experts", "reduced"),
    [
        (1, (30.364, -0.1817, 53.984, -0.1965)),
        (8, (21.833, -0.1676, 119.913, -0.2338)),
        (32, (16.542, -0.1557, 234.673, -0.2652)),
    ],
)
def test_reduced_form_of_the_joint_law(experts: int, reduced: tuple[float, ...]) -> None:
    """arXiv:2502.05172, Table 4, from the rounded coefficients of its Table 3: within 0.3 %."""
    assert LUDZIEJEWSKI.reduced(experts) == pytest.approx(reduced, rel=3e-3)


@pytest.mark.parametrize(
    ("flops", "experts", "active", "tokens"),
    [
        (1e20, 1, 1.7e9, 9.7e9),
        (1e20, 8, 990e6, 17e9),
        (1e20, 32, 669e6, 24.9e9),
        (1e21, 8, 3.8e9, 44.3e9),
        (1e22, 1, 18.8e9, 88.6e9),
        (1e22, 8, 14.4e9, 115.8e9),
        (1e22, 32, 12.2e9, 136.9e9),
    ],
)
def test_compute_optimal_mixtures(flops: float, experts: int, active: float, tokens: float) -> None:
    """arXiv:2502.05172, Table 1: within 2 % and the rounding of what it prints."""
    n, d = LUDZIEJEWSKI.optimum(flops=flops, experts=experts, extrapolate=True)
    assert n == pytest.approx(active, rel=0.02)
    assert d == pytest.approx(tokens, rel=0.02)


def test_losses_of_the_joint_law() -> None:
    assert LUDZIEJEWSKI.loss(active=1e9, tokens=50e9, experts=8) == pytest.approx(2.4186, rel=1e-4)
    assert LUDZIEJEWSKI.loss(active=1e9, tokens=50e9, experts=1) == pytest.approx(2.4935, rel=1e-4)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_the_rule_of_thumb_of_the_joint_law(experts: int) -> None:
    """arXiv:2502.05172: a mixture of up to 8 experts with as many parameters *in all* as the compute-optimal dense
    model beats it if trained on `experts` times the tokens."""
    flops = 1e21
    n, d = LUDZIEJEWSKI.optimum(flops=flops, experts=1, extrapolate=True)
    vocabulary = 50257

    def sizes(layers: float, e: int) -> tuple[float, float]:
        h = 64 * layers
        ends = 2 * h * vocabulary
        return ends + (4 + 9 * e) * layers * h * h, ends + 13 * layers * h * h  # Eqs 9, 10

    depth = np.linspace(1, 100, 100_000)
    active = np.interp(n, sizes(depth, experts)[0], sizes(depth, experts)[1])
    dense = LUDZIEJEWSKI.loss(active=n, tokens=d, experts=1, extrapolate=True)
    assert LUDZIEJEWSKI.loss(active=active, tokens=experts * d, experts=experts, extrapolate=True) < dense


# ---------------------------------------------------------------------------------------------------------- sparsity
@pytest.mark.parametrize(
    ("parameters", "tokens", "sparsity", "loss"),
    [(1e9, 20e9, 0.0, 2.5657), (8e9, 20e9, 0.875, 2.3813), (16e9, 50e9, 0.9375, 2.1990)],
)
def test_losses_by_sparsity(parameters: float, tokens: float, sparsity: float, loss: float) -> None:
    """arXiv:2501.12370, Table 3, worked by hand."""
    assert ABNAR.loss(parameters=parameters, tokens=tokens, sparsity=sparsity) == pytest.approx(loss, rel=1e-4)


def test_sparser_models_are_better_at_equal_budget() -> None:
    """arXiv:2501.12370, its main finding: at a fixed budget the best loss falls as sparsity rises."""
    losses = []
    for sparsity in (0.0, 0.5, 0.75, 0.9, 0.95):
        n, d = ABNAR.optimum(flops=1e21, sparsity=sparsity)
        assert 6 * n * (1 - sparsity) * d == pytest.approx(1e21, rel=1e-9)
        losses.append(float(ABNAR.loss(parameters=n, tokens=d, sparsity=sparsity)))
    assert losses == sorted(losses, reverse=True)


# ---------------------------------------------------------------------------------------------------------- own fits
def test_a_law_of_ones_own() -> None:
    """Without experts' terms Yun's form is Chinchilla's; its coefficients are the caller's."""
    ranges = {"parameters": (1e8, 1e10), "tokens": (1e9, 1e12), "experts": (1, 32)}
    own = YunLaw("mine", a=406.4, alpha=0.34, b=0.0, beta=1.0, c=410.7, gamma=0.28, f=1.69, d=0.0, start=1.8,
                 most=300.0, ranges=ranges)  # fmt: skip
    assert own.loss(parameters=1e9, tokens=5e10, experts=8) == HOFFMANN.loss(parameters=1e9, tokens=5e10)
    with pytest.raises(InvalidInputError, match=r"experts=64 lies outside of mine"):
        own.loss(parameters=1e9, tokens=5e10, experts=64)


# ------------------------------------------------------------------------------------------------------- the borders
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (HOFFMANN.loss, {"parameters": 70e9, "tokens": 1e11}, r"parameters=7e\+10 lies outside of hoffmann.*7e\+07 to"),
    (HOFFMANN.loss, {"parameters": 1e9, "tokens": 1e13}, r"tokens=1e\+13"),
    (BESIROGLU.optimum, {"flops": 5.76e23}, r"flops=5.76e\+23.*6e\+18 to 3e\+21"),
    (BESIROGLU.loss, {"parameters": -1e9, "tokens": 1e10, "extrapolate": True}, r"parameters=-1e\+09 must be"),
    (BESIROGLU.loss, {"parameters": float("nan"), "tokens": 1e10, "extrapolate": True}, r"parameters=nan must be"),
    (BESIROGLU.loss, {"parameters": "many", "tokens": 1e10}, r"parameters='many' is not a number"),
    (CLARK_S_BASE.loss, {"parameters": 1e9, "experts": 1024}, r"experts=1024.*1 to 512"),
    (KRAJEWSKI_64.loss, {"parameters": 1e9, "tokens": 2e10, "granularity": 32}, r"granularity=32.*1 to 16"),
    (LUDZIEJEWSKI.loss, {"active": 1e9, "tokens": 2e10, "experts": 64}, r"experts=64.*1 to 32"),
    (LUDZIEJEWSKI.optimum, {"flops": 1e22, "experts": 8}, r"active=1.4\d*e\+10.*2.7e\+09"),
    (ABNAR.loss, {"parameters": 1e9, "tokens": 2e10, "sparsity": 0.99}, r"sparsity=0.99.*0 to 0.98"),
    (ABNAR.loss, {"parameters": 1e9, "tokens": 2e10, "sparsity": 1.0, "extrapolate": True}, r"must be below 1"),
    (ABNAR.loss, {"parameters": 1e11, "tokens": 1e12, "sparsity": 0.5}, r"flops=3e\+23.*3e\+19 to 1e\+21"),
]


@pytest.mark.parametrize(("call", "given_", "message"), REFUSED, ids=range(len(REFUSED)))
def test_outside_of_its_range_a_law_refuses(call: Any, given_: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(**given_)


def test_one_row_of_an_array_outside_of_the_range_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"parameters=2e\+10"):
        HOFFMANN.loss(parameters=np.array([1e9, 2e10]), tokens=1e11)


def test_laws_by_name() -> None:
    assert laws.law("abnar") is ABNAR
    assert laws.law(ABNAR) is ABNAR
    with pytest.raises(UnknownNameError, match="besiroglu"):
        laws.law("besirolgu")


def test_laws_take_the_sizes_that_they_count() -> None:
    """Mixtral-like: 8 experts, 2 a token, are 4 with one; a dense law refuses them, a fine-grained one its own E."""
    dense = Sizes(total=1.2e9, active=1.2e9, embedding=2e8)
    sparse = Sizes(total=4e9, active=1.2e9, embedding=2e8, router=1e6, num_experts=8, num_experts_per_tok=2)
    assert LUDZIEJEWSKI.loss_of(sparse, tokens=3e10) == LUDZIEJEWSKI.loss(active=1.2e9, tokens=3e10, experts=4)
    assert ABNAR.loss_of(sparse, tokens=3e10) == ABNAR.loss(parameters=4e9, tokens=3e10, sparsity=0.75)
    assert CLARK_S_BASE.loss_of(sparse, tokens=130e9) == CLARK_S_BASE.loss(parameters=0.999e9, experts=4)
    for fit in (LUDZIEJEWSKI, ABNAR):
        assert fit.loss_of(sparse, tokens=3e10) < fit.loss_of(dense, tokens=3e10)
    assert BESIROGLU.loss_of(dense, tokens=3e10) == BESIROGLU.loss(parameters=1.2e9, tokens=3e10)
    with pytest.raises(InvalidInputError, match=r"num_experts=8: besiroglu knows dense models alone"):
        BESIROGLU.loss_of(sparse, tokens=3e10)
    with pytest.raises(InvalidInputError, match=r"= 4: krajewski-64 was fitted at 64 alone"):
        KRAJEWSKI_64.loss_of(sparse, tokens=3e10)
    fine = Sizes(total=2.2e9, active=4e8, embedding=2e8, router=1e6, num_experts=256, num_experts_per_tok=4)
    by_hand = KRAJEWSKI_64.loss(parameters=2.2e9 - 2.01e8, tokens=3e10, granularity=4)
    assert KRAJEWSKI_64.loss_of(fine, tokens=3e10) == by_hand


def test_scalars_and_arrays_agree() -> None:
    n, d = np.array([1e9, 2e9, 5e9]), np.array([2e10, 5e10, 1e11])
    for i in range(3):
        assert BESIROGLU.loss(parameters=n, tokens=d)[i] == pytest.approx(
            BESIROGLU.loss(parameters=n[i], tokens=d[i]), rel=1e-12
        )
    flops = np.array([1e20, 1e21])
    together, apart = ABNAR.optimum(flops=flops, sparsity=0.5), [ABNAR.optimum(flops=f, sparsity=0.5) for f in flops]
    assert together[0] == pytest.approx([a[0] for a in apart], rel=1e-9)
