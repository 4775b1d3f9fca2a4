"""Input that cannot be used: one error of ours, in one line, that names the field, the value and what to do."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moecost
from moecost import Calibration, Estimate, GPUSpec, Job, MeasuredRun, ModelSpec, PriceQuote, estimate
from moecost.advice import remedies
from moecost.errors import (
    DoesNotFitError,
    InvalidInputError,
    MoECostError,
    NoPriceError,
    UnknownNameError,
)
from moecost.resolution import resolve

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

BASE: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "a100-80gb-sxm", "method": "lora", "sequence_length": 512}
NAN, INF = float("nan"), float("inf")
LONGEST_MESSAGE = 2000
# What a reader can do with a message: a remedy in words of ours or of pydantic's.
REMEDY = re.compile(
    r"did you mean|should (be|have)|must|use |give |leave|try |is missing|is not a field|pass |without quotes|choose"
    r"|unable to parse|lists all|it has |name it|Known:|on_unknown=|cannot be read",
    re.IGNORECASE,
)


def refusal(error: type[MoECostError] = MoECostError, **fields: Any) -> str:
    """The message with which a job is refused, as it is made or as it is estimated; checked for its form."""
    with pytest.raises(error) as caught:
        estimate(Job(**(BASE | fields)))
    assert isinstance(caught.value, MoECostError)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) <= LONGEST_MESSAGE
    assert not re.search(r"pydantic|validation error|Traceback|lax-or-strict|constrained-|\[type=", text), text
    assert REMEDY.search(text), text
    return text


def attempt(**fields: Any) -> Estimate | MoECostError:
    """What a job comes to: an estimate, or the error with which it is refused."""
    try:
        return estimate(Job(**fields))
    except MoECostError as error:
        return error


# ------------------------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("model", "lama-3.1-8b", "llama-3.1-8b"),
        ("model", "mistralai/Mixtral-8x7B-v0.2", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpu", "a4O", "a40"),
        ("gpu", "H1000", "H100"),
        ("dataset", "math-14", "math-14k"),
        ("software", "hf-pef", "hf-peft"),
        ("calibration", "hf-peft-2023", "hf-peft-2024"),
        ("method", "qlra", "qlora"),
        ("optimizer", "adam", "adamw"),
        ("weight_dtype", "nf4dq", "nf4-dq"),
        ("compute_dtype", "bfloat", "bf16"),
    ],
)
def test_unknown_names_get_the_nearest(field: str, value: str, nearest: str) -> None:
    text = refusal(**{field: value})
    assert repr(value) in text
    if field != "compute_dtype":  # "bfloat" is near to nothing: all are listed
        assert "did you mean" in text
    assert nearest in text


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("attention", "flashy", "flash"),
        ("gradient_checkpointing", "some", "selective"),
        ("padding", "shortest", "longest"),
        ("market", "auction", "spot"),
        ("on_oom", "ignore", "report"),
        ("offload", "tape", "nvme"),
        ("cuda_graphs", "all", "partial"),
        ("moe_dispatch", "pigeon", "alltoall"),
    ],
)
def test_unknown_choices_get_all_there_are(field: str, value: str, known: str) -> None:
    text = refusal(InvalidInputError, **{field: value})
    assert field in text
    assert repr(value) in text
    assert known in text


@pytest.mark.parametrize(
    ("field", "nearest"),
    [("lora_rnk", "lora_rank"), ("seq_length", "sequence_length"), ("batch_size", "micro_batch_size"), ("gpus", "gpu")],
)
def test_unknown_fields_get_the_nearest(field: str, nearest: str) -> None:
    text = refusal(InvalidInputError, **{field: 8})
    assert field in text
    assert nearest in text


def test_fields_that_are_missing_are_named() -> None:
    with pytest.raises(InvalidInputError, match="model is missing; gpu is missing"):
        Job()
    with pytest.raises(InvalidInputError, match="gpu is missing"):
        estimate("llama-3.1-8b")
    with pytest.raises(InvalidInputError, match="sequence_length is missing: give it, or a dataset"):
        Job(model="llama-3.1-8b", gpu="a40")


def test_a_field_named_self_is_no_field() -> None:
    """Python's own argument of the same name must not get in the way."""
    assert "self" in refusal(InvalidInputError, **{"self": 1})


