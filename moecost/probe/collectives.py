"""Exchanges between the devices of one machine: one process a device, timed by the first of them."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from moecost.probe.clock import REPEATS, dtype_of, torch_module
from moecost.probe.tasks import CannotMeasureError, Task

TIMEOUT_S: Final = 120.0
"""How long a process waits for the others. [s]"""
CALLS: Final = 10


class CollectiveClock:
    """A `Clock` for collectives: does all tasks at the first question, in processes of their own.

    A process that dies (killed, out of memory) leaves what was timed before; the rest cannot be measured.
    """

    def __init__(self, tasks: Sequence[Task], device: str, num_gpus: int, repeats: int = REPEATS) -> None:
        self.tasks, self.device, self.num_gpus, self.repeats = list(tasks), device, num_gpus, repeats
        self.found: dict[Task, list[float]] | None = None
        self.why = "its process ended early"

    def measure(self, task: Task) -> Sequence[float]:
        """Seconds of each repeat; see `Clock`."""
        if self.found is None:
            self._run()
        assert self.found is not None
        if task not in self.found:
            raise CannotMeasureError(self.why)
        return self.found[task]

    def _run(self) -> None:
        torch_module()
        import torch.multiprocessing as processes

        with tempfile.TemporaryDirectory(prefix="moecost-") as folder:
            arguments = (self.num_gpus, folder, self.tasks, self.device, self.repeats)
            try:
                context = processes.spawn(_process, arguments, nprocs=self.num_gpus, join=False)
                _join(context)
            except Exception as error:
                self.why = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            finally:  # Ctrl-C keeps them too
                self.found = _results(Path(folder) / RESULTS, self.tasks)


def _join(context: Any) -> None:
    """Wait for all processes; none outlives an error or Ctrl-C."""
    try:
        while not context.join(timeout=1.0):
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
                process.join(5.0)


RESULTS: Final = "times.jsonl"


def _results(path: Path, tasks: Sequence[Task]) -> dict[Task, list[float]]:
    """A line a task that was done, in their order; the last one may be cut off."""
    found: dict[Task, list[float]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):
        for task, line in zip(tasks, lines, strict=False):
            found[task] = [float(s) for s in json.loads(line)]
    return found


def _process(rank: int, num_gpus: int, folder: str, tasks: Sequence[Task], device: str, repeats: int) -> None:
    """What each process does; the first writes the times down, task by task."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for these ends them
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_gpus,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        with open(Path(folder) / RESULTS, "a", encoding="utf-8") if rank == 0 else contextlib.nullcontext() as out:
            for task in tasks:
                work = _collective(task, device)
                times = [_timed(work, device) for _ in range(repeats)]
                if out is not None:
                    out.write(json.dumps(times) + "\n")
                    out.flush()
    finally:
        dist.destroy_process_group()


def _collective(task: Task, device: str) -> Callable[[], object]:
    """A call of it, on buffers that are `bytes` long where they are whole."""
    import torch
    import torch.distributed as dist

    dtype, n = dtype_of(task.dtype), task["num_gpus"]
    elements = max(task["bytes"] // dtype.itemsize // n, 1) * n
    whole = torch.zeros(elements, device=device, dtype=dtype)
    if task.kind == "allreduce":
        return lambda: dist.all_reduce(whole)
    if task.kind == "allgather":
        part = torch.zeros(elements // n, device=device, dtype=dtype)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
        return lambda: gather(whole, part)
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole)


def _timed(work: Callable[[], object], device: str) -> float:
    import torch
    import torch.distributed as dist

    work()
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS
