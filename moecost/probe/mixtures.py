"""A small mixture of experts as training stacks run it: each expert by itself, or all in one product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moecost.probe.tasks import Task


@dataclass(frozen=True)
class Mixture:
    """Router, experts and tokens. `up` holds gate and up projections: (experts, 2 x intermediate, hidden)."""

    x: Any
    router: Any
    modules: list[tuple[Any, Any, Any]]
    up: Any
    down: Any
    experts: int
    top_k: int
    chosen: Any

    @property
    def trained(self) -> list[Any]:
        """What gets a gradient."""
        if self.modules:
            return [self.x, self.router.weight, *(m.weight for expert in self.modules for m in expert)]
        return [self.x, self.router.weight, self.up, self.down]


def experts_of(task: Task, device: str, dtype: Any) -> Mixture:
    """The mixture of a task; its experts get equally many tokens each, whatever the router's weights say."""
    import torch

    e, k, h, f, tokens = (task[n] for n in ("experts", "top_k", "hidden", "intermediate", "tokens"))
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    chosen = torch.arange(tokens * k, device=device).remainder(e).reshape(tokens, k)

    def linear(a: int, b: int) -> Any:
        return torch.nn.Linear(a, b, bias=False, **options)

    eager_ones = task.kind == "eager"
    modules = [(linear(h, f), linear(h, f), linear(f, h)) for _ in range(e)] if eager_ones else []
    up = down = None
    if not eager_ones:
        up = (torch.randn(e, 2 * f, h, **options) * h**-0.5).requires_grad_()
        down = (torch.randn(e, h, f, **options) * f**-0.5).requires_grad_()
    x = torch.randn(tokens, h, **options).requires_grad_()
    return Mixture(x, linear(h, e), modules, up, down, e, k, chosen)


def _routed(layer: Mixture) -> Any:
    """Weights of the chosen experts, as a router has them: softmax in fp32, top-k, normalised."""
    import torch

    scores = torch.softmax(layer.router(layer.x).float(), dim=-1)
    torch.topk(scores, layer.top_k, dim=-1)  # its time counts; even choices replace it
    weights = scores.gather(1, layer.chosen)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(layer.x.dtype)


def eager(layer: Mixture) -> Any:
    """Expert by expert, as transformers 4 has it: find its tokens, gather, three products, scale, add."""
    import torch

    weights = _routed(layer)
    out = torch.zeros_like(layer.x)
    mask = torch.nn.functional.one_hot(layer.chosen, layer.experts).permute(2, 1, 0)
    for number, (gate, up, down) in enumerate(layer.modules):
        slot, token = torch.where(mask[number])
        rows = layer.x[token]
        rows = down(torch.nn.functional.silu(gate(rows)) * up(rows)) * weights[token, slot, None]
        out = out.index_add(0, token, rows)
    return out


def grouped(device: str) -> Callable[[Mixture], Any]:
    """All experts in one product: `grouped_mm` where PyTorch has it for the device, else a batched one."""
    import torch

    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if device == "cuda" and product is not None:
        return lambda layer: _sorted_run(layer, lambda rows, weights, ends: product(rows, weights, offs=ends))
    return lambda layer: _sorted_run(layer, _stacked)


def _stacked(rows: Any, weights: Any, ends: Any) -> Any:
    """Equally many rows of each expert as one batched product."""
    import torch

    return torch.bmm(rows.reshape(len(ends), -1, rows.shape[-1]), weights).reshape(len(rows), -1)


def _sorted_run(layer: Mixture, product: Callable[[Any, Any, Any], Any]) -> Any:
    """Tokens sorted by expert, two grouped products with the activation between them, back in place and added up."""
    import torch

    weights = _routed(layer)
    flat = layer.chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token = order // layer.top_k
    ends = torch.cumsum(torch.bincount(flat, minlength=layer.experts), 0).to(torch.int32)
    both = product(layer.x[token], layer.up.transpose(1, 2), ends)
    gate, up = both.chunk(2, dim=-1)
    rows = product(torch.nn.functional.silu(gate) * up, layer.down.transpose(1, 2), ends)
    rows = rows * weights.reshape(-1)[order, None]
    return torch.zeros_like(layer.x).index_add(0, token, rows)
