"""What a pipeline stage is given with a row: tokens, positions, and which tokens attend to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from strop.models.attention.attention_plan import AttentionPlan
from strop.models.routing.recorded_experts import ReplayedRoutes


@dataclass(frozen=True, eq=False)
class StageRow:
    """A flat row of T tokens, or the part of this context-parallel rank. Megatron Core carries it as its ``packed_seq_params``.

    It hands any object whose format is not "thd" through to the core attention, untouched, also where it recomputes activations.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    plan: AttentionPlan
    experts: ReplayedRoutes | None = None  # the recorded experts of the tokens that this rank's layers read

    qkv_format: ClassVar[str] = "tree"
    cp_group: ClassVar[None] = None
    local_cp_size: ClassVar[None] = None
    cu_seqlens_q: ClassVar[None] = None
    cu_seqlens_kv: ClassVar[None] = None
