"""A checked view of a `config.json`: one name for each idea, whatever the family calls it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from moecost.errors import InvalidInputError, UnsupportedModelError

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "topk",
    ),
    "num_shared_experts": ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "tie_word_embeddings": ("tie_embedding_weights",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
}
"""Spellings of each field, first the one used here."""

SPELLINGS = {spelling: name for name, others in ALIASES.items() for spelling in others}

MAX_LAYERS = 10_000
MAX_SIZE = 2**31

_SHAPES = re.compile(r"_(size|dim|rank|heads?|layers?|experts?|groups?|width|mult|pattern)$|^(num|n|moe|d)_")
"""Names that look like fields of the shape: one that no reader asked for is refused."""

_NO_SHAPE = frozenset(
    """
    n_group topk_group n_positions n_ctx num_logits_to_keep num_labels num_return_sequences num_beams
    num_beam_groups num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers mtp_num_layers
    max_window_layers no_rope_layers no_rope_layer_interval num_hash_layers chunk_size prefill_chunk_size
    context_window_size attention_chunk_size attention_sink_size sliding_window_size chunk_size_feed_forward
    mamba_chunk_size moe_jitter_eps moe_loss_weight moe_router_dtype moe_router_load_balancing_type
    moe_router_enable_expert_bias moe_router_use_sigmoid moe_router_topk_scaling_factor moe_score_function moe_lambda
    moe_aux_loss_coeff moe_z_loss_coeff moe_token_dropping moe_use_aux_free moe_gate moe_gate_act moe_norm_gate_prob
    moe_norm_min moe_capacity moe_dropout_prob moe_group_experts moe_multimodal_dispatch_use_allgather
    moe_use_hard_gate moe_use_skywork_gating moe_2layer_gate moe_use_logits_norm moe_gate_norm_std
    moe_feature_no_mul_topk moe_eval_capacity_factor moe_train_capacity_factor moe_min_capacity
    moe_token_dropout moe_expert_parallelism moe_layer_type num_experts_group num_image_tokens
    moe_router_score_function moe_primary_router_apply_softmax num_assistant_tokens use_sliding_window_size
    mamba_ssm_cache_dtype beam_groups num_sink_tokens vocab_size_per_layer_input position_embedding_size
    expert_parallel_size expert_model_parallel_size ep_size tp_size rotary_dim qk_head_dim num_mem_blocks num_query
    moe_world_size cla_share_factor use_cla attention_head_size max_batch_size moe_drop_tokens
    compressed_tensors_size head_dim_original num_key_value_groups n_predict image_size patch_size
    tokens_per_image mm_tokens_per_image pad_token_id max_sequence_size shared_expert_chunk_size
    norm_reduce_dim layer_norm_num sep_token_id rope_dim rotary_emb_dim original_max_position_embeddings
    moe_latent_dim_note dt_rank_note pretraining_tp_size n_hash_layers index_topk_pattern indexer_types
    d_model_note initial_layers num_mtp_modules mtp_transformer_layers dense_attention_every_n_layers
    moe_n_group moe_topk_group num_expert_group mtp_hybrid_override_pattern mlp_layer_note
    compute_capability_groups attn_layer_indices_note query_group_size num_experts_in_group
    """.split()
)
"""Names that look so but leave the weights of the tuned model as they are (multi-token prediction is not loaded)."""


class Reader:
    """Values of a config under their usual names, checked; `text_config` is laid over the outer level."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.outer = config
        text = text_config(config)
        self.values: dict[str, Any] = {**config, **text} if text is not config else dict(config)
        if config.get("tie_word_embeddings") is not None:
            self.values["tie_word_embeddings"] = config["tie_word_embeddings"]
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.defaults = defaults or {}

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field under any of its names; null counts as absent."""
        for spelling in (name, *ALIASES.get(name, ())):
            self.used.add(spelling)
            if (value := self.values.get(spelling)) is not None:
                return value
        return self.defaults.get(name, default)

    def sub(self, name: str) -> Reader:
        """A nested mapping as a reader."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"model config: {name} must be a mapping, not {type(value).__name__}")
        return Reader(value)

    def int(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number within [low, high]; without `default` the field is required."""
        value = self.get(name, default)
        if value is None:
            names = " or ".join((name, *ALIASES.get(name, ())))
            raise InvalidInputError(f"model config: {names} is missing")
        return whole(name, value, low, high)

    def optional(self, name: str, *, low: int = 0) -> int | None:
        """A whole number, or None where it is absent."""
        value = self.get(name)
        return None if value is None else whole(name, value, low, MAX_SIZE)

    def number(self, name: str, default: float) -> float:
        """A finite number of reasonable size."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_SIZE:
            raise InvalidInputError(f"model config: {name} must be a number from 0 to {MAX_SIZE}, got {_short(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean (0 and 1 are accepted)."""
        value = self.get(name, default)
        if value not in (0, 1) or isinstance(value, str):
            raise InvalidInputError(f"model config: {name} must be true or false, got {_short(value)}")
        return bool(value)

    def list(self, name: str) -> list[Any] | None:
        """A list, or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise InvalidInputError(f"model config: {name} must be a list, got {_short(value)}")
        return list(value)

    @property
    def num_layers(self) -> int:
        return self.int("num_hidden_layers", high=MAX_LAYERS)

    def each(self, name: str) -> list[Any] | None:
        """A list with one value a layer; further ones (MTP layers) are dropped."""
        values = self.list(name)
        if values is None:
            return None
        if len(values) < self.num_layers:
            raise UnsupportedModelError(f"model config: {name} has {len(values)} values for {self.num_layers} layers")
        return values[: self.num_layers]

    def per_layer(self, name: str, default: int | None = None, *, low: int = 0) -> list[int]:
        """One whole number a layer, written as a number for all or as a list (a list of one counts for all)."""
        value = self.get(name, default)
        if isinstance(value, list | tuple):
            values = list(value) * self.num_layers if len(value) == 1 else self.each(name) or []
            return [whole(name, v, low, MAX_SIZE) for v in values]
        return [self.int(name, default, low=low)] * self.num_layers

    def unread(self) -> list[str]:
        """Fields that look like a part of the shape and that nothing asked for."""
        known = self.used | _NO_SHAPE
        return sorted(
            str(k)
            for k, v in self.values.items()
            if k not in known and isinstance(k, str) and _SHAPES.search(k) and _says_something(v)
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a multimodal config, or the config itself."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return text_config(inner) if name == "thinker_config" else inner
    return config


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int within [low, high], or an error that names the field."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInputError(
            f"model config: {name} must be a whole number from {low} to {high}, got {_short(value)}"
        )
    return value


def _says_something(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, int | float):
        return value != 0
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and bool(value)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # absurd nesting, or more digits than Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
