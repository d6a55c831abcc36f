"""Round a tensor to a format and back in the forward pass, and pass its gradient through unchanged (straight-through estimator).

The estimator is that of arXiv 1308.3432, also where a static scale saturates (ModelOpt's ``pass_through_bwd``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.extensions.labs.fake_quant.quantizer_rules import QuantizerFormat
from strop.models.quantization.elements import E2M1
from strop.models.quantization.number_format import NUMBER_FORMATS, NumberFormat, round_trip

# ModelOpt's MXFP4 has scales with which nothing saturates, and NVFP4 may have blocks of 32.
FORMATS: Mapping[str, NumberFormat] = {
    **NUMBER_FORMATS,
    "mxfp4_ceil": NumberFormat("mxfp4_ceil", E2M1, 1, 32, "power_of_two"),
    "nvfp4_32": NumberFormat("nvfp4_32", E2M1, 1, 32, "e4m3"),
}


@dataclass(eq=False)
class TensorQuantizer:
    """Rounds one weight, or the inputs of one layer."""

    format: NumberFormat
    amax: float | None = None  # of static scales: the greatest magnitude, found by calibration; None: that of each tensor
    is_static: bool = False  # needs ``amax``
    paused: bool = False  # rounds nothing; a static scale that is missing is found meanwhile

    def round(self, tensor: Tensor) -> Tensor:
        """[..., R, C] -> the same rounded, in its data type; the gradient passes through. Leading dimensions are separate matrices."""
        if self.paused:
            return tensor
        apply: Any = _StraightThrough.apply
        rounded: Tensor = apply(tensor, self)
        return rounded

    def round_inputs(self, x: Tensor) -> Tensor:
        """[..., C] -> the same rounded: one matrix, whose rows are tokens."""
        if self.is_static and self.paused and x.numel():
            self.amax = max(self.amax or 0.0, float(x.detach().abs().amax()))
        if self.paused:
            return x
        if self.is_static and self.amax is None:
            raise RuntimeError("inputs with a static scale are read before their calibration")
        return self.round(x.reshape(-1, x.shape[-1])).view(x.shape)

    def round_detached(self, tensor: Tensor) -> Tensor:
        """Return what ``round`` returns, without a gradient."""
        amax = None if self.amax is None else torch.tensor(self.amax, device=tensor.device)
        return round_trip(tensor, self.format, amax=amax)


def make_weight_quantizer(wanted: QuantizerFormat | None) -> TensorQuantizer | None:
    return None if wanted is None else TensorQuantizer(FORMATS[wanted.name], _constant_amax(wanted))


def make_input_quantizer(wanted: QuantizerFormat | None) -> TensorQuantizer | None:
    return (
        None if wanted is None else TensorQuantizer(FORMATS[wanted.name], _constant_amax(wanted), is_static=wanted.static_inputs)
    )


def _constant_amax(wanted: QuantizerFormat) -> float | None:
    return FORMATS[wanted.name].element.largest if wanted.constant_amax else None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: TensorQuantizer) -> Tensor:
        return quantizer.round_detached(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None
