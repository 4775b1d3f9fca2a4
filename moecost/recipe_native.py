"""Recipes of tools with a training loop and model code of their own: torchtune and litgpt.

Where a recipe leaves a key out, the tool's default is put in. Sources: the tools' recipes and reference configurations
(torchtune 0.6, litgpt 0.5).
"""

from __future__ import annotations

import re
from typing import Final

from moecost.recipe_keys import DTYPES, Keys, stop_after

# -------------------------------------------------------------------------------------------------------- torchtune
_MODELS: Final = (
    (r"code_llama2_(\d+b)", "codellama/CodeLlama-{0}-hf"),
    (r"llama2_(\d+b)", "meta-llama/Llama-2-{0}-hf"),
    (r"llama3_(8b|70b)", "meta-llama/Meta-Llama-3-{0}"),
    (r"llama3_1_(8b|70b|405b)", "meta-llama/Llama-3.1-{0}"),
    (r"llama3_2_(1b|3b)", "meta-llama/Llama-3.2-{0}"),
    (r"llama3_3_(70b)", "meta-llama/Llama-3.3-{0}-Instruct"),
    (r"mistral_(7b)", "mistralai/Mistral-{0}-v0.1"),
    (r"qwen2_(7b|1_5b|0_5b)(?:_base|_instruct)?", "Qwen/Qwen2-{0}"),
    (r"qwen2_5_([\d_]+b)(?:_base|_instruct)?", "Qwen/Qwen2.5-{0}"),
    (r"qwen3_([\d_]+b)(?:_base|_instruct)?", "Qwen/Qwen3-{0}"),
    (r"gemma_(2b|7b)", "google/gemma-{0}"),
    (r"gemma2_(2b|9b|27b)", "google/gemma-2-{0}"),
    (r"phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
    (r"phi4_14b", "microsoft/phi-4"),
)
"""Model builders of torchtune to Hub ids."""
_LOWER_CASE: Final = ("google/", "codellama/", "meta-llama/Llama-2")  # ids that write the size so


def torchtune_model(builder: str) -> str | None:
    """Hub id of the model that a torchtune builder makes.

    >>> torchtune_model("qlora_llama3_1_8b"), torchtune_model("qwen2_5_0_5b_instruct"), torchtune_model("mine")
    ('meta-llama/Llama-3.1-8B', 'Qwen/Qwen2.5-0.5B', None)
    """
    for pattern, name in _MODELS:
        found = re.fullmatch(r"(?:q?lora_|dora_)?" + pattern, builder)
        if found:
            size = (found.groups() or ("",))[0].replace("_", ".")
            return name.format(size if name.startswith(_LOWER_CASE) else size.upper())
    return None


def torchtune(keys: Keys) -> None:
    component = keys.text("model._component_") or ""
    builder = component.rsplit(".", 1)[-1]
    keys.put("model", torchtune_model(builder))
    if "model" not in keys.fields:
        keys.doubts["model"] = f"the model builder {component!r:.80} is not known; pass model="
    dtype = keys.text("dtype")
    keys.choose("compute_dtype", ("dtype",), DTYPES)
    attention = keys.words("model.lora_attn_modules")
    if attention is None and not builder.startswith(("lora_", "qlora_", "dora_")):
        keys.put("method", "full")
        keys.put("weight_dtype", DTYPES.get(dtype or "bf16"))
    else:
        quantized = builder.startswith("qlora_") or keys.flag("model.quantize_base")
        keys.put("method", "dora" if keys.flag("model.use_dora") else "qlora" if quantized else "lora")
        keys.put("weight_dtype", "nf4-dq" if quantized else None)
        keys.put("lora_rank", keys.whole("model.lora_rank") or 8)
        targets = [{"output_proj": "o_proj"}.get(t, t) for t in attention or []]
        if keys.flag("model.apply_lora_to_mlp"):
            targets += ["gate_proj", "up_proj", "down_proj"]
        if keys.flag("model.apply_lora_to_output"):
            targets.append("lm_head")
        keys.put("lora_targets", targets or None)
    keys.put("sequence_length", keys.whole("tokenizer.max_seq_len", "dataset.max_seq_len"))
    if keys.flag("dataset.packed"):
        keys.put("padding", "packed")
    keys.put("micro_batch_size", keys.whole("batch_size") or 1)
    keys.put("gradient_accumulation_steps", keys.whole("gradient_accumulation_steps") or 1)
    keys.put("epochs", float(keys.whole("epochs") or 1))
    keys.max_steps = keys.whole("max_steps_per_epoch")
    keys.put("gradient_checkpointing", "full" if keys.flag("enable_activation_checkpointing") else "none")
    if keys.flag("compile"):
        keys.put("compile", True)
    optimizer = keys.text("optimizer._component_")
    if optimizer is not None:
        name = optimizer.rsplit(".", 1)[-1]
        keys.flat["optimizer.name"] = name
        keys.optimizer("optimizer.name")
    for field in ("tensor_parallel_dim", "context_parallel_dim"):
        size = keys.whole(field)
        if size is not None and size > 1:
            keys.put(field.replace("_dim", "_size"), size)
    if keys.flag("fsdp_cpu_offload"):
        keys.put("offload", "parameters")
        keys.sharded = True
    loss = keys.text("loss._component_") or ""
    if "chunked" in loss.lower() or "linearcrossentropy" in loss.lower():
        keys.fuse("chunked-ce")
    keys.put("software", "torchtune")


# ----------------------------------------------------------------------------------------------------------- litgpt
def litgpt(keys: Keys) -> None:
    folder = keys.text("checkpoint_dir")
    parts = [p for p in re.split(r"[/\\]", folder or "") if p]
    keys.put("model", "/".join(parts[-2:]) or None)
    precision = keys.text("precision") or "bf16-true"
    compute = {"bf16": "bf16", "16": "fp16", "32": "fp32"}.get(precision.split("-")[0])
    keys.put("compute_dtype", compute)
    if compute is None:
        keys.doubts["compute_dtype"] = f"precision={precision!r:.60} has no counterpart; pass compute_dtype="
    rank = keys.whole("lora_r")
    if rank is None:
        keys.put("method", "full")
        keys.put("weight_dtype", "fp32" if precision.endswith("-mixed") else compute)
    else:
        held = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4-dq", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4-dq", "bnb.int8": "int8",
                "bnb.int8-training": "int8", "nf4": "nf4", "nf4-dq": "nf4-dq"}  # fmt: skip
        said = keys.text("quantize")
        keys.put("method", "qlora" if said else "lora")
        keys.choose("weight_dtype", ("quantize",), held)
        keys.put("lora_rank", rank)
        modules = {"query": ["q_proj"], "key": ["k_proj"], "value": ["v_proj"], "projection": ["o_proj"],
                   "mlp": ["gate_proj", "up_proj", "down_proj"], "head": ["lm_head"]}  # fmt: skip
        default = {"query": True, "value": True}
        targets = []
        for part, names in modules.items():
            on = keys.flag(f"lora_{part}")
            targets += names if (default.get(part, False) if on is None else on) else []
        keys.put("lora_targets", targets or None)
    keys.sharded = keys.value("devices") in ("auto", -1)  # all that the machine has
    devices, nodes = 1 if keys.sharded else keys.whole("devices") or 1, keys.whole("num_nodes") or 1
    keys.put("num_gpus", None if keys.sharded else devices * nodes)
    if nodes > 1:
        keys.put("gpus_per_node", devices)
    keys.put("sequence_length", keys.whole("train.max_seq_length", "data.init_args.max_seq_length"))
    micro, whole = keys.whole("train.micro_batch_size") or 1, keys.whole("train.global_batch_size") or 16
    keys.put("micro_batch_size", micro)
    keys.put("gradient_accumulation_steps", max(whole // (micro * devices * nodes), 1))
    keys.put("epochs", keys.number("train.epochs") or 5.0)
    stop_after(keys, keys.whole("train.max_steps"))
    optimizer = keys.raw("optimizer")
    name = optimizer.get("class_path", "AdamW") if isinstance(optimizer, dict) else (optimizer or "AdamW")
    keys.flat["optimizer.name"] = str(name).rsplit(".", 1)[-1]
    keys.optimizer("optimizer.name")
    keys.put("gradient_checkpointing", "full" if devices * nodes > 1 else "none")
    keys.put("zero_stage", 3 if devices * nodes > 1 else None)
    keys.put("software", "litgpt")
