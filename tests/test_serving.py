"""The model in use: caches and weights by hand, and published throughput as a bound."""

from __future__ import annotations

from typing import Any

import pytest

from moecost import ModelSpec
from moecost.errors import DoesNotFitError, InvalidInputError, MoECostError
from moecost.serving import (
    forward_flops,
    kv_bytes_per_token,
    mean_context,
    requests_per_second,
    requests_that_fit,
    serve,
    usd_per_million,
    weights_read,
)

MIXTRAL = ModelSpec.load("mixtral-8x7b")
A100: dict[str, Any] = {"gpu": "a100-80gb-sxm", "prompt_tokens": 1000, "output_tokens": 1000}


def test_batch_of_yun() -> None:
    """arXiv:2404.02852, appendix C: fp16, h = 4096, 32 layers, 161 tokens in and 338 out, two GPUs of 40 GB, 14 GB."""
    found = requests_that_fit(
        memory_bytes=2 * 40e9,
        weight_bytes=14e9,
        kv_bytes_per_token=2 * 2 * 32 * 4096,
        context_tokens=mean_context(prompt_tokens=161, output_tokens=338),
    )
    assert found == pytest.approx(381.5, abs=0.05)
    assert requests_that_fit(memory_bytes=1e9, weight_bytes=2e9, kv_bytes_per_token=1.0, context_tokens=1.0) == 0


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        ("llama-2-7b", 2 * 32 * 4096),
        ("mistral-7b", 2 * 32 * 1024),  # 8 key-value heads of 128
        ("llama-3.1-70b", 2 * 80 * 1024),
        ("deepseek-v2", 60 * (512 + 64)),  # arXiv:2405.04434: latents of 512 and a rotary key of 64
    ],
)
def test_cache_of_a_token(model: str, elements: int) -> None:
    assert kv_bytes_per_token(ModelSpec.load(model).shape) == 2 * elements


def test_deepseek_v2_caches_less_than_deepseek_67b() -> None:
    """arXiv:2405.04434: 93.3 % less than DeepSeek-67B, whose 95 layers have 8 key-value heads of 128 (both in the
    number format of their service; 8-bit for the newer one, 6 bits in its paper)."""
    dense = 2 * 2 * 95 * 8 * 128
    found = kv_bytes_per_token(ModelSpec.load("deepseek-v2").shape, element_bytes=6 / 8)
    assert 1 - found / dense == pytest.approx(0.933, abs=3e-3)


def test_weights_that_a_step_reads() -> None:
    """Mixtral at batch 16: 92.5 GB of its 93.4 GB in bf16 (7.92 of 8 experts), less the embedding's 0.26."""
    embedding = 2 * 32000 * 4096
    assert 2 * weights_read(MIXTRAL.shape, tokens=16) == pytest.approx(92.5e9 - embedding, rel=1e-3)
    one = 2 * weights_read(MIXTRAL.shape, tokens=1)
    assert one == pytest.approx(2 * MIXTRAL.num_active_parameters - embedding, rel=1e-6)
    dense = ModelSpec.load("llama-2-7b")
    assert weights_read(dense.shape, tokens=1) == weights_read(dense.shape, tokens=99)


def test_flops_of_a_pass() -> None:
    """Two a weight and token; scores and values see the context: the same as half of a causal square."""
    spec = ModelSpec.load("llama-2-7b")
    whole = spec.flops(512).forward
    assert forward_flops(spec.shape, tokens=512, context_tokens=256) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "gib"), [("mistral-7b", 13.5), ("deepseek-moe-16b", 30.5), ("qwen1.5-moe-a2.7b", 26.7)]
)
def test_memory_of_served_models(model: str, gib: float) -> None:
    """arXiv:2404.05567, Table 7: as vLLM reports it."""
    assert serve(model, **A100).weight_gib == pytest.approx(gib, abs=0.06)


# arXiv:2404.05567, Table 7: vLLM, 1,000 tokens in and out, 0.9 of the memory; requests a second.
MEASURED = [
    ("mistral-7b", "a100-80gb-sxm", 1.07),
    ("mistral-7b", "h100-80gb-sxm", 1.52),
    ("deepseek-moe-16b", "a100-80gb-sxm", 1.17),
    ("deepseek-moe-16b", "h100-80gb-sxm", 1.57),
    ("qwen1.5-moe-a2.7b", "a100-80gb-sxm", 1.33),
    ("qwen1.5-moe-a2.7b", "h100-80gb-sxm", 1.81),
]


