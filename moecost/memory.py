r"""Bytes on the GPU by part, the moment of a step at which they peak, and the largest micro-batch that fits.

The peak is the largest of four moments:

=============  ==================================================================================================
`loss`         weights, optimizer state, all that the forward pass kept, logits; gradients if accumulated
`backward`     the first layer to go back: what was kept, one layer's activations, adapter gradients
`gradients`    the last layer to go back: all gradients, one layer's activations, inputs that a stack keeps
`optimizer`    all gradients, optimizer state, transient copies; no activations
=============  ==================================================================================================

The stages of a pipeline are not told apart: one has the embedding and the micro-batches in flight of the first, the
head and the logits of the last. That counts too much, yet measured peaks (nanotron, SimuMax) lie there: within 9 and
2 %, against 21 and 3 % for the fuller of the two. Interleaved stages have 1 + (p - 1) / (p v) times as many
micro-batches in flight (Megatron-Core's own count). Dealt-out experts hold the tokens of the GPU that gets the most.

Every part is linear in the sequences of a micro-batch, so the largest batch is solved in closed form and then checked
against the same bytes: memory(b) <= capacity < memory(b + 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from moecost.arrays import FloatLike, as_float
from moecost.experts import ROUTER_SKEW, group_imbalance, load_variation
from moecost.footprint import (
    SHARED_INPUTS,
    holders,
    per_gpu,
    trained_elements,
    trained_on_host,
    trained_per_gpu,
    vector_parameters,
)
from moecost.quantities import Layers, RoutedExperts
from moecost.software import MemoryHabits
from moecost.workload import Block, Layout, Recipe, WeightUse, Workload, experts_per_token

Moment: TypeAlias = Literal["loss", "backward", "gradients", "optimizer"]
MOMENTS: Final[tuple[Moment, ...]] = ("loss", "backward", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Allocated bytes at one moment, by part. [byte]"""

    weights: FloatLike
    adapters: FloatLike
    gradients: FloatLike
    optimizer: FloatLike
    activations: FloatLike
    logits: FloatLike
    buffers: FloatLike
    communication: FloatLike = 0.0  # buffers of the collectives, outside of the framework's allocator

    @property
    def allocated(self) -> FloatLike:
        static = self.weights + self.adapters + self.gradients + self.optimizer
        return static + self.activations + self.logits + self.buffers

    def reserved(self, habits: MemoryHabits) -> FloatLike:
        """With the caching allocator's slack on what a step allocates and frees."""
        return self.allocated + (habits.allocator - 1.0) * (self.activations + self.logits + self.buffers)

    def device(self, habits: MemoryHabits) -> FloatLike:
        """With the framework's GPU context: what the driver shows."""
        return self.reserved(habits) + habits.context_bytes + self.communication


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that no batch changes. [byte]"""

    weights: FloatLike
    adapters: FloatLike
    gradients: FloatLike
    optimizer: FloatLike
    copies: FloatLike  # of the optimizer's step, transient
    expanded: FloatLike  # the largest quantized matrix in the compute type, or what sparse tuning makes of a matrix
    gathered: FloatLike
    collectives: FloatLike
    candidates: FloatLike  # of sparse tuning's selection window


def held_bytes(workload: Workload, habits: MemoryHabits) -> Held:
    """What a GPU holds whatever its batch."""
    recipe, layout = workload.recipe, workload.layout
    _, _, width = trained_elements(workload)
    stage = layout.zero_stage
    stepped = trained_per_gpu(workload, sharded=stage >= 1)
    here = stepped - trained_on_host(workload, sharded=stage >= 1)  # on the GPU
    return Held(
        weights=weight_bytes(workload),
        adapters=0.0 if recipe.trains_all else trained_per_gpu(workload, sharded=stage >= 3) * width,
        gradients=trained_per_gpu(workload, sharded=stage >= 2) * recipe.gradient_bytes,
        optimizer=here * recipe.optimizer_bytes,
        copies=habits.optimizer_transient * here * width if recipe.optimizer_copies else 0.0,
        expanded=_expanded_bytes(workload),
        gathered=gathered_bytes(workload) if stage >= 3 or layout.streams_weights else 0.0,
        collectives=np.where(np.asarray(layout.num_gpus) > 1, habits.communication_bytes, 0.0)[()],
        candidates=CANDIDATE_BYTES * stepped if recipe.density else 0.0,
    )


CANDIDATE_BYTES: Final = 10.0
"""A candidate of SpIEL's selection window: an int32 index, and sums of gradients, of their squares and a count in 16
bits; as many as there are changes (its released code, arXiv:2401.16405). [byte]"""


def _expanded_bytes(workload: Workload) -> float:
    """The largest quantized matrix in the compute type; with sparse tuning, the largest target with its changes and
    its whole gradient, and 64-bit indices. [byte]"""
    recipe = workload.recipe
    expanded = max((u.matrix.weights for _, u in workload.uses() if u.quantized), default=0) * recipe.compute_bytes
    if not recipe.density:
        return float(expanded)
    largest = max((u.matrix.weights for _, u in workload.uses() if u.adapted), default=0)
    return float(max(expanded, largest * (2.0 * recipe.compute_bytes + 8.0 * recipe.density)))


def moments(
    workload: Workload,
    habits: MemoryHabits,
    *,
    sequences: FloatLike,
    padded_length: FloatLike,
    held: Held | None = None,
) -> dict[Moment, MemoryParts]:
    """Allocated bytes at each moment of a step on micro-batches of `sequences` rows of `padded_length` tokens.

    `held` is `held_bytes(workload, habits)`, where it is known already.
    """
    recipe, layout = workload.recipe, workload.layout
    held = held or held_bytes(workload, habits)
    tokens = sequences * padded_length / layout.context_parallel
    gradients, expanded, gathered = held.gradients, held.expanded, held.gathered
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    flight = np.minimum(stages, recipe.gradient_accumulation_steps) / stages
    flight = flight * np.where(np.asarray(chunks) > 1, 1.0 + (stages - 1.0) / (stages * chunks), 1.0)
    kept = flight * saved_activations(workload, habits, sequences=sequences, padded_length=padded_length)
    inputs = flight * quantized_inputs(workload, tokens=tokens) if recipe.keeps_inputs else 0.0
    live = live_layer(workload, habits, sequences=sequences, padded_length=padded_length)
    per_logit = habits.logits_full_tuning if recipe.trains_all else habits.logits
    logits = tokens * workload.model.vocab_size * per_logit / layout.tensor_parallel
    early = np.where(np.asarray(recipe.gradient_accumulation_steps) > 1, gradients, 0.0)[()]
    # a sharded layer's input is kept by the adapters' units once more until its backward pass is through
    twice = habits.doubles_sharded_inputs and layout.zero_stage >= 3 and not recipe.trains_all
    back = 2.0 * kept if twice and recipe.recompute >= 1.0 else kept

    def parts(gradients: FloatLike, activations: FloatLike, logits: FloatLike, buffers: FloatLike) -> MemoryParts:
        return MemoryParts(
            held.weights, held.adapters, gradients, held.optimizer, activations, logits, buffers, held.collectives
        )

    return {
        "loss": parts(early, kept + inputs, logits, gathered),
        "backward": parts(
            early if recipe.trains_all else gradients,
            back + inputs + live,
            0.0,
            expanded + gathered + held.candidates,
        ),
        "gradients": parts(gradients, inputs + live, 0.0, expanded + gathered + held.candidates),
        "optimizer": parts(gradients, 0.0, 0.0, held.copies + held.candidates),
    }


def peak(
    workload: Workload, habits: MemoryHabits, *, sequences: FloatLike, padded_length: FloatLike
) -> tuple[FloatLike, dict[Moment, MemoryParts]]:
    """(bytes the driver shows at the fullest moment, bytes of all moments)."""
    at = moments(workload, habits, sequences=sequences, padded_length=padded_length)
    return _largest(at[m].device(habits) for m in MOMENTS), at


def shown(at: Mapping[Moment, MemoryParts], habits: MemoryHabits) -> tuple[FloatLike, FloatLike, FloatLike]:
    """(allocated, reserved, shown by the driver) at the fullest moment, the first of equals. [byte]"""
    first, *others = (at[moment] for moment in MOMENTS)
    allocated, reserved, device = first.allocated, first.reserved(habits), first.device(habits)
    for parts in others:
        more = parts.device(habits)
        fuller = more > device
        allocated = np.where(fuller, parts.allocated, allocated)
        reserved = np.where(fuller, parts.reserved(habits), reserved)
        device = np.maximum(more, device)
    return as_float(allocated), as_float(reserved), as_float(device)


def max_micro_batch_size(workload: Workload, habits: MemoryHabits, *, padded_length: FloatLike) -> FloatLike:
    """Most sequences of `padded_length` tokens that fit; 0 where not even one does.

    Property: memory(b) <= capacity < memory(b + 1), by the very bytes that `peak` gives.
    """
    capacity, held = workload.device.memory_bytes, held_bytes(workload, habits)

    def at(sequences: FloatLike) -> dict[Moment, MemoryParts]:
        return moments(workload, habits, sequences=sequences, padded_length=padded_length, held=held)

    pair = np.reshape([1.0, 2.0], (2,) + (1,) * _dimensions(workload, held, padded_length))
    rooms = []
    for parts in at(pair).values():
        one, two = np.broadcast_arrays(parts.device(habits), pair)[0]
        slope = two - one
        more = np.divide(capacity - one, slope, out=np.full(np.shape(capacity - one), np.inf), where=slope > 0)
        rooms.append(np.where(slope > 0, more, np.where(one <= capacity, np.inf, -1.0)) + 1.0)
    best = np.clip(np.floor(_least(rooms)), 0.0, MOST_SEQUENCES)
    # floor() is one off at an exact fit: ask the very bytes, one below and one above
    near = np.stack([best, best + 1.0])
    fits = _largest(p.device(habits) for p in at(near).values()) <= capacity
    best = np.where(fits[1], best + 1.0, np.where(fits[0], best, np.maximum(best - 1.0, 0.0)))
    return as_float(best)


def _dimensions(workload: Workload, held: Held, padded_length: FloatLike) -> int:
    """Of the arrays that stand for many configurations; 0 for one."""
    recipe, layout = workload.recipe, workload.layout
    batch = (padded_length, layout.context_parallel, recipe.gradient_accumulation_steps, recipe.num_experts_per_tok)
    static = (held.weights, held.adapters, held.gradients, held.optimizer, held.collectives)
    return max(np.ndim(x) for x in (workload.device.memory_bytes, *batch, *static) if x is not None)


MOST_SEQUENCES: Final = 2.0**24
"""Bound of the largest batch, met only where activations cost nothing."""


def _largest(values: Iterable[FloatLike]) -> Any:
    """The largest of several numbers, or arrays that broadcast."""
    return as_float(reduce(np.maximum, values))


def _least(values: Iterable[FloatLike]) -> Any:
    return as_float(reduce(np.minimum, values))


# ------------------------------------------------------------------------------------------------ parts
def fused_loss_chunk(*, tokens: int, hidden_size: int, vocab_size: int) -> tuple[int, int]:
    """(chunks, tokens of one) in which Liger's fused linear cross entropy makes logits. Profiles hold what is measured.

    Source: Liger-Kernel's code: a chunk's logits are about as large as the input, rounded up to a power of two.

    >>> fused_loss_chunk(tokens=16384, hidden_size=4096, vocab_size=32000)
    (8, 2048)
    """
    chunks = -(-vocab_size // hidden_size)
    return chunks, 1 << (-(-tokens // chunks) - 1).bit_length()


def weight_bytes(workload: Workload) -> FloatLike:
    """Bytes of the model's weights that one GPU holds, adapters apart; a tied head once. [byte]"""
    recipe, layout = workload.recipe, workload.layout

    def held(use: WeightUse) -> FloatLike:
        if layout.streams(use):
            return 0.0
        if not use.quantized:
            return use.matrix.parameters * recipe.weight_bytes
        biases = (use.matrix.parameters - use.matrix.copies * use.matrix.weights) * recipe.weight_bytes
        return use.matrix.copies * use.matrix.weights * recipe.quantized_bytes + biases

    stays = not layout.streams(workload.embedding)  # so does what is in no matrix
    rest = vector_parameters(workload) * recipe.weight_bytes if stays else 0.0
    return per_gpu(workload, held, rest, sharded=layout.zero_stage >= 3)


