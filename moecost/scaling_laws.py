r"""Published laws of the loss of a model by its size and training tokens, and what they say of a budget.

Each law is a frozen set of coefficients with the range it was fitted in; outside of it, it refuses, unless
`extrapolate=True` asks for the number all the same. Losses are in nats a token of each paper's own text and tokenizer:
compare sizes within one law, never losses between two. N counts what the paper counts (`Sizes` tells them apart).

`law(name)` finds one by name; a law with coefficients of one's own is made by calling its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import numpy as np

from moecost.arrays import FloatLike, as_float
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.units import FLOPS_PER_MAC
from moecost.validity import Ranges, positive, within

TRAINING_FLOPS: Final = 3.0 * FLOPS_PER_MAC
"""FLOPs a weight and training token: forward, input gradient, weight gradient (Kaplan et al., arXiv:2001.08361)."""

Point: TypeAlias = tuple[FloatLike, FloatLike]
"""(parameters, training tokens)."""


# ------------------------------------------------------------------------------------------- sums of two power laws
def power_law_loss(
    *, parameters: FloatLike, tokens: FloatLike, e: FloatLike, a: FloatLike, alpha: FloatLike, b: FloatLike,
    beta: FloatLike,
) -> FloatLike:  # fmt: skip
    r"""Loss that falls with parameters and with tokens.

    .. math:: L = E + A N^{-\alpha} + B D^{-\beta}

    Notes
    -----
    Source: Hoffmann et al. 2022 (arXiv:2203.15556), approach 3.

    >>> round(float(power_law_loss(parameters=70e9, tokens=1.4e12, e=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28)), 4)
    1.9366
    """
    return e + a * as_float(parameters) ** (-alpha) + b * as_float(tokens) ** (-beta)


def power_law_optimum(*, flops: FloatLike, a: FloatLike, alpha: FloatLike, b: FloatLike, beta: FloatLike) -> Point:
    r"""Parameters and tokens of the least loss at a training budget C = 6 N D.

    .. math:: N^* = G (C/6)^{\beta/(\alpha+\beta)}, \quad D^* = (C/6) / N^*, \quad
              G = \left(\frac{\alpha A}{\beta B}\right)^{1/(\alpha+\beta)}

    Notes
    -----
    Source: Hoffmann et al. 2022 (arXiv:2203.15556), approach 3.

    >>> n, d = power_law_optimum(flops=6e20, a=1.0, alpha=0.3, b=1.0, beta=0.3)  # alike: as many tokens as parameters
    >>> bool(abs(n / d - 1) < 1e-12)
    True
    """
    product = as_float(flops) / TRAINING_FLOPS
    parameters = (alpha * a / (beta * b)) ** (1.0 / (alpha + beta)) * product ** (beta / (alpha + beta))
    return parameters, product / parameters


def compute_optimal(
    loss: Callable[[FloatLike, FloatLike], FloatLike],
    *,
    flops: FloatLike,
    flops_per_parameter: FloatLike = TRAINING_FLOPS,
    smallest: float = 1e6,
    largest: float = 1e14,
) -> Point:
    """Parameters and tokens of the least loss at a training budget, for any law.

    Parameters
    ----------
    loss : of (parameters, tokens), with one minimum along the budget.
    flops : budget. [FLOP]
    flops_per_parameter : FLOPs a parameter and token; less than 6 where part of the parameters is idle.
    smallest, largest : parameters between which is searched.

    >>> n, d = compute_optimal(lambda n, d: BESIROGLU.loss(parameters=n, tokens=d, extrapolate=True), flops=5.76e23)
    >>> round(float(n) / 1e9, 1), round(float(d) / 1e9)
    (72.2, 1329)
    """
    positive(flops=flops, flops_per_parameter=flops_per_parameter)
    product = as_float(flops) / flops_per_parameter
    parameters = where_least(lambda n: loss(n, product / n), smallest, largest, product)
    return parameters, product / parameters


def where_least(
    value: Callable[[FloatLike], FloatLike], low: FloatLike, high: FloatLike, like: FloatLike = 0.0
) -> FloatLike:
    """Where a function with one minimum between two positive numbers has it; an array of the shape of `like`.

    Golden section on the logarithm; as near as the function's own rounding lets it be told, about 1e-7.

    >>> round(float(where_least(lambda x: (x - 3.0) ** 2, 1.0, 10.0)), 6)
    3.0
    """
    golden = (np.sqrt(5.0) - 1.0) / 2.0
    left, right = (np.log(x) + np.zeros(np.shape(like)) for x in (low, high))
    for _ in range(80):
        near, far = right - golden * (right - left), left + golden * (right - left)
        lower = np.asarray(value(np.exp(near))) < np.asarray(value(np.exp(far)))
        left, right = np.where(lower, left, near), np.where(lower, far, right)
    return as_float(np.exp((left + right) / 2.0))


# --------------------------------------------------------------------------------------------------- what laws count
@dataclass(frozen=True, slots=True)
class Sizes:
    """What the laws know of a model.

    Attributes
    ----------
    total, active : parameters, and those that a token uses; embedding and head included.
    embedding : of both, those of embedding and head.
    router : of both, those of the routers.
    expansion : routed experts over those that a token uses, 1 for a dense model.
    num_experts, num_experts_per_tok : of a sparse layer; 1 and 1 for a dense model.
    """

    total: FloatLike
    active: FloatLike
    embedding: FloatLike
    router: FloatLike = 0.0
    num_experts: FloatLike = 1.0
    num_experts_per_tok: FloatLike = 1.0

    @property
    def expansion(self) -> FloatLike:
        """Routed experts over those that a token uses."""
        return as_float(self.num_experts) / self.num_experts_per_tok

    @property
    def is_dense(self) -> bool:
        """Every token uses every parameter."""
        return bool(np.all(np.asarray(self.num_experts) <= 1.0))


class LossLaw(Protocol):
    """A law that tells the loss of a model from its sizes."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Loss of a model after so many training tokens. [nat/token]"""


