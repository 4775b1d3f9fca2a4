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

import sys
from pathlib import Path

from moecost import Calibration, MeasuredRun
from moecost.fitting import PRIORS, fit, fit_stacks
from moecost.measurements import runs_behind

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "moecost" / "data" / "calibrations"
sys.path.insert(0, str(ROOT / "tests"))  # the paper's points and recipes are read in one place
import paper_runs  # noqa: E402


def runs_of_the_paper(model: str) -> list[MeasuredRun]:
    """One epoch of 1,000 queries each, as the artifact timed them; without the points flagged as outliers."""
    return [
        MeasuredRun(job=run.job(), run_hours=1000 / run.queries_per_second / 3600, source="arXiv:2408.04693")
        for run in paper_runs.throughput()
        if run.model == model and not run.flag
    ]


def refit(name: str) -> Calibration:
    if name in ("hf-peft-2024", "blackmamba-2024"):
        model = "Mixtral" if name == "hf-peft-2024" else "BlackMamba"
        found = fit(runs_of_the_paper(model), software="hf-peft-2024", name=name, base=PRIORS)
        gpus = "A40, A100 and H100" if model == "Mixtral" else "A40 only"
        note = f"fitted on the unflagged {model} points of Figs 14 and 15 ({gpus}): queries/s of one epoch of 1,000"
        # no run of the paper has a measured peak: the largest batches of its Table III bound the error of memory
        return found.model_copy(update={"notes": (note,), "log_sd_memory": 0.05 if model == "Mixtral" else 0.08})
    found = fit_stacks(runs_behind(name), name=name)
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
