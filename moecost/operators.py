"""The operators of a training step: what each one computes, moves and launches, and how long the GPU takes for it.

`operators` lists them for a workload and its batches. Every number is per micro-batch and for the whole model (all
layers of a kind together), forward and backward apart; recomputation is decided by `step`. Arrays run over the
batches' support. To add a term, add an `Operator` here: time, breakdowns and utilization follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float
from moecost.coefficients import Coefficients
from moecost.communication import (
    LINK_RAMP_S,
    NETWORK_RAMP_S,
    all_reduce_bytes,
    distinct_machines,
    expert_parallel_bytes,
    gather_bytes,
    tensor_latency,
    tensor_parallel_bytes,
    transfer_s,
)
from moecost.experts import experts_touched, group_imbalance, load_variation, mean_over_loads, rows_of_experts
from moecost.footprint import REPLICATED, SHARED_INPUTS, adapter_size, cut
from moecost.quantities import LayerKind
from moecost.roofline import gemm_compute_time, gemm_flops, grouped_gemm_time
from moecost.software import Grouped, HostWork, Launches, SoftwareProfile, Traffic
from moecost.workload import Batches, Block, Device, Layout, Recipe, WeightUse, Workload, experts_per_token

SM_BUSY: Final = 0.95
"""SM use of a matrix product that is bound by compute: what profilers show at the rate that products reach."""
SM_DEQUANTIZE: Final = 0.83
"""SM use of 4-bit expansion, arXiv:2408.04693, Fig. 9: 83 % at every batch."""
SM_ELEMENTWISE: Final = 0.5
GROUPED_GRADIENT: Final = 0.80
"""Rate of grouped weight-gradient products over forward ones: 0.69 to 0.86 in kernel timings (SimuMax, A100, B200)."""
SM_ROWS: Final = 64
"""Rows that one warp group works on: fewer leave it as busy."""


@dataclass(frozen=True, slots=True)
class Work:
    """One pass of an operator over a micro-batch.

    Attributes
    ----------
    seconds : GPU time. [s]
    flops, bytes : done and moved. [FLOP], [byte]
    launches : kernels launched.
    host : host work. [launches]
    host_s : host time beside launches. [s]
    sm : share of the SMs it keeps busy.
    wire : seconds of transfers to other GPUs that nothing hides. [s]
    stream : seconds of transfers that run beside the GPU's work. [s]
    """

    seconds: FloatLike = 0.0
    flops: FloatLike = 0.0
    bytes: FloatLike = 0.0
    launches: FloatLike = 0.0
    host: FloatLike = 0.0
    host_s: FloatLike = 0.0
    sm: FloatLike = SM_ELEMENTWISE
    wire: FloatLike | None = None
    stream: FloatLike | None = None


NOTHING: Final = Work()


@dataclass(frozen=True, slots=True)
class Operator:
    """A kernel of the report, with its forward and backward work."""

    kernel: str
    layer: LayerKind
    forward: Work
    backward: Work = NOTHING
    recomputed: bool = True


Grouping = Literal["rows", "depth"]
"""Where the tokens of a grouped product stand: along its rows, or along its reduction (weight gradients)."""


@dataclass(frozen=True, slots=True)
class _Context:
    recipe: Recipe
    device: Device
    host: HostWork
    traffic: Traffic
    coefficients: Coefficients
    tokens: FloatLike
    layout: Layout
    per_step: FloatLike
    grouped: Grouped | None  # how experts run in one product; None: one by one
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def whole_tokens(self) -> FloatLike:
        """Tokens a GPU has of what tensor parallelism leaves whole."""
        return self.tokens / self.layout.sequence_cut

    @property
    def routed_tokens(self) -> FloatLike:
        """Tokens that a GPU routes: tensor-parallel GPUs share them out where experts are cut less than the rest."""
        return self.tokens * self.layout.expert_cut / self.layout.tensor_parallel

    def elementwise(
        self,
        moved: FloatLike,
        launches: FloatLike = 1.0,
        host: FloatLike = 0.0,
        flops: FloatLike = 0.0,
        flops_per_s: FloatLike | None = None,
    ) -> Work:
        """Work bound by its traffic, or by the FLOPs that come with it, at the rate of products where none is given."""
        d, c = self.device, self.coefficients
        reading = moved / (d.bytes_per_s * c.elementwise_bandwidth)
        rate = d.peak_flops_per_s * c.gemm_efficiency if flops_per_s is None else flops_per_s
        return Work(np.maximum(reading, flops / rate), flops, moved, launches, host)

    @property
    def core_flops_per_s(self) -> FloatLike:
        """What attention cores and scans reach, in 16 bits. [FLOP/s]"""
        return self.device.core_flops_per_s * self.coefficients.attention_efficiency

    def both_ways(
        self, kernel: str, layer: LayerKind, forward_bytes: FloatLike, launches: FloatLike, host: Launches | None = None
    ) -> Operator:
        """Elementwise work with its backward pass."""
        forward, backward = (host.forward, host.backward) if host else (0.0, 0.0)
        return Operator(
            kernel,
            layer,
            self.elementwise(forward_bytes, launches, forward),
            self.elementwise(forward_bytes * self.traffic.backward_passes, launches, backward),
        )

    def once(self, asked: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives for these arguments, made once; arrays are the same only where they are one object."""
        key = tuple(id(x) if isinstance(x, np.ndarray) else x for x in asked)
        if key not in self.made:
            self.made[key] = (make(), asked)  # the arguments are kept alive, so that ids stay theirs
        return self.made[key][0]

    def gemm(
        self, rows: FloatLike, in_features: FloatLike, out_features: FloatLike, grouped: Grouping | None = None
    ) -> tuple[FloatLike, FloatLike]:
        """(seconds, sm share) of one product with both operands and the result in memory."""
        asked = (rows, in_features, out_features, grouped)
        found: tuple[FloatLike, FloatLike] = self.once(asked, lambda: self._gemm(*asked))
        return found

    def _gemm(
        self, rows: FloatLike, in_features: FloatLike, out_features: FloatLike, grouped: Grouping | None
    ) -> tuple[FloatLike, FloatLike]:
        c, d = self.coefficients, self.device
        rate = d.peak_flops_per_s * c.gemm_efficiency
        reads = d.bytes_per_s * c.gemm_bandwidth
        sizes = {"rows": rows, "in_features": in_features, "out_features": out_features}
        moved = self.recipe.compute_bytes * (in_features * out_features + rows * (in_features + out_features))
        if grouped is not None and self.grouped is not None:
            rate = rate * self.grouped.efficiency * (GROUPED_GRADIENT if grouped == "depth" else 1.0)
            flops = gemm_flops(**sizes)
            seconds = grouped_gemm_time(flops=flops, bytes_moved=moved, flops_per_s=rate, bytes_per_s=reads)
        else:
            seconds = np.maximum(gemm_compute_time(**sizes, num_sms=d.num_sms, flops_per_s=rate), moved / reads)
        filled = gemm_flops(rows=np.ceil(rows / SM_ROWS) * SM_ROWS, in_features=in_features, out_features=out_features)
        return seconds, SM_BUSY * np.minimum(filled / (rate * seconds), 1.0)

    def ring_s(self, sent_bytes: FloatLike, num_gpus: FloatLike, stride: FloatLike = 1.0) -> FloatLike:
        """Seconds of a ring over GPUs that lie `stride` apart: across machines it uses the ports of all its GPUs there.

        Source: NCCL's rings leave and enter a machine once, and channels share out its ports; measured on 2 machines
        of 8 H100 with 50 GB/s each: 437 to 487 GB/s (AWS p5).
        """
        d = self.device
        ports = np.maximum(d.gpus_per_node / stride, 1.0)
        across = np.minimum(self.inside, d.network_bytes_per_s * self.coefficients.network_share * ports)
        beyond = num_gpus * stride > d.gpus_per_node
        return transfer_s(
            sent_bytes=sent_bytes,
            bytes_per_s=np.where(beyond, across, self.inside),
            ramp_s=np.where(beyond, NETWORK_RAMP_S, LINK_RAMP_S),
        )

    def exchange_s(self, token_bytes: FloatLike, experts_per_token: FloatLike) -> FloatLike:
        """Seconds in which tokens of `token_bytes` together reach their experts, or come back from them.

        Each GPU sends by its own port to other machines; inside a machine every copy takes the fast link.
        """
        d, layout = self.device, self.layout
        group = layout.expert_parallel
        machines = np.maximum(group * layout.expert_cut / d.gpus_per_node, 1.0)
        sent = expert_parallel_bytes(token_bytes=token_bytes, experts_per_token=experts_per_token, num_gpus=group)
        leaves = 1.0 - 1.0 / machines
        if layout.dispatch.sent_to == "all":
            sent, copies = token_bytes * (group - 1.0), machines - 1.0
        elif layout.dispatch.sent_to == "machines":
            copies = distinct_machines(machines=machines, experts_per_token=experts_per_token) * leaves
        else:
            copies = experts_per_token * leaves
        across = copies * token_bytes / (d.network_bytes_per_s * self.coefficients.exchange_share)
        staying = sent if layout.dispatch.sent_to == "machines" else sent - copies * token_bytes
        return np.maximum(staying / self.inside, across) + layout.dispatch.exchange_s

    @property
    def pipelined_host_s(self) -> FloatLike:
        """Host time of a tensor-parallel collective that some stacks add in a pipeline. [s]"""
        each = self.host.pipelined_tensor_s * self.layout.tensor_parallel
        return as_float(np.where(self.layout.pipeline_parallel > 1, each, 0.0))

    @property
    def inside(self) -> FloatLike:
        """Rate between GPUs of one machine. [byte/s]"""
        d, c = self.device, self.coefficients
        return d.link_bytes_per_s * (c.pcie_share if d.link_is_pcie else c.link_share)

    def transfer(
        self, kernel: str, layer: LayerKind, forward: FloatLike, backward: FloatLike, again: bool, hidden: bool = False
    ) -> Operator:
        """Transfers of `forward` and `backward` seconds: beside the GPU's work over PCIe or where a stack hides them,
        in its way else."""
        if self.device.link_is_pcie or hidden:
            return Operator(kernel, layer, Work(stream=forward), Work(stream=backward), again)
        return Operator(kernel, layer, Work(wire=forward), Work(wire=backward), again)


