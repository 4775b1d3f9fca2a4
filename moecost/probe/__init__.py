"""Measure a machine, and get the coefficients that it implies. Needs PyTorch: extra `[probe]`.

`probe_machine` times products, copies, launches, attention, a small mixture of experts and, with several GPUs, their
exchanges, and returns a `Calibration` for this machine; `moecost.probe.training` runs a few real optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Final

from moecost.calibration import Calibration
from moecost.errors import InvalidInputError
from moecost.probe.clock import REPEATS, TorchClock
from moecost.probe.collectives import CollectiveClock
from moecost.probe.implied import calibration
from moecost.probe.machine import Machine, peaks_of, this_machine, versions
from moecost.probe.tasks import COLLECTIVES, Clock, Size, Task, Timed, collective_tasks, single_tasks, time_tasks
from moecost.probe_record import ProbeRecord
from moecost.software import SoftwareProfile

CPU_PROCESSES: Final = 2
"""Processes that exchange with each other on the CPU, in place of GPUs."""


def probe_machine(
    device: str | None = None,
    gpu: str | Path | None = None,
    *,
    node: str | None = None,
    num_gpus: int | None = None,
    software: str = "hf-peft",
    size: Size | None = None,
    repeats: int = REPEATS,
    told: Callable[[int, int, Task], object] = lambda done, total, task: None,
    keep: Callable[[Calibration], object] = lambda so_far: None,
) -> Calibration:
    """Time this machine, and say which coefficients that implies.

    Parameters
    ----------
    device : `cuda` or `cpu`; None: a GPU where there is one. What is probed on a CPU serves no job on a GPU.
    gpu : name or spec file of the GPU, where its own name is not in the catalogue; `measured`: shares of what is
        measured.
    node : machine type whose links join the GPUs; None: the GPU's reference machine.
    num_gpus : that exchange with each other; None: all (two processes on a CPU), 1: no exchanges.
    software : profile whose counts of launches and copies give the coefficients their meaning.
    size : of the tasks; None: `full` on a GPU, `small` on a CPU.
    repeats : how often each task is timed.
    told : is told (number done, of all, task) before each task.
    keep : gets what there is so far after each kind of task, with `probe.complete` False.

    Returns
    -------
    Calibration : the profile's, with what was probed in its place; `probe` has the timings. Ctrl-C ends it with what
        there is.

    Raises
    ------
    UnsupportedError : no PyTorch, or no CUDA device although one is asked for.
    """
    machine = this_machine(device, gpu, node)
    size = size or ("small" if machine.device == "cpu" else "full")
    count = _count(machine, num_gpus)
    exchanges = collective_tasks(size, machine.dtypes[0], count)
    tasks = [*single_tasks(size, machine.dtypes), *exchanges]
    clock = _MachineClock(
        TorchClock(machine.device, repeats), CollectiveClock(exchanges, machine.device, count, repeats)
    )
    profile = SoftwareProfile.load(software)
    done = iter(range(len(tasks)))

    def found(timed: Timed) -> Calibration:
        return implied_by(machine, timed, profile)

    return found(
        time_tasks(
            tasks,
            clock,
            told=lambda task: told(next(done), len(tasks), task),
            keep=lambda so_far: keep(found(so_far)),
        )
    )


def implied_by(machine: Machine, timed: Timed, profile: SoftwareProfile) -> Calibration:
    """The calibration of a machine from what was timed on it."""
    record = ProbeRecord(
        device=machine.name,
        device_name=machine.device_name,
        num_devices=machine.num_devices,
        driver=machine.driver,
        versions=versions(),
        date=date.today().isoformat(),
        complete=timed.complete,
        peaks=peaks_of(machine, timed.timings),
        peaks_of="measured" if machine.spec is None else "catalogue",
        timings=timed.timings,
        notes=timed.left_out,
    )
    return calibration(record, profile, Calibration.load(profile.calibration), machine.architecture)


def _count(machine: Machine, num_gpus: int | None) -> int:
    there = CPU_PROCESSES if machine.device == "cpu" else machine.num_devices
    if num_gpus is None:
        return there
    if num_gpus < 1 or (machine.device == "cuda" and num_gpus > there):
        raise InvalidInputError(f"num_gpus={num_gpus} must be 1 to the {there} that are here")
    return num_gpus


class _MachineClock:
    """One device for most tasks, all of them for exchanges."""

    def __init__(self, one: Clock, several: Clock) -> None:
        self.one, self.several = one, several

    def measure(self, task: Task) -> Sequence[float]:
        return (self.several if task.kind in COLLECTIVES else self.one).measure(task)
