"""FLOPs of one sequence through a model, as PyTorch's counter counts them: matrix products and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moecost.arrays import FloatLike, as_float
from moecost.quantities import AttentionCore, Model, ScanCore
from moecost.units import FLOPS_PER_MAC

BACKWARD_FACTOR = 2
"""Two products backward (for the input and for the weight, or for both factors of a product) to one forward."""

SCAN_FLOPS_PER_STATE = 6
"""Decay, update and read of one state, a multiply-add each."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one sequence, all weights trainable; `by_part` splits the forward pass."""

    forward: float
    backward: float
    by_part: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.forward + self.backward


def query_key_pairs(tokens: float, window: int | None, causal: bool) -> float:
    """Scores that are computed: the full square, half of it when causal, less beyond a window.

    >>> query_key_pairs(512, None, causal=False), query_key_pairs(512, None, causal=True)
    (262144, 131072.0)
    >>> query_key_pairs(512, 128, causal=True)  # 128 * 512 - 128**2 / 2
    57344.0
    """
    if not causal:
        return tokens * tokens
    seen = tokens if window is None else min(window, tokens)
    return seen * tokens - seen * seen / 2


def attention_flops(core: AttentionCore, tokens: float, causal: bool) -> float:
    """Scores and weighted values of one layer, forward: `2 a (d_qk + d_v)` a query-key pair. [FLOP]

    Eager attention computes the full square, windows included (`causal=False`).
    """
    per_pair = FLOPS_PER_MAC * core.num_heads * (core.qk_head_dim + core.v_head_dim)
    return per_pair * query_key_pairs(tokens, core.window, causal)


def scan_flops(core: ScanCore, tokens: float) -> float:
    """Recurrence and convolution of one layer, forward, as the recurrent form needs them. [FLOP]"""
    states = SCAN_FLOPS_PER_STATE * core.inner_size * core.state_size
    return tokens * (states + FLOPS_PER_MAC * core.conv_channels * core.conv_kernel)


def count(model: Model, tokens: int, *, causal: bool = True) -> Flops:
    """FLOPs of one sequence of `tokens`: `2` a weight and token forward, experts by top-k, the head included.

    The embedding look-up is free. Attention as `attention_flops`; backward twice the forward, without recomputation.
    """
    parts: dict[str, float] = {}

    def add(part: str, flops: float) -> None:
        parts[part] = parts.get(part, 0) + flops

    for group in model.layers:
        for matrix in group.matrices:
            add(matrix.part, FLOPS_PER_MAC * tokens * group.count * matrix.used_copies * matrix.weights)
        if group.attention is not None:
            add("attention_core", group.count * attention_flops(group.attention, tokens, causal))
        if group.scan is not None:
            add("scan", group.count * scan_flops(group.scan, tokens))
    add("head", FLOPS_PER_MAC * tokens * model.head.weights)
    forward = sum(parts.values())
    return Flops(forward, BACKWARD_FACTOR * forward, MappingProxyType(parts))


# ------------------------------------------------------------------------------------------- formulas of the papers
def gpt_training_flops(
    *,
    num_layers: FloatLike,
    hidden_size: FloatLike,
    sequence_length: FloatLike,
    vocab_size: FloatLike,
    tokens: FloatLike,
    passes: FloatLike = 4.0,
    expert_layer_share: FloatLike = 0.0,
    num_experts_per_tok: FloatLike = 1.0,
) -> FloatLike:
    r"""Training FLOPs of a GPT whose feed-forward is four times as wide as the model. [FLOP]

    .. math:: F = 24\, c\, T L h^2 \left(1 + \frac{2}{3}\, m\, (k - 1) + \frac{s}{6h}\right) + 6\, T h V

    Parameters
    ----------
    passes : c, forward passes that a step is worth: 4 with all layers recomputed, 3 without.
    expert_layer_share : m, share of the layers whose feed-forward is a mixture (1/2: every second one).
    num_experts_per_tok : k, experts a token passes in these.

    Notes
    -----
    Source: Narayanan et al. 2021 (arXiv:2104.04473), Eq. 3, with m = 0 and c = 4. The head is not recomputed, so its
    term stays 6 T h V for any c. With m = 1/2 and k = 2 it is the count of Artetxe et al. 2021 (arXiv:2112.10684).
    Attention in full, not its causal half.

    >>> gpt = dict(num_layers=32, hidden_size=4096, sequence_length=2048, vocab_size=50257, tokens=300e9)
    >>> sparse = gpt_training_flops(**gpt, expert_layer_share=0.5, num_experts_per_tok=2)
    >>> round(float(gpt_training_flops(**gpt)) / 1e21, 2), round(float(sparse) / 1e21, 2)
    (17.12, 22.27)
    """
    h, t = as_float(hidden_size), as_float(tokens)
    layers = 1.0 + 2.0 / 3.0 * expert_layer_share * (as_float(num_experts_per_tok) - 1.0) + sequence_length / (6.0 * h)
    return 24.0 * passes * t * num_layers * h * h * layers + 6.0 * t * h * vocab_size


def training_seconds(
    *,
    parameters: FloatLike,
    tokens: FloatLike,
    num_gpus: FloatLike,
    flops_per_s: FloatLike,
    flops_per_parameter: FloatLike = 8.0,
) -> FloatLike:
    """Time to train on `tokens` at a rate that each GPU achieves. [s]

    Parameters
    ----------
    parameters : those that a token passes; all of a mixture that is trained densely (DS-MoE, arXiv:2404.05567).
    flops_per_s : achieved by one GPU, not its peak. [FLOP/s]
    flops_per_parameter : of a token: 8 with all layers recomputed, 6 without.

    Notes
    -----
    Source: Narayanan et al. 2021 (arXiv:2104.04473), Eq. 4. Attention and head are left out: 1 to 3 % too short.

    >>> round(float(training_seconds(parameters=175e9, tokens=300e9, num_gpus=1024, flops_per_s=140e12)) / 86400, 1)
    33.9
    """
    return flops_per_parameter * as_float(tokens) * parameters / (as_float(num_gpus) * flops_per_s)
