"""`Estimate` and its parts: what `estimate` returns. Frozen, unrounded, and able to say how they were made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, computed_field, model_validator

from moecost.errors import InvalidInputError, close_matches
from moecost.field_docs import Described
from moecost.specs import PriceQuote

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moecost.job import Job

Bound = Literal["compute", "memory", "host", "communication"]
Dollars = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]
"""NaN, null in JSON, where no price is known."""


class _Result(Described):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)


class OperatorTime(_Result):
    """A layer kind or a kernel of a step. `seconds` of layers include `host` and `communication`, of kernels not."""

    seconds: float
    """Forward, recompute and backward of all micro-batches of a step. [s]"""
    forward: float
    """Of it the forward pass. [s]"""
    launches: float
    """Kernel launches a step."""
    host: float
    """In which the GPU waits for the host. [s]"""
    communication: float
    """In which it waits for other GPUs, or for the host's memory. [s]"""
    flops: float
    bytes: float
    bound: Bound


class StepTime(_Result):
    """Seconds of one optimizer step: `forward + backward + optimizer + other`; recompute lies in backward. [s]"""

    seconds: float
    forward: float
    backward: float
    recompute: float
    """Of `backward`: forward passes repeated by gradient checkpointing. [s]"""
    optimizer: float
    other: float
    host: float
    """Of the above: the GPU waits for the host. [s]"""
    communication: float = 0.0
    by_layer: dict[str, OperatorTime] = Field(repr=False)
    by_kernel: dict[str, OperatorTime] = Field(repr=False)


class Usage(_Result):
    """Shares of the SMs and of the memory bandwidth in use, averaged over kernel time. [0..1]"""

    sm: float
    dram: float


class Utilization(_Result):
    """Use of the GPU while kernels run; idle time does not count. `moe` is 0 for a model without experts."""

    moe: Usage
    step: Usage


class Memory(_Result):
    """Peak memory on the GPU; the parts sum to `allocated_gib`. [GiB]"""

    allocated_gib: float
    """Live tensors."""
    reserved_gib: float
    """With the caching allocator's slack."""
    device_gib: float
    """What the driver shows, the framework's context included."""
    usable_gib: float
    """What the GPU has."""
    weights_gib: float
    adapters_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    buffers_gib: float
    load_gib: float
    """Peak while the checkpoint is loaded, weight by weight: all weights as held and the largest one in 16 bits."""
    moment: Literal["loss", "backward", "gradients", "optimizer"]
    """Where in the step the peak lies: at the loss, at the first or last layer to go back, in the optimizer."""

    @property
    def parts(self) -> dict[str, float]:
        """The parts of `allocated_gib`, largest first. [GiB]"""
        names = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")
        found = {name: float(getattr(self, f"{name}_gib")) for name in names}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


class Roof(_Result):
    """What one GPU can reach at most: the two roofs of a roofline."""

    peak_flops_per_s: float
    """Dense peak of the compute type. [FLOP/s]"""
    bytes_per_s: float
    """Bandwidth of device memory. [byte/s]"""


class Experts(_Result):
    """Routing of a mean micro-batch, in the layers with the most experts."""

    num_experts: int
    num_experts_per_tok: float
    touched: float
    """Distinct experts that a micro-batch reaches, a layer."""
    tokens_per_expert: float
    """Tokens that a touched expert gets, mean."""
    load_imbalance: float
    """Tokens of the busiest expert over the mean of all."""


class Provenance(_Result):
    """Where the figures come from."""

    price: PriceQuote | None
    """The quote; None for a price given as a number, or where none is known."""
    calibration: str
    calibration_error: float | None
    """Mean error of left-out runs, |predicted / measured - 1|; None where none were left out."""
    software: str
    sources: dict[str, str]
    """Titles and dates of the sources of the GPU, the model and the data set."""


