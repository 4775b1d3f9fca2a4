"""What makes a job fit that does not: changes are tried on the job itself, each with its largest batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from moecost.errors import MoECostError
from moecost.job import Job
from moecost.memory import max_micro_batch_size
from moecost.resolution import Resolved, resolve

MOST_REMEDIES: Final = 3
SHORTEST_SEQUENCE: Final = 128
"""No shorter sequence is proposed. [token]"""

Changes: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Remedy:
    """Fields to change, and the largest micro-batch that fits then."""

    changes: Changes
    batch: int

    def __str__(self) -> str:
        fields = " and ".join(f"{name}={value!r}" for name, value in self.changes.items())
        return f"{fields} fits {self.batch}"


def largest_batch(resolved: Resolved) -> int:
    """The largest micro-batch that fits; 0 where not even one sequence does."""
    habits, longest = resolved.profile.memory, float(resolved.worst_length)
    return int(max_micro_batch_size(resolved.workload, habits, padded_length=longest))


def remedies(resolved: Resolved, more_than: int = 0) -> list[Remedy]:
    """The first few changes with which more than `more_than` sequences fit, the simplest first."""
    found: list[Remedy] = []
    for alike in _candidates(resolved):
        less = [remedy.batch for remedy in found if remedy.changes.items() <= alike[0].items()]
        remedy = _first(resolved, alike, max([more_than, *less]))  # what adds to a remedy has to fit more
        found += [remedy] if remedy else []
        if len(found) == MOST_REMEDIES:
            break
    return found


def _first(resolved: Resolved, alike: Iterable[Changes], more_than: int) -> Remedy | None:
    """The first of some changes of one kind that helps."""
    tried = (Remedy(changes, _largest_with(resolved, changes)) for changes in alike)
    return next((remedy for remedy in tried if remedy.batch > more_than), None)


def _largest_with(resolved: Resolved, changes: Changes) -> int:
    """The largest batch of the changed job; 0 where the changes contradict what the job says."""
    fields = {name: getattr(resolved.job, name) for name in resolved.job.model_fields_set}
    read = {"model": resolved.model, "model_overrides": None, "dataset": resolved.dataset}  # no file is read again
    try:
        return largest_batch(resolve(Job(**fields | read | {"micro_batch_size": None} | changes)))
    except MoECostError:
        return 0


def _candidates(resolved: Resolved) -> Iterator[list[Changes]]:
    """Kinds of changes: one alone, each beside checkpointing, then more GPUs."""
    checkpointing: Changes = {} if resolved.workload.recipe.recompute else {"gradient_checkpointing": "full"}
    alone = list(_single(resolved))
    if checkpointing:
        yield [checkpointing]
    yield from alone
    if checkpointing:
        yield from ([checkpointing | alike[0]] for alike in alone)
    gpus = resolved.job.num_gpus
    yield [checkpointing | {"num_gpus": gpus * times, "zero_stage": 3} for times in (2, 4, 8, 16, 32, 64)]


def _single(resolved: Resolved) -> Iterator[list[Changes]]:
    """Changes of one thing, in the order of what they cost in time or quality."""
    job, workload = resolved.job, resolved.workload
    if "liger" in resolved.profile.fused and not job.fused_kernels:
        yield [{"fused_kernels": "liger"}]
    if job.num_gpus > 1 and workload.layout.zero_stage < 3:
        yield [{"zero_stage": 3}]
    if job.method == "full" and job.optimizer == "adamw":
        yield [{"optimizer": "adamw8bit"}]
    if job.method == "full":
        yield [{"method": "lora"}]
    if not any(use.quantized for _, use in workload.uses()):
        yield [{"method": "qlora"} | ({} if job.weight_dtype is None else {"weight_dtype": None})]
    ranks = [rank for rank in (64, 16) if job.adapts and job.method != "sparse" and rank < job.lora_rank]
    if ranks:
        yield [{"lora_rank": rank} for rank in ranks]
    lengths = [resolved.sequence_length // cut for cut in (2, 4, 8)]
    if lengths[0] >= SHORTEST_SEQUENCE:
        yield [{"sequence_length": length} for length in lengths if length >= SHORTEST_SEQUENCE]
