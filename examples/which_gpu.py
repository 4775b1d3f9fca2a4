"""Which GPU for 14,000 queries? Every GPU of the catalogue with a price, cheapest run first."""

import math
import warnings

from moecost import MoECostError, estimate, gpus

warnings.simplefilter("ignore")  # each estimate says in its notes where it leaves the calibration's range

found, unpriced, refused = [], 0, 0
for gpu in gpus():
    try:
        e = estimate(
            "mixtral-8x7b",
            gpu,
            method="qlora",
            lora_targets="attention",
            dataset="math-14k",
            sequence_length=1024,
            gradient_checkpointing="full",
            epochs=3,
        )
    except MoECostError:  # does not fit, or lacks a figure that the step needs
        refused += 1
        continue
    if math.isnan(e.cost_usd):
        unpriced += 1
    else:
        found.append(e)

print(f"{len(found)} GPUs can do it and have a price; {unpriced} have none, {refused} cannot or lack figures\n")
print(f"{'GPU':<26}{'batch':>6}{'queries/s':>11}{'hours':>8}{'$/h':>8}{'dollars':>9}   {'80 % interval':<16}bound")
for e in sorted(found, key=lambda e: e.cost_usd)[:12]:
    low, high = e.interval("cost_usd")
    print(
        f"{e.gpu:<26}{e.micro_batch_size:>6}{e.queries_per_second:>11.2f}{e.hours:>8.1f}{e.usd_per_gpu_hour:>8.2f}"
        f"{e.cost_usd:>9.2f}   {f'{low:.2f} to {high:.2f}':<16}{e.bound}"
    )
