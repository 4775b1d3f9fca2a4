"""Mixture or dense: models that take the same time, what a mixture adds to a step, and what a budget buys of each.

FLOPs and activated parameters flatter a mixture: they see neither its routing and exchange of tokens nor its idle
weights. So sizes are compared by the time of an estimated step on given hardware, and tokens by what a budget of hours
or dollars pays for, as arXiv:2405.15052 argues. Losses are those of published laws (`moecost.scaling_laws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from moecost import parameters
from moecost.architecture import ModelSpec
from moecost.errors import InvalidInputError, UnsupportedError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.quantities import AttentionCore, Layers
from moecost.results import Estimate
from moecost.scaling_laws import LossLaw, Sizes, law
from moecost.units import HOUR
from moecost.validity import positive

HEAD_DIM: Final = 128
"""Of the dense family; also its width for each layer: Llama-2's 7B has 32 layers of 32 heads, its 13B 40 of 40."""
WIDTH_STEP: Final = 128
"""Feed-forward widths are multiples of it, as kernels like them."""
MOST_LAYERS: Final = 512
"""Of the dense family: 90e12 parameters."""
OF_MIXTURES: Final = ("num_experts_per_tok", "moe_dispatch", "capacity_factor", "forced_balance",
                      "expert_tensor_parallel_size", "comm_overlap")  # fmt: skip
"""Fields of a job that say how a mixture runs, and have no meaning for a dense model."""


# ---------------------------------------------------------------------------------------------------------- sizes
def sizes(model: ModelSpec) -> Sizes:
    """What the scaling laws count of a model: of layers that differ, the experts of those with the most.

    >>> found = sizes(ModelSpec.load("mixtral-8x7b"))
    >>> float(found.expansion), round(found.active / 1e9, 2)
    (4.0, 12.88)
    """
    parts = model.parameters_by_part
    return Sizes(
        total=float(model.num_parameters),
        active=float(model.num_active_parameters),
        embedding=float(parts["embed"] + parts["head"]),
        router=float(parts["router"]),
        num_experts=float(model.num_experts or 1),
        num_experts_per_tok=float(model.num_experts_per_tok or 1),
    )


# ------------------------------------------------------------------------------------------------- equal step time
@dataclass(frozen=True, slots=True)
class Equivalent:
    """A model whose step takes as long as that of another, on the same hardware, at the same batch.

    Attributes
    ----------
    model : the one that was found; its config is `dict(model.config)`.
    job : that runs it.
    estimate, target : of it, and of the model it stands for.
    """

    model: ModelSpec
    job: Job
    estimate: Estimate
    target: Estimate

    @property
    def step_ratio(self) -> float:
        """Its step time over the target's: 1, or below by what one notch of width takes."""
        return self.estimate.step.seconds / self.target.step.seconds


