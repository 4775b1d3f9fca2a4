"""`ModelSpec`: a model's shape, read from a catalogue or from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moecost import hub, parameters
from moecost.errors import InvalidInputError
from moecost.quantities import Model, Part


class ModelSpec(BaseModel):
    """A model: names, config and shape."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    aliases: tuple[str, ...] = ()
    hub_ids: tuple[str, ...] = ()
    config: dict[str, Any] = Field(repr=False)
    shape: Model = Field(repr=False)
    notes: tuple[str, ...] = ()
    provenance: dict[str, str] = Field(default={}, repr=False)

    @classmethod
    def from_hf(
        cls,
        config: str | Path | Mapping[str, Any],
        on_unknown: Literal["raise", "approximate"] = "raise",
        name: str | None = None,
    ) -> ModelSpec:
        """The model that a `config.json` (path or dict) describes."""
        if isinstance(config, str | Path):
            path = Path(config)
            name = name or path.stem
            config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"a model config is a mapping, not {type(config).__name__}")
        name = name or config.get("name") or config.get("_name_or_path") or config.get("model_type") or "custom"
        return cls.model_construct(name=name, config=dict(config), shape=hub.read_model(config))

    def with_overrides(self, overrides: Mapping[str, Any]) -> ModelSpec:
        """The same model with fields of its config replaced."""
        return type(self).from_hf({**self.config, **overrides}, name=self.name)

    def quantities(self) -> Model:
        """The shape in plain numbers, as formulas take it."""
        return self.shape

    @property
    def model_type(self) -> str | None:
        return self.config.get("model_type")

    @property
    def num_parameters(self) -> int:
        """All parameters, tied weights once, vision tower included."""
        return parameters.total(self.shape)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses."""
        return parameters.active(self.shape)

    @property
    def parameters_by_part(self) -> dict[Part, int]:
        return parameters.by_part(self.shape)

    def trainable_parameters(self, rank: int, targets: list[str]) -> int:
        """Parameters of LoRA adapters."""
        return parameters.adapter_parameters(self.shape, rank=rank, targets=targets)
