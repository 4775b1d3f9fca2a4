"""Software profiles: how a training stack runs a step, what it keeps in memory, and what it does beside the steps.

A profile holds facts of a stack, counted or read off its code; fitted numbers live in a `Calibration`. Profiles ship
as `data/software/*.yaml`; one may extend another by naming it as `base`.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from moecost.catalog import data_folder, explain, read_yaml
from moecost.errors import InvalidInputError, UnknownNameError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Launches(_Section):
    """Host work of one call, in units of one kernel launch: kernels plus the Python around them."""

    forward: NonNegativeFloat
    backward: NonNegativeFloat


class HostWork(_Section):
    """What the host does for each kind of call, forward and backward. [launches]"""

    norm: Launches = Field(description="a norm with its residual addition")
    block: Launches = Field(description="a mixer or feed-forward block: reshapes, activation, module calls")
    linear: Launches = Field(description="a linear layer on 16-bit weights")
    quantized_linear: Launches = Field(description="a linear layer on 4- or 8-bit weights, beyond `linear`")
    adapter: Launches = Field(description="an adapter beside a linear layer: casts, two products, scale, add")
    expert: Launches = Field(description="an expert of an eager loop, beyond its linears: index, gather, add")
    index_s_per_pair: NonNegativeFloat = Field(description="Python-list indexing, a token-expert pair. [s]")
    sharded_adapter_s: NonNegativeFloat = Field(description="an adapter tensor sharded as its own unit, a pass. [s]")
    pipelined_tensor_s: NonNegativeFloat = Field(
        description="a tensor-parallel collective in a pipeline, for each GPU it joins. [s]"
    )
    hides_gathers: bool = Field(description="sharded weights are gathered ahead, beside the GPU's work")
    synchronises: bool = Field(description="the forward pass waits for the GPU within each block: host time adds")
    overlap_exponent: PositiveFloat = Field(description="power mean of host and GPU time where it does not")


class Traffic(_Section):
    """Bytes to and from memory of elementwise work in one forward pass, unfused where the stack does not fuse."""

    norm: NonNegativeFloat = Field(description="an element of a norm's input. [byte]")
    residual: NonNegativeFloat = Field(description="an element of the residual stream, a block. [byte]")
    rope: NonNegativeFloat = Field(description="an element of queries and keys. [byte]")
    activation: NonNegativeFloat = Field(description="an intermediate element of a gated feed-forward. [byte]")
    activation_ungated: NonNegativeFloat = Field(description="the same without a gate. [byte]")
    narrow_operand: NonNegativeFloat = Field(
        description="an element of an activation or gradient that is cast to 8 bits or fewer for products. [byte]"
    )
    adapter_input: NonNegativeFloat = Field(description="an input element of an adapter. [byte]")
    adapter_output: NonNegativeFloat = Field(description="an output element of an adapter. [byte]")
    quantized_output: NonNegativeFloat = Field(description="an output element of a quantized linear. [byte]")
    routed: NonNegativeFloat = Field(description="a hidden element of a token-expert pair: gather, scale, add. [byte]")
    logits: NonNegativeFloat = Field(description="a logit, forward and backward together. [byte]")
    backward_passes: PositiveFloat = Field(description="backward traffic over forward traffic")


class OptimizerWork(_Section):
    """Cost of the optimizer step."""

    foreach_copies: PositiveFloat = Field(description="reads and writes of a trained element a step, AdamW")
    seconds_per_tensor: NonNegativeFloat = Field(description="host time a trained tensor. [s]")
    clips_gradients: bool = Field(description="the gradient norm is clipped each step")


class Grouped(_Section):
    """Experts of a layer in one grouped product."""

    efficiency: PositiveFloat = Field(description="rate over that of a dense product of the same shape")
    launches: Launches = Field(description="sorting, permuting and combining tokens, a layer")


class Dispatcher(_Section):
    """A library that takes tokens to experts on other GPUs."""

    exchange_s: NonNegativeFloat = Field(description="an exchange of routed tokens, beyond the wire. [s]")
    sent_to: Literal["experts", "machines", "all"] = Field(
        description="a token crosses the network once for each of its experts, once for each machine that has some of "
        "them, or to every GPU"
    )


class MemoryHabits(_Section):
    """What the stack keeps, beyond what the mathematics needs."""

    adapter_bytes: PositiveFloat = Field(description="an adapter weight, its gradient and each moment. [byte]")
    logits: PositiveFloat = Field(description="a logit at the peak of the loss. [byte]")
    logits_full_tuning: PositiveFloat = Field(description="the same where all weights are tuned. [byte]")
    master_bytes: NonNegativeFloat = Field(description="an fp32 copy of a trained 16-bit weight. [byte]")
    gradient_bytes: NonNegativeFloat = Field(description="a trained weight's gradient; 0: as the weight. [byte]")
    keeps_quantized_inputs: bool = Field(description="4-bit linears keep their input through checkpointing")
    live_layer: PositiveFloat = Field(description="activations of the layer in flight over the counted ones")
    saved_layer: PositiveFloat = Field(description="activations a layer keeps, no checkpointing, over the counted")
    optimizer_transient: NonNegativeFloat = Field(description="copies of the trained weights the optimizer makes")
    allocator: PositiveFloat = Field(description="reserved over allocated bytes, of what a step allocates")
    keeps_gathered_inputs: bool = Field(description="sequence parallelism keeps what it gathered for each product")
    doubles_sharded_inputs: bool = Field(description="sharded adapters keep a second copy of each layer's input")
    quantized_stream_bytes: PositiveFloat = Field(
        description="an element of the residual stream over 4-bit weights on one GPU. [byte]"
    )
    communication_bytes: NonNegativeFloat = Field(description="buffers of the collectives, on several GPUs. [byte]")
    context_bytes: NonNegativeFloat = Field(description="what the framework's GPU context takes. [byte]")


class RunHabits(_Section):
    """What the stack does beside the steps."""

    saves_each_epoch: bool
    save_bytes_per_s: PositiveFloat = Field(description="rate at which a checkpoint is written. [byte/s]")
    saves_optimizer: bool
    startup_s: NonNegativeFloat = Field(description="start-up counted in a run's hours. [s]")
    step_overhead_s: NonNegativeFloat = Field(description="fixed time a step: data, logging, scheduler. [s]")


class Prior(_Section):
    """What is expected of a coefficient before any run of this stack is seen."""

    value: PositiveFloat
    log_sd: NonNegativeFloat = Field(description="spread of its logarithm; 0 holds it")
    source: str


class SoftwareProfile(_Section):
    """A training stack: see the module's docstring. `load` finds one by name."""

    name: str
    description: str
    calibration: str = Field(description="the calibration that belongs to it")
    experts: Literal["loop", "grouped"] = Field(description="how routed experts run")
    experts_as_modules: bool = Field(description="each expert is an nn.Linear (adapters and 4-bit loaders see it)")
    quantizes_experts: bool = Field(description="the 4-bit loader takes experts in whatever form they are")
    all_linear_skips: tuple[str, ...] = Field(description="modules that `all-linear` leaves out")
    padding_multiple: PositiveInt = Field(description="batches are padded to a multiple of this. [token]")
    gradient_checkpointing: Literal["none", "selective", "full"]
    attention: Literal["flash", "sdpa", "eager"]
    compute_dtype: str | None = Field(description="of products, by habit, on GPUs that have a rate for it; null: bf16")
    zero_stage: Literal[0, 1, 2, 3] = Field(description="what is sharded over data-parallel GPUs by habit")
    adapter_zero_stage: Literal[0, 1, 2, 3] | None = Field(
        description="the same where adapters are trained and the weights fit on one GPU; null: as zero_stage"
    )
    virtual_pipeline: PositiveInt = Field(description="most model chunks a stage by habit, where pipelined")
    sequence_parallel: bool = Field(description="tensor parallelism divides the norms' tokens as well, by habit")
    host: HostWork
    traffic: Traffic
    grouped: Grouped
    moe_dispatch: str = Field(description="the dispatcher by habit, one of `dispatchers`")
    hides_exchanges: bool = Field(description="routed tokens travel beside the GPU's work, by habit")
    cuts_experts: bool = Field(description="tensor parallelism cuts experts that are dealt out as well, by habit")
    pads_experts: bool = Field(description="experts with a capacity always take it, filled up with padding")
    dispatchers: dict[str, Dispatcher]
    optimizer: OptimizerWork
    memory: MemoryHabits
    run: RunHabits
    priors: dict[str, Prior] = {}
    by_model_type: dict[str, dict[str, object]] = Field(
        default={}, description="fields that differ where the stack runs other code for a model type"
    )
    fused: dict[str, dict[str, object]] = Field(
        default={}, description="fields that a named set of kernels changes (`Job.fused_kernels`, `compile`)"
    )
    notes: tuple[str, ...] = ()
    sources: dict[str, str] = Field(description="where each group of facts comes from")

    @classmethod
    def load(cls, name: str) -> SoftwareProfile:
        """The profile of that name; `UnknownNameError` with the nearest names otherwise."""
        return _load(name, "", ())

    def for_run(self, model_type: str | None, kernels: tuple[str, ...] = ()) -> SoftwareProfile:
        """This stack as it runs a model type with named kernels: `by_model_type` and `fused` laid over its fields."""
        own_type = model_type if model_type in self.by_model_type else ""
        known = tuple(k for k in kernels if k in self.fused)
        return _load(self.name, own_type or "", known) if own_type or known else self


