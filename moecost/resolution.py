"""From a `Job` to specs and plain numbers: names are looked up, habits filled in, and each assumption written down."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moecost import catalog
from moecost.adaptation import Adaptation, adapt
from moecost.architecture import ModelSpec
from moecost.arrays import FloatLike
from moecost.calibration import Calibration
from moecost.coefficients import Coefficients
from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError
from moecost.hub.reader import text_config
from moecost.job import Job
from moecost.layouts import layout_of
from moecost.lengths import LengthDistribution, Padding, mean_cut_length, padded_batch, worst_padded_length
from moecost.schedule import Asked, schedule
from moecost.software import SoftwareProfile
from moecost.specs import GPUSpec, NodeSpec, PriceQuote
from moecost.storage import COMPUTE_BYTES, OPTIMIZERS, WEIGHT_FORMATS
from moecost.workload import Attention, Batches, Device, Layout, Recipe, Workload

SLIP: Final = 0.8
"""Likeness at which an unknown name is taken for a slip of the pen, not for kernels that moecost does not know."""


@dataclass(frozen=True)
class Resolved:
    """A job with all it names: specs, the plain numbers formulas take, and what was assumed on the way."""

    job: Job
    model: ModelSpec
    gpu: GPUSpec
    dataset: DatasetSpec | None
    profile: SoftwareProfile
    calibration: Calibration
    coefficients: Coefficients
    workload: Workload
    lengths: LengthDistribution
    sequence_length: int
    padding: Padding
    num_queries: int
    notes: list[str] = field(default_factory=list)

    @property
    def padding_multiple(self) -> int:
        return self.profile.padding_multiple

    @property
    def data_parallel(self) -> int:
        """GPUs with batches of their own."""
        return int(self.workload.layout.data_parallel)

    @property
    def worst_length(self) -> int:
        """Padded length of the longest batch an epoch can hold. [token]"""
        return worst_padded_length(
            self.lengths,
            sequence_length=self.sequence_length,
            padding=self.padding,
            multiple=self.padding_multiple,
        )

    @property
    def rows_per_epoch(self) -> float:
        """Sequences of an epoch: queries, or packed rows of them."""
        if self.padding != "packed":
            return float(self.num_queries)
        return float(
            np.ceil(self.num_queries * mean_cut_length(self.lengths, self.sequence_length) / self.sequence_length)
        )


@dataclass(frozen=True)
class Epoch:
    """The batches of an epoch at one micro-batch size."""

    batches: Batches
    micro_batches: float
    steps: float


def epoch(resolved: Resolved, micro_batch_size: int, accumulation: int) -> Epoch:
    """Full batches of one GPU and the smaller last one, as one distribution; data-parallel GPUs share an epoch.

    All of them wait for the longest batch among them: at each micro-batch where gradients are reduced at each, else
    once a step, after which the sums of its micro-batches differ less, by the square root of their number.
    """
    rows = float(np.ceil(resolved.rows_per_epoch / resolved.workload.layout.data_parallel))
    found = schedule(rows=rows, micro_batch_size=micro_batch_size, accumulation=accumulation)
    parts = [_one(resolved, micro_batch_size, float(found.full))] if found.full else []
    parts += [_one(resolved, int(found.rest), 1.0)] if found.rest else []
    sequences, lengths, weights, slowest = (np.concatenate(column) for column in zip(*parts, strict=True))
    micro_batches, per_step, layout = float(found.micro_batches), found.per_step, resolved.workload.layout
    p = weights / micro_batches
    waited = waited_for(p, slowest / micro_batches, per_step=per_step, layout=layout)
    batches = Batches(sequences, lengths, p, per_step, slowest=waited if layout.data_parallel > 1 else None)
    return Epoch(batches, micro_batches, float(found.steps))


def waited_for(probability: FloatLike, slowest: FloatLike, *, per_step: FloatLike, layout: Layout) -> FloatLike:
    """Probability of the batch that all GPUs wait for; `slowest` is that of the longest of one micro-batch on each."""
    return probability + (slowest - probability) / (1.0 if layout.zero_stage >= 3 else np.sqrt(per_step))


def _one(resolved: Resolved, size: int, count: float) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    found = padded_batch(
        resolved.lengths,
        micro_batch_size=size,
        sequence_length=resolved.sequence_length,
        padding=resolved.padding,
        multiple=resolved.padding_multiple,
    )
    p = found.probability
    slowest = longest_of(p, num_gpus=resolved.workload.layout.data_parallel)
    return np.full(found.padded_length.shape, float(size)), found.padded_length, p * count, slowest * count


def longest_of(probability: NDArray[np.float64], *, num_gpus: FloatLike) -> NDArray[np.float64]:
    """Probability of the longest batch of `num_gpus`, over lengths that ascend along the last axis."""
    found: NDArray[np.float64] = np.diff(np.cumsum(probability, axis=-1) ** num_gpus, prepend=0.0)
    return found


def resolve(job: Job) -> Resolved:
    """Look up what a job names and fill in what it leaves open."""
    notes: list[str] = []
    model = _model(job, notes)
    profile = _profile(job, model, notes)
    notes += profile_notes(profile)
    gpu = _gpu(job, notes)
    job = _with_habitual_dtype(job, gpu, profile, notes)
    calibration = _calibration(job, profile, gpu, notes)
    dataset, lengths, sequence_length, padding, num_queries = _data(job, model, notes)
    notes += _beyond_positions(model, min(sequence_length, lengths.longest))
    uses = _uses(job, model, profile, notes)
    layout = layout_of(job, model, gpu, profile, notes)
    workload = Workload(
        model.quantities(),
        uses.blocks,
        uses.embedding,
        uses.head,
        _recipe(job, profile, layout, notes),
        _device(job, gpu, notes),
        layout,
        uses.elsewhere_width,
    )
    return Resolved(
        job=job,
        model=model,
        gpu=gpu,
        dataset=dataset,
        profile=profile,
        calibration=calibration,
        coefficients=calibration.values(gpu.architecture, profile.name, job.compute_dtype),
        workload=workload,
        lengths=lengths,
        sequence_length=sequence_length,
        padding=padding,
        num_queries=num_queries,
        notes=notes,
    )


def _with_habitual_dtype(job: Job, gpu: GPUSpec, profile: SoftwareProfile, notes: list[str]) -> Job:
    habit = profile.compute_dtype
    if job.compute_dtype is not None or habit is None or habit not in gpu.peak_tflops_dense:
        return job
    notes.append(f"compute_dtype={habit!r} is the habit of {profile.name}")
    return job.model_copy(update={"compute_dtype": habit})


def profile_notes(profile: SoftwareProfile) -> list[str]:
    """What the profile assumes of a run beside its steps."""
    out = []
    if profile.run.saves_each_epoch:
        what = "weights and optimizer state" if profile.run.saves_optimizer else "trained weights"
        out.append(
            f"hours include a checkpoint of the {what} after each epoch, written at "
            f"{profile.run.save_bytes_per_s / 1e9:.2g} GB/s ({profile.name})"
        )
    if profile.run.startup_s:
        out.append(f"hours include {profile.run.startup_s:.0f} s of start-up ({profile.name})")
    return out


def price(job: Job, gpu: GPUSpec, notes: list[str]) -> tuple[float | None, PriceQuote | None]:
    """($/GPU-hour, quote it comes from); a number always wins, None only where nothing is quoted and none is asked."""
    if isinstance(job.price, int | float):
        return float(job.price), None
    if isinstance(job.price, PriceQuote):
        return job.price.usd_per_gpu_hour, job.price
    if job.price is None and job.market == "on_demand" and not catalog.quotes(gpu, market=job.market):
        notes.append(f"cost_usd is not known: the catalogue has no on_demand quote for {gpu.name}; pass price=")
        return None, None
    machine = catalog.node_for_instance(job.gpu) if isinstance(job.gpu, str) else None
    if machine is not None and job.num_gpus < machine.gpus_per_node:
        notes.append(f"{job.gpu} is rented whole, with {machine.gpus_per_node} GPUs: {job.num_gpus} of them are priced")
    quote = catalog.median_quote(gpu, market=job.market, provider=job.price)
    found = catalog.quotes(gpu, market=job.market, provider=job.price)
    low, high = found[0].usd_per_gpu_hour, found[-1].usd_per_gpu_hour
    which = f"{job.price}'s" if job.price else "the catalogue's"
    notes.append(
        f"price {quote.usd_per_gpu_hour:.2f} $/GPU-hour is the median of {which} {len(found)} {job.market} quotes for "
        f"{gpu.name} ({low:.2f} to {high:.2f}; this one {quote.provider}, {quote.date}); pass price= for yours"
    )
    return quote.usd_per_gpu_hour, quote


def _profile(job: Job, model: ModelSpec, notes: list[str]) -> SoftwareProfile:
    """The stack as it runs this model with the kernels that the job names; unknown kernels are noted."""
    stack = SoftwareProfile.load(job.software)
    kernels = [k.strip() for k in (job.fused_kernels or "").split(";") if k.strip()]
    if job.cuda_graphs not in (None, "none"):
        kernels.append("cuda-graphs-full" if job.cuda_graphs == "full" else "cuda-graphs")
    unknown = [k for k in kernels if k not in stack.fused]
    for kernel in unknown:
        if near := difflib.get_close_matches(kernel.lower(), stack.fused, cutoff=SLIP):
            raise InvalidInputError(f"fused_kernels={kernel!r:.80}: did you mean {near[0]!r}?")
    if unknown:
        notes.append(f"fused_kernels {', '.join(unknown)} are not known to {stack.name} and change nothing")
    return stack.for_run(model.model_type, (*(["compile"] if job.compile else []), *kernels))


OF_EXPERTS: Final = ("capacity_factor", "moe_dispatch", "forced_balance")
"""Fields that say how tokens reach routed experts."""


def _model(job: Job, notes: list[str]) -> ModelSpec:
    model = ModelSpec.load(job.model)
    if job.model_overrides:
        model = model.with_overrides(job.model_overrides)
    notes += model.notes
    k = job.num_experts_per_tok
    if k is not None:
        sizes = [layers.experts.num_experts for layers in model.quantities().layers if layers.experts]
        if not sizes:
            raise InvalidInputError(f"num_experts_per_tok={k}: {model.name} has no routed experts; leave it out")
        if k > min(sizes):
            raise InvalidInputError(
                f"num_experts_per_tok={k}: {model.name} has {min(sizes)} experts a layer; use 1 to {min(sizes)}"
            )
    of_experts = [name for name in OF_EXPERTS if getattr(job, name)]
    if of_experts and not any(layers.experts for layers in model.quantities().layers):
        notes.append(f"{', '.join(of_experts)} change nothing: {model.name} has no routed experts")
    return model


def _gpu(job: Job, notes: list[str]) -> GPUSpec:
    gpu = job.gpu if isinstance(job.gpu, GPUSpec) else GPUSpec.load(job.gpu)
    if gpu.memory_usable_note:
        notes.append(gpu.memory_usable_note)
    return gpu


def _calibration(job: Job, profile: SoftwareProfile, gpu: GPUSpec, notes: list[str]) -> Calibration:
    if isinstance(job.calibration, Calibration):
        found = job.calibration
    else:
        found = Calibration.load(job.calibration if job.calibration is not None else profile.calibration)
    if found.probe is not None:
        if why := found.probe.why_not_for(gpu.name):
            raise InvalidInputError(f"calibration {found.name!r} cannot be used: {why}")
        if found.probe.device != gpu.name:
            notes.append(f"calibration {found.name!r} was probed on {found.probe.device}, not on {gpu.name}")
    return found


def _data(
    job: Job, model: ModelSpec, notes: list[str]
) -> tuple[DatasetSpec | None, LengthDistribution, int, Padding, int]:
    if job.dataset is None:
        assert job.sequence_length is not None  # Job has checked it
        queries = job.num_queries or int(asked(job).whole_steps)
        if job.num_queries is None:
            notes.append(f"num_queries was not given: {queries:,} assumed")
        padding: Padding = job.padding or "max_length"
        if padding == "max_length":
            notes.append(f"every query is taken to fill {job.sequence_length} tokens: no dataset was given")
        return None, LengthDistribution.fixed(job.sequence_length, queries), job.sequence_length, padding, queries
    dataset = job.dataset if isinstance(job.dataset, DatasetSpec) else DatasetSpec.load(job.dataset)
    lengths, note = dataset.lengths_for(model.model_type)
    if note:
        notes.append(note)
    sequence_length = job.sequence_length or lengths.longest
    cut = float(lengths.counts[lengths.lengths > sequence_length].sum()) / lengths.num_queries
    if cut:
        notes.append(f"{100 * cut:.2g} % of the queries are longer than sequence_length={sequence_length} and are cut")
    return dataset, lengths, sequence_length, job.padding or "longest", job.num_queries or dataset.num_queries


def asked(job: Job) -> Asked:
    """What the job says of its batches."""
    return Asked(
        job.micro_batch_size,
        job.gradient_accumulation_steps,
        job.global_batch_size,
        max(job.data_parallel_size, 1),
        job.pipeline_parallel_size,
    )


def _beyond_positions(model: ModelSpec, longest: int) -> list[str]:
    """A note where queries are longer than the positions that the model's config names."""
    positions = text_config(model.config).get("max_position_embeddings")
    if not isinstance(positions, int) or longest <= positions:
        return []
    return [f"sequences of {longest} tokens are longer than the {positions} positions of {model.name}"]


