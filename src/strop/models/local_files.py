"""The local files of a model: in a folder, or in the hub cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def find_local_file(name: str, file: str) -> Path | None:
    """Return the path of a model file; None if it is not on this machine."""
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    snapshots = Path(cache).expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        return next((path for path in (Path(name).expanduser() / file, *snapshots.glob(f"*/{file}")) if path.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # not a valid path
        return None


def read_local_config(name: str) -> Mapping[str, Any]:
    """Return the ``config.json`` of a model; empty if it is not local, or cannot be read."""
    path = find_local_file(name, CONFIG)
    try:
        values = {} if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What of a model its layout has to divide."""

    name: str
    layers: int  # 0: not known
    heads: int
    key_value_heads: int
    experts: int = 0  # of a layer

    @classmethod
    def from_hf(cls, name: str, values: Mapping[str, Any]) -> ModelShape | None:
        """Return the shape of a Hugging Face configuration (its ``to_dict()``); None where it does not say."""
        values = values.get("text_config") or values
        kinds = values.get("layers_block_type") or ()  # of layers that are a mixer, an MLP or experts
        layers = values.get("num_hidden_layers") or len(kinds)
        heads = values.get("num_attention_heads")
        if not isinstance(layers, int) or not isinstance(heads, int) or heads < 1:
            return None
        latent = values.get("kv_lora_rank") is not None  # latent attention has keys for every head
        key_value = heads if latent else values.get("num_key_value_heads") or heads
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = 0 if kinds and "moe" not in kinds else next((values[each] for each in names if values.get(each)), 0)
        return cls(name=name, layers=layers, heads=heads, key_value_heads=key_value, experts=experts)


def list_divisors(count: int) -> str:
    return f"Set it to one of {', '.join(str(number) for number in range(1, count + 1) if count % number == 0)}."