def software_profiles() -> tuple[str, ...]:
    """Names of the software profiles that ship with moecost."""
    return tuple(sorted(p.stem for p in (data_folder("data") / "software").glob("*.yaml")))


@cache
def _load(name: str, model_type: str, kernels: tuple[str, ...]) -> SoftwareProfile:
    fields = _with_base(name)
    by_type, fused = fields.get("by_model_type"), fields.get("fused")
    if model_type and isinstance(by_type, dict):
        fields = _merged(fields, by_type[model_type])
    if isinstance(fused, dict):
        for kernel in kernels:
            fields = _merged(fields, fused[kernel])
    try:
        return SoftwareProfile.model_validate(fields)
    except ValidationError as e:
        raise InvalidInputError(f"software profile {name!r}: {explain(e, SoftwareProfile)}") from None


def _with_base(name: str) -> dict[str, object]:
    path = data_folder("data") / "software" / f"{name}.yaml"
    if name not in software_profiles():
        known = software_profiles()
        raise UnknownNameError("software profile", name, known, f"Known: {', '.join(known)}.")
    own = read_yaml(path)
    base = own.pop("base", None)
    return _merged(_with_base(str(base)), own) if base else own


def _merged(base: dict[str, object], own: dict[str, object]) -> dict[str, object]:
    """`own` laid over `base`, mapping by mapping."""
    out = dict(base)
    for key, value in own.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out