def load_bytes(workload: Workload) -> float:
    """Peak bytes on a GPU while a checkpoint is loaded: the weights as held, and the largest one once more in 16 bits.

    Assumed: the loader streams tensors (safetensors) and quantizes or expands each on the GPU as it comes; a fused
    tensor holds all experts of a layer.
    """
    largest = max(use.matrix.weights * (use.matrix.copies if use.matrix.fused else 1) for _, use in workload.uses())
    return float(weight_bytes(workload)) + LOADED_BYTES * largest


LOADED_BYTES: Final = 2
"""Checkpoints come in 16 bits. [byte]"""


def gathered_bytes(workload: Workload) -> FloatLike:
    """Bytes of sharded or streamed weights that are whole at one time: of two layers, embedding and head. [byte]"""
    recipe, layout = workload.recipe, workload.layout
    width = min(recipe.weight_bytes, recipe.compute_bytes)

    def whole(use: WeightUse) -> FloatLike:
        size = use.matrix.copies * use.matrix.weights * (recipe.quantized_bytes if use.quantized else width)
        return size / holders(workload, use, sharded=False) * layout.pipeline_parallel

    def comes(use: WeightUse) -> bool:
        return layout.zero_stage >= 3 or layout.streams(use)

    layers = [sum(whole(use) for use in block.uses if comes(use)) for block in workload.blocks]
    ends = workload.model.embedding.parameters * width * (1 if workload.model.tied_head else 2)
    return as_float(2.0 * _largest(layers) + (ends / layout.tensor_parallel if comes(workload.embedding) else 0.0))


