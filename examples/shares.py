"""How the shares of time and of memory move as sequence length, batch size and model size grow.

Draws six panels into `shares.png` (or the path given as the first argument).
"""

import sys
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from moecost import Estimate, estimate, plotting

warnings.simplefilter("ignore")

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


def main(path: str) -> None:
    lengths, batches = (128, 256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32)
    columns = {
        "sequence length [token]": (lengths, [run(length=n) for n in lengths]),
        "micro-batch [sequence]": (batches, [run(batch=n) for n in batches]),
        "model": (MODELS, [run(model=name) for name in MODELS]),
    }
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), sharey=True, layout="constrained")
    for column, (label, (ticks, estimates)) in enumerate(columns.items()):
        for ax, of in zip(axes[:, column], ("time", "memory"), strict=True):
            plotting.shares(estimates, ticks, of=of, ax=ax)
            ax.set_xlabel(label)
            if column < 2:
                ax.get_legend().remove()
            if column > 0:
                ax.set_ylabel("")
    figure.suptitle("QLoRA on one H100: Mixtral-8x7B at 4 x 1,024 tokens, one thing changed at a time")
    figure.savefig(path, dpi=110)
    for label, (ticks, estimates) in columns.items():
        print(f"\n{label}")
        for tick, e in zip(ticks, estimates, strict=True):
            layer, time = max(e.step.by_layer.items(), key=lambda item: item[1].seconds)
            part, size = next(iter(e.memory.parts.items()))
            print(
                f"  {tick!s:<18}{e.queries_per_second:>8.2f} queries/s{e.memory.device_gib:>8.1f} GiB   "
                f"time: {layer} {100 * time.seconds / e.step.seconds:.0f} %, "
                f"memory: {part} {100 * size / e.memory.device_gib:.0f} %"
            )
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shares.png")
