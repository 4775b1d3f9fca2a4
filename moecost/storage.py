"""Bytes of a weight by storage format, and of an optimizer's state by optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from moecost.arrays import FloatLike, as_float
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


# --------------------------------------------------------------------------------------------------- pruned weights
def semi_structured_bits(payload: FloatLike, *, kept: int = 2, of: int = 4) -> FloatLike:
    """Bits of a weight, zeros included, where `kept` of each `of` stand (2:4): these, with 2 bits of place each.

    Source: NVIDIA's 2:4 format of Ampere and later.

    >>> semi_structured_bits(16), semi_structured_bits(8)
    (9.0, 5.0)
    """
    return (payload + 2.0) * kept / of


def bitmask_bits(payload: FloatLike, *, sparsity: FloatLike) -> FloatLike:
    """Bits of a weight, zeros included, where any share `sparsity` of them is zero: the others, and a bit for each.

    >>> round(bitmask_bits(16, sparsity=0.7), 6)
    5.8
    """
    return payload * (1.0 - sparsity) + 1.0


def indexed_bits(payload: FloatLike, *, sparsity: FloatLike, index_bits: FloatLike = 16) -> FloatLike:
    """Bits of a weight, zeros included, where each that is not zero has its column beside it (CSR).

    >>> round(indexed_bits(16, sparsity=0.7), 6)
    9.6
    """
    return (payload + index_bits) * (1.0 - sparsity)


# ------------------------------------------------------------------------------------------------- states of training
def model_state_bytes(
    parameters: FloatLike,
    *,
    zero_stage: FloatLike = 0,
    data_parallel: FloatLike = 1,
    weight_bytes: FloatLike = 2,
    gradient_bytes: FloatLike = 2,
    optimizer_bytes: FloatLike = 12,
) -> FloatLike:
    """Bytes of weights, gradients and optimizer states that one GPU holds when all weights are trained.

    Parameters
    ----------
    zero_stage : 1 shares out the optimizer's states over the `data_parallel` GPUs, 2 gradients too, 3 weights too.
    weight_bytes, gradient_bytes, optimizer_bytes : of a parameter. 2, 2 and 12 are mixed precision with AdamW (an fp32
        copy and two moments); Megatron's 2, 4 and 12 with an fp32 gradient; 2, 2 and 8 leave out the copy.

    Notes
    -----
    Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 3. An estimate counts the same from the job's layout
    and stack (`moecost.memory`); this is the paper's arithmetic on its own.

    >>> [round(float(model_state_bytes(7.5e9, zero_stage=z, data_parallel=64)) / 1e9, 1) for z in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    stage = np.asarray(zero_stage)
    over = [np.where(stage >= first, data_parallel, 1.0) for first in (3, 2, 1)]
    each = weight_bytes / over[0] + gradient_bytes / over[1] + optimizer_bytes / over[2]
    return as_float(parameters * each)


@dataclass(frozen=True, slots=True)
class LowRankState:
    """Elements that a low-rank optimizer keeps for one matrix."""

    projector: FloatLike
    moments: FloatLike


def galore_elements(*, rows: FloatLike, columns: FloatLike, rank: FloatLike) -> LowRankState:
    """Of GaLore with Adam: m R of the projector and 2 n R of the moments, m the shorter side.

    Source: Zhao et al. 2024 (arXiv:2403.03507).

    >>> state = galore_elements(rows=4096, columns=14336, rank=1024)
    >>> float(state.projector), float(state.moments)
    (4194304.0, 29360128.0)
    """
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    return LowRankState(as_float(short * rank), as_float(2.0 * long * rank))


def apollo_elements(*, rows: FloatLike, columns: FloatLike, rank: FloatLike) -> FloatLike:
    """Of APOLLO: 2 n R of the moments, n the longer side; the projector is drawn anew from its seed. Mini has rank 1.

    Source: Zhu et al. 2024 (arXiv:2412.05270), its code.

    >>> float(apollo_elements(rows=4096, columns=14336, rank=1))
    28672.0
    """
    return as_float(2.0 * np.maximum(rows, columns) * rank)


SELECTION_BYTES: Final = {"bf16": 4 + 3 * 2, "fp32": 4 + 3 * 4}
"""Bytes of a candidate while deltas are chosen: its index, and gradient, square and count in the gradient's type."""


def sparse_delta_bytes(
    deltas: FloatLike,
    *,
    selecting: bool = False,
    gradient_dtype: str = "bf16",
    value_bytes: FloatLike = 4,
    index_bytes: FloatLike = 4,
) -> FloatLike:
    """Bytes of the trained state of sparse fine-tuning with AdamW (SpIEL-AG): values, gradients, places, moments, age.

    Parameters
    ----------
    deltas : weights that are tuned: density times weights.
    selecting : inside of a selection window (5 of each 20 steps), with as many candidates as deltas.
    gradient_dtype : of the candidates, `bf16` or `fp32`.
    value_bytes : of a value, and of its gradient, moments and age.
    index_bytes : 4 where a matrix has less than 2^31 weights, else 8.

    Notes
    -----
    Source: Ansell et al. 2024 (arXiv:2401.16405) and its released code, which computes the dense gradient: FLOPs are
    those of full tuning. Transients (a copy of the layer's weight, its dense gradient) come on top.

    >>> sparse_delta_bytes(1e8), sparse_delta_bytes(1e8, selecting=True)
    (2400000000.0, 3400000000.0)
    """
    each = value_bytes * 5 + index_bytes
    return deltas * (each + SELECTION_BYTES[gradient_dtype] if selecting else each)


def sparse_delta_sm3_bytes(deltas: FloatLike, *, rows: FloatLike, columns: FloatLike) -> FloatLike:
    """The same of one matrix with SM3 (SpIEL-MA): value, gradient and place of each delta, a sum a row and column.

    >>> sparse_delta_sm3_bytes(1e6, rows=4096, columns=14336)
    12073728.0
    """
    return deltas * 12.0 + 4.0 * (rows + columns)


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

OPTIMIZER_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision", "adam"), "adamw"
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit", "adam8bit"), "adamw8bit"),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit", "adamw4bit"), "adamw4bit"),
    **dict.fromkeys(("paged_adamw_8bit", "pagedadamw8bit"), "paged_adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "pagedadamw", "pagedadamw32bit"), "paged_adamw"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion8bit"),
    **dict.fromkeys(("galore_adamw", "galore_adafactor"), "galore"),
}
"""Names that training tools use, in lower case, to those of `Job`; others are tried as they are."""
