"""Copies of the linear layers' weights in the form in which generating reads them fastest.

A decoding step multiplies a few rows with every weight, so it is bound by reading weights. On a CPU oneDNN's own layout halves that
time; in bf16 the copies also save casting float32 weights at every step. Refreshing them is one pass over the weights, at each publish.
Where neither applies (float32 on a GPU) the module's own weights are used and a publish costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS = 32  # the batch for which oneDNN chooses its layout; others work too


class FastLinears:
    """Switches a model's nn.Linear modules between their own weights and fast copies."""

    def __init__(self, model: nn.Module, precision: torch.dtype, *, prepack: bool | None = None) -> None:
        """``prepack`` None: on a CPU with oneDNN."""
        parameter = next(model.parameters())
        self.modules = [module for module in model.modules() if type(module) is nn.Linear]
        self.precision = precision
        on_cpu = parameter.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.prepack = on_cpu if prepack is None else prepack and on_cpu
        self.cast = precision != parameter.dtype
        self.copies: list[Tensor] = []

    @property
    def shared(self) -> bool:
        """Whether generating reads the module's own weights."""
        return not (self.prepack or self.cast)

    @torch.no_grad()
    def switch_on(self) -> None:
        """Refresh the copies and route the modules through them."""
        if self.shared:
            return
        for place, module in enumerate(self.modules):
            weight = module.weight.detach().to(self.precision)
            if self.prepack:
                copy = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
            elif len(self.copies) > place:
                copy = self.copies[place].copy_(weight)  # in place: a captured CUDA graph reads this memory
            else:
                copy = weight.clone()
            self.copies[place : place + 1] = [copy]
            module.forward = self._forward(copy, module.bias)  # type: ignore[method-assign, assignment]

    def switch_off(self) -> None:
        """Give the modules back to the learner."""
        for module in self.modules:
            module.__dict__.pop("forward", None)

    def _forward(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        precision = self.precision
        offset = None if bias is None else bias.detach().to(precision)
        if self.prepack:
            linear = torch.ops.mkldnn._linear_pointwise

            def packed(x: Tensor) -> Tensor:
                output: Tensor = linear(x.to(precision), weight, offset, "none", [], "")
                return output

            return packed
        return lambda x: nn.functional.linear(x.to(precision), weight, offset)
