"""Sweeps: the very figures of single estimates, in the order of the product; files, workers, and what is refused."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run

from moecost import DatasetSpec, GPUSpec, Job, MoECostError, Sweep, estimate, sweep, sweep_to_parquet
from moecost.cli import axis_values
from moecost.errors import InvalidInputError, UnknownNameError, WorkerError
from moecost.schedule import Asked, largest_divisor, schedule
from moecost.sweep_axes import num_rows, read_axes, split
from moecost.sweep_figures import FIGURES

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

EXACT = 1e-12
RATES = (
    "queries_per_second",
    "tokens_per_second",
    "padded_tokens_per_second",
    "step_seconds",
    "hours",
    "cost_usd",
)
SMALL: dict[str, Any] = {
    "models": ["mixtral-8x7b", "llama-3.1-8b"],
    "gpus": ["a40", "h100-80gb-sxm"],
    "method": ["full", "qlora"],
    "lora_rank": [8, 64],
    "sequence_length": [512, 1000],
    "micro_batch_size": [1, 2, 64],
    "num_gpus": [1, 2, 8],
}


def rows_of(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields of each job, by the definition: the product, adapters left out of full tuning."""
    values = {{"models": "model", "gpus": "gpu"}.get(k, k): v if isinstance(v, list) else [v] for k, v in axes.items()}
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    for row in rows:
        if row.get("method", "full") == "full":
            row.pop("lora_rank", None)
            row.pop("lora_targets", None)
    return rows


def figures(job: dict[str, Any]) -> dict[str, float]:
    """By `estimate`, named as the columns of a sweep."""
    e = estimate(**(job | {"on_oom": "report"}))
    found = {name: getattr(e, name) for name in FIGURES if hasattr(e, name)}
    found["step_seconds"] = e.step.seconds
    return found | {name: getattr(e.memory, name) for name in ("allocated_gib", "reserved_gib", "device_gib")}


def assert_same_as_estimates(axes: dict[str, Any]) -> Sweep:
    s = sweep(**axes)
    rows = rows_of(axes)
    assert len(s) == len(rows)
    for i, job in enumerate(rows):
        try:
            want = figures(job)
        except MoECostError:
            assert not s["fits"][i], job
            assert s["reason"][i]
            assert all(math.isnan(s[name][i]) for name in FIGURES if FIGURES[name] is np.float64)
            continue
        assert s["fits"][i] == (want["micro_batch_size"] <= want["max_micro_batch_size"]), job
        assert bool(s["reason"][i]) != bool(s["fits"][i])
        for name, value in want.items():
            if name in RATES and not s["fits"][i] and job.get("on_oom") != "report":
                value = math.nan
            assert s[name][i] == pytest.approx(value, rel=EXACT, abs=0, nan_ok=True), (name, job)
    return s


def assert_equal(found: Any, want: Sweep) -> None:
    """Of a sweep or table: texts and whole numbers equal, all else to the last digits."""
    for name in want.columns:
        column = np.asarray(found[name])
        if want[name].dtype.kind == "f":
            np.testing.assert_allclose(column, want[name], rtol=EXACT, err_msg=name)
        else:
            assert column.tolist() == want[name].tolist(), name


# ------------------------------------------------------------------------------------------------ the same numbers
def some(*values: Any, most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True)


NUMBERS = {
    "micro_batch_size": some(1, 3, 8, 40, 1000, None),
    "gradient_accumulation_steps": some(None, 1, 4, 7),
    "num_queries": some(1, 17, 1000, 5000, None),
    "lora_rank": some(1, 8, 64, 300),
    "num_gpus": some(1, 2, 4, 6, 8, 32, most=3),
    "epochs": some(0.01, 1, 2.5, 3),
    "price": some(None, 0.0, 0.79, 2, "lambda"),
    "global_batch_size": some(None, 8, 24, 64, 1000),
}
CHOICES = {
    "software": some("hf-peft", "hf-peft-2024", "hf-v5-grouped", "megatron", "deepspeed", "torchtune"),
    "zero_stage": some(None, 0, 1, 2, 3),
    "tensor_parallel_size": some(1, 2, 4),
    "pipeline_parallel_size": some(1, 2),
    "expert_parallel_size": some(1, 2, 4),
    "context_parallel_size": some(1, 2),
    "sequence_parallel": some(None, True),
    "gradient_checkpointing": some(None, "none", "selective", "full", False),
    "attention": some(None, "flash", "eager"),
    "optimizer": some("adamw", "adamw8bit", "sgd"),
    "offload": some("none", "optimizer", "parameters"),
    "num_experts_per_tok": some(None, 1, 8),
    "lora_targets": some(("attention",), ("all-linear",), ("experts", "q_proj")),
    "weight_dtype": some(None, "bf16", "nf4", "fp32"),
    "gpus_per_node": some(None, 2),
    "on_oom": some("raise", "report"),
}