def operators(
    workload: Workload, batches: Batches, profile: SoftwareProfile, coefficients: Coefficients
) -> list[Operator]:
    """All operators of one micro-batch, in the order of a forward pass."""
    context = _Context(
        workload.recipe,
        workload.device,
        profile.host,
        profile.traffic,
        coefficients,
        as_float(batches.tokens / workload.layout.context_parallel),
        workload.layout,
        batches.per_step,
        profile.grouped if profile.experts == "grouped" else None,
    )
    out = list(_embedding(context, workload))
    for block in workload.blocks:
        out += _norms(context, block)
        out += _mixer(context, block, batches)
        if block.layers.experts is not None:
            out += _experts(context, block)
        out += _dense(context, block)
        if not workload.layout.num_gpus_is_one or workload.layout.offload != "none":
            out += _transfers(context, workload, block)
    out += _head(context, workload)
    if not workload.layout.num_gpus_is_one or workload.layout.offload != "none":
        ends = [workload.embedding] if workload.model.tied_head else [workload.embedding, workload.head]
        out += _weight_transfers(context, "embedding", 1, ends)
    return out


# ------------------------------------------------------------------------------------------------ matrix products
def _products(
    context: _Context,
    use: WeightUse,
    count: int,
    rows: FloatLike,
    calls: FloatLike = 1.0,
    spread: NDArray[np.float64] | None = None,
    grouped: bool = False,
) -> Iterator[Operator]:
    """A weight matrix in `count` layers, `calls` copies of it a layer used, each on `rows` rows.

    Where copies get unequal rows, `spread` holds them at the quadrature nodes of `experts` and `rows` is their mean.
    Siblings (queries and output, keys and values, gate and up) do the same work, which is computed once.
    """
    m = use.matrix
    wide_in, wide_out = cut(use, context.layout)
    alike = (m.in_features, m.out_features, use.adapter_width, use.quantized, use.trained, m.kernel in SHARED_INPUTS)
    asked = (count, rows, calls, spread, grouped, wide_in, wide_out, *alike, m.kernel == "head")
    family = m.kernel.split(".")[0]
    for suffix, forward, backward in context.once(asked, lambda: _product_works(context, use, *asked[:7])):
        yield Operator(f"{m.kernel if suffix[:1] in ('', '.') else family + '.'}{suffix}", use.layer, forward, backward)


