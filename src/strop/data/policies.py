"""Several policies trained in one run, each on the rollouts of its roles: a batch in parts, one for each policy.

Every part is the batch that would train its policy alone: it has its own totals, so that the gradient of a policy does not depend on what
the others said (law 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from strop.data.rollout_selector import RolloutSelector, SubBatch
from strop.types import TRAINED_POLICY, Batch


def split_policies(whole: SubBatch) -> list[tuple[int, SubBatch]]:
    """Return (number, part) for each policy with rollouts in a batch, in the order of their numbers."""
    owners = whole.batch.rollout_columns.get(TRAINED_POLICY.name)
    if owners is None:
        return [(0, whole)]
    selector = RolloutSelector(whole.batch)
    found = [(number, selector.select((owners == number).nonzero().squeeze(1).tolist())) for number in owners.unique().tolist()]
    return [(number, SubBatch(part.batch.with_totals(), whole.index[part.index])) for number, part in found]


def map_policies(batch: Batch, credit: Callable[[Batch], Batch]) -> Batch:
    """Return the batch with what ``credit`` makes of the part of each policy: its tokens' advantages, mask and columns."""
    if TRAINED_POLICY.name not in batch.rollout_columns:
        return credit(batch)
    parts = [(part.index, credit(part.batch)) for _, part in split_policies(SubBatch(batch, torch.arange(len(batch.target))))]
    index = torch.cat([places for places, _ in parts]).argsort()

    def join(columns: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(columns))[index]

    return replace(
        batch,
        advantages=join([part.advantages for _, part in parts]),
        mask=join([part.mask for _, part in parts]),
        columns={name: join([part.columns[name] for _, part in parts]) for name in parts[0][1].columns},
    )
