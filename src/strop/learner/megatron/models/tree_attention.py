"""Core attention over the tree of a row."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Attends as the plan of a row says: query [T, 1, heads, D], key and value [T, 1, kv_heads, D] -> [T, 1, heads * D]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer, self.scale, self.window, self.softcap = layer_number - 1, softmax_scale, window, softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **unused: Any
    ) -> Tensor:
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        spec = AttentionSpec(self.layer, scale, self.window, self.softcap)
        attended: Tensor = packed_seq_params.plan.attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), spec)
        return attended.flatten(1).unsqueeze(1)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {}
