"""Vision towers, counted as a whole: tuning a language model holds them in memory, but seldom runs them.

Facts from the classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moecost.errors import UnsupportedModelError
from moecost.hub.reader import MAX_LAYERS, Reader, as_whole


@dataclass(frozen=True)
class Tower:
    """Parameters of a tower with its projector, and `in + out` of all its linear modules (what adapters grow with)."""

    parameters: int = 0
    linear_sizes: int = 0

    def __add__(self, other: Tower) -> Tower:
        return Tower(self.parameters + other.parameters, self.linear_sizes + other.linear_sizes)

    def __mul__(self, count: int) -> Tower:
        return Tower(self.parameters * count, self.linear_sizes * count)


def linear(rows: int, columns: int, bias: bool = True) -> Tower:
    """A linear module."""
    return Tower(rows * columns + (columns if bias else 0), rows + columns)


def gated(hidden: int, width: int, bias: bool = False) -> Tower:
    """A gated feed-forward."""
    return linear(hidden, width, bias) * 2 + linear(width, hidden, bias)


def two(hidden: int, width: int, out: int | None = None) -> Tower:
    """Two linear modules with biases."""
    return linear(hidden, width) + linear(width, out or hidden)


def gemma4(v: Reader, text_hidden: int) -> Tower:
    """Gemma 4: gated encoder with query and key norms."""
    h, f, n = v.whole("hidden_size", 768), v.whole("intermediate_size", 3072), _depth(v, 16)
    heads, kv, d = v.whole("num_attention_heads", 12), v.whole("num_key_value_heads", 12), v.whole("head_dim", 64)
    attention = linear(h, heads * d, False) + linear(h, kv * d, False) * 2 + linear(heads * d, h, False)
    layer = attention + gated(h, f) + Tower(2 * d + 4 * h)
    positions = Tower(2 * v.whole("position_embedding_size", 10240) * h)
    return layer * n + linear(3 * v.whole("patch_size", 16) ** 2, h, False) + positions + linear(h, text_hidden, False)


def qwen2(v: Reader, text_hidden: int) -> Tower:
    """Qwen2-VL: layer norms, two-matrix feed-forward; here `hidden_size` is that of the language model."""
    h, out = v.whole("embed_dim", 1280), v.whole("hidden_size", text_hidden)
    layer = linear(h, 3 * h) + linear(h, h) + two(h, round(v.number("mlp_ratio", 4) * h)) + Tower(4 * h)
    wide = h * v.whole("spatial_merge_size", 2) ** 2
    return layer * _depth(v, 32) + Tower(_patch(v) * h + 2 * h) + two(wide, wide, out)


def qwen2_5(v: Reader, text_hidden: int) -> Tower:
    """Qwen2.5-VL: RMS norms, gated feed-forward with biases."""
    h = v.whole("hidden_size", 3584)
    layer = linear(h, 3 * h) + linear(h, h) + gated(h, v.whole("intermediate_size", 3420), True) + Tower(2 * h)
    wide = h * v.whole("spatial_merge_size", 2) ** 2
    return layer * _depth(v, 32) + Tower(_patch(v) * h + h) + two(wide, wide, v.whole("out_hidden_size", 3584))


def qwen3(v: Reader, text_hidden: int) -> Tower:
    """Qwen3-VL and Qwen3.5: learned positions, mergers for the last layer and for each deep-stack layer."""
    h, out = v.whole("hidden_size", 1152), v.whole("out_hidden_size", 3584)
    layer = linear(h, 3 * h) + linear(h, h) + two(h, v.whole("intermediate_size", 4304)) + Tower(4 * h)
    wide = h * v.whole("spatial_merge_size", 2) ** 2
    deep = v.many("deepstack_visual_indexes")
    mergers = two(wide, wide, out) + Tower(2 * h)
    mergers += (two(wide, wide, out) + Tower(2 * wide)) * len([8, 16, 24] if deep is None else deep)
    positions = v.whole("num_position_embeddings", 2304) * h
    return layer * _depth(v, 27) + mergers + Tower(_patch(v, 16) * h + h + positions)


def glm4(v: Reader, text_hidden: int) -> Tower:
    """GLM-4V: RMS norms, gated feed-forward as wide as the language model, a convolution that merges patches."""
    h, out = v.whole("hidden_size", 1536), v.whole("out_hidden_size", 4096)
    bias = v.flag("attention_bias")
    layer = linear(h, 3 * h, bias) + linear(h, h, False) + gated(h, out) + Tower(2 * h)
    merge = v.whole("spatial_merge_size", 2) ** 2
    merger = linear(out, out, False) + gated(out, v.whole("intermediate_size", 13696)) + Tower(2 * out)
    patches = (v.whole("image_size", 336) // v.whole("patch_size", 14)) ** 2
    rest = _patch(v) * h + h + patches * h + 2 * h + h * out * merge + out
    return layer * _depth(v, 24) + merger + Tower(rest)


def siglip(v: Reader, text_hidden: int) -> Tower:
    """SigLIP with Gemma 3's projector."""
    h, f, patch = v.whole("hidden_size", 768), v.whole("intermediate_size", 3072), v.whole("patch_size", 16)
    layer = linear(h, h) * 4 + two(h, f) + Tower(4 * h)
    positions = (v.whole("image_size", 224) // patch) ** 2
    embeddings = 3 * patch**2 * h + h + positions * h
    pooling = Tower()
    if v.flag("vision_use_head", True):
        pooling = Tower(h + 2 * h + 3 * h * (h + 1)) + linear(h, h) + two(h, f)
    return layer * _depth(v, 12) + Tower(embeddings + 2 * h + h * text_hidden + h) + pooling


def pixtral(v: Reader, text_hidden: int) -> Tower:
    """Pixtral with Mistral 3's projector."""
    h, f, patch = v.whole("hidden_size", 1024), v.whole("intermediate_size", 4096), v.whole("patch_size", 16)
    layer = linear(h, h, False) * 4 + gated(h, f) + Tower(2 * h)
    merger = linear(h * v.whole("spatial_merge_size", 2) ** 2, h, False)
    bias = v.flag("multimodal_projector_bias")
    projector = merger + linear(h, text_hidden, bias) + linear(text_hidden, text_hidden, bias)
    return layer * _depth(v, 24) + Tower(3 * patch**2 * h + 2 * h) + projector


def kimi(v: Reader, text_hidden: int) -> Tower:
    """The tower of Kimi K2.5: layer norms, learned positions, a projector over merged patches."""
    h, f, patch = v.whole("hidden_size", 1152), v.whole("intermediate_size", 4304), v.whole("patch_size", 14)
    layer = linear(h, h) * 4 + two(h, f) + Tower(4 * h)
    positions = v.whole("pos_emb_height", 64) * v.whole("pos_emb_width", 64)
    rows, columns = (as_whole("merge_kernel_size", n, 1, 64) for n in (v.many("merge_kernel_size") or [2, 2])[:2])
    wide = h * rows * columns
    rest = 3 * patch**2 * h + h + positions * h + 4 * h
    return layer * _depth(v, 27) + Tower(rest) + two(wide, wide, text_hidden)


def _depth(v: Reader, default: int) -> int:
    name = "depth" if v.get("depth") is not None else "num_hidden_layers"
    return v.whole(name, default, high=MAX_LAYERS)


def _patch(v: Reader, patch: int = 14) -> int:
    """Values of a patch over the frames that are taken together."""
    return v.whole("in_channels", 3) * v.whole("temporal_patch_size", 2) * v.whole("patch_size", patch) ** 2


TOWERS: dict[str, Callable[[Reader, int], Tower]] = {
    "gemma4": gemma4,
    "qwen2_vl": qwen2,
    "qwen2_5_vl": qwen2_5,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": qwen3,
    "glm4v": glm4,
    "glm4v_moe": glm4,
    "siglip": siglip,
    "gemma3": siglip,
    "pixtral": pixtral,
    "kimi_k25": kimi,
}
"""By `model_type` of the tower, less an ending `_vision` or `_vision_model`."""


def tower(r: Reader) -> Tower:
    """The tower that the config describes; nothing where it has none."""
    config = r.outer.get("vision_config")
    if not isinstance(config, Mapping):
        return Tower()
    kind = config.get("model_type") or r.outer.get("model_type")
    kind = str(kind).removesuffix("_model").removesuffix("_vision")
    if kind not in TOWERS:
        raise UnsupportedModelError(f"model config: a vision tower of type {kind!r:.60} is not understood")
    outer = {k: r.outer[k] for k in ("spatial_merge_size", "multimodal_projector_bias") if k in r.outer}
    return TOWERS[kind](Reader({**outer, **config}), r.whole("hidden_size"))
