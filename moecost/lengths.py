"""Query lengths of a data set, and what a batch of them pads to. Lengths in tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moecost.arrays import FloatLike, as_float
from moecost.errors import InvalidInputError

Padding: TypeAlias = Literal["longest", "max_length", "packed"]
"""How a batch is filled: to its longest member, to `sequence_length`, or with documents end to end."""

MAX_LENGTH: Final = 100_000_000
"""Longest query accepted: ten times any context window there is, so a longer one is a mistake. [token]"""
NEGLIGIBLE: Final = 1e-9
"""Batches rarer than this are left out of a distribution: no epoch is long enough to meet them."""
MAX_POINTS: Final = 256
"""A finer grid of lengths is grouped into this many cells, each at its mean length, so that long contexts stay fast."""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """How many queries of a data set have which length.

    Attributes
    ----------
    lengths : lengths that occur; kept ascending, each once. [token]
    counts : queries of that length, weights allowed; kept positive. [query]

    >>> LengthDistribution([30, 10, 10], [1, 2, 1]).mean
    15.0
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.float64]
    _cache: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        lengths, counts = _whole_lengths(self.lengths), _counts(self.counts)
        if lengths.shape != counts.shape:
            raise InvalidInputError(
                f"lengths has {lengths.size} values and counts has {counts.size}; give one count for each length."
            )
        unique, where = np.unique(lengths[counts > 0], return_inverse=True)
        merged = np.bincount(where, weights=counts[counts > 0]).astype(np.float64)
        if merged.sum() < 1:
            raise InvalidInputError(f"the counts sum to {merged.sum():g}; a data set needs at least one query.")
        unique.flags.writeable = merged.flags.writeable = False
        object.__setattr__(self, "lengths", unique)
        object.__setattr__(self, "counts", merged)

    @classmethod
    def fixed(cls, length: int, num_queries: float = 1) -> LengthDistribution:
        """All queries of one length."""
        return cls.from_histogram([length], [num_queries])

    @classmethod
    def from_histogram(cls, lengths: ArrayLike, counts: ArrayLike) -> LengthDistribution:
        """From lengths in any order and a count for each; equal lengths are added up, zero counts dropped."""
        return cls(np.asarray(lengths), np.asarray(counts))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | NDArray[np.int64]) -> LengthDistribution:
        """From one length a query.

        >>> LengthDistribution.from_lengths([5, 7, 5]).counts.tolist()
        [2.0, 1.0]
        """
        values = _whole_lengths(lengths)
        return cls(values, np.ones(values.shape))

    @cached_property
    def num_queries(self) -> float:
        """Sum of the counts. [query]"""
        return float(self.counts.sum())

    @cached_property
    def mean(self) -> float:
        """Mean length. [token]"""
        return float(self.lengths @ self.counts / self.num_queries)

    @cached_property
    def median(self) -> float:
        """Median length; between the two middle ones where the count is even. [token]"""
        total, half = np.cumsum(self.counts), self.num_queries / 2
        lower, upper = np.searchsorted(total, half, side="left"), np.searchsorted(total, half, side="right")
        return float(self.lengths[lower] + self.lengths[upper]) / 2

    @property
    def longest(self) -> int:
        """Longest length. [token]"""
        return int(self.lengths[-1])

    def _cached(self, key: object, make: Callable[[], _T]) -> _T:
        if key not in self._cache:
            self._cache[key] = make()
        found: _T = self._cache[key]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class BatchLengths:
    """Distribution of the length that the rows of a batch are padded to.

    Attributes
    ----------
    padded_length : lengths that occur, ascending; shape (points,). [token]
    probability : of each; shape (..., points), where ... is the shape of `micro_batch_size`. Sums to 1; NaN where
        `micro_batch_size` is below 1.
    queries_per_row : data set queries a row holds: 1 unless packed.
    """

    padded_length: NDArray[np.float64]
    probability: NDArray[np.float64]
    queries_per_row: float = 1.0

    @property
    def mean(self) -> FloatLike:
        """Expected padded length. [token]"""
        return as_float(self.probability @ self.padded_length)


