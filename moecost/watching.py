"""Watch a run: time and memory of its steps against the estimate while it goes on, and a measured run when it ends.

Nothing here raises into the loop that is watched, or waits for its device: what fails is said once, and watching ends.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self

import numpy as np

from moecost.errors import InvalidInputError
from moecost.job import Job
from moecost.measured_run import MeasuredRun, out_of_memory
from moecost.results import Estimate
from moecost.run_json import SUFFIX, write_runs
from moecost.units import GIB, HOUR

WARM_UP: Final = 2
"""First steps, which load, allocate and choose kernels: they are spent, but tell nothing of those to come."""
ENOUGH: Final = 10
"""Counted steps from which on a run is judged by its estimate."""
EVERY_S: Final = 30.0
MAX_LENGTHS: Final = 2_000
"""Different shapes of batches that are told apart."""
SAME: Final = 0.02
"""Lengths that differ by no more than this share are one."""

P = ParamSpec("P")


def _safely(method: Callable[Concatenate[Watch, P], None]) -> Callable[Concatenate[Watch, P], None]:
    """The method, which never raises, and keeps account of its time."""

    @functools.wraps(method)
    def safe(self: Watch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.broken:
            return
        start = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._give_up(error)
        finally:
            self.own_seconds += time.perf_counter() - start

    return safe


class Watch:
    """A run that is watched; `watch` makes one, and `moecost.callback` one for the Hugging Face Trainer.

    Attributes
    ----------
    job : what is run; None: not known yet.
    estimate : of it; None until it is made, beside the loop, or where it cannot be.
    out : where the measured run is written; None: nowhere.
    own_seconds : time that watching has taken. [s]
    broken : watching has failed, and has ended.
    """

    def __init__(
        self,
        job: Job | Mapping[str, Any] | str | Path,
        *,
        steps: int | None = None,
        out: str | Path | None = f"run{SUFFIX}",
        every: float = EVERY_S,
        say: Callable[[str], object] | None = None,
        level: float = 0.8,
        quiet: bool | None = None,
    ) -> None:
        if steps is not None and steps < 1:
            raise InvalidInputError(f"steps={steps!r:.80} must be 1 or more, or None where it is not known")
        if not 0.0 < level < 1.0:
            raise InvalidInputError(f"level={level!r:.80} must lie between 0 and 1")
        self.job, self.fields = _job(job)
        self.steps, self.every, self.level = steps, every, level
        self.quiet = os.environ.get("RANK", "0") != "0" if quiet is None else quiet  # one process of a run speaks
        self.say = say or to_stderr
        self.out = None if out is None or self.quiet else Path(out)
        self.estimate: Estimate | None = None
        self.broken = self.done = self.told_outside = self.disk_failed = self.kept = False
        self.own_seconds = self.paused = 0.0
        self.shapes: Counter[tuple[int, int]] = Counter()
        self.times = array.array("d")
        self.count = self.batches = 0
        self.started = self.last = self.shown = time.perf_counter()
        self.ended: float | None = None
        self.estimated: Job | None = None
        self.thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------- what the loop tells
    @_safely
    def start(self) -> None:
        """The first step begins."""
        self.started = self.last = self.shown = time.perf_counter()
        atexit.register(self._at_exit)
        if self.job is not None:
            self._estimate_beside()

    @_safely
    def batch(self, rows: int, length: int) -> None:
        """A micro-batch of `rows` sequences, padded to `length` tokens."""
        self.batches += 1
        if len(self.shapes) < MAX_LENGTHS or (rows, length) in self.shapes:
            self.shapes[rows, length] += 1

    @_safely
    def step(self, rows: int | None = None, length: int | None = None) -> None:
        """An optimizer step has ended; a loop with one micro-batch a step may tell its shape here."""
        if rows is not None and length is not None:
            self.batch(rows, length)
        now = time.perf_counter()
        self.count += 1
        if self.count > WARM_UP:
            self.times.append(now - self.last)
        self.last = now
        if self.count == WARM_UP + 1 and self._known_job() != self.estimated:  # the batches differ from what was told
            self._estimate_beside()
        if now - self.shown >= self.every:
            self.shown = now
            self._show()
            self._keep(complete=False)

    @_safely
    def pause(self) -> None:
        """Something else than a step has been done (an evaluation, a checkpoint): the time since the last step's end
        belongs to no step."""
        now = time.perf_counter()
        self.paused += now - self.last
        self.last = now

    @_safely
    def finish(self, complete: bool = True, outcome: str | None = "ok") -> None:
        """The run has ended: the last word is said, and the measured run written.

        Parameters
        ----------
        complete : it came to its end; else it ended with the last step that was told.
        outcome : `ok`, `oom`, or None where nobody knows.
        """
        if self.done:
            return
        self.done = True
        self.ended = time.perf_counter() if complete else self.last
        atexit.unregister(self._at_exit)
        if self.thread is not None:
            self.thread.join(JOIN_S)
        if self.count:
            self._show()
        self._keep(complete=complete, outcome=outcome)
        if self.kept and not self.disk_failed:
            use = f"; `moecost fit {self.out}` learns from it" if self.times and self.estimate is not None else ""
            self._tell(f"measured run written: {self.out}{use}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome = "ok" if error is None else "oom" if out_of_memory(error) else None
        self.finish(complete=error is None and (self.steps is None or self.count >= self.steps), outcome=outcome)

    def _at_exit(self) -> None:
        """The process ends in the middle of the run."""
        self.finish(complete=False, outcome=None)

    # -------------------------------------------------------------------------------------------------- the estimate
    def _estimate_beside(self) -> None:
        """In a thread of its own, so that the loop never waits for it."""
        self.estimated = self._known_job()
        self.thread = threading.Thread(
            target=self._estimate, args=(self.estimated,), name="moecost-estimate", daemon=True
        )
        self.thread.start()

    def _estimate(self, job: Job | None) -> None:
        try:
            from moecost.estimation import estimate_job

            if job is None:
                return
            found = estimate_job(job.model_copy(update={"on_oom": "report"}))
            if threading.current_thread() is not self.thread:  # overtaken by one that knows more
                return
            self.estimate = found
            if not found.fits:
                memory = found.memory
                self._tell(
                    f"by the estimate this job does not fit: {memory.device_gib:.1f} GiB of {memory.usable_gib:.1f}"
                )
        except Exception as error:
            self._tell(f"no estimate to compare with: {told_of(error)}")

    def _told_job(self) -> Job | None:
        """The job as given, or as far as it was found out, with the lengths that were seen."""
        if self.job is not None:
            return self.job
        mean, _ = self.mean_and_longest()
        return None if mean is None or "gpu" not in self.fields else Job(**self.fields, sequence_length=mean)

    def _known_job(self) -> Job | None:
        """The same with the batches that were seen."""
        job = self._told_job()
        return None if job is None else job.model_copy(update=self._seen(job))

    def _seen(self, job: Job) -> dict[str, Any]:
        """What the loop tells otherwise than the job: the usual micro-batch, and how many there are a step."""
        if not self.shapes:
            return {}
        rows: Counter[int] = Counter()
        for (n, _), count in dict(self.shapes).items():
            rows[n] += count
        found: dict[str, Any] = {"micro_batch_size": rows.most_common(1)[0][0]}
        each = round(self.batches / self.count) if self.count else 0
        if each and job.global_batch_size is None and each != (job.gradient_accumulation_steps or 1):
            found["gradient_accumulation_steps"] = each
        return {name: value for name, value in found.items() if getattr(job, name) != value}

    def _contradictions(self) -> list[str]:
        job = self._told_job()
        return (
            []
            if job is None
            else [
                f"{name}={getattr(job, name)} in the job, {value} in the loop"
                for name, value in self._seen(job).items()
                if getattr(job, name) is not None
            ]
        )

    # --------------------------------------------------------------------------------------------------- the figures
    def mean_and_longest(self) -> tuple[int | None, int | None]:
        """Mean length of the sequences, padding included, and the longest; None where no batch was told. [token]"""
        shapes = dict(self.shapes)
        rows = sum(n * count for (n, _), count in shapes.items())
        if not rows:
            return None, None
        return round(sum(n * s * count for (n, s), count in shapes.items()) / rows), max(s for _, s in shapes)

    def hours(self) -> tuple[float, float | None]:
        """(spent, left); None where the number of steps is not known. [h]"""
        spent = ((time.perf_counter() if self.ended is None else self.ended) - self.started) / HOUR
        if self.steps is None or not self.times:
            return spent, None
        recent = self.times[-RECENT:]
        each = sum(recent) / len(recent) + self.paused / self.count
        return spent, max(self.steps - self.count, 0) * each / HOUR

    def expected_hours(self) -> tuple[float, float, float] | None:
        """(hours of all steps as estimated, low, high); None without an estimate. [h]

        Steps alone: a loop is watched from its first step on, so start-up and saves have no part in it.
        """
        e = self.estimate
        if e is None:
            return None
        hours = (e.steps if self.steps is None else self.steps) / HOUR
        low, high = e.interval("step.seconds", self.level)
        return e.step.seconds * hours, low * hours, high * hours

    def status(self) -> str:
        """One line: how far the run is, what it has taken and will take, against the estimate."""
        spent, left = self.hours()
        of = "" if self.steps is None else f" of {self.steps:,}"
        parts = [f"step {self.count:,}{of}: {self._amount(spent)} spent"]
        if left is not None:
            parts += [f"{self._amount(left)} left", f"{self._amount(spent + left)} in all"]
        expected = self.expected_hours()
        if expected is None:
            return ", ".join(parts)
        hours, low, high = expected
        return f"{', '.join(parts)}; estimated {self._amount(hours)} ({_hours(low)} to {_hours(high)})"

    def _amount(self, hours: float) -> str:
        e = self.estimate
        usd = float("nan") if e is None else hours * e.num_gpus * e.usd_per_gpu_hour
        return _hours(hours) if usd != usd or usd == 0.0 else f"{_hours(hours)} and ${usd:,.2f}"

    def _show(self) -> None:
        self._tell(self.status())
        if self.estimate is None or len(self.times) < ENOUGH or self.told_outside:
            return
        mean, (low, high) = statistics.fmean(self.times), self.estimate.interval("step.seconds", self.level)
        if not low <= mean <= high:
            self.told_outside = True
            spent, left = self.hours()
            in_all = "" if left is None else f", {_hours(spent + left)} in all"
            self._tell(
                f"the run has left the {100 * self.level:.0f} % interval of its estimate: it is "
                f"{'slower' if mean > high else 'faster'}{in_all}; a step takes {mean:.3g} s, "
                f"{low:.3g} to {high:.3g} s were expected"
            )

    # ------------------------------------------------------------------------------------------------------ the runs
    def runs(self, complete: bool = True, outcome: str | None = "ok") -> list[MeasuredRun]:
        """What was measured so far: two runs where time belongs to the mean length and memory to the longest."""
        job, peak = self._known_job(), _peak_gib()
        if job is None or not (self.times or outcome == "oom"):
            return []
        notes = "; ".join([*([] if complete else [f"ended after {self.count} steps"]), *self._contradictions()])
        shared: dict[str, Any] = {
            "outcome": outcome, "source": "watched by moecost", "source_key": "own", "date": date.today().isoformat(),
            "notes": notes,
        }  # fmt: skip
        time_of: dict[str, Any] = {"step_seconds": statistics.fmean(self.times)} if self.times else {}
        memory: dict[str, Any] = {} if peak is None else {"peak_memory_gib": peak, "memory_kind": "allocated"}
        mean, longest = self.mean_and_longest()
        if job.dataset is not None or mean is None or longest is None:
            return [MeasuredRun(job=job, **time_of, **memory, **shared)]
        of_mean, of_longest = (
            job.model_copy(update={"sequence_length": n, "padding": "max_length"}) for n in (mean, longest)
        )
        if not memory or longest <= (1 + SAME) * mean:
            return [MeasuredRun(job=of_mean, **time_of, **memory, **shared)]
        found = [MeasuredRun(job=of_mean, **time_of, **shared)] if time_of else []
        return [*found, MeasuredRun(job=of_longest, **memory, **shared)]

    def record(self, complete: bool) -> dict[str, Any]:
        """What is written beside the runs."""
        lengths: Counter[int] = Counter()
        for (rows, length), count in self.shapes.items():
            lengths[length] += rows * count
        return {
            "steps": self.count,
            "of_steps": self.steps,
            "complete": complete,
            "hours": self.hours()[0],
            "step_seconds": self._times() if self.done else {},  # sorting them takes time that a run shall not wait
            "sequences_by_padded_length": {str(n): lengths[n] for n in sorted(lengths)},
            "batches": [[rows, length, count] for (rows, length), count in sorted(self.shapes.items())],
            "own_seconds": self.own_seconds,
            "estimated_step_seconds": None if self.estimate is None else self.estimate.step.seconds,
        }  # fmt: skip

    def _times(self) -> dict[str, float]:
        if not self.times:
            return {}
        low, middle, high = np.quantile(self.times, (0.1, 0.5, 0.9)).tolist()
        return {"mean": statistics.fmean(self.times), "q10": low, "median": middle, "q90": high}

    def _keep(self, complete: bool, outcome: str | None = "ok") -> None:
        """Write what there is; a disk that fails is told of once, and tried again the next time."""
        runs = self.runs(complete, outcome)
        if self.out is None:
            return
        if not runs:
            if complete or self.done:
                self._tell("nothing is written: no step was counted, or the job is not known; pass job= or gpu=")
            return
        try:
            if not self.kept:  # what is there by now is another's
                self.out = free_name(self.out)
            write_runs(self.out, runs, self.record(complete))
            self.disk_failed, self.kept = False, True
        except InvalidInputError as error:
            if not self.disk_failed:
                self._tell(f"the measured run is not written: {error}")
            self.disk_failed = True

    # ---------------------------------------------------------------------------------------------------------- words
    def _tell(self, text: str) -> None:
        if not self.quiet:
            with contextlib.suppress(Exception):
                self.say(f"moecost: {text}")

    def _give_up(self, error: Exception) -> None:
        self.broken = True
        self._tell(f"watching ends: {told_of(error)}; the run is not concerned")


JOIN_S: Final = 5.0
"""How long the end of a run waits for an estimate that is still being made. [s]"""
RECENT: Final = 200
"""Steps whose mean tells of those to come."""


def watch(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    steps: int | None = None,
    out: str | Path | None = f"run{SUFFIX}",
    every: float = EVERY_S,
    say: Callable[[str], object] | None = None,
    level: float = 0.8,
) -> Watch:
    """A context in which a training loop is watched.

    Parameters
    ----------
    job : what is run: a `Job`, its fields, or a job file.
    steps : optimizer steps of the run; None: not known, and neither is what is left.
    out : file for the measured run; one that is there is left alone, and another name taken. None: none is written.
    every : seconds between two lines.
    say : gets each line; None: they go to stderr.
    level : probability of the interval that a run may leave.

    Returns
    -------
    Watch : call its `step()` after each optimizer step, and `batch(rows, length)` for each micro-batch.

    Notes
    -----
    Nothing it does raises into the loop; a job or option that cannot be is refused before it begins. Hours and dollars
    are those from the first step on, against the estimated time of the steps. Of several processes (`RANK` in the
    environment) the first one speaks.

    >>> with watch({"model": "mistral-7b", "gpu": "a40", "sequence_length": 64, "method": "lora"}, steps=3, out=None,
    ...            say=lambda line: None) as run:
    ...     for _ in range(3):
    ...         run.step(rows=1, length=64)
    >>> run.count
    3
    """
    return Watch(job, steps=steps, out=out, every=every, say=say, level=level)


def _job(job: Job | Mapping[str, Any] | str | Path) -> tuple[Job | None, dict[str, Any]]:
    """(the job, its fields as far as they are known)."""
    if isinstance(job, Job):
        return job, {}
    if isinstance(job, str | Path):
        return Job.from_yaml(job), {}
    fields = dict(job)
    Job(**({"gpu": "any", "sequence_length": 1} | fields))  # what is wrong with them is said now, not after some steps
    known = "sequence_length" in fields or "dataset" in fields
    return (Job(**fields), fields) if known and "gpu" in fields else (None, fields)


def free_name(path: Path) -> Path:
    """The path, or where it is taken the next with a number that is free."""
    stem = path.name.removesuffix(SUFFIX) if path.name.endswith(SUFFIX) else path.stem
    end = path.name[len(stem) :]
    number, found = 2, path
    while found.exists():
        found, number = path.with_name(f"{stem}-{number}{end}"), number + 1
    return found


def _peak_gib() -> float | None:
    """Most that PyTorch has allocated on this process's GPU; None where it has none. [GiB]"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.max_memory_allocated()) / GIB or None


def to_stderr(line: str) -> None:
    """Write a line, where there is an stderr at all."""
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * HOUR:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 1.0 else f"{hours:,.2f} h"


def told_of(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
