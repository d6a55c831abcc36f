"""Norms of hidden states in a stage, as Transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.extensions.megatron.families.architecture import NormKind
from strop.sampling import at_least_float32


class StageNorm(nn.Module):
    """A norm whose weight every tensor-parallel rank holds.

    With sequence parallelism each rank normalizes other tokens: the attribute ``sequence_parallel`` makes Megatron Core add the gradients.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self._make_parameters(config, hidden_size)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _make_parameters(self, config: Any, hidden_size: int) -> None:
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))


class StageRmsNorm(StageNorm):
    """Root mean square norm, as Llama has it: [.., H] -> [.., H]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * normalize_rms(hidden, self.eps).to(hidden.dtype)


class WideRmsNorm(StageNorm):
    """Root mean square norm that is rounded after its weight is applied, as gpt-oss and Nemotron-H have it: [.., H] -> [.., H]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (normalize_rms(hidden, self.eps) * at_least_float32(self.weight)).to(hidden.dtype)


class RmsNormPlusOne(StageNorm):
    """Root mean square norm with weights around 0, as Gemma has it: [.., H] -> [.., H]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (normalize_rms(hidden, self.eps) * (1.0 + at_least_float32(self.weight))).to(hidden.dtype)


class LayerNormPlusOne(StageNorm):
    """Layer norm with weights around 0, as Nemotron has it: [.., H] -> [.., H]."""

    def _make_parameters(self, config: Any, hidden_size: int) -> None:
        super()._make_parameters(config, hidden_size)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, (hidden.shape[-1],), self.weight + 1, self.bias, self.eps)


def normalize_rms(hidden: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(hidden)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


NORMS: dict[NormKind, type[StageNorm]] = {
    "rms": StageRmsNorm,
    "rms_wide": WideRmsNorm,
    "rms_plus_one": RmsNormPlusOne,
    "layer_norm_plus_one": LayerNormPlusOne,
}
