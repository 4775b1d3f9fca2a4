"""A short real run: a job's model with random weights, and a few optimizer steps on random tokens.

The model is built from its config, less deep where it would not fit, and trained by a plain loop: forward, backward,
clipped gradients, AdamW. Needs PyTorch, transformers and, for adapters, PEFT: extra `[probe]`.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from moecost.architecture import ModelSpec
from moecost.errors import DoesNotFitError, InvalidInputError, MoECostError, UnsupportedError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.measured_run import MeasuredRun, out_of_memory
from moecost.probe.clock import TorchClock, dtype_of, torch_module
from moecost.probe.machine import Machine, measured_peaks, this_machine, versions
from moecost.probe.tasks import task, timing
from moecost.results import Estimate
from moecost.specs import GPUSpec
from moecost.storage import COMPUTE_BYTES
from moecost.units import GB, GIB, TERA

WARM_UP: Final = 2
"""First steps, which allocate and choose kernels: not counted."""
STAGED: Final = 4
"""Every so manieth step the device is waited for after each stage; it tells the stages and not the step."""
SHARE_OF_HOST: Final = 0.6
"""Of the host's free memory that a run on the CPU may take."""
ATTENTION: Final = {"flash": "sdpa", "sdpa": "sdpa", "eager": "eager"}
"""How transformers is told; its `sdpa` takes PyTorch's flash kernels where they serve."""
KEYWORDS: Final = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj")}
LEARNING_RATE: Final = 1e-5
SAME_SIZE: Final = 0.02
"""Share of a model's parameters that two counts of them may differ by."""


@dataclass
class ShortRun:
    """What a short run brought: `runs` for `moecost.run_json.write_runs`, `record` for the reader.

    Attributes
    ----------
    run : its job and figures; None where not even one step was counted.
    step_seconds, stages : of single steps; mean seconds by stage.
    notes : what differs from the job that was asked for.
    """

    job: Job
    step_seconds: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    peak_memory_gib: float | None = None
    ended_by: str = ""
    notes: list[str] = field(default_factory=list)
    device_name: str = ""

    @property
    def run(self) -> MeasuredRun | None:
        import statistics

        oom = self.ended_by == "out of memory"
        if not self.step_seconds and not oom:
            return None
        return MeasuredRun(
            job=self.job,
            step_seconds=statistics.median(self.step_seconds) if self.step_seconds else None,
            peak_memory_gib=self.peak_memory_gib,
            memory_kind="allocated" if self.peak_memory_gib else None,
            outcome="oom" if oom else "ok",
            source=f"moecost probe --train on {self.device_name}",
            source_key="probe",
            date=date.today().isoformat(),
            notes="; ".join([*self.notes, *([f"ended by {self.ended_by}"] if self.ended_by else [])]),
        )

    @property
    def record(self) -> dict[str, Any]:
        return {
            "step_seconds": self.step_seconds,
            "stage_seconds": {name: sum(s) / len(s) for name, s in self.stages.items() if s},
            "ended_by": self.ended_by or "done",
            "device": self.device_name,
            "versions": versions(),
        }


