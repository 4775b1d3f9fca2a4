"""The parts that layers are made of: each function turns shape numbers into matrices, a core and small parameters.

A layer is a sum of components (`attention + routed + norms`), so hybrids need no code of their own. Module names are
those of the model's class in transformers 4 (experts as a list of modules); `*` stands for an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moecost.quantities import (
    AttentionCore,
    DenseFeedForward,
    Layers,
    Matrix,
    Part,
    RoutedExperts,
    ScanCore,
)


@dataclass(frozen=True)
class Component:
    """A part of a layer; `norms` counts parameters of norms, `vectors` all that is in no matrix, norms included."""

    matrices: tuple[Matrix, ...] = ()
    attention: AttentionCore | None = None
    scan: ScanCore | None = None
    experts: RoutedExperts | None = None
    feed_forward: tuple[DenseFeedForward, ...] = ()
    norms: int = 0
    vectors: int = 0
    num_norms: int = 0

    def __add__(self, other: Component) -> Component:
        return Component(
            matrices=self.matrices + other.matrices,
            attention=self.attention or other.attention,
            scan=self.scan or other.scan,
            experts=self.experts or other.experts,
            feed_forward=self.feed_forward + other.feed_forward,
            norms=self.norms + other.norms,
            vectors=self.vectors + other.vectors,
            num_norms=self.num_norms + other.num_norms,
        )

    def layers(self, count: int, hidden_size: int) -> Layers:
        """`count` layers of this kind."""
        return Layers(
            count=count,
            hidden_size=hidden_size,
            matrices=self.matrices,
            attention=self.attention,
            scan=self.scan,
            experts=self.experts,
            feed_forward=self.feed_forward,
            num_norms=self.num_norms,
            norm_parameters=self.norms,
            vector_parameters=self.vectors,
        )


def grouped(layers: Sequence[Component], hidden_size: int) -> tuple[Layers, ...]:
    """Equal layers merged into groups, in order of first appearance (their order does not change the cost)."""
    counts: dict[Component, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(layer.layers(count, hidden_size) for layer, count in counts.items())


def norms(size: int, count: int = 1, *, bias: bool = False) -> Component:
    """`count` norms over `size` channels (RMS norm, or layer norm with `bias`)."""
    parameters = size * count * (2 if bias else 1)
    return Component(norms=parameters, vectors=parameters, num_norms=count)


def vectors(parameters: int) -> Component:
    """Parameters that are in no matrix and no norm."""
    return Component(vectors=parameters)


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: int = 0,
    gate: bool = False,
    names: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
) -> Component:
    """Softmax attention: MHA, GQA or MQA, windowed or not.

    `names`: four module names, two (fused qkv and output), or three (q, fused kv, output). `gate`: the query projection
    also yields an output gate. `qk_norm`: parameters of the query and key norms.
    """
    q, kv = heads * head_dim * (2 if gate else 1), kv_heads * head_dim
    out = Matrix("attention.o", "attn", names[-1], heads * head_dim, hidden)
    widths = {4: (q, kv, kv), 3: (q, 2 * kv), 2: (q + 2 * kv,)}[len(names)]
    kernels = {4: ("q", "k", "v"), 3: ("q", "kv"), 2: ("qkv",)}[len(names)]
    inputs = [
        Matrix(f"attention.{k}", "attn", n, hidden, w, bias=w if bias else 0)
        for k, n, w in zip(kernels, names, widths, strict=False)
    ]
    out = replace(out, bias=hidden if (bias if out_bias is None else out_bias) else 0)
    core = AttentionCore(heads, kv_heads, head_dim, head_dim, window)
    return Component((*inputs, out), attention=core, norms=qk_norm, vectors=qk_norm)


def mamba1(
    hidden: int, inner: int, state: int, conv: int, dt_rank: int, *, prefix: str = "mamba", norms: int = 0
) -> Component:
    """Mamba-1 mixer (arXiv:2312.00752): projections, causal convolution, selective scan; `norms` of Jamba's kind."""
    matrices = (
        Matrix("mamba.in_proj", "other", f"{prefix}.in_proj", hidden, 2 * inner),
        Matrix("mamba.x_proj", "other", f"{prefix}.x_proj", inner, dt_rank + 2 * state),
        Matrix("mamba.dt_proj", "other", f"{prefix}.dt_proj", dt_rank, inner, bias=inner),
        Matrix("mamba.out_proj", "other", f"{prefix}.out_proj", inner, hidden),
    )
    small = inner * conv + inner + inner * state + inner  # convolution with bias, A, D
    return Component(matrices, scan=ScanCore(inner, state, inner, conv), norms=norms, vectors=small + norms)


def mlp(
    hidden: int,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    names: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    shared: bool = False,
) -> Component:
    """Dense feed-forward, or the shared experts of a mixture; `names` are first (gate), up, down; two if fused."""
    kind = "shared" if shared else "mlp"
    part: Part = "shared" if shared else "other"
    ups = _ups(kind, part, hidden, width, gated, bias, names)
    down = Matrix(f"{kind}.w2", part, names[-1], width, hidden, bias=hidden if bias else 0)
    return Component((*ups, down), feed_forward=(DenseFeedForward(hidden, width, gated, shared),))


def _ups(kind: str, part: Part, hidden: int, width: int, gated: bool, bias: bool, names: Sequence[str]) -> list[Matrix]:
    if not gated or len(names) == 2:  # one matrix: ungated, or gate and up fused
        out = 2 * width if gated else width
        return [Matrix(f"{kind}.w1", part, names[0], hidden, out, bias=out if bias else 0)]
    return [
        Matrix(f"{kind}.{w}", part, n, hidden, width, bias=width if bias else 0)
        for w, n in zip(("w1", "w3"), names, strict=False)
    ]


def routed(
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    *,
    gated: bool = True,
    bias: bool = False,
    router: str = "mlp.gate",
    router_bias: bool = False,
    names: Sequence[str] = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj"),
) -> Component:
    """Routed experts with their router."""
    ups = _ups("expert", "expert", hidden, width, gated, bias, names)
    down = Matrix("expert.w2", "expert", names[-1], width, hidden, bias=hidden if bias else 0)
    experts = [replace(m, copies=num_experts, copies_per_token=top_k) for m in (*ups, down)]
    gate = Matrix("router", "router", router, hidden, num_experts, bias=num_experts if router_bias else 0)
    return Component((gate, *experts), experts=RoutedExperts(num_experts, top_k, hidden, width, gated))
