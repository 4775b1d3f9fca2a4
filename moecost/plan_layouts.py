"""Parallel layouts that are worth trying, and that a training stack can run.

The rule:

* GPUs: 1, 2, 3, 4, 6, 8, 12, ... (powers of two and three times them) up to a bound.
* Data parallelism takes what the other kinds leave, and deals a global batch out in equal parts.
* ZeRO 0 to 3 over the data-parallel GPUs; with pipelines 0 and 1 (gradients that pile up over the micro-batches in
  flight are not sharded: DeepSpeed refuses it), and 0 and 1 of Megatron's stacks where tensors or experts are cut.
* Tensor parallelism in powers of two, within a machine, that divide the attention heads.
* Expert parallelism in powers of two that divide the experts and the data-parallel GPUs, for mixtures.
* Pipelines in powers of two, no more stages than layers, and only where the model does not fit otherwise.
* Stacks on Megatron-Core and those derived from it run all kinds; others data parallelism with ZeRO or FSDP. A kind
  whose sizes are given is tried in any stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from moecost.architecture import ModelSpec
from moecost.catalog import data_folder, read_yaml

SIZES: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
"""Kinds of parallelism besides data parallelism, as `Job` names them."""
ALL_KINDS: Final = "megatron"
"""The stack whose descendants run all kinds."""
LARGEST_TENSOR_GROUP: Final = 16
ZERO_STAGES: Final = (0, 1, 2, 3)
Given = Mapping[str, Sequence[int]]
"""Values to try of `num_gpus`, `zero_stage` and `SIZES`, in place of those of the rule."""


@dataclass(frozen=True, slots=True)
class GPULayout:
    """How a run is spread over its GPUs; fields as in `Job`."""

    num_gpus: int
    zero_stage: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Replicas."""
        return self.num_gpus // (self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size)

    def fields(self) -> dict[str, int]:
        """What differs from a job on one GPU."""
        found = {"num_gpus": self.num_gpus} | {name: getattr(self, name) for name in SIZES}
        several = {"zero_stage": self.zero_stage} if self.num_gpus > 1 else {}
        return {name: n for name, n in found.items() if n > 1} | several

    def __str__(self) -> str:
        kinds = {"TP": self.tensor_parallel_size, "PP": self.pipeline_parallel_size,
                 "CP": self.context_parallel_size, "EP": self.expert_parallel_size}  # fmt: skip
        cut = [f"{kind} {size}" for kind, size in kinds.items() if size > 1]
        if self.num_gpus == 1:
            return "one GPU"
        return ", ".join([*cut, f"DP {self.data_parallel_size}", f"ZeRO {self.zero_stage}"])


@cache
def runs_all_kinds(software: str) -> bool:
    """Whether a stack is Megatron-Core, or derived from it."""
    while software and software != ALL_KINDS:
        software = str(read_yaml(data_folder("data") / "software" / f"{software}.yaml").get("base") or "")
    return bool(software)


def layouts(
    model: ModelSpec, software: str, *, max_gpus: int, global_batch_size: int, given: Given, pipelines: bool
) -> Iterator[GPULayout]:
    """Layouts to try, those on few GPUs first; see the module for the rule.

    Parameters
    ----------
    model : its heads, experts and layers say what can be divided.
    software : name of the stack.
    max_gpus : most GPUs of a run.
    global_batch_size : sequences of an optimizer step, dealt out to the data-parallel GPUs.
    given : sizes that were asked for, in place of the rule's.
    pipelines : those with several stages, or those without.
    """
    sizes = _sizes(model, runs_all_kinds(software), given, pipelines)
    for gpus in (n for n in given.get("num_gpus", _counts(max_gpus)) if n <= max_gpus):
        for tensor in sizes["tensor_parallel_size"]:
            for stages in sizes["pipeline_parallel_size"]:
                for context in sizes["context_parallel_size"]:
                    data, left = divmod(gpus, tensor * stages * context)
                    if left or not data or global_batch_size % data:
                        continue
                    for experts in sizes["expert_parallel_size"]:
                        if (data * context * tensor if "expert_parallel_size" in given else data) % experts:
                            continue
                        cut = tensor * experts > 1 and runs_all_kinds(software)
                        for zero in _stages(given, shared=data * context, pipelined=stages > 1, cut=cut):
                            yield GPULayout(gpus, zero, tensor, stages, context, experts)


def _counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to a bound."""
    twos = _powers(most)
    return sorted({*twos, *(3 * n for n in _powers(most // 3))}) if most >= 3 else twos


def _powers(most: int) -> list[int]:
    """Powers of two up to a bound."""
    return [1 << i for i in range(most.bit_length())] if most else []


def _sizes(model: ModelSpec, all_kinds: bool, given: Given, pipelines: bool) -> dict[str, Sequence[int]]:
    groups = model.quantities().layers
    heads = [group.attention.num_heads for group in groups if group.attention]
    experts = [group.experts.num_experts for group in groups if group.experts]
    rule = {name: [1] for name in SIZES}
    if all_kinds:
        rule["tensor_parallel_size"] = _dividing(heads, LARGEST_TENSOR_GROUP)
        rule["expert_parallel_size"] = _dividing(experts, max(experts, default=1))
        rule["pipeline_parallel_size"] = _powers(model.num_hidden_layers)
    sizes = {name: list(given.get(name, rule[name])) for name in SIZES}
    if "pipeline_parallel_size" in given:  # asked for: with the first ones, whether the model fits otherwise or not
        sizes["pipeline_parallel_size"] = [] if pipelines else sizes["pipeline_parallel_size"]
    else:
        found = sizes["pipeline_parallel_size"]
        sizes["pipeline_parallel_size"] = [n for n in found if n > 1] if pipelines else [1]
    return dict(sizes)


def _dividing(numbers: Sequence[int], most: int) -> list[int]:
    """Powers of two that divide all numbers; 1 where there are none."""
    return [n for n in _powers(most) if n == 1 or (numbers and all(number % n == 0 for number in numbers))]


def _stages(given: Given, *, shared: int, pipelined: bool, cut: bool) -> Sequence[int]:
    if shared == 1:
        return [s for s in given["zero_stage"] if s == 0] or [0] if "zero_stage" in given else [0]
    if "zero_stage" in given:
        return given["zero_stage"]
    return ZERO_STAGES[:2] if pipelined or cut else ZERO_STAGES
