"""Families that mix attention with Mamba or linear attention."""

from __future__ import annotations

import math
from dataclasses import replace

from moecost import components as c
from moecost.errors import InvalidInputError, UnsupportedModelError
from moecost.hub.decoder import Experts, Traits, assemble, feed_forwards, heads, mixer
from moecost.hub.families import GRANITE_EXPERTS, PLAIN, QWEN2_EXPERTS
from moecost.hub.reader import Reader
from moecost.quantities import Matrix, Model

NEXT_NAMES = tuple(f"linear_attn.{n}" for n in ("in_proj_qkvz", "in_proj_ba", "out_proj"))
QWEN35_NAMES = tuple(f"linear_attn.{n}" for n in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))


def qwen3_next(r: Reader) -> Model:
    """Qwen3-Next and Qwen3.5: gated DeltaNet with gated attention every so many layers."""
    hidden = r.whole("hidden_size")
    of_3_5 = str(r.values.get("model_type", "")).startswith("qwen3_5")
    traits = Traits(
        qk_norm="head",
        gate=True,
        mlp_bias=False,
        experts=replace(QWEN2_EXPERTS, linear=not of_3_5),
        fused_adapters=not of_3_5,
    )
    r.defaults = {"head_dim": 256, **r.defaults}
    if r.values.get("attn_output_gate") is False:
        raise UnsupportedModelError("model config: attn_output_gate false is not understood")
    feed_forward = feed_forwards(r, traits)
    types = r.each("layer_types")
    interval = r.whole("full_attention_interval", 4)
    if types is None:
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(r.num_layers)]
    delta = c.delta_net(
        hidden,
        r.whole("linear_num_key_heads", 16),
        r.whole("linear_key_head_dim", 128),
        r.whole("linear_num_value_heads", 32),
        r.whole("linear_value_head_dim", 128),
        r.whole("linear_conv_kernel_dim", 4),
        names=QWEN35_NAMES if of_3_5 else NEXT_NAMES,
    )

    def layer(kind: tuple[bool, tuple[int, ...]]) -> c.Component:
        linear, ffn = kind
        return (delta if linear else mixer(r, traits)) + feed_forward.build(ffn) + c.norms(hidden, 2)

    kinds = [(t == "linear_attention", k) for t, k in zip(types, feed_forward.kinds, strict=True)]
    return assemble(r, traits, kinds, layer)


def jamba(r: Reader) -> Model:
    """Jamba: Mamba-1 with attention every so many layers, experts every other layer."""
    hidden = r.whole("hidden_size")
    experts = Experts(
        names=tuple(f"feed_forward.experts.*.{n}" for n in ("gate_proj", "up_proj", "down_proj")),
        router="feed_forward.router",
        router_fused="router.weight",
    )
    names = tuple(f"feed_forward.{n}" for n in ("gate_proj", "up_proj", "down_proj"))
    traits = replace(PLAIN, mlp=names, experts=experts)
    attention_at = r.whole("attn_layer_period", 8), r.whole("attn_layer_offset", 4, low=0)
    experts_at = r.whole("expert_layer_period", 2), r.whole("expert_layer_offset", 1, low=0)
    number, top_k = r.whole("num_experts", 16, low=0), r.whole("num_experts_per_tok", 2)
    width, state = r.whole("intermediate_size"), r.whole("mamba_d_state", 16)
    rank = r.get("mamba_dt_rank", "auto")
    dt_rank = math.ceil(hidden / 16) if rank == "auto" else r.whole("mamba_dt_rank")
    mamba = c.mamba1(
        hidden,
        r.whole("mamba_expand", 2) * hidden,
        state,
        r.whole("mamba_d_conv", 4),
        dt_rank,
        norms=dt_rank + 2 * state,
        bias=r.flag("mamba_proj_bias"),
        conv_bias=r.flag("mamba_conv_bias", True),
    )
    if number > 1 and top_k > number:
        raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {number} experts")

    def layer(kind: tuple[bool, bool]) -> c.Component:
        attention, sparse = kind
        ffn = (
            c.router(hidden, number, experts.router, fused=experts.router_fused)
            + c.routed(hidden, width, number, top_k, names=experts.names)
            if sparse
            else c.mlp(hidden, width, names=names)
        )
        return (mixer(r, traits) if attention else mamba) + ffn + c.norms(hidden, 2)

    def at(i: int, where: tuple[int, int]) -> bool:
        return i % where[0] == where[1] % where[0]

    kinds = [(at(i, attention_at), number > 1 and at(i, experts_at)) for i in range(r.num_layers)]
    return assemble(r, traits, kinds, layer)


