"""Tensor names in vLLM that differ both from Transformers' and from vLLM's own mapping.

Transformers renames weights on loading and stacks experts, and Strop sends its names. vLLM reads checkpoint names, which differ
for some models, and some of its loaders accept only single experts. In gpt-oss, the loaders of stacked experts and of attention
sinks write into parameters that a reload has replaced, so experts are passed singly and sinks are copied afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_CANONICAL = (  # parts of vLLM's module paths -> those of Transformers
    (".block_sparse_moe.", ".mlp."),
    (".routed_experts", ""),
)
_CANONICAL_GPT_OSS = ((".attn.", ".self_attn."), ("model.embedding.", "model.embed_tokens."))


def rename_for_engine(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with canonical names under the names that a vLLM model loads."""
    if _is_gpt_oss(model):
        return _split_gpt_oss(tensors)
    if _loads_single_experts(model):
        return _split_experts(tensors)
    if any(path.endswith(".block_sparse_moe") for path, _ in model.named_modules()):
        return ((_block_sparse_name(name), tensor) for name, tensor in tensors)
    return ((tower_name(model, name), tensor) for name, tensor in tensors)


def tower_name(model: Any, name: str) -> str:
    """Return the name under which a vLLM model loads a vision tower tensor: Transformers 5 has removed a level from some names."""
    prefix, nested = "model.vision_tower.", "model.vision_tower.vision_model."
    flat = name.startswith(prefix) and not name.startswith(nested)
    return nested + name.removeprefix(prefix) if flat and hasattr(getattr(model, "vision_tower", None), "vision_model") else name


def _is_gpt_oss(model: Any) -> bool:
    return type(model).__name__ == "GptOssForCausalLM"


def _loads_single_experts(model: Any) -> bool:
    """Whether a loader in the model finds experts in a table of single ones, and knows no stacked ones as Llama 4's does."""
    loaders = (getattr(type(module), "load_weights", None) for module in model.modules())
    variables = [loader.__code__.co_varnames for loader in loaders if inspect.isfunction(loader)]
    return any("expert_params_mapping" in names and "fused_experts_params" not in names for names in variables)


def _block_sparse_name(name: str) -> str:
    """Return the name in checkpoints of Mixtral and similar models."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return name.replace(".experts.gate_up_proj", ".experts.w13").replace(".experts.down_proj", ".experts.w2")


def _split_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        layer, found, matrix = name.rpartition(".experts.")
        if not found or matrix not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for index, expert in enumerate(tensor):
            parts = expert.chunk(2) if matrix == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            for part, single in zip(names, parts, strict=True):
                yield f"{layer}.experts.{index}.{part}.weight", single


def _split_gpt_oss(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        layer, found, matrix = name.rpartition(".experts.")
        if not found:
            yield name, tensor
            continue
        for index, expert in enumerate(tensor):
            yield f"{layer}.experts.{index}.{matrix}", expert


class KeptSinks:
    """The attention sinks of a publish, kept during loading because vLLM's reload loses them."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._sinks: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            if name.endswith(".sinks"):
                self._sinks[name] = tensor
            yield name, tensor

    @torch.no_grad()
    def copy_into(self, model: Any, rank: int) -> None:
        """Copy this process's heads into the model: ``rank`` among the tensor-parallel ranks."""
        for path, module in model.named_modules():
            sent = self._sinks.get(canonical_name(model, f"{path}.sinks"))
            if sent is not None:
                heads = len(module.sinks)
                module.sinks.copy_(sent[rank * heads : (rank + 1) * heads])


def canonical_name(model: Any, name: str) -> str:
    """Return the canonical name of a tensor, given its name in a vLLM model."""
    for part, replacement in _CANONICAL + (_CANONICAL_GPT_OSS if _is_gpt_oss(model) else ()):
        name = name.replace(part, replacement)
    return name
