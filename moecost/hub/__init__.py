"""`config.json` of a Hugging Face model -> a model in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moecost import components as c
from moecost.errors import UnsupportedModelError
from moecost.quantities import Matrix, Model

Config = Mapping[str, Any]


def read_model(config: Config) -> Model:
    """The model that `config` describes."""
    if "mamba_moe_layers" in config:
        return _blackmamba(config)
    if config.get("model_type", "llama") in {"llama", "mistral", "mixtral"}:
        return _llama(config)
    raise UnsupportedModelError(f"model_type {config.get('model_type')!r} is not known")


def _ends(config: Config, layers: list[c.Component], *, tied: bool) -> Model:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    return Model(
        hidden_size=hidden,
        vocab_size=vocab,
        tied_head=tied,
        layers=c.grouped(layers, hidden),
        embedding=Matrix("embedding", "embed", "embed_tokens", vocab, hidden, is_linear=False),
        head=Matrix("head", "head", "lm_head", hidden, vocab),
        extra_parameters=hidden,
        final_norm_parameters=hidden,
    )


def _llama(config: Config) -> Model:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    mixer = c.attention(
        hidden,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or hidden // heads,
        window=config.get("sliding_window"),
    )
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        names = [f"block_sparse_moe.experts.*.{w}" for w in ("w1", "w3", "w2")]
        ffn = c.routed(
            hidden,
            config["intermediate_size"],
            experts,
            config["num_experts_per_tok"],
            router="block_sparse_moe.gate",
            names=names,
        )
    else:
        ffn = c.mlp(hidden, config["intermediate_size"], gated=config.get("gated_mlp", True))
    layer = mixer + ffn + c.norms(hidden, 2)
    return _ends(config, [layer] * config["num_hidden_layers"], tied=config.get("tie_word_embeddings", False))


def _blackmamba(config: Config) -> Model:
    hidden, inner = config["hidden_size"], config["hidden_size"] * config["expansion_factor"]
    mamba = c.mamba1(
        hidden, inner, config["state_size"], config["conv_dimension"], math.ceil(hidden / 16), prefix="mixer"
    )
    names = [f"mixer.experts.local_experts.*.{n}" for n in ("linear_fc1", "linear_fc2")]

    def block(kind: str) -> c.Component:
        if kind == "r":
            return mamba + c.norms(hidden)
        moe = c.routed(
            hidden,
            config["ffn_hidden_size"],
            int(kind),
            config.get("num_experts_per_tok", 1),
            gated=config["swiglu"],
            router="mixer.router",
            names=names,
        )
        return moe + c.norms(hidden)

    return _ends(config, [block(kind) for kind in config["mamba_moe_layers"]], tied=True)