def test_measured_servers_reach_a_part_of_the_roofline() -> None:
    """A sixth to a half: never more than is possible. The two mixtures come in their order; Mistral, whose short cache
    lets it batch most, was slowest there and would be fastest here: its server was bound by what no roofline sees."""
    shares = {}
    for model, gpu, measured in MEASURED:
        shares[model, gpu] = measured / serve(model, gpu, prompt_tokens=1000, output_tokens=1000).queries_per_second
    print({f"{model} {gpu}": round(share, 2) for (model, gpu), share in shares.items()})
    assert all(1 / 6 <= share <= 1 / 2 for share in shares.values())
    for gpu in ("a100-80gb-sxm", "h100-80gb-sxm"):
        one, two = (serve(m, gpu, prompt_tokens=1000, output_tokens=1000) for m in ("qwen1.5-moe-a2.7b", "deepseek-moe-16b"))  # fmt: skip  # noqa: E501
        assert one.queries_per_second > two.queries_per_second


@pytest.mark.parametrize(
    ("hidden", "layers", "kv_heads", "measured"), [(3072, 28, 4, 40_854.5), (4096, 36, 4, 18_354.2)]
)
def test_prefill_of_measured_models(hidden: int, layers: int, kv_heads: int, measured: float) -> None:
    """arXiv:2404.05567, Table 5, Dense-3B and 6B: input tokens a second of 256 tokens at the largest batch, A100.

    Sizes there are without embeddings, and a prompt needs the head once: it is left out here.
    """
    config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 32, "vocab_size": 8,
              "num_key_value_heads": kv_heads, "intermediate_size": 4 * hidden, "gated_mlp": False}  # fmt: skip
    found = serve(config, "a100-80gb-sxm", prompt_tokens=256, output_tokens=1)
    assert 256 / found.prefill_s == pytest.approx(measured, rel=0.15)


def test_rates_and_dollars_by_hand() -> None:
    assert requests_per_second(prefill_s=0.2, decode_s=0.04, batch=100, output_tokens=500) == pytest.approx(2.5)
    assert usd_per_million(seconds_per_token=2e-3, usd_per_hour=1.8) == pytest.approx(1.0)
    s = serve("mixtral-8x7b", num_gpus=2, usd_per_gpu_hour=1.8, batch=16, **A100)
    assert s.experts_touched == pytest.approx(7.92, abs=1e-3)
    per_query = (1000 * s.usd_per_million_input_tokens + 1000 * s.usd_per_million_output_tokens) / 1e6
    assert s.usd_per_query == pytest.approx(per_query)
    assert s.usd_per_query == pytest.approx(3.6 / 3600 / s.queries_per_second)
    assert s.output_tokens_per_second == pytest.approx(1000 * s.queries_per_second)


def test_more_together_is_cheaper_and_four_bits_are_faster() -> None:
    prices = [
        serve("mixtral-8x7b", num_gpus=2, usd_per_gpu_hour=1.8, batch=b, **A100).usd_per_million_output_tokens
        for b in (1, 4, 16, 64)
    ]
    assert prices == sorted(prices, reverse=True)
    plain, small = (serve("llama-2-7b", batch=1, weight_dtype=w, **A100) for w in ("bf16", "int4-awq"))
    assert small.decode_s < 0.35 * plain.decode_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "mixtral-8x7b needs 87.2 GiB for its weights and one request"),
        ({"num_gpus": 2, "batch": 100_000}, "batch=100000: 303 requests fit"),
        ({"num_gpus": 2, "batch": 0}, "batch=0 must be"),
        ({"prompt_tokens": -1}, "prompt_tokens=-1"),
        ({"num_gpus": 2, "weight_dtype": "bf61"}, "weight_dtype='bf61' is not a weight format; did you mean bf16"),
        ({"compute_dtype": "fp8"}, "fp8"),
        ({"gpu": "a1000"}, "a100"),
    ],
)
def test_what_cannot_be_served(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MoECostError, match=message):
        serve("mixtral-8x7b", **(A100 | change))


def test_errors_are_of_their_kind() -> None:
    with pytest.raises(DoesNotFitError):
        serve("mixtral-8x7b", **A100)
    with pytest.raises(InvalidInputError):
        serve("mixtral-8x7b", **(A100 | {"output_tokens": 0}))