def test_all_that_is_wrong_is_said_at_once() -> None:
    text = refusal(InvalidInputError, lora_rank=0, epochs=-1, optimiser="adamw")
    assert all(name in text for name in ("lora_rank", "epochs", "optimiser"))


# ------------------------------------------------------------------------------------------------ numbers

WHOLE = (
    "num_gpus", "gpus_per_node", "num_queries", "sequence_length", "lora_rank", "micro_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "num_experts_per_tok", "tensor_parallel_size",
    "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size", "virtual_pipeline_size",
    "expert_tensor_parallel_size", "shard_group_size",
)  # fmt: skip
NO_WHOLE_NUMBER: tuple[Any, ...] = (-1, 0, 1.5, NAN, INF, -INF, True, "4", "many", [4], {}, (), 10**30, 1j)


@pytest.mark.parametrize("value", NO_WHOLE_NUMBER, ids=repr)
@pytest.mark.parametrize("field", WHOLE)
def test_whole_numbers(field: str, value: Any) -> None:
    text = refusal(InvalidInputError, **{field: value})
    assert text.startswith(field)
    assert repr(value)[:12] in text


@pytest.mark.parametrize("value", [-1, 4, 1.5, NAN, INF, True, "1", [1]], ids=repr)
def test_zero_stage(value: Any) -> None:
    assert refusal(InvalidInputError, zero_stage=value).startswith("zero_stage")


@pytest.mark.parametrize("value", [-1, 0, NAN, INF, -INF, 1e300, True, "3", "all", [1], {}], ids=repr)
@pytest.mark.parametrize("field", ["epochs", "capacity_factor"])
def test_real_numbers(field: str, value: Any) -> None:
    assert refusal(InvalidInputError, **{field: value}).startswith(field)


def test_an_epoch_so_short_that_nothing_is_done() -> None:
    """A run of no steps costs nothing and tells nothing: refused, or one step."""
    e = attempt(**BASE, epochs=1e-12)
    assert e.steps >= 1 if isinstance(e, Estimate) else "epochs" in str(e)


@pytest.mark.parametrize("value", [-0.01, NAN, INF, 1e300, True, [1], {}, b"1"], ids=repr)
def test_price(value: Any) -> None:
    assert refusal(InvalidInputError, price=value).startswith("price")


TEXTS = (
    "padding", "method", "weight_dtype", "compute_dtype", "optimizer", "attention", "gradient_checkpointing",
    "moe_dispatch", "cuda_graphs", "fused_kernels", "offload", "software", "market", "on_oom",
)  # fmt: skip


