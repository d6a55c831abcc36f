"""A synthetic batch of rollouts of the maximum length, to measure a pass with."""

from __future__ import annotations

import torch

from strop.types import Batch, Totals


def make_full_rollouts(rollouts: int, length: int, vocabulary: int) -> Batch:
    """Return a batch of ``rollouts`` groups of one rollout, each of ``length`` tokens without a shared prefix, all of them predicted.

    It needs the most memory possible for this many tokens in a packed row: each attends to ``length`` others, and N = T.
    """
    total = rollouts * length
    places = torch.arange(total)
    tokens = (places * 7919 + 13) % vocabulary
    starts = torch.arange(0, total, length)
    return Batch(
        tokens=tokens,
        positions=places % length,
        segment_start=starts,
        segment_parent=torch.full((rollouts,), -1),
        source=places,
        target=tokens.roll(-1),
        sequence=places // length,
        rollout_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int32),
        advantages=torch.ones(total),
        mask=torch.ones(total),
        leaf=torch.arange(rollouts),
        group=torch.arange(rollouts),
        rewards=torch.zeros(rollouts),
        totals=Totals(total, rollouts, rollouts),
    )
