"""The cost table of arXiv:2408.04693 (Table IV): Mixtral-8x7B, QLoRA, MATH, ten epochs, on three GPUs.

The paper measured the largest batch and the throughput and multiplied; moecost predicts both. The paper reckons with
15,000 queries, although its data set holds 13,921.
"""

from moecost import estimate

PAPER = {  # GPU: (largest batch, queries/s, $/GPU-hour, dollars) as printed
    "a40": (4, 1.01, 0.79, 32.7),
    "a100-80gb-pcie": (17, 2.74, 1.67, 25.4),
    "h100-80gb-sxm": (17, 4.90, 2.10, 17.9),
}

print(f"{'GPU':<16}{'batch':>14}{'queries/s':>18}{'dollars':>18}   80 % interval")
print(f"{'':<16}{'paper  ours':>14}{'paper  ours':>18}{'paper  ours':>18}")
for gpu, (batch, rate, price, dollars) in PAPER.items():
    e = estimate(
        "mixtral-8x7b",
        gpu,
        method="qlora",
        lora_targets=["w1", "w2", "w3", "gate"],
        dataset="math-14k",
        num_queries=15_000,
        sequence_length=1024,
        epochs=10,
        micro_batch_size=batch,
        price=price,
        software="hf-peft-2024",
        on_oom="report",  # the longest query of the whole set may not fit at the batch that the paper's sample allowed
    )
    low, high = e.interval("cost_usd")
    print(
        f"{gpu:<16}{batch:>7}{e.max_micro_batch_size:>7}{rate:>11.2f}{e.queries_per_second:>7.2f}"
        f"{dollars:>11.1f}{e.cost_usd:>7.1f}   {low:.1f} to {high:.1f}"
    )
