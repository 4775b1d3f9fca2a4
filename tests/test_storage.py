"""Bits of weights and bytes of optimizer states against the formats' papers and definitions."""

from __future__ import annotations

import pytest

from moecost.storage import COMPUTE_BYTES, OPTIMIZERS, WEIGHT_FORMATS, block_bits


@pytest.mark.parametrize(
    ("name", "bits", "tolerance"),
    [
        ("fp32", 32, 0),
        ("bf16", 16, 0),
        ("fp16", 16, 0),
        ("nf4", 4.5, 0),  # QLoRA section 3: an fp32 constant a block of 64
        ("nf4-dq", 4.126953125, 0),  # the paper's "4.127": 4 + 8/64 + 32/(64 x 256)
        ("mxfp4", 4.25, 0),  # the gpt-oss model card
        ("nvfp4", 4.5, 0),
        ("fp8", 8.00195, 1e-5),  # DeepSeek-V3: an fp32 scale a 128 x 128 block
        ("int8", 8.0078, 1e-4),  # LLM.int8: an fp32 scale a row, of 4,096
        ("int4-awq", 4.15625, 0),  # 16-bit scale and 4-bit zero point a group of 128
        ("int4-gptq", 4.15625, 0),
    ],
)
def test_bits_of_a_weight(name: str, bits: float, tolerance: float) -> None:
    found = WEIGHT_FORMATS[name]
    assert abs(found.bits - bits) <= tolerance
    assert found.bytes == found.bits / 8
    assert found.quantized == (name not in ("fp32", "bf16", "fp16"))


def test_double_quantization_saves_three_gigabytes_at_65_billion() -> None:
    """QLoRA section 3: 0.373 bits a parameter, "approximately 3 GB for a 65B model"."""
    saved = WEIGHT_FORMATS["nf4"].bits - WEIGHT_FORMATS["nf4-dq"].bits
    assert saved == pytest.approx(0.373, abs=5e-4)
    assert saved / 8 * 65e9 == pytest.approx(3.03e9, rel=2e-3)


def test_constants_of_a_block() -> None:
    assert block_bits(4, 32, 64) == 4.5
    assert block_bits(4, 8, 64) + 32 / (64 * 256) == 4.126953125


@pytest.mark.parametrize(
    ("name", "weight_bytes", "state_bytes"),
    [
        ("adamw", 4, 8),  # two fp32 moments
        ("adamw", 2, 4),  # PyTorch keeps moments in the parameter's type
        ("adamw8bit", 2, 2.03125),  # bitsandbytes: 2 x (1 + 4/256)
        ("adamw8bit", 4, 2.03125),
        ("paged_adamw8bit", 2, 2.03125),
        ("lion", 4, 4),  # one momentum
        ("lion8bit", 4, 1.015625),
        ("sgd", 4, 0),
        ("sgd-momentum", 4, 4),
        ("muon", 4, 4),
    ],
)
def test_bytes_of_optimizer_state(name: str, weight_bytes: float, state_bytes: float) -> None:
    found = OPTIMIZERS[name]
    assert found.states * (weight_bytes if found.element_bytes is None else found.element_bytes) == state_bytes


def test_adafactor_keeps_next_to_nothing() -> None:
    """Row and column means of a 4096 x 14336 matrix are 0.00126 B a weight (arXiv:1804.04235); below 1 % of AdamW."""
    found = OPTIMIZERS["adafactor"]
    assert found.element_bytes is not None
    assert 0.00126 <= found.states * found.element_bytes < 0.08


def test_every_format_says_where_it_comes_from() -> None:
    assert all(f.source for f in WEIGHT_FORMATS.values())
    assert all(f.source for f in OPTIMIZERS.values())
    assert all(size in (2, 4) for size in COMPUTE_BYTES.values())
