"""FLOPs of one sequence through a model, as PyTorch's counter counts them: matrix products and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
