"""`MeasuredRun`: a job and what was measured of it, and the check that its speed is possible at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moecost.architecture import ModelSpec
from moecost.catalog import explain
from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError, UnsupportedError
from moecost.job import Job
from moecost.lengths import mean_cut_length
from moecost.specs import GPUSpec
from moecost.units import HOUR

Measured = Annotated[float, Field(gt=0)]
MemoryKind = Literal["allocated", "reserved", "nvidia-smi"]
Outcome = Literal["ok", "oom"]

SPEED_FIELDS = ("step_seconds", "queries_per_second", "tokens_per_second", "run_hours")
"""Measured fields that tell the time of a step, the most direct first."""

MAX_NAME: Final = 1_000
PASSES_FULL: Final = 3
"""Forward, and backward for inputs and for weights; recomputation would come on top."""
PASSES_FROZEN: Final = 2
"""Forward, and backward for inputs alone."""


class MeasuredRun(BaseModel):
    """What was measured of a run; any subset of the measured fields.

    Attributes
    ----------
    job : what was run.
    queries_per_second, tokens_per_second : over all GPUs; tokens are those processed, padding included.
    step_seconds : one optimizer step. [s]
    run_hours : the whole run. [h]
    peak_memory_gib, memory_kind : on one GPU, as PyTorch allocated or reserved it or as nvidia-smi showed it; None:
        the source does not say which. [GiB]
    outcome : whether it ran (`ok`) or ran out of memory (`oom`), where that was told.
    source, source_key, date : where the figures were published, a short word for the publisher, and when.
    group : runs with the same text stay on one side of any split; None: each run is its own.
    trust : 3 machine output or official result with settings, 2 a table with a doubt, 1 a user's report.
    id, notes : of the row or log it comes from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    job: Job
    queries_per_second: Measured | None = None
    tokens_per_second: Measured | None = None
    step_seconds: Measured | None = None
    run_hours: Measured | None = None
    peak_memory_gib: Measured | None = None
    memory_kind: MemoryKind | None = None
    outcome: Outcome | None = None
    source: str = ""
    source_key: str = ""
    date: str = ""
    group: str | None = None
    trust: Literal[1, 2, 3] = 3
    id: str = ""
    notes: str = ""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidInputError(explain(error, MeasuredRun)) from None

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if all(getattr(self, name) is None for name in (*SPEED_FIELDS, "peak_memory_gib", "outcome")):
            raise ValueError(f"nothing was measured; give one of {', '.join(SPEED_FIELDS)}, peak_memory_gib, outcome")
        return self


class Runs(list[MeasuredRun]):
    """A list of measured runs; `refused` tells of each one that could not be read, and why."""

    def __init__(self, runs: Iterable[MeasuredRun] = (), refused: Iterable[str] = ()) -> None:
        super().__init__(runs)
        self.refused: tuple[str, ...] = tuple(refused)


# ------------------------------------------------------------------------------------------- is it possible at all?
def refuse_impossible(run: MeasuredRun) -> None:
    """Refuse names that are in no catalogue, and a speed for which the GPUs would have to exceed their dense peak.

    The least work of a token is one multiply-add a weight that it passes (experts by top-k, no attention core), for
    the forward pass and for one (frozen weights) or two (trained) backward. A unit, a length or a number of GPUs that
    is wrong by a factor shows here; a real run reaches 0.2 to 0.7 of the peak.

    Raises
    ------
    InvalidInputError : with both numbers.
    UnknownNameError : of the model, GPU or data set.
    """
    job = run.job
    for name in ("model", "gpu", "dataset"):
        said = getattr(job, name)
        if isinstance(said, str) and len(said) > MAX_NAME:
            raise InvalidInputError(f"{name}={said[:40]!r}... has {len(said):,} characters, too many for a name")
    per_token, passes = _forward_flops_per_token(job), PASSES_FROZEN if job.adapts else PASSES_FULL
    peak, dtype, gpu = _peak(job)
    for field, tokens in _tokens_per_second(run):
        needed = tokens * per_token * passes
        if needed > peak:
            raise InvalidInputError(
                f"{field}={getattr(run, field):g} is {tokens:.4g} tokens/s and takes {needed:.3g} FLOP/s at least "
                f"({per_token:.3g} a token forward, {passes} passes), but {job.num_gpus} x {gpu} have {peak:.3g} "
                f"({dtype}, dense): check its unit, the length, num_gpus and compute_dtype"
            )


def _tokens_per_second(run: MeasuredRun) -> Iterator[tuple[str, float]]:
    """(field, tokens a second over all GPUs) of each measured speed, padding left out where it is not known."""
    job = run.job
    if run.tokens_per_second is not None:
        yield "tokens_per_second", run.tokens_per_second
    query = _tokens_per_query(job)
    if run.queries_per_second is not None:
        yield "queries_per_second", run.queries_per_second * query
    batch = job.asked_global_batch_size
    if run.step_seconds is not None and batch is not None:
        row = float(job.sequence_length or query) if job.padding == "packed" else query
        yield "step_seconds", batch * row / run.step_seconds
    queries = job.num_queries or (_dataset(job.dataset).num_queries if job.dataset is not None else None)
    if run.run_hours is not None and queries is not None:
        yield "run_hours", queries * job.epochs * query / (run.run_hours * HOUR)


def _tokens_per_query(job: Job) -> float:
    if job.dataset is None:
        assert job.sequence_length is not None  # Job has checked it
        return float(job.sequence_length)
    lengths = _dataset(job.dataset).lengths()
    return float(mean_cut_length(lengths, job.sequence_length or lengths.longest))


def _dataset(dataset: object) -> DatasetSpec:
    return dataset if isinstance(dataset, DatasetSpec) else DatasetSpec.load(dataset)  # type: ignore[arg-type]


def _forward_flops_per_token(job: Job) -> float:
    model = ModelSpec.load(job.model)
    if job.model_overrides:
        model = model.with_overrides(job.model_overrides)
    parts = dict(model.flops(1).by_part)
    if job.num_experts_per_tok is not None and model.num_experts_per_tok:
        parts["expert"] = parts.get("expert", 0.0) * job.num_experts_per_tok / model.num_experts_per_tok
    return float(sum(parts.values()))


def _peak(job: Job) -> tuple[float, str, str]:
    """(FLOP/s of all GPUs, the type they run at, name of the GPU)."""
    gpu = job.gpu if isinstance(job.gpu, GPUSpec) else GPUSpec.load(job.gpu)
    asked = job.compute_dtype or "bf16"
    try:
        return gpu.peak_flops_per_s(asked) * job.num_gpus, asked, gpu.name
    except UnsupportedError:  # emulated: not faster than the fastest of the types it has
        dtype = max(gpu.peak_tflops_dense, key=lambda kind: gpu.peak_tflops_dense[kind] if kind != "int8" else 0.0)
        return gpu.peak_flops_per_s(dtype) * job.num_gpus, dtype, gpu.name


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; PyTorch's CPU allocator and older releases say so in words alone."""
    said = str(error).lower()
    named = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    return named or "out of memory" in said or "can't allocate memory" in said
