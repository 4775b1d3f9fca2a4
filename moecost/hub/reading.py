"""Which family a config belongs to, and the model that it describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moecost.errors import InvalidInputError, UnsupportedModelError
from moecost.hub.decoder import Traits, ordinary, unsupported
from moecost.hub.families import LLAMA, ORDINARY
from moecost.hub.hybrids import HYBRIDS
from moecost.hub.irregular import IRREGULAR
from moecost.hub.reader import Reader, text_config
from moecost.hub.recent import RECENT
from moecost.quantities import Model

OnUnknown = Literal["raise", "approximate"]

OWN: dict[str, Callable[[Reader], Model]] = {**HYBRIDS, **IRREGULAR, **RECENT}
"""Families with a reader of their own."""

SAME_AS = {
    "phi-msft": "phi",
    "Yi": "yi",
    "gemma4_unified": "gemma4",
    "hunyuan": "hunyuan_v1_moe",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "MiniMaxText01": "minimax",
    "minimax_m2.5": "minimax_m2",
    "deepseek_v3.2": "deepseek_v32",
    "kimi_k2.5": "kimi_k25",
    "llama4_text": "llama4",
    "skywork_moe": "skywork",
    "mimo_v2": "mimo_v2_flash",
}
"""Other spellings of a `model_type`; a `_text` at the end is cut off besides."""

BY_ARCHITECTURE = {"Grok1ModelForCausalLM": "grok-1"}
"""For configs without `model_type`."""


@dataclass(frozen=True)
class Reading:
    """What a config was read as."""

    model: Model
    family: str | None
    notes: tuple[str, ...]
    used: frozenset[str]  # the fields that were asked for


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family of a config, None where it says nothing."""
    text = text_config(config)
    for source in (config, text):
        kind = source.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise InvalidInputError(f"model config: model_type must be a text, not {type(kind).__name__}")
        if kind:
            kind = SAME_AS.get(kind, kind)
            if _known(kind):
                return kind
            if _known(kind.removesuffix("_text")):
                return kind.removesuffix("_text")
            if source is text:
                return kind
    if "mamba_moe_layers" in config:
        return "blackmamba"
    architectures = config.get("architectures")
    if isinstance(architectures, list | tuple) and architectures and isinstance(architectures[0], str):
        return BY_ARCHITECTURE.get(architectures[0])
    return None


def loads_vision(family: str | None) -> bool:
    """Whether the class that tuning loads holds the vision tower: the causal language model where there is one."""
    return family == "gemma4" or (family in ORDINARY and ORDINARY[family].vision)


def _known(kind: str) -> bool:
    return kind in ORDINARY or kind in OWN


def read(config: Mapping[str, Any], on_unknown: OnUnknown = "raise") -> Reading:
    """The model that a config describes.

    An unknown `model_type`, or a field of the shape that the family does not know, raises `UnsupportedModelError`, or
    is left out of account and noted with `on_unknown="approximate"`.
    """
    approximate = on_unknown == "approximate"
    family = family_of(config)
    traits = ORDINARY.get(family or "llama", LLAMA)
    notes = []
    if family and not _known(family):
        if not approximate:
            raise unsupported(family)
        notes.append(f"The model type {family!r} is not known: read as an ordinary decoder.")
    if "vision_config" in config and not loads_vision(family):
        notes.append("The vision tower is left out: the class of the language model does not load it.")
    if isinstance(config.get("quantization_config"), Mapping):
        method = str(config["quantization_config"].get("quant_method", "quantized"))
        notes.append(f"The checkpoint is stored as {method:.20}; how a run holds its weights is another matter.")
    r = Reader(config, dict(traits.defaults))
    reader: Callable[[Reader], Model] = OWN.get(family or "") or ordinary(traits if family else _as_written(r))
    model = reader(r)
    unread = r.unread()
    if unread and not approximate:
        raise UnsupportedModelError(
            f"model config: {', '.join(unread)} may change the shape and is not understood for "
            f"{family or 'a config without model_type'}; "
            "ModelSpec.from_hf(config, on_unknown='approximate') leaves it out"
        )
    if unread:
        notes.append(f"Left out, as this family is not known to use it: {', '.join(unread)}.")
    return Reading(model, family, (*notes, *r.notes), frozenset(r.used))


def _as_written(r: Reader) -> Traits:
    """A config without `model_type` is Llama's form, with latent attention where it has the fields."""
    return ORDINARY["deepseek_v2"] if r.values.get("kv_lora_rank") else LLAMA


__all__ = ["OnUnknown", "Reading", "family_of", "loads_vision", "read"]
