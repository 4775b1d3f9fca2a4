"""The laws of arXiv:2408.04693 (Xia et al., IISWC 2024), with its coefficients, as published.

Text and artifact (github.com/stsxxx/finetune, commit 728a01b) disagree; what is implemented here, and why:

* Eq. 2 (throughput). Printed: `T = C2 ln(b / (s C3)) + C4`. The artifact fits `T = C4 + C2 / (s C3) ln(b)`, which
  follows its data 1.2 to 5.4 times closer and alone agrees with the text's remark that C4 is the throughput at batch
  1: the default. The curves *drawn* in Figs 14 and 15 leave C3 out for dense points. All three are `form`s here.
* C3 is said to be fitted; the artifact hard-codes it (1.8 Mixtral, 2.5 BlackMamba), and no data of this kind could
  determine it.
* Eq. 1 (largest batch). For Mixtral the text has C0 = 82, C1 = 0.95, the artifact 62 and 0.89. Only the artifact's
  pair gives the text's own projections (28 at 100 GB, 35 at 120 GB): the default.
* `sparsity` in the paper is the active fraction of experts, 1 meaning dense: `active_expert_fraction` here.

The laws are one GPU's, fitted in sample; `moecost.estimate` does not use them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moecost.arrays import FloatLike, as_float
from moecost.errors import FitError, InvalidInputError, UnknownNameError
from moecost.units import HOUR

Form: TypeAlias = Literal["artifact", "printed", "drawn"]
"""Of Eq. 2: as the artifact fits it, as the paper prints it, as the artifact draws it."""
Floats: TypeAlias = NDArray[np.float64]

_FORMS: Final = ("artifact", "printed", "drawn")
_DATA: Final = Path(__file__).parent / "data" / "published"
_EXACT_FIT: Final = 1e-9
"""Added before flooring: an exact fit must not lose a sequence to the last bit of a division."""
_Row = TypeVar("_Row", "CapacityCoefficients", "ThroughputCoefficients", "CostRow")


# --- Eq. 1: largest batch


def batch_size_bound(
    *,
    gpu_memory_gb: FloatLike,
    model_memory_gb: FloatLike,
    sequence_length: FloatLike,
    active_expert_fraction: FloatLike,
    c0: FloatLike,
    c1: FloatLike,
) -> FloatLike:
    r"""Eq. 1 before it is floored.

    .. math:: b = C_0 \frac{M_\mathrm{GPU} - M_\mathrm{model}}{L\,((1 - C_1) + C_1 s)}

    Parameters
    ----------
    gpu_memory_gb : nominal capacity, the label. [GB]
    model_memory_gb : weights alone, as stored. [GB]
    sequence_length : longest padded length, L. [token]
    active_expert_fraction : experts used by a token over experts, s. [-]
    c0 : dense-equivalent tokens per GB. [token/GB]
    c1 : share of a token's memory that grows with the active experts. [-]

    Returns
    -------
    Queries; negative where the weights do not fit. [query]

    Notes
    -----
    Source: arXiv:2408.04693, Eq. 1. L is not the median length, as the text has it (that overshoots 6 to 13 times),
    but the longest padded one: 512 for its CS set, 1024 for MATH. Linear in nominal capacity, which its own points
    are not: 27 measured at 80 GB and length 512, 20.6 by the law.

    >>> round(float(batch_size_bound(gpu_memory_gb=100, model_memory_gb=23.35, sequence_length=512,
    ...                              active_expert_fraction=0.25, c0=62, c1=0.89)), 2)
    27.92
    """
    free = np.subtract(gpu_memory_gb, model_memory_gb)
    return as_float(c0 * free / (sequence_length * _memory_share(active_expert_fraction, c1)))


def max_batch_size(
    *,
    gpu_memory_gb: FloatLike,
    model_memory_gb: FloatLike,
    sequence_length: FloatLike,
    active_expert_fraction: FloatLike,
    c0: FloatLike = 62.0,
    c1: FloatLike = 0.89,
) -> FloatLike:
    r"""Largest batch that fits a GPU, by Eq. 1.

    .. math:: b = \max\left(0, \left\lfloor C_0 \frac{M_\mathrm{GPU} - M_\mathrm{model}}{L\,((1 - C_1) + C_1 s)}
        \right\rfloor\right)

    Parameters
    ----------
    gpu_memory_gb, model_memory_gb, sequence_length, active_expert_fraction, c0, c1 : as for `batch_size_bound`; c0
        and c1 default to the artifact's pair for Mixtral-8x7B with QLoRA.

    Returns
    -------
    Whole queries, 0 where nothing fits. [query]

    Notes
    -----
    Source: arXiv:2408.04693, Eq. 1; pairs for each model in `capacity_coefficients`. Checked against maxima at lengths
    128 to 1024 on 40 to 80 GB: exact in 7 of 12 Mixtral cases, at 80 GB a quarter to a half too low.

    >>> float(max_batch_size(gpu_memory_gb=48, model_memory_gb=23.35, sequence_length=512, active_expert_fraction=0.25))
    8.0
    """
    bound = batch_size_bound(
        gpu_memory_gb=gpu_memory_gb,
        model_memory_gb=model_memory_gb,
        sequence_length=sequence_length,
        active_expert_fraction=active_expert_fraction,
        c0=c0,
        c1=c1,
    )
    return as_float(np.maximum(np.floor(bound + _EXACT_FIT), 0))


@dataclass(frozen=True, eq=False)
class CapacityFit:
    """Eq. 1 fitted to measured maxima.

    Attributes
    ----------
    c0, c1 : middle of the region of equally good pairs. [token/GB], [-]
    c0_range, c1_range : extent of that region: a floored law determines no point.
    num_points, num_exact : maxima given, and met exactly.
    rmse : of the floored law. [query]
    notes : what the data determine, in sentences.
    """

    c0: float
    c1: float
    c0_range: tuple[float, float]
    c1_range: tuple[float, float]
    num_points: int
    num_exact: int
    rmse: float
    notes: tuple[str, ...]


def fit_max_batch_size(
    *,
    gpu_memory_gb: ArrayLike,
    model_memory_gb: ArrayLike,
    sequence_length: ArrayLike,
    active_expert_fraction: ArrayLike,
    max_batch_size: ArrayLike,
    c1: float | None = None,
    grid_points: int = 501,
) -> CapacityFit:
    r"""C0 and C1 of Eq. 1 from measured maxima.

    .. math:: \min_{C_0, C_1} \sum_i \left(\lfloor b_i(C_0, C_1) \rfloor - n_i\right)^2

    Parameters
    ----------
    gpu_memory_gb, model_memory_gb, sequence_length, active_expert_fraction : as for `batch_size_bound`, broadcast.
    max_batch_size : measured maxima n. [query]
    c1 : fixes C1; None fits it. [-]
    grid_points : values of C1 tried, from 0 to 1.

    Notes
    -----
    The paper does not say how it fitted. Here C1 runs over a grid and C0 over every interval between two steps of the
    floored law, so that no C0 is missed. Pairs that predict the same batches form a convex region; its middle is
    returned, and its extent. With a single active fraction only C0 / ((1 - C1) + C1 s) is determined: give `c1` then.

    >>> fit = fit_max_batch_size(gpu_memory_gb=48, model_memory_gb=23.35, sequence_length=[512, 512, 128, 128],
    ...     active_expert_fraction=[1, 0.25, 1, 0.25], max_batch_size=[2, 8, 10, 32])
    >>> fit.num_exact
    4
    """
    names = ("gpu_memory_gb", "model_memory_gb", "sequence_length", "active_expert_fraction", "max_batch_size")
    given = (gpu_memory_gb, model_memory_gb, sequence_length, active_expert_fraction, max_batch_size)
    gpu, model, length, fraction, measured = _columns(names, given)
    _refuse("gpu_memory_gb", gpu, gpu <= model, "more than model_memory_gb")
    _refuse("sequence_length", length, length <= 0, "1 or more tokens")
    _refuse("active_expert_fraction", fraction, (fraction <= 0) | (fraction > 1), "above 0 and at most 1")
    _refuse("max_batch_size", measured, (measured < 0) | (measured != np.floor(measured)), "whole, 0 or more")
    if not measured.any():
        raise FitError("all max_batch_size are 0, which bounds C0 from above only; give a GPU on which a batch fits.")
    if c1 is None and np.unique(fraction).size < 2:
        raise FitError(
            f"all points have active_expert_fraction {fraction[0]:g}: they determine C0 / ((1 - C1) + C1 s) alone. "
            "Give c1, or points with another number of active experts."
        )
    if c1 is not None and not 0 <= c1 <= 1:
        raise InvalidInputError(f"c1 is {c1}; it is a share, from 0 to 1.")
    tried = np.linspace(0, 1, grid_points) if c1 is None else np.array([c1])
    per_c0 = (gpu - model) / length  # b = C0 * per_c0 / share
    pairs, widths, predicted = _grid_of_pairs(tried, per_c0, fraction, measured)
    loss = ((predicted - measured) ** 2).sum(axis=1)
    same = (predicted == predicted[loss.argmin()]).all(axis=1)
    weight = np.where(same, widths, 0)
    c0_mid, c1_mid = weight @ pairs / weight.sum()
    low, high = (pairs[same, 0] - widths[same] / 2).min(), (pairs[same, 0] + widths[same] / 2).max()
    range_c1 = (float(pairs[same, 1].min()), float(pairs[same, 1].max()))
    exact = int((predicted[loss.argmin()] == measured).sum())
    notes = (
        f"All C0 from {low:.1f} to {high:.1f} with a matching C1 from {range_c1[0]:.3f} to {range_c1[1]:.3f} "
        "predict the same batches; the middle is given.",
        *(("C1 was given, not fitted.",) if c1 is not None else ()),
        *((f"{measured.size - exact} of {measured.size} maxima are missed.",) if exact < measured.size else ()),
    )
    rmse = float(np.sqrt(loss.min() / measured.size))
    return CapacityFit(
        float(c0_mid), float(c1_mid), (float(low), float(high)), range_c1, measured.size, exact, rmse, notes
    )


def _memory_share(active_expert_fraction: FloatLike, c1: FloatLike) -> FloatLike:
    return np.subtract(1, c1) + np.multiply(c1, active_expert_fraction)


def _grid_of_pairs(tried: Floats, per_c0: Floats, fraction: Floats, measured: Floats) -> tuple[Floats, Floats, Floats]:
    """Every (C0, C1) cell in which the floored law is constant: its middle, its width in C0, its batches."""
    steps = [np.arange(1, 2 * n + 3) for n in measured]
    pairs, widths, predicted = [], [], []
    for c1 in tried:
        rate = per_c0 / _memory_share(fraction, c1)
        edges = np.unique(np.concatenate([[0.0], *(k / r for k, r in zip(steps, rate, strict=True))]))
        middle = (edges[1:] + edges[:-1]) / 2
        pairs.append(np.column_stack([middle, np.full_like(middle, c1)]))
        widths.append(np.diff(edges))
        predicted.append(np.floor(middle[:, None] * rate))
    return np.concatenate(pairs), np.concatenate(widths), np.concatenate(predicted)


# --- Eq. 2: throughput


def throughput(
    batch: FloatLike,
    active_expert_fraction: FloatLike,
    *,
    c2: FloatLike,
    c3: FloatLike,
    c4: FloatLike,
    form: Form = "artifact",
) -> FloatLike:
    r"""Queries a second at a batch size, by Eq. 2.

    .. math::

        T_\mathrm{artifact} &= C_4 + \frac{C_2}{s\,C_3} \ln b \\
        T_\mathrm{printed} &= C_4 + C_2 \ln\frac{b}{s\,C_3} \\
        T_\mathrm{drawn} &= C_4 + C_2 \ln b \;\text{ for } s = 1, \text{ else } T_\mathrm{artifact}

    Parameters
    ----------
    batch : queries a step on one GPU, b. [query]
    active_expert_fraction : experts used by a token over experts, s. [-]
    c2 : gain for each e-fold of the batch. [query/s]
    c3 : how much the active fraction matters. [-]
    c4 : intercept, in the artifact's form the throughput at batch 1. [query/s]
    form : `artifact` (default), `printed` or `drawn`; see the module's head.

    Returns
    -------
    Throughput; NaN for a batch that is not positive. [query/s]

    Notes
    -----
    Source: arXiv:2408.04693, Eq. 2, and `analytical_throughput/plot.py`. A description of measured points up to the
    largest batch, not a bound: it grows without limit, where step time linear in the batch saturates.

    >>> k = throughput_coefficients("mixtral", "math-14k", "a40")
    >>> round(float(throughput(4, 0.25, c2=k.c2, c3=k.c3, c4=k.c4)), 3)  # measured: 1.005
    0.985
    """
    _known_form(form)
    log_batch = np.log(np.where(np.asarray(batch, dtype=np.float64) > 0, batch, np.nan))
    share = np.multiply(active_expert_fraction, c3)
    if form == "printed":
        return as_float(c4 + c2 * (log_batch - np.log(share)))
    if form == "drawn":
        share = np.where(np.asarray(active_expert_fraction) == 1, 1.0, share)
    return as_float(c4 + c2 / share * log_batch)


@dataclass(frozen=True, eq=False)
class ThroughputFit:
    """Eq. 2 fitted to measured throughputs.

    Attributes
    ----------
    c2, c4 : fitted. [query/s]
    c3 : as given, not fitted. [-]
    form : of the law.
    covariance : of (c2, c4), shape (2, 2); NaN from two points. [query^2/s^2]
    rmse : in sample. [query/s]
    num_points : points used.
    notes : what the data determine, in sentences.
    """

    c2: float
    c3: float
    c4: float
    form: Form
    covariance: Floats
    rmse: float
    num_points: int
    notes: tuple[str, ...]

    def throughput(self, batch: FloatLike, active_expert_fraction: FloatLike) -> FloatLike:
        """The fitted law. [query/s]"""
        return throughput(batch, active_expert_fraction, c2=self.c2, c3=self.c3, c4=self.c4, form=self.form)


def fit_throughput(
    batch: ArrayLike,
    active_expert_fraction: ArrayLike,
    queries_per_second: ArrayLike,
    *,
    form: Form = "artifact",
    c3: float | None = None,
) -> ThroughputFit:
    r"""C2 and C4 of Eq. 2 from measured throughputs, all points with equal weight.

    .. math:: \min_{C_2, C_4} \sum_i \left(T(b_i, s_i) - T_i\right)^2

    Parameters
    ----------
    batch, active_expert_fraction : as for `throughput`.
    queries_per_second : measured. [query/s]
    form : of the law.
    c3 : must be given; the artifact has 1.8 for Mixtral and 2.5 for BlackMamba. [-]

    Raises
    ------
    FitError : `c3` is None, or the points do not determine a slope.

    Notes
    -----
    Source: arXiv:2408.04693, `analytical_throughput/plot.py`, which calls `scipy.optimize.curve_fit` as here. C3 is
    never determined: the artifact's form holds only C2 / C3, the printed one only C4 - C2 ln C3.

    >>> fit = fit_throughput([1, 2, 4, 8], 0.25, [1.0, 1.5, 2.0, 2.5], c3=4)
    >>> round(fit.c4, 6), round(float(fit.c2 * np.log(2)), 6)
    (1.0, 0.5)
    """
    _known_form(form)
    names = ("batch", "active_expert_fraction", "queries_per_second")
    size, fraction, measured = _columns(names, (batch, active_expert_fraction, queries_per_second))
    _refuse("batch", size, size <= 0, "above 0")
    _refuse("active_expert_fraction", fraction, (fraction <= 0) | (fraction > 1), "above 0 and at most 1")
    determined = {
        "artifact": "the ratio C2 / C3 and C4",
        "printed": "C2 and the sum C4 - C2 ln C3",
        "drawn": "C2 and C4, and C3 from sparse points beside dense ones",
    }[form]
    if c3 is None:
        raise FitError(
            f"c3 is not fitted: in the {form} form the data determine {determined}. Give c3=1.8 (Mixtral) or c3=2.5 "
            "(BlackMamba), as the paper's artifact does, or c3=1."
        )
    if not (np.isfinite(c3) and c3 > 0):
        raise InvalidInputError(f"c3 is {c3}; it must be above 0.")

    def law(_: object, c2: float, c4: float) -> Floats:
        return np.asarray(throughput(size, fraction, c2=c2, c3=c3, c4=c4, form=form))

    slope = law(None, 1.0, 0.0)
    if np.ptp(slope) <= 1e-12 * np.abs(slope).max():
        raise FitError(f"{size.size} points at one batch size determine no slope; measure at two or more.")
    c2, c4, covariance = _curve_fit(law, measured)
    rmse = float(np.sqrt(np.mean((law(None, c2, c4) - measured) ** 2)))
    notes = (f"C3 = {c3:g} was given, not fitted; the data determine {determined}.",)
    return ThroughputFit(c2, c3, c4, form, covariance, rmse, size.size, notes)


def _curve_fit(law: Any, measured: Floats) -> tuple[float, float, Floats]:
    import warnings

    from scipy.optimize import OptimizeWarning, curve_fit  # half a second to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)  # two points: no covariance, NaN below
        (c2, c4), covariance = curve_fit(law, np.arange(measured.size), measured, p0=(1.0, 1.0))
    return float(c2), float(c4), np.where(np.isfinite(covariance), covariance, np.nan)


# --- Table IV: cost


def cost_usd(
    queries: FloatLike,
    epochs: FloatLike,
    queries_per_second: FloatLike,
    usd_per_gpu_hour: FloatLike,
    num_gpus: FloatLike = 1,
) -> FloatLike:
    r"""Cost of a run, as in Table IV.

    .. math:: C = \frac{N E}{3600\, T} \, p \, g

    Parameters
    ----------
    queries : of the data set, N. [query]
    epochs : passes over it, E. [-]
    queries_per_second : of all GPUs together, T. [query/s]
    usd_per_gpu_hour : price p of one GPU. [$/h]
    num_gpus : g. [-]

    Returns
    -------
    Dollars. [$]

    Notes
    -----
    Source: arXiv:2408.04693 prints no formula; this one gives its Table IV from the measured throughputs and 15,000
    queries (its MATH set holds 13,921).

    >>> round(float(cost_usd(15_000, 10, 1.005476933, 0.79)), 2)
    32.74
    """
    hours = np.multiply(queries, epochs) / queries_per_second / HOUR
    return as_float(hours * usd_per_gpu_hour * num_gpus)


# --- the paper's coefficients


@dataclass(frozen=True, slots=True)
class CapacityCoefficients:
    """A row of Eq. 1's coefficients: C0 [token/GB], C1 [-], weights [GB]; `origin` is text, artifact or a40-maxima."""

    model: str
    origin: str
    c0: float
    c1: float
    model_memory_gb: float
    source: str


