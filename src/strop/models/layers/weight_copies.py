"""The weights of linear layers with the same input, in the dtype and layout of the matrix products.

Under autocast the float32 weights are cast once for all micro-batches of a pass. On a CPU the forward pass of layers that are not compiled
reads another copy in oneDNN's packed layout, with which its products are about a tenth faster. Packing for the gradient of the input as
well, or in float32, costs as much as it saves where a pass has a single micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

PACKED_ROWS = 1024  # the number of rows that oneDNN optimizes its layout for; other numbers work too


@dataclass(frozen=True)
class WeightLayout:
    """What the weights of some linear layers are, apart from their tensors."""

    sizes: tuple[int, ...]  # outputs of each layer
    joined: bool
    biased: bool

    @property
    def count(self) -> int:
        """The number of tensors."""
        return (1 if self.joined else len(self.sizes)) * (1 + self.biased)

    def build(self, tensors: Sequence[Tensor]) -> LinearWeights:
        """Return the weights with these tensors, which are not in oneDNN's layout."""
        if self.joined:
            return JoinedWeights(self.sizes, tensors[0], None, tensors[1] if self.biased else None)
        layers = len(self.sizes)
        return SeparateWeights(tuple(tensors[:layers]), tuple(tensors[layers:]) if self.biased else (None,) * layers)


class LinearWeights(Protocol):
    """The weights [N, K] of linear layers with one input, in the dtype of the products."""

    @property
    def layout(self) -> WeightLayout: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that ``layout`` builds equal weights with."""
        ...

    @cached_property
    def form(self) -> Hashable:
        """What code is compiled for: the layout, and the dtypes, shapes and strides of the tensors."""
        return self.layout, *[(each.dtype, each.shape, each.stride()) for each in self.tensors]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, K] -> [T, N] of each layer."""
        ...

    def join_columns(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Prepare gradients [T, N] of each layer's outputs for the two methods below."""
        ...

    def project_back(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the input, [T, K]."""
        ...

    def gradients(self, x: Tensor, grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the gradient of each weight, [N, K] in ``dtype``, given the input ``x`` [T, K]."""
        ...


@dataclass(frozen=True, eq=False)
class SeparateWeights(LinearWeights):
    """The layers' own weights."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(tuple(map(len, self.weights)), joined=False, biased=self.biases[0] is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.weights, *(bias for bias in self.biases if bias is not None)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(nn.functional.linear(x, *parameters) for parameters in zip(self.weights, self.biases, strict=True))

    def join_columns(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        return grads

    def project_back(self, grads: Sequence[Tensor]) -> Tensor:
        result = grads[0] @ self.weights[0]
        if len(grads) == 1:
            return result
        total = result.to(torch.promote_types(result.dtype, torch.float32))  # low-precision parts are summed without rounding
        for grad, weight in zip(grads[1:], self.weights[1:], strict=True):
            total = total.addmm_(grad, weight) if total.dtype == grad.dtype else total.add_(grad @ weight)
        return total.to(result.dtype)

    def gradients(self, x: Tensor, grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [(grad.t() @ x).to(dtype) for grad in grads]


@dataclass(frozen=True, eq=False)
class JoinedWeights(LinearWeights):
    """Copies of the weights of all layers in one matrix [N1 + N2 ..., K], for a single product per pass."""

    sizes: tuple[int, ...]  # outputs of each layer
    weight: Tensor
    packed: Tensor | None  # the same in oneDNN's layout
    bias: Tensor | None  # [N1 + N2 ...]

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.sizes, joined=True, biased=self.bias is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.packed is None:
            outputs = nn.functional.linear(x, self.weight, self.bias)
        else:
            outputs = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return outputs.split_with_sizes(self.sizes, -1)  # the call behind `split`, which is a function in Python

    def join_columns(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        return [grads[0].contiguous() if len(grads) == 1 else torch.cat(tuple(grads), -1)]

    def project_back(self, grads: Sequence[Tensor]) -> Tensor:
        (grad,) = grads
        return grad @ self.weight

    def gradients(self, x: Tensor, grads: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return list((grads[0].t() @ x).to(dtype).split_with_sizes(self.sizes))


class WeightCopies:
    """Converts the weights of a model's linear layers for their products, and keeps the copies until ``clear``.

    A copy is used again only while the layers' parameters are in the same memory and autograd has counted no change of them.
    It does not count what a fused step of an optimizer, or ``parameter.data``, changes in place: ``clear`` before the next pass.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Copy] = {}

    def clear(self) -> None:
        """Drop the copies."""
        self._kept.clear()

    def get(self, linears: Sequence[nn.Linear], dtype: torch.dtype, *, keep: bool, pack: bool = True) -> LinearWeights:
        """Return the weights of linear layers in ``dtype``, kept copies if there are any. ``pack``: for products in oneDNN's layout."""
        kept = self._kept.get(id(linears[0]))
        parameters = [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]
        if kept is not None and kept.dtype == dtype and kept.state == _state(parameters):
            return kept.weights
        weights = _prepare(linears, dtype, pack=pack)
        if keep:
            memory = [parameter.detach() for parameter in parameters]
            self._kept[id(linears[0])] = _Copy(weights, dtype, _state(parameters), memory)
        return weights


@dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    """Copies of weights, and what they were made of."""

    weights: LinearWeights
    dtype: torch.dtype
    state: list[int]
    memory: list[Tensor]  # of the parameters: while it is referred to, no other has its address


def _state(parameters: list[Tensor]) -> list[int]:
    state = [parameter.data_ptr() for parameter in parameters]
    return state + [0 if parameter.is_inference() else parameter._version for parameter in parameters]


@torch.no_grad()
def _prepare(linears: Sequence[nn.Linear], dtype: torch.dtype, *, pack: bool) -> LinearWeights:
    weights = tuple(linear.weight.detach() for linear in linears)
    biases = tuple(None if linear.bias is None else linear.bias.detach() for linear in linears)
    pack = pack and _can_pack(weights[0].device, dtype)
    if weights[0].dtype == dtype and not pack:
        return SeparateWeights(weights, biases)
    weight = _cat_as(weights, dtype)
    bias = None if biases[0] is None else _cat_as([bias for bias in biases if bias is not None], dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS) if pack else None
    return JoinedWeights(tuple(len(part) for part in weights), weight, packed, bias)


def _can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    on_cpu = device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return on_cpu and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _cat_as(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    joined = tensors[0].new_empty(sum(map(len, tensors)), *tensors[0].shape[1:], dtype=dtype)
    torch._foreach_copy_(list(joined.split([len(tensor) for tensor in tensors])), list(tensors))
    return joined
