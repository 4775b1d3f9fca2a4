r"""What the tuned model costs in use: queries a second and dollars a million tokens, for break-even answers.

A roofline of prefill and decode on one group of GPUs, with requests that come and go (continuous batching). Less than
an inference planner: no scheduler, no communication between GPUs, no speculative decoding. A server reaches a part of
it: vLLM of early 2024 a sixth to a half (arXiv:2404.05567, Table 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from moecost.architecture import ModelSpec
from moecost.arrays import FloatLike, as_float
from moecost.errors import DoesNotFitError, InvalidInputError, close_matches
from moecost.experts import experts_touched
from moecost.quantities import Layers, Model
from moecost.roofline import roofline_time
from moecost.specs import GPUSpec
from moecost.storage import WEIGHT_FORMATS
from moecost.units import FLOPS_PER_MAC, GIB, HOUR, MEGA
from moecost.validity import positive

MEMORY_SHARE: Final = 0.9
"""Of a GPU's memory that weights and cache may fill: vLLM's default."""
COMPUTE_SHARE: Final = 0.80
BANDWIDTH_SHARE: Final = 0.75
"""Of the datasheet's peaks that large products and reads reach, as in `moecost.coefficients`."""


# ------------------------------------------------------------------------------------------------------- formulas
def mean_context(*, prompt_tokens: FloatLike, output_tokens: FloatLike) -> FloatLike:
    """Tokens that a request has in the cache, in the mean over its decoding: p + n / 2. [token]

    Source: Yun et al. 2024 (arXiv:2404.02852), appendix C: (2 p + n) h L elements, of 2 h L a token.

    >>> mean_context(prompt_tokens=161, output_tokens=338)
    330.0
    """
    return prompt_tokens + output_tokens / 2.0


def requests_that_fit(
    *, memory_bytes: FloatLike, weight_bytes: FloatLike, kv_bytes_per_token: FloatLike, context_tokens: FloatLike
) -> FloatLike:
    r"""Requests whose cache fits beside the weights, not rounded; 0 where not even the weights do.

    .. math:: b = \frac{G M_0 - N_m}{(2p + n)\, h L}

    Source: Yun et al. 2024 (arXiv:2404.02852), appendix C; with `mean_context` its very formula.

    >>> kv = 2 * 2 * 32 * 4096.0  # fp16 keys and values of 32 layers
    >>> b = requests_that_fit(memory_bytes=80e9, weight_bytes=14e9, kv_bytes_per_token=kv, context_tokens=330.0)
    >>> round(float(b), 1)
    381.5
    """
    free = as_float(memory_bytes) - weight_bytes
    return as_float(np.maximum(free, 0.0) / (as_float(kv_bytes_per_token) * context_tokens))


def requests_per_second(
    *, prefill_s: FloatLike, decode_s: FloatLike, batch: FloatLike, output_tokens: FloatLike
) -> FloatLike:
    r"""Requests a second where each takes its prefill alone and shares every decode step with `batch - 1` others.

    .. math:: \frac{1}{t_p + n\, t_d / b}

    Source: Yun et al. 2024 (arXiv:2404.02852), appendix C: an iteration takes L_P(b / n) + L_D(b).

    >>> requests_per_second(prefill_s=0.1, decode_s=0.05, batch=50, output_tokens=100)
    5.0
    """
    return 1.0 / (prefill_s + output_tokens * decode_s / batch)


def usd_per_million(*, seconds_per_token: FloatLike, usd_per_hour: FloatLike) -> FloatLike:
    """Dollars of a million tokens. [$]

    >>> usd_per_million(seconds_per_token=1e-3, usd_per_hour=3.6)
    1.0
    """
    return MEGA * seconds_per_token * usd_per_hour / HOUR


# ---------------------------------------------------------------------------------------------------------- a model
def kv_bytes_per_token(model: Model, *, element_bytes: FloatLike = 2.0) -> FloatLike:
    """Bytes that a token leaves in the cache, all layers: keys and values, or what latent attention keeps. [byte]

    >>> kv_bytes_per_token(ModelSpec.load("mixtral-8x7b").shape)
    131072.0
    """
    return element_bytes * float(sum(group.count * _cached(group) for group in model.layers))


