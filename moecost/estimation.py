"""`estimate`: a job in, what it needs, takes and costs out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from moecost import cost
from moecost.advice import largest_batch, remedies
from moecost.arrays import FloatLike
from moecost.calibration import Calibration
from moecost.errors import DoesNotFitError, InvalidInputError, OutOfRangeWarning
from moecost.experts import binomial_variation, experts_touched, load_imbalance, load_variation, normal_quantile
from moecost.footprint import all_parameters, trained_elements
from moecost.job import Job
from moecost.lengths import mean_cut_length
from moecost.memory import MOMENTS, load_bytes, peak
from moecost.resolution import Epoch, Resolved, asked, epoch, price, resolve
from moecost.results import (
    Bound,
    Estimate,
    Experts,
    Memory,
    Provenance,
    Roof,
    StepTime,
    Usage,
    Utilization,
)
from moecost.schedule import LARGEST_DEFAULT_BATCH, run_saves, run_steps
from moecost.software import SoftwareProfile
from moecost.step import PassTimes, StepTimes, step_times
from moecost.units import GIB
from moecost.workload import Device, Workload, experts_per_token


def estimate(model: Any, gpu: Any = None, **job: Any) -> Estimate:
    """What a fine-tuning run needs, takes and costs.

    Parameters
    ----------
    model : a catalogue name or Hub id, a spec or `config.json` (path or dict), a `ModelSpec`; or a whole `Job`.
    gpu : a catalogue name, alias, device name or cloud instance type, a path, or a `GPUSpec`.
    **job : the other fields of `Job`.

    Returns
    -------
    Estimate : queries a second, hours, dollars, memory, and where time and memory go.

    Raises
    ------
    MoECostError : `InvalidInputError` and `UnknownNameError` for input that cannot be used, `UnsupportedError` for
        what is not modelled, `NoPriceError` for a price that nobody quoted, `DoesNotFitError` for a job that does
        not fit (unless `on_oom="report"`).

    >>> e = estimate("mixtral-8x7b", "a40", method="qlora", lora_targets=["w1", "w2", "w3", "gate"],
    ...              dataset="math-14k", sequence_length=1024, epochs=10, price=0.79, software="hf-peft-2024")
    >>> e.max_micro_batch_size
    4
    """
    if isinstance(model, Job):
        if gpu is not None or job:
            raise InvalidInputError("estimate(Job(...)) takes no further arguments; put them into the job")
        return estimate_job(model)
    if gpu is None:
        raise InvalidInputError("gpu is missing: estimate(model, gpu, ...), moecost.gpus() lists them")
    return estimate_job(Job(model=model, gpu=gpu, **job))


def estimate_job(job: Job) -> Estimate:
    """See `estimate`."""
    resolved = resolve(job)
    notes = list(resolved.notes)
    largest = largest_batch(resolved)
    batch = _batch(resolved, largest, notes)
    memory = _memory(resolved, batch)
    fits = memory.device_gib <= memory.usable_gib
    if not fits:
        if job.on_oom == "raise":
            raise DoesNotFitError(_why_not(resolved, memory, batch, largest))
        notes.append("does not fit: every figure is computed as if it did")
    elif (note := _how_sure(resolved, memory)) is not None:
        notes.append(note)
    accumulation = int(asked(job).accumulation(batch))
    times = epoch(resolved, batch, accumulation)
    step = step_times(resolved.workload, times.batches, resolved.profile, resolved.coefficients)
    beyond = _beyond_the_evidence(resolved, batch, notes)
    usd, quote = price(job, resolved.gpu, notes)
    return _estimate(resolved, times, step, memory, fits, largest, batch, accumulation, usd, quote, notes, beyond)


def choose_batch(resolved: Resolved, notes: list[str]) -> tuple[int, int]:
    """(micro-batch size, accumulation steps): as the job says, else the largest that fits."""
    given = resolved.job.micro_batch_size
    batch = given if given is not None else _batch(resolved, largest_batch(resolved), notes)
    return batch, int(asked(resolved.job).accumulation(batch))


def _batch(resolved: Resolved, largest: int, notes: list[str]) -> int:
    job, said = resolved.job, asked(resolved.job)
    if job.micro_batch_size is None and not said.is_whole:
        raise InvalidInputError(_not_whole(job, resolved.data_parallel * (job.gradient_accumulation_steps or 1)))
    batch = int(said.micro_batch(largest=largest, rows=resolved.rows_per_epoch))
    fixed = job.global_batch_size is not None and job.gradient_accumulation_steps is not None
    if job.micro_batch_size is None and not fixed and largest >= 1:
        notes.append(
            f"micro_batch_size={batch}: the largest that fits"
            if batch == largest
            else f"micro_batch_size={batch}, although {largest} would fit: bounded by the queries, the global batch "
            f"or {LARGEST_DEFAULT_BATCH}"
        )
    return batch


def _not_whole(job: Job, parts: int) -> str:
    batch = job.global_batch_size or 0
    return (
        f"global_batch_size={batch} cannot be dealt out to {parts} data-parallel GPUs and accumulation steps; "
        f"use {max(batch // parts, 1) * parts}"
    )


# ------------------------------------------------------------------------------------------------ memory
def _memory(resolved: Resolved, batch: int) -> Memory:
    habits = resolved.profile.memory
    _, at = peak(resolved.workload, habits, sequences=float(batch), padded_length=float(resolved.worst_length))
    moment = max(MOMENTS, key=lambda m: float(at[m].device(habits)))
    parts = at[moment]
    return Memory(
        allocated_gib=float(parts.allocated) / GIB,
        reserved_gib=float(parts.reserved(habits)) / GIB,
        device_gib=float(parts.device(habits)) / GIB,
        usable_gib=float(resolved.workload.device.memory_bytes) / GIB,
        weights_gib=float(parts.weights) / GIB,
        adapters_gib=float(parts.adapters) / GIB,
        gradients_gib=float(parts.gradients) / GIB,
        optimizer_gib=float(parts.optimizer) / GIB,
        activations_gib=float(parts.activations) / GIB,
        logits_gib=float(parts.logits) / GIB,
        buffers_gib=float(parts.buffers) / GIB,
        load_gib=load_bytes(resolved.workload) / GIB,
        moment=moment,
    )


def _why_not(resolved: Resolved, memory: Memory, batch: int, largest: int) -> str:
    job = resolved.job
    part, most = next(iter(memory.parts.items()))
    text = (
        f"{resolved.model.name} needs {memory.device_gib:.1f} GiB at micro_batch_size={batch} with sequences of "
        f"{resolved.worst_length} tokens, the {resolved.gpu.marketing_name} has {memory.usable_gib:.1f}; the largest "
        f"part is {part}, {most:.1f} GiB."
    )
    tries = ", ".join(str(remedy) for remedy in remedies(resolved, more_than=largest))
    if largest:
        open_ = "" if job.micro_batch_size else " (leave gradient_accumulation_steps out)"
        return f"{text} Use micro_batch_size={largest} or less{open_}{f'; {tries}' if tries else ''}."
    if not tries:
        return f"{text} Not even one sequence fits, whatever is tried: use a GPU with more memory."
    return f"{text} Not even one sequence fits. Try one of: {tries}; on_oom='report' shows all figures."


# ------------------------------------------------------------------------------------------------ the result
def _estimate(
    resolved: Resolved,
    times: Epoch,
    step: StepTimes,
    memory: Memory,
    fits: bool,
    largest: int,
    batch: int,
    accumulation: int,
    usd: float | None,
    quote: Any,
    notes: list[str],
    beyond: float,
) -> Estimate:
    job, calibration, workload = resolved.job, resolved.calibration, resolved.workload
    seconds = float(step.seconds)
    steps = int(run_steps(epochs=job.epochs, steps_an_epoch=times.steps))
    hours = float(
        cost.run_hours(
            steps=steps,
            step_s=seconds,
            saves=run_saves(epochs=job.epochs, saves_each_epoch=resolved.profile.run.saves_each_epoch),
            save_s=cost.save_seconds(
                saved_bytes=saved_bytes(resolved.workload, resolved.profile),
                bytes_per_s=resolved.profile.run.save_bytes_per_s,
            ),
            startup_s=resolved.profile.run.startup_s,
        )
    )
    epoch_s = times.steps * seconds
    data_tokens = resolved.num_queries * mean_cut_length(resolved.lengths, resolved.sequence_length)
    batches = times.batches
    ranks = resolved.data_parallel
    padded_tokens = float(np.sum(batches.tokens * batches.probability)) * times.micro_batches * ranks
    peak_flops = float(workload.device.peak_flops_per_s)
    flops, executed = float((step.forward.flops + step.backward.flops).sum()), float(step.together.flops.sum())
    trained, _, _ = trained_elements(workload)
    usd_per_hour = float("nan") if usd is None else usd
    return Estimate(
        model=resolved.model.name,
        gpu=resolved.gpu.name,
        num_gpus=job.num_gpus,
        method=job.method,
        queries_per_second=resolved.num_queries / epoch_s,
        tokens_per_second=data_tokens / epoch_s,
        padded_tokens_per_second=padded_tokens / epoch_s,
        step=_step_time(step, workload.device),
        bound=_bound_of_step(step, workload.device),
        utilization=_utilization(step, workload.device),
        roof=Roof(peak_flops_per_s=peak_flops, bytes_per_s=float(workload.device.bytes_per_s)),
        mfu=flops / (seconds * peak_flops),
        hfu=executed / (seconds * peak_flops),
        memory=memory,
        fits=fits,
        fits_probability=_fits_probability(memory, calibration.log_sd_memory),
        max_micro_batch_size=largest,
        micro_batch_size=batch,
        global_batch_size=batch * accumulation * ranks,
        experts=_experts(resolved, times),
        num_parameters=all_parameters(workload),
        num_trainable_parameters=int(trained),
        dataset=None if resolved.dataset is None else resolved.dataset.name,
        sequence_length=resolved.sequence_length,
        num_queries=resolved.num_queries,
        epochs=job.epochs,
        gradient_accumulation_steps=accumulation,
        steps=steps,
        hours=hours,
        gpu_hours=hours * job.num_gpus,
        usd_per_gpu_hour=usd_per_hour,
        cost_usd=float(cost.cost_usd(hours=hours, num_gpus=job.num_gpus, usd_per_gpu_hour=usd_per_hour)),
        notes=tuple(notes),
        provenance=Provenance(
            price=quote,
            calibration=calibration.name,
            calibration_error=calibration.cross_validated_error,
            software=resolved.profile.name,
            sources=_sources(resolved),
        ),
        log_sd_time=math.hypot(calibration.log_sd_time, beyond),
        log_sd_memory=calibration.log_sd_memory,
    )


def saved_bytes(workload: Workload, profile: SoftwareProfile) -> FloatLike:
    """Bytes of a checkpoint as the stack writes it: trained weights, and the optimizer's state if it does."""
    trained, _, width = trained_elements(workload)
    return trained * (width + (workload.recipe.optimizer_bytes if profile.run.saves_optimizer else 0.0))


