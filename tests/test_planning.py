"""Plans: each figure is the estimate's, nothing tried beats the front, and whoever lost is told why."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moecost
from moecost import GPUSpec, MoECostError, PriceQuote, catalog, plan
from moecost.errors import InvalidInputError, NoPriceError, UnknownNameError
from moecost.plan_layouts import GPULayout, layouts, runs_all_kinds
from moecost.plan_offers import offers
from moecost.planning import Plan, PlanCandidate
from moecost.prices import PriceBook

EXACT = 1e-12
SMALL: dict[str, Any] = {"gpus": ["a40", "h100"], "methods": ["qlora", "lora"], "max_gpus": 8}
PEOPLE = "mistral-7b", "math-14k"


def quote(provider: str, gpu: str, usd: float, count: int = 1, market: Any = "on_demand") -> PriceQuote:
    return PriceQuote(usd_per_gpu_hour=usd, provider=provider, gpu=gpu, gpu_count=count, market=market)


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(*PEOPLE, **SMALL)


def with_figures(found: Plan) -> list[PlanCandidate]:
    return [c for c in (*found.front, *found.lost, *found.nearest.values()) if c.cost_usd is not None]


# ------------------------------------------------------------------------------------------- equal to estimates
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("mistral-7b", {"dataset": "math-14k", "gpus": ["a40", "h100", "t4", "b200"], "max_gpus": 16}),
        ("mixtral-8x7b", {"dataset": "math-14k", "gpus": ["a40", "h100"], "software": "hf-peft-2024", "max_gpus": 8}),
        ("mistral-7b", {"sequence_length": 777, "num_queries": 1001, "epochs": 2.5, "gpus": ["l40s", "p5.48xlarge"]}),
        ("mixtral-8x7b", {"sequence_length": 2048, "software": "megatron", "gpus": ["h100", "rtx-3090"]}),
        ("qwen3-30b-a3b", {"dataset": "math-14k", "software": "megatron-bridge", "gpus": ["b200", "a100-40gb-sxm"],
                           "methods": ["full", "lora"], "max_gpus": 32}),
        ("mistral-7b", {"dataset": "math-14k", "padding": "packed", "sequence_length": 4096, "gpus": ["h100", "a40"],
                        "gradient_checkpointing": ["none", "full"], "market": ["on_demand", "spot"]}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
def test_figures_are_those_of_estimate(model: str, fields: dict[str, Any]) -> None:
    found = plan(model, **fields)
    shown = with_figures(found)
    assert len(shown) > 2
    for c in shown:
        e = c.estimate()
        assert e.hours == pytest.approx(c.run_hours, rel=EXACT)
        assert e.queries_per_second == pytest.approx(c.queries_per_second, rel=EXACT)
        assert e.memory.device_gib == pytest.approx(c.device_gib, rel=EXACT)
        assert e.cost_usd * c.hours / c.run_hours == pytest.approx(c.cost_usd, rel=EXACT)
        assert e.global_batch_size == found.global_batch_size
        assert c.device_gib <= c.room_gib <= e.memory.usable_gib * 0.95 * (1 + EXACT)
    for c in (c for c in found.lost if c.status == "does not fit"):
        assert c.estimate().memory.device_gib == pytest.approx(c.device_gib, rel=EXACT)


@pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")
@settings(max_examples=8, deadline=None)
@given(
    rank=st.sampled_from([4, 64]),
    batch=st.sampled_from([8, 24, 48, 96]),
    software=st.sampled_from(["hf-peft", "megatron", "deepspeed", "unsloth"]),
    length=st.integers(64, 4096),
)
def test_any_candidate_is_the_estimate_of_its_job(rank: int, batch: int, software: str, length: int) -> None:
    found = plan(
        "olmoe-1b-7b",
        sequence_length=length,
        global_batch_size=batch,
        software=software,
        lora_rank=rank,
        gpus=["h100", "l4"],
        methods=["lora", "full"],
        price=2.0,
    )
    search = found._searched()
    rng = np.random.default_rng(length)
    for i in rng.choice(np.flatnonzero(~np.isnan(search.table.columns["hours"])), 12):
        c = search.candidate(int(i))
        e = c.estimate()
        assert e.hours == pytest.approx(c.run_hours, rel=EXACT)
        assert e.memory.device_gib == pytest.approx(c.device_gib, rel=EXACT)


# ------------------------------------------------------------------------------------------------- the front
def test_nothing_that_was_tried_beats_the_front(small: Plan) -> None:
    table = small.to_pandas()
    for c in small.front:
        better = (table.hours <= c.hours) & (table.cost_usd <= c.cost_usd)
        strictly = better & ((table.hours < c.hours) | (table.cost_usd < c.cost_usd))
        assert not strictly.any()
    usd, hours = [c.cost_usd for c in small.front], [c.hours for c in small.front]
    assert usd == sorted(usd)
    assert hours == sorted(hours, reverse=True)
    assert small.best is small.front[0]
    assert small.fastest is small.front[-1]
    assert usd[0] == table.cost_usd.min()
    assert hours[-1] == table.hours.min()
    assert (table.status == "front").sum() == len(small) == len(small.front)
    assert small.counts["dominated"] == (table.status == "dominated").sum()


def test_every_loser_is_told_why(small: Plan) -> None:
    for c in small.lost:
        assert c.reason
        if c.status == "dominated":
            assert " is $" in c.reason or "as fast" in c.reason
            assert any(f.label in c.reason and f.cost_usd <= c.cost_usd and f.hours <= c.hours for f in small.front)
    best = {(c.gpu, c.method) for c in (*small.front, *small.lost)}
    assert best == set(itertools.product(["a40", "h100-80gb-sxm"], ["qlora", "lora"]))
    assert small.why(gpu="A40").startswith(("dominated: ", "on the front: "))
    assert "aws" in small.why(gpu="h100", provider="aws")


def test_limits_are_told_by_how_much_they_are_missed() -> None:
    free = plan(*PEOPLE, **SMALL)
    limited = plan(*PEOPLE, budget_usd=free.best.cost_usd * 1.2, deadline_hours=free.best.hours * 1.01, **SMALL)
    assert limited.best == free.best
    table = limited.to_pandas()
    assert (table.cost_usd[table.status == "over budget"] > limited.budget_usd).all()
    assert (table.hours[table.status == "too late"] > limited.deadline_hours).all()
    assert all(c.cost_usd <= limited.budget_usd and c.hours <= limited.deadline_hours for c in limited.front)
    dear = table[table.status == "over budget"].sort_values("cost_usd").iloc[0]
    said = limited.why(status="over budget")
    assert f"over budget by ${dear.cost_usd - limited.budget_usd:,.2f}" in said


def test_nothing_will_do() -> None:
    found = plan(*PEOPLE, budget_usd=0.01, deadline_hours=0.03, **SMALL)
    assert not found
    assert len(found) == 0
    assert found.best is None
    assert found.fastest is None
    table = found.to_pandas()
    assert found.nearest["budget_usd"].cost_usd == table.cost_usd.min()
    assert found.nearest["deadline_hours"].hours == table.hours.min()
    assert "over budget by $" in found.nearest["budget_usd"].reason
    assert "too late by" in found.nearest["deadline_hours"].reason
    assert "NOTHING WILL DO" in str(found)
    assert "over budget by $" in str(found)
    # the budget alone: the cheapest of those in time
    slow = plan(*PEOPLE, budget_usd=0.01, deadline_hours=table.hours.max(), **SMALL)
    assert slow.nearest["budget_usd"].cost_usd == table.cost_usd.min()


def test_no_memory_will_do() -> None:
    found = plan("mixtral-8x22b", sequence_length=512, methods="full", gpus=["t4", "l4"], max_gpus=2)
    assert not found
    assert set(found.nearest) == {"memory"}
    nearest = found.nearest["memory"]
    assert nearest.status == "does not fit"
    assert nearest.device_gib > nearest.room_gib
    assert f"needs {nearest.device_gib:.1f} of {nearest.room_gib:.1f} GiB" in nearest.reason
    assert found.to_pandas().eval("device_gib / room_gib").min() == nearest.device_gib / nearest.room_gib


@settings(max_examples=6, deadline=None)
@given(budget=st.floats(0.5, 50.0), more=st.floats(1.0, 10.0))
def test_a_larger_budget_never_makes_anything_slower(budget: float, more: float) -> None:
    few, many = plan(*PEOPLE, budget_usd=budget, **SMALL), plan(*PEOPLE, budget_usd=budget * more, **SMALL)
    assert len(few) <= len(many)
    if few:
        assert many.best.hours <= few.best.hours
        assert many.best.cost_usd <= few.best.cost_usd
        assert many.fastest.hours <= few.fastest.hours


@pytest.mark.parametrize("software", ["hf-peft", "megatron"])
def test_more_gpus_never_make_the_front_worse(software: str) -> None:
    fields: dict[str, Any] = {"gpus": ["a40", "h100"], "methods": "lora", "software": software}
    plans = [plan("mixtral-8x7b", sequence_length=1024, max_gpus=n, **fields) for n in (4, 8, 16)]
    plans.append(plan("mixtral-8x7b", sequence_length=1024, max_gpus=16, **fields | {"gpus": ["a40", "h100", "b200"]}))
    for few, many in itertools.pairwise(plans):
        for c in few.front:
            assert any(m.hours <= c.hours and m.cost_usd <= c.cost_usd for m in many.front)


def test_headroom_stays_free() -> None:
    tight, roomy = (plan(*PEOPLE, min_memory_headroom=share, **SMALL) for share in (0.0, 0.5))
    usable = {name: GPUSpec.load(name).memory_usable_bytes / 2**30 for name in ("a40", "h100-80gb-sxm")}
    assert all(c.device_gib <= 0.5 * usable[c.gpu] for c in roomy.front)
    assert any(c.device_gib > 0.5 * usable[c.gpu] for c in tight.front)
    assert (
        "50 % kept free"
        in plan(*PEOPLE, min_memory_headroom=0.5, methods="full", gpus="a40", max_gpus=1).lost[0].reason
    )


# ------------------------------------------------------------------------------------------------------ money
def test_machines_are_rented_whole() -> None:
    book = PriceBook((quote("whole", "h100-80gb-sxm", 1.0, 8), quote("single", "h100-80gb-sxm", 5.0)))
    found = plan(*PEOPLE, gpus="h100", methods="qlora", num_gpus=[1, 8, 16], prices=book)
    table = found.to_pandas()
    one = table[(table.num_gpus == 1) & (table.provider == "whole")].iloc[0]
    assert one.billed_gpus == 8
    assert one.cost_usd == pytest.approx(8.0 * one.hours, rel=EXACT)
    assert found.best.provider != "whole" or found.best.billed_gpus % 8 == 0
    said = plan(*PEOPLE, gpus="h100", methods="qlora", num_gpus=1, prices=PriceBook(book.quotes[:1])).best
    assert "8 GPUs are paid for, machines of 8 are rented whole" in said.reason
    assert said.estimate().usd_per_gpu_hour == pytest.approx(8.0)
    assert said.usd_per_gpu_hour == 1.0
    assert "rented whole" in said.job.price.notes


def test_offers_by_hand() -> None:
    quotes = [
        quote("machines", "a40", 2.0, 1), quote("machines", "a40", 1.5, 4), quote("machines", "a40", 1.6, 4),
        quote("by-the-gpu", "a40", 1.8), quote("by-the-gpu", "a40", 0.6, market="spot"),
    ]  # fmt: skip

    def found(num_gpus: int, *markets: Any) -> dict[str, tuple[int, float]]:
        of = offers(quotes, num_gpus=num_gpus, gpus_per_node=8, markets=markets or ("on_demand",))
        return {o.quote.provider: (o.billed_gpus, o.usd_per_hour) for o in of}

    assert found(1) == {"machines": (1, 2.0), "by-the-gpu": (1, 1.8)}
    assert found(2) == {
        "machines": (4, 6.0),
        "by-the-gpu": (2, 3.6),
    }  # a machine of 4 whole: single ones are not joined
    assert found(8) == {"by-the-gpu": (8, pytest.approx(14.4))}  # no machine of 8 is quoted
    assert found(2, "spot") == {"by-the-gpu": (2, 1.2)}


def test_providers_and_quotes() -> None:
    found = plan(*PEOPLE, providers=["AWS", "lambda"], **SMALL)
    assert {c.provider for c in with_figures(found)} <= {"aws", "lambda"}
    assert any(c.status == "no quote" or c.gpu == "h100-80gb-sxm" for c in (*found.front, *found.lost))
    a40 = [c for c in found.lost if c.gpu == "a40"]
    assert a40
    assert all(c.status == "no quote" and "aws or lambda (on_demand)" in c.reason for c in a40)
    every = plan(*PEOPLE, providers=["lambda"], methods="qlora", max_gpus=1)
    assert {c.gpu for c in (*every.front, *every.lost)} == {
        q.gpu for q in catalog.all_quotes() if q.provider == "lambda" and q.market == "on_demand"
    }
    assert any("have no quote of lambda (on_demand) and were not tried" in note for note in every.notes)


def test_an_instance_type_is_its_own_provider() -> None:
    found = plan(*PEOPLE, gpus="p5.48xlarge", methods="qlora", max_gpus=8)
    assert {c.job.price.instance_type for c in found.front} == {"p5.48xlarge"}
    assert {c.billed_gpus for c in found.front} == {8}
    assert found.best.estimate().gpu == "h100-80gb-sxm"


def test_a_gpu_of_ones_own() -> None:
    named = plan(*PEOPLE, gpus="a40", methods="qlora", max_gpus=2)
    assert plan(*PEOPLE, gpus=[GPUSpec.load("a40")], methods="qlora", max_gpus=2).best.hours == named.best.hours
    other = GPUSpec.load("a40").model_copy(update={"name": "mine"})
    unknown = plan(*PEOPLE, gpus=[other], methods="qlora", max_gpus=2)
    assert not unknown
    assert unknown.nearest["quotes"].reason == "no quote of any provider (on_demand) for mine"


def test_a_price_of_ones_own() -> None:
    found = plan(*PEOPLE, price=2.0, **SMALL)
    for c in found.front:
        assert c.cost_usd == pytest.approx(2.0 * c.num_gpus * c.hours, rel=EXACT)
    assert not any("days old" in note for note in found.notes)


def test_hours_and_energy_by_hand() -> None:
    plain = plan(*PEOPLE, gpus="a40", methods="qlora", max_gpus=1, epochs=3, grid_gco2_per_kwh=400)
    c, e = plain.best, plain.best.estimate()
    download_s = 2 * e.num_parameters / 0.5e9
    assert c.hours - c.run_hours == pytest.approx(download_s / 3600)
    assert c.energy_kwh == pytest.approx(300 * 0.8 * c.hours / 1000)  # an A40 is a board of 300 W
    assert c.co2e_kg == pytest.approx(c.energy_kwh * 0.4)
    own = {"evaluation_queries": 500, "download_bytes_per_s": 1e9, "power_share": 0.5}
    longer = plan(*PEOPLE, gpus="a40", methods="qlora", max_gpus=1, epochs=3, assumptions=own).best
    # of frozen weights the forward pass is one of two, without recomputation
    evaluation_s = 3 * 500 / c.queries_per_second / 2
    assert longer.hours - longer.run_hours == pytest.approx((download_s / 2 + evaluation_s) / 3600)
    assert longer.energy_kwh == pytest.approx(300 * 0.5 * longer.hours / 1000)
    assert longer.co2e_kg is None


def test_spot_runs_are_interrupted() -> None:
    """Daly's expected wall time, worked here from the plan's own parts."""
    book = PriceBook((quote("p", "h100-80gb-sxm", 1.0, 8, "spot"), quote("p", "h100-80gb-sxm", 2.0, 8)))
    fields: dict[str, Any] = {"gpus": "h100", "methods": "lora", "num_gpus": 16, "zero_stage": 0, "epochs": 20,
                              "prices": book, "micro_batch_size": 2}  # fmt: skip
    spot = plan(*PEOPLE, market="spot", assumptions={"machine_mtbf_hours": 4}, **fields).best
    calm = plan(*PEOPLE, **fields).best
    e = spot.estimate()
    mtbf = 4 * 3600 / 2  # two machines
    once = 60 + 2 * e.num_parameters / 0.5e9
    save = e.num_trainable_parameters * (4 + 8) / 1e9
    restart = 300 + once + save
    useful = spot.run_hours * 3600 - 60
    x = save / (2 * mtbf)
    tau = math.sqrt(2 * save * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save
    wall = mtbf * math.exp(restart / mtbf) * math.expm1((tau + save) / mtbf) * useful / tau
    assert spot.checkpoint_s == pytest.approx(tau, rel=1e-6)
    assert spot.hours * 3600 == pytest.approx(once + wall, rel=1e-6)
    assert spot.interruptions == pytest.approx(wall / mtbf, rel=1e-6)
    assert spot.run_hours == calm.run_hours
    assert spot.hours > calm.hours
    assert calm.interruptions == 0
    assert spot.cost_usd == pytest.approx(16 * spot.hours)
    both = plan(*PEOPLE, market=["on_demand", "spot"], assumptions={"machine_mtbf_hours": 4}, **fields)
    assert [c.market for c in both.front] == ["spot", "on_demand"]
    assert "an assumption" in str(both)
    assert "4 hours" in str(both)


def test_a_run_that_never_ends() -> None:
    book = PriceBook((quote("p", "h100-80gb-sxm", 1.0, 8, "spot"),))
    found = plan(*PEOPLE, gpus="h100", methods="lora", num_gpus=8, market="spot", prices=book,
                 assumptions={"machine_mtbf_hours": 1e-4})  # fmt: skip
    assert not found
    assert "never ends" in found.lost[0].reason


# ---------------------------------------------------------------------------------------------------- layouts
def shapes(model: str, software: str, **fields: Any) -> list[GPULayout]:
    asked = {"max_gpus": 64, "global_batch_size": 64, "given": {}, "pipelines": False} | fields
    return list(layouts(moecost.ModelSpec.load(model), software, **asked))


def test_layouts_of_a_stack() -> None:
    assert not runs_all_kinds("hf-peft")
    assert not runs_all_kinds("unsloth")
    assert runs_all_kinds("megatron")
    assert runs_all_kinds("nemo")
    assert runs_all_kinds("axlearn")
    plain = shapes("mixtral-8x7b", "hf-peft")
    assert {(s.num_gpus, s.zero_stage) for s in plain} == {(1, 0)} | set(
        itertools.product([2, 4, 8, 16, 32, 64], range(4))
    )
    assert all(s.data_parallel_size == s.num_gpus for s in plain)
    cut = shapes("mixtral-8x7b", "megatron")
    assert set(plain) <= set(cut)
    assert {s.tensor_parallel_size for s in cut} == {1, 2, 4, 8, 16}  # 32 heads
    assert {s.expert_parallel_size for s in cut} == {1, 2, 4, 8}  # 8 experts
    assert all(s.zero_stage < 2 for s in cut if s.tensor_parallel_size * s.expert_parallel_size > 1)
    assert {s.expert_parallel_size for s in shapes("mistral-7b", "megatron")} == {1}
    deep = shapes("mixtral-8x7b", "megatron", pipelines=True)
    assert {s.pipeline_parallel_size for s in deep} == {2, 4, 8, 16, 32}  # 32 layers
    assert all(s.zero_stage < 2 for s in deep)
    assert {s.num_gpus for s in shapes("mistral-7b", "hf-peft", global_batch_size=48)} == {
        1, 2, 3, 4, 6, 8, 12, 16, 24, 48,
    }  # fmt: skip


def test_pipelines_only_where_nothing_else_fits() -> None:
    table = plan("llama-2-70b", sequence_length=4096, methods="full", software="megatron", gpus=["a100-40gb-sxm"],
                 max_gpus=64).to_pandas()  # fmt: skip
    for _, some in table[table.num_gpus > 1].groupby("num_gpus"):
        flat = some[some.pipeline_parallel_size == 1]
        assert (flat.status == "does not fit").all() == (some.pipeline_parallel_size > 1).any()
    assert (table.pipeline_parallel_size > 1).any()


def test_products_are_cut_within_a_machine() -> None:
    table = plan("llama-2-70b", sequence_length=512, methods="lora", software="megatron", gpus=["rtx-3090"],
                 max_gpus=64).to_pandas()  # fmt: skip
    joined = moecost.NodeSpec.load(GPUSpec.load("rtx-3090").reference_node).gpus_per_node
    assert table.tensor_parallel_size.max() <= joined


def test_what_is_asked_for_is_all_that_is_tried() -> None:
    table = plan("mixtral-8x7b", sequence_length=512, methods="lora", gpus="h100", num_gpus=[4, 8], zero_stage=3,
                 tensor_parallel_size=2, micro_batch_size=[1, 4],
                 gradient_checkpointing=["none", "full"]).to_pandas()  # fmt: skip
    assert set(table.num_gpus) == {4, 8}
    assert set(table.zero_stage) == {3}
    assert set(table.tensor_parallel_size) == {2}
    assert set(table.micro_batch_size) <= {1, 4}
    assert set(table.gradient_checkpointing) == {"none", "full"}


def test_full_tuning_has_no_adapters() -> None:
    found = plan(*PEOPLE, gpus="b200", methods=["full", "lora"], lora_rank=64, max_gpus=1)
    ranks = {c.method: c.job.lora_rank for c in (*found.front, *found.lost)}
    assert ranks == {"full": 16, "lora": 64}


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"budget_usd": 0}, "budget_usd=0 must be a number above 0"),
        ({"budget_usd": -5}, "budget_usd=-5"),
        ({"budget_usd": math.nan}, "budget_usd=nan"),
        ({"budget_usd": "ten"}, "budget_usd='ten'"),
        ({"deadline_hours": 0}, "deadline_hours=0"),
        ({"deadline_hours": True}, "deadline_hours=True"),
        ({"gpus": ["a41"]}, "did you mean 'a40'"),
        ({"gpus": []}, "gpus is an axis without values"),
        ({"providers": []}, "providers=[] names none"),
        ({"providers": ["awz"]}, "did you mean 'aws'"),
        ({"providers": 3}, "providers=3"),
        ({"methods": []}, "method is an axis without values"),
        ({"methods": ["lorra"]}, "did you mean 'lora'"),
        ({"market": "spott"}, "market='spott' must be one of"),
        ({"market": []}, "market='' must be one of"),
        ({"market": 3}, "market=3"),
        ({"min_memory_headroom": 1.0}, "min_memory_headroom=1.0"),
        ({"min_memory_headroom": -0.1}, "min_memory_headroom=-0.1"),
        ({"max_gpus": 0}, "max_gpus=0"),
        ({"max_gpus": 2.5}, "max_gpus=2.5"),
        ({"price": 0}, "price=0"),
        ({"price": "aws"}, "providers=[...]"),
        ({"price": 1.0, "providers": ["aws"]}, "price is one for all GPUs"),
        ({"prices": "prices.csv"}, "moecost.prices.read"),
        ({"global_batch_size": [8, 16]}, "give one number"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is left to the plan"),
        ({"gpu": "a40"}, "give gpus=[...]"),
        ({"node": "p5.48xlarge"}, "node is left to the plan"),
        ({"num_gpus": 3}, "no layout on up to 64 GPUs has num_gpus=[3]"),
        ({"micro_batch_size": 3}, "micro_batch_size=[3]"),
        ({"num_gpus": 128}, "no layout on up to 64 GPUs has num_gpus=[128]"),
        ({"weight_dtype": "bf16"}, "method='qlora' holds quantized weights"),
        ({"expert_parallel_size": 3, "num_gpus": 6, "global_batch_size": 24, "lora_targets": "nothing"}, "nothing"),
        ({"assumptions": {"machine_mtbf_hours": 0}}, "machine_mtbf_hours"),
        ({"assumptions": {"mtbf": 1}}, "mtbf"),
        ({"grid_gco2_per_kwh": -1}, "grid_gco2_per_kwh"),
        ({"sequence_lenght": 5}, "sequence_length"),
        ({"dataset": None}, "sequence_length is missing"),
    ],
)  # fmt: skip
def test_bad_input(fields: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"dataset": "math-14k", "gpus": ["a40"], "methods": ["qlora"]} | fields
    with pytest.raises(MoECostError) as error:
        plan("mistral-7b", **asked)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, InvalidInputError | UnknownNameError)


def test_no_quotes_at_all() -> None:
    with pytest.raises(NoPriceError, match="no quote of lambda \\(spot\\)"):
        plan(*PEOPLE, providers="lambda", market="spot")


def test_what_a_gpu_cannot_run_is_told() -> None:
    found = plan("mistral-7b", sequence_length=512, gpus=["h100", "p100-16gb-pcie"], compute_dtype="fp8",
                 methods="lora", max_gpus=1)  # fmt: skip
    refused = [c for c in found.lost if c.status == "cannot be used"]
    assert [c.gpu for c in refused] == ["p100-16gb-pcie"]
    assert "fp8" in refused[0].reason
    assert "fp8" in found.why(gpu="p100-16gb-pcie")
    with pytest.raises(InvalidInputError, match="is no job"):
        refused[0].estimate()
    with pytest.raises(InvalidInputError, match="nothing was tried with gpu='a40'"):
        found.why(gpu="a40")
    with pytest.raises(UnknownNameError, match="column"):
        found.why(gpus="a40")


# -------------------------------------------------------------------------------------------- forms it comes in
def test_text_and_html(small: Plan) -> None:
    text = str(small)
    assert max(map(len, text.splitlines())) <= 100
    assert "FRONT" in text
    assert "LOST" in text
    assert "ASSUMED" in text
    assert small.best.provider in text
    html = small._repr_html_()
    assert html.startswith("<div")
    assert "mistral-7b" in html
    assert "<script" not in html


def test_json_and_pickle(small: Plan) -> None:
    again = Plan.model_validate_json(small.model_dump_json())
    assert again.front == small.front
    assert again.lost == small.lost
    assert str(again) == str(small)
    with pytest.raises(InvalidInputError, match="read from JSON"):
        again.to_pandas()
    copied = pickle.loads(pickle.dumps(small))
    assert copied.front == small.front
    assert copied.why(gpu="a40") == small.why(gpu="a40")
    with pytest.raises(Exception, match="frozen"):
        small.notes = ()  # type: ignore[misc]


def test_plot(small: Plan) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    ax = small.plot()
    assert ax.get_xlabel()
    assert ax.get_ylabel()


def test_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from moecost.cli import app

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["plan", *args])

    job = tmp_path / "job.yaml"
    job.write_text("{model: mistral-7b, gpu: t4, num_gpus: 2, dataset: math-14k, method: qlora, micro_batch_size: 2,"
                   " gradient_accumulation_steps: 4, price: 1}")  # fmt: skip
    done = run(str(job), "--gpus", "a40,h100", "--max-gpus", "8", "--budget", "100", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["global_batch_size"] == 16
    assert {c["method"] for c in found["front"]} == {"qlora"}
    assert {c["gpu"] for c in found["front"]} <= {"a40", "h100-80gb-sxm"}
    table = tmp_path / "prices.csv"
    table.write_text("gpu,gpu_count,market,usd_per_gpu_hour,provider\na40,1,on_demand,0.5,mine\n")
    priced = run("mistral-7b", "--dataset", "math-14k", "--prices", str(table), "--methods", "lora,qlora", "--json")
    assert {c["provider"] for c in json.loads(priced.stdout)["front"]} == {"mine"}
    nothing = run("mistral-7b", "--dataset", "math-14k", "--gpus", "a40", "--deadline", "0.001")
    assert nothing.exit_code == 1
    assert "NOTHING WILL DO" in nothing.stdout
    bad = run("mistral-7b", "--dataset", "math-14k", "--budget", "0")
    assert bad.exit_code == 2
    assert "budget_usd=0" in bad.stderr


def test_speed() -> None:
    """50 GPUs x 4 methods x layouts on up to 64 GPUs; measured 0.4 s on a core, the bound is for a busy machine."""
    gpus = [name for name in catalog.gpus() if GPUSpec.load(name).num_sms][:50]
    assert len(gpus) == 50
    plan("mistral-7b", "math-14k", gpus=gpus[:1])  # files are read once
    start = time.perf_counter()
    found = plan("mistral-7b", "math-14k", gpus=gpus, price=2.0)
    assert time.perf_counter() - start < 4.0
    assert sum(found.counts.values()) > 3000
