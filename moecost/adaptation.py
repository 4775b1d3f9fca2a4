"""What a tuning method does with each weight matrix: quantized, adapted, trained or merely used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from moecost.parameters import match_targets
from moecost.quantities import LayerKind, Matrix, Model
from moecost.software import SoftwareProfile
from moecost.workload import Block, WeightUse

SEPARATE: Final = ("q_proj", "k_proj", "v_proj")
"""Projections that some models hold as one matrix: their names then mean that one."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The uses of a model's matrices; targets that match nothing; and what is adapted beside the language model."""

    blocks: tuple[Block, ...]
    embedding: WeightUse
    head: WeightUse
    unmatched: tuple[str, ...]
    elsewhere_width: float  # input plus output features of adapted modules of a vision tower

    @property
    def uses(self) -> tuple[WeightUse, ...]:
        return (*(use for block in self.blocks for use in block.uses), self.head)


def adapt(
    model: Model, profile: SoftwareProfile, *, quantized: bool, targets: tuple[str, ...] | None, trains_all: bool
) -> Adaptation:
    """The use of a model's matrices under a method.

    Parameters
    ----------
    profile : says whether experts are modules, what its 4-bit loader takes, what `all-linear` leaves out.
    quantized : linear layers are held in a quantized format; embedding, head and norms never are.
    targets : modules with adapters, names or keywords; None without adapters.
    trains_all : all weights are trained.
    """
    return _adapt(
        model,
        profile.experts_as_modules,
        profile.quantizes_experts,
        profile.all_linear_skips,
        quantized,
        targets,
        trains_all,
    )


@lru_cache(maxsize=512)
def _adapt(
    model: Model,
    experts_as_modules: bool,
    quantizes_experts: bool,
    all_linear_skips: tuple[str, ...],
    quantized: bool,
    targets: tuple[str, ...] | None,
    trains_all: bool,
) -> Adaptation:
    widths: dict[tuple[str, str, int, int], float] = {}
    unmatched: tuple[str, ...] = ()
    elsewhere = 0.0
    if targets is not None:
        match = match_targets(
            model,
            _fused_names(model, targets),
            experts_as_modules=experts_as_modules,
            all_linear_skips=all_linear_skips,
        )
        unmatched, elsewhere = match.unmatched, float(match.vision_linear_sizes)
        for _, m, factor in match.matrices:
            widths[m.kernel, m.module, m.in_features, m.out_features] = float(factor * (m.in_features + m.out_features))

    def width(m: Matrix) -> float:
        """Of the matrix itself, or of gate and up as one parameter, which is twice as wide."""
        wide = (widths.get((m.kernel, m.module, m.in_features, n * m.out_features)) for n in (1, 2))
        return next((w for w in wide if w is not None), 0.0)

    def use(matrix: Matrix, layer: LayerKind | None = None) -> WeightUse:
        seen = matrix.is_linear and (matrix.part != "expert" or experts_as_modules)
        return WeightUse(
            matrix,
            layer or _layer(matrix),
            quantized=quantized and layer is None and (seen or (quantizes_experts and matrix.part == "expert")),
            adapter_width=width(matrix),
            trained=trains_all,
        )

    blocks = tuple(Block(layers, tuple(use(m) for m in layers.matrices)) for layers in model.layers)
    return Adaptation(blocks, use(model.embedding, "embedding"), use(model.head, "head"), unmatched, elsewhere)


def _fused_names(model: Model, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Targets with the name of a model's fused projection in place of the separate ones that it lacks."""
    matrices = [m for layers in model.layers for m in layers.matrices]
    fused = next((m.module.rsplit(".", 1)[-1] for m in matrices if m.kernel == "attention.qkv"), None)
    separate = any(m.module.endswith(SEPARATE) for m in matrices)
    if fused is None or separate:
        return targets
    return tuple(dict.fromkeys(fused if t in SEPARATE else t for t in targets))


def _layer(matrix: Matrix) -> LayerKind:
    if matrix.part in ("expert", "router", "shared"):
        return "moe"
    family = matrix.kernel.split(".")[0]
    return "mamba" if family == "mamba" else "attention" if matrix.part == "attn" else "mlp"
