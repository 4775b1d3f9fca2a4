"""`MeasuredRun`: a job and what was measured of it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from moecost.checked import Checked
from moecost.job import Job

Measured = Annotated[float, Field(gt=0)]

SPEED_FIELDS = ("step_seconds", "queries_per_second", "tokens_per_second", "run_hours")
"""Measured fields that tell the time of a step, the most direct first."""


class MeasuredRun(Checked):
    """What was measured of a run; any subset of the measured fields.

    Attributes
    ----------
    job : what was run.
    queries_per_second, tokens_per_second : over all GPUs; tokens are those processed, padding included.
    step_seconds : one optimizer step. [s]
    run_hours : the whole run. [h]
    peak_memory_gib, memory_kind : on one GPU, as PyTorch allocated or reserved it or as nvidia-smi showed it. [GiB]
    source : where the figures were published.
    group : runs with the same text stay on one side of any split; None: each run is its own.
    trust : 3 machine output or official result with settings, 2 a table with a doubt, 1 a user's report.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    job: Job
    queries_per_second: Measured | None = None
    tokens_per_second: Measured | None = None
    step_seconds: Measured | None = None
    run_hours: Measured | None = None
    peak_memory_gib: Measured | None = None
    memory_kind: Literal["allocated", "reserved", "nvidia-smi"] | None = None
    source: str = ""
    group: str | None = None
    trust: Literal[1, 2, 3] = 3

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.peak_memory_gib is None and all(getattr(self, name) is None for name in SPEED_FIELDS):
            raise ValueError(f"nothing was measured; give one of {', '.join(SPEED_FIELDS)}, peak_memory_gib")
        return self
