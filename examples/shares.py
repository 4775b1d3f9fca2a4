"""How the shares of time and of memory move as sequence length, batch size and model size grow.

Draws six panels into `shares.png` (or the path given as the first argument).
"""

import sys
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from moecost import Estimate, estimate

warnings.simplefilter("ignore")

# Okabe and Ito's palette: told apart by readers of any colour vision
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
LAYERS = ("moe", "mlp", "attention", "norm", "embedding", "head", "optimizer")
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers")
MODELS = ("llama-3.2-3b", "mistral-7b", "qwen3-30b-a3b", "mixtral-8x7b")


def run(model: str = "mixtral-8x7b", length: int = 1024, batch: int = 4) -> Estimate:
    return estimate(
        model,
        "h100-80gb-sxm",
        method="qlora",
        lora_targets="attention",
        sequence_length=length,
        micro_batch_size=batch,
        gradient_checkpointing="full",
        price=2.5,
        on_oom="report",
    )


def time_shares(e: Estimate) -> list[float]:
    seconds = {name: layer.seconds for name, layer in e.step.by_layer.items()}
    seconds["optimizer"] = e.step.optimizer
    return [100 * seconds.get(name, 0.0) / e.step.seconds for name in LAYERS]


def memory_shares(e: Estimate) -> list[float]:
    return [100 * e.memory.parts[name] / e.memory.allocated_gib for name in PARTS]


def stacked(table: list[tuple[float, ...]]) -> list[list[float]]:
    """Where each row begins when rows are stacked."""
    return [[sum(above) for above in zip(*table[:i], strict=True)] or [0.0] * len(table[0]) for i in range(len(table))]


def main(path: str) -> None:
    lengths, batches = (128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32)
    columns = {
        "sequence length [token]": (lengths, [run(length=n) for n in lengths]),
        "micro batch [sequence]": (batches, [run(batch=n) for n in batches]),
        "model": (MODELS, [run(model=name) for name in MODELS]),
    }
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), sharey=True, layout="constrained")
    rows = (("time of a step", LAYERS, time_shares), ("memory at the peak", PARTS, memory_shares))
    for column, (label, (ticks, estimates)) in enumerate(columns.items()):
        for row, (what, names, shares) in enumerate(rows):
            axis, table = axes[row][column], list(zip(*map(shares, estimates), strict=True))
            if label == "model":  # nothing lies between two models
                for below, name, values, colour in zip(stacked(table), names, table, COLOURS, strict=True):
                    axis.bar(range(len(ticks)), values, bottom=below, label=name, color=colour, width=0.7)
            else:
                axis.stackplot(range(len(ticks)), *table, labels=names, colors=COLOURS)
            axis.set_xticks(range(len(ticks)), [str(t) for t in ticks], fontsize=8)
            axis.set_xlabel(label)
            axis.set_ylim(0, 100)
            axis.margins(x=0)
            if column == 0:
                axis.set_ylabel(f"{what} [%]")
            if column == 2:
                axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle("QLoRA on one H100: Mixtral-8x7B at 4 x 1,024 tokens, one thing changed at a time")
    figure.savefig(path, dpi=110)
    for label, (ticks, estimates) in columns.items():
        print(f"\n{label}")
        for tick, e in zip(ticks, estimates, strict=True):
            top_time = max(zip(time_shares(e), LAYERS, strict=True))
            top_memory = max(zip(memory_shares(e), PARTS, strict=True))
            print(
                f"  {tick!s:<18}{e.queries_per_second:>8.2f} queries/s{e.memory.device_gib:>8.1f} GiB   "
                f"time: {top_time[1]} {top_time[0]:.0f} %, memory: {top_memory[1]} {top_memory[0]:.0f} %"
            )
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shares.png")
