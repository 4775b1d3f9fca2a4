"""How a job is laid out over GPUs: data parallelism is what the other kinds leave, experts are nested in it.

`layout_of` checks that the kinds go together, with the model and with each other, and names the nearest that do.
"""

from __future__ import annotations

from typing import Final

from moecost.architecture import ModelSpec
from moecost.errors import InvalidInputError
from moecost.job import Job
from moecost.software import SoftwareProfile
from moecost.specs import GPUSpec
from moecost.storage import WEIGHT_FORMATS
from moecost.workload import Dispatch, Layout


def layout_of(job: Job, model: ModelSpec, gpu: GPUSpec, profile: SoftwareProfile, notes: list[str]) -> Layout:
    """The layout that a job asks for, with the stack's habits where it is silent."""
    inner = job.model_parallel_size
    if job.num_gpus % inner:
        raise InvalidInputError(
            f"num_gpus={job.num_gpus} is no multiple of tensor x pipeline x context parallel = {inner}; "
            f"use {max(job.num_gpus // inner, 1) * inner}"
        )
    data = job.num_gpus // inner
    _fits_the_model(job, model)
    _experts_fit(job, model, data)
    stage = job.zero_stage
    if stage is None:
        stage = _habitual_stage(job, model, gpu, profile) if job.num_gpus > 1 else 0
        if job.num_gpus > 1:
            notes.append(f"zero_stage={stage} is the habit of {profile.name}")
    if job.offload == "experts" and not model.num_experts:
        raise InvalidInputError(f"offload='experts': {model.name} has no routed experts; use offload='parameters'")
    if job.offload == "nvme":
        notes.append("drives are taken to give each GPU 3 GB/s: no measured run with offload='nvme' has been seen")
    return Layout(
        data_parallel=float(data),
        tensor_parallel=float(job.tensor_parallel_size),
        pipeline_parallel=float(job.pipeline_parallel_size),
        virtual_pipeline=float(_virtual_pipeline(job, model, profile, notes)),
        context_parallel=float(job.context_parallel_size),
        expert_parallel=float(job.expert_parallel_size),
        expert_tensor_parallel=_expert_cut(job, data, profile, notes),
        zero_stage=stage,
        shard_group=_shard_group(job, data, stage),
        offload=job.offload,
        sequence_parallel=bool(job.sequence_parallel or (job.sequence_parallel is None and profile.sequence_parallel)),
        dispatch=_dispatch(job, profile, notes),
    )


def _nearest(asked: int, of: int) -> str:
    """The divisors of a number that lie nearest to what was asked."""
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda n: (abs(n - asked), n))[:2])))


def _fits_the_model(job: Job, model: ModelSpec) -> None:
    tensor, stages, layers = job.tensor_parallel_size, job.pipeline_parallel_size, model.num_hidden_layers
    for group in model.quantities().layers:
        heads = group.attention.num_heads if group.attention else tensor
        if heads % tensor:
            raise InvalidInputError(
                f"tensor_parallel_size={tensor} does not divide the {heads} attention heads of {model.name}; "
                f"use {_nearest(tensor, heads)}"
            )
    if stages > layers:
        raise InvalidInputError(
            f"pipeline_parallel_size={stages}: {model.name} has {layers} layers; use {layers} or less"
        )
    chunks = job.virtual_pipeline_size or 1
    if chunks > 1 and stages == 1:
        raise InvalidInputError(
            f"virtual_pipeline_size={chunks} needs a pipeline; set pipeline_parallel_size, or leave it out"
        )
    if stages * chunks > layers + 2:  # embedding and loss may count as layers of their own
        raise InvalidInputError(
            f"virtual_pipeline_size={chunks} on {stages} stages needs {stages * chunks} layers, {model.name} has "
            f"{layers}; use {max(layers // stages, 1)} or less"
        )


