"""How many weights there are, how many are trained, and how many of them one GPU holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moecost.arrays import FloatLike
from moecost.workload import Layout, Recipe, WeightUse, Workload

ROW_PARALLEL: Final = frozenset({"attention.o", "mlp.w2", "expert.w2", "shared.w2", "mamba.out_proj"})
"""Matrices that tensor parallelism cuts along their input; others along their output."""
REPLICATED: Final = frozenset({"router", "attention.q_a", "attention.kv_a", "mamba.x_proj", "mamba.dt_proj"})
"""Matrices that each tensor-parallel GPU holds whole."""
SHARED_INPUTS: Final = frozenset({"attention.k", "attention.v", "expert.w3", "mlp.w3", "shared.w3"})
"""Kernels that read the very tensor that a sibling reads (keys and values that of the queries, up that of the gate)."""


def all_parameters(workload: Workload) -> int:
    """Parameters of the model, tied weights once."""
    matrices = sum(n * use.matrix.parameters for n, use in workload.uses())
    return matrices + vector_parameters(workload)


def vector_parameters(workload: Workload) -> int:
    """Parameters in no matrix: norms, convolutions, scan parameters, what stands outside of the layers."""
    vectors = sum(block.count * block.layers.vector_parameters for block in workload.blocks)
    return vectors + workload.model.extra_parameters


def trained_elements(workload: Workload) -> tuple[FloatLike, int, float]:
    """(trained weights, tensors, bytes of one) of the adapters or of the whole model."""
    recipe = workload.recipe
    if recipe.trains_all:
        count, tensors = all_parameters(workload), sum(n * use.matrix.copies for n, use in workload.uses())
        return float(count), tensors, recipe.weight_bytes
    tensors = 2 * sum(n * u.matrix.copies for n, u in workload.uses() if u.adapted)
    size = sum(n * adapter_size(workload.recipe, u) for n, u in workload.uses())
    return size + recipe.rank * workload.elsewhere_width, tensors, recipe.adapter_bytes


def adapter_size(recipe: Recipe, use: WeightUse) -> FloatLike:
    """Adapter weights beside the copies of one matrix of one layer: r (in + out), and a magnitude a row with DoRA.

    Of sparse tuning the changes themselves, a share of the weights.
    """
    if not use.adapted:
        return 0.0
    m = use.matrix
    if recipe.density:
        return recipe.density * m.copies * m.weights
    each = recipe.rank * use.adapter_width
    return m.copies * (each + m.out_features if recipe.decomposes_weights else each)


def trained_per_gpu(workload: Workload, *, sharded: bool) -> FloatLike:
    """Trained weights whose states one GPU has; `sharded` over the data-parallel GPUs or not."""
    if workload.recipe.trains_all:
        return per_gpu(workload, lambda u: u.matrix.parameters, vector_parameters(workload), sharded=sharded)
    rest = workload.recipe.rank * workload.elsewhere_width
    return per_gpu(workload, lambda u: adapter_size(workload.recipe, u), rest, sharded=sharded)


def trained_on_host(workload: Workload, *, sharded: bool) -> FloatLike:
    """Of `trained_per_gpu` those whose optimizer state lies in the host's memory, and is stepped there."""
    layout, recipe = workload.layout, workload.recipe
    if layout.offload == "none":
        return 0.0
    if layout.offload != "experts":
        return trained_per_gpu(workload, sharded=sharded)
    if not recipe.trains_all:
        return 0.0  # adapters stay on the GPU

    def size(use: WeightUse) -> FloatLike:
        return float(use.matrix.parameters) if layout.streams(use) else 0.0

    return per_gpu(workload, size, 0.0, sharded=sharded)


def per_gpu(workload: Workload, size: Callable[[WeightUse], FloatLike], rest: FloatLike, *, sharded: bool) -> FloatLike:
    """Sum of a size over the matrices that one GPU holds; `rest` is what stands in no matrix.

    Tensor parallelism cuts matrices, pipeline stages and expert parallelism deal them out. Sharding divides what is
    left by the GPUs that hold the same: for experts those outside of the expert-parallel group.
    """
    layout = workload.layout
    if layout.num_gpus_is_one:
        return sum(n * size(use) for n, use in workload.uses()) + rest
    total: FloatLike = rest / layout.pipeline_parallel / (layout.shards if sharded else 1.0)
    for n, use in workload.uses():
        total = total + n * size(use) / holders(workload, use, sharded=sharded)
    return total


def holders(workload: Workload, use: WeightUse, *, sharded: bool) -> FloatLike:
    """GPUs that a matrix is spread over."""
    layout = workload.layout
    over = layout.pipeline_parallel if use.layer not in ("embedding", "head") else 1.0
    if use.matrix.part == "expert":
        return over * layout.expert_cut * layout.expert_parallel * (layout.expert_shards if sharded else 1.0)
    if use.matrix.kernel not in REPLICATED:
        over = over * layout.tensor_parallel
    return over * (layout.shards if sharded else 1.0)


def cut(use: WeightUse, layout: Layout) -> tuple[FloatLike, FloatLike]:
    """(input, output) features of a matrix on one tensor-parallel GPU."""
    m = use.matrix
    tensor_parallel = layout.expert_cut if m.part == "expert" else layout.tensor_parallel
    if m.kernel in REPLICATED or (isinstance(tensor_parallel, float) and tensor_parallel == 1.0):
        return m.in_features, m.out_features
    if m.kernel in ROW_PARALLEL:
        return m.in_features / tensor_parallel, m.out_features
    return m.in_features, m.out_features / tensor_parallel