def _step_time(step: StepTimes, device: Device) -> StepTime:
    forward, recompute, backward = (float(p.total) for p in (step.forward, step.recompute, step.backward))
    return StepTime.model_validate(  # one call for all entries: each by itself would cost twice the time
        {
            "seconds": float(step.seconds),
            "forward": forward,
            "backward": recompute + backward,
            "recompute": recompute,
            "optimizer": float(step.optimizer),
            "other": float(step.other),
            "host": float(step.together.host.sum()),
            "communication": float(step.together.wire.sum()),
            "by_layer": _grouped(step, [op.layer for op in step.operators], device, whole=True),
            "by_kernel": _grouped(step, [op.kernel for op in step.operators], device, whole=False),
        }
    )


def _grouped(step: StepTimes, names: Iterable[str], device: Device, whole: bool) -> dict[str, dict[str, Any]]:
    """Fields of `OperatorTime`, summed over the operators of one name.

    `whole` counts what waits for the host and the wire, else the GPU alone.
    """
    every, forward = step.together, step.forward
    columns = [every.gpu, every.host, every.wire, every.flops, every.bytes, every.launches,
               forward.seconds if whole else forward.gpu]  # fmt: skip
    groups: dict[str, list[float]] = {}
    for name, row in zip(names, np.stack(columns, axis=1).tolist(), strict=True):
        have = groups.get(name)
        groups[name] = row if have is None else [a + b for a, b in zip(have, row, strict=True)]
    out = {}
    for name, (gpu, host, wire, flops, moved, launches, forward_s) in groups.items():
        bound: Bound = _kernel_bound(flops, moved, device)
        if whole and host + wire > gpu:
            bound = "host" if host > wire else "communication"
        out[name] = {
            "seconds": gpu + host + wire if whole else gpu,
            "forward": forward_s,
            "launches": launches,
            "host": host,
            "communication": wire,
            "flops": flops,
            "bytes": moved,
            "bound": bound,
        }
    return out


