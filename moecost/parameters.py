"""Parameter counts of a model in plain numbers: total, active, by part, and of low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, get_args

from moecost.errors import InvalidInputError
from moecost.quantities import Matrix, Model, Part

PARTS: tuple[Part, ...] = get_args(Part)

Targets: TypeAlias = str | Sequence[str]
"""Module names, or one of the keywords `attention`, `experts`, `all-linear` (a text of names parted by `;` too)."""

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_matrices(model: Model) -> Iterator[tuple[int, Matrix]]:
    """(number of layers, matrix) of every matrix in the layer groups."""
    return ((group.count, matrix) for group in model.layers for matrix in group.matrices)


def by_part(model: Model) -> dict[Part, int]:
    """Parameters by part; a tied head counts once, as embedding."""
    counts = dict.fromkeys(PARTS, 0)
    counts["embed"] = model.embedding.parameters
    counts["head"] = model.head.bias if model.tied_head else model.head.parameters
    for count, matrix in layer_matrices(model):
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
    """Parameters that one token uses: experts it is not sent to are left out, both embeddings are counted."""
    idle = sum(n * (m.copies - m.used_copies) * (m.weights + m.bias) for n, m in layer_matrices(model))
    return total(model) - idle


def linear_weights(model: Model) -> int:
    """Weights of `nn.Linear` modules in the layers, as a 4-bit loader of transformers 4 finds them."""
    return sum(n * m.copies * m.weights for n, m in layer_matrices(model) if m.is_linear)


# ------------------------------------------------------------------------------------------------ adapters


@dataclass(frozen=True)
class Match:
    """What a list of targets names: (layers, matrix, rank factor) of every adapted matrix, and names without a match.

    The rank factor is 1, or 2 where gate and up are adapted as one fused matrix.
    """

    matrices: tuple[tuple[int, Matrix, int], ...]
    unmatched: tuple[str, ...]
    vision_linear_sizes: int = 0  # in + out of the adapted modules of a vision tower

    def parameters(self, rank: int) -> int:
        """Adapter parameters: `r (in + out)` a copy of each matrix."""
        sizes = sum(n * m.copies * factor * (m.in_features + m.out_features) for n, m, factor in self.matrices)
        return rank * (sizes + self.vision_linear_sizes)


def match_targets(
    model: Model, targets: Targets, *, experts_as_modules: bool = False, all_linear_skips: Iterable[str] = ()
) -> Match:
    """Which matrices adapters go to.

    A name matches a module as in PEFT: the whole path, or its suffix after a dot. `experts_as_modules` is the form of
    transformers 4 (each expert matrix an `nn.Linear`); otherwise that of transformers 5 with PEFT 0.21, where experts
    are fused: names of experts and of the router become adapters on the fused parameters in some families (twice the
    rank on gate and up together; a dense or shared feed-forward of the same names is then passed over), and nothing in
    the others. `all_linear_skips`: modules that the stack leaves out of `all-linear`.
    """
    names = expand(targets)
    if experts_as_modules:
        match = _match(model, names, lambda m: m.is_linear)
    else:
        match = _match_fused(model, names) if model.fused_adapters else _match(model, names, _stays_linear)
    if "all-linear" not in names:
        return match
    kept = tuple(m for m in match.matrices if not matches(m[1].module, all_linear_skips))
    return replace(match, matrices=kept, vision_linear_sizes=model.vision_linear_sizes)


def matches(module: str, targets: Iterable[str]) -> list[str]:
    """The targets that name `module` as PEFT does: the whole path, or its suffix after a dot."""
    return [t for t in targets if module == t or module.endswith("." + t)]


def expand(targets: Targets) -> tuple[str, ...]:
    """Names of a list or keyword; `all-linear` and `experts` stay as they are."""
    if isinstance(targets, str):
        targets = ATTENTION_TARGETS if targets == "attention" else targets.split(";")
    names = tuple(name.strip() for name in targets)
    if not all(names):
        raise InvalidInputError("lora_targets holds an empty name")
    if "attention" in names:
        names = tuple(n for name in names for n in (ATTENTION_TARGETS if name == "attention" else (name,)))
    return tuple(dict.fromkeys(names))


def _stays_linear(matrix: Matrix) -> bool:
    """An `nn.Linear` in transformers 5 too."""
    return matrix.is_linear and not matrix.fused


def _with_head(model: Model) -> Iterator[tuple[int, Matrix]]:
    yield from layer_matrices(model)
    yield 1, model.head


def _match(model: Model, names: tuple[str, ...], linear: Callable[[Matrix], bool]) -> Match:
    """Matching by module name, one adapter a matrix; dotted names reach the fused parameters of experts as well."""
    found: set[str] = set()
    chosen = []
    for count, matrix in _with_head(model):
        hits = [name for name in names if _names(name, matrix, linear(matrix))]
        found.update(hits)
        if hits:
            chosen.append((count, matrix, 1))
    return Match(tuple(_one_adapter_a_parameter(chosen, linear)), tuple(n for n in names if n not in found))


def _names(name: str, matrix: Matrix, is_linear: bool) -> bool:
    if name == "experts":
        return matrix.part == "expert"
    if name == "all-linear":
        return is_linear and matrix.part != "head"
    if is_linear:
        return bool(matches(matrix.module, (name,)))
    return matrix.part == "expert" and "." in name and bool(matches(_parameter(matrix), (name,)))


def _parameter(matrix: Matrix) -> str:
    """Path of the fused parameter that holds an expert matrix (`mlp.experts.gate_up_proj`)."""
    module = matrix.module
    return f"{module.split('.*')[0] if '*' in module else module.rpartition('.')[0]}.{matrix.fused}"


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _one_adapter_a_parameter(
    chosen: list[tuple[int, Matrix, int]], linear: Callable[[Matrix], bool]
) -> Iterator[tuple[int, Matrix, int]]:
    """Gate and up that are one parameter in this stack get one adapter."""
    for count, matrix, factor in chosen:
        together = matrix.fused == "gate_up_proj" and not linear(matrix)
        if together and matrix.kernel == "expert.w3":
            continue  # counted with the gate
        yield count, _gate_and_up(matrix) if together else matrix, factor


def _gate_and_up(matrix: Matrix) -> Matrix:
    return replace(matrix, kernel="expert.w1", out_features=2 * matrix.out_features)


def _match_fused(model: Model, names: tuple[str, ...]) -> Match:
    """PEFT 0.21 on transformers 5, families whose expert names it turns into adapters on the fused parameters."""
    matrices = list(_with_head(model))
    everything = "all-linear" in names
    moved = {_leaf(m.module) for _, m in matrices if m.fused} | {"gate"}
    wanted = set(moved) if everything else {_leaf(name) for name in names} & moved
    direct = [n for n in names if any(m.part == "expert" and _names(n, m, False) for _, m in matrices)]
    plain = tuple(name for name in names if _leaf(name) not in moved and name not in direct)
    found = {name for name in names if _leaf(name) in wanted}
    chosen = []
    for count, matrix in matrices:
        straight = [n for n in direct if matrix.part == "expert" and _names(n, matrix, False)]
        if matrix.fused and (_leaf(matrix.module) in wanted or straight):
            found.update(straight)
            if matrix.kernel == "expert.w3":
                continue
            factor = 1
            if matrix.kernel == "expert.w1" and matrix.fused == "gate_up_proj":
                branches = {_leaf(m.module) for _, m in matrices if m.fused == matrix.fused}
                whole = everything or "experts" in names
                factor = len(branches) if whole else 1 if straight else len(branches & wanted)
                matrix = _gate_and_up(matrix)
            chosen.append((count, matrix, factor))
        elif not matrix.fused and matrix.is_linear and _leaf(matrix.module) not in moved:
            hits = [name for name in plain if _names(name, matrix, True)]
            found.update(hits)
            if hits:
                chosen.append((count, matrix, 1))
    return Match(tuple(chosen), tuple(name for name in names if name not in found))


def adapter_parameters(
    model: Model,
    *,
    rank: int,
    targets: Targets,
    experts_as_modules: bool = False,
    all_linear_skips: Iterable[str] = (),
) -> int:
    """Trainable parameters of LoRA adapters of `rank` on what `targets` name (see `match_targets`)."""
    match = match_targets(
        model, targets, experts_as_modules=experts_as_modules, all_linear_skips=tuple(all_linear_skips)
    )
    return match.parameters(rank)
