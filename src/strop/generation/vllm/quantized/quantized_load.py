"""Quantise arriving weights of a publish, and name values and scales as in a checkpoint of that format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from strop.models.quantization.elements import encode_e8m0
from strop.models.quantization.number_format import QuantizedTensor, quantize
from strop.models.quantization.packed_matrices import unpack
from strop.models.quantization.quantization_plan import EXPERTS, QuantizationPlan


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
