"""Pack groups into a flat batch, and split a batch into micro-batches, without changing the context of any token (law 1).

A packed batch stores a group's prompt once, as the parent segment of its completions. It leaves out each rollout's last token, which
predicts nothing. Splitting keeps every rollout whole, and the totals of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.algorithms.base import Algorithm
from strop.sampling import KEPT_TOKENS, NO_TOKEN
from strop.types import Batch, Group, Rollout, Totals


@dataclass
class _BatchBuilder:
    """The token columns of a batch under construction."""

    tokens: list[Tensor]
    positions: list[Tensor]
    starts: list[int]
    parents: list[int]
    length: int = 0

    def add_segment(self, tokens: Tensor, parent: int, position: int) -> int:
        self.starts.append(self.length)
        self.parents.append(parent)
        self.tokens.append(tokens)
        self.positions.append(torch.arange(position, position + len(tokens)))
        self.length += len(tokens)
        return len(self.starts) - 1


@dataclass(frozen=True, eq=False)
class _Predictions:
    """The n predicted tokens of one rollout."""

    source: Tensor  # [n] int64, index into T
    target: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32
    versions: Tensor  # [n] int32


def pack(groups: Sequence[Group], algorithm: Algorithm, *, share_prefixes: bool = True) -> Batch:
    """Pack groups into one flat batch with their advantages. Raises ValueError if the policy sampled no token."""
    flat = _BatchBuilder([], [], [], [])
    append_rollout = _append_rollout_last_token if algorithm.predict == "last_token" else _append_rollout
    columns: dict[str, list[Tensor]] = {
        name: [] for name in ("source", "target", "sequence", "logprobs", "versions", "advantages", "mask")
    }
    leaves: list[int] = []
    group_indices: list[int] = []
    rewards: list[float] = []
    for index, group in enumerate(groups):
        advantages = algorithm.advantages(group)
        trained = algorithm.rollout_mask(group)
        credit = zip(group.rollouts, algorithm.rewards(group).tolist(), advantages.tolist(), trained.tolist(), strict=True)
        shared = share_prefixes and all(torch.equal(rollout.prompt, group.rollouts[0].prompt) for rollout in group.rollouts)
        root = flat.add_segment(group.rollouts[0].prompt, -1, 0) if shared else -1
        for rollout, reward, advantage, in_loss in credit:
            leaf, predictions = append_rollout(flat, rollout, root)
            predicted = len(predictions.target)
            columns["source"].append(predictions.source)
            columns["target"].append(predictions.target)
            columns["sequence"].append(torch.full((predicted,), len(leaves)))
            columns["logprobs"].append(predictions.logprobs)
            columns["versions"].append(predictions.versions)
            columns["advantages"].append(torch.full((predicted,), advantage))
            columns["mask"].append(torch.full((predicted,), float(in_loss)))
            leaves.append(leaf)
            group_indices.append(index)
            rewards.append(reward)
    merged = {name: torch.cat(parts) for name, parts in columns.items()}
    if not len(merged["target"]):
        raise ValueError("the policy sampled no token of this batch: all rollouts are empty")
    return with_totals(
        Batch(
            tokens=torch.cat(flat.tokens),
            positions=torch.cat(flat.positions),
            segment_start=torch.tensor(flat.starts),
            segment_parent=torch.tensor(flat.parents),
            source=merged["source"],
            target=merged["target"],
            sequence=merged["sequence"],
            rollout_logprobs=merged["logprobs"],
            versions=merged["versions"],
            advantages=merged["advantages"],
            mask=merged["mask"],
            leaf=torch.tensor(leaves),
            group=torch.tensor(group_indices),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            totals=Totals(0, 0, 0),
            columns={} if algorithm.predict == "last_token" else _kept_token_ids(groups, merged["target"]),
        )
    )


def _kept_token_ids(groups: Sequence[Group], target: Tensor) -> dict[str, Tensor]:
    """Return the column ``kept_tokens``, [N, K] int32: the token ids that each target was sampled from, K the size of the largest set.

    Returns no column if none was recorded. Raises ValueError if only some turns recorded them, or if a target is not in its set.
    """
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.policy_turns if len(turn.tokens)]
    recorded = [turn.kept for turn in turns if turn.kept is not None]
    if not recorded:
        return {}
    if len(recorded) < len(turns):
        raise ValueError(
            f"only {len(recorded)} of the {len(turns)} turns of this batch recorded the tokens they were sampled from: they were sampled "
            "under different options. Resume with the policy.generation.keep_sampling_mask of the run's beginning"
        )
    largest = max(kept.shape[1] for kept in recorded)
    column = torch.cat([pad(kept, (0, largest - kept.shape[1]), value=NO_TOKEN) for kept in recorded])
    if not bool((column == target[:, None]).any(1).all()):
        raise ValueError(
            "a sampled token is not among the recorded tokens that it was sampled from: the engine records wrong tokens"
        )
    return {KEPT_TOKENS: column}


def with_totals(batch: Batch) -> Batch:
    """Set the loss denominators of this batch. Call it on the batch of one optimizer step, before splitting."""
    tokens = int(batch.mask.sum())
    sequences = int((batch.sequence_lengths > 0).sum())
    groups = len(batch.group[batch.sequence_lengths > 0].unique())
    return replace(batch, totals=Totals(tokens, sequences, groups))


def _append_rollout(flat: _BatchBuilder, rollout: Rollout, root: int) -> tuple[int, _Predictions]:
    """Append a rollout. Return its leaf segment, and a prediction for every sampled token."""
    prompt = len(rollout.prompt)
    continuation, sampled = _continuation_tokens(rollout), _sampled_mask(rollout)
    last = int(sampled.nonzero().max()) if bool(sampled.any()) else 0
    if root >= 0:
        start = flat.length
        leaf = flat.add_segment(continuation[:last], root, prompt)
        prompt_end = flat.starts[root] + prompt - 1
    else:
        start = flat.length + prompt
        leaf = flat.add_segment(torch.cat([rollout.prompt, continuation[:last]]), -1, 0)
        prompt_end = start - 1
    source = torch.arange(start - 1, start - 1 + len(continuation))
    if len(source):
        source[0] = prompt_end
    logprobs = _concat([turn.logprobs for turn in rollout.turns], torch.float32)
    versions = _concat([turn.versions for turn in rollout.turns], torch.int32)
    return leaf, _Predictions(source[sampled], continuation[sampled], logprobs[sampled], versions[sampled])


def _append_rollout_last_token(flat: _BatchBuilder, rollout: Rollout, root: int) -> tuple[int, _Predictions]:
    """Append a rollout. Return its leaf segment, and one prediction at its last sampled token, which is an input too.

    A rollout without sampled tokens uses the last token of its prompt. Raises ValueError for a rollout without tokens.
    """
    sampled = _sampled_mask(rollout)
    tokens = _continuation_tokens(rollout)[: int(sampled.nonzero().max()) + 1 if bool(sampled.any()) else 0]
    if not len(rollout.prompt) + len(tokens):
        raise ValueError(f"a rollout of task {rollout.task.id} has no tokens, so there is no token to score")
    if root >= 0:
        leaf = flat.add_segment(tokens, root, len(rollout.prompt))
        end = flat.length - 1 if len(tokens) else flat.starts[root] + len(rollout.prompt) - 1
    else:
        leaf = flat.add_segment(torch.cat([rollout.prompt, tokens]), -1, 0)
        end = flat.length - 1
    token = (tokens if len(tokens) else rollout.prompt)[-1:]
    return leaf, _Predictions(torch.tensor([end]), token, torch.zeros(1), torch.full((1,), -1, dtype=torch.int32))


def _continuation_tokens(rollout: Rollout) -> Tensor:  # [L] int64
    return _concat([turn.tokens for turn in rollout.turns], torch.int64)


def _sampled_mask(rollout: Rollout) -> Tensor:  # [L] bool
    return _concat([torch.full((len(turn.tokens),), turn.sampled) for turn in rollout.turns], torch.bool)


def _concat(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # [L]
    return torch.cat(list(columns)) if columns else torch.zeros(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Some rollouts of a batch as a batch, and the indices of their predicted tokens in the full batch."""

    batch: Batch
    index: Tensor  # [n] int64, into the full batch's N