def padded_batch(
    distribution: LengthDistribution,
    *,
    micro_batch_size: FloatLike,
    sequence_length: int,
    padding: Padding = "longest",
    multiple: int = 1,
) -> BatchLengths:
    r"""What the rows of a batch are padded to.

    .. math:: P(\max \le x) = F(x)^b

    with F the distribution of one query's length, cut and rounded up.

    Parameters
    ----------
    distribution : lengths of the data set.
    micro_batch_size : rows of a batch, b. [query]
    sequence_length : queries are cut here; the length itself with `max_length` and `packed`. [token]
    padding : `longest`, `max_length` or `packed`.
    multiple : padded lengths are rounded up to a multiple of it, but never above `sequence_length`. [token]

    Returns
    -------
    The distribution of the padded length; a single point unless padding is `longest`.

    Notes
    -----
    Order statistics of b independent draws; a shuffled epoch draws without replacement, which differs by order
    b / num_queries. Points rarer than 1e-9 (in all rows of an array) are left out. Grids of more than 256 points
    are grouped into cells at their mean length: the mean at b = 1 stays exact, no length moves by more than 1/256
    of the range.

    >>> pair = LengthDistribution.from_lengths([10, 20])
    >>> padded_batch(pair, micro_batch_size=2, sequence_length=64).probability.tolist()
    [0.25, 0.75]
    """
    _check(sequence_length, padding, multiple)
    rows = np.asarray(micro_batch_size, dtype=np.float64)
    if padding != "longest":
        points = np.array([float(sequence_length)])
        probability = np.where(rows[..., None] >= 1, 1.0, np.nan)
        per_row = queries_per_packed_row(distribution, sequence_length) if padding == "packed" else 1.0
        return BatchLengths(points, probability, per_row)
    points, cdf = _padded_grid(distribution, sequence_length, multiple)
    below = cdf ** rows[..., None]
    probability = below.copy()
    probability[..., 1:] -= below[..., :-1]
    keep = (probability >= NEGLIGIBLE).reshape(-1, points.size).any(axis=0)
    points, probability = points[keep], probability[..., keep]
    probability /= probability.sum(axis=-1, keepdims=True)
    if not (rows >= 1).all():
        probability = np.where(rows[..., None] >= 1, probability, np.nan)
    return BatchLengths(points, probability)


def expected_padded_length(
    distribution: LengthDistribution,
    *,
    micro_batch_size: FloatLike,
    sequence_length: int,
    padding: Padding = "longest",
    multiple: int = 1,
) -> FloatLike:
    r"""Mean length that the rows of a batch are padded to.

    .. math:: E = x_n - \sum_{i<n} (x_{i+1} - x_i)\, F(x_i)^b

    Parameters
    ----------
    distribution, micro_batch_size, sequence_length, padding, multiple : as for `padded_batch`.

    Returns
    -------
    Shape as `micro_batch_size`; NaN where it is below 1. [token]

    Notes
    -----
    The mean of `padded_batch`, in one sum. It rises with the batch: the longer of two batches pads both.

    >>> pair = LengthDistribution.from_lengths([10, 20])
    >>> float(expected_padded_length(pair, micro_batch_size=2, sequence_length=64))
    17.5
    """
    _check(sequence_length, padding, multiple)
    rows = np.asarray(micro_batch_size, dtype=np.float64)
    if padding != "longest":
        return as_float(np.where(rows >= 1, float(sequence_length), np.nan))
    points, cdf = _padded_grid(distribution, sequence_length, multiple)
    sizes, where = np.unique(rows.ravel(), return_inverse=True)  # a sweep has many rows, but few batch sizes
    expected = points[-1] - cdf[:-1] ** sizes[:, None] @ np.diff(points)
    return as_float(np.where(sizes >= 1, expected, np.nan)[where].reshape(rows.shape))


