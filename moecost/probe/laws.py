"""What each task of a probe should take, by the same laws that an estimate is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from moecost.arrays import FloatLike
from moecost.coefficients import COEFFICIENT_NAMES, Coefficients
from moecost.communication import LINK_RAMP_S, all_reduce_bytes, gather_bytes, transfer_s
from moecost.job import Job
from moecost.operators import operators
from moecost.probe.tasks import COLLECTIVES, Task
from moecost.probe_record import Peaks
from moecost.quantities import LayerKind
from moecost.resolution import resolve
from moecost.roofline import gemm_compute_time, gemm_flops, smooth_maximum
from moecost.software import SoftwareProfile
from moecost.storage import COMPUTE_BYTES, WEIGHT_FORMATS
from moecost.workload import Batches, Device, Workload

MOVES: Final = {"copy": 2, "add": 3}
"""Elements that pass the memory for each one of the result."""
LATENCY: Final = "latency of {}"
"""Name of the time that a collective takes beside its bytes. [s]"""


def seconds(task: Task, peaks: Peaks, profile: SoftwareProfile, values: Mapping[str, float]) -> float | None:
    """Time of a task; None where the peak of its data type, or of the link, is not known. [s]

    Parameters
    ----------
    values : the coefficients by name, and the latencies of collectives by `LATENCY`.
    """
    c = Coefficients(**{name: values[name] for name in COEFFICIENT_NAMES})
    if task.kind in COLLECTIVES:
        return _collective(task, peaks, values)
    if task.kind in MOVES:
        each = float(MOVES[task.kind] * COMPUTE_BYTES[task.dtype])
        return float(task["elements"] * each / (peaks.bytes_per_s * c.elementwise_bandwidth))
    if task.kind == "launch":
        return float(c.launch_s)
    if task.kind == "linear":
        work = profile.host.linear
        launches = work.forward + (work.backward if task.how == "step" else 0.0)
        return float(task["layers"] * launches * c.launch_s)
    if task.kind == "dequantize":
        each = WEIGHT_FORMATS["nf4"].bytes + COMPUTE_BYTES[task.dtype]
        return float(task["elements"] * each / (peaks.bytes_per_s * c.dequantize_bandwidth))
    if task.kind == "optimizer":
        habits = profile.optimizer
        moved = task["elements"] * habits.foreach_copies * 4.0
        return float(moved / (peaks.bytes_per_s * c.optimizer_bandwidth) + habits.seconds_per_tensor)
    peak = peaks.flops_per_s.get(task.dtype)
    if peak is None:
        return None
    return _gemm(task, peaks, peak, c) if task.kind == "gemm" else _layer(task, peaks, peak, profile, c)


def _gemm(task: Task, peaks: Peaks, peak: float, c: Coefficients) -> float:
    """As `operators` has it: tiles and waves of compute, or the operands' way through the memory."""
    m, k, n = task["rows"], task["in_features"], task["out_features"]
    sizes = {"rows": float(m), "in_features": float(k), "out_features": float(n)}
    rate = peak * c.gemm_efficiency
    if peaks.num_sms is None:
        compute = gemm_flops(**sizes) / rate
    else:
        compute = gemm_compute_time(**sizes, num_sms=peaks.num_sms, flops_per_s=rate)
    moved = COMPUTE_BYTES[task.dtype] * (k * n + m * (k + n))
    return float(np.maximum(compute, moved / (peaks.bytes_per_s * c.gemm_bandwidth)))


def _collective(task: Task, peaks: Peaks, values: Mapping[str, float]) -> float | None:
    if peaks.link_bytes_per_s is None:
        return None
    rate = peaks.link_bytes_per_s * values["pcie_share" if peaks.link_is_pcie else "link_share"]
    sent = sent_bytes(task)
    latency = values.get(LATENCY.format(task.kind), 0.0)
    return float(latency + transfer_s(sent_bytes=sent, bytes_per_s=rate, ramp_s=LINK_RAMP_S))


def sent_bytes(task: Task) -> FloatLike:
    """What one device sends in a collective. [byte]"""
    send = all_reduce_bytes if task.kind == "allreduce" else gather_bytes
    return send(buffer_bytes=float(task["bytes"]), num_gpus=float(task["num_gpus"]))


def _layer(task: Task, peaks: Peaks, peak: float, profile: SoftwareProfile, c: Coefficients) -> float:
    """An attention core or a mixture, from the operators of a step."""
    kernels: set[str] = set()
    layer: LayerKind | None = None
    config: dict[str, Any]
    if task.kind == "attention":
        kernels = {"attention.core"}
        config = {"hidden_size": task["heads"] * task["head_dim"], "num_attention_heads": task["heads"],
                  "intermediate_size": 256}  # fmt: skip
        sequences, length = task["batch"], task["length"]
    else:
        layer = "moe"
        config = {"hidden_size": task["hidden"], "num_attention_heads": 1, "intermediate_size": task["intermediate"],
                  "num_local_experts": task["experts"], "num_experts_per_tok": task["top_k"],
                  "model_type": "mixtral"}  # fmt: skip
        sequences, length = 1, task["tokens"]
    stack = profile.model_copy(update={"experts": "grouped" if task.kind == "grouped" else "loop"})
    workload = _workload(tuple(sorted(config.items())), profile.name)
    workload = replace(workload, device=_device(peaks, peak))
    batches = Batches(np.array([float(sequences)]), np.array([float(length)]), np.ones(1))
    return _operators_s(workload, batches, stack, c, task.how, kernels, layer)


def _operators_s(
    workload: Workload,
    batches: Batches,
    profile: SoftwareProfile,
    c: Coefficients,
    how: str,
    kernels: set[str],
    layer: LayerKind | None,
) -> float:
    found = [op for op in operators(workload, batches, profile, c) if op.layer == layer or op.kernel in kernels]
    overlap = profile.host.overlap_exponent
    forward = _pass_s([op.forward for op in found], c, 1.0 if profile.host.synchronises else overlap)
    if how == "forward":
        return forward
    backward = _pass_s([op.backward for op in found], c, overlap)
    return forward * (2 if how == "checkpointed" else 1) + backward


def _pass_s(works: list[Any], c: Coefficients, exponent: float) -> float:
    """GPU and host time of one pass together, as a step has them. [s]"""
    gpu = sum(float(np.sum(w.seconds)) for w in works)
    host = sum(float(np.sum(w.host * c.launch_s + w.host_s)) for w in works)
    return float(smooth_maximum(gpu, host, exponent))


@cache
def _workload(config: tuple[tuple[str, Any], ...], software: str) -> Workload:
    """One layer, all of it trained, evenly routed; its device is replaced."""
    shape = {"num_hidden_layers": 1, "vocab_size": 256, **dict(config)}
    job = Job(model=shape, gpu="a40", sequence_length=128, micro_batch_size=1, forced_balance=True, attention="flash",
              gradient_checkpointing="none", software=software, on_oom="report")  # fmt: skip
    return resolve(job).workload


def _device(peaks: Peaks, peak: float) -> Device:
    return Device(
        num_sms=float(peaks.num_sms or 1),
        peak_flops_per_s=peak,
        bytes_per_s=peaks.bytes_per_s,
        memory_bytes=1.0,
        attention_peak_flops_per_s=peak,
    )
