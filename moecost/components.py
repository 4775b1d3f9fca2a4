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

QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATE_UP_DOWN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj")


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


def norms(size: int, count: int = 1, *, parameters: int = 1) -> Component:
    """`count` norms over `size` channels, with so many parameters a channel (2: scale and shift)."""
    total = size * count * parameters
    return Component(norms=total, vectors=total, num_norms=count)


def vectors(parameters: int) -> Component:
    """Parameters that are in no matrix and no norm."""
    return Component(vectors=parameters)


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    window: int | None = None,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: int = 0,
    gate: bool = False,
    sinks: bool = False,
    share_value: bool = False,
    names: Sequence[str] = QKVO,
) -> Component:
    """Softmax attention: MHA, GQA or MQA, windowed or not.

    `names`: query, key, value, output; or query, fused key-value, output; or fused, output. `gate`: the query
    projection yields an output gate too. `qk_norm`: parameters of the query and key norms. `share_value`: values are
    the keys.
    """
    v_dim = v_head_dim or head_dim
    q, k, v = heads * head_dim * (2 if gate else 1), kv_heads * head_dim, kv_heads * v_dim
    parts: dict[int, dict[str, int]] = {
        4: {"q": q, "k": k, "v": v},
        3: {"q": q, "kv": k + v},
        2: {"qkv": q + k + v},
    }
    matrices = [
        Matrix(f"attention.{kernel}", "attn", name, hidden, width, bias=width if bias else 0)
        for (kernel, width), name in zip(parts[len(names)].items(), names, strict=False)
        if not (share_value and kernel == "v")
    ]
    out = Matrix("attention.o", "attn", names[-1], heads * v_dim, hidden, bias=hidden if out_bias else 0)
    core = AttentionCore(heads, kv_heads, head_dim, v_dim, window)
    return Component((*matrices, out), attention=core, norms=qk_norm, vectors=qk_norm + (heads if sinks else 0))


def latent_attention(
    hidden: int,
    heads: int,
    *,
    q_rank: int | None,
    kv_rank: int,
    nope: int,
    rope: int,
    v_head_dim: int,
    bias: bool = False,
    window: int | None = None,
    prefix: str = "self_attn",
) -> Component:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank queries (or full), keys and values."""
    qk = nope + rope

    def matrix(kernel: str, name: str, rows: int, columns: int, bias: bool = False) -> Matrix:
        return Matrix(f"attention.{kernel}", "attn", f"{prefix}.{name}", rows, columns, bias=columns if bias else 0)

    if q_rank:
        queries = [matrix("q_a", "q_a_proj", hidden, q_rank, bias), matrix("q_b", "q_b_proj", q_rank, heads * qk)]
    else:
        queries = [matrix("q", "q_proj", hidden, heads * qk)]
    rest = [
        matrix("kv_a", "kv_a_proj_with_mqa", hidden, kv_rank + rope, bias),
        matrix("kv_b", "kv_b_proj", kv_rank, heads * (nope + v_head_dim)),
        matrix("o", "o_proj", heads * v_head_dim, hidden, bias),
    ]
    norm = kv_rank + (q_rank or 0)
    core = AttentionCore(heads, heads, qk, v_head_dim, window)
    return Component((*queries, *rest), attention=core, norms=norm, vectors=norm)


def indexer(hidden: int, q_rank: int, heads: int, head_dim: int) -> Component:
    """The lightning indexer that picks keys for sparse attention (DeepSeek-V3.2)."""
    shapes = {"wq_b": (q_rank, heads * head_dim), "wk": (hidden, head_dim), "weights_proj": (hidden, heads)}
    matrices = tuple(
        Matrix(f"attention.indexer.{name}", "attn", f"self_attn.indexer.{name}", *shape)
        for name, shape in shapes.items()
    )
    return Component(matrices, norms=2 * head_dim, vectors=2 * head_dim)


def mamba1(
    hidden: int,
    inner: int,
    state: int,
    conv: int,
    dt_rank: int,
    *,
    prefix: str = "mamba",
    norms: int = 0,
    bias: bool = False,
    conv_bias: bool = True,
) -> Component:
    """Mamba-1 mixer (arXiv:2312.00752): projections, causal convolution, selective scan; `norms` as Jamba has."""
    matrices = (
        Matrix("mamba.in_proj", "other", f"{prefix}.in_proj", hidden, 2 * inner, bias=2 * inner if bias else 0),
        Matrix("mamba.x_proj", "other", f"{prefix}.x_proj", inner, dt_rank + 2 * state),
        Matrix("mamba.dt_proj", "other", f"{prefix}.dt_proj", dt_rank, inner, bias=inner),
        Matrix("mamba.out_proj", "other", f"{prefix}.out_proj", inner, hidden, bias=hidden if bias else 0),
    )
    small = inner * (conv + conv_bias) + inner * state + inner  # convolution, A, D
    return Component(matrices, scan=ScanCore(inner, state, inner, conv), norms=norms, vectors=small + norms)


def mamba2(
    hidden: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv: int,
    *,
    prefix: str = "mamba",
    bias: bool = False,
    conv_bias: bool = True,
) -> Component:
    """Mamba-2 mixer (arXiv:2405.21060): one input projection for gate, x, B, C and time steps; gated norm."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    wide = inner + channels + heads
    matrices = (
        Matrix("mamba.in_proj", "other", f"{prefix}.in_proj", hidden, wide, bias=wide if bias else 0),
        Matrix("mamba.out_proj", "other", f"{prefix}.out_proj", inner, hidden, bias=hidden if bias else 0),
    )
    small = channels * (conv + conv_bias) + 3 * heads  # convolution; A, D and the time-step bias, one a head
    return Component(matrices, scan=ScanCore(inner, state, channels, conv), norms=inner, vectors=small + inner)


