"""Dense against sparse experts: what activating all eight experts of Mixtral costs, batch for batch and at its best.

The founding paper (arXiv:2408.04693, Figs 3 and 14) found that two of eight experts train about as well; here is what
they save.
"""

import warnings

from moecost import estimate

warnings.simplefilter("ignore")
RECIPE = {
    "method": "qlora",
    "lora_targets": ["w1", "w2", "w3", "gate"],
    "dataset": "commonsense-15k",
    "sequence_length": 512,
    "software": "hf-peft-2024",
    "price": 0.79,
}

print(f"{'experts a token':<18}{'batch':>6}{'queries/s':>11}{'$ an epoch':>12}{'memory GiB':>12}  bound")
for experts in (8, 2):
    for batch in (1, 2, None):
        e = estimate("mixtral-8x7b", "a40", num_experts_per_tok=experts, micro_batch_size=batch, **RECIPE)
        print(
            f"{experts:<18}{e.micro_batch_size:>6}{e.queries_per_second:>11.2f}{e.cost_usd:>12.2f}"
            f"{e.memory.device_gib:>12.1f}  {e.bound}"
        )
