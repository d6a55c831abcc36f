"""What extensions bring to a network: a head that drafts tokens, and additions in a fixed order, for equal bits in learner and engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.algorithms.base import TokenOutputs
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.logprobs.lm_head import LMHead
from strop.sampling import Sampling

FOLDER = "draft"  # of the head, alongside the policy's weights
WEIGHTS = "model.safetensors"


class DraftHead(nn.Module):
    """A module that reads the states of the policy's layers and proposes the tokens after them."""

    key: str  # of the configuration, for messages: policy.draft

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines are sent at a publish, as ``draft.NAME``."""
        raise NotImplementedError

    def save(self, folder: Path) -> Path:
        """Write the head as engines load it (``config.json`` and WEIGHTS); return the folder."""
        raise NotImplementedError


class FixedOrder(Protocol):
    """Held by ``Network.exact``: the passes of one model whose modules have been changed in place."""

    key_block: int  # attention reads the cache in blocks of as many keys

    def plan_tree(self, start: Tensor, length: Tensor, parent: Tensor, device: torch.device) -> AttentionPlan:
        """Return the attention of a packed row, given its segments."""
        ...

    def attend_cached(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
        """[B, heads, L, D] x [B, kv_heads, S, D], keys from position 0 on -> [B, heads, L, D].

        ``positions`` [B or 1, L]: of the queries.
        """
        ...

    def compute_logits(self, hidden: Tensor, head: LMHead) -> Tensor:
        """[n, H] -> [n, V]"""
        ...

    def token_logprobs(
        self,
        hidden: Tensor,
        target: Tensor,
        head: LMHead,
        sampling: Sampling,
        chunk: int,
        candidates: Tensor | None = None,
        *,
        squared_probs: bool = False,
    ) -> TokenOutputs:
        """Return what ``strop.models.logprobs.token_logprobs`` does."""
        ...

    def sampled_logprobs(self, scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the tokens [n] and entropies [n] under the softmax of ``scaled`` [n, V]."""
        ...

    def forget_weights(self) -> None:
        """Called where weights have changed: copies of them are made again."""
        ...

    def find_stale(self, weight: Tensor) -> Tensor | None:
        """Return a copy of a weight that would be read although it differs from it, or None."""
        ...

    def restore_modules(self, model: Any) -> None:
        """Make the modules of a copy of the model ordinary ones."""
        ...


def forget_copies(network: object) -> None:
    """Call ``forget_weights`` of a network that has a fixed order; nothing for others."""
    exact: FixedOrder | None = getattr(network, "exact", None)
    if exact is not None:
        exact.forget_weights()
