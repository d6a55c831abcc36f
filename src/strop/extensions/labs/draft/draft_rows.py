"""The rows that a draft head reads of a batch: one for each token that has a predecessor, in the batch's own tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.types import Batch


@dataclass(frozen=True, eq=False)
class DraftRows:
    """R rows, T - R of the batch's tokens being the first of their path; the head is trained on M of them."""

    token: Tensor  # [R] int64, place in T of the token whose embedding a row reads
    predecessor: Tensor  # [R] int64, place in T of the token before it on its path
    positions: Tensor  # [R] int64, of the predecessor
    segment_start: Tensor  # [segments] int64
    segment_length: Tensor  # [segments] int64
    segment_parent: Tensor  # [segments] int64
    trained: Tensor  # [M] int64, rows that are trained on; more than once where rollouts share a sampled token
    predicted: Tensor  # [M] int64, place in N of what the policy predicts there


def make_draft_rows(batch: Batch) -> DraftRows:
    """Return the rows of a batch.

    Trained on are tokens that the policy sampled and that it predicts from, for each rollout that it sampled them in: an engine drafts
    only after a token that it has sampled. They are the same however the batch is cut.
    """
    lengths, parents = batch.segment_length.tolist(), batch.segment_parent.tolist()
    last = _last_tokens(batch.segment_start.tolist(), lengths, parents)
    predecessor = torch.arange(-1, len(batch.tokens) - 1)
    for segment, start in enumerate(batch.segment_start.tolist()):
        if lengths[segment]:
            predecessor[start] = last[parents[segment]] if parents[segment] >= 0 else -1
    kept = predecessor >= 0
    rank = kept.cumsum(0) - 1
    counts = [int(part.sum()) for part in kept.split(lengths)]
    start, parent = _drop_empty(counts, parents)
    trained, predicted = _find_trained(batch, predecessor)
    token = kept.nonzero().squeeze(1)
    return DraftRows(
        token=token,
        predecessor=predecessor[token],
        positions=batch.positions[predecessor[token]],
        segment_start=torch.tensor(start, dtype=torch.int64),
        segment_length=torch.tensor([count for count in counts if count], dtype=torch.int64),
        segment_parent=torch.tensor(parent, dtype=torch.int64),
        trained=rank[trained],
        predicted=predicted,
    )


def _last_tokens(starts: list[int], lengths: list[int], parents: list[int]) -> list[int]:
    """Return the place in T of the last token of the path to each segment's end; -1 where the path is empty."""
    last: list[int] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        last.append(start + length - 1 if length else last[parent] if parent >= 0 else -1)
    return last


def _drop_empty(counts: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Return starts and parents of the segments that have rows."""
    starts, kept_parents, place, total = list[int](), list[int](), list[int](), 0
    for count, parent in zip(counts, parents, strict=True):
        above = place[parent] if parent >= 0 else -1
        if count:
            place.append(len(starts))
            starts.append(total)
            kept_parents.append(above)
            total += count
        else:
            place.append(above)
    return starts, kept_parents


def _find_trained(batch: Batch, predecessor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in T that are trained on, and the places in N that are predicted from them, [M] each.

    A token was sampled in a rollout if the rollout has a prediction from the token before it.
    """
    tokens = len(batch.tokens) + 1
    before = predecessor[batch.source]
    sampled = torch.isin(batch.sequence.long() * tokens + before, batch.sequence.long() * tokens + batch.source) & (before >= 0)
    predicted = sampled.nonzero().squeeze(1)
    return batch.source[predicted], predicted
