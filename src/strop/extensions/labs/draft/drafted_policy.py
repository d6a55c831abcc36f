"""What a draft head needs of its policy, whichever learner trains it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.models.attention.kernel_choice import AttentionKernel
from strop.models.logprobs.lm_head import LMHead


class DraftedPolicy(Protocol):
    """A policy whose passes a head learns from. ``strop.models.network.Network`` is one."""

    chunk: int  # rows of logits that exist at a time
    attention_kernel: AttentionKernel

    @property
    def decoder(self) -> nn.Module:
        """The module that has the layers."""
        ...

    @property
    def head(self) -> LMHead:
        """The whole output layer."""
        ...

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[R] int64 -> embeddings [R, H]."""
        ...

    def autocast(self) -> torch.autocast | Any:
        """The precision that the policy computes in."""
        ...
