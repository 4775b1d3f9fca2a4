"""Does the tasks of a probe with PyTorch on a device, and times them. Extra `[probe]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from moecost.errors import InvalidInputError, UnsupportedError
from moecost.measured_run import out_of_memory
from moecost.probe.mixtures import eager, experts_of, grouped
from moecost.probe.tasks import CannotMeasureError, Task

Work: TypeAlias = Callable[[], object]

REPEATS: Final = 7
LEAST_S: Final = {"cuda": 10e-3, "cpu": 10e-3}
"""Least time of one repeat: the work is done as often as that takes, so that the clock's own time is lost in it. [s]"""
MOST_CALLS: Final = 2_000
NF4_BLOCK: Final = 64


def torch_module() -> Any:
    """PyTorch, or an error that says how to get it."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            "probing needs PyTorch: pip install 'moecost[probe]' (or a build of torch for your GPU first)"
        ) from None
    return torch


def dtype_of(name: str) -> Any:
    """PyTorch's data type of our name."""
    torch = torch_module()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


class TorchClock:
    """Times tasks on a device of PyTorch by the wall clock, which the host's time is part of.

    Parameters
    ----------
    device : `cuda` or `cpu`.
    repeats : how often each task is timed.
    """

    def __init__(self, device: str, repeats: int = REPEATS) -> None:
        self.torch = torch_module()
        if device == "cuda" and not self.torch.cuda.is_available():
            raise UnsupportedError(
                f"device='cuda': PyTorch {self.torch.__version__} finds no CUDA device here; use --device cpu, or a "
                "build of PyTorch and a driver for the GPU"
            )
        if repeats < 1:
            raise InvalidInputError(f"repeats={repeats} must be 1 or more")
        self.device, self.repeats = device, repeats

    def measure(self, task: Task) -> Sequence[float]:
        """Seconds of each repeat; see `Clock`."""
        try:
            return self._time(self._work(task))
        except CannotMeasureError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise CannotMeasureError("the device ran out of memory") from None
            text = (str(error).strip() or "no message").splitlines()[0]
            raise CannotMeasureError(f"{type(error).__name__}: {text:.200}") from None
        finally:
            if self.device == "cuda":
                self.torch.cuda.empty_cache()

    def _time(self, work: Work) -> list[float]:
        for _ in range(2):  # the first call compiles, chooses and allocates
            once = self._calls(work, 1)
        calls = min(max(round(LEAST_S[self.device] / once), 1), MOST_CALLS)
        return [self._calls(work, calls) for _ in range(self.repeats)]

    def _calls(self, work: Work, calls: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _random(self, *shape: int, dtype: str) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=dtype_of(dtype))

    # ------------------------------------------------------------------------------------------------ the work
    def _work(self, task: Task) -> Work:
        makers: dict[str, Callable[[Task], Work]] = {
            "gemm": self._gemm, "copy": self._elementwise, "add": self._elementwise, "launch": self._launch,
            "linear": self._linear, "dequantize": self._dequantize, "attention": self._attention,
            "optimizer": self._optimizer, "eager": self._mixture, "grouped": self._mixture,
        }  # fmt: skip
        return makers[task.kind](task)

    def _gemm(self, task: Task) -> Work:
        a = self._random(task["rows"], task["in_features"], dtype=task.dtype)
        b = self._random(task["in_features"], task["out_features"], dtype=task.dtype)
        out = a @ b
        return lambda: self.torch.mm(a, b, out=out)

    def _elementwise(self, task: Task) -> Work:
        a, b = (self._random(task["elements"], dtype=task.dtype) for _ in range(2))
        if task.kind == "copy":
            return lambda: b.copy_(a)
        out = self.torch.empty_like(a)
        return lambda: self.torch.add(a, b, out=out)

    def _launch(self, task: Task) -> Work:
        x = self._random(task["elements"], dtype=task.dtype)
        return lambda: x.add_(1.0)

    def _linear(self, task: Task) -> Work:
        nn, width = self.torch.nn, task["hidden"]
        layers = [nn.Linear(width, width, bias=False, device=self.device, dtype=dtype_of(task.dtype))
                  for _ in range(task["layers"])]  # fmt: skip
        chain = nn.Sequential(*layers)
        x = self._random(1, width, dtype=task.dtype).requires_grad_()
        return self._passes(lambda: chain(x), [x, *chain.parameters()], task.how)

    def _dequantize(self, task: Task) -> Work:
        try:
            from bitsandbytes import functional
        except Exception:  # it probes for libraries of its own, and fails in many ways
            raise CannotMeasureError("the package bitsandbytes is not there, or does not work here") from None
        weight = self._random(task["elements"] // NF4_BLOCK, NF4_BLOCK, dtype=task.dtype)
        held, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
        return lambda: functional.dequantize_4bit(held, state)

    def _attention(self, task: Task) -> Work:
        shape = (task["batch"], task["heads"], task["length"], task["head_dim"])
        q, k, v = (self._random(*shape, dtype=task.dtype).requires_grad_() for _ in range(3))
        attend = self.torch.nn.functional.scaled_dot_product_attention
        return self._passes(lambda: attend(q, k, v, is_causal=True), [q, k, v], task.how)

    def _optimizer(self, task: Task) -> Work:
        weight = self.torch.nn.Parameter(self._random(task["elements"], dtype=task.dtype))
        weight.grad = self.torch.zeros_like(weight)
        return self.torch.optim.AdamW([weight], foreach=True).step  # type: ignore[no-any-return]

    def _mixture(self, task: Task) -> Work:
        layer = experts_of(task, self.device, dtype_of(task.dtype))
        run = eager if task.kind == "eager" else grouped(self.device)
        return self._passes(lambda: run(layer), layer.trained, task.how)

    def _passes(self, forward: Callable[[], Any], trained: Sequence[Any], how: str) -> Work:
        """Forward alone, with its backward pass, or with the forward pass done again in between."""
        if how == "forward":
            return forward
        if how == "checkpointed":
            from torch.utils.checkpoint import checkpoint

            plain, forward = forward, lambda: checkpoint(plain, use_reentrant=False)
        slope = self.torch.ones_like(forward())

        def both() -> object:
            return self.torch.autograd.grad(forward(), trained, slope)

        return both