@pytest.mark.parametrize("value", [3, 1.5, NAN, ["x"], {"x": 1}, object()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("field", TEXTS)
def test_texts(field: str, value: Any) -> None:
    assert refusal(InvalidInputError, **{field: value}).startswith(field)


@pytest.mark.parametrize("value", [2, "maybe", [True], NAN], ids=repr)
@pytest.mark.parametrize("field", ["compile", "sequence_parallel", "forced_balance", "comm_overlap"])
def test_truth_values(field: str, value: Any) -> None:
    assert refusal(InvalidInputError, **{field: value}).startswith(field)


@pytest.mark.parametrize("value", [3, 1.5, True, [1], (), object()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("field", ["model", "gpu", "node", "dataset", "calibration", "model_overrides"])
def test_names_and_specs(field: str, value: Any) -> None:
    assert refusal(InvalidInputError, **{field: value}).startswith(field)


def test_every_field_of_a_job_is_tried_here() -> None:
    tried = {*WHOLE, *TEXTS, "zero_stage", "epochs", "capacity_factor", "density", "price", "compile",
             "sequence_parallel", "forced_balance", "comm_overlap", "model", "gpu", "node", "dataset", "calibration",
             "model_overrides", "lora_targets"}  # fmt: skip
    assert set(Job.model_fields) <= tried


def test_a_message_is_short_whatever_the_value() -> None:
    for field in ("method", "optimizer", "sequence_length", "model", "lora_targets", "padding"):
        refusal(InvalidInputError, **{field: [{"x": "y" * 100}] * 10_000})
    refusal(model="x" * 100_000)
    refusal(gpu="x" * 100_000)
    refusal(optimizer="x" * 100_000)


@pytest.mark.parametrize("value", ["", "\n", "\x00", "../../etc/passwd", "a" * 5000, "🦆", "nan", "None"])
@pytest.mark.parametrize("field", ["model", "gpu", "dataset", "software", "calibration", "price"])
def test_names_that_are_no_names(field: str, value: str) -> None:
    refusal(**{field: value})


# ------------------------------------------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "qlora", "weight_dtype": "bf16"}, ("qlora", "weight_dtype", "'bf16'", "lora")),
        ({"method": "full", "weight_dtype": "nf4"}, ("full", "weight_dtype", "'nf4'", "qlora")),
        ({"padding": "longest"}, ("padding", "dataset", "max_length")),
        ({"global_batch_size": 10, "micro_batch_size": 4}, ("global_batch_size=10", "micro_batch_size=4", "8")),
        (
            {"global_batch_size": 8, "micro_batch_size": 4, "gradient_accumulation_steps": 4},
            ("global_batch_size=8", "micro_batch_size=4", "gradient_accumulation_steps=4", "16"),
        ),
        ({"lora_targets": ["nothing", "at_all"]}, ("lora_targets", "nothing", "q_proj")),
        ({"lora_targets": []}, ("lora_targets",)),
        ({"lora_targets": ""}, ("lora_targets",)),
        ({"lora_targets": [3]}, ("lora_targets",)),
        ({"num_experts_per_tok": 2}, ("num_experts_per_tok=2", "no routed experts")),
        ({"model": "mixtral-8x7b", "num_experts_per_tok": 9}, ("num_experts_per_tok=9", "8 experts")),
        ({"model_overrides": {"num_hiden_layers": 4}}, ("num_hiden_layers", "model_overrides")),
        ({"model_overrides": {"num_hidden_layers": -4}}, ("num_hidden_layers", "-4")),
        ({"model": {}}, ("hidden_size", "missing")),
        ({"model": {"hidden_size": "wide"}}, ("hidden_size", "wide")),
        ({"model": {"model_type": "teapot"}}, ("teapot",)),
        ({"gpu": "a40", "compute_dtype": "fp8"}, ("fp8", "bf16")),
        ({"tensor_parallel_size": 3, "num_gpus": 3}, ("tensor_parallel_size=3", "attention heads", "2 or 4")),
        ({"price": "nobody"}, ("nobody", "aws", "price=")),
    ],
)
def test_contradictions(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    text = refusal(**fields)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("llama-3.1-8b", "experts"),  # a dense model
        ("llama-3.1-8b", ["experts"]),
        ("mixtral-8x7b", ["nothing"]),
    ],
)
def test_adapters_on_nothing_are_refused(model: str, targets: Any) -> None:
    assert "lora_targets" in refusal(InvalidInputError, model=model, lora_targets=targets, on_oom="report")


@pytest.mark.parametrize(
    ("targets", "least"),
    [
        (["attention", "experts"], 13_631_488 + 226_492_416),  # rank 16 on Mixtral: r (d_in + d_out) a matrix
        (["attention", "gate"], 13_631_488 + 2_101_248),
        (["q_proj", "experts"], 226_492_416),
        (["all-linear", "q_proj"], 13_631_488),
    ],
)
def test_keywords_in_a_list_of_targets_are_not_passed_over_in_silence(targets: list[str], least: int) -> None:
    """Either they count as what they stand for, or the list is refused; never a run that trains less than it says."""
    e = attempt(**(BASE | {"model": "mixtral-8x7b", "lora_targets": targets, "on_oom": "report"}))
    assert e.num_trainable_parameters >= least if isinstance(e, Estimate) else "lora_targets" in str(e)


def test_targets_that_match_nothing_beside_some_that_do_are_noted() -> None:
    e = estimate(Job(**BASE, lora_targets=["q_proj", "w1"]))
    assert any("w1" in note and "ignored" in note for note in e.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"global_batch_size": 6, "gradient_accumulation_steps": 4},
        {"global_batch_size": 1, "gradient_accumulation_steps": 4},
        {"global_batch_size": 256, "gradient_accumulation_steps": 2},  # 128 sequences do not fit
        {"global_batch_size": 7},
        {"global_batch_size": 64},
        {"global_batch_size": 4000, "num_queries": 1000},
    ],
    ids=str,
)
def test_the_global_batch_is_what_was_asked_for_or_refused(fields: dict[str, int]) -> None:
    e = attempt(**BASE, **fields)
    if isinstance(e, Estimate):
        assert e.global_batch_size == fields["global_batch_size"]
    else:
        assert re.search("batch|GiB", str(e))


