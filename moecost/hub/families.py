"""Families that are ordinary decoders: one line of traits each.

Facts are those of the model classes of transformers 5.24 (parameters, fused experts) and 4.5x (module names); families
that only have code on the Hub are marked. `tests/oracles` counts them again from the classes.
"""

from __future__ import annotations

from dataclasses import replace

from moecost import components as c
from moecost.hub.decoder import Experts, Traits

BLOCK_SPARSE = Experts(
    names=tuple(f"block_sparse_moe.experts.*.{w}" for w in ("w1", "w3", "w2")), router="block_sparse_moe.gate"
)
QWEN_SHARED = tuple(name.replace("mlp.", "mlp.shared_expert.") for name in c.GATE_UP_DOWN)
QWEN2_EXPERTS = Experts(shared=QWEN_SHARED, shared_gate=True)
DEEPSEEK_EXPERTS = Experts(router_linear=False)
HUB_ONLY = Experts(fused=False, router_fused="")
GRANITE_EXPERTS = Experts(
    names=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    router="block_sparse_moe.router.layer",
    linear=False,
    shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
)
GPT_OSS_EXPERTS = Experts(
    names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    router="mlp.router",
    linear=False,
    router_linear=False,
    router_bias=True,
    router_fused="router.weight",
    bias=True,
)
LLAMA4_EXPERTS = Experts(
    names=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    router="feed_forward.router",
    linear=False,
    router_fused="",
    shared=tuple(name.replace("mlp.", "feed_forward.shared_expert.") for name in c.GATE_UP_DOWN),
    num_shared=1,
)

LLAMA = Traits()
PLAIN = Traits(qkv_bias=False, out_bias=False, mlp_bias=False)
QWEN2 = Traits(qkv_bias=True, out_bias=False, mlp_bias=False, window="use_sliding_window")
QWEN3 = Traits(qk_norm="head", mlp_bias=False, window="use_sliding_window", defaults=(("head_dim", 128),))
GEMMA = Traits(
    tied=True,
    mlp_bias=False,
    defaults=(("head_dim", 256),),
)
GEMMA2 = replace(GEMMA, norms=4, pattern=2, defaults=(("head_dim", 256), ("sliding_window", 4096)))
GEMMA3_DEFAULTS = (
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("vocab_size", 262208),
    ("sliding_window", 4096),
)
GEMMA3 = replace(GEMMA2, qk_norm="head", pattern=6, defaults=GEMMA3_DEFAULTS)
FUSED_GATE_UP = ("mlp.gate_up_proj", "mlp.down_proj")
GLM = Traits(qkv_bias=("attention_bias", True), out_bias=False, mlp_bias=False, mlp=FUSED_GATE_UP)
GLM4_MOE = Traits(
    out_bias=False,
    mlp_bias=False,
    qk_norm="head",
    qk_norm_if="use_qk_norm",
    experts=DEEPSEEK_EXPERTS,
    fused_adapters=True,
)
MLA = Traits(latent=True, mlp_bias=False, experts=DEEPSEEK_EXPERTS, fused_adapters=True)
USE_BIAS = Traits(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True)
LLAMA4_DEFAULTS = (
    ("hidden_size", 5120),
    ("num_hidden_layers", 48),
    ("num_attention_heads", 40),
    ("num_key_value_heads", 8),
    ("head_dim", 128),
    ("vocab_size", 202048),
    ("intermediate_size", 8192),
    ("intermediate_size_mlp", 16384),
    ("num_experts", 16),
    ("num_experts_per_tok", 1),
    ("interleave_moe_layer_step", 1),
    ("attention_chunk_size", 8192),
)
PHI3 = replace(PLAIN, attention=("self_attn.qkv_proj", "self_attn.o_proj"), mlp=FUSED_GATE_UP)
HUNYUAN_EXPERTS = Experts(
    num_shared=1,
    router="mlp.gate.wg",
    router_fused="",
    shared=tuple(name.replace("mlp.", "mlp.shared_mlp.") for name in c.GATE_UP_DOWN),
)