def _uses(job: Job, model: ModelSpec, profile: SoftwareProfile, notes: list[str]) -> Adaptation:
    targets = job.lora_targets if job.adapts else None
    quantized = WEIGHT_FORMATS[job.held_weight_dtype].quantized
    found = adapt(model.quantities(), profile, quantized=quantized, targets=targets, trains_all=not job.adapts)
    if targets is not None and not any(use.adapted for use in found.uses):
        modules = sorted({m.module.split(".")[-1] for g in model.quantities().layers for m in g.matrices})
        raise InvalidInputError(
            f"lora_targets={list(targets)} match no module of {model.name}; it has {', '.join(modules)}"
        )
    if found.unmatched:
        notes.append(f"lora_targets {', '.join(found.unmatched)} match no module of {model.name} and are ignored")
    experts = [use for use in found.uses if use.matrix.part == "expert"]
    if quantized and experts and not any(use.quantized for use in experts):
        notes.append(f"{profile.name} holds experts in fused tensors, which the loader leaves in 16 bits")
    return found


def _recipe(job: Job, profile: SoftwareProfile, layout: Layout, notes: list[str]) -> Recipe:
    held = WEIGHT_FORMATS[job.held_weight_dtype]
    compute = COMPUTE_BYTES[job.compute_dtype or "bf16"]
    sparse = job.method == "sparse"
    adapter = SPARSE_VALUE_BYTES if sparse else profile.memory.adapter_bytes
    optimizer = OPTIMIZERS[job.optimizer]
    paged = job.optimizer.startswith("paged")
    trained = adapter if job.adapts else held.bytes
    mixed = profile.memory.master_bytes > 0 and trained < 4.0  # 16-bit weights with fp32 copies
    wide = 4.0 if mixed else trained
    state = optimizer.states * (wide if optimizer.element_bytes is None else optimizer.element_bytes)
    state += profile.memory.master_bytes if mixed else 0.0
    if sparse:
        state += SPARSE_AGE_BYTES
        notes.append(
            f"sparse tuning changes {job.density or SPARSE_DENSITY:.2g} of the targets' weights, as SpIEL's code does: "
            "weights are copied, and their gradients formed whole, layer by layer; memory is that of a selection window"
        )
    if not job.adapts and not mixed and held.bytes == 2:
        notes.append(
            f"weights, gradients and optimizer state are held in 16 bits, {2 * trained + state:.3g} bytes a weight; "
            "weight_dtype='fp32' trains fp32 weights under autocast"
        )
    checkpointing = job.gradient_checkpointing or profile.gradient_checkpointing
    attention: Attention = job.attention or profile.attention
    if checkpointing == "selective" and attention == "eager":
        notes.append("gradient_checkpointing='selective' recomputes the attention core, in the time of flash attention")
    return Recipe(
        rank=float(job.lora_rank) if job.adapts and not sparse else 0.0,
        density=(job.density or SPARSE_DENSITY) if sparse else 0.0,
        num_experts_per_tok=None if job.num_experts_per_tok is None else float(job.num_experts_per_tok),
        weight_bytes=float(compute) if held.quantized else held.bytes,
        quantized_bytes=held.bytes,
        compute_bytes=float(compute),
        adapter_bytes=adapter + (SPARSE_INDEX_BYTES if sparse else 0.0),
        gradient_bytes=profile.memory.gradient_bytes if mixed and profile.memory.gradient_bytes else trained,
        optimizer_bytes=state,
        recompute=1.0 if checkpointing == "full" else 0.0,
        trains_all=not job.adapts,
        attention="flash" if checkpointing == "selective" else attention,
        gradient_accumulation_steps=float(asked(job).likely_accumulation),
        decomposes_weights=job.method == "dora",
        balanced=bool(job.forced_balance),
        capacity_factor=job.capacity_factor,
        pads_experts=profile.pads_experts,
        narrow=_is_narrow(job.compute_dtype),
        expands=not (_is_narrow(job.compute_dtype) and _is_narrow(job.held_weight_dtype)),
        optimizer_copies=optimizer.element_bytes is None and optimizer.states > 0 and not paged,
        keeps_inputs=profile.memory.keeps_quantized_inputs and job.held_weight_dtype.startswith("nf4"),
        stream_bytes=(
            profile.memory.quantized_stream_bytes if held.quantized and layout.zero_stage < 3 else float(compute)
        ),
    )