@st.composite
def axes(draw: st.DrawFn) -> dict[str, Any]:
    """A few axes of a few values in any order, contradictions among them."""
    found: dict[str, Any] = {
        "models": draw(some("mixtral-8x7b", "qwen3-30b-a3b", "blackmamba-2.8b", "llama-3.1-8b", "deepseek-v2-lite")),
        "gpus": draw(some("a40", "rtx-4090", "h100-80gb-sxm", "b200", "p4d.24xlarge", "gb200-nvl72")),
        "method": draw(some("full", "lora", "qlora", "dora")),
    }
    if draw(st.booleans()):
        found["dataset"] = draw(some("math-14k", "commonsense-15k", most=1))
        found["padding"] = draw(some(None, "longest", "max_length", "packed"))
        found["sequence_length"] = draw(some(None, 100, 512, 1024))
    else:
        found["sequence_length"] = draw(some(8, 512, 1000, 4096))
        found["padding"] = draw(some(None, "max_length", "packed", "longest", most=1))
    every = NUMBERS | CHOICES
    names = draw(st.lists(st.sampled_from(sorted(every)), min_size=1, max_size=5, unique=True))
    found |= {name: draw(every[name]) for name in names}
    order = draw(st.permutations(sorted(found)))
    kept: dict[str, Any] = {}
    rows = 1
    for name in order:  # no more than a few dozen rows
        kept[name] = found[name] if rows * len(found[name]) <= 32 else found[name][:1]
        rows *= len(kept[name])
    return kept


@given(axes())
@settings(max_examples=150)
def test_each_row_is_the_estimate_of_its_job(axes: dict[str, Any]) -> None:
    assert_same_as_estimates(axes)


LAYOUTS: list[dict[str, Any]] = [
    SMALL,
    SMALL | {"num_queries": [17, 5000], "gradient_accumulation_steps": [1, 3], "num_gpus": [2, 4], "models": "phi-2"},
    {
        "models": "mixtral-8x7b",
        "gpus": ["a40", "h100-80gb-sxm"],
        "method": "qlora",
        "global_batch_size": [None, 16, 24],
        "gradient_accumulation_steps": [None, 1, 3],
        "micro_batch_size": [None, 1, 4],
        "num_gpus": [1, 2, 8],
        "sequence_length": [512, 1000],
    },
    {
        "models": ["qwen3-30b-a3b"],
        "gpus": ["a40", "h100-80gb-sxm"],
        "method": "qlora",
        "dataset": ["math-14k", "commonsense-15k"],
        "padding": ["longest", "packed", "max_length"],
        "sequence_length": [None, 256, 1000],
        "micro_batch_size": [None, 1, 5],
        "num_gpus": [1, 4],
        "lora_rank": [8, 64],
    },
    {
        "models": "mixtral-8x7b",
        "gpus": ["h100-80gb-sxm"],
        "tensor_parallel_size": [1, 2, 4],
        "pipeline_parallel_size": [1, 2],
        "expert_parallel_size": [1, 2],
        "zero_stage": [None, 0, 3],
        "gradient_accumulation_steps": [1, 4],
        "sequence_length": [512],
        "micro_batch_size": [1, 3],
        "num_gpus": [2, 8, 16],
    },
]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_whole_products_are_the_estimates_of_their_jobs(axes: dict[str, Any]) -> None:
    """Of what people sweep: batches, lengths with and without a data set, layouts. Some rows fit, some do not."""
    s = assert_same_as_estimates(axes)
    assert s["fits"].any()
    assert not s["fits"].all()


def test_large_groups_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sweep(**SMALL)
    monkeypatch.setattr("moecost.sweep_blocks.ROWS_AT_ONCE", 5)
    parts = sweep(**SMALL)
    assert_equal(parts, whole)