ORDINARY: dict[str, Traits] = {
    # Llama and its kin
    "llama": LLAMA,
    "aquila": LLAMA,
    "apertus": replace(LLAMA, gated=False, qk_norm="head", mlp_bias=False),
    "arcee": replace(LLAMA, gated=False),
    "baichuan": replace(PLAIN, attention=("self_attn.W_pack", "self_attn.o_proj")),  # Hub code
    "internlm2": replace(  # Hub code
        LLAMA,
        qkv_bias="bias",
        out_bias="bias",
        attention=("attention.wqkv", "attention.wo"),
        mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
    "internlm3": LLAMA,
    "mistral": PLAIN,
    "ministral": PLAIN,
    "ministral3": PLAIN,
    "mistral3": replace(PLAIN, vision=True),
    "mixtral": replace(PLAIN, experts=BLOCK_SPARSE, fused_adapters=True),
    "yi": LLAMA,
    "smollm3": replace(LLAMA, tied=True, window="use_sliding_window"),
    "seed_oss": replace(LLAMA, qkv_bias=("attention_bias", True), out_bias="attention_out_bias"),
    "granite": LLAMA,
    "granitemoe": replace(LLAMA, experts=GRANITE_EXPERTS),
    "granitemoeshared": replace(LLAMA, experts=GRANITE_EXPERTS),
    "llama4": replace(
        LLAMA,
        mlp_bias=False,
        experts=LLAMA4_EXPERTS,
        window_field="attention_chunk_size",
        pattern=4,
        defaults=LLAMA4_DEFAULTS,
    ),
    "minicpm3": replace(MLA, tied=True, fused_adapters=False),
    # Qwen
    "qwen2": QWEN2,
    "qwen2_moe": replace(QWEN2, experts=QWEN2_EXPERTS),
    "qwen2_vl": replace(QWEN2, vision=True),
    "qwen2_5_vl": replace(QWEN2, vision=True),
    "qwen3": QWEN3,
    "qwen3_moe": replace(QWEN3, fused_adapters=True, defaults=()),
    "qwen3_vl": replace(QWEN3, vision=True),
    "qwen3_vl_moe": replace(QWEN3, vision=True, experts=Experts(linear=False)),
    # DeepSeek and what is built like it
    "deepseek": replace(LLAMA, experts=replace(HUB_ONLY, router_linear=False)),  # Hub code
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "kimi_k2": MLA,
    "kimi_vl": replace(MLA, vision=True),
    "kimi_k25": replace(MLA, vision=True),
    "mistral4": replace(MLA, fused_adapters=False),
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "dots1": replace(
        PLAIN,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        experts=DEEPSEEK_EXPERTS,
        fused_adapters=True,
    ),
    # GLM
    "glm": GLM,
    "glm4": replace(GLM, norms=4),
    "glm4_moe": GLM4_MOE,
    "glm4v": replace(GLM, qkv_bias=True, norms=4, vision=True),
    "glm4v_moe": replace(GLM4_MOE, qkv_bias=("attention_bias", True), vision=True),
    "solar_open": replace(GLM4_MOE, qkv_bias="attention_bias"),
    # OpenAI
    "gpt_oss": replace(
        PLAIN,
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        sinks=True,
        pattern=2,
        experts=GPT_OSS_EXPERTS,
        defaults=(("head_dim", 64), ("sliding_window", 128)),
    ),
    # Ai2
    "olmo": replace(LLAMA, norm_size=0, mlp_bias=False),
    "olmo2": replace(LLAMA, qk_norm="full", mlp_bias=False),
    "olmo3": replace(LLAMA, qk_norm="full", mlp_bias=False, pattern=4),
    "olmoe": replace(LLAMA, qk_norm="full", mlp_bias=False, fused_adapters=True),
    "flex_olmo": replace(LLAMA, qk_norm="full", mlp_bias=False, fused_adapters=True),
    # Microsoft
    "phi": Traits(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        four_times=True,
        norms=1,
        norm_size=2,
        attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        mlp=("mlp.fc1", "mlp.fc2"),
    ),
    "phi3": PHI3,
    "phi4": PHI3,
    "phimoe": replace(
        PLAIN,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_bias="lm_head_bias",
        norm_size=2,
        experts=replace(BLOCK_SPARSE, router_fused=""),
    ),
    # Google
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": replace(GEMMA3, vision=True),
    "gemma3_text": GEMMA3,
    # others with mixtures
    "grok-1": replace(  # Hub code (hpcai-tech)
        PLAIN,
        tied=True,
        norms=4,
        attention=("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"),
        experts=replace(
            HUB_ONLY,
            names=tuple(f"moe_block.experts.*.{n}" for n in ("linear", "linear_v", "linear_1")),
            router="moe_block.gate",
        ),
    ),
    "skywork": replace(PLAIN, experts=replace(HUB_ONLY, top_k=2)),  # Hub code; top-2 by the publisher's report
    "minimax_m2": replace(
        PLAIN, qk_norm="full", qk_norm_if=("use_qk_norm", True), experts=BLOCK_SPARSE, fused_adapters=True
    ),
    "hunyuan_v1_moe": replace(LLAMA, qk_norm="head", mlp_bias=False, experts=HUNYUAN_EXPERTS, fused_adapters=True),
    "hunyuan_v1_dense": replace(LLAMA, qk_norm="head", mlp_bias=False),
    "ernie4_5": USE_BIAS,
    "ernie4_5_moe": replace(
        USE_BIAS,
        head_bias="use_bias",
        fused_adapters=True,
        experts=Experts(vectors=1),
    ),
    "mimo": QWEN2,  # Hub code; the extra layers for multi-token prediction are not loaded
    "exaone4": replace(PLAIN, qk_norm="head", pattern=4),
    "exaone_moe": replace(PLAIN, qk_norm="head", pattern=4, experts=DEEPSEEK_EXPERTS, fused_adapters=True),
    # older forms
    "gpt_neox": Traits(
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=True,
        gated=False,
        norm_size=2,
        attention=("attention.query_key_value", "attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "stablelm": Traits(qkv_bias="use_qkv_bias", out_bias=False, mlp_bias=False, norm_size=2),
    "starcoder2": Traits(
        qkv_bias=("use_bias", True),
        out_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        gated=False,
        norm_size=2,
        tied=True,
        mlp=("mlp.c_fc", "mlp.c_proj"),
    ),
    "cohere": replace(PLAIN, tied=True, norms=1, qkv_bias="attention_bias", out_bias="attention_bias"),
    "cohere2": replace(PLAIN, tied=True, norms=1, qkv_bias="attention_bias", out_bias="attention_bias", pattern=4),
    "nemotron": Traits(gated=False, norm_size=2),
}
"""Families by `model_type`."""
