"""The request to an attention layer: its options, and the plan that decides which tokens attend to which."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """Options of a layer's attention other than the mask."""

    layer: int
    scale: float
    window: int | None = None  # a token attends to itself and to the window - 1 positions before it
    softcap: float | None = None  # logits -> softcap * tanh(logits / softcap), Gemma 2
    sinks: Tensor | None = field(default=None, compare=False)  # [heads]: one more logit for each query, without a value (gpt-oss)
    # [T, bytes], or [T, kv_heads, bytes]: the choice of each query (``indexers``)
    chosen: Tensor | None = field(default=None, compare=False)
    block: int = 1  # positions that are chosen together
    pooled: bool = False  # after the keys of the row come those of its blocks, and the choice is among these alone
    # [S] int64, in blocks on their paths, for kernels that need them
    key_positions: Tensor | None = field(default=None, compare=False)

    def drop_unused_window(self, span: int) -> AttentionSpec:
        """Return the spec without its window if ``span`` positions fit into the window."""
        if self.window is None or span > self.window:
            return self
        return replace(self, window=None)


class AttentionPlan(Protocol):
    """Decides which tokens attend to which."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention: query [T, heads, D], key and value [T, kv_heads, D] of one flat row -> [T, heads, D]."""
        ...