def _product_works(
    context: _Context,
    use: WeightUse,
    count: int,
    rows: FloatLike,
    calls: FloatLike,
    spread: NDArray[np.float64] | None,
    grouped: bool,
    wide_in: FloatLike,
    wide_out: FloatLike,
) -> list[tuple[str, Work, Work]]:
    """(what is added to the kernel's name, forward, backward) of the product and of what goes with it.

    Frozen weights need no weight gradient: one backward product, two where they are trained.
    """
    m, recipe, host, t = use.matrix, context.recipe, context.host, context.traffic
    n = count * calls

    def mean(values: FloatLike) -> FloatLike:
        return values if spread is None else mean_over_loads(np.asarray(values))

    each = rows if spread is None else spread
    rows_of: Grouping | None = "rows" if grouped else None
    depth_of: Grouping | None = "depth" if grouped else None
    forward_s, sm = (mean(x) for x in context.gemm(each, wide_in, wide_out, rows_of))
    backward_s, backward_sm = (mean(x) for x in context.gemm(each, wide_out, wide_in, rows_of))
    products = 1
    if use.trained or (use.adapted and recipe.density):  # sparse tuning forms the whole gradient, and keeps some of it
        gradient_s, gradient_sm = (mean(x) for x in context.gemm(wide_out, each, wide_in, depth_of))
        backward_sm = (backward_sm * backward_s + gradient_sm * gradient_s) / (backward_s + gradient_s)
        backward_s, products = backward_s + gradient_s, 2
    flops = n * gemm_flops(rows=rows, in_features=wide_in, out_features=wide_out)
    moved = n * recipe.compute_bytes * (wide_in * wide_out + rows * (wide_in + wide_out))
    forward = Work(n * forward_s, flops, moved, n, n * host.linear.forward, 0.0, sm)
    back = n * host.linear.backward
    backward = Work(n * backward_s, products * flops, products * moved, n * products, back, 0.0, backward_sm)
    out = [("", forward, backward)]
    if recipe.narrow and m.kernel != "head":
        cast = n * rows * t.narrow_operand
        read = 0.0 if m.kernel in SHARED_INPUTS else wide_in
        out.append((".cast", context.elementwise(cast * read, n), context.elementwise(cast * wide_out, n)))
    if use.quantized and recipe.expands:
        expanded = n * (wide_in * wide_out * (recipe.quantized_bytes + recipe.compute_bytes))
        seconds = expanded / (context.device.bytes_per_s * context.coefficients.dequantize_bandwidth)
        q = host.quantized_linear
        first, last = (Work(seconds, 0.0, expanded, n, n * h, 0.0, SM_DEQUANTIZE) for h in (q.forward, q.backward))
        out.append(("dequantize", first, last))
        written = n * rows * wide_out * t.quantized_output
        first, last = (context.elementwise(written * passes, n) for passes in (1.0, t.backward_passes))
        out.append((".output", first, last))
    if use.adapted and recipe.density:
        out.append((".changes", *_changes(context, n, wide_in * wide_out)))
    elif use.adapted:
        out.append((".adapter", *_adapter(context, use, n, rows, wide_in * wide_out)))
    return out


