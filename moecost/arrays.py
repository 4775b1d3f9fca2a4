"""The scalar/array promise: every formula is written once, for a float and for an array alike."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatLike: TypeAlias = float | NDArray[np.float64]
"""A number or an array of float64. Formulas use ufuncs only, so that one definition serves both."""


def as_float(value: object) -> FloatLike:
    """Number or array as float64, never integer: int64 would overflow in silence (6 x 1e12 x 1e7)."""
    return np.asarray(value, dtype=np.float64)[()]