def train_briefly(
    job: Job,
    steps: int = 20,
    *,
    device: str | None = None,
    gpu: str | Path | None = None,
    layers: int | None = None,
    told: Callable[[int, int, float], object] = lambda done, total, seconds: None,
    keep: Callable[[ShortRun], object] = lambda so_far: None,
) -> ShortRun:
    """Run a few optimizer steps of a job, with random weights on random tokens.

    Parameters
    ----------
    job : what is asked for; it runs on one device, with sequences of one length.
    steps : optimizer steps, the first two of which are not counted.
    device, gpu : as for `probe_machine`; the run's job names the machine's own GPU.
    layers : depth of the model; None: as deep as fits.
    told : is told (number done, of all, seconds of it) after each step.
    keep : gets what there is so far, after each step that is counted.

    Returns
    -------
    ShortRun : what was run and measured, and what differs from the job. Out of memory or Ctrl-C end it with what there
        is.

    Raises
    ------
    UnsupportedError : a package is missing, or the job asks for what this loop does not do.
    DoesNotFitError : not even one layer fits.
    """
    if steps <= WARM_UP:
        raise InvalidInputError(f"steps={steps} must be {WARM_UP + 1} or more: the first {WARM_UP} are not counted")
    machine = this_machine(device, gpu)
    done = ShortRun(job, device_name=machine.device_name)
    done.job, shape = _as_run(job, machine, layers, steps, done.notes)
    loop = _Loop(done.job, shape, machine.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames what it has
            loop.build()
        for number in range(steps):
            staged = number % STAGED == STAGED - 1
            times = loop.step(staged)
            _count(done, number, staged, times)
            done.peak_memory_gib = loop.peak_gib()
            told(number + 1, steps, sum(times.values()))
            if number >= WARM_UP:
                keep(done)
    except KeyboardInterrupt:
        done.ended_by = "Ctrl-C"
    except MoECostError:
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        done.ended_by = "out of memory"
    return done


def _count(done: ShortRun, number: int, staged: bool, times: Mapping[str, float]) -> None:
    if number < WARM_UP:
        return
    if not staged:
        done.step_seconds.append(sum(times.values()))
        return
    for name, seconds in times.items():
        done.stages.setdefault(name, []).append(seconds)


# ------------------------------------------------------------------------------------------------- what is run
def _as_run(
    job: Job, machine: Machine, layers: int | None, steps: int, notes: list[str]
) -> tuple[Job, tuple[ModelSpec, Estimate]]:
    """(the job as this machine can run it, its model and estimate)."""
    _refuse(job)
    spec = machine.spec or _own_spec(machine)
    one: dict[str, Any] = {name: Job.model_fields[name].default for name in LAYOUT}
    if job.num_gpus > 1:
        notes.append(f"run on one of {job.num_gpus} GPUs")
    if spec.name != getattr(job.gpu, "name", job.gpu) and machine.device == "cuda":
        notes.append(f"run on this machine's {spec.name}")
    software, stack = _software(), job.software
    if software != stack:
        notes.append(f"run by a plain loop on transformers {version('transformers')}, not by {stack}")
    on_cpu = machine.device == "cpu"
    if on_cpu and job.compute_dtype != "fp32":
        notes.append("run in fp32 on the CPU")
    asked = job.model_copy(
        update=one
        | {
            "gpu": spec,
            "software": software,
            "calibration": None,
            "price": 0.0,
            "on_oom": "report",
            "compute_dtype": "fp32" if on_cpu else job.compute_dtype,
            "weight_dtype": "fp32" if on_cpu and job.method != "qlora" else job.weight_dtype,
            "attention": "eager" if job.attention == "eager" else "sdpa",
            "gradient_checkpointing": "full" if job.gradient_checkpointing in ("full", "selective") else "none",
            "fused_kernels": None,
            "compile": False,
        }
    )
    first = estimate_job(asked)
    batch = job.micro_batch_size or (1 if on_cpu else max(first.micro_batch_size, 1))
    accumulation = job.gradient_accumulation_steps or 1
    asked = asked.model_copy(
        update={
            "dataset": None,
            "sequence_length": first.sequence_length,
            "padding": "max_length",
            "micro_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "global_batch_size": None,
            "num_queries": batch * accumulation * steps,
            "epochs": 1.0,
        }
    )
    notes.append(f"random weights and tokens, all sequences {first.sequence_length} long")
    return _as_deep_as_fits(asked, layers, notes)


PLAIN: Final = ("fp32", "bf16", "fp16")
FOUR_BITS: Final = ("nf4", "nf4-dq")
LAYOUT: Final = (
    *("num_gpus", "node", "gpus_per_node", "zero_stage", "shard_group_size", "tensor_parallel_size"),
    *("pipeline_parallel_size", "expert_parallel_size", "context_parallel_size", "virtual_pipeline_size"),
    *("expert_tensor_parallel_size", "sequence_parallel", "moe_dispatch", "capacity_factor", "forced_balance"),
    *("cuda_graphs", "comm_overlap", "offload"),
)
"""Fields of a job that say how it is spread, which one device does not do."""


def _refuse(job: Job) -> None:
    if job.method == "qlora" and find_spec("bitsandbytes") is None:
        raise UnsupportedError("method='qlora' needs the package bitsandbytes here: pip install bitsandbytes")
    held = FOUR_BITS if job.method == "qlora" else PLAIN
    if job.optimizer not in ("adamw", "sgd"):
        raise UnsupportedError(f"optimizer={job.optimizer!r} is not run here; use adamw or sgd for a short run")
    if job.weight_dtype not in (None, *held) or job.compute_dtype not in (None, *PLAIN):
        kind = f"weight_dtype={job.weight_dtype!r}, compute_dtype={job.compute_dtype!r}"
        raise UnsupportedError(f"{kind}: a short run has fp32, bf16 and fp16, and nf4 and nf4-dq with method='qlora'")


def _software() -> str:
    """The profile of the transformers that is here."""
    try:
        return "hf-v5-grouped" if int(version("transformers").split(".")[0]) >= 5 else "hf-peft"
    except ImportError:
        raise UnsupportedError("a short run needs transformers and peft: pip install 'moecost[probe]'") from None


def _as_deep_as_fits(job: Job, layers: int | None, notes: list[str]) -> tuple[Job, tuple[ModelSpec, Estimate]]:
    """The deepest model that fits, found by halving; `layers` is taken as it is."""
    spec = ModelSpec.load(job.model)
    whole = (spec.with_overrides(job.model_overrides) if job.model_overrides else spec).num_hidden_layers

    @cache
    def cut(depth: int) -> tuple[Job, Estimate]:
        overrides = {**(job.model_overrides or {}), "num_hidden_layers": depth}
        one = job if depth == whole else job.model_copy(update={"model_overrides": overrides})
        return one, estimate_job(one)

    if layers is not None and not 1 <= layers <= whole:
        raise InvalidInputError(f"layers={layers}: {spec.name} has {whole}; use 1 to {whole}")
    depth = layers or _deepest(whole, lambda n: cut(n)[1].fits and _can_be_built(*cut(n)))
    if depth < 1:
        need = cut(1)[1].memory
        raise DoesNotFitError(
            f"not even one layer of {spec.name} fits: {need.device_gib:.1f} GiB at micro_batch_size="
            f"{job.micro_batch_size} and {job.sequence_length} tokens, {need.usable_gib:.1f} are there; use a smaller "
            "micro_batch_size or sequence_length"
        )
    if depth < whole:
        notes.append(f"{depth} of {whole} layers" + ("" if layers else ", as many as fit"))
    one, found = cut(depth)
    model = spec.with_overrides(one.model_overrides) if one.model_overrides else spec
    return one, (model, found)


def _can_be_built(job: Job, found: Estimate) -> bool:
    """Weights that are quantized on their way to the device are made in the host's memory."""
    width = COMPUTE_BYTES[job.compute_dtype or "bf16"]
    return job.method != "qlora" or found.num_parameters * width <= _memory_bytes("cpu")


def _deepest(whole: int, fits: Callable[[int], bool]) -> int:
    if fits(whole):
        return whole
    low, high = 0, whole
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _own_spec(machine: Machine) -> GPUSpec:
    """A device that is in no catalogue, by what a moment's timing says of it."""
    clock = TorchClock(machine.device, repeats=3)
    n, elements = (1024, 2**22) if machine.device == "cpu" else (8192, 2**28)
    work = [task("gemm", d, rows=n, in_features=n, out_features=n) for d in machine.dtypes]
    timings = [timing(t, clock.measure(t)) for t in (*work, task("copy", "fp32", elements=elements))]
    peaks = measured_peaks(timings)
    return GPUSpec(
        name=machine.name,
        marketing_name=machine.device_name,
        vendor="measured here",
        architecture=machine.device,
        memory_label_gb=_memory_bytes(machine.device) / GB,
        memory_usable_gib=_memory_bytes(machine.device) / GIB,
        bandwidth_gb_per_s=peaks.bytes_per_s / GB,
        peak_tflops_dense={kind: rate / TERA for kind, rate in peaks.flops_per_s.items()},
        notes=("rates are the highest that were measured on it",),
    )


def _memory_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch_module().cuda.mem_get_info()[1])
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return SHARE_OF_HOST * 1024.0 * float(next(s.split()[1] for s in lines if s.startswith("MemAvailable")))
    return SHARE_OF_HOST * ASSUMED_HOST_BYTES


