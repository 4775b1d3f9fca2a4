"""A tool that uses moecost: it lets a job into the queue only where it fits and stays within a budget.

    python as_dependency.py job.yaml --budget 50 --deadline-hours 48

Writes one line of JSON to stdout, for whatever submits the job. Exit status: 0 submit it, 1 do not (the JSON says why),
2 the job cannot be read. A guard asks for the upper end of the interval, not for the estimate: of ten jobs that it
lets pass, nine should stay within the budget.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from moecost import Estimate, Job, MoECostError, estimate

SUBMIT, REFUSE, BAD_JOB = 0, 1, 2
CERTAINTY = 0.9
"""Of a cost or time that is no higher; a level of L has (1 - L) / 2 above its upper end."""
LEVEL = 2 * CERTAINTY - 1


@dataclass(frozen=True)
class Verdict:
    """What the guard says of a job."""

    submit: bool
    reasons: list[str]
    cost_usd: float | None
    cost_usd_at_most: float | None
    hours: float
    hours_at_most: float
    memory_gib: float
    notes: list[str]


def judge(e: Estimate, *, budget_usd: float, deadline_hours: float) -> Verdict:
    """Whether a run stays within memory, budget and deadline, and each reason why not."""
    dollars, hours = e.interval("cost_usd", LEVEL)[1], e.interval("hours", LEVEL)[1]
    reasons = []
    if not e.fits:
        reasons.append(f"needs {e.memory.device_gib:.1f} GiB, the {e.gpu} has {e.memory.usable_gib:.1f}")
    if math.isnan(dollars):
        reasons.append(f"no price is known for {e.gpu}; set price in the job")
    elif dollars > budget_usd:
        reasons.append(f"may cost ${dollars:.2f}, the budget is ${budget_usd:.2f}")
    if hours > deadline_hours:
        reasons.append(f"may take {hours:.1f} h, the deadline is {deadline_hours:.1f} h")
    return Verdict(
        submit=not reasons,
        reasons=reasons,
        cost_usd=None if math.isnan(e.cost_usd) else round(e.cost_usd, 2),
        cost_usd_at_most=None if math.isnan(dollars) else round(dollars, 2),
        hours=round(e.hours, 3),
        hours_at_most=round(hours, 3),
        memory_gib=round(e.memory.device_gib, 2),
        notes=list(e.notes),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent / "mixtral-a40.yaml"
    parser.add_argument("job", type=Path, nargs="?", default=default, help="the example's job")
    parser.add_argument("--budget", type=float, default=50.0, metavar="DOLLARS", help="50")
    parser.add_argument("--deadline-hours", type=float, default=math.inf, metavar="HOURS", help="none")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # an estimate says the same in its notes
    try:
        job = Job.from_yaml(asked.job).model_copy(update={"on_oom": "report"})
        found = estimate(job)
    except MoECostError as error:
        print(json.dumps({"submit": False, "reasons": [str(error)]}))
        return BAD_JOB
    verdict = judge(found, budget_usd=asked.budget, deadline_hours=asked.deadline_hours)
    print(json.dumps(asdict(verdict)))
    return SUBMIT if verdict.submit else REFUSE


if __name__ == "__main__":
    sys.exit(main())