def _experts_fit(job: Job, model: ModelSpec, data: int) -> None:
    asked, cut = job.expert_parallel_size, job.expert_tensor_parallel_size or 1
    if asked == 1:
        return
    sizes = {group.experts.num_experts for group in model.quantities().layers if group.experts}
    if not sizes:
        raise InvalidInputError(f"expert_parallel_size={asked}: {model.name} has no routed experts; leave it out")
    for experts in sizes:
        if experts % asked:
            raise InvalidInputError(
                f"expert_parallel_size={asked} does not divide the {experts} experts of {model.name}; "
                f"use {_nearest(asked, experts)}"
            )
    within = data * job.context_parallel_size * job.tensor_parallel_size
    if within % (asked * cut):
        what = f"expert_parallel_size={asked}" + (f" x expert_tensor_parallel_size={cut}" if cut > 1 else "")
        raise InvalidInputError(
            f"{what} does not divide the {within} GPUs of a pipeline stage (data, context and tensor parallel); "
            f"use {_nearest(asked, max(within // cut, 1))}"
        )


def _shard_group(job: Job, data: int, stage: int) -> float | None:
    """GPUs that one replica of the sharded states is spread over; None: all that hold the same slice."""
    asked, of = job.shard_group_size, data * job.context_parallel_size
    if asked is None:
        return None
    if stage == 0:
        raise InvalidInputError(f"shard_group_size={asked} has no meaning with zero_stage=0; use zero_stage=1, 2 or 3")
    if of % asked:
        raise InvalidInputError(
            f"shard_group_size={asked} does not divide the {of} data-parallel GPUs; use {_nearest(asked, of)}"
        )
    return float(asked)


def _expert_cut(job: Job, data_parallel: int, profile: SoftwareProfile, notes: list[str]) -> float | None:
    """GPUs an expert is cut over: as asked, else all that share products, or 1.

    By the stack's habit, and where expert groups only fit across tensor-parallel GPUs.
    """
    if job.expert_tensor_parallel_size is not None:
        return float(job.expert_tensor_parallel_size)
    if job.expert_parallel_size == 1 or job.tensor_parallel_size == 1:
        return None
    fits = (data_parallel * job.context_parallel_size) % job.expert_parallel_size == 0
    if fits and profile.cuts_experts:
        return None
    notes.append(f"expert_tensor_parallel_size=1 is the habit of {profile.name} with experts dealt out")
    return 1.0


def _virtual_pipeline(job: Job, model: ModelSpec, profile: SoftwareProfile, notes: list[str]) -> int:
    """Model chunks a pipeline stage: as asked, else as many as the stack deals out by habit."""
    if job.virtual_pipeline_size is not None or job.pipeline_parallel_size == 1:
        return job.virtual_pipeline_size or 1
    a_stage = max(model.num_hidden_layers // job.pipeline_parallel_size, 1)
    habit = min(profile.virtual_pipeline, a_stage)
    if habit > 1:
        notes.append(f"virtual_pipeline_size={habit} is the habit of {profile.name}")
    return habit


def _habitual_stage(job: Job, model: ModelSpec, gpu: GPUSpec, profile: SoftwareProfile) -> int:
    """Adapters are trained on replicas where the frozen weights leave each GPU room; all else as the stack does it."""
    if not job.adapts or profile.adapter_zero_stage is None or job.offload in ("experts", "parameters", "nvme"):
        return profile.zero_stage
    weights = model.num_parameters * WEIGHT_FORMATS[job.held_weight_dtype].bytes
    held = weights / (job.tensor_parallel_size * job.pipeline_parallel_size)
    return profile.adapter_zero_stage if held <= REPLICA_SHARE * gpu.memory_usable_bytes else profile.zero_stage


REPLICA_SHARE: Final = 0.75
"""Share of a GPU's memory that frozen weights may fill before a run is sharded rather than replicated."""


def _dispatch(job: Job, profile: SoftwareProfile, notes: list[str]) -> Dispatch:
    """How routed tokens travel: as asked, else as the stack does it."""
    if job.expert_parallel_size == 1:
        return Dispatch()
    name = job.moe_dispatch or profile.moe_dispatch
    if job.moe_dispatch is None:
        notes.append(f"moe_dispatch={name!r} is the habit of {profile.name}")
    hidden = profile.hides_exchanges if job.comm_overlap is None else job.comm_overlap
    found = profile.dispatchers[name]
    return Dispatch(exchange_s=found.exchange_s, sent_to=found.sent_to, hidden=hidden)
