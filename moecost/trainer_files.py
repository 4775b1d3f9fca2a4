"""What the Hugging Face Trainer leaves in a run's folder; LLaMA-Factory, axolotl, TRL and ms-swift stand on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moecost.errors import InvalidInputError
from moecost.recipes import model_name
from moecost.run_files import positive, read_json
from moecost.units import HOUR

TRAINER_FILES: Final = ("trainer_state.json", "train_results.json", "all_results.json")
MAX_GPUS: Final = 4096
_ROUNDING: Final = 0.005
"""Rates are printed with three decimals."""
_MEMORY: Final = (
    (re.compile(r"memory/(max_mem_|max_)allocated ?\((gib)\)", re.I), "allocated"),
    (re.compile(r"memory/(device_mem_|device_)reserved ?\((gib)\)", re.I), "reserved"),
    (re.compile(r"memory ?\(gib\)", re.I), "reserved"),
)
"""Columns in which axolotl and ms-swift log memory, in GiB."""


@dataclass(frozen=True)
class TrainerRun:
    """Figures of a run of the Trainer; None where they were not logged.

    Attributes
    ----------
    seconds : the whole run, with checkpoints and evaluations. [s]
    steps : optimizer steps. [step]
    queries : sequences that were processed, over all epochs (packed rows where it packs). [query]
    tokens : tokens that were processed, padding included. [token]
    """

    seconds: float | None
    steps: float | None
    queries: float | None
    tokens: float | None
    epochs: float | None
    micro_batch_size: int | None
    peak_memory_gib: float | None
    memory_kind: str | None

    @property
    def global_batch(self) -> int | None:
        """Sequences a step, over all GPUs."""
        return round(self.queries / self.steps) if self.queries and self.steps else None

    def num_gpus(self, micro: int | None, accumulation: int | None) -> int | None:
        """Data-parallel GPUs; None where the figures leave several possible (the last batch of an epoch is smaller)."""
        if not (self.queries and self.steps and micro and accumulation):
            return None
        ranks = self.queries / self.steps / (micro * accumulation)
        short = min((self.epochs or 1.0) / self.steps, 0.5)
        low, high = ranks * (1 - _ROUNDING), ranks * (1 + _ROUNDING) / (1 - short)
        fits = range(max(math.ceil(low), 1), min(math.floor(high), MAX_GPUS) + 1)
        return fits[0] if len(fits) == 1 else None

    def measured(self) -> dict[str, Any]:
        """Fields of `MeasuredRun`."""
        seconds, steps, queries, tokens = self.seconds, self.steps, self.queries, self.tokens
        out: dict[str, Any] = {
            "run_hours": seconds and seconds / HOUR,
            "step_seconds": seconds / steps if seconds and steps else None,
            "queries_per_second": queries / seconds if seconds and queries else None,
            "tokens_per_second": tokens / seconds if seconds and tokens else None,
            "peak_memory_gib": self.peak_memory_gib,
            "memory_kind": self.memory_kind,
        }
        return {name: value for name, value in out.items() if value is not None}


def read_trainer(folder: Path, first: Path) -> TrainerRun:
    """The run in a folder, from whichever of `TRAINER_FILES` are there; `first` is one of them, or named otherwise."""
    state: Mapping[str, Any] = {}
    final: dict[str, Any] = {}
    entries: list[Mapping[str, Any]] = []
    for path in dict.fromkeys((*(folder / name for name in reversed(TRAINER_FILES)), first)):
        if not path.is_file():
            continue
        content = read_json(path)
        for name in ("train_runtime", "train_samples_per_second", "train_steps_per_second"):
            positive(content, name, str(path))
        if "log_history" in content:
            state, entries = content, _entries(content, path)
            final |= next((e for e in reversed(entries) if "train_runtime" in e), {})
        else:
            final |= content
    where = str(first)
    seconds = positive(final, "train_runtime", where)
    steps = positive(state, "global_step", where)
    rate = positive(final, "train_samples_per_second", where)
    if steps is None and seconds is not None:
        per_second = positive(final, "train_steps_per_second", where)
        steps = per_second and round(per_second * seconds)
    tokens = positive(state, "num_input_tokens_seen", where) or positive(final, "num_input_tokens_seen", where)
    if tokens is None:
        tokens = max((positive(e, "num_input_tokens_seen", where) or 0.0 for e in entries), default=0.0) or None
    micro = positive(state, "train_batch_size", where)
    epochs = positive(state, "num_train_epochs", where) or positive(final, "epoch", where)
    memory, kind = _memory(entries, where)
    return TrainerRun(
        seconds=seconds,
        steps=steps,
        queries=rate * seconds if rate and seconds else None,
        tokens=tokens if seconds else None,
        epochs=epochs,
        micro_batch_size=int(micro) if micro else None,
        peak_memory_gib=memory,
        memory_kind=kind,
    )


def _entries(state: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    history = state["log_history"]
    if not isinstance(history, list) or not all(isinstance(e, dict) for e in history):
        raise InvalidInputError(f"{path}: log_history={history!r:.60} must be a list of log entries")
    return history


def _memory(entries: list[Mapping[str, Any]], where: str) -> tuple[float | None, str | None]:
    for pattern, kind in _MEMORY:
        peaks = [positive(e, k, where) or 0.0 for e in entries for k in e if pattern.fullmatch(k)]
        if peaks and max(peaks) > 0:
            return max(peaks), kind
    return None, None


def adapter_fields(folder: Path) -> dict[str, Any]:
    """Fields of `Job` that a saved adapter, or a saved model, tells; its weights' format is not among them."""
    if (folder / "adapter_config.json").is_file():
        path = folder / "adapter_config.json"
        config = read_json(path)
        if str(config.get("peft_type", "LORA")).upper() != "LORA":
            raise InvalidInputError(f"{path}: peft_type={config['peft_type']!r:.40} is not modelled; LORA is")
        base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
        fields: dict[str, Any] = {
            "method": "dora" if config.get("use_dora") is True else "lora",
            "lora_rank": config.get("r"),
            "lora_targets": sorted(targets) if isinstance(targets, list) else targets,
            "model": model_name(base, folder) if isinstance(base, str) else None,
        }
        return {name: value for name, value in fields.items() if value is not None}
    if (folder / "config.json").is_file():
        return {"method": "full", "model": str(folder / "config.json")}
    return {}
