"""Copies of the linear layers' weights in the form in which generating reads them fastest.

A decoding step multiplies a few rows with every weight, so it is bound by reading weights. On a CPU oneDNN's own layout halves that
time; in bf16 the copies also save casting float32 weights at every step. Refreshing them is one pass over the weights, at each publish.
Where neither applies (float32 on a GPU) the module's own weights are used and a publish costs nothing.

Adapters (LoRA) are in the copies, and the model itself never changes. In float32 they are merged, W + scale B A: one product a layer.
In bf16 they stay beside the base, and a layer does what the learner's does, operation by operation. Merged weights would round what
changed away until it exceeds half a last place, and would round elsewhere than the learner: on SmolLM2 log-probabilities then differ
from the learner's by 0.04 a token (mean), beside the base by less than 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.adapters import LowRank, low_rank_layers

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

ROWS = 32  # the batch for which oneDNN chooses its layout; others work too


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer that can be computed from copies."""

    name: str  # in the model, as without adapters
    module: nn.Module  # whose forward is routed
    linear: nn.Linear
    adapter: LowRank | None = None


@dataclass(frozen=True, eq=False)
class _Weights:
    """y = weight x + bias + scale * up (down x)."""

    weight: Tensor  # [outputs, inputs], or oneDNN's layout of it
    bias: Tensor | None  # [outputs]
    down: Tensor | None = None  # [r, inputs]
    up: Tensor | None = None  # [outputs, r]
    scale: float = 1.0


class FastLinears:
    """Switches a model's nn.Linear modules, and those with adapters, between their own weights and fast copies."""

    def __init__(self, model: nn.Module, precision: torch.dtype, *, prepack: bool | None = None) -> None:
        """``prepack`` None: on a CPU with oneDNN."""
        parameter = next(model.parameters())
        self.layers = list(_layers(model))
        self.precision = precision
        on_cpu = parameter.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.prepack = on_cpu if prepack is None else prepack and on_cpu
        self.cast = precision != parameter.dtype
        self.merge = precision.itemsize >= 4
        self.copies: list[_Weights] = []

    @property
    def shared(self) -> bool:
        """Whether generating reads the module's own weights."""
        return not (self.prepack or self.cast)

    @torch.no_grad()
    def switch_on(self) -> None:
        """Refresh the copies and route the modules through them."""
        if self.shared:
            return
        for place, layer in enumerate(self.layers):
            before = self.copies[place] if len(self.copies) > place else None
            copy = self._copied(self._weights(layer), before)
            self.copies[place : place + 1] = [copy]
            layer.module.forward = self._forward(copy)  # type: ignore[method-assign, assignment]

    def switch_off(self) -> None:
        """Give the modules back to the learner."""
        for layer in self.layers:
            layer.module.__dict__.pop("forward", None)

    @torch.no_grad()
    def stale(self) -> dict[str, Tensor]:
        """The copies that are not what the module holds, by the canonical name of what they should be copies of.

        A copy beside which an adapter stands, or into which one is merged, goes by the name of the weight under it.
        """
        found: dict[str, Tensor] = {}
        for layer, copy in zip(self.layers, self.copies, strict=False):
            wanted = self._weights(layer)
            for part, name in (("bias", "bias"), ("down", "weight"), ("up", "weight"), ("weight", "weight")):
                tensor: Tensor | None = getattr(wanted, part)
                if tensor is not None and not torch.equal(held := self._read(getattr(copy, part)), tensor.to(self.precision)):
                    found[f"{layer.name}.{name}"] = held
        return found

    @staticmethod
    def _read(copy: Tensor) -> Tensor:
        """A copy in the usual layout: oneDNN gives back every bit."""
        return copy.to_dense() if copy.is_mkldnn else copy

    def _weights(self, layer: _Layer) -> _Weights:
        """What the layer multiplies with, in the model's precision."""
        adapter, weight, bias = layer.adapter, layer.linear.weight, layer.linear.bias
        if adapter is None:
            return _Weights(weight, bias)
        if self.merge:
            return _Weights(adapter.merged(), bias)
        return _Weights(weight, bias, adapter.down, adapter.up, adapter.scale)

    def _copied(self, weights: _Weights, before: _Weights | None) -> _Weights:
        copies: dict[str, Any] = {}
        for name in ("weight", "bias", "down", "up"):
            tensor: Tensor | None = getattr(weights, name)
            if tensor is not None:
                copies[name] = self._copy(tensor.detach(), getattr(before, name, None), matrix=name != "bias")
        return replace(weights, **copies)

    def _copy(self, tensor: Tensor, old: Tensor | None, *, matrix: bool) -> Tensor:
        tensor = tensor.to(self.precision)
        if self.prepack and matrix:
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(tensor.contiguous(), ROWS)
            return packed
        return tensor.clone() if old is None else old.copy_(tensor)  # in place: a captured CUDA graph reads this memory

    def _forward(self, copy: _Weights) -> Callable[[Tensor], Tensor]:
        linear: Linear = _packed_linear if self.prepack else nn.functional.linear
        precision = self.precision
        down, up = copy.down, copy.up
        if down is None or up is None:
            return lambda x: linear(x.to(precision), copy.weight, copy.bias)

        def beside(x: Tensor) -> Tensor:
            x = x.to(precision)
            output = linear(x, copy.weight, copy.bias)
            return output + linear(linear(x, down, None), up, None) * copy.scale

        return beside


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """Every nn.Linear, with its adapter if it has one; adapters on other layers (GPT-2's) run as they are."""
    inside: set[int] = set()
    for adapter in low_rank_layers(model):
        inside |= {id(module) for module in adapter.module.modules()}
        if type(adapter.base) is nn.Linear:
            yield _Layer(adapter.name, adapter.module, adapter.base, adapter)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module) not in inside:
            yield _Layer(name, module, module)