@pytest.mark.parametrize("field", [{"lora_rank": 16}, {"lora_rank": 8}, {"lora_targets": "attention"}], ids=str)
def test_adapters_without_a_method_are_asked_for_one(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(field))}.*add method='lora'"):
        Job(model="llama-3.1-8b", gpu="a40", sequence_length=512, **field)


@pytest.mark.parametrize("field", [{"lora_rank": 8}, {"lora_targets": ["q_proj", "v_proj"]}], ids=str)
def test_adapters_beside_full_tuning_are_refused(field: dict[str, Any]) -> None:
    assert "method='full'" in refusal(InvalidInputError, method="full", **field)


def test_a_job_of_full_tuning_can_be_read_back() -> None:
    job = Job(**BASE | {"method": "full"})
    assert Job(**dict(job)) == job
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_a_slip_in_the_kernels_is_refused_and_unknown_kernels_are_noted() -> None:
    assert "did you mean 'liger'" in refusal(InvalidInputError, fused_kernels="ligr")
    assert "did you mean 'chunked-ce'" in refusal(InvalidInputError, fused_kernels="liger; chunked_ce")
    notes = estimate(Job(**BASE, fused_kernels="liger;transformer-engine")).notes
    assert any("transformer-engine are not known" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fsdp", "zero_stage=3"), ("deepspeed", "zero_stage"), ("liger", "fused_kernels='liger'"),
        ("bf16", "compute_dtype"), ("fp16", "compute_dtype"), ("batch_size", "micro_batch_size"),
        ("per_device_train_batch_size", "micro_batch_size"), ("num_train_epochs", "epochs"),
        ("load_in_4bit", "method='qlora'"), ("max_seq_length", "sequence_length"), ("packing", "padding='packed'"),
        ("learning_rate", "neither time nor memory"), ("Torch-Dtype", "compute_dtype"), ("tp", "tensor_parallel_size"),
    ],
)  # fmt: skip
def test_names_of_other_tools_lead_to_ours(name: str, hint: str) -> None:
    text = refusal(InvalidInputError, **{name: 1})
    assert f"{name} is not a field; " in text
    assert hint in text


def test_hints_name_fields_that_are_there() -> None:
    for name, hint in Job.NAMES_ELSEWHERE.items():
        assert name not in Job.model_fields
        field = re.match(r"use (\w+)", hint)
        assert hint.startswith("leave it out") or (field and field[1] in Job.model_fields), hint


@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj; v_proj", " q_proj , v_proj,"])
def test_targets_as_text(text: str) -> None:
    assert Job(**BASE, lora_targets=text).lora_targets == ("q_proj", "v_proj")


def test_a_price_as_text_is_a_number() -> None:
    assert Job(**BASE, price="2.5").price == 2.5
    assert "is not a price" in refusal(InvalidInputError, price="-1")
    assert "is not a price" in refusal(InvalidInputError, price="nan")


@pytest.mark.parametrize("field", ["model", "gpu"])
def test_none_is_missing(field: str) -> None:
    text = refusal(InvalidInputError, **{field: None})
    assert text.startswith(f"{field}: it is missing; give ")
    assert text.count(";") == 1


def test_articles() -> None:
    assert "is not an optimizer" in refusal(InvalidInputError, optimizer="adamx")
    assert "is not a weight format" in refusal(InvalidInputError, weight_dtype="bf61")


def test_sequences_beyond_the_positions_of_a_model_are_noted() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
              "vocab_size": 100, "max_position_embeddings": 512, "name": "tiny"}  # fmt: skip
    for tokens, said in ((512, False), (513, True)):
        notes = estimate(Job(**BASE | {"model": config, "sequence_length": tokens})).notes
        assert any("longer than the 512 positions of tiny" in note for note in notes) is said


# ------------------------------------------------------------------------------------------------ does not fit


