"""Families of 2025 and 2026 with mixers of their own; facts from the classes of transformers 5.24."""

from __future__ import annotations

from dataclasses import replace

from moecost import components as c
from moecost.hub.decoder import Experts, Traits, assemble, feed_forwards, heads, latent, mixer, windows
from moecost.hub.families import DEEPSEEK_EXPERTS, PLAIN
from moecost.hub.reader import Reader
from moecost.quantities import AttentionCore, Matrix, Model, ScanCore


def deepseek_v4(r: Reader) -> Model:
    """DeepSeek-V4: one key-value head beside compressed ones, grouped output projection, hyper-connections."""
    hidden, number, head_dim = r.whole("hidden_size"), r.whole("num_attention_heads"), r.whole("head_dim")
    q_rank, window = r.whole("q_lora_rank"), r.whole("sliding_window", 128)
    groups, o_rank, streams = r.whole("o_groups"), r.whole("o_lora_rank"), r.whole("hc_mult", 4)
    index_heads, index_dim, top = r.whole("index_n_heads"), r.whole("index_head_dim"), r.whole("index_topk")
    rates = r.sub("compress_rates")
    rate = {
        "compressed_sparse_attention": rates.whole("compressed_sparse_attention", 4),
        "heavily_compressed_attention": rates.whole("heavily_compressed_attention", 128),
    }
    types = r.each("layer_types") or ["sliding_attention"] * r.num_layers
    traits = replace(PLAIN, experts=replace(DEEPSEEK_EXPERTS, linear=False))
    feed_forward = feed_forwards(r, traits)
    for name in ("num_key_value_heads", "qk_rope_head_dim", "num_hash_layers"):
        r.get(name)
    mixed = (2 + streams) * streams  # weights before, after and between the streams

    def part(kernel: str, name: str, rows: int, columns: int) -> Matrix:
        return Matrix(f"attention.{kernel}", "attn", f"self_attn.{name}", rows, columns)

    def compressor(kind: str) -> c.Component:
        """Keys are compressed over overlapping blocks (twice the width) where an indexer picks among them."""
        if kind not in rate:
            return c.Component()
        sparse = kind == "compressed_sparse_attention"
        wide = (2 if sparse else 1) * head_dim
        parts = c.Component(
            tuple(part("compress", f"compressor.{n}", hidden, wide) for n in ("kv_proj", "gate_proj")),
            norms=wide,
            vectors=rate[kind] * wide + head_dim,
        )
        if sparse:
            parts = replace(parts, norms=head_dim) + c.Component(
                (
                    *(
                        part("indexer", f"compressor.indexer.{n}", hidden, 2 * index_dim)
                        for n in ("kv_proj", "gate_proj")
                    ),
                    part("indexer", "compressor.indexer.q_b_proj", q_rank, index_heads * index_dim),
                    part("indexer", "compressor.indexer.scorer.weights_proj", hidden, index_heads),
                ),
                norms=index_dim,
                vectors=rate[kind] * 2 * index_dim + index_dim,
            )
        return parts

    def hyper(name: str) -> c.Component:
        matrix = Matrix("mlp.hyper", "other", f"{name}.fn", streams * hidden, mixed, is_linear=False)
        return c.Component((matrix,), vectors=mixed + 3)

    def layer(kind: tuple[str, tuple[int, ...]]) -> c.Component:
        seen = window + (top if kind[0] == "compressed_sparse_attention" else 0)
        attention = c.Component(
            (
                part("q_a", "q_a_proj", hidden, q_rank),
                part("q_b", "q_b_proj", q_rank, number * head_dim),
                part("kv", "kv_proj", hidden, head_dim),
                part("o_a", "o_a_proj", number * head_dim // groups, groups * o_rank),
                part("o", "o_b_proj", groups * o_rank, hidden),
            ),
            attention=AttentionCore(number, 1, head_dim, head_dim, seen),
            norms=q_rank + head_dim,
            vectors=q_rank + head_dim + number,
        )
        streams_in_and_out = hyper("attn_hc") + hyper("ffn_hc")
        return attention + compressor(kind[0]) + feed_forward.build(kind[1]) + streams_in_and_out + c.norms(hidden, 2)

    r.notes.append("Attention counts its window and the keys the indexer picks; compressed keys are left out.")
    kinds = list(zip(map(str, types), feed_forward.kinds, strict=True))
    return assemble(r, traits, kinds, layer, extra=streams * (streams * hidden) + streams + 1)


def afmoe(r: Reader) -> Model:
    """AFMoE (Trinity): gated attention with query and key norms, four norms a layer."""
    hidden, (number, _, head_dim) = r.whole("hidden_size"), heads(r)
    experts = Experts(router="mlp.router.gate", router_fused="", vectors=1)
    traits = replace(
        PLAIN, qk_norm="head", pattern=r.whole("global_attn_every_n_layers", 4), experts=experts, fused_adapters=True
    )
    r.values.setdefault("first_k_dense_replace", r.get("num_dense_layers"))
    feed_forward = feed_forwards(r, traits)
    gate = c.Component((Matrix("attention.gate", "attn", "self_attn.gate_proj", hidden, number * head_dim),))

    def layer(kind: tuple[int | None, tuple[int, ...]]) -> c.Component:
        return mixer(r, traits, kind[0]) + gate + feed_forward.build(kind[1]) + c.norms(hidden, 4)

    return assemble(r, traits, list(zip(windows(r, traits), feed_forward.kinds, strict=True)), layer)


def kimi_linear(r: Reader) -> Model:
    """Kimi Linear: delta attention with a decay a channel, latent attention every so many layers."""
    hidden = r.whole("hidden_size")
    nested = r.sub("linear_attn_config")
    number = r.whole("linear_num_heads", nested.whole("num_heads", 32))
    dim = r.whole("linear_head_dim", nested.whole("head_dim", 128))
    conv = r.whole("linear_conv_kernel_dim", nested.whole("short_conv_kernel_size", 4))
    traits = replace(PLAIN, experts=DEEPSEEK_EXPERTS)
    feed_forward = feed_forwards(r, traits)
    types = r.each("layer_types")
    if types is None:
        full = {int(i) - 1 for i in nested.many("full_attn_layers") or [] if isinstance(i, int)}  # from 1 on
        types = ["full_attention" if i in full else "linear_attention" for i in range(r.num_layers)]
    inner = number * dim
    shapes = {
        "q_proj": (hidden, inner),
        "k_proj": (hidden, inner),
        "v_proj": (hidden, inner),
        "forget_gate.f_a_proj": (hidden, dim),
        "forget_gate.f_b_proj": (dim, inner),
        "b_proj": (hidden, number),
        "g_a_proj": (hidden, dim),
        "g_b_proj": (dim, inner),
        "o_proj": (inner, hidden),
    }
    delta = c.Component(
        tuple(
            Matrix(f"attention.{n.removesuffix('_proj').rsplit('.', 1)[-1]}", "attn", f"self_attn.{n}", *shape)
            for n, shape in shapes.items()
        ),
        scan=ScanCore(inner, dim, 3 * inner, conv),
        norms=dim,
        vectors=3 * inner * conv + inner + number + dim,
    )

    def layer(kind: tuple[str, tuple[int, ...]]) -> c.Component:
        mixing = latent(r) if kind[0] == "full_attention" else delta
        return mixing + feed_forward.build(kind[1]) + c.norms(hidden, 2)

    return assemble(r, traits, list(zip(map(str, types), feed_forward.kinds, strict=True)), layer)


def falcon_h1(r: Reader) -> Model:
    """Falcon-H1: attention and Mamba-2 side by side in each layer."""
    hidden = r.whole("hidden_size")
    number, bias = r.whole("mamba_n_heads", 128), r.flag("mamba_proj_bias")
    inner = r.whole("mamba_d_ssm", r.whole("mamba_expand", 2) * hidden)
    r.get("mamba_d_head")
    mamba = c.mamba2(
        hidden,
        number,
        max(inner // number, 1),
        r.whole("mamba_n_groups", 1),
        r.whole("mamba_d_state", 256),
        r.whole("mamba_d_conv", 4),
        bias=bias,
        conv_bias=r.flag("mamba_conv_bias", True),
    )
    if not r.flag("mamba_rms_norm"):
        mamba = replace(mamba, norms=0, vectors=mamba.vectors - mamba.norms)
    names = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
    traits = Traits(mlp=names)
    feed_forward = feed_forwards(r, traits)

    def layer(kind: tuple[int, ...]) -> c.Component:
        return mixer(r, traits) + mamba + feed_forward.build(kind) + c.norms(hidden, 2)

    return assemble(r, traits, feed_forward.kinds, layer)


def lfm2(r: Reader) -> Model:
    """LFM2 and its mixtures: gated short convolutions, attention in some layers."""
    hidden = r.whole("hidden_size")
    names = tuple(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "out_proj"))
    experts = Experts(
        names=tuple(f"feed_forward.experts.*.{w}" for w in ("w1", "w3", "w2")), router="feed_forward.gate"
    )
    traits = replace(
        PLAIN,
        tied=True,
        qk_norm="head",
        attention=names,
        mlp=tuple(f"feed_forward.{w}" for w in ("w1", "w3", "w2")),
        experts=experts,
    )
    if r.flag("block_auto_adjust_ff_dim", r.values.get("model_type") == "lfm2") and not r.get("num_experts"):
        width = int(r.number("block_ffn_dim_multiplier", 1.0) * (2 * r.whole("intermediate_size", 12288) // 3))
        multiple = r.whole("block_multiple_of", 256)
        r.values["intermediate_size"] = -(-width // multiple) * multiple
    for name in ("block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs"):
        r.get(name)
    r.values.setdefault("first_k_dense_replace", r.get("num_dense_layers"))
    kernel, bias = r.whole("conv_L_cache", 3), r.flag("conv_bias")
    wide, out = (3 * hidden, hidden) if bias else (0, 0)
    conv = c.Component(
        (
            Matrix("mamba.in_proj", "other", "conv.in_proj", hidden, 3 * hidden, bias=wide),
            Matrix("mamba.out_proj", "other", "conv.out_proj", hidden, hidden, bias=out),
        ),
        scan=ScanCore(0, 0, hidden, kernel),
        vectors=hidden * (kernel + bias),
    )
    types = r.each("layer_types")
    if types is None:
        full = r.many("full_attn_idxs") or []
        types = ["full_attention" if i in full else "conv" for i in range(r.num_layers)]
    feed_forward = feed_forwards(r, traits)

    def layer(kind: tuple[str, tuple[int, ...]]) -> c.Component:
        mixing = conv if kind[0] == "conv" else mixer(r, traits)
        return mixing + feed_forward.build(kind[1]) + c.norms(hidden, 2)

    return assemble(r, traits, list(zip(map(str, types), feed_forward.kinds, strict=True)), layer)


RECENT = {
    "deepseek_v4": deepseek_v4,
    "afmoe": afmoe,
    "kimi_linear": kimi_linear,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
}