class Estimate(_Result):
    """What a run needs, takes and costs. Times are of the mean batch, memory is of the worst.

    `print` shows a table; a notebook shows the same as HTML. `interval` gives the spread of a figure.
    """

    model: str
    """Name of the model."""
    gpu: str
    """Name of the GPU."""
    num_gpus: int
    """All GPUs of the run."""
    method: str
    """What is trained; see `Job`."""
    queries_per_second: float
    """Of the steps, over all GPUs."""
    tokens_per_second: float
    """Tokens of the data, without padding."""
    padded_tokens_per_second: float
    """Tokens that the GPU processes."""
    step: StepTime
    """Where the time of an optimizer step goes. [s]"""
    bound: Bound
    """What takes most of the step."""
    utilization: Utilization
    """Use of SMs and memory bandwidth while kernels run. [0..1]"""
    roof: Roof
    """Peak rate and bandwidth of one GPU."""
    mfu: float
    """Model FLOPs (without recompute) over the dense peak. [0..1]"""
    hfu: float
    """Executed FLOPs over the dense peak. [0..1]"""
    memory: Memory
    """Peak on the fullest GPU, in its parts. [GiB]"""
    fits: bool
    """`memory.device_gib` is no more than the GPU's usable memory."""
    fits_probability: float
    """That it fits, by the spread of memory predictions. [0..1]"""
    max_micro_batch_size: int
    """Most sequences a GPU a pass that fit; 0: not even one."""
    micro_batch_size: int
    """Sequences a GPU a pass."""
    global_batch_size: int
    """Sequences of an optimizer step over all GPUs."""
    experts: Experts | None
    """None for a model without routed experts."""
    num_parameters: int
    """Of the model, tied weights once."""
    num_trainable_parameters: int
    """Parameters that are trained: all, or those of the adapters."""
    dataset: str | None
    """Name of the data set; None where all queries have `sequence_length` tokens."""
    sequence_length: int
    """Where queries are cut, or packed to. [token]"""
    num_queries: int
    """Training queries of an epoch."""
    epochs: float
    """Passes over the data."""
    gradient_accumulation_steps: int
    """Micro-batches of an optimizer step."""
    steps: int
    """Optimizer steps of the run."""
    hours: float
    """Of the whole run: steps, checkpoints, start-up. [h]"""
    gpu_hours: float
    """The same times the GPUs. [h]"""
    usd_per_gpu_hour: Dollars
    """NaN where no price is known (null in JSON)."""
    cost_usd: Dollars
    """NaN where no price is known (null in JSON)."""
    notes: tuple[str, ...]
    """What was assumed, extrapolated or defaulted, in sentences."""
    provenance: Provenance
    """Where price, coefficients and specs come from."""
    log_sd_time: float = Field(repr=False)
    """Spread of log(measured / predicted) time of runs like this one."""
    log_sd_memory: float = Field(repr=False)
    """Spread of log(measured / predicted) memory."""

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """The 80 % `interval` of the main figures, for readers of JSON; None where no price is known."""
        found = {name: self.interval(name) for name in _SHOWN}
        return {name: None if math.isnan(low) else (low, high) for name, (low, high) in found.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_intervals(cls, fields: Any) -> Any:
        """What was written is read back; intervals follow from the rest."""
        return {k: v for k, v in fields.items() if k != "intervals"} if isinstance(fields, dict) else fields

    def interval(self, field: str, level: float = 0.8) -> tuple[float, float]:
        """(low, high) between which a measured value lies with probability `level`.

        Parameters
        ----------
        field : name of a figure: `queries_per_second`, `hours`, `cost_usd`, `step.seconds`, `memory.device_gib`, ...
        level : between 0 and 1.

        Notes
        -----
        The error of the calibration on runs it had not seen, as a spread of the logarithm: time-like figures and
        their inverses share one, memory has its own. Figures that are counted (parameters, steps) have none.
        """
        from moecost.experts import normal_quantile

        if isinstance(level, bool) or not isinstance(level, int | float) or not 0.0 < level < 1.0:
            raise InvalidInputError(f"level={level!r:.80} must lie between 0 and 1")
        field = str(field)
        value: Any = self
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if not isinstance(value, int | float) or isinstance(value, bool):
            near = close_matches(field, _TIME_FIELDS | _MEMORY_FIELDS) or sorted(_TIME_FIELDS)
            raise InvalidInputError(f"interval of {field!r}: not a figure; did you mean {', '.join(near)}?")
        root = field.split(".")[0]
        sd = self.log_sd_memory if root == "memory" else self.log_sd_time if root in _TIME_ROOTS else 0.0
        factor = math.exp(sd * float(normal_quantile(min(0.5 + level / 2, 1.0 - 1e-16))))
        return float(value) / factor, float(value) * factor

    def plot(self, ax: Sequence[Axes] | None = None) -> Figure:
        """Where time and memory go, as a Matplotlib figure (extra `[plot]`); `ax`: two axes to draw on."""
        from moecost.plotting import overview

        return overview(self, ax)

    def plot_roofline(self, ax: Axes | None = None) -> Axes:
        """Kernels of a step under the roof of the GPU, on Matplotlib axes (extra `[plot]`)."""
        from moecost.plotting import roofline

        return roofline(self, ax)

    def to_html(self, path: str | Path, job: Job | None = None) -> None:
        """Write a report to hand around, one HTML file; with the `job`, it has alternatives and the job's file too."""
        from moecost.page import write_report

        write_report(path, self, job)

    def __str__(self) -> str:
        from moecost.report import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from moecost.report import as_html

        return as_html(self)


_SHOWN: Final = ("queries_per_second", "hours", "cost_usd", "memory.device_gib")
_TIME_FIELDS: Final = frozenset(
    {"queries_per_second", "tokens_per_second", "padded_tokens_per_second", "step.seconds", "hours", "gpu_hours",
     "cost_usd", "mfu", "hfu"}
)  # fmt: skip
_MEMORY_FIELDS: Final = frozenset({"memory.allocated_gib", "memory.reserved_gib", "memory.device_gib"})
_TIME_ROOTS: Final = frozenset(f.split(".")[0] for f in _TIME_FIELDS)
