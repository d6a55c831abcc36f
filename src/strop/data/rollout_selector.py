"""Selects rollouts of a batch as a separate batch: some of them, or the rollouts of each policy that a run trains.

Each part of a policy is the batch that would train it alone: it has its own totals, so that the gradient of a policy does not
depend on what the others said (law 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.types import TRAINED_POLICY, Batch, PromptImage


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Some rollouts of a batch as a batch, and the indices of their predicted tokens in the full batch."""

    batch: Batch
    index: Tensor  # [n] int64, into the full batch's N


class RolloutSelector:
    """Selects rollouts of one batch, any number of times.

    It reads the whole batch once. After that the cost of a selection is proportional to its size, so a batch can be divided into
    many parts in the time of one pass.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.paths = batch.rollout_paths()
        self._starts, self._lengths, self._parents = (
            column.tolist() for column in (batch.segment_start, batch.segment_length, batch.segment_parent)
        )
        ascending = bool((batch.sequence.diff() >= 0).all())
        self._by_rollout = None if ascending else batch.sequence.argsort(stable=True)
        ends = torch.bincount(batch.sequence, minlength=batch.num_sequences).cumsum(0).tolist()
        self._tokens_of = list(zip([0, *ends], ends, strict=False))  # start and end of each rollout in _by_rollout
        self._images: dict[int, list[PromptImage]] = {}  # of each segment
        for image, segment in zip(batch.images, batch.image_segments, strict=True) if batch.images else ():
            self._images.setdefault(segment, []).append(image)
        self._new_position = torch.full((len(batch.tokens),), -1)  # overwritten by each selection
        self._new_sequence = torch.full((batch.num_sequences,), -1)

    def select(self, sequences: Sequence[int]) -> SubBatch:
        """Return some rollouts, at least one, as a batch with the totals of the full batch. It includes their shared prefixes once."""
        batch, chosen = self.batch, list(sequences)
        kept = [self.paths[sequence] for sequence in chosen]
        segments = sorted({segment for paths in kept for path in paths for segment in path})
        renumbered = {old: new for new, old in enumerate(segments)}
        token_index = self._tokens_of_segments(segments)
        index = self._predicted_tokens(chosen)
        self._new_position[token_index] = torch.arange(len(token_index))
        self._new_sequence[chosen] = torch.arange(len(chosen))
        segment_length = torch.tensor([self._lengths[segment] for segment in segments])
        _, group = batch.group[chosen].unique(return_inverse=True)
        part = replace(
            batch,
            tokens=batch.tokens[token_index],
            positions=batch.positions[token_index],
            images=tuple(
                image.moved(int(self._new_position[image.start]) - image.start)
                for segment in segments
                for image in self._images.get(segment, ())
            ),
            segment_start=segment_length.cumsum(0) - segment_length,
            segment_parent=torch.tensor([renumbered.get(self._parents[segment], -1) for segment in segments]),
            source=self._new_position[batch.source[index]],
            target=batch.target[index],
            sequence=self._new_sequence[batch.sequence[index]],
            rollout_logprobs=batch.rollout_logprobs[index],
            versions=batch.versions[index],
            advantages=batch.advantages[index],
            mask=batch.mask[index],
            leaf=torch.tensor([renumbered[path[-1]] for paths in kept for path in paths]),
            leaf_sequence=None
            if batch.leaf_sequence is None
            else torch.tensor([new for new, paths in enumerate(kept) for _ in paths]),
            group=group,
            rewards=batch.rewards[chosen],
            zero_gradient=None if batch.zero_gradient is None else batch.zero_gradient[chosen],
            columns={name: column[index] for name, column in batch.columns.items()},
            read_columns={name: column[token_index] for name, column in batch.read_columns.items()},
            rollout_columns={name: column[chosen] for name, column in batch.rollout_columns.items()},
        )
        return SubBatch(part, index)

    def _tokens_of_segments(self, segments: Sequence[int]) -> Tensor:
        """Return the positions of the segments' tokens in the batch's T, in order."""
        starts, lengths = self._starts, self._lengths
        return torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in segments])

    def _predicted_tokens(self, sequences: Sequence[int]) -> Tensor:
        """Return the positions of the rollouts' predicted tokens in the batch's N, ascending."""
        spans = [torch.arange(*self._tokens_of[sequence]) for sequence in sequences]
        places = torch.cat(spans) if self._by_rollout is None else self._by_rollout[torch.cat(spans)]
        return places.sort().values


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