ASSUMED_HOST_BYTES: Final = 8.0e9
"""Free memory of a host that does not say. [byte]"""


# --------------------------------------------------------------------------------------------------- how it is run
class _Loop:
    """The model, its optimizer, and one step at a time."""

    def __init__(self, job: Job, shape: tuple[ModelSpec, Estimate], device: str) -> None:
        self.torch, self.job, self.device = torch_module(), job, device
        self.spec, self.estimate = shape
        self.compute = dtype_of(job.compute_dtype or "bf16")
        self.four_bits = job.held_weight_dtype in FOUR_BITS
        self.held = self.compute if self.four_bits else dtype_of(job.held_weight_dtype)
        self.model: Any = None

    def build(self) -> None:
        torch = self.torch
        torch.manual_seed(0)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.model = self._adapted(self._model())
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD if self.job.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = optimizer(self.trained, lr=LEARNING_RATE)
        assert self.job.sequence_length is not None
        shape = (self.job.micro_batch_size or 1, self.job.sequence_length)
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.tokens = torch.randint(0, vocabulary, shape, device=self.device)

    def _model(self) -> Any:
        self._check_shape(self._built("meta"))  # which takes no memory
        model = self._built("cpu" if self.four_bits else self.device)
        if self.four_bits:
            _quantize(model, self.compute, doubly=self.job.held_weight_dtype == "nf4-dq")
            model.to(self.device)
        model.train()
        if self.job.gradient_checkpointing == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _built(self, device: str) -> Any:
        """The model as transformers makes it of the config, with random weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = _plain(self.spec.config)
        plainest = "mixtral" if self.spec.num_experts_per_tok else "llama"
        family = config.pop("model_type", None) or self.spec.model_type or plainest
        attention = ATTENTION[self.job.attention or "sdpa"]
        try:
            shape = AutoConfig.for_model(family, **config)
            shape.use_cache = False
            with _built_as(self.torch, self.held, device):
                return AutoModelForCausalLM.from_config(shape, attn_implementation=attention)
        except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
            raise UnsupportedError(
                f"transformers {version('transformers')} cannot build {self.spec.name} (model_type {family!r}) from "
                f"its config: {' '.join(str(error).split())[:300]}"
            ) from None

    def _check_shape(self, model: Any) -> None:
        """Refuse what would be another model: fields that transformers does not know take its defaults."""
        counted, built = self.estimate.num_parameters, sum(p.numel() for p in model.parameters())
        if abs(built / counted - 1) > SAME_SIZE:
            raise UnsupportedError(
                f"transformers {version('transformers')} makes {built:,} parameters of the config of {self.spec.name}, "
                f"moecost counts {counted:,}: give a config.json with its model_type as model"
            )

    def _adapted(self, model: Any) -> Any:
        if not self.job.adapts:
            return model
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise UnsupportedError("adapters need the package peft: pip install 'moecost[probe]'") from None
        names = [name for target in self.job.lora_targets for name in KEYWORDS.get(target, (target,))]
        targets: Any = names[0] if names == ["all-linear"] else names
        options = {"r": self.job.lora_rank, "target_modules": targets, "use_dora": self.job.method == "dora"}
        try:
            if self.job.gradient_checkpointing == "full":
                model.enable_input_require_grads()
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        except ValueError as error:
            raise InvalidInputError(f"lora_targets={names}: PEFT says: {' '.join(str(error).split())[:300]}") from None

    def step(self, staged: bool) -> dict[str, float]:
        """One optimizer step; seconds by stage, which tell the stages only where the device was waited for."""
        times: dict[str, float] = {}
        self._wait()
        for _ in range(self.job.gradient_accumulation_steps or 1):
            with self._stage("forward", times, staged):
                loss = self._loss()
            with self._stage("backward", times, staged):
                loss.backward()
        with self._stage("optimizer", times, wait=True):
            self.torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return times

    def _loss(self) -> Any:
        mixed = self.torch.autocast(self.device, dtype=self.compute) if self.held != self.compute else None
        with mixed or contextlib.nullcontext():
            return self.model(input_ids=self.tokens, labels=self.tokens).loss

    @contextlib.contextmanager
    def _stage(self, name: str, times: dict[str, float], wait: bool) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if wait:
            self._wait()
        times[name] = times.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def peak_gib(self) -> float | None:
        """Most that PyTorch had allocated; None on the CPU, which does not count it. [GiB]"""
        return float(self.torch.cuda.max_memory_allocated()) / GIB if self.device == "cuda" else None


@contextlib.contextmanager
def _built_as(torch: Any, dtype: Any, device: str) -> Iterator[None]:
    """Weights are made on the device, in their type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _quantize(model: Any, compute: Any, *, doubly: bool) -> None:
    """Linear modules but the head as 4-bit loaders leave them; they are quantized on their way to the device."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from torch.nn import Linear

    how = {"quant_type": "nf4", "compress_statistics": doubly}
    head = model.get_output_embeddings()
    plain = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and m is not head}
    for name, old in plain.items():
        sizes = (old.in_features, old.out_features, old.bias is not None)
        new = Linear4bit(*sizes, compute_dtype=compute, device="meta", **how)
        new.weight = Params4bit(old.weight.data, requires_grad=False, **how)
        new.bias = old.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
    model.is_loaded_in_4bit = True  # so that PEFT takes its own layers for them


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without frozen parts."""
    found: dict[str, Any] = json.loads(json.dumps(config, default=list))
    return found
