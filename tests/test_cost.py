"""Hours and dollars of a run, against the founding paper's table and by hand."""

from __future__ import annotations

import math

import paper_runs
import pytest

from moecost import PriceQuote, estimate
from moecost.catalog import median_quote, quotes
from moecost.cost import cost_usd, run_hours, save_seconds
from moecost.errors import NoPriceError
from moecost.software import SoftwareProfile

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

LORA = {"method": "lora", "sequence_length": 512, "micro_batch_size": 4, "num_queries": 1000}


@pytest.mark.parametrize("row", paper_runs.read("cost_table.csv"), ids=lambda r: r["gpu"])
@pytest.mark.parametrize(("queries", "column"), [(15000, "15000"), (13921, "13921")])
def test_table_iv(row: dict[str, str], queries: int, column: str) -> None:
    """arXiv:2408.04693, Table IV: 15,000 queries, 10 epochs at the measured rate; and with MATH's real 13,921."""
    batch, rate = int(row["max_batch_size"]), float(row["queries_per_s_measured"])
    hours = run_hours(steps=10 * queries / batch, step_s=batch / rate, saves=0, save_s=0.0, startup_s=0.0)
    dollars = cost_usd(hours=hours, num_gpus=1, usd_per_gpu_hour=float(row["price_usd_per_gpu_hour"]))
    assert dollars == pytest.approx(float(row[f"cost_usd_recomputed_{column}_queries"]), abs=0.006)
    if queries == 15000:
        assert dollars == pytest.approx(float(row["cost_usd_in_table"]), abs=0.06)


@pytest.mark.parametrize("row", paper_runs.read("cost_table.csv"), ids=lambda r: r["gpu"])
def test_dollars_of_the_founding_papers_runs(row: dict[str, str]) -> None:
    """From the job alone, at the paper's prices and batches: 30.4, 23.6 and 16.6 dollars (MATH's 13,921 queries)."""
    gpu = {"A40": "a40", "A100-80GB": "a100-80gb-pcie", "H100": "h100-80gb-sxm"}[row["gpu"]]
    e = estimate(
        **{k: v for k, v in paper_runs.MIXTRAL.items() if k != "model"},
        model=paper_runs.MIXTRAL["model"],
        gpu=gpu,
        dataset="math-14k",
        sequence_length=1024,
        epochs=10,
        price=float(row["price_usd_per_gpu_hour"]),
        micro_batch_size=int(row["max_batch_size"]),
        on_oom="report",
    )
    assert e.cost_usd == pytest.approx(float(row["cost_usd_recomputed_13921_queries"]), rel=0.08)


def test_hours_by_hand() -> None:
    """Two epochs of 250 steps of 7.2 s = 1 h, two checkpoints of 900 s, 1,800 s of start-up."""
    assert run_hours(steps=500, step_s=7.2, saves=2, save_s=900.0, startup_s=1800.0) == 2.0
    assert cost_usd(hours=2.0, num_gpus=8, usd_per_gpu_hour=2.5) == 40.0
    assert save_seconds(saved_bytes=16e9, bytes_per_s=1e9) == 16.0


def test_a_run_counts_its_checkpoints_and_its_start() -> None:
    """hf-peft writes adapters and their AdamW state (fp32: 12 bytes a weight) after each epoch."""
    profile = SoftwareProfile.load("hf-peft").run
    e = estimate("llama-3.1-8b", "a100-80gb-sxm", epochs=3, **LORA)
    saving = 3 * 12 * e.num_trainable_parameters / profile.save_bytes_per_s
    expected = e.steps * e.step.seconds + saving + profile.startup_s
    assert e.steps == 750
    assert e.hours * 3600 == pytest.approx(expected, rel=1e-9)
    assert any("checkpoint" in note for note in e.notes)
    assert any("start-up" in note for note in e.notes)


def test_part_of_an_epoch() -> None:
    assert estimate("llama-3.1-8b", "a100-80gb-sxm", epochs=0.5, **LORA).steps == 125
    assert estimate("llama-3.1-8b", "a100-80gb-sxm", epochs=2.5, **LORA).steps == 625


def test_prices() -> None:
    """A number, a provider and a quote are taken as they are; without one, a real quote in the middle, and a note."""
    job = dict(LORA, epochs=1)
    by_number = estimate("llama-3.1-8b", "a40", price=2.0, **job)
    assert by_number.cost_usd == pytest.approx(2.0 * by_number.gpu_hours)
    assert by_number.provenance.price is None
    assert estimate("llama-3.1-8b", "a40", price=0, **job).cost_usd == 0

    seller = quotes("a40", market="on_demand")[0].provider
    by_provider = estimate("llama-3.1-8b", "a40", price=seller, **job)
    assert by_provider.provenance.price is not None
    assert by_provider.provenance.price.provider == seller

    middle = median_quote("a40")
    unsaid = estimate("llama-3.1-8b", "a40", **job)
    assert unsaid.provenance.price == middle
    assert unsaid.usd_per_gpu_hour == middle.usd_per_gpu_hour
    assert any("median" in note and middle.provider in note for note in unsaid.notes)

    mine = PriceQuote(provider="cellar", gpu="a40", usd_per_gpu_hour=0.11, date="2026-01")
    assert estimate("llama-3.1-8b", "a40", price=mine, **job).cost_usd == pytest.approx(0.11 * unsaid.gpu_hours)


def test_no_price_is_not_an_error_but_a_note() -> None:
    """No one in the catalogue rents out this one: the rest of the estimate stands, the cost is NaN."""
    gpu = next(g for g in ("k80", "p100-12gb-pcie", "rtx-2080-ti") if not quotes(g, market="on_demand"))
    e = estimate("qwen2.5-0.5b", gpu, **dict(LORA, micro_batch_size=1, sequence_length=64))
    assert math.isnan(e.cost_usd)
    assert e.hours > 0
    assert any("price" in note and gpu in note for note in e.notes)
    with pytest.raises(NoPriceError, match="price="):
        estimate("qwen2.5-0.5b", gpu, **LORA, market="spot", on_oom="report")