def nemotron_h(r: Reader) -> Model:
    """Nemotron-H and Nemotron-3: one mixer a layer by a pattern: M Mamba-2, * attention, - MLP, E experts."""
    hidden = r.whole("hidden_size")
    pattern = r.get("hybrid_override_pattern")
    if pattern is None:
        letters = {
            "linear_attention": "M",
            "mamba": "M",
            "mamba2": "M",
            "full_attention": "*",
            "attention": "*",
            "mlp": "-",
            "moe": "E",
        }
        types = r.many("layers_block_type") or r.many("layer_types") or []
        pattern = "".join(letters.get(str(t), "?") for t in types)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E") or len(pattern) > 10_000:
        raise UnsupportedModelError("model config: hybrid_override_pattern must be a text of the letters M, *, -, E")
    if r.get("num_hidden_layers") is not None:
        pattern = pattern[: r.num_layers]
    kinds = list(pattern)
    traits = replace(PLAIN, attention=tuple(f"mixer.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
    r.defaults = {"head_dim": 128, "num_key_value_heads": 8, **r.defaults}
    mamba_head_dim = r.whole("mamba_head_dim", 64)
    mamba_heads = r.whole("mamba_num_heads", 128)
    groups, state, conv = r.whole("n_groups", 8), r.whole("ssm_state_size", 128), r.whole("conv_kernel", 4)
    bias, mlp_bias = r.flag("use_bias"), r.flag("mlp_bias")
    conv_bias = r.flag("use_conv_bias", True)
    for name in ("num_shared_experts", "expand", "intermediate_size", "num_attention_heads", "chunk_size"):
        r.get(name)
    for name in ("time_step_rank", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"):
        r.get(name)
    r.get("moe_shared_expert_intermediate_size")

    def mixture() -> c.Component:
        number, top_k = r.whole("num_experts"), r.whole("num_experts_per_tok")
        if top_k > number:
            raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {number} experts")
        latent = r.optional("moe_latent_size", low=1)
        parts = c.router(hidden, number, "mixer.gate", is_linear=False, fused="gate.weight")
        if latent:
            parts += c.Component(
                (
                    Matrix("expert.down_latent", "other", "mixer.fc1_latent_proj", hidden, latent),
                    Matrix("expert.up_latent", "other", "mixer.fc2_latent_proj", latent, hidden),
                )
            )
        return (
            parts
            + c.routed(
                latent or hidden,
                r.whole("moe_intermediate_size"),
                number,
                top_k,
                gated=False,
                names=("mixer.experts.*.up_proj", "mixer.experts.*.down_proj"),
            )
            + c.mlp(
                hidden,
                r.whole("moe_shared_expert_intermediate_size"),
                gated=False,
                bias=mlp_bias,
                names=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
                shared=True,
            )
        )

    def layer(kind: str) -> c.Component:
        if kind == "M":
            part = c.mamba2(
                hidden, mamba_heads, mamba_head_dim, groups, state, conv, prefix="mixer", bias=bias, conv_bias=conv_bias
            )
        elif kind == "*":
            part = mixer(r, traits)
        elif kind == "-":
            part = c.mlp(
                hidden,
                r.whole("intermediate_size"),
                gated=False,
                bias=mlp_bias,
                names=("mixer.up_proj", "mixer.down_proj"),
            )
        else:
            part = mixture()
        return part + c.norms(hidden)

    return assemble(r, traits, kinds, layer)


def granite_hybrid(r: Reader) -> Model:
    """Granite 4 and Bamba: Mamba-2 with attention in some layers; experts and a shared MLP, or the latter alone."""
    hidden = r.whole("hidden_size")
    bamba = r.values.get("model_type") == "bamba"
    traits = Traits(mlp_bias=False, experts=GRANITE_EXPERTS)
    types = r.each("layer_types") or r.each("layers_block_type")
    if types is None:
        at = set(r.many("attn_layer_indices") or [])
        types = ["attention" if i in at else "mamba" for i in range(r.num_layers)]
    expand = r.whole("mamba_expand", 2)
    mamba_heads = r.whole("mamba_n_heads", 128)
    head_dim = r.get("mamba_d_head", "auto")
    mamba = c.mamba2(
        hidden,
        mamba_heads,
        expand * hidden // mamba_heads if head_dim == "auto" else r.whole("mamba_d_head"),
        r.whole("mamba_n_groups", 1),
        r.whole("mamba_d_state", 256),
        r.whole("mamba_d_conv", 4),
        bias=r.flag("mamba_proj_bias"),
        conv_bias=r.flag("mamba_conv_bias", True),
    )
    heads(r)
    number = 0 if bamba else r.whole("num_experts", 0, low=0)
    width = r.whole("intermediate_size")
    if bamba:
        ffn = c.mlp(hidden, width, names=tuple(f"feed_forward.{n}" for n in ("gate_proj", "up_proj", "down_proj")))
    else:
        ffn = c.mlp(hidden, r.whole("shared_intermediate_size", 1024), names=GRANITE_EXPERTS.shared, shared=number > 0)
    if number:
        top_k = r.whole("num_experts_per_tok", 2)
        if top_k > number:
            raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {number} experts")
        ffn = (
            c.router(hidden, number, GRANITE_EXPERTS.router, fused="router.weight")
            + c.routed(hidden, width, number, top_k, names=GRANITE_EXPERTS.names, is_linear=False)
            + ffn
        )

    def layer(kind: bool) -> c.Component:
        return (mamba if kind else mixer(r, traits)) + ffn + c.norms(hidden, 2)

    return assemble(r, traits, ["attention" not in str(t) or "linear" in str(t) for t in types], layer)


def blackmamba(r: Reader) -> Model:
    """BlackMamba (Zyphra's code): alternating Mamba-1 and mixtures; top-1 with a biased router, tied head.

    Source: switch_mlp.py, mamba_layer.py and mamba_model.py of github.com/Zyphra/BlackMamba.
    """
    hidden = r.whole("hidden_size")
    inner = hidden * r.whole("expansion_factor", 2)
    bias = r.flag("add_bias_linear")
    mamba = c.mamba1(
        hidden,
        inner,
        r.whole("state_size", 16),
        r.whole("conv_dimension", 4),
        math.ceil(hidden / 16),
        prefix="mixer",
        bias=bias,
    )
    names = tuple(f"mixer.local_experts.*.{n}" for n in ("linear_fc1", "linear_fc2"))
    kinds = r.many("mamba_moe_layers") or []
    layers = [str(kind) for kind in kinds][: r.num_layers]
    if not layers or any(kind != "r" and not (kind.isdecimal() and 0 < int(kind[:6]) < 10_000) for kind in layers):
        raise InvalidInputError("model config: mamba_moe_layers must hold 'r' (Mamba) or a number of experts a layer")
    top_k, gated, width = r.whole("num_experts_per_tok", 1), r.flag("swiglu"), r.whole("intermediate_size")

    def layer(kind: str) -> c.Component:
        if kind == "r":
            return mamba + c.norms(hidden)
        number = int(kind)
        if top_k > number:
            raise InvalidInputError(f"model config: num_experts_per_tok is {top_k} of only {number} experts")
        experts = c.routed(
            hidden, width, number, top_k, gated=gated, bias=bias, names=names, one_matrix=True, fused=False
        )
        return c.router(hidden, number, "mixer.router", bias=True) + experts + c.norms(hidden)

    return assemble(r, Traits(tied=True), layers, layer)


def mamba(r: Reader) -> Model:
    """Mamba-1 (also Falcon-Mamba) and Mamba-2 alone."""
    hidden, conv = r.whole("hidden_size"), r.whole("conv_kernel", 4)
    bias, conv_bias = r.flag("use_bias"), r.flag("use_conv_bias", True)
    if r.values.get("model_type") == "mamba2":
        part = c.mamba2(
            hidden,
            r.whole("num_heads", 128),
            r.whole("head_dim", 64),
            r.whole("n_groups", 8),
            r.whole("state_size", 128),
            conv,
            prefix="mixer",
            bias=bias,
            conv_bias=conv_bias,
        )
        tied = False
    else:
        rank = r.get("time_step_rank", "auto")
        dt_rank = math.ceil(hidden / 16) if rank == "auto" else r.whole("time_step_rank")
        inner = r.whole("intermediate_size", r.whole("expand", 2) * hidden)
        state = r.whole("state_size", 16)
        part = c.mamba1(hidden, inner, state, conv, dt_rank, prefix="mixer", bias=bias, conv_bias=conv_bias)
        tied = True
    return assemble(r, Traits(tied=tied), [0] * r.num_layers, lambda _: part + c.norms(hidden))


HYBRIDS = {
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_next,
    "qwen3_5_moe": qwen3_next,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": granite_hybrid,
    "bamba": granite_hybrid,
    "blackmamba": blackmamba,
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba,
}