def _kernel_bound(flops: float, moved: float, device: Device) -> Literal["compute", "memory"]:
    """Which side of the ridge point a kernel lies on."""
    return "compute" if flops * device.bytes_per_s >= moved * device.peak_flops_per_s else "memory"


def _bound_of_step(step: StepTimes, device: Device) -> Bound:
    """What takes most of the step: waiting for host or wire, kernels bound by compute, or kernels bound by memory."""
    work = step.together
    found: dict[Bound, float] = {"host": float(work.host.sum()), "communication": float(work.wire.sum()),
                                 "compute": 0.0, "memory": float(step.optimizer)}  # fmt: skip
    for gpu, flops, moved in zip(work.gpu.tolist(), work.flops.tolist(), work.bytes.tolist(), strict=True):
        found[_kernel_bound(flops, moved, device)] += gpu
    return max(found, key=lambda name: found[name])


def _utilization(step: StepTimes, device: Device) -> Utilization:
    moe = np.array([op.layer == "moe" for op in step.operators])
    return Utilization(moe=_usage(step.together, moe, device), step=_usage(step.together, np.ones_like(moe), device))


def _usage(work: PassTimes, which: NDArray[np.bool_], device: Device) -> Usage:
    gpu = float(work.gpu[which].sum())
    if not gpu:
        return Usage(sm=0.0, dram=0.0)
    moved, sm = float(work.bytes[which].sum()), float(work.sm_seconds[which].sum())
    return Usage(sm=min(sm / gpu, 1.0), dram=min(moved / (gpu * float(device.bytes_per_s)), 1.0))