def _cached(group: Layers) -> int:
    """Elements that one layer keeps of a token."""
    latent = next((m.out_features for m in group.matrices if m.kernel == "attention.kv_a"), None)
    if latent is not None:
        return latent
    core = group.attention
    return 0 if core is None else core.num_key_value_heads * (core.qk_head_dim + core.v_head_dim)


def weights_read(model: Model, *, tokens: FloatLike) -> FloatLike:
    """Weights that a pass over `tokens` tokens reads: all but the embedding, and of experts those that are reached.

    >>> mixtral = ModelSpec.load("mixtral-8x7b").shape
    >>> [round(float(weights_read(mixtral, tokens=t)) / 1e9, 1) for t in (1, 16)]
    [12.7, 46.1]
    """
    total: FloatLike = float(model.head.parameters)
    for group in model.layers:
        for m in group.matrices:
            read: FloatLike = m.copies
            if m.part == "expert" and m.copies > 1:
                read = experts_touched(tokens=tokens, num_experts=m.copies, num_experts_per_tok=m.used_copies)
            total = total + group.count * read * (m.weights + m.bias)
        total = total + group.count * group.vector_parameters
    return total


def forward_flops(model: Model, *, tokens: FloatLike, context_tokens: FloatLike) -> FloatLike:
    """FLOPs of `tokens` tokens that each see `context_tokens` others, head included. [FLOP]"""
    total: FloatLike = float(model.head.weights)
    for group in model.layers:
        total = total + float(group.count * sum(m.used_copies * m.weights for m in group.matrices))
        core = group.attention
        if core is not None:
            seen = context_tokens if core.window is None else np.minimum(context_tokens, core.window)
            total = total + group.count * seen * core.num_heads * (core.qk_head_dim + core.v_head_dim)
    return FLOPS_PER_MAC * tokens * total


@dataclass(frozen=True, slots=True)
class Serving:
    """A model in use on one group of GPUs.

    Attributes
    ----------
    model, gpu, num_gpus : what serves.
    batch : requests that are decoded together.
    experts_touched : distinct experts that a decode step reaches, of a layer with the most; 0 for a dense model.
    weight_gib, kv_bytes_per_token : what is held. [GiB], [byte]
    prefill_s : of one request's prompt. [s]
    decode_s : of one step, a token for each request of the batch. [s]
    queries_per_second, output_tokens_per_second : of the group.
    usd_per_million_input_tokens, usd_per_million_output_tokens, usd_per_query : NaN where no price was given. [$]
    """

    model: str
    gpu: str
    num_gpus: int
    batch: float
    experts_touched: float
    weight_gib: float
    kv_bytes_per_token: float
    prefill_s: float
    decode_s: float
    queries_per_second: float
    output_tokens_per_second: float
    usd_per_million_input_tokens: float
    usd_per_million_output_tokens: float
    usd_per_query: float