def test_a_job_that_does_not_fit_says_by_how_much_and_what_to_try() -> None:
    text = refusal(DoesNotFitError, model="mixtral-8x7b", gpu="a40", method="full")
    assert re.search(r"needs \d+\.\d GiB", text)
    assert "44.4" in text  # usable memory of an A40 as its driver reports it
    assert "qlora" in text
    assert "on_oom='report'" in text


def test_a_batch_that_does_not_fit_says_which_does() -> None:
    text = refusal(DoesNotFitError, micro_batch_size=10_000)
    found = re.search(r"micro_batch_size=(\d+) or less", text)
    assert found
    best = int(found[1])
    assert estimate(Job(**BASE, micro_batch_size=best)).fits
    refusal(DoesNotFitError, micro_batch_size=best + 1)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"model": "mixtral-8x7b", "gpu": "a100-40gb-pcie", "method": "qlora"}, {"gradient_checkpointing": "full"}),
        ({"model": "llama-3.1-8b", "gpu": "rtx-4090", "method": "lora"}, {"gradient_checkpointing": "full"}),
        ({"model": "llama-3.1-8b", "gpu": "a40"}, {"method": "lora"}),
        ({"model": "llama-3.1-8b", "gpu": "t4", "method": "lora", "micro_batch_size": 64},
         {"gradient_checkpointing": "full", "method": "qlora"}),
        ({"model": "llama-3.1-8b", "gpu": "a100", "method": "lora", "micro_batch_size": 64},
         {"gradient_checkpointing": "full"}),
        ({"model": "llama-3.1-8b", "gpu": "a100", "method": "lora", "sequence_length": 4096,
          "gradient_checkpointing": "full", "num_gpus": 2, "zero_stage": 0, "lora_rank": 512}, {"zero_stage": 3}),
        ({"model": "llama-3.1-8b", "gpu": "a100", "method": "lora", "lora_rank": 4096}, {"lora_rank": 64}),
        ({"model": "deepseek-v3", "gpu": "h100", "method": "qlora"},
         {"gradient_checkpointing": "full", "num_gpus": 8, "zero_stage": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_advice_says_fits_does(fields: dict[str, Any], remedy: dict[str, Any]) -> None:
    job = {"sequence_length": 1024} | fields
    with pytest.raises(DoesNotFitError) as caught:
        estimate(Job(**job))
    said = " and ".join(f"{name}={value!r}" for name, value in remedy.items())
    found = re.search(rf"[,;:] {said} fits (\d+)", str(caught.value))
    assert found, str(caught.value)
    assert estimate(Job(**job | {"micro_batch_size": None} | remedy)).max_micro_batch_size == int(found[1])


def test_advice_that_adds_to_other_advice_fits_more() -> None:
    job = Job(model="mixtral-8x7b", gpu="a100-40gb-pcie", method="qlora", sequence_length=1024)
    found = remedies(resolve(job))
    assert 1 <= len(found) <= 3
    for i, remedy in enumerate(found):
        for other in found[:i]:
            assert not other.changes.items() <= remedy.changes.items() or remedy.batch > other.batch


def test_a_batch_that_two_fields_ask_for_can_be_left_open() -> None:
    job = {"model": "llama-3.1-8b", "gpu": "a40", "method": "lora", "sequence_length": 1024, "global_batch_size": 64}
    with pytest.raises(DoesNotFitError, match="leave gradient_accumulation_steps out"):
        estimate(Job(**job, gradient_accumulation_steps=1))
    assert estimate(Job(**job)).fits


def test_no_advice_where_none_helps() -> None:
    with pytest.raises(DoesNotFitError, match="use a GPU with more memory"):
        estimate("deepseek-v3", "t4", method="qlora", sequence_length=1024)


def test_a_report_of_what_does_not_fit() -> None:
    e = estimate(Job(**BASE | {"model": "mixtral-8x7b", "method": "full", "on_oom": "report"}))
    assert not e.fits
    assert e.max_micro_batch_size == 0
    assert e.micro_batch_size == 1
    assert e.queries_per_second > 0
    assert e.memory.device_gib > e.memory.usable_gib
    assert any("does not fit" in note for note in e.notes)


@pytest.mark.parametrize(
    "field",
    ["num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size"],
)
def test_what_is_not_modelled_says_so_or_is_modelled(field: str) -> None:
    """Several GPUs: an estimate for them, or a refusal that names the field; never the figures of one GPU."""
    e = attempt(**(BASE | {"model": "mixtral-8x7b", "num_gpus": 8, "on_oom": "report", field: 8}))
    assert e.num_gpus == 8 if isinstance(e, Estimate) else re.search("num_gpus|parallel_size", str(e))


# ------------------------------------------------------------------------------------------------ prices and files


def test_a_provider_without_a_quote_gets_the_quotes_there_are() -> None:
    text = refusal(NoPriceError, gpu="a40", model="qwen2.5-0.5b", price="aws")
    assert "'aws'" in text
    assert "cudo" in text
    assert "price=" in text


def test_a_quote_without_a_price() -> None:
    with pytest.raises(ValueError, match="usd_per"):
        PriceQuote(provider="me", gpu="a40", date="2026-01")


GPU_FILE = """\
name: {name}
marketing_name: My GPU
vendor: NVIDIA
architecture: Ampere
num_sms: {{value: {sms}, source: sheet}}
memory_label_gb: {{value: 48, source: sheet}}
bandwidth_gb_per_s: {{value: {bandwidth}, source: {source}}}
peak_tflops_dense:
  bf16: {{value: 149.7, source: sheet}}
{more}
sources:
  sheet: {{title: My sheet, date: 2026-01}}
"""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sms": -84}, ("num_sms", "-84")),
        ({"sms": "many"}, ("num_sms", "many")),
        ({"bandwidth": "1e400"}, ("bandwidth_gb_per_s",)),
        ({"bandwidth": 0}, ("bandwidth_gb_per_s", "0")),
        ({"source": "hearsay"}, ("hearsay",)),
        ({"more": "num_smx: {value: 3, source: sheet}"}, ("num_smx", "num_sms")),
        ({"more": "name: twice"}, ("name", "twice")),
        ({"more": "notes: [unclosed"}, ("line",)),
        ({"more": "notes: !!python/object:os.system x"}, ("tag",)),
    ],
    ids=str,
)
def test_a_gpu_file_with_errors(tmp_path: Path, wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    path = tmp_path / "mine.yaml"
    good = {"name": "mine", "sms": 84, "bandwidth": 696, "source": "sheet", "more": ""}
    path.write_text(GPU_FILE.format(**good))
    assert estimate(Job(**(BASE | {"gpu": path, "on_oom": "report", "price": 1.0}))).gpu == "mine"
    path.write_text(GPU_FILE.format(**(good | wrong)))
    with pytest.raises(InvalidInputError) as caught:
        estimate(Job(**(BASE | {"gpu": path})))
    for word in ("mine.yaml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("empty",)),
        ("- model\n- gpu\n", ("fields",)),
        ("model: llama-3.1-8b\n", ("gpu is missing",)),
        ("1: 2\n", ("1 is not a field",)),
        ("self: 2\n", ("self is not a field",)),
        ("model: llama-3.1-8b\ngpu: a40\nsequence_length: long\n", ("sequence_length", "long")),
        ("model: llama-3.1-8b\ngpu: a40\nsequence_length: 512\nlora_rnk: 8\n", ("lora_rnk", "lora_rank")),
        ("model: [unclosed\n", ("not valid YAML",)),
    ],
)
def test_a_job_file_with_errors(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        Job.from_yaml(path)
    for word in ("job.yaml", *words):
        assert word in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"
    for call in (lambda: Job.from_yaml(gone), lambda: GPUSpec.load(gone), lambda: Calibration.load(gone)):
        with pytest.raises(InvalidInputError, match=r"gone\.yaml.*No such file"):
            call()
    refusal(InvalidInputError, model=tmp_path / "gone.json")
    refusal(InvalidInputError, dataset=tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ("coefficients", "missing")),
        ({"coefficients": {"gemm_efficiency": 9}}, ("coefficients",)),
        ({"coefficient": 3}, ("coefficient",)),
    ],
)
def test_a_calibration_with_errors(tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    """From a file, and made by hand."""
    import yaml

    fields = {"name": "mine", "software": "hf-peft", "date": "2026-01-01"} | fields
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(InvalidInputError) as caught:
        Calibration.load(path)
    assert all(word in str(caught.value) for word in ("mine.yaml", *words))
    with pytest.raises(MoECostError):
        Calibration(**fields)


def test_a_measured_run_with_errors() -> None:
    job = Job(**BASE)
    for fields, word in (
        ({"job": job}, "nothing was measured"),
        ({"job": job, "step_seconds": -1}, "step_seconds"),
        ({"job": job, "step_seconds": NAN}, "step_seconds"),
        ({"job": job, "step_secs": 1}, "step_seconds"),
        ({"job": job, "peak_memory_gib": 3, "memory_kind": "guess"}, "memory_kind"),
        ({"job": {"model": "llama-3.1-8b", "gpu": "a40"}, "step_seconds": 1}, "sequence_length"),
        ({"step_seconds": 1}, "job is missing"),
    ):
        with pytest.raises(InvalidInputError, match=word):
            MeasuredRun(**fields)


# ------------------------------------------------------------------------------------------------ other calls


def test_a_job_takes_no_further_arguments() -> None:
    with pytest.raises(InvalidInputError, match="put them into the job"):
        estimate(Job(**BASE), "a40")
    with pytest.raises(InvalidInputError, match="put them into the job"):
        estimate(Job(**BASE), lora_rank=8)


def test_validation_by_pydantics_own_names_gives_our_error() -> None:
    with pytest.raises(InvalidInputError, match="lora_rank"):
        Job.model_validate(BASE | {"lora_rank": 0})
    with pytest.raises(InvalidInputError, match="lora_rank"):
        Job.model_validate_json('{"model": "phi-2", "gpu": "a40", "sequence_length": 8, "lora_rank": 0}')


@pytest.mark.parametrize(
    ("field", "level", "word"),
    [
        ("nosuch", 0.8, "nosuch"),
        ("fits", 0.8, "fits"),
        ("step.nosuch", 0.8, "step.nosuch"),
        ("", 0.8, "figure"),
        ("hours", 0.0, "level"),
        ("hours", 1.0, "level"),
        ("hours", -3, "level"),
        ("hours", NAN, "level"),
        ("hours", "wide", "level"),
        (None, 0.8, "None"),
    ],
)
def test_an_interval_of_nothing(field: Any, level: Any, word: str) -> None:
    e = estimate(Job(**BASE))
    with pytest.raises(InvalidInputError, match=word):
        e.interval(field, level)


def test_an_interval_at_the_very_edge() -> None:
    """The largest level below 1 gives a wide interval, no NaN and no warning."""
    low, high = estimate(Job(**BASE)).interval("hours", 1 - 2**-53)
    assert 0 <= low < high


def test_unknown_profiles_and_calibrations_are_key_errors_that_can_be_read() -> None:
    with pytest.raises(UnknownNameError, match="unknown software profile 'x'") as caught:
        moecost.SoftwareProfile.load("x")
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith("unknown")


def test_a_spec_in_a_job_survives_json() -> None:
    job = Job(model=ModelSpec.load("mixtral-8x7b"), gpu=GPUSpec.load("a40"), sequence_length=512, on_oom="report")
    back = Job.model_validate_json(job.model_dump_json())
    assert estimate(back).step == estimate(job).step


def test_equal_calibrations_have_equal_hashes() -> None:
    one = Calibration.load("hf-peft-2024")
    two = Calibration.model_validate(one.model_dump())
    assert one == two
    assert hash(one) == hash(two)


# ------------------------------------------------------------------------------------------------ fuzz

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.binary(max_size=10)
    | st.sampled_from(["a40", "mixtral-8x7b", "qlora", "nf4", "longest", "math-14k", "full", "none", "auto"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(sorted(Job.model_fields)) | st.text(max_size=20)


@settings(max_examples=400)
@given(st.dictionaries(names, junk, max_size=8), st.booleans())
def test_a_job_of_anything(fields: dict[str, Any], on_a_base: bool) -> None:
    fields = (BASE | fields) if on_a_base else fields
    begin = time.perf_counter()
    with contextlib.suppress(MoECostError):
        Job(**fields)
    assert time.perf_counter() - begin < 1


plausible: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["mixtral-8x7b", "phi-2", "blackmamba-2.8b", "gpt-oss-20b", "nosuch"]),
    "gpu": st.sampled_from(["a40", "h100", "t4", "k80", "mi300x", "tpu-v5e", "gaudi3", "p5.48xlarge", "nosuch"]),
    "method": st.sampled_from(["full", "lora", "qlora", "dora"]),
    "num_gpus": st.sampled_from([1, 1, 2, 8, 64, 2**20]),
    "zero_stage": st.none() | st.integers(0, 3),
    "tensor_parallel_size": st.sampled_from([1, 2, 3, 8, 2**20]),
    "pipeline_parallel_size": st.sampled_from([1, 2, 3, 8, 2**20]),
    "expert_parallel_size": st.sampled_from([1, 2, 3, 8, 2**20]),
    "context_parallel_size": st.sampled_from([1, 2, 3, 8, 2**20]),
    "moe_dispatch": st.none() | st.sampled_from(["alltoall", "allgather", "deepep", "hybridep"]),
    "capacity_factor": st.none() | st.floats(1e-3, 1e4),
    "cuda_graphs": st.none() | st.sampled_from(["none", "partial", "full"]),
    "fused_kernels": st.none() | st.sampled_from(["liger", "foak;scattermoe", "unknown"]),
    "node": st.none() | st.sampled_from(["dgx-h100", "p5.48xlarge", "nosuch"]),
    "attention": st.none() | st.sampled_from(["flash", "sdpa", "eager"]),
    "sequence_length": st.integers(1, 10**8),
    "micro_batch_size": st.none() | st.integers(1, 2**24),
    "global_batch_size": st.none() | st.integers(1, 2**40),
    "gradient_accumulation_steps": st.none() | st.integers(1, 2**20),
    "num_queries": st.none() | st.integers(1, 2**40),
    "epochs": st.floats(1e-300, 1e6),
    "dataset": st.none() | st.sampled_from(["math-14k", "commonsense-15k"]),
    "padding": st.none() | st.sampled_from(["longest", "max_length", "packed"]),
    "lora_rank": st.integers(1, 65536),
    "lora_targets": st.sampled_from(["all-linear", "attention", "experts"]) | st.lists(st.text(max_size=8), max_size=3),
    "weight_dtype": st.none() | st.sampled_from(["bf16", "fp32", "nf4", "int8", "fp8", "mxfp4"]),
    "compute_dtype": st.none() | st.sampled_from(["bf16", "fp16", "fp32", "tf32", "fp8", "nvfp4"]),
    "optimizer": st.sampled_from(["adamw", "adafactor", "sgd", "muon", "paged_adamw8bit"]),
    "num_experts_per_tok": st.none() | st.integers(1, 300),
    "model_overrides": st.none() | st.dictionaries(st.sampled_from(["num_hidden_layers", "x"]), st.integers(-1, 99)),
    "gradient_checkpointing": st.none() | st.booleans() | st.just("selective"),
    "price": st.none() | st.floats(0, 1e6) | st.sampled_from(["aws", "cudo", "x"]),
    "market": st.sampled_from(["on_demand", "spot", "reserved"]),
    "on_oom": st.sampled_from(["raise", "report"]),
    "offload": st.sampled_from(["none", "none", "optimizer"]),
    "software": st.sampled_from(moecost.software_profiles()),
}


@st.composite
def in_range(draw: st.DrawFn) -> dict[str, Any]:
    """A sound job in which up to five fields are anything in range: about half of them can be estimated."""
    sound = {"model": "mixtral-8x7b", "gpu": "h100", "method": "qlora", "sequence_length": 512, "on_oom": "report"}
    keys = draw(st.lists(st.sampled_from(sorted(plausible)), max_size=5, unique=True))
    return sound | {key: draw(plausible[key]) for key in keys}


@settings(max_examples=400)
@given(in_range())
def test_an_estimate_of_anything_in_range(fields: dict[str, Any]) -> None:
    begin = time.perf_counter()
    e = attempt(**fields)
    assert str(e)
    if isinstance(e, Estimate):
        assert e.queries_per_second > 0
        assert e.memory.device_gib > 0
        assert e.step.seconds > 0
        assert fields.get("on_oom") == "report" or e.fits
    assert time.perf_counter() - begin < 1