SPARSE_DENSITY: Final = 0.01
SPARSE_VALUE_BYTES: Final = 4.0
SPARSE_INDEX_BYTES: Final = 4.0
SPARSE_AGE_BYTES: Final = 4.0
"""SpIEL's released code: fp32 changes with int32 indices, gradients in fp32, and an age beside Adam's two moments."""


def _is_narrow(dtype: str | None) -> bool:
    """A floating-point type of 8 bits or fewer, which products take as it is."""
    return dtype is not None and dtype.startswith(("fp8", "mxfp", "nvfp4", "fp4"))


def _device(job: Job, gpu: GPUSpec, notes: list[str]) -> Device:
    dtype = job.compute_dtype or "bf16"
    if job.compute_dtype is None and "bf16" not in gpu.peak_tflops_dense:
        dtype = "fp16" if "fp16" in gpu.peak_tflops_dense else "fp32"
        notes.append(f"{gpu.name} has no bf16 rate: compute_dtype={dtype!r} is used")
    if gpu.num_sms is None:
        notes.append(f"the number of SMs of {gpu.name} is not known: products are taken to fill it evenly")
    plain = "bf16" if "bf16" in gpu.peak_tflops_dense and dtype not in ("fp32", "tf32") else dtype
    in_slice = gpu.vendor == "Google" and job.node is None and gpu.link_bytes_per_s_one_way is not None
    asked = job.num_gpus > 1 or job.node is not None
    node = _node(job, gpu, notes) if asked and not in_slice else None
    pcie = gpu.pcie_bytes_per_s_one_way or DEFAULT_PCIE_BYTES_PER_S
    link, is_pcie = (pcie, True) if node is None else _link(node, pcie)
    linked = _linked(job, node)
    if in_slice and gpu.link_bytes_per_s_one_way is not None:
        link, is_pcie, linked = gpu.link_bytes_per_s_one_way, False, max(job.num_gpus, linked)
        notes.append(f"all {gpu.name} chips are taken to lie in one slice, joined by its interconnect")
    return Device(
        num_sms=float(gpu.num_sms or 1),
        peak_flops_per_s=gpu.peak_flops_per_s(dtype),
        bytes_per_s=gpu.bandwidth_bytes_per_s,
        memory_bytes=gpu.memory_usable_bytes,
        attention_peak_flops_per_s=gpu.peak_flops_per_s(plain),
        link_bytes_per_s=link,
        link_is_pcie=is_pcie,
        network_bytes_per_s=(node and node.inter_bytes_per_s_per_gpu_one_way) or DEFAULT_NETWORK_BYTES_PER_S,
        gpus_per_node=float(linked),
        host_link_bytes_per_s=pcie,
    )


