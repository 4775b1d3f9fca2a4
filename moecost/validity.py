"""Ranges that published laws were fitted in, and the refusal of what lies outside of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moecost.arrays import FloatLike, as_float
from moecost.errors import InvalidInputError

Ranges: TypeAlias = Mapping[str, tuple[float, float]]
"""Name of an argument to the least and the largest value that a law was fitted to, both included."""

ROUNDING: Final = 1e-9
"""Share by which a computed value may miss the border of a range: its last bits."""


def positive(*, zero: bool = False, **values: FloatLike) -> None:
    """Refuse what no formula could take: numbers that are not finite, negative ones, and 0 unless `zero` allows it.

    >>> positive(tokens=1e9)
    >>> positive(tokens=-1.0)
    Traceback (most recent call last):
    moecost.errors.InvalidInputError: tokens=-1 must be a finite number above 0
    """
    for name, value in values.items():
        numbers = _numbers(name, value)
        bad = ~np.isfinite(numbers) | ((numbers < 0.0) if zero else (numbers <= 0.0))
        _refuse(name, numbers, bad, f"must be a finite number {'of at least' if zero else 'above'} 0")


def within(law: str, ranges: Ranges, *, extrapolate: bool = False, **values: FloatLike) -> None:
    """Refuse values outside of the range of a law, unless `extrapolate` asks for them all the same.

    >>> within("the law", {"tokens": (1e9, 1e12)}, tokens=2e9)
    >>> within("the law", {"tokens": (1e9, 1e12)}, tokens=2e13)
    Traceback (most recent call last):
    moecost.errors.InvalidInputError: tokens=2e+13 lies outside of the law, fitted for 1e+09 to 1e+12; stay inside, \
use another law, or give extrapolate=True
    """
    for name, value in values.items():
        low, high = ranges.get(name, (np.nextafter(0.0, 1.0), np.inf))
        positive(zero=low == 0.0, **{name: value})
        if extrapolate:
            continue
        numbers = _numbers(name, value)
        bad = (numbers < low * (1.0 - ROUNDING)) | (numbers > high * (1.0 + ROUNDING))
        advice = "stay inside, use another law, or give extrapolate=True"
        _refuse(name, numbers, bad, f"lies outside of {law}, fitted for {low:g} to {high:g}; {advice}")


def _numbers(name: str, value: object) -> NDArray[np.float64]:
    try:
        return np.atleast_1d(np.asarray(as_float(value)))
    except (TypeError, ValueError):
        raise InvalidInputError(f"{name}={value!r:.80} is not a number; give a number or an array of numbers") from None


def _refuse(name: str, numbers: NDArray[np.float64], bad: NDArray[np.bool_], why: str) -> None:
    if bad.any():
        raise InvalidInputError(f"{name}={numbers[bad][0]:.6g} {why}")
