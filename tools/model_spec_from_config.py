"""Write a model spec YAML from a `config.json`.

    python tools/model_spec_from_config.py config.json --name qwen3-8b --hub-id Qwen/Qwen3-8B \
        --published 8.2e9 --source "config.json of Qwen/Qwen3-8B" --date 2025-04 > model_specs/qwen3-8b.yaml

Only the fields that shape the model are kept, under the names that the config gives them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moecost.architecture import ModelSpec
from moecost.hub import reading as hub

KEPT = frozenset({"model_type", "architectures", "sliding_window", "layer_types", "tie_word_embeddings"})
DROPPED = frozenset({"max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"})


def shaping_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that its family reads, nested ones included."""
    used = hub.read(config).used | KEPT
    family = hub.family_of(config)
    if family not in ("gpt2", "gpt_bigcode", "mpt"):
        used -= DROPPED
    nested = {"text_config", "vision_config", "attn_config", "ffn_config", "block_configs"}

    def keep(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in fields.items() if k in used and v is not None and v != []}

    out = keep(config)
    for name in nested & config.keys():
        inner = config[name]
        if name == "text_config":
            out[name] = keep(inner)
        elif name == "vision_config" and not hub.loads_vision(family):
            out.pop(name, None)
        elif name == "vision_config":
            out[name] = {
                k: v for k, v in inner.items() if isinstance(v, int | float | str | list) and not k.startswith("_")
            }
        elif name == "block_configs":
            out[name] = [{part: _small(block[part]) for part in ("attention", "ffn")} for block in inner]
        else:
            out[name] = {k: v for k, v in inner.items() if isinstance(v, int) and k not in ("clip_qkv",)}
    if "architectures" in out and "model_type" in out:
        del out["architectures"]
    return out


def _small(part: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in part.items() if v not in (None, False)}


def to_yaml(
    *,
    name: str,
    config: Mapping[str, Any],
    aliases: Sequence[str] = (),
    hub_ids: Sequence[str] = (),
    published: int | None = None,
    published_active: int | None = None,
    notes: Sequence[str] = (),
    source: Mapping[str, str],
    published_source: Mapping[str, str] | None = None,
) -> str:
    """Text of a spec file."""
    lines = [f"name: {name}"]
    if aliases:
        lines.append(f"aliases: {_text(list(aliases))}")
    if hub_ids:
        lines.append(f"hub_ids: {_text(list(hub_ids))}")
    lines += ["config:", "  source: config", "  value:"]
    lines += [f"    {k}: {_text(v)}" for k, v in config.items()]
    about = "publisher" if published_source else "config"
    for field, value in (("published_parameters", published), ("published_active_parameters", published_active)):
        if value:
            lines.append(f"{field}: {{value: {value}, source: {about}}}")
    if notes:
        lines.append("notes:")
        lines += [f"  - {json.dumps(note, ensure_ascii=False)}" for note in notes]
    lines.append("sources:")
    lines.append(f"  config: {_text(dict(source))}")
    if published_source and (published or published_active):
        lines.append(f"  publisher: {_text(dict(published_source))}")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """Flow-style YAML, which JSON is, but for unquoted keys."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json")
    parser.add_argument("--name", required=True, help="canonical key, lower case; the file is named after it")
    parser.add_argument("--alias", action="append", default=[])
    parser.add_argument("--hub-id", action="append", default=[])
    parser.add_argument("--published", type=float, help="the publisher's parameter count")
    parser.add_argument("--published-active", type=float)
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--source", required=True, help="title of where the config is from")
    parser.add_argument("--url")
    parser.add_argument("--date", default="undated")
    a = parser.parse_args(arguments)
    source = {"title": a.source, **({"url": a.url} if a.url else {}), "date": a.date}
    config = shaping_fields(json.loads(a.config.read_text(encoding="utf-8")))
    text = to_yaml(
        name=a.name,
        config=config,
        aliases=a.alias,
        hub_ids=a.hub_id,
        published=int(a.published) if a.published else None,
        published_active=int(a.published_active) if a.published_active else None,
        notes=a.note,
        source=source,
    )
    counted = ModelSpec.from_hf(config).num_parameters
    print(text, end="")
    print(f"{a.name}: {counted:,} parameters", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
