"""Training and use together: published examples, first-order conditions, and prices worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost.errors import InvalidInputError
from moecost.lifetime import break_even_tokens, cheapest_lifetime, lifetime_optimum, lifetime_usd
from moecost.scaling_laws import HOFFMANN, LUDZIEJEWSKI


def test_smaller_models_of_the_same_quality() -> None:
    """arXiv:2401.00448: as good as Chinchilla-7B at 6B, with 1.18 times the tokens."""
    _, tokens = HOFFMANN.optimum(flops=6 * 7e9 * 4.677e11, extrapolate=True)
    loss = HOFFMANN.loss(parameters=7e9, tokens=tokens)
    assert tokens == pytest.approx(4.677e11, rel=1e-3)
    assert loss == pytest.approx(2.0944, rel=1e-4)
    longer = HOFFMANN.tokens_for(loss=loss, parameters=6e9, extrapolate=True) / tokens
    assert longer == pytest.approx(1.18, rel=1e-2)


@pytest.mark.parametrize(
    ("served", "parameters", "tokens", "saved"), [(1e12, 4.26e9, 8.42e11, 0.108), (1e13, 2.32e9, 2.51e12, 0.49)]
)
def test_models_that_will_be_used(served: float, parameters: float, tokens: float, saved: float) -> None:
    loss = 2.0944
    n, d = lifetime_optimum(HOFFMANN, loss=loss, served_tokens=served)
    assert n == pytest.approx(parameters, rel=5e-3)
    assert d == pytest.approx(tokens, rel=5e-3)
    plain = 6 * 7e9 * 4.677e11 + 2 * 7e9 * served
    assert 1 - (6 * n * d + 2 * n * served) / plain == pytest.approx(saved, abs=5e-3)


@given(st.floats(1e11, 1e14), st.floats(2.0, 2.6))
def test_the_first_order_condition_holds(served: float, loss: float) -> None:
    """At the optimum the elasticities of the loss are as 1 + D_inf / (3 D)."""
    n, d = lifetime_optimum(HOFFMANN, loss=loss, served_tokens=served, extrapolate=True)
    elasticity_n = HOFFMANN.alpha * HOFFMANN.a * n**-HOFFMANN.alpha
    elasticity_d = HOFFMANN.beta * HOFFMANN.b * d**-HOFFMANN.beta
    assert elasticity_n / elasticity_d == pytest.approx(1 + served / (3 * d), rel=1e-3)


def test_what_is_never_served_is_trained_at_the_compute_optimum() -> None:
    n, d = HOFFMANN.optimum(flops=1e21)
    found = lifetime_optimum(HOFFMANN, loss=HOFFMANN.loss(parameters=n, tokens=d), served_tokens=0.0)
    assert found == (pytest.approx(n, rel=1e-3), pytest.approx(d, rel=1e-3))


def test_losses_that_are_never_reached() -> None:
    with pytest.raises(InvalidInputError, match=r"loss=1.6 is never reached"):
        lifetime_optimum(HOFFMANN, loss=1.6, served_tokens=1e12)


def test_scalars_and_arrays_agree() -> None:
    served = np.array([1e12, 1e13])
    found = np.asarray(lifetime_optimum(HOFFMANN, loss=2.0944, served_tokens=served)[0])
    assert found[1] == pytest.approx(lifetime_optimum(HOFFMANN, loss=2.0944, served_tokens=1e13)[0], rel=1e-9)


# ----------------------------------------------------------------------------------------------- prices of one's own
def test_the_cheapest_model_by_prices_of_ones_own() -> None:
    """With FLOPs as prices it is the optimum above."""
    n, d = lifetime_optimum(HOFFMANN, loss=2.0944, served_tokens=1e12)
    found = cheapest_lifetime(
        lambda n, d: float(HOFFMANN.loss(parameters=n, tokens=d, extrapolate=True)),
        target=2.0944,
        training_usd=lambda n, d: 6 * n * d,
        serving_usd=lambda n: 2 * n * 1e12,
        smallest=1e8,
        largest=1e11,
    )
    assert found.parameters == pytest.approx(n, rel=1e-3)
    assert found.tokens == pytest.approx(d, rel=1e-3)
    assert found.usd == found.training_usd + found.serving_usd


@pytest.mark.parametrize("experts", [1, 8])
def test_much_use_asks_for_a_smaller_model_that_is_trained_for_longer(experts: int) -> None:
    """The finding of arXiv:2404.02852, by the joint law of arXiv:2502.05172."""

    def best(served: float) -> tuple[float, float]:
        found = cheapest_lifetime(
            lambda n, d: float(LUDZIEJEWSKI.loss(active=n, tokens=d, experts=experts, extrapolate=True)),
            target=2.3,
            training_usd=lambda n, d: 6 * n * d,
            serving_usd=lambda n: 2 * n * served,
            smallest=1e8,
            largest=1e11,
        )
        return found.parameters, found.tokens

    rarely, much = best(1e9), best(1e13)
    assert much[0] < 0.7 * rarely[0]
    assert much[1] > 1.3 * rarely[1]


def test_a_loss_out_of_reach() -> None:
    with pytest.raises(InvalidInputError, match=r"target=1\.7 is not reached by 1e\+09 parameters"):
        cheapest_lifetime(
            lambda n, d: float(HOFFMANN.loss(parameters=n, tokens=d, extrapolate=True)),
            target=1.7,
            training_usd=lambda n, d: n * d,
            serving_usd=lambda n: n,
            smallest=1e8,
            largest=1e9,
        )


def test_break_even_by_hand() -> None:
    """$2,000 more to train, half a dollar less a million tokens: 4e9 tokens, at which both cost the same."""
    dear, cheap = (3000.0, 0.5), (1000.0, 1.0)

    def break_even(one: tuple[float, float], two: tuple[float, float]) -> float:
        return float(break_even_tokens(training_usd=one[0], usd_per_million_tokens=one[1], other_training_usd=two[0],
                                       other_usd_per_million_tokens=two[1]))  # fmt: skip

    tokens = break_even(dear, cheap)
    assert tokens == 4e9
    costs = [lifetime_usd(training_usd=t, usd_per_million_tokens=c, served_tokens=tokens) for t, c in (dear, cheap)]
    assert costs[0] == costs[1] == 5000
    assert break_even((1000.0, 0.5), (3000.0, 1.0)) == 0  # cheaper in both
    assert break_even((3000.0, 1.0), (1000.0, 0.5)) == np.inf  # dearer in both
    assert break_even((3000.0, 1.0), (1000.0, 1.0)) == np.inf
