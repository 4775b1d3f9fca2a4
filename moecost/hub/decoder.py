"""The ordinary decoder, of which most families are variations: attention, feed-forward or experts, norms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from moecost import components as c
from moecost.errors import InvalidInputError, UnsupportedModelError
from moecost.hub.reader import Reader
from moecost.hub.vision import Tower, tower
from moecost.quantities import Layers, Matrix, Model

NO_TOWER = Tower()

Flag: TypeAlias = bool | str | tuple[str, bool]
"""A fact of the family, or the field that says so (with its default, false where not given)."""


@dataclass(frozen=True)
class Experts:
    """How a family builds its mixtures. Names and `linear` are those of transformers 4."""

    names: tuple[str, ...] = c.EXPERTS
    router: str = "mlp.gate"
    linear: bool = True  # each expert matrix a module of its own
    router_linear: bool = True
    router_bias: Flag = False
    fused: bool = True  # 3-D parameters in transformers 5
    router_fused: str = "gate.weight"  # "" where the router stays a linear module there
    bias: Flag = False
    shared: tuple[str, ...] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: bool = False
    num_shared: int = 0  # where the config does not say
    top_k: int | None = None  # where the config does not say
    vectors: int = 0  # further parameters an expert (score corrections that are parameters)


@dataclass(frozen=True)
class Traits:
    """What makes a family differ from Llama."""

    tied: bool = False
    qkv_bias: Flag = "attention_bias"
    out_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    head_bias: Flag = False
    qk_norm: str = ""  # "head": over head_dim; "full": over all heads
    qk_norm_if: Flag = True
    gate: bool = False  # output gate from the query projection
    sinks: bool = False
    norms: int = 2
    norm_size: int = 1  # 1: scale; 2: scale and shift; 0: no parameters
    final_norm: bool = True
    gated: Flag = ("gated_mlp", True)
    four_times: bool = False  # width 4 h where the config does not say
    attention: tuple[str, ...] = c.QKVO
    mlp: tuple[str, ...] = c.GATE_UP_DOWN
    window: Flag = True  # a `sliding_window` is in use
    window_field: str = "sliding_window"
    pattern: int | None = None  # every so many layers one with full attention, where no list says
    latent: bool = False
    experts: Experts = field(default_factory=Experts)
    fused_adapters: bool = False
    learned_positions: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()
    vision: bool = False  # the tower is a part of the class that tuning loads


def flag(r: Reader, value: Flag) -> bool:
    """A fact, or what the config says."""
    if isinstance(value, bool):
        return value
    name, default = (value, False) if isinstance(value, str) else value
    return r.flag(name, default)


def ordinary(t: Traits) -> Callable[[Reader], Model]:
    """The reader of a family with these traits."""

    def read(r: Reader) -> Model:
        feed_forward = feed_forwards(r, t)
        kinds = list(zip(windows(r, t), feed_forward.kinds, strict=True))
        hidden = r.whole("hidden_size")

        def layer(kind: tuple[int | None, tuple[int, ...]]) -> c.Component:
            activation = c.vectors(2 if r.get("hidden_act") == "xielu" else 0)  # the one with parameters
            return mixer(r, t, kind[0]) + feed_forward.build(kind[1]) + norms(r, t, hidden) + activation

        return assemble(r, t, kinds, layer, vision=tower(r) if t.vision else NO_TOWER)

    return read


def norms(r: Reader, t: Traits, hidden: int) -> c.Component:
    return c.norms(hidden, t.norms, parameters=t.norm_size)


def group(kinds: Iterable[Hashable], layer: Callable[[Any], c.Component], hidden: int) -> tuple[Layers, ...]:
    """Equal layers merged into groups, in order of first appearance (their order does not change the cost)."""
    counts: dict[Hashable, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    merged: dict[c.Component, int] = {}
    for kind, count in counts.items():
        component = layer(kind)
        merged[component] = merged.get(component, 0) + count
    return tuple(component.layers(count, hidden) for component, count in merged.items())


def assemble(
    r: Reader,
    t: Traits,
    kinds: Iterable[Hashable],
    layer: Callable[[Any], c.Component],
    *,
    extra: int = 0,
    vision: Tower = NO_TOWER,
) -> Model:
    """Layers between an embedding and a head."""
    hidden, vocab = r.whole("hidden_size"), r.whole("vocab_size")
    if t.learned_positions:
        extra += r.whole("max_position_embeddings") * hidden
    final = hidden * t.norm_size if t.final_norm else 0
    head_bias = vocab if flag(r, t.head_bias) else 0
    return Model(
        hidden_size=hidden,
        vocab_size=vocab,
        tied_head=r.flag("tie_word_embeddings", t.tied),
        layers=group(kinds, layer, hidden),
        embedding=Matrix("embedding", "embed", "embed_tokens", vocab, hidden, is_linear=False),
        head=Matrix("head", "head", "lm_head", hidden, vocab, bias=head_bias),
        extra_parameters=final + extra + vision.parameters,
        final_norm_parameters=final,
        vision_parameters=vision.parameters,
        vision_linear_sizes=vision.linear_sizes,
        fused_adapters=t.fused_adapters,
    )


def heads(r: Reader) -> tuple[int, int, int]:
    """Query heads, key-value heads, head size."""
    number = r.whole("num_attention_heads")
    head_dim = r.optional("head_dim", low=1) or r.whole("hidden_size") // number
    if head_dim == 0:
        raise InvalidInputError(
            f"model config: {number} num_attention_heads do not fit hidden_size {r.whole('hidden_size')}"
        )
    return number, r.whole("num_key_value_heads", number), head_dim


def mixer(r: Reader, t: Traits, window: int | None = None) -> c.Component:
    """The attention of a layer."""
    hidden = r.whole("hidden_size")
    if t.latent:
        return latent(r, window)
    number, kv_heads, head_dim = heads(r)
    qk_norm = 0
    if t.qk_norm and flag(r, t.qk_norm_if):
        qk_norm = {"head": 2 * head_dim, "full": (number + kv_heads) * head_dim}[t.qk_norm] * (t.norm_size or 1)
    return c.attention(
        hidden,
        number,
        kv_heads,
        head_dim,
        window=window,
        bias=flag(r, t.qkv_bias),
        out_bias=flag(r, t.out_bias),
        qk_norm=qk_norm,
        gate=t.gate,
        sinks=t.sinks,
        names=t.attention,
    )


def latent(r: Reader, window: int | None = None) -> c.Component:
    """Multi-head latent attention, with the indexer of sparse attention where the config has one."""
    hidden, q_rank = r.whole("hidden_size"), r.optional("q_lora_rank")
    top = r.optional("index_topk")
    parts = c.latent_attention(
        hidden,
        r.whole("num_attention_heads"),
        q_rank=q_rank,
        kv_rank=r.whole("kv_lora_rank"),
        nope=r.whole("qk_nope_head_dim"),
        rope=r.whole("qk_rope_head_dim", low=0),
        v_head_dim=r.whole("v_head_dim"),
        bias=r.flag("attention_bias"),
        window=top or window,
    )
    r.get("num_key_value_heads")  # one latent for all: the field says nothing
    r.get("head_dim")
    if top:
        parts += c.indexer(hidden, q_rank or hidden, r.whole("index_n_heads"), r.whole("index_head_dim"))
        r.notes.append(f"Sparse attention counts {top} keys a query; the scores of the indexer itself are left out.")
    return parts


SLIDING = ("sliding", "chunked", "local")


def windows(r: Reader, t: Traits) -> list[int | None]:
    """The attention window of each layer, None for full attention."""
    n = r.num_layers
    window = r.optional(t.window_field, low=0) if flag(r, t.window) else None
    types = r.each("layer_types")
    pattern = r.get("sliding_window_pattern", t.pattern)
    first_full = r.get("max_window_layers")
    if not window:
        return [None] * n
    if types is not None:
        return [window if any(w in str(kind) for w in SLIDING) else None for kind in types]
    if isinstance(pattern, str) and pattern:
        return [window if pattern[i % len(pattern)] == "L" else None for i in range(n)]
    if pattern:
        pattern = r.whole("sliding_window_pattern", t.pattern)
        return [window if (i + 1) % pattern else None for i in range(n)]
    if isinstance(first_full, int) and "use_sliding_window" in r.values:  # Qwen: only the layers above
        return [window if i >= first_full else None for i in range(n)]
    return [window] * n


def sparse_layers(r: Reader) -> list[bool]:
    """Which layers hold routed experts, by whichever rule the config writes down."""
    n = r.num_layers
    if not any(r.per_layer("num_experts", 0)):
        return [False] * n
    types = r.each("mlp_layer_types")
    if types is not None:
        return [kind in ("sparse", "moe", "hash_moe") for kind in types]
    listed = r.many("moe_layers")
    if listed is not None:
        return [i in listed for i in range(n)]
    sparse = [
        i >= r.whole("first_k_dense_replace", r.whole("moe_layer_num_skipped", 0, low=0), low=0) for i in range(n)
    ]
    frequency = r.get("moe_layer_freq")
    if isinstance(frequency, list | tuple):
        sparse = [bool(item) for item in r.each("moe_layer_freq") or ()]
    elif frequency is not None:
        step = r.whole("moe_layer_freq")
        sparse = [s and i % step == 0 for i, s in enumerate(sparse)]
    for name in (
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_expert_interval",
        "moe_layer_interval",
        "moe_layer_frequency",
    ):
        step = r.whole(name, 1, low=0)
        sparse = [s and step > 0 and (i + 1) % step == 0 for i, s in enumerate(sparse)]
    dense = r.many("mlp_only_layers") or []
    start, end = r.get("moe_layer_start_index"), r.get("moe_layer_end_index")
    if start is not None or end is not None:
        first = r.whole("moe_layer_start_index", 0, low=0)
        last = r.whole("moe_layer_end_index", n - 1, low=-1) % n
        sparse = [s and first <= i <= last for i, s in enumerate(sparse)]
    return [s and i not in dense for i, s in enumerate(sparse)]


@dataclass(frozen=True)
class FeedForwards:
    """The kinds of feed-forward by layer, and how to build one."""

    kinds: list[tuple[int, ...]]
    build: Callable[[tuple[int, ...]], c.Component]


def feed_forwards(r: Reader, t: Traits) -> FeedForwards:
    """Dense feed-forward or experts, layer by layer."""
    e, hidden = t.experts, r.whole("hidden_size")
    gated, bias = flag(r, t.gated), flag(r, t.mlp_bias)
    sparse = sparse_layers(r)

    def dense(width: int) -> c.Component:
        return c.mlp(hidden, width, gated=gated, bias=bias, names=t.mlp)

    def build(kind: tuple[int, ...]) -> c.Component:
        if len(kind) == 1:
            return dense(kind[0])
        number, top_k, width, shared = kind
        if top_k > number:
            raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {number} experts")
        parts = c.router(
            hidden, number, e.router, bias=flag(r, e.router_bias), is_linear=e.router_linear, fused=e.router_fused
        ) + c.routed(
            hidden,
            width,
            number,
            top_k,
            gated=gated,
            bias=flag(r, e.bias),
            names=e.names,
            is_linear=e.linear,
            fused=e.fused,
        )
        if shared:
            parts += c.mlp(hidden, shared, gated=gated, bias=bias, names=e.shared, shared=True)
        if shared and e.shared_gate:
            parts += c.Component((Matrix("shared.gate", "shared", "mlp.shared_expert_gate", hidden, 1),))
        return parts + c.vectors(e.vectors * number)

    if not any(sparse):
        widths = dense_widths(r, t)
        return FeedForwards([(w,) for w in widths], build)
    number, top_k = r.per_layer("num_experts"), r.per_layer("num_experts_per_tok", e.top_k, low=1)
    width = r.per_layer("moe_intermediate_size", r.get("intermediate_size"), low=1)
    shared = shared_widths(r, e, width)
    dense_width = dense_widths(r, t) if not all(sparse) else [0] * r.num_layers
    r.get("intermediate_size")
    kinds: list[tuple[int, ...]] = [
        (number[i], top_k[i], width[i], shared[i]) if sparse[i] else (dense_width[i],) for i in range(r.num_layers)
    ]
    return FeedForwards(kinds, build)


def dense_widths(r: Reader, t: Traits) -> list[int]:
    """Width of the dense feed-forward of each layer."""
    name = "intermediate_size_mlp" if r.get("intermediate_size_mlp") else "intermediate_size"
    return r.per_layer(name, 4 * r.whole("hidden_size") if t.four_times else None, low=1)


def shared_widths(r: Reader, e: Experts, width: list[int]) -> list[int]:
    """Width of the shared experts of each layer together, 0 where there is none."""
    r.get("num_shared_experts")
    for name in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"):
        if r.get(name) is not None:
            return [r.whole(name, low=0)] * r.num_layers
    number = r.per_layer("num_shared_experts", e.num_shared)
    return [n * w for n, w in zip(number, width, strict=True)]


def unsupported(model_type: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model_type {model_type!r} is not understood; "
        "ModelSpec.from_hf(config, on_unknown='approximate') reads it as an ordinary decoder"
    )