def layer_activations(
    layers: Layers,
    recipe: Recipe,
    layout: Layout = Layout(),  # noqa: B008  (frozen)
    *,
    sequences: FloatLike,
    padded_length: FloatLike,
) -> FloatLike:
    r"""Bytes that one layer keeps for its backward pass when nothing is recomputed.

    .. math:: A = T \left(4 h n_{norm} + 4 H + 4 K + 4 a + 8 E + k (4 h + 8 f) + 8 f_{dense}\right)

    at 16 bits: both sides of each norm; queries, keys, values, attention output and log-sum-exp; router logits and
    probabilities; the routed copies, gate, up, activation and product of each expert used.

    Notes
    -----
    Source: counted; with E = 0 and plain heads it is Korthikanti et al. (arXiv:2205.05198) with flash attention.
    Check: Mixtral-8x7B 315,584 bytes a token and layer. Eager attention keeps 5 a s more (their Table 2).
    Mamba keeps its two projections and the scan's output, recomputes the convolution, and keeps the scan's states
    once a sequence, as the fused kernel of mamba-ssm does. Tensor parallelism divides all but both sides of the
    norms, which sequence parallelism divides as well.
    """
    width = recipe.compute_bytes
    read = NARROW_INPUT if recipe.narrow else 1.0  # what products read is kept as they read it
    tokens = sequences * padded_length / layout.context_parallel
    stream = layers.hidden_size * recipe.stream_bytes / recipe.compute_bytes
    elements: FloatLike = (1.0 + read) * stream * layers.num_norms
    if not layout.sequence_parallel:
        elements = elements * layout.tensor_parallel  # divided below with all else
    extra: FloatLike = 0.0
    core = layers.attention
    if core is not None:
        elements = elements + core.num_heads * (core.qk_head_dim + read * core.v_head_dim)
        elements = elements + core.num_key_value_heads * (core.qk_head_dim + core.v_head_dim)
        extra = extra + tokens * 4.0 * core.num_heads
        if recipe.attention == "eager":
            extra = extra + tokens * 5.0 * core.num_heads * padded_length
    if layers.scan is not None:
        elements = elements + 3.0 * layers.scan.inner_size
        extra = extra + sequences * 8.0 * layers.scan.inner_size * layers.scan.state_size
    if layers.experts is not None:
        e = layers.experts
        k = experts_per_token(recipe, layers)
        wide = (3.0 if e.gated else 1.0) + read
        routed = (1.0 + read) * e.hidden_size + wide * e.intermediate_size
        elements = elements + k * routed * _busiest(e, k, recipe, layout)
        extra = extra + tokens * 8.0 * e.num_experts
    for ffn in layers.feed_forward:
        elements = elements + ((3.0 if ffn.gated else 1.0) + read) * ffn.intermediate_size
    return (tokens * width * elements + extra) / layout.tensor_parallel


