"""Length distributions against hand-worked numbers, the published data sets, and properties that must hold."""

from __future__ import annotations

import itertools
import timeit
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError
from moecost.lengths import (
    MAX_POINTS,
    LengthDistribution,
    expected_padded_length,
    mean_cut_length,
    packed_squared_length,
    padded_batch,
    queries_per_packed_row,
    worst_padded_length,
)

CS = DatasetSpec.load("commonsense-15k").lengths()
MATH = DatasetSpec.load("math-14k").lengths()
A40 = {"sequence_length": 1024, "padding": "longest", "multiple": 8}


@pytest.mark.parametrize(
    ("lengths", "queries", "mean", "median", "longest"),
    [(CS, 15119, 99.8876, 79, 512), (MATH, 13921, 187.2622, 174, 1470)],
)
def test_data_sets_have_the_published_statistics(
    lengths: LengthDistribution, queries: int, mean: float, median: float, longest: int
) -> None:
    assert lengths.num_queries == queries
    assert lengths.mean == pytest.approx(mean, abs=5e-5)
    assert lengths.median == median
    assert lengths.longest == longest


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (CS, {1: 103.46, 2: 132.15, 4: 169.78, 8: 216.85, 20: 279.57}),
        (MATH, {1: 190.73, 2: 226.13, 4: 263.57, 8: 303.15, 10: 316.48}),
    ],
)
def test_expected_padded_length_of_simulated_epochs(lengths: LengthDistribution, expected: dict[int, float]) -> None:
    """Against shuffled epochs, drawn without replacement as a data loader draws them."""
    rng = np.random.default_rng(0)
    queries = np.repeat(lengths.lengths, lengths.counts.astype(int))
    for rows, value in expected.items():
        law = expected_padded_length(lengths, micro_batch_size=rows, **A40)
        assert law == pytest.approx(value, abs=0.005)
        batches = [rng.permutation(queries)[: queries.size // rows * rows].reshape(-1, rows) for _ in range(20)]
        longest = np.minimum(np.concatenate(batches).max(axis=1), 1024)
        assert law == pytest.approx((-(-longest // 8) * 8).mean(), rel=0.005)


def test_two_lengths_by_hand() -> None:
    pair = LengthDistribution.from_histogram([10, 20], [3, 1])
    batch = padded_batch(pair, micro_batch_size=2, sequence_length=18, multiple=4)
    assert batch.padded_length.tolist() == [12, 18]  # 20 is cut to 18, which rounding must not exceed
    assert batch.probability == pytest.approx([9 / 16, 7 / 16])
    assert batch.mean == pytest.approx(12 * 9 / 16 + 18 * 7 / 16)
    assert worst_padded_length(pair, sequence_length=18, multiple=4) == 18
    assert worst_padded_length(pair, sequence_length=64, multiple=8) == 24


def test_fixed_and_packed_and_max_length() -> None:
    fixed = LengthDistribution.fixed(128, 1000)
    assert (fixed.mean, fixed.median, fixed.longest, fixed.num_queries) == (128, 128, 128, 1000)
    for padding, per_row in (("max_length", 1), ("packed", 8)):
        batch = padded_batch(fixed, micro_batch_size=4, sequence_length=1024, padding=padding, multiple=8)
        assert batch.padded_length.tolist() == [1024]
        assert batch.probability.tolist() == [1]
        assert batch.queries_per_row == per_row
        assert worst_padded_length(fixed, sequence_length=1024, padding=padding) == 1024
        assert expected_padded_length(fixed, micro_batch_size=4, sequence_length=1024, padding=padding) == 1024
    assert packed_squared_length(fixed, 1024) == 8 * 128**2
    assert packed_squared_length(fixed, 64) == 64**2  # every document fills its row
    assert queries_per_packed_row(CS, 1024) == pytest.approx(1024 / 99.8876, rel=1e-6)
    assert mean_cut_length(MATH, 64) < 64


def test_median_and_merging() -> None:
    assert LengthDistribution.from_lengths([1, 2, 3, 10]).median == 2.5
    assert LengthDistribution.from_lengths([1, 2, 10]).median == 2
    merged = LengthDistribution.from_histogram([7, 5, 7, 9], [1, 2, 3, 0])
    assert merged.lengths.tolist() == [5, 7]
    assert merged.counts.tolist() == [2, 4]
    with pytest.raises(ValueError, match="read-only"):
        merged.lengths[0] = 1


distributions = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 50)), min_size=1, max_size=30).map(
    lambda pairs: LengthDistribution.from_histogram(*map(list, zip(*pairs, strict=True)))
)
multiples = st.sampled_from([1, 8, 64])


@given(distributions, st.integers(1, 4096), multiples)
def test_padding_properties(lengths: LengthDistribution, sequence_length: int, multiple: int) -> None:
    rows = np.array([1.0, 2, 3, 8, 100])
    how: dict[str, Any] = {"sequence_length": sequence_length, "multiple": multiple}
    expected = np.asarray(expected_padded_length(lengths, micro_batch_size=rows, **how))
    batch = padded_batch(lengths, micro_batch_size=rows, **how)
    worst = worst_padded_length(lengths, **how)
    assert (np.diff(expected) >= -1e-9 * sequence_length).all()  # never falls with the batch
    assert (expected >= mean_cut_length(lengths, sequence_length) * (1 - 1e-12)).all()
    assert (expected <= worst * (1 + 1e-12)).all()
    assert worst <= sequence_length
    assert batch.probability.sum(axis=-1) == pytest.approx(np.ones(rows.size), rel=1e-12)
    assert (batch.probability >= 0).all()
    assert (np.diff(batch.padded_length) > 0).all()
    assert batch.mean == pytest.approx(expected, rel=1e-6)


@given(distributions, st.integers(1, 4096), multiples)
def test_scalar_is_row_of_array(lengths: LengthDistribution, sequence_length: int, multiple: int) -> None:
    how: dict[str, Any] = {"sequence_length": sequence_length, "multiple": multiple}
    rows = np.array([[1.0, 7.0], [7.0, 30.0]])
    together = np.asarray(expected_padded_length(lengths, micro_batch_size=rows, **how))
    many = padded_batch(lengths, micro_batch_size=rows, **how)
    assert many.probability.shape == (2, 2, many.padded_length.size)
    for i, j in itertools.product(range(2), range(2)):
        alone = expected_padded_length(lengths, micro_batch_size=float(rows[i, j]), **how)
        assert isinstance(alone, float)
        assert alone == pytest.approx(together[i, j], rel=1e-12)
        assert alone == pytest.approx(many.probability[i, j] @ many.padded_length, rel=1e-6)


def test_an_infeasible_row_is_nan_and_leaves_the_others_alone() -> None:
    rows = np.array([0.0, 4.0, np.nan])
    for padding in ("longest", "max_length", "packed"):
        how: dict[str, Any] = {**A40, "padding": padding}
        expected = np.asarray(expected_padded_length(MATH, micro_batch_size=rows, **how))
        probability = padded_batch(MATH, micro_batch_size=rows, **how).probability
        assert np.isnan(expected).tolist() == [True, False, True]
        assert np.isnan(probability).any(axis=-1).tolist() == [True, False, True]
        assert expected[1] == expected_padded_length(MATH, micro_batch_size=4, **how)


def test_long_contexts_are_grouped_without_moving_the_mean() -> None:
    lengths = LengthDistribution.from_lengths(np.random.default_rng(1).integers(1, 131072, 20_000))
    batch = padded_batch(lengths, micro_batch_size=1, sequence_length=131072, multiple=1)
    assert batch.padded_length.size <= MAX_POINTS
    assert batch.mean == pytest.approx(lengths.mean, rel=1e-12)
    longest_of_four = np.sum(np.diff(np.r_[0, np.cumsum(lengths.counts) / lengths.num_queries] ** 4) * lengths.lengths)
    grouped = expected_padded_length(lengths, micro_batch_size=4, sequence_length=131072, multiple=1)
    assert grouped == pytest.approx(longest_of_four, rel=1 / MAX_POINTS)


def test_a_batch_costs_microseconds() -> None:
    """An estimate asks for several batches and must answer in two milliseconds (0.01 ms a call when written)."""
    best = min(timeit.repeat(lambda: padded_batch(MATH, micro_batch_size=4, **A40), number=100, repeat=5)) / 100
    assert best < 100e-6


@pytest.mark.parametrize(
    ("lengths", "counts", "message"),
    [
        ([], [], "non-empty"),
        ([0], [1], "lengths holds 0"),
        ([-3], [1], "lengths holds -3"),
        ([2.5], [1], "lengths holds 2.5"),
        ([10**9], [1], "100,000,000"),
        ([np.nan], [1], "lengths holds nan"),
        (["a"], [1], "list of numbers"),
        ([True], [1], "list of numbers"),
        ([[1, 2]], [1], "list of numbers"),
        ([1, 2], [1], "one count for each"),
        ([1], [-1], "counts holds -1"),
        ([1], [np.inf], "counts holds inf"),
        ([1], [0], "at least one query"),
        ([1], [0.5], "at least one query"),
    ],
)
def test_bad_histograms(lengths: list[Any], counts: list[Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LengthDistribution.from_histogram(lengths, counts)


@pytest.mark.parametrize(
    ("field", "value"), [("sequence_length", 0), ("sequence_length", 10.5), ("multiple", 0), ("padding", "short")]
)
def test_bad_padding(field: str, value: object) -> None:
    how: dict[str, Any] = {**A40, field: value}
    for call in (padded_batch, expected_padded_length):
        with pytest.raises(InvalidInputError, match=field):
            call(CS, micro_batch_size=1, **how)
    with pytest.raises(InvalidInputError, match=field):
        worst_padded_length(CS, **how)
    with pytest.raises(InvalidInputError, match="sequence_length"):
        mean_cut_length(CS, 0)
