"""`ModelSpec`: a model's shape with its names, read from the catalogue or from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, Field, PositiveInt

from moecost import catalog, flops, parameters
from moecost.errors import InvalidInputError, UnsupportedError, close_matches
from moecost.hub.reader import ALIASES, SPELLINGS, text_config
from moecost.quantities import Layers, Model, Part
from moecost.sources import FrozenMap, SourcedSpec

if TYPE_CHECKING:
    from moecost.hub.reading import OnUnknown, Reading

MAX_DEPTH: Final = 32
"""Levels of nesting a config may have."""
MAX_VALUES: Final = 200_000
"""Values on one level."""


class ModelSpec(SourcedSpec):
    """A model: its names, the config that gives its shape, and what its publisher says of its size.

    `quantities()` is the shape as formulas take it: groups of equal layers, each with its weight matrices and what it
    computes besides.

    >>> spec = ModelSpec.from_hf({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    ...                           "intermediate_size": 11008, "vocab_size": 32000})
    >>> spec.num_parameters  # Llama-2-7B
    6738415616
    """

    name: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    hub_ids: tuple[str, ...] = ()
    config: Annotated[Mapping[str, Any], AfterValidator(lambda value: _frozen(value))] = Field(repr=False)
    """Fields of the model's `config.json`."""
    approximate: bool = False
    """Fields that are not understood were left out of account."""
    published_parameters: PositiveInt | None = None
    """The publisher's count, rounded as printed."""
    published_active_parameters: PositiveInt | None = None
    """The publisher's count for one token; conventions differ (with or without embeddings)."""

    # ---------------------------------------------------------------------------------------------------- reading

    @classmethod
    def load(cls, name: str | Path | Mapping[str, Any] | ModelSpec) -> ModelSpec:
        """A model by catalogue name, alias or Hub id; from a spec YAML or `config.json` (path); or a config dict."""
        if isinstance(name, ModelSpec):
            return name
        if isinstance(name, Mapping):
            return cls.from_hf(name)
        if not isinstance(name, str | Path):
            raise InvalidInputError(f"a model is a name, path, config or ModelSpec, not {type(name).__name__}")
        if catalog.looks_like_path(name) and str(name).lower().endswith((".yaml", ".yml")):
            return catalog.load_spec_file(name, cls)
        if isinstance(name, Path) or name.lower().endswith(".json") or (_is_path(name) and _is_folder(name)):
            return cls.from_hf(name)
        index = catalog.model_index()
        found = index.find(
            name, "moecost.models() lists all; ModelSpec.from_hf() reads any config.json, from_hub() fetches one."
        )
        return _load(index.path(found), cls)

    @classmethod
    def from_hf(
        cls,
        config: str | Path | Mapping[str, Any],
        on_unknown: OnUnknown = "raise",
        *,
        name: str | None = None,
    ) -> ModelSpec:
        """The model that a `config.json` (path of it or its folder, or its content) describes.

        Raises
        ------
        UnsupportedModelError : the model type, or a field that may change the shape, is not understood; with
            `on_unknown="approximate"` it is left out of account and `notes` says so.
        InvalidInputError : a field that is needed is missing or has an impossible value.
        """
        if on_unknown not in ("raise", "approximate"):
            raise InvalidInputError(f"on_unknown={on_unknown!r} must be 'raise' or 'approximate'")
        if isinstance(config, str | Path):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            name = name or (path.parent.name if path.stem == "config" else path.stem)
            config = _read_json(path)
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"a model config is a mapping, not {type(config).__name__}")
        _check_depth(config)
        fields: Mapping[str, Any] = _frozen(config)
        reading = _reading(fields, on_unknown)
        spec = cls.model_construct(
            name=name or _name(fields),
            config=fields,
            approximate=on_unknown == "approximate",
            notes=reading.notes,
        )
        spec.__dict__["reading"] = reading
        return spec

    @classmethod
    def from_hub(cls, repo_id: str, revision: str | None = None, on_unknown: OnUnknown = "raise") -> ModelSpec:
        """The model that a repository of the Hugging Face Hub describes; asks the network, so only when called.

        Needs the extra `hub` (package huggingface_hub). Its cache, tokens and offline mode apply.
        """
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise UnsupportedError(
                "ModelSpec.from_hub needs the package huggingface_hub: pip install 'moecost[hub]', or give the path "
                "of a config.json"
            ) from None
        try:
            path = hf_hub_download(repo_id, "config.json", revision=revision)
        except Exception as error:  # the hub's many errors: not found, gated, offline
            raise InvalidInputError(f"{repo_id!r:.200}: config.json cannot be had from the hub: {error}") from error
        return cls.from_hf(path, on_unknown, name=repo_id)

    def with_overrides(self, overrides: Mapping[str, Any]) -> ModelSpec:
        """The same model with fields of its config replaced (null: left out); lists by layer follow a new depth.

        >>> spec = ModelSpec.from_hf({"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        ...                           "intermediate_size": 128, "vocab_size": 100})
        >>> spec.with_overrides({"num_hidden_layers": 2}).num_hidden_layers
        2
        """
        if not overrides:
            return self
        config = dict(self.config)
        inner = text_config(config)
        nested = inner is not config
        fields = dict(inner)
        self._resize_lists(fields, overrides)
        for key, value in overrides.items():
            if not isinstance(key, str):
                raise InvalidInputError(f"model_overrides: {key!r} is not the name of a field")
            usual = SPELLINGS.get(key, key)
            for spelling in (usual, *ALIASES.get(usual, ())):
                fields.pop(spelling, None)
                config.pop(spelling, None)
            fields[usual] = value
        config = _with_text(config, fields) if nested else fields
        used = _reading(config, "approximate").used
        unused = [key for key in overrides if SPELLINGS.get(key, key) not in used]
        if unused:
            near = close_matches(unused[0], used)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidInputError(f"model_overrides: {unused[0]!r} is no field that shapes {self.name}{hint}")
        spec = self.from_hf(config, "approximate" if self.approximate else "raise", name=self.name)
        said = ", ".join(f"{key}={value!r:.40}" for key, value in overrides.items())
        return spec.model_copy(update={"notes": (*self.notes, f"{self.name} with {said}.")})

    def _resize_lists(self, fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
        """Lists with a value a layer are cut, or repeated, to a new number of layers."""
        for key, new in overrides.items():
            if SPELLINGS.get(key, key) != "num_hidden_layers" or not isinstance(new, int) or not 0 < new <= 10_000:
                continue
            old = self.num_hidden_layers
            for name, value in fields.items():
                if isinstance(value, list | tuple | str) and len(value) == old and name not in overrides:
                    times = -(-new // old)
                    fields[name] = (value * times)[:new]

    # ------------------------------------------------------------------------------------------------------ shape

    @cached_property
    def reading(self) -> Reading:
        """What the config was understood as."""
        return _reading(self.config, "approximate" if self.approximate else "raise")

    def quantities(self) -> Model:
        """The shape in plain numbers, as formulas take it."""
        return self.reading.model

    @property
    def shape(self) -> Model:
        """The same as `quantities()`."""
        return self.reading.model

    @property
    def model_type(self) -> str | None:
        """The family as the reader knows it (`llama`, `mixtral`, `blackmamba`); None where the config does not say."""
        return self.reading.family

    @property
    def layers(self) -> tuple[Layers, ...]:
        """Groups of equal layers."""
        return self.shape.layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.shape.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.shape.vocab_size

    @property
    def tie_word_embeddings(self) -> bool:
        """The head is the embedding."""
        return self.shape.tied_head

    @property
    def num_hidden_layers(self) -> int:
        """Layers, of all kinds."""
        return sum(group.count for group in self.layers)

    @property
    def num_experts(self) -> int:
        """Routed experts of a sparse layer, the most where layers differ; 0 for a dense model."""
        return max((g.experts.num_experts for g in self.layers if g.experts), default=0)

    @property
    def num_experts_per_tok(self) -> int:
        """Experts that a token goes to; 0 for a dense model."""
        return max((g.experts.num_experts_per_tok for g in self.layers if g.experts), default=0)

    # ----------------------------------------------------------------------------------------------------- counts

    @property
    def num_parameters(self) -> int:
        """All parameters: tied weights once, vision tower included, layers for multi-token prediction left out."""
        return parameters.total(self.shape)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses, both embeddings counted."""
        return parameters.active(self.shape)

    @property
    def parameters_by_part(self) -> dict[Part, int]:
        """Parameters by part; dense feed-forwards and Mamba are `other`."""
        return parameters.by_part(self.shape)

    def trainable_parameters(self, rank: int, targets: parameters.Targets, software: str | None = None) -> int:
        """Parameters of LoRA adapters.

        Parameters
        ----------
        rank : of the adapters.
        targets : module names, matched as suffixes as PEFT does; or `attention`, `experts`, `all-linear`. Names that
            match nothing are ignored (`parameters.match_targets` tells which).
        software : a profile, which says whether experts are modules; None: transformers 5 with PEFT 0.21.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidInputError(f"rank must be a whole number of at least 1, got {rank!r}")
        if software is None:
            return parameters.adapter_parameters(self.shape, rank=rank, targets=targets)
        from moecost.software import SoftwareProfile  # above this module: imported where it is used

        profile = SoftwareProfile.load(software).for_run(self.model_type)
        return parameters.adapter_parameters(
            self.shape,
            rank=rank,
            targets=targets,
            experts_as_modules=profile.experts_as_modules,
            all_linear_skips=profile.all_linear_skips,
        )

    def flops(self, tokens: int, causal: bool = True) -> flops.Flops:
        """FLOPs of one sequence, forward and backward, all weights trainable. [FLOP]

        `causal` counts half of the attention square (and windows); False the full square, as eager attention computes.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidInputError(f"tokens must be a whole number of at least 1, got {tokens!r}")
        return flops.count(self.shape, tokens, causal=causal)

    def __hash__(self) -> int:
        return hash((self.name, self.shape))


@cache
def _load(path: Path, cls: type[ModelSpec]) -> ModelSpec:
    return catalog.load_spec_file(path, cls)


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # too long for a name
        return False


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name


def _read_json(path: Path) -> Any:
    text = catalog.read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidInputError(f"{path}: is not valid JSON: {reason}") from None


def _check_depth(config: Mapping[str, Any]) -> None:
    """Refuse nesting that would exhaust Python's stack further on."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [v for item in level for v in _inside(item)]
        if len(level) > MAX_VALUES:
            raise InvalidInputError(f"model config: holds more than {MAX_VALUES:,} values")
        level = [v for v in level if isinstance(v, Mapping | list | tuple)]
        if not level:
            return
    raise InvalidInputError(f"model config: is nested more than {MAX_DEPTH} levels deep")


def _reading(config: Mapping[str, Any], on_unknown: OnUnknown) -> Reading:
    """What a config is understood as; the readers of all families are imported with the first one."""
    from moecost.hub.reading import read

    return read(config, on_unknown)


def _frozen(value: Any) -> Any:
    """The same with lists as tuples and mappings that cannot be changed."""
    if isinstance(value, Mapping):
        return FrozenMap({key: _frozen(v) for key, v in value.items()})
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _inside(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, Mapping) else list(item)


def _name(config: Mapping[str, Any]) -> str:
    for key in ("name", "_name_or_path", "model_type"):
        value = config.get(key)
        if isinstance(value, str) and value.strip():
            return value
    return "custom model"


def _with_text(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its language part replaced."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            return {**config, name: dict(fields)}
    inner = config.get("thinker_config")
    if isinstance(inner, Mapping):
        return {**config, "thinker_config": _with_text(inner, fields)}
    return dict(fields)