@dataclass(frozen=True, slots=True)
class ThroughputCoefficients:
    """A panel of Figs 14 and 15: C2, C4 and the errors in query/s.

    Attributes
    ----------
    c2, c3, c4 : of the artifact's form; c3 hard-coded there.
    rmse_printed : in the panel's title.
    rmse_artifact : what its code computes; on the H100 four of five dense points meet the sparse curve.
    rmse_drawn, rmse_fitted : of the curves as drawn, and of the function as fitted.
    printed_form_c2, printed_form_c4_minus_c2_ln_c3, printed_form_rmse : the best fit of Eq. 2 as printed.
    """

    model: str
    dataset: str
    gpu: str
    num_points: int
    num_dense_points: int
    c2: float
    c3: float
    c4: float
    rmse_printed: float
    rmse_artifact: float
    rmse_drawn: float
    rmse_fitted: float
    printed_form_c2: float
    printed_form_c4_minus_c2_ln_c3: float
    printed_form_rmse: float
    figure: str

    def throughput(self, batch: FloatLike, active_expert_fraction: FloatLike, form: Form = "artifact") -> FloatLike:
        """Eq. 2 with these coefficients. [query/s]"""
        if form == "printed":  # the sum is known, not C4: C3 = 1 makes them equal
            c2, c4 = self.printed_form_c2, self.printed_form_c4_minus_c2_ln_c3
            return throughput(batch, active_expert_fraction, c2=c2, c3=1.0, c4=c4, form=form)
        return throughput(batch, active_expert_fraction, c2=self.c2, c3=self.c3, c4=self.c4, form=form)


