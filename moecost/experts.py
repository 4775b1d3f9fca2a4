r"""Routing statistics: experts touched, tokens an expert, and how unevenly they are loaded."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float

ROUTER_SKEW: Final = 0.35
"""Spread of the tokens an expert gets from a batch, over their mean, at top-2 of 8, where nothing is fitted.

arXiv:2408.04693, Fig. 6 at 10 sequences: products take 14 % longer than even rows would give.
"""
LOAD_NODES: Final[NDArray[np.float64]] = np.sqrt(3.0) * np.array([-1.0, 0.0, 1.0])
LOAD_WEIGHTS: Final[NDArray[np.float64]] = np.array([1.0, 4.0, 1.0]) / 6.0
"""Gauss-Hermite quadrature of the standard normal law: exact for polynomials of degree 5."""


def experts_touched(*, tokens: FloatLike, num_experts: FloatLike, num_experts_per_tok: FloatLike) -> FloatLike:
    r"""Distinct experts that `tokens` tokens reach under uniform, independent routing.

    .. math:: U = E \left(1 - (1 - k/E)^T\right)

    Notes
    -----
    Elementary; an upper bound where neighbouring tokens share experts.

    >>> [round(float(experts_touched(tokens=t, num_experts=8, num_experts_per_tok=2)), 3) for t in (1, 4, 16)]
    [2.0, 5.469, 7.92]
    """
    return num_experts * (1.0 - (1.0 - num_experts_per_tok / num_experts) ** tokens)


def load_variation(*, num_experts: FloatLike, num_experts_per_tok: FloatLike, router_skew: FloatLike) -> FloatLike:
    r"""Spread of the tokens that the experts of one layer get from one batch, over their mean.

    .. math:: c = s\, \frac{1 - k/E}{3/4}

    `router_skew` s is the spread at top-2 of 8; a dense run (k = E) has none.

    Notes
    -----
    The founding paper's Fig. 11 (arXiv:2408.04693) gives 0.06 to 0.25 averaged over a thousand queries and all
    layers; a single batch in a single layer is more uneven.

    >>> load_variation(num_experts=8, num_experts_per_tok=2, router_skew=0.35)
    0.35
    """
    return router_skew * ((1.0 - num_experts_per_tok / num_experts) / 0.75)


def rows_of_experts(*, mean_rows: FloatLike, variation: FloatLike) -> NDArray[np.float64]:
    """Row counts at the quadrature nodes of a normal load, on a new first axis; `mean_over_loads` weighs them."""
    shape = (-1,) + (1,) * np.ndim(np.asarray(mean_rows) * np.asarray(variation))
    nodes: NDArray[np.float64] = mean_rows * (1.0 + variation * LOAD_NODES.reshape(shape))
    return nodes


def mean_over_loads(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of what is known at the nodes of `rows_of_experts`, along the first axis.

    >>> float(mean_over_loads(np.array([1.0, 2.0, 3.0])))
    2.0
    """
    a, b, c = LOAD_WEIGHTS
    found: NDArray[np.float64] = a * values[0] + b * values[1] + c * values[2]
    return found


def binomial_variation(*, tokens: FloatLike, num_experts: FloatLike, num_experts_per_tok: FloatLike) -> FloatLike:
    r"""Spread of an expert's tokens over their mean under uniform routing, by chance alone.

    .. math:: \sqrt{\frac{1 - k/E}{T k / E}}
    """
    share = num_experts_per_tok / num_experts
    return np.sqrt((1.0 - share) / (tokens * share))