def _busiest(experts: RoutedExperts, per_token: FloatLike, recipe: Recipe, layout: Layout) -> FloatLike:
    """Tokens of the GPU whose experts get the most, over the mean; bounded by the experts' capacity."""
    if recipe.balanced or (isinstance(layout.expert_parallel, float) and layout.expert_parallel == 1.0):
        return 1.0
    of = {"num_experts": experts.num_experts, "num_experts_per_tok": per_token}
    variation = load_variation(**of, router_skew=ROUTER_SKEW)
    found = group_imbalance(num_groups=layout.expert_parallel, **of, variation=variation)
    return found if recipe.capacity_factor is None else np.minimum(found, max(recipe.capacity_factor, 1.0))


NARROW_INPUT: Final = 0.5
"""Bytes of an input that is kept in 8 bits for the weight's gradient, over those of 16 bits."""


def _all_layers(
    workload: Workload, *, sequences: FloatLike, padded_length: FloatLike
) -> Iterable[tuple[Block, FloatLike]]:
    for block in workload.blocks:
        yield (
            block,
            layer_activations(
                block.layers, workload.recipe, workload.layout, sequences=sequences, padded_length=padded_length
            ),
        )


def saved_activations(
    workload: Workload, habits: MemoryHabits, *, sequences: FloatLike, padded_length: FloatLike
) -> FloatLike:
    """Bytes that all layers keep for the backward pass: their inputs alone where they are recomputed."""
    recipe, layout = workload.recipe, workload.layout
    if recipe.recompute >= 1.0:
        tokens = sequences * padded_length / layout.context_parallel
        if layout.sequence_parallel:
            tokens = tokens / layout.tensor_parallel
        return as_float(sum(b.count * tokens * b.layers.hidden_size * recipe.stream_bytes for b in workload.blocks))
    found = _all_layers(workload, sequences=sequences, padded_length=padded_length)
    whole: FloatLike = 0.0
    if habits.keeps_gathered_inputs and layout.sequence_parallel:  # of attention and of the feed-forward network
        tokens = sequences * padded_length / layout.context_parallel
        left = 2.0 * tokens * recipe.compute_bytes * (1.0 - 1.0 / layout.tensor_parallel)
        whole = as_float(sum(b.count * b.layers.hidden_size * left for b in workload.blocks))
    return habits.saved_layer * as_float(sum(block.count * kept for block, kept in found)) + whole


