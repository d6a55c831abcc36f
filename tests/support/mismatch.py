"""Build the input of corrections from the log ratios of a few rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from strop.algorithms.parts import Mismatch
from strop.data.packing import pack, with_totals
from support.algorithms import grpo
from support.rollouts import group_of, rollout_of, sampled


def mismatch_of(
    *log_ratios: Sequence[float],
    credit: Sequence[float] | None = None,
    sampler: float = -1.0,
    counted: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Mismatch:
    """Build a Mismatch with one rollout per sequence of log ratios, which may be empty. ``credit`` and ``counted`` are per rollout."""
    rollouts = [
        rollout_of([5, 6], *([sampled([7] * len(row), [sampler] * len(row))] if len(row) else []), reward=float(place))
        for place, row in enumerate(log_ratios)
    ]
    batch = pack([group_of(*rollouts)], grpo())
    if counted is not None:
        batch = replace(batch, mask=torch.tensor([float(mark) for mark in counted])[batch.sequence])
    if credit is not None:
        batch = replace(batch, advantages=torch.tensor(credit)[batch.sequence])
    flat = torch.tensor([ratio for row in log_ratios for ratio in row], dtype=dtype)
    return Mismatch(log_ratio=flat, advantages=batch.advantages, batch=with_totals(batch))


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]
