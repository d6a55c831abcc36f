"""Decides which weights of a model are quantised, and in which format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.quantization.number_format import (
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_GROUP,
    FP8_GROUP_POW2,
    FP8_ROW,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    NumberFormat,
    QuantizedTensor,
    round_trip,
)

_DIMENSIONS = 3  # at most experts, rows, columns
_HEADER = 8 * (1 + _DIMENSIONS)  # bytes: the number of dimensions, and their sizes


def packed_size(shape: Sequence[int], number_format: NumberFormat) -> int:
    """Return the packed size in bytes of a matrix, or of experts' matrices, of this shape [..., R, C] in a format with one-byte
    values.
    """
    return _HEADER + 4 * math.prod(_scales_shape(shape, number_format)) + math.prod(shape)


def pack(stored: QuantizedTensor) -> Tensor:
    """Return the header, the scales and the values, [bytes] uint8."""
    shape = list(stored.shape)
    header = torch.tensor([len(shape), *shape, *[1] * (_DIMENSIONS - len(shape))], device=stored.values.device)
    parts = (header, stored.scales.float(), stored.values)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(packed: Tensor, number_format: NumberFormat) -> QuantizedTensor:
    """Return the argument of ``pack``, as views of ``packed``. Raises ValueError for bytes of another format or size."""
    count, *sizes = packed[:_HEADER].view(torch.int64).tolist()
    shape = sizes[:count]
    if packed.numel() != packed_size(shape, number_format):
        raise ValueError(
            f"{packed.numel()} bytes arrived for a matrix {tuple(shape)} in {number_format.name}: the engine has another format"
        )
    scales_shape = _scales_shape(shape, number_format)
    end = _HEADER + 4 * math.prod(scales_shape)
    scales = packed[_HEADER:end].view(torch.float32).view(scales_shape)
    values = packed[end:].view(number_format.element.dtype or torch.uint8).view(shape)
    one = torch.ones([*shape[:-2], 1, 1], device=packed.device)
    return QuantizedTensor(number_format, values, scales, one)


def _scales_shape(shape: Sequence[int], number_format: NumberFormat) -> list[int]:
    *leading, rows, columns = shape
    return [*leading, -(-rows // (number_format.rows or rows)), -(-columns // (number_format.columns or columns))]


# Weights inside decoder layers that are never quantised, as in vLLM: routers, whose result is a discrete choice, and
# convolutions.
NEVER = (".gate.weight", "router", "shared_expert_gate", "conv1d", "norm", "embed")
DRAFT = "draft."  # of a draft head that is published together with the policy
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # all experts in one tensor [E, rows, columns]
FUSED_EXPERTS = "experts.gate_up_proj"  # rows of two matrices, concatenated
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_VISION = ("visual.", "vision")

# Input formats that accompany a weight format. Each token has its own scales, so that results do not depend on other tokens of a
# batch. NVFP4 is only for weights.
INPUT_FORMATS = {
    FP8_TENSOR.name: FP8_ROW,
    FP8_ROW.name: FP8_ROW,
    FP8_BLOCK.name: FP8_GROUP,
    FP8_BLOCK_POW2.name: FP8_GROUP,
    MXFP8.name: MXFP8,
    NVFP4.name: None,
}


@dataclass(frozen=True)
class QuantizationPlan:
    """How the linear layers of a decoder are quantised. Embeddings, norms, routers and the output layer never are."""

    weights: NumberFormat
    inputs: NumberFormat | None = None  # input format of the quantised layers; None: not quantised
    ignored: tuple[str, ...] = ()  # layers whose name contains one of these texts are not quantised
    first_layers: int = 0  # the first layers of the decoder are not quantised
    last_layers: int = 0
    fp8_cache: bool = False  # keys and values too

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of weights to quantise, given all canonical names of a model, with ``.weight``."""
        names = list(names)
        numbers = {name: _layer_number(name) for name in names}
        count = 1 + max((number for name, number in numbers.items() if number is not None and not _is_vision(name)), default=-1)
        return frozenset(name for name in names if self._covers(name, numbers[name], count))

    def _covers(self, name: str, number: int | None, count: int) -> bool:
        if number is None or name.startswith(DRAFT) or not (name.endswith(".weight") or name.endswith(EXPERTS)):
            return False
        if any(text in name for text in (*NEVER, *self.ignored)):
            return False
        return _is_vision(name) or self.first_layers <= number < count - self.last_layers

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return a selected weight [..., R, C] rounded to the format and back, in its own data type; a vector is returned
        unchanged.
        """
        return round_trip(weight, self.weights) if weight.dim() >= 2 else weight

    def round_input(self, x: Tensor) -> Tensor:
        """Return the input [..., K] of a selected layer, rounded to the format and back, in its own data type."""
        return x if self.inputs is None else round_trip(x, self.inputs)


def make_plan(
    weight_format: NumberFormat,
    *,
    pow2_inputs: bool = False,
    ignored: tuple[str, ...] = (),
    first_layers: int = 0,
    last_layers: int = 0,
    fp8_cache: bool = False,
) -> QuantizationPlan:
    """Make the plan for a weight format, including the input format that belongs to it."""
    inputs = INPUT_FORMATS[weight_format.name]
    if pow2_inputs and inputs is FP8_GROUP:
        inputs = FP8_GROUP_POW2
    return QuantizationPlan(weight_format, inputs, ignored, first_layers, last_layers, fp8_cache)


def _layer_number(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found.group(1))


def _is_vision(name: str) -> bool:
    return any(text in name for text in _VISION)