@dataclass(frozen=True, slots=True)
class CostRow:
    """A row of Table IV (Mixtral, 2 of 8 experts, 10 epochs): rates in query/s, price in $/h, cost in $."""

    gpu: str
    gpu_memory_gb: float
    max_batch_size: int
    queries_per_second: float
    queries_per_second_measured: float
    usd_per_gpu_hour: float
    cost_usd: float


@lru_cache(maxsize=1)
def capacity_table() -> tuple[CapacityCoefficients, ...]:
    """All coefficients of Eq. 1, by model and origin."""
    return tuple(_rows("max_batch_size.csv", CapacityCoefficients))


@lru_cache(maxsize=1)
def throughput_table() -> tuple[ThroughputCoefficients, ...]:
    """The seven panels of Figs 14 and 15."""
    return tuple(_rows("throughput.csv", ThroughputCoefficients))


@lru_cache(maxsize=1)
def cost_table() -> tuple[CostRow, ...]:
    """Table IV as printed, with the measured throughputs that it rounds."""
    return tuple(_rows("cost.csv", CostRow))


def capacity_coefficients(model: str, origin: str | None = None) -> CapacityCoefficients:
    """Eq. 1's coefficients for a model; the artifact's where it has any, else the text's.

    >>> capacity_coefficients("mixtral").c0, capacity_coefficients("mixtral", "text").c0
    (62.0, 82.0)
    """
    if origin is None:
        return _pick("Eq. 1 coefficients", sorted(capacity_table(), key=lambda row: row.origin != "artifact"), model)
    return _pick("Eq. 1 coefficients", capacity_table(), model, origin)