def _adapter(context: _Context, use: WeightUse, n: FloatLike, rows: FloatLike, wide: FloatLike) -> tuple[Work, Work]:
    """Low-rank products beside `wide` weights are bound by the traffic of their wide side."""
    m, t, host = use.matrix, context.traffic, context.host.adapter
    units = 2.0 * n * context.host.sharded_adapter_s if context.layout.zero_stage >= 3 else 0.0
    flops = gemm_flops(rows=rows, in_features=use.adapter_width, out_features=context.recipe.rank)
    moved = rows * (t.adapter_input * m.in_features + t.adapter_output * m.out_features) * (wide / m.weights)
    moved = moved + context.recipe.adapter_bytes * context.recipe.rank * use.adapter_width
    if context.recipe.decomposes_weights:
        moved = moved + DORA_BYTES * m.weights
    forward = context.elementwise(n * moved, 2 * n, n * host.forward, n * flops)
    backward = context.elementwise(n * moved * t.backward_passes, 4 * n, n * host.backward, 2 * n * flops)
    return replace(forward, host_s=units), replace(backward, host_s=units)


def _changes(context: _Context, n: FloatLike, wide: FloatLike) -> tuple[Work, Work]:
    """Sparse tuning of `wide` weights: they are copied and changed, in both passes; gradients are gathered."""
    copied = 2.0 * context.recipe.compute_bytes * wide
    added = CHANGE_BYTES * context.recipe.density * wide
    host = context.host.adapter
    return (
        context.elementwise(n * (copied + added), 3 * n, n * host.forward),
        context.elementwise(n * (copied + 2.0 * added), 5 * n, n * host.backward),
    )


CHANGE_BYTES: Final = 24
"""Traffic of a change that is added to a weight, or gathered from a gradient: index, value, and a sector. [byte]"""
DORA_BYTES: Final = 36
"""Traffic of a weight under DoRA, a pass: the adapted weight is formed, squared and summed for its norm. [byte]

Counted 12 bytes; public runs (q and v of an L40S, +21 % over LoRA) show three times that.
"""


