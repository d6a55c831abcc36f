"""Pack groups into a flat batch, without changing the context of any token (law 1).

A packed batch stores a group's prompt once, as the parent segment of its completions. Likewise, a prefix shared by branches of a
rollout is stored once, as the parent of their separate continuations. The last token of each path is left out, because it
predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.data.packed_inputs import (
    FlatTokens,
    Span,
    TokenPath,
    concatenate,
    expand,
    make_paths,
    own_tokens,
    pack_columns,
    place_images,
    same_images,
)
from strop.types import Batch, Group, Rollout, RolloutCredit, Totals


@dataclass(frozen=True, eq=False)
class _Predictions:
    """The predicted tokens of a batch under construction, in parts."""

    counts: list[int] = field(default_factory=list)  # of each rollout
    source: list[Span] = field(default_factory=list)  # in T
    target: list[Tensor] = field(default_factory=list)  # int64
    logprobs: list[Tensor] = field(default_factory=list)  # float32
    versions: list[Tensor] = field(default_factory=list)  # int32


def pack(groups: Sequence[Group], credit: RolloutCredit | None = None, *, share_prefixes: bool = True) -> Batch:
    """Pack groups into one flat batch with the credit of their rollouts. Raises ValueError if the policy sampled no token.

    Without ``credit``, for a batch that is only scored, advantages are 0 and all rollouts count. Without ``share_prefixes``,
    every path of a rollout is a separate row, in which only the tokens of its own turns are predicted.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    credit = _no_credit(rollouts) if credit is None else credit
    if len(credit.rewards) != len(rollouts):
        raise ValueError(f"this is the credit of {len(credit.rewards)} rollouts, not of {len(rollouts)}: pass the same groups")
    flat = FlatTokens()
    at_end = credit.predict == "last_token"
    leaves: list[list[int]] = []  # of each rollout
    paths_of: list[list[TokenPath]] = []
    predicted = _Predictions()
    predict = _predict_at_end if at_end else _predict_tokens
    for group in groups:
        prompt = group.rollouts[0].prompt
        shared = share_prefixes and all(
            (rollout.prompt is prompt or torch.equal(rollout.prompt, prompt)) and same_images(rollout, group.rollouts[0])
            for rollout in group.rollouts
        )
        root = TokenPath(prompt, len(prompt)) if shared else None
        trees = [make_paths(rollout, root, share=share_prefixes, at_end=at_end) for rollout in group.rollouts]
        for path in ([root] if root else []) + [path for paths in trees for path in paths]:
            path.append_to(flat)
        leaves += [[path.leaf for path in paths] for paths in trees]
        paths_of += trees
        for rollout, paths in zip(group.rollouts, trees, strict=True):
            predict(predicted, rollout, paths)
    target = concatenate(predicted.target, torch.int64)
    if not len(target):
        raise ValueError("the policy sampled no token of this batch: all rollouts are empty")
    dtype = torch.get_default_dtype()
    sequence = _count_off(predicted.counts)
    return Batch(
        tokens=torch.cat(flat.tokens),
        positions=expand(flat.positions),
        segment_start=torch.tensor(flat.starts),
        segment_parent=torch.tensor(flat.parents),
        source=expand(predicted.source),
        target=target,
        sequence=sequence,
        rollout_logprobs=torch.cat(predicted.logprobs),
        versions=torch.cat(predicted.versions),
        advantages=credit.advantages.to(dtype).index_select(0, sequence),
        mask=credit.mask.to(dtype).index_select(0, sequence),
        leaf=torch.tensor([leaf for each in leaves for leaf in each]),
        group=torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts]),
        rewards=credit.rewards,
        leaf_sequence=_count_off([len(each) for each in leaves]) if any(len(each) > 1 for each in leaves) else None,
        images=place_images(rollouts, paths_of, flat.starts),
        totals=Totals(0, 0, 0),
        **pack_columns(rollouts, paths_of, flat.length, at_end=at_end),
    ).with_totals()


def _no_credit(rollouts: Sequence[Rollout]) -> RolloutCredit:
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    return RolloutCredit(rewards=rewards, advantages=torch.zeros_like(rewards), mask=torch.ones_like(rewards))


def _count_off(counts: Sequence[int]) -> Tensor:
    """Repeat each index by its count."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts), output_size=sum(counts))


def _predict_tokens(predicted: _Predictions, rollout: Rollout, paths: Sequence[TokenPath]) -> None:
    """Predict every sampled token of a rollout from the one before it on its path."""
    starts = [(rollout.prompt.numel(), rollout.turns), *((branch.start, branch.turns) for branch in rollout.branches)]
    count = 0
    for path, (start, turns) in zip(paths, starts, strict=True):
        end = start - 1
        for turn in turns:
            begin, end = end, end + turn.tokens.numel()
            if turn.sampled:
                count += end - begin
                predicted.source.extend(path.spans(begin, end))
                predicted.target.append(turn.tokens)
                predicted.logprobs.append(turn.logprobs)
                predicted.versions.append(turn.versions)
    predicted.counts.append(count)


def _predict_at_end(predicted: _Predictions, rollout: Rollout, paths: Sequence[TokenPath]) -> None:
    """Predict once, at the last sampled token; without one, at the last token of the prompt."""
    end = len(rollout.prompt) + own_tokens(rollout.turns)[1]
    if not end:
        raise ValueError(f"a rollout of task {rollout.task.id} has no tokens, so there is no token to score")
    predicted.counts.append(1)
    predicted.source.extend(paths[0].spans(end - 1, end))
    predicted.target.append(rollout.tokens()[end - 1 : end])
    predicted.logprobs.append(torch.zeros(1))
    predicted.versions.append(torch.full((1,), -1, dtype=torch.int32))
