"""Parameter counts of a model in plain numbers: total, active, by part, and of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from moecost.quantities import Layers, Matrix, Model, Part

PARTS: tuple[Part, ...] = get_args(Part)


def layer_matrices(model: Model) -> Iterator[tuple[int, Layers, Matrix]]:
    """(layers, group, matrix) of every matrix in the layer groups."""
    for group in model.layers:
        for matrix in group.matrices:
            yield group.count, group, matrix


def by_part(model: Model) -> dict[Part, int]:
    """Parameters by part; a tied head counts once, as embedding."""
    counts = dict.fromkeys(PARTS, 0)
    counts["embed"] = model.embedding.parameters
    counts["head"] = model.head.copies * model.head.bias if model.tied_head else model.head.parameters
    for count, _, matrix in layer_matrices(model):
        counts[matrix.part] += count * matrix.parameters
    for group in model.layers:
        counts["norm"] += group.count * group.norm_parameters
        counts["other"] += group.count * (group.vector_parameters - group.norm_parameters)
    counts["norm"] += model.final_norm_parameters
    counts["vision"] += model.vision_parameters
    counts["other"] += model.extra_parameters - model.final_norm_parameters - model.vision_parameters
    return counts


def total(model: Model) -> int:
    """All parameters, tied weights once."""
    return sum(by_part(model).values())


def active(model: Model) -> int:
    """Parameters that one token uses: the experts it is not sent to left out, both embeddings counted."""
    idle = sum(n * (m.copies - m.used_copies) * (m.weights + m.bias) for n, _, m in layer_matrices(model))
    return total(model) - idle


def matches(module: str, targets: Iterable[str]) -> list[str]:
    """The targets that name `module` as PEFT does: the whole path, or its suffix after a dot."""
    return [t for t in targets if module == t or module.endswith("." + t)]


ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapter_parameters(model: Model, *, rank: int, targets: Iterable[str]) -> int:
    """Parameters of LoRA adapters, `rank (in + out)` a copy of each matrix that `targets` name."""
    targets = tuple(targets)
    return sum(
        n * m.copies * rank * (m.in_features + m.out_features)
        for n, _, m in layer_matrices(model)
        if matches(m.module, targets)
    )