def live_layer(
    workload: Workload, habits: MemoryHabits, *, sequences: FloatLike, padded_length: FloatLike
) -> FloatLike:
    """Bytes of the one layer whose backward pass is under way, the largest of them."""
    found = [kept for _, kept in _all_layers(workload, sequences=sequences, padded_length=padded_length)]
    return as_float(_largest(found) * habits.live_layer)


def quantized_inputs(workload: Workload, *, tokens: FloatLike) -> FloatLike:
    """Bytes of the distinct inputs of all quantized linears, for stacks that keep them through checkpointing.

    arXiv:2408.04693 ran bitsandbytes 0.42, whose 4-bit product held its 16-bit input outside of what checkpointing
    can drop. For Mixtral 3.15 MB a token at top-2, 10.2 MB with all experts.
    """
    recipe = workload.recipe
    total: FloatLike = 0.0
    for block in workload.blocks:
        for use in block.uses:
            if use.quantized and use.matrix.kernel not in SHARED_INPUTS:
                total = total + block.count * _passes(use, block, recipe) * use.matrix.in_features
    return tokens * recipe.compute_bytes * total


def _passes(use: WeightUse, block: Block, recipe: Recipe) -> FloatLike:
    return experts_per_token(recipe, block.layers) if use.matrix.part == "expert" else use.matrix.used_copies
