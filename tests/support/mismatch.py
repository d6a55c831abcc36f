"""Build the input of corrections from the log ratios of a few rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from strop.algorithms.policy_gradient.parts import Mismatch
from support.algorithms import grpo
from support.rollouts import make_group, make_rollout, pack_for, sampled_turn


def make_mismatch(
    *log_ratios: Sequence[float],
    credit: Sequence[float] | None = None,
    rollout_logprob: float = -1.0,
    kept: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Mismatch:
    """Build a Mismatch with one rollout per sequence of log ratios, which may be empty. ``credit`` and ``counted`` are per rollout."""
    rollouts = [
        make_rollout(
            [5, 6], *([sampled_turn([7] * len(row), [rollout_logprob] * len(row))] if len(row) else []), reward=float(place)
        )
        for place, row in enumerate(log_ratios)
    ]
    batch = pack_for([make_group(*rollouts)], grpo())
    if kept is not None:
        batch = replace(batch, mask=torch.tensor([float(mark) for mark in kept])[batch.sequence])
    if credit is not None:
        batch = replace(batch, advantages=torch.tensor(credit)[batch.sequence])
    flat = torch.tensor([ratio for row in log_ratios for ratio in row], dtype=dtype)
    return Mismatch(log_ratio=flat, advantages=batch.advantages, batch=batch.with_totals())


def log_ratios(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]