# ------------------------------------------------------------------------------------------------ layers
def _norms(context: _Context, block: Block) -> Iterator[Operator]:
    layers, t = block.layers, context.traffic
    n = block.count * layers.num_norms
    host = context.host.norm
    yield context.both_ways(
        "norm",
        "norm",
        n * context.whole_tokens * layers.hidden_size * (t.norm + t.residual) * context.recipe.stream_bytes / 2,
        n,
        Launches(forward=n * host.forward, backward=n * host.backward),
    )


def _block_host(context: _Context, count: int) -> Launches:
    host = context.host.block
    return Launches(forward=count * host.forward, backward=count * host.backward)


def _mixer(context: _Context, block: Block, batches: Batches) -> Iterator[Operator]:
    layers, n, tokens = block.layers, block.count, context.tokens
    for use in block.uses:
        if use.layer in ("attention", "mamba"):
            yield from _products(context, use, n, tokens)
    core = layers.attention
    if core is not None:
        d = context.device
        span = batches.padded_length if core.window is None else np.minimum(batches.padded_length, core.window)
        pairs = tokens * (span / 2 if core.window is None else span - span**2 / (2 * batches.padded_length))
        if context.recipe.attention == "eager":
            pairs = tokens * batches.padded_length
        heads = core.num_heads / context.layout.tensor_parallel
        flops = n * pairs * heads * 2 * (core.qk_head_dim + core.v_head_dim)
        rate = context.core_flops_per_s
        width = core.num_heads * (core.qk_head_dim + core.v_head_dim)
        width = width + core.num_key_value_heads * (core.qk_head_dim + core.v_head_dim)
        moved = n * tokens * width * context.recipe.compute_bytes / context.layout.tensor_parallel
        if context.recipe.attention == "eager":
            moved = moved + n * pairs * heads * EAGER_SCORE_BYTES
        seconds = np.maximum(flops / rate, moved / (d.bytes_per_s * context.coefficients.elementwise_bandwidth))
        yield Operator(
            "attention.core",
            "attention",
            Work(seconds, flops, moved, n, 0.0, 0.0, SM_ELEMENTWISE),
            Work(2.5 * seconds, 2.5 * flops, 2.5 * moved, n, 0.0, 0.0, SM_ELEMENTWISE),
        )
        rotated = (core.num_heads + core.num_key_value_heads) * core.qk_head_dim
        yield context.both_ways(
            "attention.rope",
            "attention",
            n
            * tokens
            * rotated
            * context.traffic.rope
            / context.layout.tensor_parallel
            * context.recipe.stream_bytes
            / 2,
            4 * n,
            _block_host(context, n),
        )
    scan = layers.scan
    if scan is not None:
        # selective scan: reads x, z, delta, writes y; B and C are narrow. 9 FLOP a state and token
        moved = n * tokens * scan.inner_size * SCAN_BYTES
        flops = n * tokens * scan.inner_size * scan.state_size * SCAN_FLOPS
        host, rate = context.host.block, context.core_flops_per_s
        yield Operator(
            "mamba.scan",
            "mamba",
            context.elementwise(moved, 2 * n, n * host.forward, flops, rate),
            context.elementwise(moved * context.traffic.backward_passes, 2 * n, n * host.backward, 2 * flops, rate),
        )


EAGER_SCORE_BYTES: Final = 16
"""Traffic of a score in eager attention: written, masked, soft-maxed in fp32, cast and read. [byte]"""
SCAN_BYTES: Final = 20
"""Traffic of a scanned channel: convolution in and out, x, z, delta and y, in 16 bits, and the softplus. [byte]"""
SCAN_FLOPS: Final = 9
"""FLOPs a state, channel and token of the selective scan (Mamba, arXiv:2312.00752)."""


