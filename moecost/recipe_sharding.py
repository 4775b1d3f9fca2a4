"""What DeepSpeed's and FSDP's parts of a recipe mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moecost.errors import MoECostError
from moecost.recipe_keys import OFF, Keys
from moecost.spec_files import parse_yaml, read_text

_STAGE_IN_NAME: Final = re.compile(r"(?:zero|z|stage)[_-]?([0-3])")
_FSDP_STAGE: Final = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0,
                      "1": 3, "2": 2, "3": 0, "4": 3, "5": 2}  # fmt: skip


def sharding(keys: Keys) -> None:
    """Set `zero_stage` and `offload` from DeepSpeed's or FSDP's part of a recipe."""
    deepspeed = keys.raw("deepspeed")
    config = keys.raw("deepspeed_config")
    if deepspeed not in OFF or isinstance(config, dict):
        _deepspeed(keys, deepspeed if deepspeed not in OFF else config)
    said, config = keys.raw("fsdp"), keys.raw("fsdp_config")
    version = keys.value("fsdp_version")
    distributed = keys.text("distributed_type")
    config = config if isinstance(config, dict) else {}
    if said not in (*OFF, []) or version or (config and distributed != "DEEPSPEED" and deepspeed in OFF):
        _fsdp(keys, said, config)


def _deepspeed(keys: Keys, said: Any) -> None:
    keys.sharded = True
    name = said if isinstance(said, str) else ""
    config = said if isinstance(said, dict) else _deepspeed_file(keys, name)
    if config is not None:
        zero = config.get("zero_optimization", config)
        zero = zero if isinstance(zero, dict) else {}
        stage = zero.get("stage", config.get("zero_stage", 0))
        parameters, optimizer = _device(zero, "param"), _device(zero, "optimizer")
    else:
        found = _STAGE_IN_NAME.search(Path(name).name.lower())
        stage = int(found[1]) if found else None
        parameters = optimizer = "offload" in Path(name).name.lower()
        parameters = parameters and stage == 3
    if stage not in (0, 1, 2, 3):
        keys.doubts["zero_stage"] = f"deepspeed={said!r:.60} does not tell the ZeRO stage; pass zero_stage="
        return
    keys.put("zero_stage", stage)
    keys.put("offload", "parameters" if parameters else "optimizer" if optimizer else None)


def _device(zero: Mapping[str, Any], part: str) -> bool:
    """Whether DeepSpeed (or accelerate's short form of it) offloads parameters or optimizer state."""
    nested, flat = zero.get(f"offload_{part}"), zero.get(f"offload_{part}_device")
    device = nested.get("device", "none") if isinstance(nested, dict) else flat
    return device not in OFF


def _deepspeed_file(keys: Keys, name: str) -> dict[str, Any] | None:
    """The DeepSpeed configuration that a recipe names, where it lies beside it or where we stand."""
    for folder in (keys.folder, Path()):
        if folder is not None and os.path.isfile(folder / name):
            try:
                return parse_yaml(read_text(folder / name), str(folder / name))
            except MoECostError:
                return None
    return None


def _fsdp(keys: Keys, said: Any, config: Mapping[str, Any]) -> None:
    keys.sharded = True
    words = said if isinstance(said, list) else str(said or "").replace(",", " ").split()
    words = [str(w).lower() for w in words]
    config = {str(k).removeprefix("fsdp_"): v for k, v in config.items()}
    strategy = str(config.get("sharding_strategy") or "").lower().removeprefix("shardingstrategy.")
    stages = [_FSDP_STAGE[w] for w in (*words, strategy) if w in _FSDP_STAGE]
    reshard = config.get("reshard_after_forward")
    if str(reshard).lower() in _FSDP_STAGE:
        stages.append(_FSDP_STAGE[str(reshard).lower()])
    elif reshard in (False, "false"):
        stages.append(2)
    keys.put("zero_stage", stages[0] if stages else 3)
    if "offload" in words or config.get("offload_params") in (True, "true"):
        keys.put("offload", "parameters")
