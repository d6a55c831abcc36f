"""Tiny models with LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strop.models.adapters import ADAPTER, lora_layers
from strop.models.lora import add_adapters
from strop.models.lora_config import LoraConfig
from support.models import build


def with_random_adapters(model: Any, *, spread: float = 0.3, base: str = "base", seed: int = 0, **options: Any) -> Any:
    """Add adapters that change the model's outputs: ``up``, normally initialized to zero, is drawn with this spread."""
    add_adapters(model, LoraConfig(**options), base=base, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for layer in lora_layers(model):
            layer.up.copy_(spread * torch.randn(layer.up.shape, generator=generator))
    return model


def share_fused(model: Any) -> None:
    """Give the layers that Megatron Core fuses one A: those of queries, keys and values, of gate and up, of what delta nets read."""
    shared: dict[str, Any] = {}
    for layer in lora_layers(model):
        parent, _, name = layer.name.rpartition(".")
        kind = "qkv" if name in ("q_proj", "k_proj", "v_proj") else "fc1" if name in ("gate_proj", "up_proj") else name
        kind = "in_proj" if name.startswith("in_proj") else kind
        down: Any = layer.module
        down.lora_A[ADAPTER].weight = shared.setdefault(f"{parent}.{kind}", layer.down)


def build_with_adapters(family: str, **options: Any) -> Any:
    return with_random_adapters(build(family), **options)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every weight."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def copy_base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the base weights, without adapters."""
    return {name: tensor for name, tensor in copy_weights(model).items() if ".lora_" not in name}