def throughput_coefficients(model: str, dataset: str, gpu: str) -> ThroughputCoefficients:
    """Eq. 2's coefficients of a panel; names as in the catalogue or in the paper (`Mixtral`, `CS`, `A40`).

    >>> throughput_coefficients("BlackMamba", "CS", "A40").c3
    2.5
    """
    name = {"cs": "commonsense-15k"}.get(dataset.lower(), dataset)
    return _pick("Eq. 2 coefficients", throughput_table(), model, name, gpu)


def _rows(name: str, row: type[_Row]) -> Iterator[_Row]:
    casts = {"int": int, "float": float, "str": str}
    kinds = {field.name: casts[str(field.type)] for field in fields(row)}
    with (_DATA / name).open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            yield row(**{key: kinds[key](value) for key, value in line.items()})


def _pick(kind: str, rows: Sequence[_Row], *wanted: str) -> _Row:
    """First row whose leading fields begin with `wanted`, case and punctuation aside."""
    known = {}
    for row in rows:
        cells = [getattr(row, field.name) for field in fields(row)[: len(wanted)]]
        if all(_plain(cell).startswith(_plain(text)) and text for cell, text in zip(cells, wanted, strict=True)):
            return row
        known[" / ".join(cells)] = row
    raise UnknownNameError(kind, " / ".join(wanted), known, f"Published: {'; '.join(known)}.")


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


# --- checks


def _known_form(form: str) -> None:
    if form not in _FORMS:
        raise InvalidInputError(f"form is {form!r}; use 'artifact' (default), 'printed' or 'drawn'.")


def _columns(names: tuple[str, ...], given: tuple[ArrayLike, ...]) -> list[Floats]:
    try:
        columns = [np.atleast_1d(c).ravel() for c in np.broadcast_arrays(*(np.asarray(g, np.float64) for g in given))]
    except (TypeError, ValueError):
        raise InvalidInputError(f"{', '.join(names)} must be numbers, one a measurement in each.") from None
    for name, column in zip(names, columns, strict=True):
        _refuse(name, column, ~np.isfinite(column), "finite")
        if column.size == 0:
            raise FitError(f"{name} is empty; a fit needs measurements.")
    return columns


def _refuse(name: str, column: Floats, bad: NDArray[np.bool_], rule: str) -> None:
    if bad.any():
        raise InvalidInputError(f"{name} holds {column[bad][0]:g}; it must be {rule}.")