def load_imbalance(*, num_experts: FloatLike, num_experts_per_tok: FloatLike, variation: FloatLike) -> FloatLike:
    r"""Busiest expert over the mean, >= 1.

    .. math:: 1 + c\, \Phi^{-1}\!\left(\frac{E - 0.375}{E + 0.25}\right) \le E / k

    Notes
    -----
    Source: Blom's expected maximum of E normal draws. Valid for more than about 5 tokens an expert.

    >>> c = binomial_variation(tokens=1024.0, num_experts=64, num_experts_per_tok=8)
    >>> round(float(load_imbalance(num_experts=64, num_experts_per_tok=8, variation=c)), 3)
    1.193
    """
    quantile = normal_quantile((np.asarray(num_experts, dtype=np.float64) - 0.375) / (num_experts + 0.25))
    return np.minimum(1.0 + variation * np.maximum(quantile, 0.0), num_experts / num_experts_per_tok)


def group_imbalance(
    *, num_groups: FloatLike, num_experts: FloatLike, num_experts_per_tok: FloatLike, variation: FloatLike
) -> FloatLike:
    r"""Busiest of equal groups of experts over the mean, >= 1: experts vary independently, so groups vary less.

    .. math:: c_{group} = c\, \sqrt{g / E}

    >>> c = 0.35
    >>> one, eight = (group_imbalance(num_groups=g, num_experts=8, num_experts_per_tok=2, variation=c) for g in (1, 8))
    >>> round(float(one), 3), round(float(eight), 3)
    (1.0, 1.502)
    """
    share = np.minimum(1.0, num_groups * num_experts_per_tok / num_experts)  # of its tokens' experts a group can have
    spread = variation * np.sqrt(num_groups / num_experts)
    return load_imbalance(num_experts=num_groups, num_experts_per_tok=share, variation=spread)


def expert_capacity(
    *, tokens: FloatLike, num_experts: FloatLike, num_experts_per_tok: FloatLike, capacity_factor: FloatLike
) -> FloatLike:
    r"""Tokens that an expert takes at most, and is padded to: :math:`\lceil CF\, T k / E \rceil`. [token]

    Source: GShard (arXiv:2006.16668), as Megatron-Core computes it for the tokens of a device group.

    >>> float(expert_capacity(tokens=4096, num_experts=64, num_experts_per_tok=1, capacity_factor=1.25))
    80.0
    """
    return as_float(np.ceil(as_float(capacity_factor) * tokens * num_experts_per_tok / num_experts))


def dropped_fraction(
    *, tokens: FloatLike, num_experts: FloatLike, num_experts_per_tok: FloatLike, capacity_factor: FloatLike
) -> FloatLike:
    r"""Share of routed tokens over the capacity of their expert, under uniform routing.

    .. math:: \frac{\sigma}{\mu} \left(\varphi(z) - z\,(1 - \Phi(z))\right), \quad z = \frac{C - \mu}{\sigma}

    Notes
    -----
    The mean excess of a normal load over C. Simulated routers of 64 to 128 experts drop within a tenth of it.

    >>> round(float(dropped_fraction(tokens=4096.0, num_experts=64, num_experts_per_tok=1, capacity_factor=1.0)), 4)
    0.0495
    """
    shape = {"tokens": as_float(tokens), "num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
    mean = shape["tokens"] * num_experts_per_tok / num_experts
    variation = binomial_variation(**shape)
    z = (expert_capacity(**shape, capacity_factor=capacity_factor) / mean - 1.0) / variation
    density = np.exp(-z * z / 2.0) / np.sqrt(2.0 * np.pi)
    above = np.asarray(_erfc(z / np.sqrt(2.0)), dtype=np.float64) / 2.0
    return as_float(variation * (density - z * above))


_erfc: Final = np.frompyfunc(math.erfc, 1, 1)


def normal_quantile(probability: FloatLike) -> FloatLike:
    r"""Quantile of the standard normal law for 0 < p < 1, absolute error below 4.5e-4.

    Source: Abramowitz and Stegun (1964), 26.2.23. Here so that an estimate need not import scipy.

    >>> round(float(normal_quantile(0.975)), 2)
    1.96
    """
    p = np.asarray(probability, dtype=np.float64)
    t = np.sqrt(-2.0 * np.log(np.minimum(p, 1.0 - p)))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return np.where(p < 0.5, -z, z)[()]