def select_rollouts(batch: Batch, sequences: Sequence[int]) -> SubBatch:
    """Return some rollouts as a batch with the totals of the full batch. It includes their shared prefixes once."""
    starts, lengths, parents = (column.tolist() for column in (batch.segment_start, batch.segment_length, batch.segment_parent))
    needed: set[int] = set()
    for segment in batch.leaf[list(sequences)].tolist():
        while segment != -1 and segment not in needed:
            needed.add(segment)
            segment = parents[segment]
    segments = sorted(needed)
    renumbered = {old: new for new, old in enumerate(segments)}
    token_index = torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in segments])
    new_position = torch.full((len(batch.tokens),), -1)
    new_position[token_index] = torch.arange(len(token_index))

    new_sequence = torch.full((batch.num_sequences,), -1)
    new_sequence[list(sequences)] = torch.arange(len(sequences))
    index = (new_sequence[batch.sequence] >= 0).nonzero().squeeze(1)
    segment_length = torch.tensor([lengths[segment] for segment in segments])
    _, group = batch.group[list(sequences)].unique(return_inverse=True)
    part = replace(
        batch,
        tokens=batch.tokens[token_index],
        positions=batch.positions[token_index],
        segment_start=segment_length.cumsum(0) - segment_length,
        segment_parent=torch.tensor([renumbered.get(parents[segment], -1) for segment in segments]),
        source=new_position[batch.source[index]],
        target=batch.target[index],
        sequence=new_sequence[batch.sequence[index]],
        rollout_logprobs=batch.rollout_logprobs[index],
        versions=batch.versions[index],
        advantages=batch.advantages[index],
        mask=batch.mask[index],
        leaf=torch.tensor([renumbered[segment] for segment in batch.leaf[list(sequences)].tolist()]),
        group=group,
        rewards=batch.rewards[list(sequences)],
        zero_gradient=None if batch.zero_gradient is None else batch.zero_gradient[list(sequences)],
        columns={name: column[index] for name, column in batch.columns.items()},
    )
    return SubBatch(part, index)


