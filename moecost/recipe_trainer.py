"""Recipes of what stands on the Hugging Face Trainer: LLaMA-Factory, axolotl, TRL with accelerate.

Where a recipe leaves a key out, the tool's default is put in. Sources: the tools' argument classes and reference
configurations (LLaMA-Factory 0.9, axolotl 0.8, TRL 0.15 to 0.20 with transformers 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moecost.errors import UnsupportedError
from moecost.recipe_keys import DTYPES, OFF, Keys, stop_after
from moecost.recipe_sharding import sharding

ATTENTION: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(("fa2", "fa3", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn",
                     "kernels-community/vllm-flash-attn3", "true", "True"), "flash"),
    **dict.fromkeys(("sdpa", "flex_attention"), "sdpa"),
    **dict.fromkeys(("eager", "disabled", "off", "false", "False"), "eager"),
    "auto": None,
}  # fmt: skip


def _sharded_weights(keys: Keys, loaded: str | None, mixed: bool) -> str | None:
    """Trained weights of full tuning: DeepSpeed and FSDP keep them in fp32 under mixed precision."""
    return "fp32" if mixed and keys.sharded else loaded


def _batch(keys: Keys, micro: int, epochs: float) -> None:
    """Batch and length of a run of the Hugging Face Trainer, with its defaults."""
    keys.put("micro_batch_size", keys.whole("per_device_train_batch_size", "micro_batch_size") or micro)
    keys.put("gradient_accumulation_steps", keys.whole("gradient_accumulation_steps") or 1)
    keys.put("epochs", keys.number("num_train_epochs", "num_epochs") or epochs)
    stop_after(keys, keys.whole("max_steps"))


def _precision(keys: Keys) -> str | None:
    """Compute type of a run of the Hugging Face Trainer; None where the recipe is silent."""
    mixed = keys.text("mixed_precision")
    if keys.flag("fp8") or mixed == "fp8":
        return "fp8"
    bf16, fp16, tf32 = keys.flag("bf16"), keys.flag("fp16"), keys.flag("tf32")
    if bf16 or mixed == "bf16":
        return "bf16"
    if fp16 or mixed == "fp16":
        return "fp16"
    if bf16 is None and fp16 is None and mixed is None:
        return None
    return "tf32" if tf32 else "fp32"


def _common(keys: Keys) -> None:
    """What all that stands on the Hugging Face Trainer spells alike."""
    sharding(keys)
    if keys.flag("torch_compile"):
        keys.put("compile", True)
    if keys.flag("use_liger_kernel", "enable_liger_kernel", "use_liger"):
        keys.fuse("liger")
    for field in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"):
        size = keys.whole(field)
        if size is not None and size > 1:
            keys.put(field, size)
    processes, machines = keys.whole("num_processes"), keys.whole("num_machines")
    if processes:
        keys.put("num_gpus", processes)
        if machines and machines > 1 and processes % machines == 0:
            keys.put("gpus_per_node", processes // machines)


def _plain_training(keys: Keys, name: str, allowed: tuple[str, ...]) -> None:
    said = keys.text(name)
    if said is not None and said not in allowed:
        raise UnsupportedError(f"{keys.where}: {name}={said!r:.60} is not modelled; plain training (sft) is")


# ---------------------------------------------------------------------------------------------------- LLaMA-Factory
def llama_factory(keys: Keys) -> None:
    _plain_training(keys, "stage", ("sft", "pt"))
    pretrains = keys.text("stage") == "pt"
    keys.put("model", keys.text("model_name_or_path"))
    kind = keys.text("finetuning_type") or "lora"
    if kind not in ("full", "lora"):
        raise UnsupportedError(f"{keys.where}: finetuning_type={kind!r:.60} is not modelled; full and lora are")
    _common(keys)
    compute = "bf16" if keys.flag("pure_bf16") else _precision(keys)
    keys.put("compute_dtype", compute)
    bits, dora = keys.whole("quantization_bit"), keys.flag("use_dora")
    double = keys.flag("double_quantization") is not False
    if keys.text("quantization_method") not in (None, "bnb", "bitsandbytes"):
        keys.not_modelled.append("quantization_method")
    if kind == "full":
        keys.put("method", "full")
        if bits is None:
            keys.put("weight_dtype", "bf16" if keys.flag("pure_bf16") else "fp32")
    else:
        keys.put("method", "dora" if dora else "qlora" if bits else "lora")
        keys.put("lora_rank", keys.whole("lora_rank") or 8)
        targets = keys.words("lora_target") or ["all"]
        keys.put("lora_targets", ["all-linear" if t == "all" else t for t in targets])
    if bits is not None:
        held = {4: "nf4-dq" if double else "nf4", 8: "int8"}.get(bits)
        keys.put("weight_dtype", held)
        if held is None:
            keys.doubts["weight_dtype"] = f"quantization_bit={bits} has no counterpart; pass weight_dtype="
    keys.put("sequence_length", keys.whole("cutoff_len") or 2048)
    packing = keys.flag("packing")
    if keys.flag("neat_packing") or packing or (pretrains and packing is None):
        keys.put("padding", "packed")
    _batch(keys, micro=8, epochs=3.0)
    keys.max_queries = keys.whole("max_samples")
    said = keys.value("flash_attn")
    if isinstance(said, bool):
        keys.put("attention", "flash" if said else None)
    else:
        keys.choose("attention", ("flash_attn",), ATTENTION)
    off = keys.flag("disable_gradient_checkpointing") or keys.flag("gradient_checkpointing") is False
    keys.put("gradient_checkpointing", "none" if off else "full")
    keys.value("use_reentrant_gc")
    keys.optimizer("optim")
    for name in ("galore", "apollo", "badam", "muon", "adam_mini"):
        if keys.flag(f"use_{name}"):
            keys.set_optimizer(name, f"use_{name}")
    unsloth = keys.flag("use_unsloth")
    if unsloth:
        keys.fuse("unsloth")
    keys.put("software", "unsloth" if unsloth else "llama-factory")


# ---------------------------------------------------------------------------------------------------------- axolotl
_PLUGINS: Final = (
    ("liger", "liger"),
    ("cut_cross_entropy", "cut-cross-entropy"),
    ("cutcrossentropy", "cut-cross-entropy"),
)


def axolotl(keys: Keys) -> None:
    _plain_training(keys, "rl", ())
    keys.put("model", keys.text("base_model"))
    _common(keys)
    adapter = keys.text("adapter")
    adapter = None if adapter in OFF else adapter
    if adapter not in (None, "lora", "qlora"):
        raise UnsupportedError(f"{keys.where}: adapter={adapter!r:.60} is not modelled; lora and qlora are")
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    compute = _precision(keys)
    if keys.flag("bfloat16") or keys.flag("float16"):
        compute = "bf16" if keys.flag("bfloat16") else "fp16"
    keys.put("compute_dtype", compute)
    if adapter is None:
        keys.put("method", "full")
        pure = keys.value("bf16") == "full" or bool(keys.flag("bfloat16"))
        loaded = compute if compute in ("bf16", "fp16", "fp32") else None
        keys.put("weight_dtype", _sharded_weights(keys, loaded, mixed=compute in ("bf16", "fp16", "fp8") and not pure))
    else:
        quantized = adapter == "qlora" or four or eight
        dora = keys.flag("peft_use_dora")
        keys.put("method", "dora" if dora else "qlora" if quantized else "lora")
        if quantized:
            double = keys.flag("bnb_config_kwargs.bnb_4bit_use_double_quant") is not False
            keys.put("weight_dtype", "int8" if eight else "nf4-dq" if double else "nf4")
        keys.put("lora_rank", keys.whole("lora_r") or 8)
        targets = keys.words("lora_target_modules") or []
        if keys.flag("lora_target_linear"):
            targets = ["all-linear", *targets]
        keys.put("lora_targets", targets or None)
        if not targets:
            keys.doubts["lora_targets"] = "neither lora_target_linear nor lora_target_modules; pass lora_targets="
    keys.put("sequence_length", keys.whole("sequence_len") or 512)
    if keys.flag("sample_packing"):
        keys.put("padding", "packed")
    elif keys.flag("pad_to_sequence_len"):
        keys.put("padding", "max_length")
    keys.value("pad_to_sequence_len")
    _batch(keys, micro=1, epochs=1.0)
    if "batch_size" in keys.flat and "gradient_accumulation_steps" not in keys.flat:
        whole, micro = keys.whole("batch_size"), keys.fields["micro_batch_size"]
        keys.put("gradient_accumulation_steps", max((whole or micro) // micro, 1))
    keys.value("batch_size")
    for flag, attention in (("flash_attention", "flash"), ("xformers_attention", "flash"), ("sdp_attention", "sdpa"),
                            ("flex_attention", "sdpa"), ("eager_attention", "eager")):  # fmt: skip
        if keys.flag(flag):
            keys.put("attention", attention)
    keys.choose("attention", ("attn_implementation",), ATTENTION)
    _axolotl_checkpointing(keys)
    keys.optimizer("optimizer")
    for plugin in keys.words("plugins") or []:
        known = [kernel for word, kernel in _PLUGINS if word in plugin.lower()]
        if known:
            keys.fuse(known[0])
        elif "kernels" not in plugin.lower():
            keys.not_modelled.append(f"plugins: {plugin}")
    for flag in ("use_scattermoe", "use_sonicmoe"):
        if keys.flag(flag):
            keys.fuse(flag.removeprefix("use_"))
    fused = [keys.flag(f"lora_{part}_kernel") for part in ("mlp", "qkv", "o", "embedding")]
    if any(fused):
        keys.fuse("lora-kernels")
    degree = keys.whole("sequence_parallel_degree")
    if degree is not None and degree > 1:
        keys.put("context_parallel_size", degree)
    keys.put("software", "axolotl")


def _axolotl_checkpointing(keys: Keys) -> None:
    said = keys.value("gradient_checkpointing")
    if isinstance(said, str) and said not in ("true", "false"):  # `unsloth`, `offload`, `offload_disk`
        keys.put("gradient_checkpointing", "full")
        keys.not_modelled.append("gradient_checkpointing")
    else:
        keys.put("gradient_checkpointing", "full" if keys.flag("gradient_checkpointing") else "none")


# -------------------------------------------------------------------------------------------------------------- TRL
def trl(keys: Keys) -> None:
    keys.put("model", keys.text("model_name_or_path"))
    _common(keys)
    compute = _precision(keys)
    keys.put("compute_dtype", compute)
    dtype = keys.text("torch_dtype", "dtype", "model_init_kwargs.torch_dtype", "model_init_kwargs.dtype")
    if dtype is not None and dtype not in DTYPES:
        keys.doubts["weight_dtype"] = f"torch_dtype={dtype!r:.60} has no counterpart; pass weight_dtype="
    loaded = DTYPES.get(dtype) if dtype else None
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    rank, targets = keys.whole("lora_r"), keys.words("lora_target_modules")
    if keys.flag("use_peft") or (keys.value("use_peft") is None and (rank or targets)):
        quantized = four or eight
        keys.put("method", "dora" if keys.flag("use_dora") else "qlora" if quantized else "lora")
        keys.put("lora_rank", rank or 16)
        keys.put("lora_targets", targets or ["q_proj", "v_proj"])  # what PEFT picks for Llama and its kin
        keys.put("weight_dtype", loaded)
        if quantized:
            nested = keys.flag("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
            keys.put("weight_dtype", "int8" if eight else "nf4-dq" if nested else "nf4")
    else:
        keys.put("method", "full")  # transformers 4 loads fp32 where no type is named
        keys.put("weight_dtype", _sharded_weights(keys, loaded or "fp32", mixed=compute in ("bf16", "fp16", "fp8")))
    for name in ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
                 "bnb_4bit_quant_storage", "use_dora"):  # fmt: skip
        keys.value(name)
    keys.put("sequence_length", keys.whole("max_length", "max_seq_length") or 1024)
    if keys.flag("packing"):
        keys.put("padding", "packed")
    _batch(keys, micro=8, epochs=3.0)
    keys.choose("attention", ("attn_implementation", "model_init_kwargs.attn_implementation"), ATTENTION)
    checkpointing = keys.flag("gradient_checkpointing")
    if checkpointing is not None:
        keys.put("gradient_checkpointing", "full" if checkpointing else "none")
    keys.optimizer("optim")
    keys.put("software", "hf-peft")