def _experts(context: _Context, block: Block) -> Iterator[Operator]:
    layers, n, t, host = block.layers, block.count, context.traffic, context.host
    experts = layers.experts
    assert experts is not None
    top_k = experts_per_token(context.recipe, layers)
    pairs = context.routed_tokens * top_k
    group = context.layout.expert_parallel  # pool their tokens, each has its share of the experts
    touched = (
        experts_touched(
            tokens=context.routed_tokens * group, num_experts=experts.num_experts, num_experts_per_tok=top_k
        )
        / group
    )
    variation = load_variation(
        num_experts=experts.num_experts,
        num_experts_per_tok=top_k,
        router_skew=0.0 if context.recipe.balanced else context.coefficients.router_skew,
    )
    for use in block.uses:
        if use.matrix.part == "router":
            yield from _products(context, use, n, context.whole_tokens)
    yield context.both_ways(
        "topk", "moe", n * context.whole_tokens * experts.num_experts * 12.0, 3 * n, _block_host(context, n)
    )
    limit = context.recipe.capacity_factor
    rows, spread = _expert_rows(context.recipe, pairs / touched, variation, pairs * group / experts.num_experts)
    pairs = rows * touched
    products: list[Operator] = []
    for use in block.uses:
        if use.matrix.part == "expert":
            together = _products(context, use, n, rows, touched, spread, grouped=context.grouped is not None)
            products += together if context.grouped is None else (_in_one_launch(op, touched) for op in together)
    yield from products
    if not isinstance(group, float) or group > 1.0:  # all wait for the GPU whose experts got the most tokens
        busiest = group_imbalance(
            num_groups=group,
            num_experts=experts.num_experts,
            num_experts_per_tok=top_k,
            variation=variation,
        )
        late = (busiest if limit is None else np.minimum(busiest, np.maximum(limit, 1.0))) - 1.0
        forward, backward = (late * sum(getattr(op, p).seconds for op in products) for p in ("forward", "backward"))
        yield Operator("experts.wait", "moe", Work(wire=forward), Work(wire=backward))
    per_f = t.activation if experts.gated else t.activation_ungated
    yield context.both_ways(
        "expert.activation",
        "moe",
        n * pairs * experts.intermediate_size * per_f / context.layout.expert_cut,
        2 * n * touched,
    )
    routed = context.elementwise(n * pairs * experts.hidden_size * t.routed, 3 * n * touched)
    calls = n * touched if context.grouped is None else float(n)
    expert = host.expert if context.grouped is None else context.grouped.launches
    yield Operator(
        "expert.dispatch",
        "moe",
        Work(
            routed.seconds,
            0.0,
            routed.bytes,
            routed.launches,
            calls * expert.forward,
            n * pairs * host.index_s_per_pair,
        ),
        Work(
            routed.seconds * t.backward_passes,
            0.0,
            routed.bytes * t.backward_passes,
            routed.launches,
            calls * expert.backward,
        ),
    )


def _expert_rows(
    recipe: Recipe, rows: FloatLike, variation: FloatLike, even_rows: FloatLike
) -> tuple[FloatLike, NDArray[np.float64] | None]:
    """(mean rows of an expert, rows at the quadrature nodes of `experts` where they differ), up to its capacity.

    Tokens beyond the capacity, a multiple of `even_rows`, are dropped; some stacks fill the rest of it with padding.
    """
    uneven = np.any(np.asarray(variation) > 0)
    spread = rows_of_experts(mean_rows=rows, variation=variation) if uneven else None
    if recipe.capacity_factor is None:
        return rows, spread
    limit = recipe.capacity_factor * even_rows
    if recipe.pads_experts:
        return limit, None
    if spread is None:
        return np.minimum(rows, limit), None
    spread = np.minimum(spread, limit)
    return mean_over_loads(spread), spread


def _in_one_launch(op: Operator, calls: FloatLike) -> Operator:
    """The same work of `calls` experts launched as one."""

    def one(work: Work) -> Work:
        return replace(work, launches=work.launches / calls, host=work.host / calls)

    return replace(op, forward=one(op.forward), backward=one(op.backward))


def _dense(context: _Context, block: Block) -> Iterator[Operator]:
    n, tokens, t = block.count, context.tokens, context.traffic
    for use in block.uses:
        if use.layer == "mlp" or use.matrix.part == "shared":
            yield from _products(context, use, n, tokens)
    for ffn in block.layers.feed_forward:
        per_f = t.activation if ffn.gated else t.activation_ungated
        layer: LayerKind = "moe" if ffn.shared else "mlp"
        yield context.both_ways(
            "shared.activation" if ffn.shared else "mlp.activation",
            layer,
            n
            * tokens
            * ffn.intermediate_size
            * per_f
            / context.layout.tensor_parallel
            * context.recipe.stream_bytes
            / 2,
            2 * n,
            _block_host(context, n),
        )


def _embedding(context: _Context, workload: Workload) -> Iterator[Operator]:
    moved = context.tokens * workload.model.hidden_size * 2 * context.recipe.compute_bytes
    forward = context.elementwise(moved, 1, context.host.linear.forward)
    backward = (
        context.elementwise(2 * moved, 1, context.host.linear.backward) if workload.embedding.trained else NOTHING
    )
    yield Operator("embedding", "embedding", forward, backward, recomputed=False)