def delta_net(
    hidden: int,
    k_heads: int,
    k_dim: int,
    v_heads: int,
    v_dim: int,
    conv: int,
    *,
    names: Sequence[str],
) -> Component:
    """Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next: `names` of input projections (2 or 4), then output."""
    keys, values = k_heads * k_dim, v_heads * v_dim
    widths = {
        3: (2 * keys + 2 * values, 2 * v_heads),
        5: (2 * keys + values, values, v_heads, v_heads),
    }[len(names)]
    matrices = [
        Matrix(f"attention.{name.rsplit('.', 1)[-1]}", "attn", name, hidden, width)
        for name, width in zip(names, widths, strict=False)
    ]
    out = Matrix("attention.o", "attn", names[-1], values, hidden)
    channels = 2 * keys + values
    small = channels * conv + 2 * v_heads  # convolution; A and the time-step bias
    return Component((*matrices, out), scan=ScanCore(values, k_dim, channels, conv), norms=v_dim, vectors=small + v_dim)


def mlp(
    hidden: int,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    names: Sequence[str] = GATE_UP_DOWN,
    shared: bool = False,
) -> Component:
    """Dense feed-forward, or the shared experts of a mixture; `names`: gate, up, down, or first and down."""
    kind = "shared" if shared else "mlp"
    part: Part = "shared" if shared else "other"
    one_matrix = len(names) == 2
    matrices = _feed_forward(kind, part, hidden, width, gated, bias, names, one_matrix)
    return Component(tuple(matrices), feed_forward=(DenseFeedForward(hidden, width, gated, shared),))


def routed(
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    *,
    gated: bool = True,
    bias: bool = False,
    names: Sequence[str] = EXPERTS,
    one_matrix: bool = False,
    is_linear: bool = True,
    fused: bool = True,
) -> Component:
    """Routed experts without their router; `one_matrix`: gate and up are one matrix of the class.

    `is_linear`: each is an `nn.Linear` in transformers 4; `fused`: 3-D parameters in transformers 5.
    """
    experts = [
        replace(
            m,
            copies=num_experts,
            copies_per_token=top_k,
            is_linear=is_linear,
            fused=(
                ("down_proj" if m.kernel == "expert.w2" else "gate_up_proj" if gated else "up_proj") if fused else ""
            ),
        )
        for m in _feed_forward("expert", "expert", hidden, width, gated, bias, names, one_matrix)
    ]
    return Component(tuple(experts), experts=RoutedExperts(num_experts, top_k, hidden, width, gated))


def router(
    hidden: int,
    num_experts: int,
    name: str = "mlp.gate",
    *,
    bias: bool = False,
    is_linear: bool = True,
    fused: str = "",
) -> Component:
    """The router; `fused`: its parameter where transformers 5 has no `nn.Linear`."""
    out = num_experts if bias else 0
    return Component(
        (Matrix("router", "router", name, hidden, num_experts, is_linear=is_linear, bias=out, fused=fused),)
    )


def _feed_forward(
    kind: str, part: Part, hidden: int, width: int, gated: bool, bias: bool, names: Sequence[str], one_matrix: bool
) -> list[Matrix]:
    first = {"w1": width, "w3": width} if gated and not one_matrix else {"w1": 2 * width if gated else width}
    shapes = {kernel: (hidden, out) for kernel, out in first.items()} | {"w2": (width, hidden)}
    modules = {"w1": names[0], "w3": names[-2], "w2": names[-1]}
    return [
        Matrix(f"{kind}.{kernel}", part, modules[kernel], rows, columns, bias=columns if bias else 0)
        for kernel, (rows, columns) in shapes.items()
    ]
