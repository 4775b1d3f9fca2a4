"""What an accuracy costs, by the founding paper's curves and prices, and by one's own."""

from __future__ import annotations

import math
from pathlib import Path

import paper_runs
import pytest

from moecost import Job
from moecost.accuracy import AccuracyCurve, published_curve, published_curves, read_curves, to_accuracy
from moecost.errors import InvalidInputError, UnknownNameError

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

NAMES = {"Mixtral": "mixtral-8x7b", "BlackMamba": "blackmamba-2.8b"}


def test_the_curves_are_the_papers() -> None:
    """All 88 points of Fig. 3, as in the artifact."""
    rows = paper_runs.read("accuracy_by_epoch.csv")
    assert len(rows) == sum(len(c.epochs) for c in published_curves().values()) == 88
    for row in rows:
        curve = published_curve(NAMES[row["model"]], paper_runs.DATASET[row["train_set"]], experts=row["mode"])
        at = curve.epochs.index(float(row["epoch"]))
        assert curve.accuracy[at] == float(row["accuracy_fraction"])


@pytest.mark.parametrize(
    ("data", "experts", "target", "epochs"),
    [
        ("commonsense-15k", "dense", 0.75, 1),
        ("commonsense-15k", "sparse", 0.75, 1),
        ("commonsense-15k", "sparse", 0.80, math.inf),  # peaks at 0.77
        ("math-14k", "dense", 0.55, 2),
        ("math-14k", "sparse", 0.55, 7),
        ("math-14k", "dense", 0.58, math.inf),  # peaks at 0.57
        ("math-14k", "sparse", 0.58, 8),
    ],
)
def test_epochs_of_mixtral_to_a_target(data: str, experts: str, target: float, epochs: float) -> None:
    """Read off Fig. 3 by eye."""
    assert published_curve("mixtral-8x7b", data, experts=experts).epochs_to(target) == epochs


def test_a_target_that_is_left_again() -> None:
    """Sparse Mixtral on HellaSwag passes 0.7 in the first epoch and falls below it from the fifth on."""
    curve = published_curve("mixtral-8x7b", "commonsense-15k", experts="sparse")
    assert curve.epochs_to(0.7) == 1
    assert curve.epochs_to(0.7, lasting=True) == math.inf
    assert curve.epochs_to(0.6, lasting=True) == 6
    assert curve.best == (2, 0.77)


def test_ten_epochs_suffice() -> None:
    """The paper's second finding: each curve is within 0.03 of its best before the tenth epoch."""
    for curve in published_curves().values():
        assert curve.epochs_to(curve.best[1] - 0.03) < 10


@pytest.mark.parametrize(("experts", "batch"), [("dense", 1), ("sparse", 4)])
def test_dollars_to_an_accuracy_on_an_a40(experts: str, batch: int) -> None:
    """Mixtral to 0.55 on GSM8K at $0.79 an hour: by the measured queries a second of Fig. 14, and by the estimate.

    Dense experts learn in 2 epochs, sparse ones in 7 at more than three times the speed: about the same dollars.
    """
    (measured,) = (
        run.queries_per_second
        for run in paper_runs.throughput()
        if (run.model, run.data, run.gpu, run.mode, run.batch) == ("Mixtral", "MATH", "a40", experts, batch)
    )
    curve = published_curve("mixtral-8x7b", "math-14k", experts=experts)
    job = Job(**paper_runs.MIXTRAL, gpu="a40", dataset="math-14k", sequence_length=1024, price=0.79,
              micro_batch_size=batch, num_experts_per_tok=paper_runs.ACTIVE_EXPERTS[experts])  # fmt: skip
    found = to_accuracy(curve, job, 0.55)
    by_hand = curve.epochs_to(0.55) * 13_921 / measured / 3600
    print(f"{experts}: {by_hand:.1f} h measured, {found.hours:.1f} predicted; ${found.usd:.2f}")
    assert found.hours == pytest.approx(by_hand, rel=0.08)
    assert found.usd == pytest.approx(0.79 * by_hand, rel=0.08)


def test_what_is_never_reached_costs_without_end_and_what_is_there_nothing() -> None:
    curve = AccuracyCurve("run", (0.0, 1.0), (0.2, 0.5))
    job = Job(model="llama-3.2-1b", gpu="a40", sequence_length=512, method="lora", price=1.0)
    never, there, once = (to_accuracy(curve, job, t) for t in (0.9, 0.2, 0.5))
    assert (never.epochs, never.hours, never.usd, never.estimate) == (math.inf, math.inf, math.inf, None)
    assert (there.epochs, there.hours, there.usd, there.estimate) == (0, 0, 0, None)
    assert once.estimate is not None
    assert once.hours == once.estimate.hours > 0


# ------------------------------------------------------------------------------------------------------- own curves
def test_curves_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("run,epoch,accuracy\nfirst,1,0.5\nfirst,0,0.1\nsecond,0.5,0.3\n")
    found = read_curves(path)
    assert found["first"] == AccuracyCurve("first", (0.0, 1.0), (0.1, 0.5))  # in any order
    assert found["second"].epochs_to(0.3) == 0.5
    path.write_text("epoch,accuracy\n1,0.5\n")
    assert read_curves(path)["mine"].best == (1.0, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'epoch' and none 'accuracy'"),
        ("epochs,accuracy\n1,0.5\n", "no column 'epoch'; give epoch and accuracy, has epochs, accuracy"),
        ("epoch,accuracy\n", "no rows"),
        ("epoch,accuracy\none,0.5\n", "line 2: epoch='one' must be a number"),
        ("epoch,accuracy\n1,85\n", "accuracy=85.0 at epoch 1 must be a fraction from 0 to 1"),
        ("epoch,accuracy\n1,nan\n", "accuracy=nan"),
        ("epoch,accuracy\n-1,0.5\n", "epoch=-1.0 must be"),
        ("epoch,accuracy\n1,0.5\n1,0.6\n", "epochs must rise"),
        ("epoch,accuracy\n1,0.5,3\n", "line 2: must have as many cells"),
        ("epoch,accuracy\n1\n", "line 2: must have as many cells"),
        ("epoch,accuracy,epoch\n1,0.5,1\n", "two columns have the same name"),
    ],
)
def test_a_file_that_is_no_table_of_curves(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_curves(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_curves(tmp_path / "none.csv")


@pytest.mark.parametrize("target", [0, -0.5, 55, float("nan"), True, "high"])
def test_a_target_is_a_fraction(target: object) -> None:
    with pytest.raises(InvalidInputError, match="target="):
        AccuracyCurve("run", (1.0,), (0.5,)).epochs_to(target)  # type: ignore[arg-type]


def test_curves_without_points_and_unknown_ones() -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        AccuracyCurve("run", (), ())
    with pytest.raises(UnknownNameError, match=r"blackmamba-2\.8b / math-14k / dense"):
        published_curve("blackmamba", "math-14k", experts="dense")
