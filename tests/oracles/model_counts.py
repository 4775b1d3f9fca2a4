"""Make the tables of `tests/data/models` again from the real classes; needs torch, transformers and peft.

    python tests/oracles/model_counts.py [--config NAME ...] [--types TYPE ...] [--lora] [--flops]

Nothing is downloaded: classes are built from the configs on the meta device. Not a test; CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "data" / "models" / "configs"
TARGETS: tuple[tuple[str, Any], ...] = (
    ("all-linear", "all-linear"),
    ("attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ("q_proj;v_proj", ["q_proj", "v_proj"]),
)


def build(config: Any) -> Any:
    """The class that `AutoModelForCausalLM` picks, else the image-text class, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # batched products run the chosen experts on the meta device, where a loop finds none
    eager = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, **eager)
        except ValueError:
            return AutoModelForImageTextToText.from_config(config, **eager)


def total(model: Any) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def adapters(config: Any, targets: Any, rank: int) -> int:
    """Trainable parameters that PEFT adds."""
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(build(config), LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))
    return sum(p.numel() for name, p in tuned.named_parameters() if "lora_" in name)


def flops(model: Any, tokens: int) -> tuple[int, int]:
    """(forward, backward) of one sequence, as PyTorch's counter sees them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask = torch.zeros((1, 1, tokens, tokens), device="meta", dtype=model.dtype)  # a mask cannot be made on meta
    kinds = dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention"), mask)
    for given in (mask, kinds):
        try:
            with FlopCounterMode(display=False) as forward:
                out = model(input_ids=ids, position_ids=ids, attention_mask=given, use_cache=False).logits
            break
        except (TypeError, RuntimeError, AttributeError, KeyError):
            continue
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def cases(names: Sequence[str], types: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(label, config) of stored configs and of class defaults."""
    from transformers import AutoConfig

    for path in sorted(CONFIGS.glob("*.json")):
        if (names and path.name not in names) or (types and not names):
            continue
        fields = json.loads(path.read_text())
        kind = fields.pop("model_type", None)
        fields.pop("quantization_config", None)
        try:
            yield path.name, AutoConfig.for_model(kind, **fields)
        except (ValueError, KeyError, TypeError) as error:
            print(f"{path.name}: no class ({str(error)[:80]})", file=sys.stderr)
    for kind in types:
        yield kind, AutoConfig.for_model(kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="*", default=[], help="file names; all without this")
    parser.add_argument("--types", nargs="*", default=[], help="model types, at their default config")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--flops", action="store_true")
    a = parser.parse_args(arguments)
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"# torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    for label, config in cases(a.config, a.types):
        try:
            model = build(config)
            print(f"{label},total,{total(model)}", flush=True)
            for name, targets in TARGETS if a.lora else ():
                print(f"{label},{name},8,{adapters(config, targets, 8)}", flush=True)
            if a.flops:
                print(f"{label},flops,512,{flops(model, 512)}", flush=True)
        except Exception as error:  # one class that cannot be built must not end the run
            print(f"{label}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