def _head(context: _Context, workload: Workload) -> Iterator[Operator]:
    for op in _products(context, workload.head, 1, context.tokens):
        yield Operator(op.kernel, op.layer, op.forward, op.backward, recomputed=False)
    moved = context.tokens * workload.model.vocab_size * context.traffic.logits / context.layout.tensor_parallel
    yield Operator(
        "head.loss",
        "head",
        context.elementwise(0.6 * moved, 5, context.host.block.forward),
        context.elementwise(0.4 * moved, 3, context.host.block.backward),
        recomputed=False,
    )


# ------------------------------------------------------------------------------------------------ between GPUs
def _transfers(context: _Context, workload: Workload, block: Block) -> Iterator[Operator]:
    """What a block's layers send between GPUs, or read from the host's memory.

    Tensor-parallel GPUs are neighbours, then come context-parallel, data-parallel and pipeline groups.
    """
    recipe, layout, n = context.recipe, context.layout, block.count
    for layer in dict.fromkeys(use.layer for use in block.uses):
        yield from _weight_transfers(context, layer, n, [use for use in block.uses if use.layer == layer])
        if np.any(np.asarray(layout.tensor_parallel) > 1):
            yield _tensor_transfers(context, block, layer)
    if block.layers.experts is not None and np.any(np.asarray(layout.expert_parallel) > 1):
        # tokens that lie cut up travel so, and are gathered where an expert is cut
        tokens = context.whole_tokens if layout.sequence_parallel else context.routed_tokens
        token_bytes = tokens * block.layers.experts.hidden_size * recipe.compute_bytes
        seconds = 2 * n * context.exchange_s(token_bytes, experts_per_token(recipe, block.layers))
        yield context.transfer("experts.alltoall", "moe", seconds, seconds, True, layout.dispatch.hidden)
    if np.any(np.asarray(layout.pipeline_parallel) > 1):
        yield _stage_transfers(context, block, workload)
    core = block.layers.attention
    if core is not None and np.any(np.asarray(layout.context_parallel) > 1):
        width = core.num_key_value_heads * (core.qk_head_dim + core.v_head_dim) / layout.tensor_parallel
        sent = n * context.tokens * (layout.context_parallel - 1.0) * width * recipe.compute_bytes
        seconds = context.ring_s(sent, layout.context_parallel, layout.tensor_parallel)
        yield Operator("attention.exchange", "attention", Work(stream=seconds), Work(stream=2 * seconds))


def _stage_transfers(context: _Context, block: Block, workload: Workload) -> Operator:
    """Activations from stage to stage, and gradients back: one transfer a model chunk, by each GPU's own port.

    Counted for all stages, as the layers are, and shared out by them.
    """
    layout, d = context.layout, context.device
    span = layout.num_gpus / layout.pipeline_parallel
    rate = np.where(
        span * 2.0 > d.gpus_per_node, d.network_bytes_per_s * context.coefficients.network_share, context.inside
    )
    whole = context.whole_tokens * workload.model.hidden_size * context.recipe.compute_bytes
    transfers = (layout.pipeline_parallel * layout.virtual_pipeline - 1.0) * block.count
    seconds = transfers * whole / rate / sum(b.count for b in workload.blocks)
    layer: LayerKind = "attention" if block.layers.attention is not None else "mamba"
    return Operator("stage.send", layer, Work(wire=seconds), Work(wire=seconds), recomputed=False)


def _tensor_transfers(context: _Context, block: Block, layer: LayerKind) -> Operator:
    """All-reduces of a layer kind's outputs over the GPUs that share its products; two a layer, one a pass.

    Routed tokens that sequence parallelism has cut up are gathered, once for each of their experts, over the GPUs
    that an expert is cut over, and reduced over them.
    """
    layout, layers = context.layout, block.layers
    groups: list[tuple[FloatLike, FloatLike]] = [(context.tokens, layout.tensor_parallel)]
    if layer == "moe" and layout.sequence_parallel:
        assert layers.experts is not None
        pairs = context.routed_tokens * experts_per_token(context.recipe, layers)
        shared = any(use.matrix.part == "shared" for use in block.uses)
        groups = [*(groups if shared else []), (pairs, layout.expert_cut)]
    seconds: FloatLike = 0.0
    for tokens, gpus in groups:
        sent = tensor_parallel_bytes(
            tokens=tokens,
            hidden_size=layers.hidden_size,
            element_bytes=context.recipe.compute_bytes,
            num_gpus=gpus,
        )
        latency = tensor_latency(
            gpus, gpus_per_node=context.device.gpus_per_node, hop_s=context.coefficients.network_hop_s
        )
        seconds = seconds + block.count * (context.ring_s(sent, gpus) + latency)
    op = context.transfer("tensor.allreduce", layer, seconds, seconds, True)
    host_s = block.count * context.pipelined_host_s
    return replace(op, forward=replace(op.forward, host_s=host_s), backward=replace(op.backward, host_s=host_s))


