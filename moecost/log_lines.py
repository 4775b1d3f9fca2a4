"""Logs that are lines of text: torchtune's and litgpt's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

from moecost.errors import InvalidInputError
from moecost.run_files import LARGEST
from moecost.units import GB, GIB, HOUR, MILLISECOND

WARM_UP: Final = 0.1
"""Share of the first steps that is left out: compilation, caches, the allocator's growth."""


MAX_LINE: Final = 2_000
LOG_KINDS: Final = {
    "torchtune": re.compile(r"^Step \d+ \| .*\w+:"),
    "litgpt": re.compile(r"iter \d+.*iter time:|Training [Tt]ime\s*:\s*\S+\s*s\b|Memory [Uu]sed\s*:\s*\S+\s*GB"),
}
"""How a line looks that only the tool's logs have."""


@dataclass
class LogLines:
    """What the lines of a log tell.

    Attributes
    ----------
    tokens_per_gpu : tokens a second on one GPU, of each logged step. [token/s]
    batch_seconds : forward and backward of one micro-batch, of each logged one. [s]
    batches : micro-batches on one GPU, over the whole run.
    seconds : the whole run. [s]
    """

    tool: str
    tokens_per_gpu: list[float] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    batches: int | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    memory_kind: str | None = None
    notes: str = ""

    def measured(self, num_gpus: int, accumulation: int) -> dict[str, Any]:
        """Fields of `MeasuredRun`."""
        out: dict[str, Any] = {"peak_memory_gib": self.peak_memory_gib, "memory_kind": self.memory_kind}
        if self.tokens_per_gpu:
            out["tokens_per_second"] = median(_warm(self.tokens_per_gpu)) * num_gpus
        if self.batch_seconds:
            out["step_seconds"] = fmean(_warm(self.batch_seconds)) * accumulation
        if self.seconds:
            out["run_hours"] = self.seconds / HOUR
        return {name: value for name, value in out.items() if value is not None}


def tools_of(text: str) -> list[str]:
    """The tools whose lines a text has."""
    return [tool for tool, sign in LOG_KINDS.items() if any(sign.search(line) for _, line in _lines(text))]


def read_lines(text: str, where: str) -> LogLines:
    """The log of the tool whose lines it has."""
    tools = tools_of(text)
    if not tools:
        raise InvalidInputError(f"{where}: has no line that is known of {' or '.join(LOG_KINDS)}")
    return _torchtune(text, where) if tools[0] == "torchtune" else _litgpt(text, where)


def _warm(values: list[float]) -> list[float]:
    skipped = math.ceil(len(values) * WARM_UP) if len(values) > 2 else 0
    return values[skipped:]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; longer ones than any tool writes are passed over."""
    return ((n, line) for n, line in enumerate(text.splitlines(), start=1) if len(line) <= MAX_LINE)


def _positive(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST:  # NaN fails too
        raise InvalidInputError(f"{where}: {name}={text!r:.60} must be a positive finite number, without a unit")
    return value


# -------------------------------------------------------------------------------------------------------- torchtune
_STEP: Final = re.compile(r"^Step (\d+) \| (.*)$")
_PAIR: Final = re.compile(r"(\w+):(\S+)")
_PEAKS: Final = (("peak_memory_alloc", "allocated"), ("peak_memory_reserved", "reserved"))


def _torchtune(text: str, where: str) -> LogLines:
    """`Step 3 | loss:1.2 lr:2e-05 tokens_per_second_per_gpu:2513.2 peak_memory_alloc:17.6 ...`, memory in GiB."""
    log = LogLines("torchtune")
    peaks: dict[str, float] = {}
    for number, line in _lines(text):
        step = _STEP.match(line)
        if step is None:
            continue
        pairs = dict(_PAIR.findall(step[2]))
        at = f"{where}, line {number}"
        rate = pairs.get("tokens_per_second_per_gpu", pairs.get("tokens_per_second"))
        if rate is not None:
            log.tokens_per_gpu.append(_positive(rate, "tokens_per_second_per_gpu", at))
        for name, _ in _PEAKS:
            if name in pairs:
                peaks[name] = max(_positive(pairs[name], name, at), peaks.get(name, 0.0))
    for name, kind in _PEAKS:
        if name in peaks and log.peak_memory_gib is None:
            log.peak_memory_gib, log.memory_kind = peaks[name], kind
    if log.tokens_per_gpu:
        log.notes = "torchtune counts the tokens that have a label since 0.5, all of them before"
    return log


# ----------------------------------------------------------------------------------------------------------- litgpt
_ITER: Final = re.compile(r"\biter (\d+)\b.*\biter time: (\S+)\s+(\S+)")
_TIME: Final = re.compile(r"Training [Tt]ime\s*:\s*([^\s,]+?)\s*s\b")
_MEMORY: Final = re.compile(r"Memory [Uu]sed\s*:\s*([^\s,]+)\s*GB")


def _litgpt(text: str, where: str) -> LogLines:
    """`Epoch 1 | iter 3 step 1 | ... | iter time: 385.67 ms (step)`, `Training time: 95.2s`, `Memory used: 21.3 GB`."""
    log = LogLines("litgpt")
    for number, line in _lines(text):
        at = f"{where}, line {number}"
        if found := _ITER.search(line):
            if found[3] != "ms":
                raise InvalidInputError(f"{at}: iter time is in {found[3]!r:.20}, not in ms")
            log.batch_seconds.append(_positive(found[2], "iter time", at) * MILLISECOND)
            log.batches = max(int(found[1][:12]), log.batches or 0)
        elif found := _TIME.search(line):
            log.seconds = _positive(found[1], "Training time", at)
        elif found := _MEMORY.search(line):
            log.peak_memory_gib = _positive(found[1], "Memory used", at) * GB / GIB
            log.memory_kind = "allocated"
    return log
