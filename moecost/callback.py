"""A callback for the Hugging Face Trainer, and for what stands on it: `Trainer(..., callbacks=[MoECostCallback()])`.

It is no subclass of `TrainerCallback`, so that nothing here needs transformers: the Trainer calls it by the names of
its events, and those that are not named below are answered by nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moecost.architecture import ModelSpec
from moecost.job import Job
from moecost.run_json import SUFFIX
from moecost.storage import OPTIMIZER_NAMES, OPTIMIZERS
from moecost.watching import Watch, to_stderr, told_of

ATTENTION: Final = {"flash_attention_2": "flash", "flash_attention_3": "flash", "sdpa": "sdpa", "eager": "eager"}
DTYPES: Final = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


class MoECostCallback:
    """Watches a run of the Trainer: hours and dollars spent, left and in all against the estimate, and a measured run
    at its end. It changes nothing about the training, and raises nothing into it.

    Parameters
    ----------
    job : what is run (a `Job`, its fields, a job file); None: what model, arguments and GPU tell, and the batches that
        are seen.
    out : file for the measured run; None: `run.moecost.json` in the output folder, or the next free name.
    every, say, level : as for `moecost.watch`.
    fields : fields of `Job` that replace what is found out (`gpu`, `price`, `software`, ...).
    """

    def __init__(
        self, job: Job | Mapping[str, Any] | str | Path | None = None, *, out: str | Path | None = None, **options: Any
    ) -> None:
        self.how = {name: options.pop(name) for name in ("every", "say", "level") if name in options}
        self.job, self.out, self.fields = job, out, options
        unknown = [name for name in options if name not in Job.model_fields]
        if unknown:
            raise TypeError(f"{unknown[0]!r} is neither an option of MoECostCallback nor a field of Job")
        self.watch: Watch | None = None
        self.hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Begin to watch."""
        self._end(complete=False, outcome=None)  # a run before this one, which raised
        try:
            told = self._told(args, state, model)
            out = self.out or Path(args.output_dir) / f"run{SUFFIX}"
            quiet = not state.is_world_process_zero
            self.watch = Watch(told, steps=_steps_left(state), out=out, quiet=quiet, **self.how)
            self.watch.start()
            if model is not None and not getattr(args, "torch_compile", False):  # a hook would be compiled as well
                self.hook = model.register_forward_pre_hook(self._seen, with_kwargs=True)
        except Exception as error:
            self.watch = None
            to_stderr(f"moecost: this run is not watched: {told_of(error)}")

    def _seen(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The shape of a training batch, before the model gets it."""
        if self.watch is None or not module.training:
            return
        with contextlib.suppress(Exception):  # whatever a model is called with
            given = kwargs.get("input_ids")
            rows, length = (args[0] if given is None else given).shape[:2]
            self.watch.batch(int(rows), int(length))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """An optimizer step has ended."""
        if self.watch is not None:
            self.watch.step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """An evaluation is no step."""
        if self.watch is not None:
            self.watch.pause()

    on_save = on_predict = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write the measured run."""
        self._end(complete=state.global_step >= state.max_steps, outcome="ok")

    def _end(self, complete: bool, outcome: str | None) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.watch is not None:
            self.watch.finish(complete=complete, outcome=outcome)

    def _told(self, args: Any, state: Any, model: Any) -> Job | dict[str, Any]:
        """The job that was given, or what the Trainer tells of it, with the fields that were given beside it."""
        if self.job is None:
            return trainer_fields(args, state, model) | self.fields
        if isinstance(self.job, Mapping):
            return dict(self.job) | self.fields
        job = self.job if isinstance(self.job, Job) else Job.from_yaml(self.job)
        return Job(**{**{name: getattr(job, name) for name in job.model_fields_set}, **self.fields})

    def __getattr__(self, name: str) -> Any:
        """All other events of the Trainer, those of later releases too."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


# ------------------------------------------------------------------------------------------ what the Trainer tells
def _steps_left(state: Any) -> int | None:
    """Of a run that goes on from a checkpoint, those that it still has before it."""
    return max(state.max_steps - state.global_step, 0) or None


def trainer_fields(args: Any, state: Any, model: Any) -> dict[str, Any]:
    """Fields of `Job` that a Trainer's arguments and model tell; no `gpu` where it runs on none.

    Parameters
    ----------
    args, state : `TrainingArguments` and `TrainerState`.
    model : the Trainer's, with or without adapters.
    """
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    found: dict[str, Any] = {
        "model": ModelSpec.from_hf(config, "approximate", name=str(config.get("_name_or_path") or "model of the run")),
        "num_gpus": max(args.world_size * max(getattr(args, "_n_gpu", 1), 1), 1),
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_checkpointing": "full" if args.gradient_checkpointing else "none",
        "attention": ATTENTION.get(str(getattr(model.config, "_attn_implementation", None))),
        "compile": bool(getattr(args, "torch_compile", False)),
        "software": _software(),
        "fused_kernels": "liger" if getattr(args, "use_liger_kernel", False) else None,
        **_method(model),
        **_types(args, model),
        **_optimizer(args),
    }
    if args.device.type == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name(args.device)
    if found["num_gpus"] > 1:
        sharded = bool(args.fsdp) or (getattr(args, "deepspeed", None) and "stage3" in str(args.deepspeed))
        found["zero_stage"] = 3 if sharded else None if getattr(args, "deepspeed", None) else 0
    if state.max_steps > 0:
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * found["num_gpus"]
        found["num_queries"] = state.max_steps * rows
    return {name: value for name, value in found.items() if value is not None}


def _method(model: Any) -> dict[str, Any]:
    four, eight = (getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return {"method": "full"}
    adapter = next(iter(adapters.values()))
    targets = adapter.target_modules
    return {
        "method": "qlora" if four else "dora" if getattr(adapter, "use_dora", False) else "lora",
        "lora_rank": getattr(adapter, "r", None),
        "lora_targets": sorted(targets) if isinstance(targets, set | list | tuple) else targets,
        "weight_dtype": "int8" if eight else None,
    }


def _types(args: Any, model: Any) -> dict[str, Any]:
    held = DTYPES.get(str(getattr(model, "dtype", "")))
    compute = "bf16" if args.bf16 else "fp16" if args.fp16 else held
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    return {"compute_dtype": compute} if quantized else {"compute_dtype": compute, "weight_dtype": held}


def _optimizer(args: Any) -> dict[str, Any]:
    said = str(getattr(args.optim, "value", args.optim)).lower()
    name = OPTIMIZER_NAMES.get(said, said)
    return {"optimizer": name} if name in OPTIMIZERS else {}


def _software() -> str:
    from importlib.metadata import version

    return "hf-v5-grouped" if int(version("transformers").split(".")[0]) >= 5 else "hf-peft"
