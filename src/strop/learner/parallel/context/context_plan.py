"""The exchange between context ranks in attention: of heads if their number is divisible, otherwise of keys and values around a
ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from strop.learner.parallel.collectives import all_gather, local_rows
from strop.learner.parallel.context.ring_plan import RingPlan
from strop.learner.parallel.context.ulysses_plan import UlyssesPlan
from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows

log = logging.getLogger(__name__)
dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup


class ContextPlan:
    """An attention plan for ranks that each have an equal part of a row, padded at its end. ``length``: of the row without
    padding.
    """

    def __init__(self, plan: AttentionPlan, group: Group, length: int) -> None:
        self.heads_exchanged = UlyssesPlan(plan, group, length)
        self.plan = plan
        self.group = group
        self.length = length

    @cached_property
    def ring(self) -> RingPlan:
        assert isinstance(self.plan, TreePlan), f"{type(self.plan).__name__} has no pieces"
        return RingPlan(self.plan, self.group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of this rank's rows: [t, heads, D] x [t, kv_heads, D] -> [t, heads, V]."""
        ranks = self.heads_exchanged.world_size
        if query.shape[1] % ranks == 0:
            return self.heads_exchanged.attend(query, key, value, spec)
        _log_once(query.shape[1], ranks)
        return self.ring.attend(query, key, value, spec)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """Convolution of this rank's rows, [t, C] -> [t, C]."""
        if inputs.shape[1] % self.heads_exchanged.world_size == 0:
            return self.heads_exchanged.convolve(inputs, weight, bias, spec)
        return self._of_all_rows(lambda rows: self.heads_exchanged.plan.convolve(rows[0], weight, bias, spec), [inputs])

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """A recurrence of this rank's rows: of all tokens and some heads on each rank if its states are those of heads."""
        if not recurrence.constants and recurrence.state_shape[0] % self.heads_exchanged.world_size == 0:
            return self.heads_exchanged.scan(recurrence, rows, spec)
        return self._of_all_rows(lambda gathered: self.heads_exchanged.plan.scan(recurrence, gathered, spec), rows)

    def _of_all_rows(self, compute: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
        """Compute outputs of all tokens on each rank, and return those of this rank's."""
        gathered = [all_gather(each, self.group)[: self.length] for each in rows]
        outputs = compute(gathered)
        missing = len(rows[0]) * self.heads_exchanged.world_size - self.length
        return local_rows(torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])]), self.group)


_logged: set[tuple[int, int]] = set()


def _log_once(heads: int, ranks: int) -> None:
    if (heads, ranks) not in _logged:
        _logged.add((heads, ranks))
        log.info(
            "keys and values go around a ring of %d context ranks, which cannot have %d heads divided among them", ranks, heads
        )
