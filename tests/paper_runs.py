"""The runs of arXiv:2408.04693 as jobs, and its measurements (`data/paper`, described in its README).

The recipes are the paper's section 3 and its artifact: QLoRA of rank 16 on experts and router for Mixtral with
checkpointing, full tuning in bf16 without for BlackMamba; whole runs of 1,000 queries.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from moecost import Calibration, Estimate, Job, estimate

PAPER = Path(__file__).parent / "data" / "paper"
MIXTRAL: dict[str, Any] = {
    "model": "mistralai/Mixtral-8x7B-v0.1",
    "method": "qlora",
    "lora_rank": 16,
    "lora_targets": ["w1", "w2", "w3", "gate"],
    "weight_dtype": "nf4-dq",
    "attention": "flash",
    "gradient_checkpointing": "full",
    "software": "hf-peft-2024",
}
BLACKMAMBA: dict[str, Any] = {
    "model": "Zyphra/BlackMamba-2.8B",
    "method": "full",
    "weight_dtype": "bf16",
    "gradient_checkpointing": "none",
    "software": "hf-peft-2024",
}
BUDGET: dict[str, Any] = {
    "method": "qlora",
    "lora_targets": ["w1", "w2", "w3", "gate"],
    "dataset": "math-14k",
    "sequence_length": 1024,
    "epochs": 10,
    "price": 0.79,
    "software": "hf-peft-2024",
}
"""The README's question, on an A40; beside model and GPU."""
RECIPE = {"Mixtral": MIXTRAL, "BlackMamba": BLACKMAMBA}
# The paper names no form factors: PCIe for the A100s and SXM for the H100 fit its figures best.
GPU = {
    ("A40", "48"): "a40",
    ("A100", "40"): "a100-40gb-pcie",
    ("A100", "80"): "a100-80gb-pcie",
    ("H100", "80"): "h100-80gb-sxm",
}
DATASET = {"CS": "commonsense-15k", "MATH": "math-14k"}
ACTIVE_EXPERTS = {"dense": 8, "sparse": 2}


class Run(NamedTuple):
    """A point of Figs 14 and 15."""

    model: str
    data: str
    mode: str
    batch: int
    gpu: str
    queries_per_second: float
    flag: str

    @property
    def panel(self) -> tuple[str, str, str]:
        return self.model, self.data, self.gpu

    def job(self, **more: Any) -> Job:
        """A whole run of 1,000 queries, padded to the longest of each batch, cut at 1,024 tokens."""
        return Job(
            **RECIPE[self.model],
            gpu=self.gpu,
            dataset=DATASET[self.data],
            num_queries=1000,
            sequence_length=1024,
            padding="longest",
            num_experts_per_tok=ACTIVE_EXPERTS[self.mode],
            micro_batch_size=self.batch,
            on_oom="report",
            **more,
        )


def read(name: str) -> list[dict[str, str]]:
    with (PAPER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _gpu(row: dict[str, str]) -> str:
    label, memory = row["gpu"], row["gpu_memory_gb"].split(".")[0]
    return next(key for (name, gb), key in GPU.items() if name in label and gb == memory)


@cache
def throughput() -> tuple[Run, ...]:
    """All points; those with a `flag` are suspect in the data itself and are not scored."""
    return tuple(
        Run(
            r["model"],
            r["dataset"],
            "dense" if float(r["sparsity_fraction"]) == 1 else "sparse",
            int(float(r["batch_size"])),
            _gpu(r),
            float(r["queries_per_s"]),
            r["flag"] or "",
        )
        for r in read("throughput.csv")
    )


def panels() -> list[tuple[str, str, str]]:
    return list(dict.fromkeys(run.panel for run in throughput()))


def panel_error(
    panel: tuple[str, str, str], calibration: Calibration | None = None, show: Callable[[str], None] = print
) -> float:
    """Mean |predicted / measured - 1| of queries a second of the whole run over the sound points of a panel."""
    errors = []
    for run in throughput():
        if run.panel == panel:
            predicted = 1000 / (3600 * estimate(run.job(calibration=calibration)).hours)
            error = predicted / run.queries_per_second - 1
            show(f"{run.mode} b={run.batch}: {run.queries_per_second:.3f} q/s, {100 * error:+.1f} % {run.flag}")
            if not run.flag:
                errors.append(abs(error))
    return fmean(errors)


def fixed_job(model: str, mode: str, batch: int | None, *, length: int = 128, gpu: str = "a40") -> Job:
    """A step on synthetic batches of one length, as in the paper's profiling (Figs 4, 5, 6, 9) and largest batches."""
    return Job(
        **RECIPE[model],
        gpu=gpu,
        sequence_length=length,
        padding="max_length",
        num_queries=1000,
        num_experts_per_tok=ACTIVE_EXPERTS[mode],
        micro_batch_size=batch,
        on_oom="report",
    )


@cache
def profiled(model: str, mode: str, batch: int) -> Estimate:
    """The estimate of a profiling run: A40, 128 tokens."""
    return estimate(fixed_job(model, mode, batch))


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean |predicted / measured - 1| of (predicted, measured)."""
    return fmean(abs(predicted / measured - 1) for predicted, measured in pairs)
