"""Families with fields or layers of their own kind, attention only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moecost import components as c
from moecost.errors import InvalidInputError, UnsupportedModelError
from moecost.hub import vision
from moecost.hub.decoder import (
    Experts,
    Traits,
    assemble,
    feed_forwards,
    heads,
    mixer,
    windows,
)
from moecost.hub.families import BLOCK_SPARSE, GEMMA3, PLAIN
from moecost.hub.reader import Reader
from moecost.quantities import AttentionCore, Matrix, Model, ScanCore


def gpt2(r: Reader) -> Model:
    """GPT-2 and GPT-BigCode: fused qkv, learned positions, biases throughout, width 4 h where not given."""
    hidden = r.whole("hidden_size")
    number = r.whole("num_attention_heads")
    r.get("num_key_value_heads")  # follows from multi_query
    bigcode = "multi_query" in r.values or r.values.get("model_type") == "gpt_bigcode"
    kv_heads = 1 if bigcode and r.flag("multi_query", True) else number
    attention = c.attention(
        hidden, number, kv_heads, hidden // number, bias=True, out_bias=True, names=("attn.c_attn", "attn.c_proj")
    )
    width = r.whole("intermediate_size", 4 * hidden)
    mlp = c.mlp(hidden, width, gated=False, bias=True, names=("mlp.c_fc", "mlp.c_proj"))
    layer = attention + mlp + c.norms(hidden, 2, parameters=2)
    traits = Traits(tied=True, norm_size=2, learned_positions=True, defaults=())
    r.defaults = {"max_position_embeddings": 1024, **r.defaults}
    return assemble(r, traits, [0] * r.num_layers, lambda _: layer)


def mpt(r: Reader) -> Model:
    """MPT: fused qkv, no biases and ALiBi (the Hub's 7B and 30B), or biases and learned positions (llm-foundry)."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    bias = not r.flag("no_bias", True)
    attn = r.sub("attn_config")
    kv_heads = attn.whole("num_key_value_heads", number)
    learned = r.flag("learned_pos_emb", False) and not attn.flag("alibi", True)
    attention = c.attention(
        hidden, number, kv_heads, hidden // number, bias=bias, out_bias=bias, names=("attn.Wqkv", "attn.out_proj")
    )
    width = round(r.number("expansion_ratio", 4.0) * hidden)
    mlp = c.mlp(hidden, width, gated=False, bias=bias, names=("ffn.up_proj", "ffn.down_proj"))
    size = 2 if bias else 1
    layer = attention + mlp + c.norms(hidden, 2, parameters=size)
    traits = Traits(tied=True, norm_size=size, learned_positions=learned)
    return assemble(r, traits, [0] * r.num_layers, lambda _: layer)


def falcon(r: Reader) -> Model:
    """Falcon: multi-query or grouped, parallel attention, one or two layer norms."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    new = r.flag("new_decoder_architecture")
    multi = r.flag("multi_query", True)
    grouped = r.whole("num_key_value_heads", number)
    kv_heads = grouped if new else 1 if multi else number
    bias = r.flag("bias")
    width = r.whole("intermediate_size", 4 * hidden)
    parallel = r.flag("parallel_attn", True)
    count = r.whole("num_ln_in_parallel_attn", 2) if new else 1 if parallel else 2
    layer = (
        c.attention(
            hidden,
            number,
            kv_heads,
            hidden // number,
            bias=bias,
            out_bias=bias,
            names=("self_attention.query_key_value", "self_attention.dense"),
        )
        + c.mlp(hidden, width, gated=False, bias=bias, names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
        + c.norms(hidden, count, parameters=2)
    )
    return assemble(r, Traits(tied=True, norm_size=2), [0] * r.num_layers, lambda _: layer)


def qwen1(r: Reader) -> Model:
    """The first Qwen (Hub code): fused qkv with bias; `intermediate_size` is twice the width of a matrix."""
    hidden, (number, _, head_dim) = r.whole("hidden_size"), heads(r)
    width = r.whole("intermediate_size", low=2) // 2
    attention = c.attention(
        hidden,
        number,
        number,
        head_dim,
        bias=True,
        names=("attn.c_attn", "attn.c_proj"),
        out_bias=not r.flag("no_bias", True),
    )
    layer = attention + c.mlp(hidden, width, names=("mlp.w2", "mlp.w1", "mlp.c_proj")) + c.norms(hidden, 2)
    return assemble(r, Traits(), [0] * r.num_layers, lambda _: layer)


def chatglm(r: Reader) -> Model:
    """ChatGLM2/3 and GLM-4-9B (Hub code): fused grouped qkv with bias, fused gate and up."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    grouped = r.flag("multi_query_attention", True)
    kv_heads = r.whole("num_key_value_heads", 2) if grouped else number
    head_dim = r.whole("head_dim", hidden // number)
    bias = r.flag("add_bias_linear")
    layer = (
        c.attention(
            hidden,
            number,
            kv_heads,
            head_dim,
            bias=r.flag("add_qkv_bias", True) or bias,
            out_bias=bias,
            names=("self_attention.query_key_value", "self_attention.dense"),
        )
        + c.mlp(hidden, r.whole("intermediate_size"), bias=bias, names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"))
        + c.norms(hidden, 2)
    )
    return assemble(r, Traits(), [0] * r.num_layers, lambda _: layer)


def dbrx(r: Reader) -> Model:
    """DBRX: experts in `ffn_config`, key-value heads in `attn_config`; experts are 3-D parameters in every version."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    attn, ffn = r.sub("attn_config"), r.sub("ffn_config")
    experts, width = ffn.whole("num_experts", 4), ffn.whole("intermediate_size", 3584)
    top_k = r.optional("num_experts_per_tok", low=1) or ffn.whole("num_experts_per_tok", 1)
    names = tuple(f"ffn.experts.mlp.{n}" for n in ("w1", "v1", "w2"))
    layer = (
        c.attention(
            hidden,
            number,
            attn.whole("num_key_value_heads", 1),
            hidden // number,
            names=("norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj"),
        )
        + c.router(hidden, experts, "ffn.router.layer")
        + c.routed(hidden, width, experts, _at_most(top_k, experts), names=names, is_linear=False)
        + c.norms(hidden, 2)
    )
    return assemble(r, Traits(), [0] * r.num_layers, lambda _: layer)


def arctic(r: Reader) -> Model:
    """Arctic (Hub code): a dense residual feed-forward beside the experts of each sparse layer."""
    hidden = r.whole("hidden_size")
    traits = replace(PLAIN, experts=replace(BLOCK_SPARSE, fused=False, router_fused="", top_k=1))
    feed_forward = feed_forwards(r, traits)
    residual = c.Component()
    if r.flag("use_residual", True):
        r.get("moe_intermediate_size")
        names = tuple(f"residual_mlp.{w}" for w in ("w1", "w3", "w2"))
        residual = c.mlp(hidden, hidden, names=names) + c.norms(hidden)

    def layer(kind: tuple[int, ...]) -> c.Component:
        parts = mixer(r, traits) + feed_forward.build(kind) + c.norms(hidden, 2)
        return parts + residual if len(kind) > 1 else parts

    return assemble(r, traits, feed_forward.kinds, layer)


def jetmoe(r: Reader) -> Model:
    """JetMoE: query and output projections of attention are routed experts too."""
    hidden, experts, top_k = r.whole("hidden_size"), r.whole("num_experts", 8), r.whole("num_experts_per_tok", 2)
    kv_heads, head_dim = r.whole("num_key_value_heads", 16), r.whole("head_dim", 128)
    _at_most(top_k, experts)
    width = kv_heads * head_dim
    r.get("num_attention_heads")

    def expert(kernel: str, name: str, rows: int, columns: int) -> Matrix:
        return Matrix(kernel, "attn", name, rows, columns, experts, is_linear=False, copies_per_token=top_k, fused=name)

    moa = c.Component(
        (
            replace(c.router(hidden, experts, "self_attn.experts.router.layer").matrices[0], kernel="router"),
            expert("attention.q", "self_attn.experts.input_linear", hidden, width),
            Matrix("attention.kv", "attn", "self_attn.kv_proj", hidden, 2 * width),
            expert("attention.o", "self_attn.experts.output_linear", width, hidden),
        ),
        attention=AttentionCore(kv_heads * top_k, kv_heads, head_dim, head_dim),
        vectors=hidden,
    )
    layer = (
        moa
        + c.router(hidden, experts, "mlp.router.layer")
        + c.routed(
            hidden,
            r.whole("intermediate_size", 5632),
            experts,
            top_k,
            names=("mlp.input_linear", "mlp.output_linear"),
            is_linear=False,
        )
        + c.norms(hidden, 2)
        + c.vectors(hidden)
    )
    return assemble(r, Traits(tied=True), [0] * r.num_layers, lambda _: layer)


def nemotron_nas(r: Reader) -> Model:
    """Llama-Nemotron (Hub code): every layer with its own attention and width, or without, in `block_configs`."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    head_dim = r.whole("head_dim", hidden // number)
    r.get("intermediate_size"), r.get("num_key_value_heads")

    def linear(name: str) -> c.Component:
        return c.Component((Matrix("mlp.w1", "other", name, hidden, hidden),)) + c.norms(hidden)

    def block(config: Any, i: int) -> tuple[Any, Any]:
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"model config: block_configs[{i}] must be a mapping")
        attention, ffn = Reader(config).sub("attention"), Reader(config).sub("ffn")
        for part, what in ((attention, "attention"), (ffn, "ffn")):
            if part.get("sparsify"):
                raise UnsupportedModelError(f"model config: sparsify in block_configs[{i}].{what} is not understood")
        kv: Any = "none" if attention.flag("no_op") else "linear" if attention.flag("replace_with_linear") else None
        kv = kv or number // attention.whole("n_heads_in_group")
        width: Any = "none" if ffn.flag("no_op") else "linear" if ffn.flag("replace_with_linear") else None
        if width is None:
            raw = int(2 * ffn.number("ffn_mult", 0.0) * hidden / 3)
            width = -(-raw // 256) * 256
        return kv, width

    def layer(kind: tuple[Any, Any]) -> c.Component:
        kv, width = kind
        parts = c.Component()
        if kv == "linear":
            parts += linear("self_attn.linear_attn")
        elif kv != "none":
            parts += c.attention(hidden, number, kv, head_dim) + c.norms(hidden)
        if width == "linear":
            parts += linear("mlp.linear_mlp")
        elif width != "none":
            parts += c.mlp(hidden, width) + c.norms(hidden)
        return parts

    blocks = r.each("block_configs")
    if blocks is None:
        raise InvalidInputError("model config: block_configs is missing")
    return assemble(r, Traits(), [block(b, i) for i, b in enumerate(blocks)], layer)


def minimax(r: Reader) -> Model:
    """MiniMax-Text-01 and M1: lightning attention, every eighth layer softmax attention; experts throughout."""
    hidden, (number, _, head_dim) = r.whole("hidden_size"), heads(r)
    traits = replace(PLAIN, experts=BLOCK_SPARSE, fused_adapters=True)
    feed_forward = feed_forwards(r, traits)
    types = r.each("attn_type_list")  # 1: softmax attention
    if types is None and (listed := r.each("layer_types")) is not None:
        types = [int(kind == "full_attention") for kind in listed]
    types = types or [(i + 1) % 2 == 0 for i in range(r.num_layers)]
    inner = number * head_dim
    lightning = c.Component(
        (
            Matrix("attention.qkv", "attn", "self_attn.qkv_proj", hidden, 3 * inner),
            Matrix("attention.o", "attn", "self_attn.out_proj", inner, hidden),
            Matrix("attention.gate", "attn", "self_attn.output_gate", hidden, inner),
        ),
        scan=ScanCore(inner, head_dim, 0, 0),
        norms=inner,
        vectors=inner,
    )

    def layer(kind: tuple[bool, tuple[int, ...]]) -> c.Component:
        full, ffn = kind
        return (mixer(r, traits) if full else lightning) + feed_forward.build(ffn) + c.norms(hidden, 2)

    kinds = [(bool(t), k) for t, k in zip(types, feed_forward.kinds, strict=True)]
    return assemble(r, traits, kinds, layer)


def mimo_v2(r: Reader) -> Model:
    """MiMo-V2-Flash: windowed layers with sinks and heads of their own between full ones."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads")
    qk, v, kv = r.whole("head_dim", 192), r.whole("v_head_dim", 128), r.whole("num_key_value_heads", 4)
    traits = replace(PLAIN, experts=Experts(router_linear=False))
    types = r.each("layer_types")
    if types is None:
        hybrid = r.each("hybrid_layer_pattern") or [0] * r.num_layers
        types = ["sliding_attention" if h else "full_attention" for h in hybrid]
    window = r.whole("sliding_window", 128)
    bias = r.flag("attention_bias")
    sliding_kv = r.whole("swa_num_key_value_heads", 2 * kv)
    feed_forward = feed_forwards(r, traits)
    for name in ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim"):
        r.get(name)

    def layer(kind: tuple[str, tuple[int, ...]]) -> c.Component:
        sliding = kind[0] == "sliding_attention"
        return (
            c.attention(
                hidden,
                number,
                sliding_kv if sliding else kv,
                qk,
                v_head_dim=v,
                window=window if sliding else None,
                bias=bias,
                sinks=sliding,
            )
            + feed_forward.build(kind[1])
            + c.norms(hidden, 2)
        )

    return assemble(r, traits, list(zip(types, feed_forward.kinds, strict=True)), layer)


def gemma4(r: Reader) -> Model:
    """Gemma 4: wider heads in full-attention layers, values that are keys, a dense MLP beside the experts."""
    hidden, number = r.whole("hidden_size"), r.whole("num_attention_heads", 8)
    head_dim, kv_heads = r.whole("head_dim", 256), r.whole("num_key_value_heads", 4)
    wide, wide_kv = r.whole("global_head_dim", 512), r.optional("num_global_key_value_heads", low=1)
    share = r.flag("attention_k_eq_v")
    traits = replace(GEMMA3, experts=Experts())
    n = r.num_layers
    sliding = windows(r, traits)
    sliding[-1] = None  # the last layer always sees everything
    reused = n - r.whole("num_kv_shared_layers", 0, low=0)  # layers from here take keys and values of earlier ones
    side = r.whole("hidden_size_per_layer_input", 256, low=0)
    width = r.whole("intermediate_size")
    double = r.flag("use_double_wide_mlp")
    experts = r.flag("enable_moe_block")
    bias = r.flag("attention_bias")

    def layer(kind: tuple[int | None, bool]) -> c.Component:
        window, reuses = kind
        dim = head_dim if window else wide
        kv = kv_heads if window or not (share and wide_kv) else wide_kv or kv_heads
        full = c.attention(
            hidden, number, kv, dim, window=window, bias=bias, out_bias=bias, share_value=share and not window
        )
        if reuses:
            full = replace(full, matrices=tuple(m for m in full.matrices if m.kernel in ("attention.q", "attention.o")))
        qk = dim if reuses else 2 * dim
        parts = full + c.Component(norms=qk, vectors=qk)
        parts += c.mlp(hidden, width * (2 if double and reuses else 1)) + c.norms(hidden, 4)
        if side:
            parts += c.Component(
                (
                    Matrix("mlp.side_gate", "other", "per_layer_input_gate", hidden, side),
                    Matrix("mlp.side_out", "other", "per_layer_projection", side, hidden),
                )
            ) + c.norms(hidden)
        if experts:
            number_experts, top_k = r.whole("num_experts"), r.whole("num_experts_per_tok")
            parts += (
                c.router(hidden, number_experts, "router.proj")
                + c.routed(
                    hidden,
                    r.whole("moe_intermediate_size"),
                    number_experts,
                    _at_most(top_k, number_experts),
                    names=("experts.gate_up_proj", "experts.down_proj"),
                    is_linear=False,
                )
                + c.norms(hidden, 3)
                + c.vectors(hidden + number_experts)
            )
        return parts

    extra = 0
    if side:
        packed = n * side
        extra = r.whole("vocab_size_per_layer_input", 262144) * packed + hidden * packed + side
    tower = vision.tower(r)
    return assemble(r, traits, [(w, i >= reused) for i, w in enumerate(sliding)], layer, extra=extra, vision=tower)


def _at_most(top_k: int, experts: int) -> int:
    if top_k > experts:
        raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {experts} experts")
    return top_k


IRREGULAR = {
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "mpt": mpt,
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "qwen": qwen1,
    "chatglm": chatglm,
    "dbrx": dbrx,
    "arctic": arctic,
    "jetmoe": jetmoe,
    "nemotron-nas": nemotron_nas,
    "minimax": minimax,
    "mimo_v2_flash": mimo_v2,
    "gemma4": gemma4,
}