def dense_equivalent(job: Job) -> Equivalent:
    """The dense model whose step takes as long as that of a mixture.

    It has Llama-2's shape: as many layers as heads, 128 wide each, a feed-forward 8/3 as wide as the model. The largest
    such model that is no slower, and that the layout divides, is widened in its feed-forward, in steps of 128, until it
    is as slow. Vocabulary, GPUs, layout, stack and batch stay as they are; expert-parallel GPUs become data-parallel.

    Raises
    ------
    InvalidInputError : the model has no experts, or even the smallest dense model takes longer.
    """
    target = _fixed(job)
    spec = _spec(job)
    if not spec.num_experts:
        raise InvalidInputError(f"model={spec.name!r:.80} has no experts; give a mixture, or use sparse_equivalent")
    dense = _as_dense(job, target)

    def of_size(layers: int, wider: int = 0) -> dict[str, Any]:
        hidden = HEAD_DIM * layers
        width = WIDTH_STEP * (-(-8 * hidden // (3 * WIDTH_STEP)) + wider)
        return _llama(spec, hidden, layers, heads=layers, key_value_heads=layers, head_dim=HEAD_DIM, width=width)

    stages = dense.pipeline_parallel_size * (dense.virtual_pipeline_size or 1)
    notch = math.lcm(dense.tensor_parallel_size, stages)
    layers = notch * _largest(
        lambda n: _seconds(dense, of_size(n * notch)) <= target.step.seconds, MOST_LAYERS // notch
    )
    if layers == 0:
        raise InvalidInputError(
            f"model={spec.name!r:.80}: no dense model is as fast as {target.step.seconds:.3g} s a step; give a larger "
            "mixture or batch"
        )
    wider = _largest(lambda n: _seconds(dense, of_size(layers, n)) <= target.step.seconds, 64 * layers)
    return _found(dense, of_size(layers, wider), target)


def sparse_equivalent(job: Job, *, num_experts: int, num_experts_per_tok: int) -> Equivalent:
    """The mixture whose step takes as long as that of a dense model: its attention, and experts as wide as time allows.

    Every feed-forward becomes `num_experts` experts, of which a token uses `num_experts_per_tok`, in Mixtral's form.
    Experts lie on all GPUs alike (no expert parallelism) unless `job` has `expert_parallel_size`.

    Raises
    ------
    InvalidInputError : the model is a mixture already, the numbers make no mixture, or even the narrowest experts take
        longer.
    """
    for name, value in (("num_experts", num_experts), ("num_experts_per_tok", num_experts_per_tok)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= num_experts or num_experts < 2:
            raise InvalidInputError(f"{name}={value!r:.40} must be whole: 2 or more experts, 1 to all of them a token")
    spec = _spec(job)
    if spec.num_experts:
        raise InvalidInputError(f"model={spec.name!r:.80} is a mixture; give a dense model, or use dense_equivalent")
    target = _fixed(job.model_copy(update={"expert_parallel_size": 1}))
    shape, core = _uniform(spec)
    sparse = job.model_copy(update=_batch_of(target) | {"model_overrides": None})

    def of_width(notches: int) -> dict[str, Any]:
        plain = _llama(spec, shape.hidden_size, shape.count, heads=core.num_heads,
                       key_value_heads=core.num_key_value_heads, head_dim=core.qk_head_dim,
                       width=WIDTH_STEP * notches)  # fmt: skip
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
        return plain | experts | {"model_type": "mixtral"}

    widest = 64 * shape.hidden_size // WIDTH_STEP
    notches = _largest(lambda n: _seconds(sparse, of_width(n)) <= target.step.seconds, widest)
    if notches == 0:
        raise InvalidInputError(
            f"num_experts={num_experts}: even experts {WIDTH_STEP} wide take longer than {spec.name}'s "
            f"{target.step.seconds:.3g} s a step; give fewer experts, a larger batch or another software"
        )
    return _found(sparse, of_width(notches), target)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number that fits, by bisection; 0 where 1 does not. What fits does so below as well."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _spec(job: Job) -> ModelSpec:
    spec = ModelSpec.load(job.model).with_overrides(job.model_overrides or {})
    k = job.num_experts_per_tok
    return spec if k is None or not spec.num_experts else spec.with_overrides({"num_experts_per_tok": k})


def _fixed(job: Job) -> Estimate:
    """The estimate of a job whether it fits or not: its batch is that of all models it is compared with."""
    return estimate_job(job.model_copy(update={"on_oom": "report"}))


def _batch_of(target: Estimate) -> dict[str, Any]:
    return {
        "micro_batch_size": target.micro_batch_size,
        "gradient_accumulation_steps": target.gradient_accumulation_steps,
        "global_batch_size": target.global_batch_size,
        "on_oom": "report",
    }


def _as_dense(job: Job, target: Estimate) -> Job:
    """The same run of a dense model: without what only mixtures have, adapters where the mixture has them."""
    names = {"lora_targets": _dense_targets(job)} if job.adapts else {}
    without = dict.fromkeys(OF_MIXTURES) | {"expert_parallel_size": 1, "model_overrides": None}
    return job.model_copy(update=without | _batch_of(target) | names)


def _dense_targets(job: Job) -> tuple[str, ...]:
    """Llama's names of the modules that the mixture adapts: a feed-forward's for its experts, none for its router."""
    if set(job.lora_targets) & {"all-linear"}:
        return job.lora_targets
    matched = parameters.match_targets(_spec(job).shape, job.lora_targets, experts_as_modules=True)
    kernels = {m.kernel if m.part == "attn" else m.kernel.split(".")[-1] for _, m, _ in matched.matrices}
    names = tuple(name for kernel, name in LLAMA_MODULES.items() if kernel in kernels)
    return names or ("all-linear",)


LLAMA_MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {f"attention.{x}": f"{x}_proj" for x in "qkvo"} | {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
)


def _llama(
    spec: ModelSpec, hidden: int, layers: int, *, heads: int, key_value_heads: int, head_dim: int, width: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def _with_model(job: Job, config: Mapping[str, Any]) -> Job:
    return job.model_copy(update={"model": ModelSpec.from_hf(config, name=_name(config))})


def _name(config: Mapping[str, Any]) -> str:
    """Of a model that has none: layers, width, and its feed-forward."""
    experts = config.get("num_local_experts")
    ffn = f"{config['intermediate_size']}" if experts is None else f"{experts}x{config['intermediate_size']}"
    return f"{config['model_type']}-{config['num_hidden_layers']}x{config['hidden_size']}-{ffn}"


def _seconds(job: Job, config: Mapping[str, Any]) -> float:
    return estimate_job(_with_model(job, config)).step.seconds


def _found(job: Job, config: Mapping[str, Any], target: Estimate) -> Equivalent:
    final = _with_model(job, config)
    return Equivalent(_spec(final), final, estimate_job(final), target)


# ---------------------------------------------------------------------------------------------- what a mixture adds
@dataclass(frozen=True, slots=True)
class StepIncrease:
    """Seconds that a mixture's step takes beyond that of its dense backbone, by cause; each part may be negative.

    Attributes
    ----------
    experts : products and activations of the experts beyond those of the dense feed-forward. [s]
    router : router and top-k. [s]
    dispatch : bringing tokens to the experts and back within a GPU. [s]
    exchange : tokens on their way between GPUs, and waiting for the GPU whose experts got the most. [s]
    communication : what more weights add to gathers and reductions; like `exchange`, of what nothing hides. [s]
    host : waiting for the host's launches. [s]
    optimizer : the optimizer's step, of all experts. [s]
    rest : all other kernels. [s]
    padding : of experts that are filled up to the job's `capacity_factor`, or saved by those that drop tokens. [s]
    sparse, dense : the two estimates.
    """

    experts: float
    router: float
    dispatch: float
    exchange: float
    communication: float
    host: float
    optimizer: float
    rest: float
    padding: float
    sparse: Estimate
    dense: Estimate

    @property
    def seconds(self) -> float:
        """All of it. [s]"""
        return self.sparse.step.seconds - self.dense.step.seconds

    @property
    def share(self) -> float:
        """Over the dense step."""
        return self.seconds / self.dense.step.seconds


def dense_backbone(model: ModelSpec, *, width: str = "active") -> dict[str, Any]:
    """Config of the dense model with a mixture's attention and a plain feed-forward in place of its experts.

    Parameters
    ----------
    model : all layers alike, with experts and plain attention.
    width : of the feed-forward: `active`, as wide as all the experts of a token together (the same FLOPs), or `expert`,
        as wide as one of them.

    >>> dense_backbone(ModelSpec.load("mixtral-8x7b"))["intermediate_size"]
    28672
    """
    if width not in ("active", "expert"):
        raise InvalidInputError(f"width={width!r:.40} must be 'active' or 'expert'")
    layers, core = _uniform(model)
    if layers.experts is None:
        raise InvalidInputError(f"model={model.name!r:.80} has no experts; give a mixture")
    shared = sum(f.intermediate_size for f in layers.feed_forward)
    used = layers.experts.num_experts_per_tok if width == "active" else 1
    return _llama(model, layers.hidden_size, layers.count, heads=core.num_heads,
                  key_value_heads=core.num_key_value_heads, head_dim=core.qk_head_dim,
                  width=used * layers.experts.intermediate_size + shared)  # fmt: skip


def _uniform(model: ModelSpec) -> tuple[Layers, AttentionCore]:
    """The one kind of layers of a model, and its attention."""
    core = model.layers[0].attention
    if len(model.layers) != 1 or core is None or core.qk_head_dim != core.v_head_dim or model.layers[0].scan:
        raise UnsupportedError(
            f"model={model.name!r:.80}: its layers differ, or have no plain attention; use a model with equal layers, "
            "or compare two jobs with at_budget"
        )
    return model.layers[0], core


def step_increase(job: Job, *, width: str = "active") -> StepIncrease:
    """What a mixture adds to the step of its dense backbone, by cause, at the same batch on the same hardware.

    Source of the question: arXiv:2405.15052. `width` as for `dense_backbone`. The parts sum to `seconds`: kernels
    are GPU time, waiting for host and wire stand apart.
    """
    sparse = _fixed(job)
    dropless = sparse if job.capacity_factor is None else _fixed(job.model_copy(update={"capacity_factor": None}))
    backbone = dense_backbone(_spec(job), width=width)
    dense = estimate_job(_with_model(_as_dense(job, sparse), backbone))
    one, two = _by_cause(dropless), _by_cause(dense)
    parts = {name: one[name] - two[name] for name in one}
    padding = sparse.step.seconds - dropless.step.seconds
    return StepIncrease(**parts, padding=padding, sparse=sparse, dense=dense)


def _by_cause(e: Estimate) -> dict[str, float]:
    seconds = {name: kernel.seconds for name, kernel in e.step.by_kernel.items()}

    def of(*families: str) -> float:
        return sum(s for name, s in seconds.items() if name.split(".")[0] in families)

    router, dispatch = of("router", "topk"), seconds.get("expert.dispatch", 0.0)
    experts = of("expert", "shared", "mlp") - dispatch
    between = ("experts.alltoall", "experts.wait")
    exchange = sum(kernel.communication for name, kernel in e.step.by_kernel.items() if name in between)
    return {
        "experts": experts,
        "router": router,
        "dispatch": dispatch,
        "exchange": exchange,
        "communication": e.step.communication - exchange,
        "host": e.step.host,
        "optimizer": e.step.optimizer + e.step.other,
        "rest": sum(seconds.values()) - experts - router - dispatch,
    }


# ------------------------------------------------------------------------------------------------------ equal budget
@dataclass(frozen=True, slots=True)
class Purchase:
    """What a budget buys of one model.

    Attributes
    ----------
    model : its name.
    estimate : of its step.
    tokens : of data, seen once or more often. [token]
    hours, usd : that they take; NaN dollars where no price is known. [h], [$]
    loss : by the law; NaN without one. [nat/token]
    """

    model: str
    estimate: Estimate
    tokens: float
    hours: float
    usd: float
    loss: float


def tokens_in(e: Estimate, *, hours: float | None = None, usd: float | None = None) -> float:
    """Tokens of data that a run goes through in so many hours, or for so many dollars; start-up is left out. [token]"""
    if (hours is None) == (usd is None):
        raise InvalidInputError("give hours or usd, one of the two")
    if usd is not None:
        positive(usd=usd)
        if not e.usd_per_gpu_hour > 0.0:
            raise InvalidInputError(f"usd={usd:g}: the job of {e.model} has no price; give price= in $/GPU-hour")
        hours = usd / (e.usd_per_gpu_hour * e.num_gpus)
    assert hours is not None
    positive(hours=hours)
    return e.tokens_per_second * hours * HOUR


def at_budget(
    jobs: Iterable[Job],
    *,
    hours: float | None = None,
    usd: float | None = None,
    tokens_per_parameter: float | None = None,
    scaling_law: str | LossLaw | None = None,
    extrapolate: bool = False,
) -> tuple[Purchase, ...]:
    """What the same budget buys of several models: tokens, and the loss after them.

    Parameters
    ----------
    jobs : one for each model; each with its own hardware, layout and price. One that does not fit is reckoned as if
        it did: `estimate.fits` tells.
    hours, usd : the budget: time on each job's GPUs, or dollars.
    tokens_per_parameter : instead: the hours in which the *first* job sees so many tokens for each parameter that a
        token uses (20: Chinchilla's rule), for all.
    scaling_law : of the loss: a name (`moecost.scaling_laws.LAWS`), a law, or None.
    extrapolate : use the law outside of the range it was fitted in; most of today's models lie there.

    Raises
    ------
    InvalidInputError : not one budget is given, or the law does not reach so far.
    """
    if sum(x is not None for x in (hours, usd, tokens_per_parameter)) != 1:
        raise InvalidInputError("give one budget: hours, usd or tokens_per_parameter")
    rule = None if scaling_law is None else law(scaling_law)
    runs = [(_spec(job), _fixed(job)) for job in jobs]
    if not runs:
        raise InvalidInputError("jobs is empty; give one job a model")
    if tokens_per_parameter is not None:
        positive(tokens_per_parameter=tokens_per_parameter)
        model, e = runs[0]
        hours = tokens_per_parameter * model.num_active_parameters / e.tokens_per_second / HOUR
    return tuple(_purchase(model, e, tokens_in(e, hours=hours, usd=usd), rule, extrapolate) for model, e in runs)


def _purchase(model: ModelSpec, e: Estimate, tokens: float, rule: LossLaw | None, extrapolate: bool) -> Purchase:
    hours = tokens / e.tokens_per_second / HOUR
    loss = float("nan") if rule is None else rule.loss_of(sizes(model), tokens=tokens, extrapolate=extrapolate)
    return Purchase(model.name, e, tokens, hours, hours * e.num_gpus * e.usd_per_gpu_hour, float(loss))
