"""The output layer of a causal language model: its weights, and its model family's transformation of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class VocabularyDivision(Protocol):
    """Devices that each have some rows of the output layer, and so the logits of some tokens. They call its methods together."""

    @property
    def size(self) -> int:
        """V, of all devices."""
        ...

    @property
    def first(self) -> int:
        """The first token id of this device; its others follow."""
        ...

    def local(self, parameter: Tensor) -> Tensor:
        """Return this device's rows [v, ...] of a parameter of the layer, differentiably."""
        ...

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[n, ...] of each device -> [devices * n, ...]; backward: the sum of the gradients of this device's rows."""
        ...

    def own_rows(self, rows: Tensor) -> Tensor:
        """[devices * n, ...], equal on all devices -> this device's [n, ...]."""
        ...

    def stack(self, numbers: Tensor) -> Tensor:
        """[...] of each device -> [devices, ...], in the order of their token ids, without gradient."""
        ...

    def exchange(self, logits: Tensor) -> Tensor:
        """Logits of all devices' rows for this device's tokens [devices * n, v] -> of this device's rows for all tokens [n, V]."""
        ...


@dataclass(frozen=True)
class LMHead:
    """The output layer and its model family's transformation of the logits."""

    weight: Tensor  # [V, H]; with a division, this device's rows
    bias: Tensor | None  # [V]
    softcap: float | None = None  # final_logit_softcapping, Gemma 2 and 3; logits_soft_cap, Recurrent Gemma
    divisor: float = 1.0  # logits_scaling, Granite
    multiplier: float = 1.0  # logit_scale, Cohere
    division: VocabularyDivision | None = None

    @property
    def vocabulary(self) -> int:
        return len(self.weight) if self.division is None else self.division.size

    @property
    def is_linear(self) -> bool:
        return self.softcap is None and self.divisor == 1.0 and self.multiplier == 1.0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., V]; with a division [n, H] -> [n, V], with equal n on all devices."""
        if self.division is None:
            return self.transform_logits(nn.functional.linear(hidden, self.weight, self.bias))
        local = nn.functional.linear(self.division.gather_rows(hidden), self.weight, self.bias)
        return self.transform_logits(self.division.exchange(local))

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
    division: VocabularyDivision | None = getattr(layer, "division", None)
    if division is None:
        return make_lm_head(model.config, layer.weight, layer.bias)
    bias = None if layer.bias is None else division.local(layer.bias)
    return make_lm_head(model.config, division.local(layer.weight), bias, division)


def make_lm_head(config: Any, weight: Tensor, bias: Tensor | None = None, division: VocabularyDivision | None = None) -> LMHead:
    """Return an output layer with the logit transformation given by a Hugging Face configuration."""
    config = getattr(config, "text_config", None) or config
    return LMHead(
        weight=weight,
        bias=bias,
        softcap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
        division=division,
    )
