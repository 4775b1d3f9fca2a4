"""What `moecost probe` does: files are checked before a machine is kept busy, and kept whatever happens. Prints nothing
itself."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from moecost.calibration import Calibration
from moecost.errors import InvalidInputError, MoECostError
from moecost.job import Job
from moecost.probe import probe_machine
from moecost.probe.tasks import Task
from moecost.probe.training import ShortRun, train_briefly
from moecost.probe_record import PROBED, Timing
from moecost.run_json import SUFFIX, write_runs

Say = Callable[[str], object]
T = TypeVar("T")
CHECKED: Final = ("eager", "grouped")
"""Kinds of task that coefficients are not fitted to, and so check them."""


def check_new_file(path: Path, suffix: str, force: bool) -> None:
    """Before the work is done: the file is new (or may go), its name ends as it should, its folder takes files.

    Raises
    ------
    InvalidInputError : with what is wrong.
    """
    if not path.name.lower().endswith(suffix):
        raise InvalidInputError(f"{path}: the name must end in {suffix}")
    if path.exists() and (path.is_dir() or not force):
        raise InvalidInputError(f"{path}: is there already; give another name with -o" + (
            "" if path.is_dir() else ", or --force to replace it"))  # fmt: skip
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


class Keeper(Generic[T]):
    """Writes what there is so far; a folder that stops taking files is told of once, and the work goes on."""

    def __init__(self, path: Path, write: Callable[[Path, T], object], say: Say) -> None:
        self.path, self.write, self.say, self.failed = path, write, say, ""

    def keep(self, so_far: T) -> bool:
        """Whether it could be written."""
        try:
            self.write(self.path, so_far)
        except MoECostError as error:
            if not self.failed:
                self.say(str(error))
            self.failed = str(error)
            return False
        self.failed = ""
        return True


@contextlib.contextmanager
def ended_politely() -> Iterator[None]:
    """A request to end (SIGTERM, as schedulers send it) is taken as Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone hears of it
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_probe(out: Path, told: Callable[[int, int, Task], object], say: Say, **how: Any) -> tuple[Calibration, bool]:
    """(what the machine implies, whether it was written)."""
    keeper = Keeper[Calibration](out, lambda path, so_far: so_far.save(path), say)
    with ended_politely():
        found = probe_machine(told=told, keep=keeper.keep, **how)
    if found.probe is None or not found.probe.timings:
        raise InvalidInputError("the probe was ended before anything was timed; nothing is kept")
    found = found.model_copy(update={"name": out.stem})
    return found, keeper.keep(found)


def run_training(
    job: Job, out: Path, told: Callable[[int, int, float], object], say: Say, **how: Any
) -> tuple[ShortRun, bool]:
    """(what the short run brought, whether it was written). With no step that counts, nothing is."""

    def write(path: Path, so_far: ShortRun) -> None:
        if so_far.run is not None:
            write_runs(path, [so_far.run], so_far.record)

    keeper = Keeper[ShortRun](out, write, say)
    with ended_politely():
        done = train_briefly(job, told=told, keep=keeper.keep, **how)
    if done.run is None:
        raise InvalidInputError(f"the run was ended by {done.ended_by} before a step could be counted; nothing is kept")
    return done, keeper.keep(done)


def default_name(device: str) -> Path:
    """Of a probe's file."""
    return Path(f"probe-{re.sub(r'[^a-z0-9.]+', '-', device.lower())}.yaml")


def default_run_name(job: Path) -> Path:
    """Of a short run's file."""
    return Path(f"{job.stem}{SUFFIX}")


# ----------------------------------------------------------------------------------------------------------- text
def probe_text(c: Calibration, width: int) -> str:
    """What was probed: the coefficients it implies, and how well they predict what they were not fitted to."""
    assert c.probe is not None
    record = c.probe
    kept = [name for name, one in c.coefficients.items() if one.why.startswith(PROBED)]
    versions = ", ".join(f"{k} {v}" for k, v in record.versions.items() if k in ("torch", "cuda"))
    several = f"{record.num_devices} x " if record.num_devices > 1 else ""
    lines = [f"PROBE of {several}{record.device_name}, {record.date}: {len(record.timings)} timings, {versions}"]
    if not record.complete:
        lines.append("ended early: what is missing below was not timed")
    lines.append("COEFFICIENTS, shares of " + (
        "the catalogue's peaks" if record.peaks_of == "catalogue" else "the highest rates measured here"))  # fmt: skip
    for name in kept:
        one = c.coefficients[name]
        lines.append(f"  {name:<24}{one.value:>10.4g}  spread {100 * one.log_sd:.0f} %")
    if not kept:
        lines.append("  none")
    lines += _check_lines([t for t in record.timings if t.kind in CHECKED and t.predicted])
    lines.append("these kernels ran alone: `moecost fit` with this file and a measured run joins both")
    for note in record.notes:
        lines += textwrap.wrap(note, width, initial_indent="NOTE: ", subsequent_indent="  ")
    return "\n".join(lines)


def _check_lines(timings: Sequence[Timing]) -> list[str]:
    if not timings:
        return []
    lines = ["MIXTURES, not fitted to: predicted over measured time"]
    for t in timings:
        assert t.predicted is not None
        what = f"{t.kind} {t.how}, {t.sizes['tokens']:,} tokens"
        lines.append(f"  {what:<36}{1e3 * t.seconds:>10.3g} ms{t.predicted / t.seconds:>8.2f}")
    return lines


def training_text(done: ShortRun, estimated_s: float, width: int) -> str:
    """What a short run took, beside its estimate."""
    run = done.run
    assert run is not None
    lines = [f"SHORT RUN on {done.device_name}: {len(done.step_seconds)} steps counted"]
    if done.ended_by:
        lines.append(f"ended by {done.ended_by}")
    if run.step_seconds is not None:
        ratio = estimated_s / run.step_seconds
        lines.append(f"  a step {run.step_seconds:.4g} s; estimated {estimated_s:.4g} s, {ratio:.2f} of it")
        stages = done.record["stage_seconds"].items()
        lines += [f"  {name:<12}{seconds:>10.4g} s" for name, seconds in stages]
    if run.peak_memory_gib is not None:
        lines.append(f"  peak memory {run.peak_memory_gib:.2f} GiB allocated")
    lines += textwrap.wrap("; ".join(done.notes), width, initial_indent="NOTES: ", subsequent_indent="  ")
    return "\n".join(lines)
