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
    word
    for words in (
        # multi-token prediction, which tuning does not load
        "num_nextn_predict_layers mtp_num_hidden_layers mtp_num_layers num_mtp_modules mtp_transformer_layers",
        # routing rules
        "n_group topk_group num_expert_group ep_size moe_jitter_eps moe_loss_weight moe_norm_min moe_gate_norm_std",
        "moe_aux_loss_coeff moe_capacity moe_eval_capacity_factor moe_train_capacity_factor moe_min_capacity",
        "moe_router_topk_scaling_factor moe_expert_parallelism moe_group_experts moe_lambda",
        # positions, and windows that other fields turn on
        "max_position_embeddings n_positions max_seq_len max_window_layers no_rope_layers no_rope_layer_interval",
        "nope_layer_interval rotary_dim qk_head_dim n_ctx sliding_window_size attention_sink_size",
        "context_window_size attention_chunk_size sliding_window_pattern _sliding_window_pattern",
        "full_attention_interval",
        # how kernels and generation run
        "chunk_size mamba_chunk_size prefill_chunk_size block_size chunk_size_feed_forward num_logits_to_keep",
        "num_labels num_return_sequences num_beams num_beam_groups num_assistant_tokens",
        # computed from others
        "time_step_rank mamba_expand expand num_key_value_groups",
    )
    for word in words.split()
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

    def whole(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number within [low, high]; without `default` the field is required."""
        value = self.get(name, default)
        if value is None:
            names = " or ".join((name, *ALIASES.get(name, ())))
            raise InvalidInputError(f"model config: {names} is missing")
        return as_whole(name, value, low, high)

    def optional(self, name: str, *, low: int = 0) -> int | None:
        """A whole number, or None where it is absent."""
        value = self.get(name)
        return None if value is None else as_whole(name, value, low, MAX_SIZE)

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

    def many(self, name: str) -> list[Any] | None:
        """A list, or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise InvalidInputError(f"model config: {name} must be a list, got {_short(value)}")
        return list(value)

    @property
    def num_layers(self) -> int:
        return self.whole("num_hidden_layers", high=MAX_LAYERS)

    def each(self, name: str) -> list[Any] | None:
        """A list with one value a layer; further ones (MTP layers) are dropped."""
        values = self.many(name)
        return None if values is None else self._a_layer_each(name, values)

    def _a_layer_each(self, name: str, values: list[Any]) -> list[Any]:
        if len(values) < self.num_layers:
            raise UnsupportedModelError(f"model config: {name} has {len(values)} values for {self.num_layers} layers")
        return values[: self.num_layers]

    def per_layer(self, name: str, default: Any = None, *, low: int = 0) -> list[int]:
        """One whole number a layer, written as a number for all or as a list (a list of one counts for all)."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple):
            return [self.whole(name, default, low=low)] * self.num_layers
        values = list(value) * self.num_layers if len(value) == 1 else self._a_layer_each(name, list(value))
        return [as_whole(name, v, low, MAX_SIZE) for v in values]

    def unread(self) -> list[str]:
        """Fields that look like a part of the language model's shape and that nothing asked for."""
        known = self.used | _NO_SHAPE
        return sorted(
            str(k)
            for k, v in text_config(self.outer).items()
            if k not in known and isinstance(k, str) and _SHAPES.search(k) and _says_something(v)
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a multimodal config, or the config itself."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return text_config(inner) if name == "thinker_config" else inner
    return config


def as_whole(name: str, value: Any, low: int, high: int) -> int:
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
