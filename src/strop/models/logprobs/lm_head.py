"""The output layer of a causal language model: its weights, and its model family's transformation of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LMHead:
    """The output layer and its model family's transformation of the logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None = None  # final_logit_softcapping, Gemma 2 and 3; logits_soft_cap, Recurrent Gemma
    divisor: float = 1.0  # logits_scaling, Granite
    multiplier: float = 1.0  # logit_scale, Cohere

    @property
    def is_linear(self) -> bool:
        return self.softcap is None and self.divisor == 1.0 and self.multiplier == 1.0

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [.., H] -> [.., V]
        return self.transform_logits(nn.functional.linear(hidden, self.weight, self.bias))

    def transform_logits(self, logits: Tensor) -> Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def get_lm_head(model: nn.Module) -> LMHead:
    """Return the LM head of a Hugging Face causal LM. Raises ValueError if it has no linear output layer."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer (found {type(layer).__name__})")
    return make_lm_head(model.config, layer.weight, layer.bias)


def make_lm_head(config: Any, weight: Tensor, bias: Tensor | None = None) -> LMHead:
    """Return an output layer with the logit transformation given by a Hugging Face configuration."""
    config = getattr(config, "text_config", None) or config
    return LMHead(
        weight=weight,
        bias=bias,
        softcap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
    )
