"""Bytes of a weight by storage format, and of an optimizer's state by optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moecost.units import BITS_PER_BYTE


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are held: bits of a weight with its constants, and whether they are expanded before use."""

    bits: float
    quantized: bool
    source: str

    @property
    def bytes(self) -> float:
        return self.bits / BITS_PER_BYTE


def block_bits(payload: float, constant_bits: float, block: int) -> float:
    """Bits of a weight with one constant a block.

    >>> block_bits(4, 32, 64)
    4.5
    """
    return payload + constant_bits / block


_NF4_DQ = 4 + 8 / 64 + 32 / (64 * 256)

WEIGHT_FORMATS: Final[dict[str, WeightFormat]] = {
    "fp32": WeightFormat(32, False, "IEEE 754"),
    "bf16": WeightFormat(16, False, "bfloat16"),
    "fp16": WeightFormat(16, False, "IEEE 754"),
    "nf4": WeightFormat(block_bits(4, 32, 64), True, "QLoRA, arXiv:2305.14314 section 3: fp32 constant a block of 64"),
    "nf4-dq": WeightFormat(_NF4_DQ, True, "QLoRA section 3: 8-bit constants in blocks of 64, fp32 a 256 of them"),
    "int8": WeightFormat(8 + 32 / 4096, True, "LLM.int8, arXiv:2208.07339: fp32 scale a row, of 4,096 weights"),
    "fp8": WeightFormat(block_bits(8, 32, 128 * 128), True, "DeepSeek-V3, arXiv:2412.19437: blocks of 128 x 128"),
    "int4-gptq": WeightFormat(4 + 16 / 128 + 4 / 128, True, "GPTQ, groups of 128: 16-bit scale, 4-bit zero point"),
    "int4-gptq-nogroup": WeightFormat(4 + 20 / 4096, True, "GPTQ without groups: one scale and zero a column"),
    "int8-gptq": WeightFormat(8 + 16 / 128 + 8 / 128, True, "GPTQ at 8 bits, groups of 128"),
    "int4-awq": WeightFormat(4 + 16 / 128 + 4 / 128, True, "AWQ, groups of 128: 16-bit scale, 4-bit zero point"),
    "mxfp4": WeightFormat(block_bits(4, 8, 32), True, "OCP microscaling formats v1.0: 8-bit scale a block of 32"),
    "nvfp4": WeightFormat(block_bits(4, 8, 16), True, "NVFP4: 8-bit scale a block of 16, fp32 a tensor"),
}

COMPUTE_BYTES: Final[dict[str, int]] = {
    "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp8-blockwise": 2, "mxfp8": 2, "nvfp4": 2, "fp4": 2,
}  # fmt: skip
"""Bytes of an activation between products: low-precision products still write 16 bits."""


@dataclass(frozen=True, slots=True)
class OptimizerFormat:
    """State of an optimizer: elements a trained weight, and bytes of an element (None: as the trained weight)."""

    states: float
    element_bytes: float | None
    source: str


OPTIMIZERS: Final[dict[str, OptimizerFormat]] = {
    "adamw": OptimizerFormat(2, None, "two moments"),
    "adamw8bit": OptimizerFormat(2, 1 + 4 / 256, "bitsandbytes: 8-bit moments, fp32 constant a block of 256"),
    "paged_adamw8bit": OptimizerFormat(2, 1 + 4 / 256, "as adamw8bit, in memory the driver may page out"),
    "paged_adamw": OptimizerFormat(2, None, "as adamw, in memory the driver may page out"),
    "adamw4bit": OptimizerFormat(2, 0.5 + 4 / 128, "4-bit moments (arXiv:2309.01507), fp32 constant a block of 128"),
    "lion": OptimizerFormat(1, None, "one momentum"),
    "lion8bit": OptimizerFormat(1, 1 + 4 / 256, "one 8-bit momentum"),
    "sgd": OptimizerFormat(0, None, "no state"),
    "sgd-momentum": OptimizerFormat(1, None, "one momentum"),
    "adafactor": OptimizerFormat(0.002, 4, "row and column means (arXiv:1804.04235): 0.001 to 0.002 of a weight"),
    "galore": OptimizerFormat(
        0.075, 4, "GaLore at rank 128: m R + 2 n R elements of a 4096 x 11008 matrix (arXiv:2403.03507)"
    ),
    "muon": OptimizerFormat(1, None, "one momentum on matrices; embeddings and vectors, with AdamW, not apart"),
}
