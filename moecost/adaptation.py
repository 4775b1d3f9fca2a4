"""What a tuning method does with each weight matrix: quantized, adapted, trained or merely used."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from moecost.parameters import ATTENTION_TARGETS, matches
from moecost.quantities import LayerKind, Matrix, Model
from moecost.software import SoftwareProfile
from moecost.workload import Block, WeightUse

QKV: Final = frozenset({"q_proj", "k_proj", "v_proj"})
KEYWORDS: Final = ("attention", "experts", "all-linear")
"""Target lists that can be said in one word."""


def adapt(
    model: Model, profile: SoftwareProfile, *, quantized: bool, targets: tuple[str, ...] | None, trains_all: bool
) -> tuple[tuple[Block, ...], WeightUse, WeightUse]:
    """(blocks, embedding, head) of a model under a method.

    Parameters
    ----------
    profile : says whether experts are modules, and what `all-linear` leaves out.
    quantized : linear layers are held in a quantized format; embedding, head and norms never are.
    targets : modules with adapters, names or one keyword; None without adapters.
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
) -> tuple[tuple[Block, ...], WeightUse, WeightUse]:
    def use(matrix: Matrix) -> WeightUse:
        seen = matrix.is_linear and (matrix.part != "expert" or experts_as_modules)
        return WeightUse(
            matrix,
            _layer(matrix),
            quantized=quantized and (seen or (quantizes_experts and matrix.part == "expert")),
            adapted=targets is not None and seen and _is_target(matrix, targets, all_linear_skips),
            trained=trains_all,
        )

    blocks = tuple(Block(layers, tuple(use(m) for m in layers.matrices)) for layers in model.layers)
    ends = (
        WeightUse(model.embedding, "embedding", trained=trains_all),
        WeightUse(model.head, "head", trained=trains_all),
    )
    return blocks, *ends


def unmatched_targets(model: Model, targets: Iterable[str]) -> list[str]:
    """Targets that name no matrix of the model: adapters pass over them."""
    matrices = [m for layers in model.layers for m in layers.matrices]
    modules = [m.module for m in matrices]
    if any(m.kernel == "attention.qkv" for m in matrices):
        modules += sorted(QKV)
    return [t for t in targets if t not in KEYWORDS and not any(matches(module, [t]) for module in modules)]


def _is_target(matrix: Matrix, targets: tuple[str, ...], all_linear_skips: tuple[str, ...]) -> bool:
    if targets == ("all-linear",):
        return not matches(matrix.module, all_linear_skips)
    if targets == ("attention",):
        return bool(matches(matrix.module, ATTENTION_TARGETS))
    if targets == ("experts",):
        return matrix.part == "expert"
    if matches(matrix.module, targets):
        return True
    # names of separate projections where the model holds one fused matrix
    return matrix.kernel == "attention.qkv" and bool(QKV & set(targets))


def _layer(matrix: Matrix) -> LayerKind:
    if matrix.part in ("expert", "router", "shared"):
        return "moe"
    family = matrix.kernel.split(".")[0]
    return "mamba" if family == "mamba" else "attention" if matrix.part == "attn" else "mlp"