def test_specs_and_files_are_values_of_an_axis(tmp_path: Path) -> None:
    lengths = tmp_path / "mine.csv"
    lengths.write_text("length,count\n100,5\n700,2\n")
    config = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
              "vocab_size": 32000, "name": "tiny"}  # fmt: skip
    tight = GPUSpec.load("a40").model_copy(update={"memory_usable_gib": 1.0, "name": "tight"})
    s = assert_same_as_estimates(
        {
            "models": [config, "phi-2"],
            "gpus": [tight, "l4"],
            "dataset": [str(lengths), DatasetSpec.load("math-14k")],
            "micro_batch_size": [1, 4],
        }
    )
    assert s["model"][0] == "tiny"
    assert s["gpu"][0] == "tight"


# ------------------------------------------------------------------------------------------------ rows and columns
def test_rows_are_in_the_order_of_the_product() -> None:
    axes = {"micro_batch_size": [2, 1], "gpus": ["h100", "a40"], "sequence_length": [512, 256, 128], "models": "phi-2"}
    s = sweep(**axes)
    rows = rows_of(axes)
    assert len(s) == len(rows) == 12
    for name in ("micro_batch_size", "gpu", "sequence_length", "model"):
        assert s[name].tolist() == [row[name] for row in rows]
    assert s.row(7) == {name: s[name][7] for name in s.columns}
    assert s.row(-1) == s.row(11)
    assert s.job(4) == Job(**rows[4])
    assert s.estimate(4).step.seconds == pytest.approx(s["step_seconds"][4], rel=EXACT)


def test_columns_are_found_by_other_names() -> None:
    s = sweep(models="phi-2", gpus=["a40", "l4"], sequence_length=512, micro_batch_size=1, zero_stage=[None, 3])
    assert s["models"].tolist() == s["model"].tolist()
    np.testing.assert_array_equal(s["memory.device_gib"], s["device_gib"])
    np.testing.assert_array_equal(s["step.seconds"], s["step_seconds"])
    np.testing.assert_array_equal(s["zero_stage"], [math.nan, 3, math.nan, 3])  # None among numbers
    assert tuple(s) == s.columns
    with pytest.raises(UnknownNameError, match=r"cost_us.*'cost_usd'"):
        s["cost_us"]


def test_a_sweep_is_frozen() -> None:
    s = sweep(models="phi-2", gpus="a40", sequence_length=512)
    with pytest.raises(AttributeError):
        s.axes = {}  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        s["cost_usd"][0] = 0.0


def test_rows_that_do_not_fit_have_memory_and_no_rates() -> None:
    s = sweep(models="mixtral-8x7b", gpus="a40", method="qlora", sequence_length=1024, micro_batch_size=[1, 100_000])
    assert s["fits"].tolist() == [True, False]
    assert s["reason"].tolist() == ["", "does not fit"]
    assert all(np.isnan(s[name]).tolist() == [False, True] for name in RATES)
    assert s["device_gib"][1] > s["device_gib"][0] > 0
    assert not s.estimate(1).fits
    assert s.why(0) == ""
    assert "needs" in s.why(1)
    reported = sweep(models="mixtral-8x7b", gpus="a40", method="qlora", sequence_length=1024,
                     micro_batch_size=[1, 100_000], on_oom="report")  # fmt: skip
    assert np.isfinite(reported["cost_usd"]).all()
    assert reported["fits"].tolist() == [True, False]


def test_contradictions_say_why() -> None:
    s = sweep(models="phi-2", gpus="h100", sequence_length=512, num_gpus=[2, 3], tensor_parallel_size=2,
              micro_batch_size=1, global_batch_size=[2, 4], gradient_accumulation_steps=[2, 4])  # fmt: skip
    assert s["fits"].tolist() == [True, False, False, True, False, False, False, False]
    assert "num_gpus=3 is no multiple" in s["reason"][4]
    assert s["reason"][1].startswith("global_batch_size")
    assert "give two of the three" in s.why(1)
    assert s.why(4) == s["reason"][4]
    assert np.isnan(s["device_gib"][1])