DEFAULT_PCIE_BYTES_PER_S: Final = 32e9
"""PCIe 4 x16, one way: where the catalogue has no figure. [byte/s]"""
DEFAULT_NETWORK_BYTES_PER_S: Final = 12.5e9
"""One 100 Gb/s port a GPU: where the machine's network is not known. [byte/s]"""


def _linked(job: Job, node: NodeSpec | None) -> int:
    """GPUs that the fast link joins. A rack that is one NVLink domain stays one, whatever a tray of it holds."""
    if node is not None and node.gpus_per_node > LARGEST_MACHINE:
        return node.gpus_per_node
    return job.gpus_per_node or (node.gpus_per_node if node else LARGEST_MACHINE // 2)


LARGEST_MACHINE: Final = 16
"""GPUs of the largest single machine; above it a node is a rack."""


def _node(job: Job, gpu: GPUSpec, notes: list[str]) -> NodeSpec | None:
    """The machine: the job's, that of the instance type given as GPU, or the GPU's reference machine."""
    if isinstance(job.node, NodeSpec):
        return job.node
    if job.node is not None:
        return NodeSpec.load(job.node)
    named = catalog.node_for_instance(str(job.gpu)) if isinstance(job.gpu, str) else None
    if named is not None:
        return named
    if gpu.reference_node is None:
        notes.append(f"no machine is known for {gpu.name}: its GPUs are taken to be joined by PCIe alone")
        return None
    notes.append(f"machine {gpu.reference_node} assumed, the reference of {gpu.name}; node= names another")
    return NodeSpec.load(gpu.reference_node)


def _link(node: NodeSpec, pcie: float) -> tuple[float, bool]:
    """(bytes a second one way between two GPUs of a machine, whether over PCIe)."""
    own = node.intra_bytes_per_s_per_gpu_one_way
    if own is None or node.intra_link in ("pcie", "none"):
        return pcie, True
    return own, False
