"""Adapters that Megatron Bridge saved (NeMo-RL's checkpoints), as those of the Hugging Face model. Imports nothing of Megatron Core."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.adapters.adapter_folder import PREFIX, AdapterFolder, make_peft_config
from strop.extensions.megatron.checkpoint.hugging_face import LAYER, WeightShapes
from strop.extensions.megatron.checkpoint.torch_dist import open_shards
from strop.learner.parallel.shard_files import ShardedReader, TensorShard

HALVES = {"lora_A": "linear_in", "lora_B": "linear_out"}


def read_adapter_shards(iteration: Path, config: Any, peft: Mapping[str, Any], *, base: str) -> AdapterFolder:
    """Read the adapters in an iter_XXXXXXX folder. Layers that share A in Megatron Core get a copy each.

    Args:
        config: Of the Hugging Face model that the adapters are for.
        peft: The section of run_config.yaml, which has dim and alpha.
        base: The name that this model is loaded by.

    Raises ValueError if they are not of this model, or on experts.
    """
    reader, model = open_shards(iteration), WeightShapes.of(config)
    unused = {name for name in reader.shapes if ".adapter." in name}
    tensors: dict[str, Tensor] = {}
    others: set[str] = set()
    for name, shape in model.shapes.items():
        match, layer = LAYER.match(name), name.removesuffix(".weight")
        parameter = model.rule(name).parameter.removesuffix(".weight")
        keys = {saved: _find_key(f"{parameter}.adapter.{inside}.weight", match, reader) for saved, inside in HALVES.items()}
        if match is None or not name.endswith(".weight") or model.rule(name).of_experts or None in keys.values():
            others.add(layer)
            continue
        unused -= set(keys.values())
        down, up = (_read(reader, key, int(match[1])) for key in keys.values())
        order = model.rule(name).order if model.rule(name).dim == 0 else None
        if order is not None:
            up = torch.cat([up[piece.whole : piece.whole + piece.length] for piece in order.pieces(shape[0], 1)])
        if (*up.shape, *down.shape) != (shape[0], int(peft["dim"]), int(peft["dim"]), shape[1]):
            raise ValueError(
                f"{iteration} has adapters of shapes {tuple(down.shape)} and {tuple(up.shape)} where {name} of shape {shape} needs rank "
                f"{peft['dim']}: they are of another model"
            )
        tensors |= {f"{PREFIX}{layer}.lora_A.weight": down, f"{PREFIX}{layer}.lora_B.weight": up}
    if unused or not tensors:
        found = ", ".join(sorted(unused)[:3]) or "none"
        raise ValueError(f"{iteration} has adapters that {type(config).__name__} has no layers for: {found}")
    layers = [name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    options = make_peft_config(layers, others, base=base, model_type=config.model_type, dim=int(peft["dim"]), alpha=peft["alpha"])
    return AdapterFolder(tensors, options, config.to_json_string())


def _find_key(name: str, match: re.Match[str] | None, reader: ShardedReader) -> str | None:
    """Return the stored name of half an adapter, of all layers or of one."""
    prefixes = ["decoder.layers."] if match is None else [f"decoder.layers.{match[1]}.", "decoder.layers."]
    return next((key for prefix in prefixes if (key := re.sub(r"^layers\.", prefix, name)) in reader.shapes), None)


def _read(reader: ShardedReader, key: str | None, layer: int) -> Tensor:
    assert key is not None
    shape = reader.shapes[key]
    stacked = len(shape) - 2
    part = torch.empty(shape[stacked:], dtype=reader.dtypes[key])
    reader.read_blocks([(key, TensorShard(part[(None,) * stacked], (*(layer,) * stacked, 0, 0), shape))])
    return part
