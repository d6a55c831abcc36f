"""The names and the quantised form under which vLLM takes the learner's weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strop.models.checkpoint_names import CheckpointNames
from strop.models.quantization.number_format import QuantizedTensor, encode_e8m0, quantize
from strop.models.quantization.quantization_plan import EXPERTS, QuantizationPlan, unpack

# Parts of names in checkpoints -> those in vLLM's models, where a loader renames them itself.
_LOADED_AS = ((".router.layer.", ".gate."), (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"))
_CANONICAL = ((".routed_experts", ""),)  # parts of vLLM's module paths -> those of Transformers
_CANONICAL_GPT_OSS = ((".attn.", ".self_attn."), ("model.embedding.", "model.embed_tokens."))


def rename_for_engine(
    model: Any, tensors: Iterable[tuple[str, Tensor]], checkpoint: CheckpointNames
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with canonical names under the names that a vLLM model loads."""
    if _is_gpt_oss(model):
        return _split_gpt_oss(tensors)
    stacked = not _loads_single_experts(model)

    def convert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        usual = name.endswith(EXPERTS) and checkpoint.stored_names(name)[0].endswith(("gate_proj.weight", "down_proj.weight"))
        return iter([(name, tensor)]) if stacked and usual else checkpoint.convert(name, tensor)

    parts = (part for name, tensor in tensors for part in convert(name, tensor))
    return ((tower_name(model, name), tensor) for name, tensor in parts)


def _loads_single_experts(model: Any) -> bool:
    """Whether a loader in the model finds experts in a table of single ones, and knows no stacked ones as Llama 4's does."""
    loaders = (getattr(type(module), "load_weights", None) for module in model.modules())
    variables = [loader.__code__.co_varnames for loader in loaders if inspect.isfunction(loader)]
    return any("expert_params_mapping" in names and "fused_experts_params" not in names for names in variables)


def map_names(model: Any, names: Iterable[str], checkpoint: CheckpointNames) -> dict[str, str]:
    """Return {vLLM's name of a tensor: its name in ``names``} where they differ."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = str if mapper is None else replace(mapper, orig_to_new_stacked={}).map_name
    mapped: dict[str | None, str] = {}
    for name in names:
        stored = checkpoint.module_name(name)
        for part, replacement in _LOADED_AS:
            stored = stored.replace(part, replacement)
        own = rename(tower_name(model, stored))
        mapped[own] = name
        if own is not None and own.endswith(".A_log"):  # Mamba's layers compute with A = -exp(A_log)
            mapped[own.removesuffix("_log")] = name
    return {own: name for own, name in mapped.items() if own not in (None, name)}


def tower_name(model: Any, name: str) -> str:
    """Return the name under which a vLLM model loads a vision tower tensor: Transformers 5 has removed a level from some names."""
    for prefix in ("model.vision_tower.", "vision_tower."):
        flat = name.startswith(prefix) and not name.startswith(f"{prefix}vision_model.")
        if flat and hasattr(getattr(model, "vision_tower", None), "vision_model"):
            return f"{prefix}vision_model.{name.removeprefix(prefix)}"
    return name


def _is_gpt_oss(model: Any) -> bool:
    return type(model).__name__ == "GptOssForCausalLM"


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


# Quantise arriving weights of a publish, and name values and scales as in a checkpoint of that format.


@torch.no_grad()
def quantize_arriving(
    tensors: Iterable[tuple[str, Tensor]], plan: QuantizationPlan, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a publish, the selected ones as values and scales. ``names``: all tensors of the publish."""
    selected = plan.select(names)
    for name, tensor in tensors:
        if name not in selected:
            yield name, tensor
            continue
        for part_name, stored in _quantized_parts(name, tensor, plan):
            yield part_name, stored.values
            yield _name_scales(part_name, plan), _encode_scales(stored)


def _quantized_parts(name: str, tensor: Tensor, plan: QuantizationPlan) -> Iterator[tuple[str, QuantizedTensor]]:
    """Yield the matrices of a tensor, quantised here or by the sender."""
    if tensor.dtype is not torch.uint8:
        yield from ((part_name, quantize(part, plan.weights)) for part_name, part in _split_experts(name, tensor))
        return
    stored = unpack(tensor, plan.weights)
    matrices = zip(_split_experts(name, stored.values), _split_experts(name, stored.scales), strict=True)
    for (part_name, values), (_, scales) in matrices:
        yield part_name, QuantizedTensor(plan.weights, values, scales, torch.ones(1, 1, device=values.device))


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a tensor; all experts in one [E, R, C] are yielded separately, under their names in a checkpoint."""
    if not name.endswith(EXPERTS):
        yield name, tensor
        return
    prefix, _, kind = name.rpartition(".")
    for number, expert in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{number}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.{number}.gate_proj.weight", gate
            yield f"{prefix}.{number}.up_proj.weight", up


def _name_scales(name: str, plan: QuantizationPlan) -> str:
    """DeepSeek's checkpoints call block scales ``weight_scale_inv``; those of MXFP8 are ``weight_scale``."""
    return f"{name}_scale" if plan.weights.columns == 32 else f"{name}_scale_inv"


def _encode_scales(stored: QuantizedTensor) -> Tensor:
    return encode_e8m0(stored.scales) if stored.format.columns == 32 else stored.scales
