"""Copies of the linear layers' weights in the fastest layout for decoding.

A decoding step multiplies a few rows with every weight, so it is bound by memory bandwidth. On a CPU oneDNN's packed layout, or
the panels of the compiled kernels, halve that time; in bf16 the copies also avoid casting float32 weights at every step. Each
publish refreshes the copies in one pass over the weights. If neither applies (float32 on a GPU), the module's own weights are
used and a publish costs nothing.

Adapters (LoRA) are part of the copies; the model itself never changes. In float32 they are merged, W + scale B A: one matrix product per
layer. In bf16 they stay separate, and a layer computes the same operations as the learner's. Merging in bf16 would round small updates
away and round differently from the learner: on SmolLM2 log-probabilities then differ from the learner's by 0.04 per token (mean), with
separate adapters by less than 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from strop.generation.quantized_rollouts import EmulatedQuantization
from strop.generation.torch.decode_kernels import DecodeKernels, PackedMatrix
from strop.models.adapters import LoraLayer, base_weights, identity, lora_layers
from strop.models.layers.rounded_layers import RoundedLinear

LinearFunction = Callable[[Tensor, Any, Tensor | None], Tensor]

PREPACK_ROWS = 32  # batch size that oneDNN optimizes its layout for; other sizes work too


@dataclass(frozen=True, eq=False)
class _RoutedLayer:
    """A layer that can be computed from copied weights."""

    name: str  # canonical, as in a model without adapters
    module: nn.Module  # its ``forward`` is replaced
    linear: nn.Linear
    adapter: LoraLayer | None = None

    def weight(self, precision: torch.dtype, *, as_it_is: bool) -> Tensor:
        """Return the weight that the layer computes with: rounded, if the layer rounds it; or ``as_it_is``."""
        if isinstance(self.linear, RoundedLinear) and not as_it_is:
            return self.linear.rounded_weight(precision)
        return self.linear.weight


@dataclass(frozen=True, eq=False)
class _LinearWeights:
    """y = weight x + bias + scale * up (down x)."""

    weight: Tensor | PackedMatrix  # [outputs, inputs], or the same in the layout of oneDNN or of the compiled kernels
    bias: Tensor | None  # [outputs]
    down: Tensor | PackedMatrix | None = None  # [r, inputs]
    up: Tensor | PackedMatrix | None = None  # [outputs, r]
    scale: float = 1.0


class FastLinears:
    """Switches a model's nn.Linear modules, with or without adapters, between their own weights and fast copies."""

    def __init__(
        self,
        model: nn.Module,
        precision: torch.dtype,
        *,
        prepack: bool | None = None,
        kernels: DecodeKernels | None = None,
        decoder: nn.Module | None = None,
        quantization: EmulatedQuantization | None = None,
    ) -> None:
        """``prepack`` None: pack weights on a CPU, for the compiled kernels if given, otherwise for oneDNN.

        ``decoder``: for a model that reads images, the part that decodes; the vision tower is unchanged. ``quantization``: round
        weights and inputs. Raises ValueError if it selects weights outside linear layers.
        """
        parameter = next(model.parameters())
        self.layers = [layer for layer in _find_layers(model) if decoder is None or _decodes(layer.module, model, decoder)]
        self.precision = precision
        self.kernels = kernels
        on_cpu = parameter.device.type == "cpu" and (kernels is not None or torch.backends.mkldnn.is_available())
        self.prepack = on_cpu if prepack is None else prepack and on_cpu
        self.cast = precision != parameter.dtype
        self.merge = precision.itemsize >= 4
        self.copies: list[_LinearWeights] = []
        self.quantization = quantization
        self.rounded: frozenset[str] = frozenset()  # layers with rounded weights or inputs
        if quantization is not None:
            names = [layer.name for layer in self.layers]
            own = {layer.name for layer in self.layers if isinstance(layer.linear, RoundedLinear)}  # rounded like the learner's
            quantization.check_covers([name for name, _ in base_weights(model)], names)
            self.rounded = quantization.select_layers(names) - own

    @property
    def uses_module_weights(self) -> bool:
        """Whether generation reads the module's own weights."""
        return not (self.prepack or self.cast or self.rounded)

    @torch.no_grad()
    def enable(self) -> None:
        """Refresh the copies and make the modules use them."""
        if self.uses_module_weights:
            return
        for index, layer in enumerate(self.layers):
            old = self.copies[index] if len(self.copies) > index else None
            copy = self._copy_weights(self._effective_weights(layer), old)
            self.copies[index : index + 1] = [copy]
            layer.module.forward = self._make_forward(copy, layer)  # type: ignore[method-assign, assignment]

    def disable(self) -> None:
        """Restore the modules for the learner."""
        for layer in self.layers:
            layer.module.__dict__.pop("forward", None)

    @torch.no_grad()
    def find_stale_copies(self) -> dict[str, Tensor]:
        """Return the copies that differ from the module's weights, by canonical name.

        An adapter's matrices, and a copy with a merged adapter, are listed under the name of the base weight.
        """
        stale: dict[str, Tensor] = {}
        for layer, copy in zip(self.layers, self.copies, strict=False):
            expected = self._effective_weights(layer)
            for part, name in (("bias", "bias"), ("down", "weight"), ("up", "weight"), ("weight", "weight")):
                tensor: Tensor | None = getattr(expected, part)
                if tensor is not None and not torch.equal(
                    actual := self._to_dense(getattr(copy, part)), tensor.to(self.precision)
                ):
                    stale[f"{layer.name}.{name}"] = actual
        return stale

    def packed_weights(self, module: nn.Module) -> tuple[PackedMatrix, Tensor | None]:
        """Return the kernels' copy of a layer's weight and its bias [outputs]. Raises ValueError for a layer without one."""
        for layer, copy in zip(self.layers, self.copies, strict=False):
            if layer.module is module and isinstance(copy.weight, PackedMatrix) and copy.down is None:
                return copy.weight, copy.bias
        raise ValueError(f"{type(module).__name__} has no weights that are packed for the compiled kernels")

    @staticmethod
    def _to_dense(copy: Tensor | PackedMatrix) -> Tensor:
        """Return a copy in the dense layout. Unpacking is bit-exact."""
        return copy.to_dense() if isinstance(copy, PackedMatrix) or copy.is_mkldnn else copy

    def _effective_weights(self, layer: _RoutedLayer) -> _LinearWeights:
        """Return the weights that the layer computes with, before the cast to the generation precision."""
        emulated = layer.name in self.rounded  # in the learner's format, if that rounds too
        adapter, weight, bias = layer.adapter, layer.weight(self.precision, as_it_is=emulated), layer.linear.bias
        if adapter is None:
            return _LinearWeights(self._round(layer.name, weight), bias)
        rounds_inputs = isinstance(layer.linear, RoundedLinear) and layer.linear.rounds_inputs
        if self.merge and not rounds_inputs:  # the adapter's inputs are not rounded
            return _LinearWeights(self._round(layer.name, adapter.merged_weight()), bias)
        return _LinearWeights(self._round(layer.name, weight), bias, adapter.down, adapter.up, adapter.scale)

    def _round(self, name: str, weight: Tensor) -> Tensor:
        """Return a layer's weight as in the emulated engine: in the generation precision, then rounded to its format."""
        if self.quantization is None or not self.quantization.rounds_weights or name not in self.rounded:
            return weight
        return self.quantization.plan.round_weight(weight.detach().to(self.precision))

    def _copy_weights(self, weights: _LinearWeights, old: _LinearWeights | None) -> _LinearWeights:
        copies: dict[str, Any] = {}
        for name in ("weight", "bias", "down", "up"):
            tensor = getattr(weights, name)
            if tensor is not None:
                copies[name] = self._copy(tensor.detach(), getattr(old, name, None), matrix=name != "bias")
        return replace(weights, **copies)

    def _copy(self, tensor: Tensor, old: Any, *, matrix: bool) -> Tensor | PackedMatrix:
        if self.kernels is not None and self.prepack and matrix:
            return self.kernels.pack(tensor, self.precision)
        tensor = tensor.to(self.precision)
        if self.prepack and matrix:
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(tensor.contiguous(), PREPACK_ROWS)
            return packed
        copy: Tensor = tensor.clone() if old is None else old.copy_(tensor)  # in place: captured CUDA graphs read this memory
        return copy

    def _make_forward(self, copy: _LinearWeights, layer: _RoutedLayer) -> Callable[[Tensor], Tensor]:
        linear: LinearFunction = _packed_linear if self.prepack else nn.functional.linear
        if self.kernels is not None and self.prepack:
            linear = self.kernels.linear
        precision = self.precision
        down, up = copy.down, copy.up
        rounded = self.quantization if layer.name in self.rounded else None
        own = layer.linear.round_inputs if isinstance(layer.linear, RoundedLinear) else identity
        round_input = own if rounded is None else rounded.plan.round_input
        if down is None or up is None:
            return lambda x: linear(round_input(x.to(precision)), copy.weight, copy.bias)

        def forward_with_adapter(x: Tensor) -> Tensor:
            x = x.to(precision)
            output = linear(round_input(x), copy.weight, copy.bias)
            return output + linear(linear(x, down, None), up, None) * copy.scale

        return forward_with_adapter


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def _decodes(module: nn.Module, model: Any, decoder: nn.Module) -> bool:
    return module is model.get_output_embeddings() or any(module is each for each in decoder.modules())


def _find_layers(model: nn.Module) -> Iterator[_RoutedLayer]:
    """Yield every nn.Linear, with its adapter if it has one. Adapters on other layer types (GPT-2's Conv1D) are left unchanged."""
    adapter_modules: set[int] = set()
    for adapter in lora_layers(model):
        adapter_modules |= {id(module) for module in adapter.module.modules()}
        if _is_linear(adapter.base):
            yield _RoutedLayer(adapter.name, adapter.module, adapter.base, adapter)
    for name, module in model.named_modules():
        if _is_linear(module) and id(module) not in adapter_modules:
            yield _RoutedLayer(name, module, module)


def _is_linear(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear or isinstance(module, RoundedLinear)
