"""What formulas are written in: frozen dataclasses of plain numbers, between the specs above and the formulas below.

No Pydantic and no files here. A model reaches the formulas as layer groups of weight matrices plus one *core* a
mixer (what a layer computes besides matrix products with weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["embed", "head", "attn", "expert", "shared", "router", "norm", "other", "vision"]
"""The parts that parameter counts are reported by. Dense feed-forward and Mamba matrices are `other`."""

LayerKind: TypeAlias = Literal["attention", "mamba", "moe", "mlp", "norm", "embedding", "head"]
"""The layer kinds that step time is reported by."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of a layer; `copies` of it in each layer of its group (experts: one a routed expert).

    Attributes
    ----------
    kernel : what the step reports it as: `attention.q`, `expert.w1` (gate), `expert.w3` (up), `expert.w2` (down),
        `shared.w1`, `mlp.w1`, `router`, `mamba.in_proj`, `head`, ...
    part : the part it is counted in.
    module : dotted module name inside the layer, the suffix that adapter target lists match (`self_attn.q_proj`).
    in_features, out_features : its shape.
    copies : how many a layer.
    is_linear : an `nn.Linear` in the model's class (4-bit loaders and `all-linear` see only these).
    bias : parameters of its bias, 0 or `out_features`.
    copies_per_token : copies that one token passes (top-k for experts); None: all of them.
    fused : parameter that holds it where a stack fuses experts into 3-D tensors (transformers 5), "" where it stays a
        module of its own; a fused matrix is no `nn.Linear` there.
    """

    kernel: str
    part: Part
    module: str
    in_features: int
    out_features: int
    copies: int = 1
    is_linear: bool = True
    bias: int = 0
    copies_per_token: int | None = None
    fused: str = ""

    @property
    def used_copies(self) -> int:
        """Copies that one token passes, a layer."""
        return self.copies if self.copies_per_token is None else min(self.copies, self.copies_per_token)

    @property
    def weights(self) -> int:
        """Weights of one copy, bias apart."""
        return self.in_features * self.out_features

    @property
    def parameters(self) -> int:
        """All copies of one layer, biases included."""
        return self.copies * (self.weights + self.bias)


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """Softmax attention between its projections; MLA is one with different query-key and value head sizes."""

    num_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None = None  # tokens a query sees at most; None: all


@dataclass(frozen=True, slots=True)
class ScanCore:
    """Selective scan (Mamba-1/2) or a linear-attention recurrence, with the causal convolution before it."""

    inner_size: int  # channels that are scanned
    state_size: int  # states a channel
    conv_channels: int
    conv_kernel: int


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed part of a feed-forward: `num_experts` of them, `num_experts_per_tok` used by a token."""

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int  # what an expert reads and writes
    intermediate_size: int
    gated: bool


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """A feed-forward that every token passes (dense MLP, or the shared experts of a mixture together)."""

    hidden_size: int
    intermediate_size: int
    gated: bool
    shared: bool = False  # shared experts beside routed ones


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal layers: their matrices, what they compute besides, and their norms.

    `vector_parameters` counts what is in no matrix, a layer: norms (`norm_parameters` of it), convolutions, scan
    parameters, attention sinks, router corrections.
    """

    count: int
    hidden_size: int
    matrices: tuple[Matrix, ...]
    attention: AttentionCore | None = None
    scan: ScanCore | None = None
    experts: RoutedExperts | None = None
    feed_forward: tuple[DenseFeedForward, ...] = ()
    num_norms: int = 2  # hidden-size norms a layer
    norm_parameters: int = 0
    vector_parameters: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model in plain numbers."""

    hidden_size: int
    vocab_size: int
    tied_head: bool
    layers: tuple[Layers, ...]
    embedding: Matrix
    head: Matrix
    extra_parameters: int = 0  # all others: final norm, learned positions, vision tower ...
    final_norm_parameters: int = 0  # of the extra ones
    vision_parameters: int = 0  # of the extra ones
    vision_linear_sizes: int = 0  # in + out of the linear modules of the vision tower, which `all-linear` adapts
    fused_adapters: bool = False  # PEFT turns names of experts and router into adapters on the fused parameters
