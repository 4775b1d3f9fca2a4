"""The training tools whose recipes are read, and how a recipe is told to be one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from moecost.recipe_keys import Keys
from moecost.recipe_native import litgpt, torchtune
from moecost.recipe_trainer import axolotl, llama_factory, trl

_OF_TRAINER = (
    r"output_dir|overwrite_\w+|do_\w+|logging_\w+|log_\w+|save_\w+|saves_per_epoch|eval\w*|per_device_eval_batch_size"
    r"|\w*seed|report_to|run_name|plot_loss|learning_rate|lr_\w+|cosine_\w+|warmup_\w+|weight_decay|adam_\w+"
    r"|adafactor|max_grad_norm|gradient_clipping|ddp_\w+|dataloader_\w+|preprocessing_\w+|push_to_hub|hub_\w+|hf_\w+"
    r"|ms_hub_token|resume_\w+|auto_resume\w*|trust_remote_code|use_fast_tokenizer|tokenizer\w*|special_tokens(\..*)?"
    r"|tokens|template|chat_template\w*|wandb_\w+|swanlab_\w+|use_swanlab|mlflow_\w+|comet_\w+|load_best_\w+|metric_\w+"
    r"|greater_\w+|label_\w+|remove_unused_columns|lora_alpha|lora_dropout|lora_fan_in_fan_out|use_rslora"
    r"|peft_use_rslora|lora_task_type|lora_bias|gradient_checkpointing_kwargs(\..*)?|early_\w+|cache_dir|disable_tqdm"
    r"|include_\w+|skip_memory_metrics|neftune_\w+|loss_watchdog_\w+|model_revision|revision\w*|low_cpu_mem_usage"
    r"|debug|strict|local_rank|use_cpu|no_cuda|prediction_loss_only|log_level\w*|optim_args|group|val_size"
    r"|val_set_size|streaming|buffer_size|shuffle\w*|torch_compile_\w+|average_tokens_across_devices|completion_only_\w+"
    r"|assistant_only_loss|dataset\w*(\..*)?|datasets|test_datasets|data_seed|train_on_\w+|mask_history|ignore_pad\w+"
    r"|use_legacy_format|max_new_tokens|predict_with_generate|temperature|top_p|top_k|do_sample|num_beams"
)
"""Keys of what stands on the Hugging Face Trainer that change neither time nor memory to speak of."""


_TORCHTUNE_IGNORED: Final = (
    r"output_dir|seed|shuffle|device|log_\w+|resume_\w+|clip_grad_norm|save_\w+|metric_logger\..*|checkpointer\..*"
    r"|profiler\..*|lr_scheduler\..*|tokenizer\..*|dataset\w*(\..*)?|loss\..*|optimizer\..*|model\.lora_alpha"
    r"|model\.lora_dropout|model\._component_|batch_size_val|run_val_\w+|low_cpu_ram|epochs|cudnn_\w+|keep_last_\w+"
)


_LITGPT_IGNORED: Final = (
    r"out_dir|seed|logger_name|access_token|data(\..*)?|eval\..*|lora_alpha|lora_dropout|optimizer(\..*)?"
    r"|train\.(save_interval|log_interval|lr_warmup_\w+|max_norm|min_lr|tie_embeddings|max_tokens|learning_rate"
    r"|weight_decay|beta\d)|devices|num_nodes|resume|log\..*"
)


class Tool(NamedTuple):
    """A training tool: how its recipes are told from others, what they mean, what in them does not matter."""

    name: str
    translate: Callable[[Keys], None]
    signs: frozenset[str]
    """Keys that only its recipes have."""
    ignored: re.Pattern[str]


TOOLS: Final = (
    Tool(
        "LLaMA-Factory",
        llama_factory,
        frozenset({"finetuning_type", "cutoff_len", "stage", "lora_rank", "lora_target", "quantization_bit", "template",
                   "dataset_dir", "flash_attn", "pure_bf16", "disable_gradient_checkpointing", "neat_packing",
                   "enable_liger_kernel", "use_unsloth", "use_galore", "double_quantization", "overwrite_cache"}),
        re.compile(_OF_TRAINER + r"|cutoff_\w+|loraplus_\w+|pissa_\w+|galore_\w+|apollo_\w+|badam_\w+|max_samples"
                   r"|media_dir|image_\w+|video_\w+|ray_\w+|upcast_\w+|print_param_status|infer_\w+|rope_scaling|plot_\w+|lora_alpha"
                   r"|create_new_adapter|mix_strategy|interleave_probs|default_system|enable_thinking|moe_aux_loss_coef"),
    ),
    Tool(
        "axolotl",
        axolotl,
        frozenset({"base_model", "sequence_len", "sample_packing", "lora_target_linear", "datasets", "val_set_size",
                   "pad_to_sequence_len"}),
        re.compile(_OF_TRAINER + r"|base_model_\w+|model_type|is_\w+_derived_model|bnb_config_kwargs\..*|liger_\w+"
                   r"|lora_model_dir|cut_cross_entropy|s2_attention|noisy_embedding_alpha|xformers_attention|model_config_type"
                   r"|excess_length_strategy|sample_packing_\w+|min_sample_len|flash_attn_\w+|roles_to_train|router_aux\w*"),
    ),
    Tool(
        "TRL",
        trl,
        frozenset({"use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "load_in_8bit", "max_seq_length",
                   "dataset_name", "dataset_text_field", "attn_implementation", "torch_dtype", "assistant_only_loss"}),
        re.compile(_OF_TRAINER + r"|compute_environment|distributed_type|downcast_bf16|machine_rank|main_\w+|rdzv_\w+"
                   r"|same_network|tpu_\w+|model_init_kwargs\..*|attn_implementation|eos_token|pad_token|pad_to_multiple_of"
                   r"|zero3_init_flag|enable_cpu_affinity|config|dataset_\w+|num_proc|fsdp_version"),
    ),
    Tool("torchtune", torchtune, frozenset({"model._component_"}), re.compile(_TORCHTUNE_IGNORED)),
    Tool(
        "litgpt",
        litgpt,
        frozenset({"checkpoint_dir", "train.micro_batch_size", "train.global_batch_size"}),
        re.compile(_LITGPT_IGNORED),
    ),
)  # fmt: skip


_WEAK_SIGNS: Final = frozenset({"model_name_or_path", "per_device_train_batch_size", "num_train_epochs"})
"""Keys of the Hugging Face Trainer, which LLaMA-Factory's recipes have too."""


def tools_of(keys: Keys) -> list[Tool]:
    """The tools whose recipe it may be: one, unless it has the signs of none or of several."""
    found = [tool for tool in TOOLS if tool.signs & keys.flat.keys()]
    for nested in ("torchtune", "litgpt"):  # their signs are keys inside others, which flat recipes cannot have
        if any(tool.name == nested and any("." in sign for sign in tool.signs & keys.flat.keys()) for tool in found):
            return [tool for tool in found if tool.name == nested]
    if "base_model" in keys.flat:  # axolotl spells adapters as TRL does, which has no `base_model`
        found = [tool for tool in found if tool.name != "TRL"]
    if not found and _WEAK_SIGNS & keys.flat.keys():
        return [tool for tool in TOOLS if tool.name == "TRL"]
    return found
