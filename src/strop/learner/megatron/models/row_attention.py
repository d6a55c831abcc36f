"""Self-attention over a flat row: queries and keys are rotated by the positions that the row says."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from strop.learner.megatron.models.rotary_tables import rotate


class RowAttention(SelfAttention):  # type: ignore[misc]
    """Megatron Core's self-attention with one of the model's rotary embeddings."""

    def __init__(self, *arguments: Any, rotary: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rotary = rotary
        self._table: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Any, *, rotary_pos_emb: Tensor, **options: Any) -> Any:
        self._table = rotary_pos_emb[self.rotary]  # set again where the layer is recomputed, in the order of the backward passes
        return super().forward(hidden_states, attention_mask, **options)

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().get_query_key_value_tensors(*arguments, **options)
        assert self._table is not None
        return rotate(query, self._table), rotate(key, self._table), value
