"""Is the faster of two layouts named? Pairs of measured runs that differ in their layout alone."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from moecost.errors import MoECostError
from moecost.estimation import estimate_job
from moecost.fitting import source_of
from moecost.job import Job
from moecost.measured_run import MeasuredRun
from moecost.results import Estimate

LAYOUT: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size", "expert_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel", "zero_stage", "shard_group_size",
    "micro_batch_size", "gradient_accumulation_steps", "moe_dispatch", "comm_overlap",
)  # fmt: skip
"""Fields of a job that say how it is spread over its GPUs; the global batch may differ with them."""
BESIDE: Final = frozenset({*LAYOUT, "global_batch_size", "num_queries", "on_oom", "gradient_checkpointing"})
LEAST: Final = 1.10
"""Ratio of two measured speeds below which neither layout counts as the faster one."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one source, and those of them whose faster layout was named."""

    source: str
    pairs: int
    right: int


def orderings(runs: Iterable[MeasuredRun], least: float = LEAST) -> list[Pairs]:
    """Pairs of layouts of one model, stack and release on the same GPUs, by source.

    Parameters
    ----------
    runs : measured runs; those of one source and date are taken to be of one release.
    least : ratio of the two measured speeds from which a pair counts.
    """
    like: dict[Hashable, list[tuple[Job, float, float]]] = defaultdict(list)
    for run in runs:
        try:
            found = estimate_job(run.job.model_copy(update={"on_oom": "report"}))
        except MoECostError:
            continue  # `validate` says why
        speed = _measured(run, found)
        if speed is not None:
            same = tuple(repr(v) for name, v in run.job if name not in BESIDE)
            like[(source_of(run), run.date, *same)].append((run.job, speed, found.padded_tokens_per_second))
    count: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for key, members in like.items():
        for (job, fast, said), (other, slow, of_other) in itertools.combinations(members, 2):
            alike = all(getattr(job, name) == getattr(other, name) for name in LAYOUT)
            if not alike and max(fast, slow) >= least * min(fast, slow):
                pair = count[key[0]]  # type: ignore[index]
                pair[0] += 1
                pair[1] += (fast > slow) == (said > of_other)
    return [Pairs(source, *numbers) for source, numbers in sorted(count.items(), key=lambda item: -item[1][0])]


def _measured(run: MeasuredRun, found: Estimate) -> float | None:
    """Tokens a second, padding included, from whichever speed was measured; None without one."""
    a_query = found.padded_tokens_per_second / found.queries_per_second
    if run.tokens_per_second is not None:
        return run.tokens_per_second
    if run.queries_per_second is not None:
        return run.queries_per_second * a_query
    if run.step_seconds is not None:
        return found.global_batch_size * a_query / run.step_seconds
    return None
