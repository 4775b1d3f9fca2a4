"""What an accuracy costs: epochs, hours and dollars until a model reaches a target, from measured curves.

How fast a model learns is measured, never predicted, here: the curves are those of arXiv:2408.04693 (Fig. 3), or one's
own as a CSV. Hours and dollars are those of an estimate.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from moecost.catalog import data_folder, read_text
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.estimation import estimate_job
from moecost.job import Job
from moecost.results import Estimate

COLUMNS: Final = ("epoch", "accuracy")
"""Of a table of curves; all others name the run that a row belongs to."""


@dataclass(frozen=True, slots=True)
class AccuracyCurve:
    """Accuracy of one run by the epochs it was tuned for.

    Attributes
    ----------
    name : of the run.
    epochs : rising; 0 is before tuning.
    accuracy : as a fraction. [0..1]
    """

    name: str
    epochs: tuple[float, ...]
    accuracy: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"accuracy curve {self.name!r:.80}"
        if not self.epochs or len(self.epochs) != len(self.accuracy):
            raise InvalidInputError(f"{where}: needs as many accuracies as epochs, and at least one")
        for epoch, value in zip(self.epochs, self.accuracy, strict=True):
            if not 0.0 <= epoch < math.inf:
                raise InvalidInputError(f"{where}: epoch={epoch!r:.40} must be a number of at least 0")
            if not 0.0 <= value <= 1.0:
                raise InvalidInputError(
                    f"{where}: accuracy={value!r:.40} at epoch {epoch:g} must be a fraction from 0 to 1"
                )
        if any(b <= a for a, b in zip(self.epochs, self.epochs[1:], strict=False)):
            raise InvalidInputError(f"{where}: epochs must rise; give each epoch once, in order")

    @property
    def best(self) -> tuple[float, float]:
        """(epoch, accuracy) of the highest accuracy, the earliest where it is reached twice."""
        highest = max(self.accuracy)
        return self.epochs[self.accuracy.index(highest)], highest

    def epochs_to(self, target: float, *, lasting: bool = False) -> float:
        """Epochs until the accuracy is first measured at `target` or above; infinite where it never is.

        `lasting`: and stays there to the end of the curve.

        >>> curve = AccuracyCurve("run", (0, 1, 2, 3), (0.1, 0.5, 0.4, 0.6))
        >>> curve.epochs_to(0.5), curve.epochs_to(0.5, lasting=True), curve.epochs_to(0.7)
        (1, 3, inf)
        """
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0.0 < target <= 1.0:
            raise InvalidInputError(f"target={target!r:.80} must be a fraction above 0 and up to 1")
        reached = [value >= target for value in self.accuracy]
        for i, epoch in enumerate(self.epochs):
            if all(reached[i:]) if lasting else reached[i]:
                return epoch
        return math.inf


@dataclass(frozen=True, slots=True)
class ToAccuracy:
    """What a run takes to a target: infinite where the curve never reaches it, 0 where it starts there.

    Attributes
    ----------
    epochs : passes over the data.
    hours, usd : of the run with so many epochs, start-up and checkpoints included. [h], [$]
    estimate : of that run; None for 0 and for endless epochs.
    """

    epochs: float
    hours: float
    usd: float
    estimate: Estimate | None


def to_accuracy(curve: AccuracyCurve, job: Job, target: float, *, lasting: bool = False) -> ToAccuracy:
    """Hours and dollars until a run like `job` reaches an accuracy.

    Parameters
    ----------
    curve : of runs with this model, data and method; its epochs replace the job's.
    job : the run, with its price.
    target : accuracy. [0..1]
    lasting : the accuracy stays at the target.

    >>> job = Job(model="mixtral-8x7b", gpu="a40", method="qlora", dataset="math-14k", sequence_length=1024,
    ...           software="hf-peft-2024", price=0.79)
    >>> found = to_accuracy(published_curve("mixtral-8x7b", "math-14k", experts="sparse"), job, 0.55)
    >>> found.epochs, found.estimate.epochs
    (7.0, 7.0)
    """
    epochs = curve.epochs_to(target, lasting=lasting)
    if epochs == 0.0 or math.isinf(epochs):
        return ToAccuracy(epochs, epochs, epochs, None)
    found = estimate_job(job.model_copy(update={"epochs": epochs}))
    return ToAccuracy(epochs, found.hours, found.cost_usd, found)


# ------------------------------------------------------------------------------------------------------------ curves
def read_curves(path: str | Path) -> dict[str, AccuracyCurve]:
    """Curves from a CSV with the columns `epoch` and `accuracy` (a fraction); other columns name the run.

    One curve for each combination of the other columns, named by their values; of a file without any, by the file.
    """
    return _curves(read_text(path), str(path))


def published_curve(model: str, dataset: str, *, experts: str = "sparse") -> AccuracyCurve:
    """A curve of Fig. 3 of arXiv:2408.04693: accuracy on HellaSwag or GSM8K by epochs on Commonsense or MATH.

    Parameters
    ----------
    model : `mixtral-8x7b` or `blackmamba-2.8b`.
    dataset : that it is tuned on, `commonsense-15k` or `math-14k`.
    experts : `sparse` (2 of 8 a token) or `dense` (all 8).

    >>> published_curve("mixtral-8x7b", "commonsense-15k", experts="dense").best
    (1.0, 0.85)
    """
    known = published_curves()
    for (name, data, mode), curve in known.items():
        if (name, data, mode) == (model, dataset, experts):
            return curve
    names = [" / ".join(key) for key in known]
    raise UnknownNameError(
        "accuracy curve", f"{model} / {dataset} / {experts}", names, f"Published: {'; '.join(names)}."
    )


@lru_cache(maxsize=1)
def published_curves() -> Mapping[tuple[str, str, str], AccuracyCurve]:
    """The eight curves of Fig. 3 by model, data set and `dense` or `sparse` experts."""
    path = data_folder("data") / "published" / "accuracy.csv"
    found = {}
    for name, curve in read_curves(path).items():
        model, dataset, _, experts = name.split(NAME_SEPARATOR)
        found[model, dataset, experts] = curve
    return found


NAME_SEPARATOR: Final = " / "


def _curves(text: str, where: str) -> dict[str, AccuracyCurve]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    header = [name.strip() for name in rows.fieldnames or ()]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InvalidInputError(
            f"{where}: has no column {' and none '.join(map(repr, missing))}; give epoch and accuracy, has "
            f"{', '.join(header)[:200] or 'no header'}"
        )
    if len(set(header)) < len(header):
        raise InvalidInputError(f"{where}: two columns have the same name; give each its own")
    rows.fieldnames = header
    points: dict[str, list[tuple[float, float]]] = {}
    for row in _checked_rows(rows, where):
        name = NAME_SEPARATOR.join(row[key].strip() for key in header if key not in COLUMNS) or Path(where).stem
        point = tuple(_number(row[key], key, f"{where}, line {rows.line_num}") for key in COLUMNS)
        points.setdefault(name, []).append((point[0], point[1]))
    if not points:
        raise InvalidInputError(f"{where}: has a header and no rows; give one row an epoch")
    try:
        return {name: AccuracyCurve(name, *zip(*sorted(found), strict=True)) for name, found in points.items()}
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from None


def _checked_rows(rows: csv.DictReader[str], where: str) -> Iterable[dict[str, str]]:
    try:
        for row in rows:
            if None in row or None in row.values():  # too many cells, or too few
                raise InvalidInputError(f"{where}, line {rows.line_num}: must have as many cells as the header")
            yield row
    except csv.Error as error:
        raise InvalidInputError(f"{where}, line {rows.line_num}: is not readable as CSV: {error}") from None


def _number(text: Any, name: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f"{where}: {name}={text!r:.60} must be a number") from None