def worst_padded_length(
    distribution: LengthDistribution, *, sequence_length: int, padding: Padding = "longest", multiple: int = 1
) -> int:
    """Longest that a batch of an epoch can pad to: the data set's longest query, cut and rounded up. [token]

    >>> worst_padded_length(LengthDistribution.from_lengths([10, 20]), sequence_length=64, multiple=8)
    24
    """
    _check(sequence_length, padding, multiple)
    if padding != "longest":
        return sequence_length
    return min(-(-min(distribution.longest, sequence_length) // multiple) * multiple, sequence_length)


def mean_cut_length(distribution: LengthDistribution, sequence_length: int) -> float:
    """Mean tokens of a query after cutting at `sequence_length`, without padding. [token]

    >>> mean_cut_length(LengthDistribution.from_lengths([10, 20]), 16)
    13.0
    """
    return _cut_moments(distribution, sequence_length)[0]


def queries_per_packed_row(distribution: LengthDistribution, sequence_length: int) -> float:
    r"""Queries that a packed row holds on average, rows being full.

    .. math:: n = S / E[\min(x, S)]

    >>> queries_per_packed_row(LengthDistribution.from_lengths([10, 30]), 60)
    3.0
    """
    return sequence_length / mean_cut_length(distribution, sequence_length)


def packed_squared_length(distribution: LengthDistribution, sequence_length: int) -> float:
    r"""Mean over packed rows of the sum of squared document lengths. [token^2]

    .. math:: Q = S\, E[\min(x, S)^2] / E[\min(x, S)]

    Notes
    -----
    Stands where S^2 stands in the cost of attention when documents are masked from each other. Between S (documents
    of one token) and S^2 (documents that fill a row).

    >>> packed_squared_length(LengthDistribution.fixed(10), 60)  # six documents of 10 x 10
    600.0
    """
    mean, mean_square = _cut_moments(distribution, sequence_length)
    return sequence_length * mean_square / mean


def _cut_moments(distribution: LengthDistribution, sequence_length: int) -> tuple[float, float]:
    def make() -> tuple[float, float]:
        _check(sequence_length, "longest", 1)
        cut = np.minimum(distribution.lengths, sequence_length).astype(np.float64)
        weight = distribution.counts / distribution.num_queries
        return float(cut @ weight), float(cut**2 @ weight)

    return distribution._cached(("cut", sequence_length), make)


def _padded_grid(
    distribution: LengthDistribution, sequence_length: int, multiple: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Padded lengths of single queries, ascending, and their cumulative distribution (the last is exactly 1)."""

    def make() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        cut = np.minimum(distribution.lengths, sequence_length)
        padded = np.minimum(-(-cut // multiple) * multiple, sequence_length).astype(np.float64)
        points, where = np.unique(padded, return_inverse=True)
        if points.size > MAX_POINTS:
            cell = (points - points[0]) / (points[-1] - points[0]) * MAX_POINTS
            where = np.minimum(cell.astype(np.int64), MAX_POINTS - 1)[where]
            where = np.unique(where, return_inverse=True)[1]
        counts = np.bincount(where, weights=distribution.counts)
        points = np.bincount(where, weights=distribution.counts * padded) / counts
        cdf = np.cumsum(counts) / distribution.num_queries
        cdf[-1] = 1.0
        points.flags.writeable = cdf.flags.writeable = False
        return points, cdf

    return distribution._cached(("grid", sequence_length, multiple), make)


def _check(sequence_length: int, padding: str, multiple: int) -> None:
    for name, value in (("sequence_length", sequence_length), ("multiple", multiple)):
        try:
            whole = operator.index(value)
        except TypeError:
            raise InvalidInputError(f"{name} is {value!r}; give a whole number of tokens, 1 or more.") from None
        if whole < 1:
            raise InvalidInputError(f"{name} is {value!r}; give a whole number of tokens, 1 or more.")
    if padding not in ("longest", "max_length", "packed"):
        raise InvalidInputError(f"padding is {padding!r}; use 'longest', 'max_length' or 'packed'.")


def _numbers(name: str, values: object) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
        raise InvalidInputError(f"{name} must be a non-empty list of numbers, not {values!r:.80}.")
    if not np.isfinite(array).all():
        raise InvalidInputError(f"{name} holds {array[~np.isfinite(array)][0]}; give finite numbers.")
    return array


def _whole_lengths(values: object) -> NDArray[np.int64]:
    array = _numbers("lengths", values)
    bad = (array < 1) | (array > MAX_LENGTH) | (array != np.floor(array))
    if bad.any():
        raise InvalidInputError(
            f"lengths holds {array[bad][0]}; a length is a whole number of tokens from 1 to {MAX_LENGTH:,}."
        )
    return array.astype(np.int64)


def _counts(values: object) -> NDArray[np.float64]:
    array = _numbers("counts", values).astype(np.float64)
    if (array < 0).any():
        raise InvalidInputError(f"counts holds {array[array < 0][0]:g}; a count is a number of queries, 0 or more.")
    return array