def test_the_best_row() -> None:
    s = sweep(**SMALL, num_queries=1000)
    cheapest, fastest = s.best(), s.best("queries_per_second")
    assert s["cost_usd"][cheapest] == np.nanmin(s["cost_usd"])
    assert s["queries_per_second"][fastest] == np.nanmax(s["queries_per_second"])
    with pytest.raises(InvalidInputError, match="no row that fits"):
        sweep(models="mixtral-8x7b", gpus="l4", sequence_length=512).best()
    with pytest.raises(InvalidInputError, match="by='gpu'"):
        s.best("gpu")
    for i in (len(s), -len(s) - 1, True, 1.0, "1"):
        with pytest.raises(InvalidInputError, match="is none of the"):
            s.row(i)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ what is refused
OK: dict[str, Any] = {"models": "mixtral-8x7b", "gpus": "a40", "sequence_length": 512}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"models": []}, "models is an axis without values"),
        ({"models": ["mixtral-8x7b", "mixtrl-8x7b"]}, "models: 'mixtrl-8x7b': unknown model.*'mixtral-8x7b'"),
        ({"models": None}, "models: None .*it is missing"),
        ({"gpus": ["a40", "h1000"]}, "gpus: 'h1000': unknown GPU"),
        ({"gpus": 3}, "gpus: 3 cannot be a value"),
        ({"micro_batch": [1]}, "micro_batch is no axis; did you mean micro_batch_size"),
        ({"fsdp": [1]}, "fsdp is no axis; use zero_stage=3"),
        ({"sequence_length": [512, "1024"]}, "sequence_length: '1024' .*without quotes"),
        ({"sequence_length": [512, 0]}, "sequence_length: 0 .*greater than or equal to 1"),
        ({"sequence_length": None}, "sequence_length is missing"),
        ({"sequence_length": range(10**12)}, "sequence_length has 1,000,000,000,000 values"),
        ({"lora_rank": [8, 16]}, "lora_rank=8 is given without a method"),
        ({"method": ["lora", "lorra"]}, "method: 'lorra' .*'lora'"),
        ({"micro_batch_size": {1, 2}}, "micro_batch_size is a set"),
        ({"micro_batch_size": iter([1, 2])}, "micro_batch_size is .*as a list"),
        ({"micro_batch_size": [1, True]}, "micro_batch_size: True .*not a whole number"),
        ({"dataset": ["nope.csv"]}, "dataset: 'nope.csv': .*no such file"),
        ({"software": ["hf-peft", "hf-pft"]}, "software: 'hf-pft'.*'hf-peft'"),
        ({"price": [1.0, math.nan]}, "price: nan .*is not a price"),
        ({"epochs": [math.inf]}, "epochs: inf .*finite"),
        ({"node": "nowhere"}, "node: 'nowhere': unknown node"),
    ],
)
def test_an_axis_that_no_job_could_have_is_refused(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        sweep(**(OK | axes))


def test_the_plural_is_asked_for() -> None:
    with pytest.raises(InvalidInputError, match="models is missing; write models= in place of model="):
        sweep(model="phi-2", gpus="a40", sequence_length=512)
    with pytest.raises(InvalidInputError, match="gpus is missing"):
        sweep(models="phi-2", sequence_length=512)


def test_more_rows_than_memory_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(InvalidInputError, match=r"1,000,000,000 rows.*sweep_to_parquet"):
        sweep(**OK, micro_batch_size=range(1, 1001), num_queries=range(1, 1_000_001))


# ------------------------------------------------------------------------------------------------ batches
@given(st.integers(1, 5000), st.integers(1, 1200))
def test_largest_divisor(number: int, most: int) -> None:
    found = float(largest_divisor(number, at_most=most))
    assert found == max(d for d in range(1, min(number, most) + 1) if number % d == 0)


@given(st.integers(1, 10**6), st.integers(1, 5000), st.integers(1, 100))
def test_a_schedule_holds_each_row_once(rows: int, batch: int, accumulation: int) -> None:
    s = schedule(rows=float(rows), micro_batch_size=batch, accumulation=accumulation)
    assert s.full * batch + s.rest == rows
    assert 0 <= s.rest < batch
    assert s.micro_batches == -(-rows // batch)
    assert s.steps == -(-s.micro_batches // accumulation)
    assert s.mean(float(batch), float(s.rest)) * s.micro_batches == pytest.approx(rows)


def test_what_is_asked_of_batches() -> None:
    """By hand: 24 sequences on 4 GPUs, 6 each; 5 fit, of which 3 divides 6, in 2 micro-batches."""
    asked = Asked(None, None, 24, data_parallel=4)
    assert asked.is_whole
    assert asked.micro_batch(largest=5.0, rows=1000.0) == 3
    assert asked.accumulation(3) == 2
    assert not Asked(None, None, 26, data_parallel=4).is_whole
    assert not Asked(2, 2, 24, data_parallel=4).is_whole
    assert Asked(3, 2, 24, data_parallel=4).is_whole
    assert Asked(None, None, None, data_parallel=1).micro_batch(largest=10.0**6, rows=10.0**6) == 1024
    assert Asked(None, None, None, data_parallel=4).micro_batch(largest=100.0, rows=10.0) == 3


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 20))
def test_parts_are_the_rows_of_the_whole(sizes: list[int], most: int) -> None:
    axes = {str(i): tuple(range(n)) for i, n in enumerate(sizes)}
    parts = list(split(axes, most))
    assert all(num_rows(part) <= most for part in parts)
    rows = [row for part in parts for row in itertools.product(*part.values())]
    assert rows == list(itertools.product(*axes.values()))


# ------------------------------------------------------------------------------------------------ files
def test_pandas_parquet_and_csv_hold_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("moecost.sweep_files.ROWS_AT_ONCE", 100)
    s = sweep(**SMALL, zero_stage=[None, 3])
    frame = s.to_pandas()
    s.to_parquet(tmp_path / "rows.parquet")
    s.to_csv(tmp_path / "rows.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.csv", "rows.parquet"]
    csv = pandas.read_csv(tmp_path / "rows.csv", keep_default_na=False, na_values=dict.fromkeys(s.columns[5:], ""))
    csv["reason"] = csv["reason"].fillna("")
    for table in (frame, pandas.read_parquet(tmp_path / "rows.parquet"), csv):
        assert tuple(table.columns) == s.columns
        assert len(table) == len(s)
        assert_equal(table, s)
    assert frame["gpu"].dtype == "category"


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    s = sweep(**OK)
    with pytest.raises(InvalidInputError, match=r"rows.parquet: cannot be written"):
        s.to_parquet(tmp_path / "no-such-folder" / "rows.parquet")
    with pytest.raises(InvalidInputError, match=r"rows.csv: cannot be written"):
        s.to_csv(tmp_path / "no-such-folder" / "rows.csv")


def _concatenated(paths: list[Path]) -> Any:
    import pandas

    return pandas.concat([pandas.read_parquet(path).astype({"reason": str}) for path in paths], ignore_index=True)


def test_parts_are_the_sweep(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    paths = sweep_to_parquet(tmp_path / "parts", rows_of_a_part=50, progress=False, **SMALL)
    table, whole = _concatenated(paths), sweep(**SMALL)
    assert len(paths) >= len(whole) / 50
    assert_equal(table, whole)


def test_a_full_disk_leaves_whole_parts_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder, write, written = tmp_path / "parts", parquet.ParquetWriter.write_table, []

    def full_after_two(self: Any, *args: Any, **kwargs: Any) -> None:
        write(self, *args, **kwargs)
        written.append(1)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full_after_two)
    with pytest.raises(InvalidInputError, match="No space left on device") as raised:
        sweep_to_parquet(folder, rows_of_a_part=72, **SMALL)
    assert "of 4 parts 2 are missing: part-000002.parquet, part-000003.parquet" in str(raised.value)
    assert sorted(p.name for p in folder.iterdir()) == ["part-000000.parquet", "part-000001.parquet", "sweep.json"]
    assert len(_concatenated(sorted(folder.glob("part-*")))) == 144
    before = {path: path.stat().st_mtime_ns for path in folder.glob("part-*")}

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", write)
    with pytest.raises(InvalidInputError, match="holds another sweep"):
        sweep_to_parquet(folder, rows_of_a_part=72, **SMALL | {"num_gpus": [1, 2, 4]})
    paths = sweep_to_parquet(folder, rows_of_a_part=72, **SMALL)
    assert len(_concatenated(paths)) == len(sweep(**SMALL))
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())