def _experts(resolved: Resolved, times: Epoch) -> Experts | None:
    found = [b.layers for b in resolved.workload.blocks if b.layers.experts is not None]
    if not found:
        return None
    layers = max(found, key=lambda g: g.experts.num_experts if g.experts else 0)
    assert layers.experts is not None
    num, k = layers.experts.num_experts, experts_per_token(resolved.workload.recipe, layers)
    batches = times.batches
    tokens, p = batches.tokens, batches.probability
    shape: dict[str, Any] = {"num_experts": num, "num_experts_per_tok": k}
    touched = experts_touched(tokens=tokens, **shape)
    skew = load_variation(router_skew=resolved.coefficients.router_skew, **shape)
    spread = np.hypot(binomial_variation(tokens=tokens, **shape), skew)
    imbalance = load_imbalance(variation=spread, **shape)
    return Experts(
        num_experts=num,
        num_experts_per_tok=float(k),
        touched=float(np.sum(touched * p)),
        tokens_per_expert=float(np.sum(tokens * k / touched * p)),
        load_imbalance=float(np.sum(imbalance * p)),
    )


def _sources(resolved: Resolved) -> dict[str, str]:
    out = {}
    for kind, spec in (("gpu", resolved.gpu), ("model", resolved.model), ("dataset", resolved.dataset)):
        for name, source in (getattr(spec, "sources", None) or {}).items():
            out[f"{kind}.{name}"] = f"{source.title} ({source.date})"
    return out


def _fits_probability(memory: Memory, log_sd: float) -> float:
    """Chance that the true need lies below what the GPU has, a normal law of its logarithm."""
    return 0.5 * math.erfc(math.log(memory.device_gib / memory.usable_gib) / (max(log_sd, 1e-6) * math.sqrt(2.0)))


SURE, TOSS_UP = 0.9, 0.8
"""Probability at which a batch is called safe, and below which one is told of it."""


def _how_sure(resolved: Resolved, memory: Memory) -> str | None:
    """Where a job may well not fit: the largest batch that almost surely does."""
    log_sd = resolved.calibration.log_sd_memory
    probability = _fits_probability(memory, log_sd)
    if probability >= TOSS_UP:
        return None
    device = resolved.workload.device
    spared = float(device.memory_bytes) * math.exp(-float(normal_quantile(SURE)) * log_sd)
    workload = replace(resolved.workload, device=replace(device, memory_bytes=spared))
    safe = largest_batch(replace(resolved, workload=workload))
    which = f"micro_batch_size={safe} is the largest that does" if safe else "not even one sequence does"
    return f"fits with a probability of {100 * probability:.0f} %; {which} with {100 * SURE:.0f} %"


OUT_OF_RANGE_LOG_SD: Final = 0.15
"""What a job far outside of the runs of a calibration adds to the spread of its time: a judgement."""


def _beyond_the_evidence(resolved: Resolved, batch: int, notes: list[str]) -> float:
    """Spread that this job adds to the calibration's own, with a note for each reason."""
    calibration = resolved.calibration
    kinds = {
        "software": resolved.profile.name,
        "architecture": resolved.gpu.architecture,
        "method": resolved.job.method,
    }
    for kind, value in kinds.items():
        seen = calibration.evidence.get(kind)
        if seen and value not in seen:
            notes.append(f"calibration {calibration.name!r} has seen no run with {kind} {value}: intervals are wider")
    added = calibration.log_sd_of_thin_evidence(kinds)
    if _check_range(calibration, resolved, batch, notes):
        added = math.hypot(added, OUT_OF_RANGE_LOG_SD)
    return added


def _check_range(calibration: Calibration, resolved: Resolved, batch: int, notes: list[str]) -> bool:
    """Say, and warn once, where a calibration is used far (twice) outside of the runs it was fitted on."""
    values = {"micro_batch_size": float(batch), "sequence_length": float(resolved.worst_length)}
    outside = [
        f"{name}={values[name]:g} (they had {low:g} to {high:g})"
        for name, (low, high) in calibration.range.items()
        if name in values and not low / 2 <= values[name] <= 2 * high
    ]
    if outside:
        what = f"calibration {calibration.name!r} is used outside of the runs it was fitted on"
        notes.append(f"{what}: {', '.join(outside)}")
        warnings.warn(f"{what}; see Estimate.notes", OutOfRangeWarning, stacklevel=5)
    return bool(outside)