def _weight_transfers(context: _Context, layer: LayerKind, n: int, uses: Sequence[WeightUse]) -> Iterator[Operator]:
    """Sharded weights gathered, gradients reduced, weights read from the host, of `n` layers with these matrices.

    Assumed: sharded weights are gathered once for the forward pass and once for the backward pass (the recomputed
    forward shares the latter); gradients are reduced once a step, or at each micro-batch where they are sharded.
    """
    layout, per_step = context.layout, context.per_step
    hides = context.host.hides_gathers
    gathered: FloatLike = 0.0
    reduced: FloatLike = 0.0
    streamed: FloatLike = 0.0
    for expert in (False, True):  # whose groups differ; each sends a layer at a time
        of = [use for use in uses if (use.matrix.part == "expert") is expert]
        if not of:
            continue
        holders = layout.expert_holders if expert else layout.holders
        shards = layout.expert_shards if expert else layout.shards
        stride = layout.expert_cut * layout.expert_parallel if expert else layout.tensor_parallel
        held = as_float(sum(_slice_bytes(context, use) for use in of))
        gradients = as_float(sum(_gradient_bytes(context, use) for use in of))
        if layout.streams(of[0]):
            streamed = streamed + n * held / (shards if layout.zero_stage >= 3 else 1.0)
        if layout.zero_stage < 3:
            sent = all_reduce_bytes(buffer_bytes=gradients, num_gpus=holders)
            reduced = reduced + n * context.ring_s(sent, holders, stride) / per_step
            continue
        gathered = gathered + n * context.ring_s(gather_bytes(buffer_bytes=held, num_gpus=shards), shards, stride)
        sent = gather_bytes(buffer_bytes=gradients, num_gpus=shards)
        reduced = reduced + n * context.ring_s(sent, shards, stride)
        if layout.shard_group is not None:  # replicas of the shards add theirs up once a step
            replicas = holders / shards
            sent = all_reduce_bytes(buffer_bytes=gradients / shards, num_gpus=replicas)
            reduced = reduced + n * context.ring_s(sent, replicas, stride * shards) / per_step
    if layout.zero_stage >= 3:
        yield context.transfer("weights.gather", layer, gathered, gathered, False, hides)
    if any(layout.streams(use) for use in uses):
        seconds = streamed / host_bytes_per_s(context.device, layout, context.coefficients)
        yield Operator("weights.stream", layer, Work(stream=seconds), Work(stream=seconds), recomputed=False)
    yield context.transfer("gradients.reduce", layer, 0.0, reduced, False, hides)


def host_bytes_per_s(device: Device, layout: Layout, coefficients: Coefficients) -> FloatLike:
    """Rate at which a GPU reads what lies in the host's memory, or on its drives. [byte/s]"""
    link = device.host_link_bytes_per_s * coefficients.host_link_share
    return np.minimum(link, NVME_BYTES_PER_S) if layout.offload == "nvme" else link


NVME_BYTES_PER_S: Final = 3.0e9
"""What one GPU gets of its machine's drives, assumed: half of a PCIe 4 x4 drive each. No run was seen. [byte/s]"""


def _slice_bytes(context: _Context, use: WeightUse) -> FloatLike:
    """Bytes of a layer's copies of a matrix that a GPU needs for its part of the work, gathered. [byte]"""
    recipe, m = context.recipe, use.matrix
    each = recipe.quantized_bytes if use.quantized else min(recipe.weight_bytes, recipe.compute_bytes)
    return m.copies * (m.weights + m.bias) * each / _slices(context.layout, use)


def _gradient_bytes(context: _Context, use: WeightUse) -> FloatLike:
    """Bytes of the gradients of a layer's copies of a matrix that a GPU reduces. [byte]"""
    recipe = context.recipe
    size = use.matrix.parameters if recipe.trains_all else adapter_size(recipe, use)
    each = min(recipe.gradient_bytes, recipe.compute_bytes) if recipe.trains_all else recipe.gradient_bytes
    return size * each / _slices(context.layout, use)


def _slices(layout: Layout, use: WeightUse) -> FloatLike:
    """GPUs that a layer's copies of a matrix are cut and dealt out over, apart from sharding."""
    if use.matrix.part == "expert":
        return layout.expert_cut * layout.expert_parallel
    return 1.0 if use.matrix.kernel in REPLICATED else layout.tensor_parallel