def test_a_folder_with_parts_of_unknown_origin_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "part-000000.parquet").write_text("mine")
    with pytest.raises(InvalidInputError, match="holds another sweep"):
        sweep_to_parquet(tmp_path, **OK)
    assert (tmp_path / "part-000000.parquet").read_text() == "mine"
    with pytest.raises(InvalidInputError, match="rows_of_a_part=0"):
        sweep_to_parquet(tmp_path, rows_of_a_part=0, **OK)


# ------------------------------------------------------------------------------------------------ workers
@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecost.sweeping.ROWS_OF_A_TASK", (20, 40))


@pytest.mark.usefixtures("small_tasks")
def test_a_process_pool_gives_the_same(tmp_path: Path) -> None:
    axes = SMALL | {"tensor_parallel_size": [1, 2]}
    with ProcessPoolExecutor(2) as pool:
        assert_equal(sweep(executor=pool, **axes), sweep(**axes))
        pytest.importorskip("pyarrow")
        paths = sweep_to_parquet(tmp_path, rows_of_a_part=100, executor=pool, **axes)
    assert_equal(_concatenated(paths), sweep(**axes))


@pytest.mark.usefixtures("small_tasks")
def test_a_dask_cluster_gives_the_same() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        assert_equal(sweep(executor=executor, **SMALL), sweep(**SMALL))


