"""Refits the calibrations that ship with moecost, from the measured runs that ship with it.

    python tools/fit_calibrations.py [name ...]

Each is written to `moecost/data/calibrations/`. What is fitted on what:

* `hf-peft-2024`, `blackmamba-2024`: throughput of arXiv:2408.04693, Figs 14 and 15, without the points flagged as
  outliers; `tests/data/paper/README.md` has their source.
* `public-2026`: fine-tuning runs of stacks that stand on PyTorch, Hugging Face and their kin (`public_runs`).
* `megatron-2026`: training on many GPUs, of stacks with parallel layouts and kernels of their own.

A run belongs to the calibration that its software profile names.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from moecost import Calibration, Job, MeasuredRun, SoftwareProfile
from moecost.fitting import PRIORS, fit, fit_stacks
from moecost.measurements import public_runs

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "moecost" / "data" / "calibrations"
PAPER = "arXiv:2408.04693"
PAPER_QUERIES = 1000
PAPER_GPUS = {"A40": "a40", "A100-40GB": "a100-40gb-pcie", "A100-80GB": "a100-80gb-pcie", "H100": "h100-80gb-sxm"}
PAPER_JOBS: dict[str, dict[str, Any]] = {
    "Mixtral": {
        "model": "mistralai/Mixtral-8x7B-v0.1",
        "method": "qlora",
        "lora_rank": 16,
        "lora_targets": ["w1", "w2", "w3", "gate"],
        "weight_dtype": "nf4-dq",
        "attention": "flash",
        "gradient_checkpointing": "full",
    },
    "BlackMamba": {
        "model": "Zyphra/BlackMamba-2.8B",
        "method": "full",
        "weight_dtype": "bf16",
        "gradient_checkpointing": "none",
    },
}
PAPER_DATASETS = {"CS": "commonsense-15k", "MATH": "math-14k"}


def paper_runs(model: str) -> list[MeasuredRun]:
    """One epoch of 1,000 queries each, as the artifact timed them; without the points flagged as outliers."""
    with (ROOT / "tests" / "data" / "paper" / "throughput.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == model and not r["flag"]]
    return [
        MeasuredRun(
            job=Job(
                **PAPER_JOBS[model],
                gpu=PAPER_GPUS[r["gpu"]],
                dataset=PAPER_DATASETS[r["dataset"]],
                num_queries=PAPER_QUERIES,
                sequence_length=1024,
                padding="longest",
                num_experts_per_tok=8 if float(r["sparsity_fraction"]) == 1 else 2,
                micro_batch_size=int(float(r["batch_size"])),
                software="hf-peft-2024",
            ),
            run_hours=PAPER_QUERIES / float(r["queries_per_s"]) / 3600,
            source=PAPER,
        )
        for r in rows
    ]


def family(name: str) -> list[MeasuredRun]:
    """The public runs whose stack uses this calibration."""
    runs = [*public_runs("finetune"), *public_runs("multi")]
    return [run for run in runs if SoftwareProfile.load(run.job.software).calibration == name]


def refit(name: str) -> Calibration:
    if name in ("hf-peft-2024", "blackmamba-2024"):
        model = "Mixtral" if name == "hf-peft-2024" else "BlackMamba"
        found = fit(paper_runs(model), software="hf-peft-2024", name=name, base=PRIORS)
        gpus = "A40, A100 and H100" if model == "Mixtral" else "A40 only"
        note = f"fitted on the unflagged {model} points of Figs 14 and 15 ({gpus}): queries/s of one epoch of 1,000"
        # no run of the paper has a measured peak: the largest batches of its Table III bound the error of memory
        return found.model_copy(update={"notes": (note,), "log_sd_memory": 0.05 if model == "Mixtral" else 0.08})
    found = fit_stacks(family(name), name=name)
    note = "fitted on public runs, each source weighing as the square root of its runs, users' reports less"
    return found.model_copy(update={"notes": (note, *found.notes)})


def main(names: list[str]) -> None:
    for name in names or ["hf-peft-2024", "blackmamba-2024", "public-2026", "megatron-2026"]:
        found = refit(name)
        found.save(OUT / f"{name}.yaml")
        left_out = found.cross_validated_error
        print(
            f"{name}: {found.num_runs} runs, mean error {found.in_sample_error:.1%} in sample, "
            f"{'-' if left_out is None else format(left_out, '.1%')} left out; "
            f"spread of time {found.log_sd_time:.3f}, of memory {found.log_sd_memory:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
