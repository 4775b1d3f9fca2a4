"""A job in plain numbers: the device, how each weight matrix is held and tuned, and the batches of an epoch.

`estimation` fills these from specs; `operators`, `memory` and `step` read nothing else. Fields typed `FloatLike` may
be arrays, so that one workload can stand for many configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from moecost.arrays import FloatLike
from moecost.quantities import LayerKind, Layers, Matrix, Model

Attention: TypeAlias = Literal["flash", "sdpa", "eager"]


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU in base units, and what joins it to others; rates one way, of one GPU, as the catalogue has them."""

    num_sms: FloatLike
    peak_flops_per_s: FloatLike  # dense, of the compute data type
    bytes_per_s: FloatLike
    memory_bytes: FloatLike  # usable
    attention_peak_flops_per_s: FloatLike | None = None  # of the attention core, 16 bits; None: as the products
    link_bytes_per_s: FloatLike = 1e30  # to the other GPUs of its machine
    link_is_pcie: bool = False
    network_bytes_per_s: FloatLike = 1e30  # to GPUs of other machines
    gpus_per_node: FloatLike = 8.0
    host_link_bytes_per_s: FloatLike = 1e30  # to the host's memory

    @property
    def core_flops_per_s(self) -> FloatLike:
        """Dense peak of attention cores and scans, which stay in 16 bits."""
        return self.peak_flops_per_s if self.attention_peak_flops_per_s is None else self.attention_peak_flops_per_s


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How tokens reach experts on other GPUs, and come back."""

    exchange_s: float = 0.0  # of one exchange, beyond the wire
    sent_to: Literal["experts", "machines", "all"] = "experts"  # what a token is sent once to
    hidden: bool = False  # beside the GPU's work


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is spread over GPUs: `data_parallel` is what the others leave, experts are nested in it."""

    data_parallel: FloatLike = 1.0
    tensor_parallel: FloatLike = 1.0
    pipeline_parallel: FloatLike = 1.0
    virtual_pipeline: FloatLike = 1.0
    context_parallel: FloatLike = 1.0
    expert_parallel: FloatLike = 1.0
    expert_tensor_parallel: FloatLike | None = None  # GPUs an expert is cut over; None: as tensor_parallel
    zero_stage: int = 0
    shard_group: FloatLike | None = None  # GPUs that a replica of sharded states is spread over; None: as many as can
    offload: Literal["none", "optimizer", "experts", "parameters", "nvme"] = "none"
    sequence_parallel: bool = False  # tensor parallelism divides the norms' tokens as well
    dispatch: Dispatch = Dispatch()

    @property
    def num_gpus(self) -> FloatLike:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def num_gpus_is_one(self) -> bool:
        """All of it on one GPU, for plain numbers."""
        return isinstance(self.num_gpus, float) and self.num_gpus == 1.0

    @property
    def expert_cut(self) -> FloatLike:
        """GPUs that an expert's matrices are cut over."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def streams_weights(self) -> bool:
        """Weights, at least of experts, lie outside of the GPU and are read layer by layer."""
        return self.offload in ("experts", "parameters", "nvme")

    def streams(self, use: WeightUse) -> bool:
        """A matrix lies outside of the GPU."""
        return self.streams_weights and (self.offload != "experts" or use.matrix.part == "expert")

    @property
    def holders(self) -> FloatLike:
        """GPUs that hold the same slice of the model, or may share its states among them."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_holders(self) -> FloatLike:
        """GPUs that hold the same slice of the same experts."""
        return self.holders * self.tensor_parallel / (self.expert_parallel * self.expert_cut)

    @property
    def shards(self) -> FloatLike:
        """Of the holders those that share one replica of the states."""
        return self.holders if self.shard_group is None else self.shard_group

    @property
    def expert_shards(self) -> FloatLike:
        """The same of experts: expert groups lie within a replica as far as it reaches."""
        if self.shard_group is None:
            return self.expert_holders
        return np.maximum(self.expert_holders * self.shard_group / self.holders, 1.0)

    @property
    def sequence_cut(self) -> FloatLike:
        """GPUs that share out the tokens of what tensor parallelism leaves whole."""
        return self.tensor_parallel if self.sequence_parallel else 1.0


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight matrix and what the method does with it."""

    matrix: Matrix
    layer: LayerKind
    quantized: bool = False
    trained: bool = False
    adapter_width: float = 0.0  # input plus output features of the adapters on one copy; 0 without

    @property
    def adapted(self) -> bool:
        return self.adapter_width > 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """`count` equal layers with the use of their matrices."""

    layers: Layers
    uses: tuple[WeightUse, ...]

    @property
    def count(self) -> int:
        return self.layers.count


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model is tuned.

    Attributes
    ----------
    rank : of the adapters; 0 without.
    num_experts_per_tok : routed experts a token, the model's own or the job's.
    weight_bytes : a weight in no quantized matrix. [byte]
    quantized_bytes : a weight in a quantized matrix, constants included. [byte]
    compute_bytes : an activation. [byte]
    adapter_bytes : an adapter weight. [byte]
    gradient_bytes, optimizer_bytes : a trained weight's gradient, and all its optimizer state. [byte]
    recompute : forward passes that are repeated in the backward pass: 0 none, 1 full checkpointing.
    trains_all : all weights are trained, not adapters.
    """

    rank: FloatLike
    num_experts_per_tok: FloatLike | None
    weight_bytes: float
    quantized_bytes: float
    compute_bytes: float
    adapter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    recompute: float
    trains_all: bool
    attention: Attention
    gradient_accumulation_steps: FloatLike = 1.0
    decomposes_weights: bool = False  # DoRA
    optimizer_copies: bool = True  # the optimizer steps all tensors at once, with temporary copies
    keeps_inputs: bool = False  # 4-bit linears keep their inputs through checkpointing
    stream_bytes: float = 2.0  # an element of the residual stream
    balanced: bool = False  # the run forces its router to load all experts alike
    density: float = 0.0  # share of the targets' weights that is trained in place; 0: adapters, or all weights
    narrow: bool = False  # operands of products are cast to 8 bits or fewer before each
    expands: bool = True  # quantized weights are expanded to the compute type for each product
    capacity_factor: float | None = None  # tokens that an expert takes, over the mean; None: all that come
    pads_experts: bool = False  # it takes as many even where fewer come


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run on what."""

    model: Model
    blocks: tuple[Block, ...]
    embedding: WeightUse
    head: WeightUse
    recipe: Recipe
    device: Device
    layout: Layout = Layout()
    elsewhere_width: float = 0.0  # of adapters outside of the language model

    def uses(self) -> list[tuple[int, WeightUse]]:
        """(layers, use) of every matrix; a tied head is the embedding once more and left out."""
        ends = [(1, self.embedding)] if self.model.tied_head else [(1, self.embedding), (1, self.head)]
        return [(block.count, use) for block in self.blocks for use in block.uses] + ends


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of an epoch as a distribution; the last axis runs over its support.

    Attributes
    ----------
    sequences : rows of a micro-batch. [sequence]
    padded_length : tokens of a row. [token]
    probability : of such a batch; sums to 1 along the last axis.
    per_step : micro-batches of one optimizer step, the mean over an epoch.
    slowest : probability of the batch that the data-parallel GPU has that all wait for; None: nobody waits.
    """

    sequences: FloatLike
    padded_length: FloatLike
    probability: FloatLike
    per_step: FloatLike = 1.0
    slowest: FloatLike | None = None

    @property
    def tokens(self) -> FloatLike:
        return self.sequences * self.padded_length


def experts_per_token(recipe: Recipe, layers: Layers) -> FloatLike:
    """Routed experts a token passes in these layers; never more than there are."""
    if layers.experts is None:
        return 0.0
    own = float(layers.experts.num_experts_per_tok)
    return own if recipe.num_experts_per_tok is None else recipe.num_experts_per_tok
