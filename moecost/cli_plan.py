"""What `moecost plan` makes of its options and of a job file. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moecost.job import Job
from moecost.plan_layouts import SIZES

LEFT_OPEN: Final = frozenset(
    {"gpu", "node", "gpus_per_node", "num_gpus", "zero_stage", *SIZES, "shard_group_size", "virtual_pipeline_size",
     "expert_tensor_parallel_size", "sequence_parallel", "micro_batch_size", "gradient_accumulation_steps", "price",
     "market", "on_oom"}
)  # fmt: skip
"""Fields of a job that a plan chooses."""


def fields_of(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a job says besides GPUs, layout, batch a GPU and price; what is given wins.

    The sequences of an optimizer step are kept, as far as the job says them.
    """
    fields = {name: getattr(job, name) for name in job.model_fields_set if name not in LEFT_OPEN}
    if job.asked_global_batch_size is not None:
        fields["global_batch_size"] = job.asked_global_batch_size
    return fields | dict(given)


def told(**options: Any) -> dict[str, Any]:
    """Options that were given."""
    return {name: value for name, value in options.items() if value is not None}