class Failing(Executor):
    """Computes the first tasks, then breaks."""

    def __init__(self, good: int) -> None:
        self.good, self.futures = good, []  # type: tuple[int, list[Future[Any]]]

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if len(self.futures) <= self.good:
            future.set_result(fn(*args, **kwargs))
        elif len(self.futures) == self.good + 1:
            future.set_exception(RuntimeError("the machine is gone"))
        return future


@pytest.mark.usefixtures("small_tasks")
def test_a_worker_that_fails_is_one_clear_error() -> None:
    executor = Failing(good=2)
    with pytest.raises(WorkerError, match="RuntimeError: the machine is gone") as raised:
        sweep(executor=executor, **SMALL)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert len(executor.futures) > 4
    assert all(f.cancelled() for f in executor.futures[3:])


# ------------------------------------------------------------------------------------------------ cost
def test_a_sweep_is_quick() -> None:
    """The aim is a million rows a second in one process; a quarter of it leaves room for a busy machine."""
    axes = {
        "models": ["mixtral-8x7b", "qwen3-30b-a3b"],
        "gpus": ["a40", "h100-80gb-sxm"],
        "method": ["lora", "qlora"],
        "sequence_length": list(range(256, 8193, 256)),
        "micro_batch_size": list(range(1, 65)),
        "num_gpus": [1, 2, 4, 8],
        "lora_rank": [8, 16, 32, 64],
    }

    def rate() -> float:
        start = perf_counter()
        return len(sweep(**axes)) / (perf_counter() - start)

    assert max(rate() for _ in range(3)) > 250_000