# ------------------------------------------------------------------------------------------------------ dense models
HOFFMANN_RANGE: Final[Ranges] = MappingProxyType(
    {"parameters": (70e6, 16e9), "tokens": (5e9, 5e11), "flops": (6e18, 3e21)}
)
"""More than 400 models; parameters and FLOPs include embeddings."""


@dataclass(frozen=True, slots=True)
class ChinchillaLaw:
    r"""Loss of a dense model: :math:`L = E + A N^{-\alpha} + B D^{-\beta}`, N with embeddings.

    Notes
    -----
    Source: Hoffmann et al. 2022 (arXiv:2203.15556). Their approach 3 as rounded in the paper asks for 93 tokens a
    parameter at their own budget, the unrounded one for 59; the refit of Besiroglu et al. 2024 (arXiv:2404.10102) for
    18, as their approaches 1 and 2 do.
    """

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float
    ranges: Ranges = field(default_factory=lambda: HOFFMANN_RANGE, repr=False, hash=False)
    source: str = ""

    def loss(self, *, parameters: FloatLike, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Loss after training. [nat/token]"""
        within(self.name, self.ranges, extrapolate=extrapolate, parameters=parameters, tokens=tokens)
        return power_law_loss(
            parameters=parameters, tokens=tokens, e=self.e, a=self.a, alpha=self.alpha, b=self.b, beta=self.beta
        )

    def optimum(self, *, flops: FloatLike, extrapolate: bool = False) -> Point:
        """Parameters and tokens of the least loss at a training budget."""
        within(self.name, self.ranges, extrapolate=extrapolate, flops=flops)
        return power_law_optimum(flops=flops, a=self.a, alpha=self.alpha, b=self.b, beta=self.beta)

    def tokens_for(self, *, loss: FloatLike, parameters: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Training tokens after which a model reaches a loss; infinite where it never does. [token]"""
        positive(loss=loss)
        within(self.name, self.ranges, extrapolate=extrapolate, parameters=parameters)
        left = as_float(loss) - self.e - self.a * as_float(parameters) ** (-self.alpha)
        tokens = (self.b / np.where(left > 0.0, left, np.nan)) ** (1.0 / self.beta)
        within(self.name, self.ranges, extrapolate=extrapolate, tokens=tokens[np.isfinite(tokens)])
        return as_float(np.where(np.isfinite(tokens), tokens, np.inf))

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Of a dense model; a mixture is refused, as the law knows none."""
        if not sizes.is_dense:
            raise InvalidInputError(
                f"num_experts={np.max(sizes.num_experts):g}: {self.name} knows dense models alone; use a law of "
                "mixtures (ludziejewski, abnar, clark-s-base)"
            )
        return self.loss(parameters=sizes.total, tokens=tokens, extrapolate=extrapolate)


HOFFMANN: Final = ChinchillaLaw(
    "hoffmann", 1.69, 406.4, 410.7, 0.34, 0.28, source="arXiv:2203.15556, approach 3, as rounded in the paper"
)
HOFFMANN_UNROUNDED: Final = ChinchillaLaw(
    "hoffmann-unrounded", 1.6934, 406.4, 410.7, 0.3392, 0.2849, source="arXiv:2203.15556, approach 3, from its source"
)
BESIROGLU: Final = ChinchillaLaw(
    "besiroglu", 1.8172, 482.01, 2085.43, 0.3478, 0.3658, source="arXiv:2404.10102: refit to 240 points of the figure"
)


# ---------------------------------------------------------------------------------------------------- mixtures: Clark
def effective_experts(*, experts: FloatLike, start: FloatLike, most: FloatLike) -> FloatLike:
    r"""Experts as they count for the loss: more at first, then ever less.

    .. math:: \frac{1}{\hat E} = \frac{1}{E - 1 + (1/E_{start} - 1/E_{max})^{-1}} + \frac{1}{E_{max}}

    Notes
    -----
    Source: Clark et al. 2022 (arXiv:2202.01169); used again by arXiv:2502.05172.

    >>> [round(float(effective_experts(experts=e, start=1.847, most=314.478)), 3) for e in (1, 64)]
    [1.847, 53.769]
    """
    shifted = as_float(experts) - 1.0 + 1.0 / (1.0 / start - 1.0 / most)
    return 1.0 / (1.0 / shifted + 1.0 / most)


CLARK_TOKENS: Final = 130e9
CLARK_RANGE: Final[Ranges] = MappingProxyType(
    {"parameters": (15e6, 1.3e9), "experts": (1, 512), "tokens": (CLARK_TOKENS, CLARK_TOKENS)}
)


@dataclass(frozen=True, slots=True)
class ClarkLaw:
    r"""Loss of a routed model after 130e9 tokens, by its base size N and its experts E (one a token).

    .. math:: \log_{10} L = a \log_{10} N + b \log_{10} \hat E + c \log_{10} N \log_{10} \hat E + d

    Notes
    -----
    Source: Clark et al. 2022 (arXiv:2202.01169), Table 3. That logarithms are decimal follows from the sizes it prints:
    routing stops to help at 10^(-b/c), 1.0e12 for S-BASE against 937e9. The tokens are fixed: that dense models win
    above some size is an artefact of it (arXiv:2402.07871).
    """

    name: str
    a: float
    b: float
    c: float
    d: float
    start: float
    most: float
    ranges: Ranges = field(default_factory=lambda: CLARK_RANGE, repr=False, hash=False)
    source: str = "arXiv:2202.01169, Table 3"

    def loss(
        self,
        *,
        parameters: FloatLike,
        experts: FloatLike,
        tokens: FloatLike = CLARK_TOKENS,
        extrapolate: bool = False,
    ) -> FloatLike:
        """Loss; `parameters` are those of the dense base model. [nat/token]"""
        within(self.name, self.ranges, extrapolate=extrapolate, parameters=parameters, experts=experts)
        within(self.name, self.ranges, tokens=tokens)  # the law has no term for them
        n = np.log10(as_float(parameters))
        e = np.log10(effective_experts(experts=experts, start=self.start, most=self.most))
        return 10.0 ** (self.a * n + self.b * e + self.c * n * e + self.d)

    def effective_parameters(
        self, *, parameters: FloatLike, experts: FloatLike, extrapolate: bool = False
    ) -> FloatLike:
        """Size of the dense model with the same loss."""
        wanted = np.log10(self.loss(parameters=parameters, experts=experts, extrapolate=extrapolate))
        one = np.log10(effective_experts(experts=1.0, start=self.start, most=self.most))
        return 10.0 ** ((wanted - self.d - self.b * one) / (self.a + self.c * one))

    @property
    def cutoff(self) -> float:
        """Base size above which more experts would no longer help: :math:`10^{-b/c}`."""
        return float(10.0 ** (-self.b / self.c))

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Assumed: the base size is the active one without embedding and head, and k experts of E count as E / k."""
        base = as_float(sizes.active) - sizes.embedding - sizes.router
        return self.loss(parameters=base, experts=sizes.expansion, tokens=tokens, extrapolate=extrapolate)


CLARK_S_BASE: Final = ClarkLaw("clark-s-base", -0.082, -0.108, 0.009, 1.104, 1.847, 314.478)
CLARK_RL_R: Final = ClarkLaw("clark-rl-r", -0.083, -0.126, 0.012, 1.111, 1.880, 469.982)
CLARK_HASH: Final = ClarkLaw("clark-hash", -0.087, -0.136, 0.012, 1.157, 4.175, 477.741)


# ------------------------------------------------------------------------------------------- mixtures: fine-grained
KRAJEWSKI_RANGE: Final[Ranges] = MappingProxyType(
    {"parameters": (129e6, 3.7e9), "tokens": (16e9, 130e9), "granularity": (1, 16)}
)
ROUTING_FLOPS: Final = 14.0
"""FLOPs of routing a width, expert, token, forward and backward: 6 of the router, 8 of dispatch and combine.

arXiv:2402.07871, appendix E, which holds 6 to 20 for possible.
"""


def fine_grained_parameters(*, hidden_size: FloatLike, num_layers: FloatLike, expansion: FloatLike) -> FloatLike:
    r"""Parameters of a mixture by its shape, without embeddings and routers: :math:`N = h^2 (8 E + 4) L`.

    Source: arXiv:2402.07871. E is the size of all experts over that of one dense feed-forward (4 h wide).

    >>> float(fine_grained_parameters(hidden_size=1024, num_layers=16, expansion=1))  # dense: 12 h^2 L
    201326592.0
    """
    return hidden_size * as_float(hidden_size) * (8.0 * expansion + 4.0) * num_layers


def fine_grained_flops(
    *,
    hidden_size: FloatLike,
    num_layers: FloatLike,
    expansion: FloatLike,
    granularity: FloatLike,
    tokens: FloatLike,
    routing_flops: FloatLike = ROUTING_FLOPS,
) -> FloatLike:
    r"""Training FLOPs of a mixture of G-fold finer experts, routing included. [FLOP]

    .. math:: F = (12 h^2 \cdot 6 + h\, E\, G\, c_r)\, D L

    Notes
    -----
    Source: arXiv:2402.07871, Eqs 10 and 11. G is the width of a dense feed-forward over that of an expert; there are
    G E experts and G a token.

    >>> f = fine_grained_flops(hidden_size=512.0, num_layers=1, expansion=64, granularity=8, tokens=1.0)
    >>> float(f)
    22544384.0
    """
    h = as_float(hidden_size)
    return (12.0 * h * h * TRAINING_FLOPS + h * expansion * granularity * routing_flops) * tokens * num_layers


@dataclass(frozen=True, slots=True)
class KrajewskiLaw:
    r"""Loss of a mixture of fine-grained experts.

    .. math:: L = c + (g\, G^{-\gamma} + a) N^{-\alpha} + b D^{-\beta}

    N: all parameters but embeddings and routers. `expansion` is the one that the coefficients were fitted at.

    Notes
    -----
    Source: Krajewski et al. 2024 (arXiv:2402.07871), Tables 1 and 8. With the three digits that are printed, losses
    come out 0.01 to 0.02 below the paper's own table: compare differences.
    """

    name: str
    a: float
    alpha: float
    b: float
    beta: float
    g: float
    gamma: float
    c: float
    expansion: float
    ranges: Ranges = field(default_factory=lambda: KRAJEWSKI_RANGE, repr=False, hash=False)
    source: str = "arXiv:2402.07871"

    def loss(
        self, *, parameters: FloatLike, tokens: FloatLike, granularity: FloatLike = 1.0, extrapolate: bool = False
    ) -> FloatLike:
        """Loss after training. [nat/token]"""
        given = {"parameters": parameters, "tokens": tokens, "granularity": granularity}
        within(self.name, self.ranges, extrapolate=extrapolate, **given)
        finer = self.g * as_float(granularity) ** (-self.gamma)
        return power_law_loss(
            parameters=parameters, tokens=tokens, e=self.c, a=finer + self.a, alpha=self.alpha, b=self.b, beta=self.beta
        )

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Assumed: a token's k experts are together as wide as one dense feed-forward, so the granularity is k."""
        if not np.allclose(sizes.expansion, self.expansion, rtol=0.01):
            raise InvalidInputError(
                f"num_experts / num_experts_per_tok = {np.max(sizes.expansion):g}: {self.name} was fitted at "
                f"{self.expansion:g} alone; use ludziejewski, abnar or clark-s-base"
            )
        parameters = as_float(sizes.total) - sizes.embedding - sizes.router
        granularity = sizes.num_experts_per_tok
        return self.loss(parameters=parameters, tokens=tokens, granularity=granularity, extrapolate=extrapolate)


KRAJEWSKI_64: Final = KrajewskiLaw("krajewski-64", 18.1, 0.115, 30.8, 0.147, 2.1, 0.58, 0.47, 64)
KRAJEWSKI_16: Final = KrajewskiLaw("krajewski-16", 19.64, 0.124, 57.07, 0.169, 1.18, 0.986, 0.472, 16)
KRAJEWSKI_DENSE: Final = KrajewskiLaw("krajewski-dense", 16.3, 0.126, 26.7, 0.127, 0.0, 1.0, 0.47, 1)


# -------------------------------------------------------------------------------------------------- mixtures: joint
LUDZIEJEWSKI_RANGE: Final[Ranges] = MappingProxyType({"active": (1e6, 2.7e9), "experts": (1, 32)})
"""The paper gives the largest models; the lower bound here only catches a slip of units. Tokens: to a few hundred a
parameter."""


@dataclass(frozen=True, slots=True)
class JointLaw:
    r"""Loss of dense models and mixtures by active parameters, tokens and experts together.

    .. math:: L = a \hat E^{\delta} N_{act}^{\alpha + \gamma \ln \hat E}
              + b \hat E^{\omega} D^{\beta + \zeta \ln \hat E} + c

    Active parameters include embedding and head; of E experts each token uses one.

    Notes
    -----
    Source: Ludziejewski et al. 2025 (arXiv:2502.05172), Table 3: over 280 runs of 1 to 32 experts.
    """

    name: str
    a: float
    alpha: float
    delta: float
    gamma: float
    b: float
    beta: float
    omega: float
    zeta: float
    start: float
    most: float
    c: float
    ranges: Ranges = field(default_factory=lambda: LUDZIEJEWSKI_RANGE, repr=False, hash=False)
    source: str = "arXiv:2502.05172, Table 3"

    def reduced(self, experts: FloatLike) -> tuple[FloatLike, FloatLike, FloatLike, FloatLike]:
        """(m, mu, n, nu) of `L = m N^mu + n D^nu + c` at a number of experts (their Table 4)."""
        e = effective_experts(experts=experts, start=self.start, most=self.most)
        log_e = np.log(e)
        m, n = self.a * e**self.delta, self.b * e**self.omega
        return m, self.alpha + self.gamma * log_e, n, self.beta + self.zeta * log_e

    def loss(self, *, active: FloatLike, tokens: FloatLike, experts: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Loss after training. [nat/token]"""
        within(self.name, self.ranges, extrapolate=extrapolate, active=active, experts=experts, tokens=tokens)
        m, mu, n, nu = self.reduced(experts)
        return power_law_loss(parameters=active, tokens=tokens, e=self.c, a=m, alpha=-mu, b=n, beta=-nu)

    def optimum(self, *, flops: FloatLike, experts: FloatLike, extrapolate: bool = False) -> Point:
        """Active parameters and tokens of the least loss at a training budget of 6 N_act D."""
        positive(flops=flops)
        within(self.name, self.ranges, extrapolate=extrapolate, experts=experts)
        m, mu, n, nu = self.reduced(experts)
        active, tokens = power_law_optimum(flops=flops, a=m, alpha=-mu, b=n, beta=-nu)
        within(self.name, self.ranges, extrapolate=extrapolate, active=active)
        return active, tokens

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Assumed: k experts of E count as E / k with one a token."""
        return self.loss(active=sizes.active, tokens=tokens, experts=sizes.expansion, extrapolate=extrapolate)


LUDZIEJEWSKI: Final = JointLaw(
    "ludziejewski",
    a=35.91,
    alpha=-0.1889,
    delta=-0.2285,
    gamma=0.0098,
    b=35.98,
    beta=-0.1775,
    omega=0.5529,
    zeta=-0.0259,
    start=2.0732,
    most=290.4521,
    c=1.3637,
)


# ----------------------------------------------------------------------------------------------- mixtures: sparsity
ABNAR_RANGE: Final[Ranges] = MappingProxyType({"sparsity": (0.0, 0.98), "flops": (3e19, 1e21)})


@dataclass(frozen=True, slots=True)
class AbnarLaw:
    r"""Loss by all parameters N, tokens D and sparsity S = (E - k) / E.

    .. math:: L = \frac{a}{N^{\alpha}} + \frac{b}{D^{\beta}} + \frac{c}{(1-S)^{\lambda}}
              + \frac{d}{(1-S)^{\delta} N^{\gamma}} + e

    Notes
    -----
    Source: Abnar et al. 2025 (arXiv:2501.12370), Table 3: budgets of 3e19 to 1e21 FLOP, counted here as
    6 N (1 - S) D. Memory and communication are ignored; they find transfer of sparse models worse at equal loss.
    """

    name: str
    a: float
    alpha: float
    b: float
    beta: float
    c: float
    lam: float
    d: float
    delta: float
    gamma: float
    e: float
    ranges: Ranges = field(default_factory=lambda: ABNAR_RANGE, repr=False, hash=False)
    source: str = "arXiv:2501.12370, Table 3"

    def loss(
        self, *, parameters: FloatLike, tokens: FloatLike, sparsity: FloatLike, extrapolate: bool = False
    ) -> FloatLike:
        """Loss after training. [nat/token]"""
        within(self.name, self.ranges, parameters=parameters, tokens=tokens)
        within(self.name, self.ranges, extrapolate=extrapolate, sparsity=sparsity)
        _below_one(sparsity)
        n, dense = as_float(parameters), 1.0 - as_float(sparsity)
        within(self.name, self.ranges, extrapolate=extrapolate, flops=TRAINING_FLOPS * n * dense * tokens)
        return (
            self.a * n ** (-self.alpha)
            + self.b * as_float(tokens) ** (-self.beta)
            + self.c * dense ** (-self.lam)
            + self.d * dense ** (-self.delta) * n ** (-self.gamma)
            + self.e
        )

    def optimum(self, *, flops: FloatLike, sparsity: FloatLike, extrapolate: bool = False) -> Point:
        """All parameters and tokens of the least loss at a budget of 6 N (1 - S) D."""
        within(self.name, self.ranges, extrapolate=extrapolate, flops=flops, sparsity=sparsity)
        _below_one(sparsity)
        return compute_optimal(
            lambda n, d: self.loss(parameters=n, tokens=d, sparsity=sparsity, extrapolate=True),
            flops=flops,
            flops_per_parameter=TRAINING_FLOPS * (1.0 - as_float(sparsity)),
        )

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Assumed: N counts all parameters, embedding and head included."""
        sparsity = 1.0 - 1.0 / as_float(sizes.expansion)
        return self.loss(parameters=sizes.total, tokens=tokens, sparsity=sparsity, extrapolate=extrapolate)


def _below_one(sparsity: FloatLike) -> None:
    if np.any(np.asarray(sparsity) >= 1.0):
        raise InvalidInputError(f"sparsity={np.max(sparsity):g} must be below 1: some expert has to be used")


ABNAR: Final = AbnarLaw(
    "abnar",
    a=16612.50,
    alpha=0.5962,
    b=5455.67,
    beta=0.3954,
    c=0.4598,
    lam=-0.1666,
    d=17.26,
    delta=0.1603,
    gamma=0.1595,
    e=0.94,
)


# ---------------------------------------------------------------------------------------------- mixtures: own fits
def mixture_parameters(
    *, dense: FloatLike, experts: FloatLike, experts_per_token: FloatLike, feed_forward_share: FloatLike = 2.0 / 3.0
) -> Point:
    r"""(all, active) parameters of a dense model whose every second feed-forward becomes a mixture.

    .. math:: N \left(1 + (E - 1)\tfrac{a}{2}\right), \quad N \left(1 + (k - 1)\tfrac{a}{2}\right)

    `feed_forward_share` a is that of feed-forwards in the dense model.

    Source: Yun et al. 2024 (arXiv:2404.02852), appendix C, with a = 2/3: (1 + (E - 1) / 3) N.

    >>> total, active = mixture_parameters(dense=3e9, experts=8, experts_per_token=2)
    >>> round(float(total) / 1e9, 3), round(float(active) / 1e9, 3)
    (10.0, 4.0)
    """
    each = as_float(dense) * feed_forward_share / 2.0
    return dense + (as_float(experts) - 1.0) * each, dense + (as_float(experts_per_token) - 1.0) * each


@dataclass(frozen=True, slots=True)
class YunLaw:
    r"""Clark's law with the tokens added; the coefficients were never published, so they are the user's own fit.

    .. math:: \ln L = \ln\left(\frac{A}{N^{\alpha}} + \frac{B}{\hat E^{\beta}} + \frac{C}{D^{\gamma}} + F\right)
              + d \ln N \ln \hat E

    Notes
    -----
    Source: Yun et al. 2024 (arXiv:2404.02852). Assumed: natural logarithms. N is the base size, E the experts of every
    second layer.
    """

    name: str
    a: float
    alpha: float
    b: float
    beta: float
    c: float
    gamma: float
    f: float
    d: float
    start: float
    most: float
    ranges: Ranges = field(repr=False, hash=False)
    source: str = "form of arXiv:2404.02852, coefficients of one's own"

    def loss(
        self, *, parameters: FloatLike, tokens: FloatLike, experts: FloatLike, extrapolate: bool = False
    ) -> FloatLike:
        """Loss after training. [nat/token]"""
        given = {"parameters": parameters, "tokens": tokens, "experts": experts}
        within(self.name, self.ranges, extrapolate=extrapolate, **given)
        n, t = as_float(parameters), as_float(tokens)
        e = effective_experts(experts=experts, start=self.start, most=self.most)
        terms = self.a * n ** (-self.alpha) + self.b * e ** (-self.beta) + self.c * t ** (-self.gamma) + self.f
        return terms * np.exp(self.d * np.log(n) * np.log(e))

    def loss_of(self, sizes: Sizes, *, tokens: FloatLike, extrapolate: bool = False) -> FloatLike:
        """Assumed: the base size is the active one without embedding and head, and k experts of E count as E / k."""
        base = as_float(sizes.active) - sizes.embedding - sizes.router
        return self.loss(parameters=base, tokens=tokens, experts=sizes.expansion, extrapolate=extrapolate)


# --------------------------------------------------------------------------------------------------------- by name
LAWS: Final[Mapping[str, LossLaw]] = MappingProxyType(
    {
        one.name: one
        for one in (
            HOFFMANN,
            HOFFMANN_UNROUNDED,
            BESIROGLU,
            CLARK_S_BASE,
            CLARK_RL_R,
            CLARK_HASH,
            KRAJEWSKI_64,
            KRAJEWSKI_16,
            KRAJEWSKI_DENSE,
            LUDZIEJEWSKI,
            ABNAR,
        )
    }
)
"""The laws with published coefficients, by name."""


def law(name: str | LossLaw) -> LossLaw:
    """A law by its name, or the law itself.

    >>> law("ludziejewski").name
    'ludziejewski'
    """
    if not isinstance(name, str):
        return name
    if name not in LAWS:
        raise UnknownNameError("scaling law", name, LAWS, f"Known: {', '.join(LAWS)}.")
    return LAWS[name]