def split_micro_batches(batch: Batch, token_budget: int, *, padded: bool = False, whole_groups: bool = False) -> list[SubBatch]:
    """Split a batch into micro-batches of at most ``token_budget`` tokens, at group boundaries where a group fits.

    A larger group is split between its rollouts, with its prompt in each part; a single rollout over the budget is a micro-batch of its
    own. First fit, longest first: few micro-batches, and deterministic. With ``padded``, every rollout counts as a row as long as the
    longest. Groups with zero gradient do not share a micro-batch with others. With ``whole_groups``, groups are never split, for losses
    that compare the rollouts of a group.
    """
    lengths = batch.segment_length.tolist()
    budget = 1 << 62 if whole_groups else token_budget
    units = [unit for members in group_members(batch) for unit in split_group(members, batch, lengths, budget)]
    if padded:
        longest = int(batch.positions.max()) + 1
        rows = group_members(batch) if whole_groups else [[sequence] for sequence in range(batch.num_sequences)]
        units = [(sequences, longest * len(sequences)) for sequences in rows]
    zero_gradient = [False] * batch.num_sequences if batch.zero_gradient is None else batch.zero_gradient.tolist()
    by_kind = [[unit for unit in units if all(zero_gradient[sequence] for sequence in unit[0]) == kind] for kind in (False, True)]
    return [select_rollouts(batch, sequences) for kind in by_kind for sequences in pack_first_fit(kind, token_budget)]


def pack_first_fit(units: list[tuple[list[int], int]], budget: int) -> list[list[int]]:
    """Pack units of (rollouts, size) into bins of at most ``budget``, largest first. Return the rollouts of each bin."""
    bins: list[tuple[list[int], int]] = []
    for sequences, size in sorted(units, key=lambda unit: -unit[1]):
        for index, (members, used) in enumerate(bins):
            if used + size <= budget:
                bins[index] = (members + sequences, used + size)
                break
        else:
            bins.append((sequences, size))
    return [sorted(sequences) for sequences, _ in bins]


def split_mini_batches(batch: Batch, count: int) -> list[SubBatch]:
    """Split a batch into ``count`` mini-batches at group boundaries, in order, each with its own totals. Raises ValueError if uneven."""
    members = group_members(batch)
    if len(members) % count:
        raise ValueError(f"{len(members)} groups cannot be split into {count} equal mini-batches")
    per_step = len(members) // count
    steps = [members[start : start + per_step] for start in range(0, len(members), per_step)]
    parts = [select_rollouts(batch, [sequence for group in groups for sequence in group]) for groups in steps]
    return [SubBatch(with_totals(part.batch), part.index) for part in parts]


def group_members(batch: Batch) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(batch.num_groups)]
    for sequence, group in enumerate(batch.group.tolist()):
        members[group].append(sequence)
    return members


def split_group(members: list[int], batch: Batch, lengths: list[int], budget: int) -> list[tuple[list[int], int]]:
    """Split a group into units of (rollouts, tokens), each within the budget unless a single rollout exceeds it."""
    parents = batch.segment_parent.tolist()
    units: list[tuple[list[int], int]] = []
    seen: set[int] = set()
    for sequence in members:
        path = []
        segment = int(batch.leaf[sequence])
        while segment != -1:
            path.append(segment)
            segment = parents[segment]
        fresh = sum(lengths[segment] for segment in path if segment not in seen)
        if units and units[-1][1] + fresh <= budget:
            units[-1] = (units[-1][0] + [sequence], units[-1][1] + fresh)
            seen.update(path)
        else:
            units.append(([sequence], sum(lengths[segment] for segment in path)))
            seen = set(path)
    return units