TEN_MILLION = """
import resource
from moecost import sweep
s = sweep(models=["mixtral-8x7b", "qwen3-30b-a3b"], gpus=["a40", "h100-80gb-sxm"], method=["lora", "qlora"],
          sequence_length=range(256, 8193, 128), micro_batch_size=range(1, 65), num_gpus=[1, 2, 4, 8],
          lora_rank=[8, 16, 32, 64], num_queries=[1000, 5000], epochs=[1, 2, 3, 4, 5], price=[0.5, 1])
print(len(s), s["gpu"][-1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_ten_million_rows_take_less_than_two_gib() -> None:
    run = subprocess.run([sys.executable, "-c", TEN_MILLION], capture_output=True, text=True, check=True)
    rows, gpu, gib = run.stdout.split()
    assert int(rows) >= 10_000_000
    assert gpu == "h100-80gb-sxm"
    assert float(gib) < 2.0


def test_importing_it_loads_no_extra() -> None:
    code = (
        "import sys, moecost; moecost.sweep(models='phi-2', gpus='a40', sequence_length=64);"
        "print(*sorted({'pandas', 'pyarrow', 'rich', 'distributed', 'scipy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
    assert run.stderr == ""


# ------------------------------------------------------------------------------------------------ for people
def test_a_sweep_shows_itself() -> None:
    s = sweep(**SMALL, num_queries=1000)
    text = str(s)
    assert f"SWEEP: {len(s)} rows" in text
    assert f"{s['fits'].sum()} rows of {len(s)} fit" in text
    assert "cheapest" in text
    assert "fastest" in text
    assert "does not fit" in text
    assert max(map(len, text.splitlines())) <= 100
    html = s._repr_html_()
    assert html.startswith("<div")
    assert "cheapest" in html
    nothing = str(sweep(models="mixtral-8x7b", gpus="l4", sequence_length=512))
    assert "0 rows of 1 fit" in nothing
    assert "cheapest" not in nothing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_shown_to_people_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    def shown(progress: bool | None, stderr: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stderr)
        sweep(**SMALL, progress=progress)
        return stderr.getvalue()

    assert shown(None, io.StringIO()) == ""
    assert shown(False, Terminal()) == ""
    assert shown(None, Terminal()) == ""  # done in no time
    rows = str(num_rows(read_axes(SMALL)))
    assert rows in shown(True, Terminal())
    monkeypatch.setattr("moecost.progress.SHORT_S", 0.0)
    assert rows in shown(None, Terminal())
    assert shown(None, io.StringIO()) == ""


# ------------------------------------------------------------------------------------------------ command line
@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"model": "mixtral-8x7b", "gpu": "a40", "method": "qlora", "sequence_length": 512,
                                "num_queries": 1000, "price": 0.79}))  # fmt: skip
    return path


def test_the_command_writes_all_rows(job_file: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    for name in ("rows.parquet", "rows.csv"):
        out = tmp_path / name
        status, shown, said = run("sweep", str(job_file), "--axis", "micro-batch-size=1,2,4,100000",
                                  "--axis", "gpu=a40,h100", "-o", str(out))  # fmt: skip
        assert (status, said) == (0, "")
        assert "SWEEP: 8 rows" in shown
        table = pandas.read_parquet(out) if name.endswith("parquet") else pandas.read_csv(out)
        assert table["gpu"].tolist() == ["a40", "h100"] * 4
        assert table["price"].tolist() == [0.79] * 8
        one = estimate("mixtral-8x7b", "h100", method="qlora", sequence_length=512, num_queries=1000, price=0.79,
                       micro_batch_size=2)  # fmt: skip
        assert table["cost_usd"][3] == pytest.approx(one.cost_usd, rel=EXACT)


def test_the_command_prints_json_and_says_by_its_status_whether_any_row_fits(job_file: Path) -> None:
    status, out, _ = run("sweep", str(job_file), "--axis", "lora_rank=8,16", "--axis", "lora_targets=attention,w1;w2",
                         "--set", "micro_batch_size=1", "--json")  # fmt: skip
    found = json.loads(out)
    assert status == 0
    assert found["rows"] == found["fits"] == 4
    assert found["axes"]["lora_targets"] == ["attention", "w1;w2"]
    assert found["cheapest"]["cost_usd"] <= found["fastest"]["cost_usd"]
    status, out, _ = run("sweep", str(job_file), "--axis", "gpu=l4,t4", "--axis", "micro_batch_size=100000", "--json")
    assert status == 1
    assert json.loads(out)["reasons"] == {"does not fit": 2}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--axis", "gpu"], "write field=value,value"),
        (["--axis", "gpus=a40,nope"], "gpus: 'nope': unknown GPU"),
        (["--axis", "micro_batch=1"], "micro_batch is no axis; did you mean micro_batch_size"),
        (["--axis", "lora_rank=1,!!python/object:os.system x"], "lora_rank"),
        (["-o", "rows.xlsx"], "rows.xlsx"),
    ],
)
def test_the_command_refuses_bad_input(job_file: Path, args: list[str], message: str) -> None:
    status, out, said = run("sweep", str(job_file), *args)
    assert (status, out) == (2, "")
    assert message in said


def test_values_of_an_axis_on_the_command_line() -> None:
    assert axis_values("zero-stage=null,3") == ("zero_stage", [None, 3])
    assert axis_values("gpu=a40") == ("gpu", ["a40"])


def test_a_sweep_draws_a_line_for_each_value_of_its_other_axes() -> None:
    pytest.importorskip("matplotlib").use("agg")
    s = sweep(models=["mistral-7b"], gpus=["a40", "h100"], method="qlora", sequence_length=1024, num_queries=640,
              micro_batch_size=[1, 2, 4])  # fmt: skip
    ax = s.plot(x="micro_batch_size", y="queries_per_second")
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in ax.get_lines()}
    rates = s["queries_per_second"].reshape(2, 3)
    assert {name: drawn[name].tolist() for name in ("a40", "h100")} == {"a40": [*rates[0]], "h100": [*rates[1]]}
