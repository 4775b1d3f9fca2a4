r"""A model's whole life: training and then use, and which of two models is the cheaper one for how much use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from moecost.arrays import FloatLike, as_float
from moecost.errors import InvalidInputError
from moecost.scaling_laws import TRAINING_FLOPS, ChinchillaLaw, Point, where_least
from moecost.units import FLOPS_PER_MAC, MEGA
from moecost.validity import Ranges, positive, within

SERVING_FLOPS: Final = float(FLOPS_PER_MAC)
"""FLOPs a weight and token that is read or written in use."""
SARDANA_RANGE: Final[Ranges] = MappingProxyType({"parameters": (150e6, 6e9), "tokens_per_parameter": (10, 10_000)})
"""Where Sardana et al. 2023 (arXiv:2401.00448) checked that smaller models trained for longer keep to the law."""


def lifetime_usd(*, training_usd: FloatLike, usd_per_million_tokens: FloatLike, served_tokens: FloatLike) -> FloatLike:
    """Dollars of training and of all use. [$]

    >>> lifetime_usd(training_usd=1000.0, usd_per_million_tokens=0.5, served_tokens=4e9)
    3000.0
    """
    return training_usd + usd_per_million_tokens * served_tokens / MEGA


def break_even_tokens(
    *, training_usd: FloatLike, usd_per_million_tokens: FloatLike, other_training_usd: FloatLike,
    other_usd_per_million_tokens: FloatLike,
) -> FloatLike:  # fmt: skip
    r"""Served tokens from which a model that was dearer to train is the cheaper one.

    .. math:: \frac{C_1 - C_2}{c_2 - c_1}

    Parameters
    ----------
    training_usd, usd_per_million_tokens : of the model that is dearer to train and cheaper to use.
    other_training_usd, other_usd_per_million_tokens : of the other one.

    Returns
    -------
    Tokens; 0 where it is no dearer to train after all, infinite where its use is no cheaper. [token]

    Notes
    -----
    Source: Yun et al. 2024 (arXiv:2404.02852) weigh training against use so.

    >>> float(break_even_tokens(training_usd=3000.0, usd_per_million_tokens=0.5, other_training_usd=1000.0,
    ...                         other_usd_per_million_tokens=1.0))
    4000000000.0
    """
    dearer = np.maximum(as_float(training_usd) - other_training_usd, 0.0)
    saved = as_float(other_usd_per_million_tokens) - usd_per_million_tokens
    return as_float(np.where(saved > 0.0, MEGA * dearer / np.where(saved > 0.0, saved, 1.0), np.inf))


def lifetime_optimum(
    law: ChinchillaLaw,
    *,
    loss: FloatLike,
    served_tokens: FloatLike,
    usd_per_training_flop: FloatLike = 1.0,
    usd_per_serving_flop: FloatLike = 1.0,
    extrapolate: bool = False,
) -> Point:
    r"""Parameters and training tokens of the cheapest dense model of a given loss, training and use together.

    .. math:: \min_{N}\; 6 N D\, p_t + 2 N D_{inf}\, p_s \quad \text{with } L(N, D) = L_0

    Parameters
    ----------
    law : of dense models.
    loss : that the model has to reach. [nat/token]
    served_tokens : read and written over its life, D_inf. [token]
    usd_per_training_flop, usd_per_serving_flop : prices, utilization included; equal ones minimize FLOPs.

    Notes
    -----
    Source: Sardana et al. 2023 (arXiv:2401.00448); checked there for 150M to 6B parameters and 10 to 10,000 tokens
    each (`SARDANA_RANGE`).
    """
    positive(loss=loss, usd_per_training_flop=usd_per_training_flop)
    positive(zero=True, served_tokens=served_tokens, usd_per_serving_flop=usd_per_serving_flop)
    if np.any(np.asarray(loss) <= law.e):
        raise InvalidInputError(f"loss={np.min(loss):g} is never reached: {law.name} ends at {law.e:g}; ask for more")
    target, served = np.broadcast_arrays(as_float(loss), as_float(served_tokens))
    least = (law.a / (target - law.e)) ** (1.0 / law.alpha)  # with tokens without end

    def usd(parameters: FloatLike) -> FloatLike:
        tokens = law.tokens_for(loss=target, parameters=parameters, extrapolate=True)
        training = TRAINING_FLOPS * parameters * tokens * usd_per_training_flop
        return training + SERVING_FLOPS * parameters * served * usd_per_serving_flop

    parameters = where_least(usd, least * (1.0 + 1e-9), least * 1e4, target)
    tokens = law.tokens_for(loss=target, parameters=parameters, extrapolate=True)
    within("arXiv:2401.00448", SARDANA_RANGE, extrapolate=extrapolate, parameters=parameters,
           tokens_per_parameter=tokens / parameters)  # fmt: skip
    return parameters, tokens


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The cheapest model of a loss: its size, its training tokens, and what training and use cost. [$]"""

    parameters: float
    tokens: float
    training_usd: float
    serving_usd: float

    @property
    def usd(self) -> float:
        """Of both. [$]"""
        return self.training_usd + self.serving_usd


MOST_TOKENS: Final = 1e18
"""Bound of the search for the tokens that a loss takes."""


def cheapest_lifetime(
    loss: Callable[[float, float], float],
    *,
    target: float,
    training_usd: Callable[[float, float], float],
    serving_usd: Callable[[float], float],
    smallest: float,
    largest: float,
) -> Lifetime:
    """The size at which a model of a given loss is cheapest over its life, by a law and prices of one's own.

    Call it once for each number of experts to choose among them (arXiv:2404.02852): fewer parameters that are trained
    for longer cost more to train and less to use. The law's coefficients were never published there: bring your own.

    Parameters
    ----------
    loss : of (parameters, training tokens), falling with both.
    target : loss that has to be reached. [nat/token]
    training_usd : of (parameters, tokens). [$]
    serving_usd : of parameters, for all of its use; `moecost.serving` prices a token. [$]
    smallest, largest : sizes between which is searched, on which the sum has one minimum.

    Raises
    ------
    InvalidInputError : not even the largest model reaches the loss.
    """
    positive(target=target, smallest=smallest, largest=largest)
    if not loss(largest, MOST_TOKENS) <= target:
        raise InvalidInputError(
            f"target={target:g} is not reached by {largest:g} parameters; ask for more, or largest="
        )

    def tokens_for(parameters: float) -> float:
        low, high = 0.0, float(np.log(MOST_TOKENS))
        if loss(parameters, MOST_TOKENS) > target:
            return float("inf")
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (middle, high) if loss(parameters, float(np.exp(middle))) > target else (low, middle)
        return float(np.exp(high))

    def usd(parameters: FloatLike) -> FloatLike:
        n = float(parameters)
        tokens = tokens_for(n)
        # without end for sizes that are too small: the smaller the worse, so that the search leaves them
        return training_usd(n, tokens) + serving_usd(n) if np.isfinite(tokens) else 1e300 / n

    n = float(where_least(usd, smallest, largest))
    tokens = tokens_for(n)
    return Lifetime(n, tokens, training_usd(n, tokens), serving_usd(n))
