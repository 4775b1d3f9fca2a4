"""Mixtral-8x7B or Llama-3.1-70B: how long a step takes, what a budget buys of each, and what use costs afterwards."""

import warnings

from moecost import Job
from moecost.equivalents import at_budget, dense_equivalent, step_increase
from moecost.lifetime import break_even_tokens
from moecost.serving import serve

warnings.simplefilter("ignore")
BUDGET_USD = 200.0
RUN = {"gpu": "h100-80gb-sxm", "method": "qlora", "lora_targets": ["attention"], "sequence_length": 1024,
       "micro_batch_size": 4, "gradient_checkpointing": "full", "price": 2.5}  # fmt: skip
mixtral, llama = (Job(model=name, **RUN) for name in ("mixtral-8x7b", "llama-3.1-70b"))

same = dense_equivalent(mixtral)
print(f"A step of Mixtral takes {same.target.step.seconds:.2f} s: that of a dense model of "
      f"{same.model.num_parameters / 1e9:.1f}e9 parameters, {same.model.name}.")  # fmt: skip
more = step_increase(mixtral)
print(f"Of it {more.seconds:.2f} s more than with a plain feed-forward of the same FLOPs: experts {more.experts:.2f}, "
      f"dispatch {more.dispatch:.2f}, router {more.router:.2f}, host {more.host:.2f}.\n")  # fmt: skip

print(f"{'':<16}{'tokens for $' + format(BUDGET_USD, '.0f'):>18}{'$ a million out':>17}{'queries/s':>11}")
served = {}
for bought in at_budget([mixtral, llama], usd=BUDGET_USD):
    s = serve(bought.model, "h100-80gb-sxm", num_gpus=4, prompt_tokens=500, output_tokens=500, usd_per_gpu_hour=2.5)
    served[bought.model] = s.usd_per_million_output_tokens
    print(f"{bought.model:<16}{bought.tokens / 1e6:>16.0f}e6{s.usd_per_million_output_tokens:>17.3f}"
          f"{s.queries_per_second:>11.1f}")  # fmt: skip

tokens = break_even_tokens(
    training_usd=2 * BUDGET_USD, usd_per_million_tokens=served["mixtral-8x7b"],
    other_training_usd=BUDGET_USD, other_usd_per_million_tokens=served["llama-3.1-70b"],
)  # fmt: skip
print(f"\nTuning Mixtral for twice the money is paid back after {tokens / 1e6:,.0f} million tokens written.")
