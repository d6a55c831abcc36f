"""Attention of context ranks by an all-to-all over heads (DeepSpeed-Ulysses, arXiv 2309.14509).

Each rank attends to all tokens with some heads as a single device would, so prefixes, windows and softcaps need no special handling.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.learner.parallel.collectives import all_to_all
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class UlyssesPlan:
    """An attention plan that exchanges some tokens of all heads for all tokens of some heads, and calls ``plan`` with these."""

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.plan = plan
        self.group = group
        self.world_size: int = dist.get_world_size(group)
        self.length = length  # tokens of the row without padding

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """[t, heads, D] -> [t, heads, D]; the number of heads must be a multiple of the number of ranks."""
        kv_heads = key.shape[1]
        repeats = self.world_size // gcd(kv_heads, self.world_size)
        if repeats > 1:  # send a key to every rank with a query head that uses it
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        query, key, value = self._to_heads(query, key, value)
        padding = len(query) - self.length
        query, key, value = (tensor[: self.length] for tensor in (query, key, value))
        if spec.sinks is not None and self.world_size > 1:
            spec = replace(spec, sinks=spec.sinks.chunk(self.world_size)[dist.get_rank(self.group)])
        attended = self.plan.attend(query, key, value, spec)
        return self._to_tokens(pad(attended, (0, 0, 0, 0, 0, padding)) if padding else attended)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[t, heads, D] each -> [ranks * t, heads / ranks, D] each, in one exchange."""
        if self.world_size == 1:
            return list(tensors)
        blocks = [tensor.unflatten(1, (self.world_size, -1)) for tensor in tensors]  # [t, ranks, heads / ranks, D]
        rows = torch.cat([block.flatten(2) for block in blocks], dim=2).transpose(0, 1).flatten(0, 1)
        received = all_to_all(rows, self.group).split([block.shape[2] * block.shape[3] for block in blocks], dim=1)
        return [rows.unflatten(1, block.shape[2:]) for rows, block in zip(received, blocks, strict=True)]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[ranks * t, heads / ranks, D] -> [t, heads, D]."""
        if self.world_size == 1:
            return attended
        received: Tensor = all_to_all(attended, self.group).unflatten(0, (self.world_size, -1))  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)
