"""`Job`: a model, a GPU, data, a recipe, a layout and a price; what `estimate` is asked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from moecost import catalog
from moecost.architecture import ModelSpec
from moecost.calibration import Calibration
from moecost.checked import Checked
from moecost.dataset_spec import DatasetSpec
from moecost.errors import InvalidInputError, close_matches
from moecost.field_docs import Described
from moecost.specs import GPUSpec, Market, NodeSpec, PriceQuote
from moecost.storage import COMPUTE_BYTES, OPTIMIZERS, WEIGHT_FORMATS

MAX_TOKENS: Final = 100_000_000
MAX_BATCH: Final = 2**24

Method = Literal["full", "lora", "qlora", "dora", "sparse"]
Checkpointing = Literal["none", "selective", "full"]


def _one_of(kind: str, known: tuple[str, ...]) -> BeforeValidator:
    """A name out of a table, with the nearest names where it is none of them."""

    def check(value: Any) -> Any:
        if value is None or (isinstance(value, str) and value in known):
            return value
        near = close_matches(f"{value:.80}", known) if isinstance(value, str) else []
        article = "an" if kind[0] in "aeiou" else "a"
        raise ValueError(f"{value!r:.80} is not {article} {kind}; did you mean {', '.join(map(repr, near or known))}?")

    return BeforeValidator(check)


def _enum(*known: Any) -> WithJsonSchema:
    """The values that the JSON Schema names, where the type alone does not say them."""
    return WithJsonSchema({"enum": list(known)})


def _given(what: str, *types: type) -> BeforeValidator:
    """One of some types, and not empty."""

    def check(value: Any) -> Any:
        if value is None or (isinstance(value, types) and not isinstance(value, bool) and value != ""):
            return value
        raise ValueError(f"{value!r:.80} cannot be used; give {what}")

    return BeforeValidator(check)


def _whole(value: Any) -> Any:
    """Whole numbers only: 4 and 4.0, not 4.5, not '4', not True."""
    if isinstance(value, bool | str):
        raise ValueError(f"{value!r:.80} is not a whole number; write it without quotes")
    return value


def _real(value: Any) -> Any:
    """Numbers only: not '4', not True."""
    if isinstance(value, bool | str):
        raise ValueError(f"{value!r:.80} is not a number; write it without quotes")
    return value


def _price(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # no provider's name is a number
    what = "give $/GPU-hour from 0 to 1,000,000, a provider's name, or a PriceQuote"
    if isinstance(value, bool) or not isinstance(value, int | float | str | PriceQuote | dict | None):
        raise ValueError(f"{value!r:.80} is not a price; {what}")
    if value in ("", {}) or (isinstance(value, int | float) and not 0 <= value <= 1e6):
        raise ValueError(f"{value!r:.80} is not a price; {what}")
    return PriceQuote.model_validate(value) if isinstance(value, dict) else value


def _model_of_json(value: Any) -> Any:
    """A whole spec that went through JSON; other mappings are configs."""
    return ModelSpec.model_validate(value) if isinstance(value, dict) and {"name", "config"} <= value.keys() else value


def _spec_of_json(spec: type[BaseModel]) -> BeforeValidator:
    return BeforeValidator(lambda value: spec.model_validate(value) if isinstance(value, dict) else value)


def _checkpointing(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _targets(value: Any) -> Any:
    """Module names: a list, or text that a comma or semicolon divides."""
    if isinstance(value, str):
        return tuple(name for name in map(str.strip, re.split("[,;]", value)) if name)
    return tuple(value) if isinstance(value, list | tuple) else value


def _required(what: str) -> BeforeValidator:
    """A field that has no default: None is the same as leaving it out."""

    def check(value: Any) -> Any:
        if value is None:
            raise ValueError(f"it is missing; give {what}")
        return value

    return BeforeValidator(check)


Count = Annotated[int, Field(ge=1, le=2**40), BeforeValidator(_whole)]
Target = Annotated[str, Field(min_length=1, max_length=500)]
_TARGETS_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
)
Degree = Annotated[int, Field(ge=1, le=2**20), BeforeValidator(_whole)]


_ELSEWHERE: Final = {
    "use zero_stage=3 (2 for gradients and optimizer alone)": "fsdp fsdp2 sharding_strategy",
    "use zero_stage=0..3, and offload": "deepspeed zero zero_optimization",
    "use offload='optimizer' or 'parameters'": "cpu_offload fsdp_offload_params offload_optimizer offload_params",
    "use num_gpus: data parallel is what the other kinds leave of them":
        "ddp data_parallel data_parallel_size world_size nproc_per_node gpu_count dp",
    "use fused_kernels='liger'": "liger use_liger use_liger_kernel enable_liger_kernel",
    "use compute_dtype, and weight_dtype for how weights are held":
        "bf16 fp16 tf32 fp8 dtype torch_dtype mixed_precision precision",
    "use method='qlora', or weight_dtype": "load_in_4bit quantization quantization_bit bits",
    "use weight_dtype='int8'": "load_in_8bit",
    "use method='lora', lora_rank and lora_targets": "lora peft adapter use_lora use_peft finetuning_type",
    "use micro_batch_size": "batch_size bs per_device_train_batch_size train_micro_batch_size_per_gpu",
    "use global_batch_size": "train_batch_size effective_batch_size total_batch_size",
    "use gradient_accumulation_steps": "grad_accum gradient_accumulation accumulate_grad_batches",
    "use epochs": "num_train_epochs num_epochs n_epochs",
    "use epochs and num_queries": "max_steps train_steps steps",
    "use sequence_length":
        "max_seq_length max_seq_len max_length cutoff_len seq_len context_length block_size model_max_length",
    "use padding='packed'": "packing sample_packing packed",
    "use lora_rank": "r rank lora_r",
    "use lora_targets": "target_modules lora_target lora_target_modules",
    "use attention": "flash_attn flash_attention use_flash_attention_2 attn_implementation",
    "use gradient_checkpointing": "activation_checkpointing checkpointing recompute gradient_checkpoint",
    "use compile": "torch_compile compiled",
    "use tensor_parallel_size": "tp tensor_parallel tp_size",
    "use pipeline_parallel_size": "pp pipeline_parallel pp_size",
    "use expert_parallel_size": "ep expert_parallel ep_size",
    "use context_parallel_size": "cp context_parallel cp_size",
    "use num_experts_per_tok": "top_k topk",
    "use optimizer": "optim optimizer_name",
    "use model": "model_name model_name_or_path model_id base_model",
    "use software": "framework stack trainer backend",
    "leave it out: it changes neither time nor memory":
        "lr learning_rate warmup_steps weight_decay seed lora_alpha lora_dropout",
}  # fmt: skip
"""What to write here for the names that other tools give a field. Names close to ours need no entry."""


class Job(Checked, Described):
    """A fine-tuning run. In every field None means: the software profile's habit.

    Fields that do not exist, contradict each other or lie out of range are refused with `InvalidInputError`, which
    names the field, the value and the nearest valid one.

    >>> Job(model="mixtral-8x7b", gpu="a40", sequence_length=512).method
    'full'
    """

    NAMES_ELSEWHERE: ClassVar[Mapping[str, str]] = {
        name: what for what, names in _ELSEWHERE.items() for name in names.split()
    }
    """What to do about a field that bears another tool's name."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    model: Annotated[
        str | Path | dict[str, Any] | ModelSpec,
        _given("a catalogue name or Hub id, a path, a config or a ModelSpec", str, Path, dict, ModelSpec),
        BeforeValidator(_model_of_json),
        _required("a catalogue name (moecost.models() lists them), a Hub id, a path, a config or a ModelSpec"),
    ]
    """Catalogue name, alias or Hub id; a spec or `config.json` (path or dict)."""
    model_overrides: Annotated[dict[str, Any] | None, _given("a mapping of config fields", dict)] = None
    """Fields of the model's config to replace."""
    gpu: Annotated[
        str | Path | GPUSpec,
        _given("a GPU's name, a path or a GPUSpec", str, Path, GPUSpec),
        _spec_of_json(GPUSpec),
        _required("a GPU's name (moecost.gpus() lists them), a path or a GPUSpec"),
    ]
    """Catalogue name, alias (`A40`, `NVIDIA H100`, a cloud instance type), spec file or `GPUSpec`."""
    num_gpus: Degree = 1
    """All GPUs of the run."""
    node: Annotated[
        str | NodeSpec | None, _given("a machine type's name or a NodeSpec", str, NodeSpec), _spec_of_json(NodeSpec)
    ] = None
    """Machine type, or a `NodeSpec`; None: that of the instance type, else the GPU's reference."""
    gpus_per_node: Degree | None = None
    """GPUs that a machine's fast link joins; None: the machine's."""

    dataset: Annotated[
        str | Path | DatasetSpec | None,
        _given("a data set's name, a path or a DatasetSpec", str, Path, DatasetSpec),
        _spec_of_json(DatasetSpec),
    ] = None
    """Name of a data set that ships, a file of token counts (JSONL, CSV, histogram) or a `DatasetSpec`."""
    num_queries: Count | None = None
    """Training queries of an epoch; overrides the data set's number."""
    sequence_length: Annotated[int, Field(ge=1, le=MAX_TOKENS), BeforeValidator(_whole)] | None = None
    """Longest sequence: truncation, padding or packing length; None: the data set's longest. [token]"""
    padding: Literal["longest", "max_length", "packed"] | None = None
    """How a batch is filled; None: `longest` with a data set, else `max_length`."""
    epochs: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(_real)] = 1.0
    """Passes over the data."""

    method: Annotated[Method, _one_of("method", ("full", "lora", "qlora", "dora", "sparse"))] = "full"
    """What is trained: all weights, adapters beside frozen ones (16-bit: `lora`, `dora`; quantized: `qlora`), or a few
    of the weights themselves (`sparse`: SpIEL)."""
    lora_rank: Annotated[int, Field(ge=1, le=65536), BeforeValidator(_whole)] = 16
    """Rank of the adapters."""
    density: Annotated[float, Field(gt=0, le=1), BeforeValidator(_real)] | None = None
    """Share of the targets' weights that `sparse` changes; None: 0.01, as in SpIEL's code."""
    lora_targets: Annotated[tuple[Target, ...], Field(min_length=1), _TARGETS_SCHEMA, BeforeValidator(_targets)] = (
        "all-linear",
    )
    """Modules with adapters: suffixes of names, or `attention`, `experts`, `all-linear`."""
    weight_dtype: Annotated[str, _enum(*WEIGHT_FORMATS), _one_of("weight format", tuple(WEIGHT_FORMATS))] | None = None
    """How weights are held: trained ones of full tuning, else the frozen ones; None: `bf16`, `nf4-dq` for qlora."""
    compute_dtype: Annotated[str, _enum(*COMPUTE_BYTES), _one_of("compute type", tuple(COMPUTE_BYTES))] | None = None
    """Number format of the products; None: `bf16` where the GPU has it."""
    optimizer: Annotated[str, _enum(*OPTIMIZERS), _one_of("optimizer", tuple(OPTIMIZERS))] = "adamw"
    """Its name tells the states of a trained weight, and their width."""
    attention: Literal["flash", "sdpa", "eager"] | None = None
    """How attention is computed."""
    gradient_checkpointing: (
        Annotated[Checkpointing, _enum(*get_args(Checkpointing), True, False), BeforeValidator(_checkpointing)] | None
    ) = None
    """Activations that are recomputed in the backward pass; True is `full`, False `none`."""
    compile: bool = False
    """torch.compile."""
    micro_batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH), BeforeValidator(_whole)] | None = None
    """Sequences a GPU a forward pass; None: the largest that fits."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=2**20), BeforeValidator(_whole)] | None = None
    """Micro-batches of an optimizer step; None: what the global batch asks for, else 1."""
    global_batch_size: Count | None = None
    """Sequences of an optimizer step over all GPUs; None: follows from the other two."""
    num_experts_per_tok: Annotated[int, Field(ge=1), BeforeValidator(_whole)] | None = None
    """Experts of a token, in place of the model's top-k."""

    zero_stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(_whole)] | None = None
    """What data-parallel GPUs shard: 0 nothing (DDP), 1 optimizer, 2 and gradients, 3 and weights (FSDP)."""
    shard_group_size: Degree | None = None
    """GPUs that a replica of sharded states is spread over (hybrid FSDP, MiCS); None: all that are data-parallel."""
    tensor_parallel_size: Degree = 1
    """GPUs that share each product; data parallelism is what the other kinds leave of `num_gpus`."""
    pipeline_parallel_size: Degree = 1
    """Stages of layers."""
    expert_parallel_size: Degree = 1
    """GPUs over which experts are dealt out, within data parallelism."""
    context_parallel_size: Degree = 1
    """GPUs that share a sequence."""
    virtual_pipeline_size: Degree | None = None
    """Model chunks of a pipeline stage."""
    expert_tensor_parallel_size: Degree | None = None
    """GPUs that share each expert."""
    sequence_parallel: bool | None = None
    """Tensor parallelism divides the norms' tokens as well."""
    moe_dispatch: Literal["alltoall", "allgather", "deepep", "deepep-uccl", "hybridep"] | None = None
    """How tokens reach experts on other GPUs."""
    capacity_factor: Annotated[float, Field(gt=0, le=1e4), BeforeValidator(_real)] | None = None
    """Tokens that an expert takes, over the mean; None: all that come."""
    forced_balance: bool | None = None
    """A benchmark's even routing, whatever the router says."""
    cuda_graphs: Literal["none", "partial", "full"] | None = None
    """Launches that are captured, and cost the host nothing."""
    comm_overlap: bool | None = None
    """Expert traffic hides behind compute."""
    fused_kernels: str | None = None
    """Kernels the stack was run with, divided by `;` (`liger`, `foak`, `scattermoe`, `chunked-ce`, ...)."""
    offload: Literal["none", "optimizer", "experts", "parameters", "nvme"] = "none"
    """What is held in the host's memory: the optimizer's state; with it routed experts, or all weights; on drives."""

    software: str = "hf-peft"
    """The training stack; `moecost.software_profiles()` lists them."""
    calibration: Annotated[
        str | Path | Calibration | None,
        _given("a calibration's name, a path or a Calibration", str, Path, Calibration),
        _spec_of_json(Calibration),
    ] = None
    """Fitted coefficients: name, file or `Calibration`; None: the stack's."""
    price: Annotated[float | str | PriceQuote | None, BeforeValidator(_price)] = None
    """$/GPU-hour, a provider of the catalogue, or a quote; None: the median of the catalogue's quotes."""
    market: Market = "on_demand"
    """Kind of quote that `price` is looked up in."""
    on_oom: Literal["raise", "report"] = "raise"
    """A job that does not fit: raise `DoesNotFitError`, or report all figures with `fits` False."""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The job that a YAML file describes; its keys are the fields. Files it names may lie beside it."""
        from moecost.recipes import recipe_tool

        content = catalog.read_yaml(path)
        if tool := recipe_tool(content):
            raise InvalidInputError(f"{path}: is a recipe of {tool}; use Job.from_recipe({str(path)!r}, gpu=...)")
        try:
            return cls(**beside(content, path))
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None

    @classmethod
    def from_recipe(cls, path: str | Path, **fields: Any) -> Self:
        """The job of a training file (LLaMA-Factory, axolotl, TRL/accelerate, torchtune); `fields` say the rest.

        `RecipeWarning` names keys that may change time or memory and are not understood; see `moecost.recipes`.
        """
        from moecost.recipes import read_recipe, warn_of

        job, unknown = read_recipe(path, **fields)
        warn_of(unknown, path)
        return cls(**dict(job))

    def to_yaml(self) -> str:
        """The fields that were given, as YAML that `from_yaml` reads back; specs and data sets are written out."""
        given = self.model_dump(mode="json", include=set(self.model_fields_set), exclude_none=True)
        return catalog.yaml_text(given)

    @property
    def adapts(self) -> bool:
        """Adapters are trained, the model's own weights are frozen."""
        return self.method != "full"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        held = WEIGHT_FORMATS.get(self.weight_dtype or "bf16")
        trains_low = self.weight_dtype == "fp8" and (self.compute_dtype or "").startswith(("fp8", "mxfp8"))
        if self.method == "full" and held is not None and held.quantized and not trains_low:
            raise ValueError(
                f"method='full' cannot train weights held as weight_dtype={self.weight_dtype!r}; "
                "use method='qlora', or weight_dtype='bf16' or 'fp32'"
            )
        if self.method == "qlora" and held is not None and self.weight_dtype is not None and not held.quantized:
            raise ValueError(
                f"method='qlora' holds quantized weights, weight_dtype={self.weight_dtype!r} is not; "
                "use method='lora', or leave weight_dtype out (nf4-dq)"
            )
        self._adapters_have_a_method()
        if self.padding == "longest" and self.dataset is None:
            raise ValueError("padding='longest' needs a dataset to know the lengths; give one, or padding='max_length'")
        if self.dataset is None and self.sequence_length is None:
            raise ValueError("sequence_length is missing: give it, or a dataset to take it from")
        b, a, g = self.micro_batch_size, self.gradient_accumulation_steps, self.global_batch_size
        ranks = self.data_parallel_size
        if b is not None and a is not None and g is not None and ranks and g != b * a * ranks:
            raise ValueError(
                f"global_batch_size={g} is not micro_batch_size={b} x gradient_accumulation_steps={a} x {ranks} "
                f"data-parallel GPUs = {b * a * ranks}; give two of the three"
            )
        if b is not None and a is None and g is not None and ranks and g % (b * ranks):
            raise ValueError(
                f"global_batch_size={g} is no multiple of micro_batch_size={b} x {ranks} data-parallel GPUs; "
                f"use {max(g // (b * ranks), 1) * b * ranks} or another micro_batch_size"
            )
        return self

    @property
    def held_weight_dtype(self) -> str:
        """How weights are held: as asked, else 16 bits, or 4 with `qlora`."""
        if self.method == "full" and self.weight_dtype == "fp8":
            return "bf16"  # trained weights keep 16 bits beside their fp8 copies
        return self.weight_dtype or ("nf4-dq" if self.method == "qlora" else "bf16")

    @property
    def model_parallel_size(self) -> int:
        """GPUs that share one replica: tensor x pipeline x context parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas; 0 where there are too few GPUs for one."""
        return self.num_gpus // self.model_parallel_size

    @property
    def asked_global_batch_size(self) -> int | None:
        """Sequences of an optimizer step, as far as the job says; None where the micro-batch is left to memory."""
        if self.global_batch_size is not None or self.micro_batch_size is None:
            return self.global_batch_size
        return self.micro_batch_size * (self.gradient_accumulation_steps or 1) * max(self.data_parallel_size, 1)

    def _adapters_have_a_method(self) -> None:
        """Adapter fields beside full tuning are a slip: a method left out, or one forgotten."""
        if self.density is not None and self.method != "sparse":
            raise ValueError(f"density={self.density} has no meaning with method={self.method!r}; use method='sparse'")
        for name in ("lora_rank", "lora_targets"):
            value = getattr(self, name)
            used = self.adapts and not (self.method == "sparse" and name == "lora_rank")
            if used or name not in self.model_fields_set:
                continue
            if "method" not in self.model_fields_set:
                raise ValueError(f"{name}={_shown(value)} is given without a method; add method='lora' (or 'qlora')")
            if value != type(self).model_fields[name].default:  # a job read back says its defaults
                raise ValueError(
                    f"{name}={_shown(value)} has no meaning with method={self.method!r}; leave it out, or use "
                    "method='lora'"
                )


def beside(fields: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Fields of a job file, where names that are no file from here are found as files beside it."""
    folder = Path(path).parent

    def found(name: str, value: Any) -> Any:
        if name not in NAME_FILES or not isinstance(value, str) or not Path(value).suffix:
            return value
        return value if Path(value).exists() or not (folder / value).is_file() else str(folder / value)

    return {name: found(name, value) for name, value in fields.items()}


NAME_FILES: Final = frozenset({"model", "gpu", "dataset", "calibration"})
"""Fields that may name a file."""


def _shown(value: Any) -> str:
    return f"{list(value) if isinstance(value, tuple) else value}"[:80]