def serve(
    model: str | Path | dict[str, Any] | ModelSpec,
    gpu: str | Path | GPUSpec,
    *,
    prompt_tokens: float,
    output_tokens: float,
    num_gpus: int = 1,
    batch: float | None = None,
    usd_per_gpu_hour: float = float("nan"),
    weight_dtype: str = "bf16",
    compute_dtype: str = "bf16",
    kv_element_bytes: float = 2.0,
    compute_share: float = COMPUTE_SHARE,
    bandwidth_share: float = BANDWIDTH_SHARE,
) -> Serving:
    """Queries a second and dollars a million tokens of a model in use.

    Parameters
    ----------
    model, gpu : as for `estimate`.
    prompt_tokens, output_tokens : of a request; padding is none. [token]
    num_gpus : that share the weights and the work evenly; what they send each other is left out.
    batch : requests that are decoded together; None: as many as fit.
    usd_per_gpu_hour : price of one GPU. [$/h]
    weight_dtype : how all weights are held; quantized ones are taken to be expanded on the fly, at no cost.
    compute_dtype : of the products.
    kv_element_bytes : of a cached element.
    compute_share, bandwidth_share : of the datasheet's peaks that are reached; those of a server are measured.

    Raises
    ------
    DoesNotFitError : the weights, or one request beside them, do not fit.

    >>> s = serve("mistral-7b", "a100-80gb-sxm", prompt_tokens=1000, output_tokens=1000, usd_per_gpu_hour=2.0)
    >>> round(s.weight_gib, 1)
    13.5
    """
    spec, device = ModelSpec.load(model), gpu if isinstance(gpu, GPUSpec) else GPUSpec.load(gpu)
    shape = spec.shape
    positive(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_gpus=num_gpus,
        kv_element_bytes=kv_element_bytes,
        compute_share=compute_share,
        bandwidth_share=bandwidth_share,
    )
    peak = device.peak_flops_per_s(compute_dtype) * num_gpus * compute_share
    bandwidth = device.bandwidth_bytes_per_s * num_gpus * bandwidth_share
    each = _weight_bytes(weight_dtype)
    held, kv = spec.num_parameters * each, float(kv_bytes_per_token(shape, element_bytes=kv_element_bytes))
    context = float(mean_context(prompt_tokens=prompt_tokens, output_tokens=output_tokens))
    room = device.memory_usable_bytes * num_gpus * MEMORY_SHARE
    batch = _batch(batch, room, held, kv, context, spec, device)

    def seconds(tokens: float, seen: float, cached: float) -> float:
        """Of one pass, that reads `cached` tokens of the cache."""
        flops = forward_flops(shape, tokens=tokens, context_tokens=seen)
        moved = weights_read(shape, tokens=tokens) * each + cached * kv
        return float(roofline_time(flops=flops, bytes_moved=moved, peak_flops_per_s=peak, bytes_per_s=bandwidth))

    prefill_s = seconds(prompt_tokens, prompt_tokens / 2.0, prompt_tokens)
    decode_s = seconds(batch, context, batch * context)
    rate = float(requests_per_second(prefill_s=prefill_s, decode_s=decode_s, batch=batch, output_tokens=output_tokens))
    price = usd_per_gpu_hour * num_gpus
    return Serving(
        model=spec.name,
        gpu=device.name,
        num_gpus=num_gpus,
        batch=batch,
        experts_touched=_touched(spec, batch),
        weight_gib=held / GIB,
        kv_bytes_per_token=kv,
        prefill_s=prefill_s,
        decode_s=decode_s,
        queries_per_second=rate,
        output_tokens_per_second=rate * output_tokens,
        usd_per_million_input_tokens=float(
            usd_per_million(seconds_per_token=prefill_s / prompt_tokens, usd_per_hour=price)
        ),
        usd_per_million_output_tokens=float(usd_per_million(seconds_per_token=decode_s / batch, usd_per_hour=price)),
        usd_per_query=price / HOUR / rate,
    )


def _weight_bytes(weight_dtype: str) -> float:
    if weight_dtype not in WEIGHT_FORMATS:
        near = close_matches(weight_dtype, WEIGHT_FORMATS) or list(WEIGHT_FORMATS)
        raise InvalidInputError(
            f"weight_dtype={weight_dtype!r:.40} is not a weight format; did you mean {', '.join(near)}?"
        )
    return WEIGHT_FORMATS[weight_dtype].bytes


def _batch(
    asked: float | None, room: float, held: float, kv: float, context: float, spec: ModelSpec, gpu: GPUSpec
) -> float:
    """Requests decoded together: as asked, else as many as fit."""
    if kv == 0.0:
        fit = np.inf if room >= held else 0.0
    else:
        fit = float(
            requests_that_fit(memory_bytes=room, weight_bytes=held, kv_bytes_per_token=kv, context_tokens=context)
        )
    if fit < 1.0:
        raise DoesNotFitError(
            f"{spec.name} needs {(held + kv * context) / GIB:.1f} GiB for its weights and one request, {gpu.name} has "
            f"{room / GIB:.1f} to give; use num_gpus, a smaller weight_dtype or another GPU"
        )
    if asked is None:
        if np.isinf(fit):
            raise InvalidInputError(f"batch is not bounded by memory: {spec.name} caches nothing; give batch=")
        return float(np.floor(fit))
    positive(batch=asked)
    if asked > fit:
        raise DoesNotFitError(f"batch={asked:g}: {fit:.0f} requests fit beside {spec.name} on {gpu.name}; use fewer")
    return float(asked)


def _touched(spec: ModelSpec, batch: float) -> float:
    if not spec.num_experts:
        return 0.0
    shape = {"num_experts": spec.num_experts, "num_experts_per_tok": spec.num_experts_per_tok}
    return float(experts_touched(tokens=batch, **shape))
