"""Pack groups into a flat batch, without changing the context of any token (law 1).

A packed batch stores a group's prompt once, as the parent segment of its completions. It leaves out each rollout's last token, which
predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.sampling import KEPT_TOKENS, NO_TOKEN
from strop.types import Batch, Group, Rollout, RolloutCredit, Totals


@dataclass
class _FlatTokens:
    """The tokens of a batch under construction, in segments."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
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


def pack(groups: Sequence[Group], credit: RolloutCredit | None = None, *, share_prefixes: bool = True) -> Batch:
    """Pack groups into one flat batch with the credit of their rollouts. Raises ValueError if the policy sampled no token.

    Without ``credit``, for a batch that is only scored, advantages are 0 and all rollouts count.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    credit = _no_credit(rollouts) if credit is None else credit
    if len(credit.rewards) != len(rollouts):
        raise ValueError(f"this is the credit of {len(credit.rewards)} rollouts, not of {len(rollouts)}: pass the same groups")
    flat = _FlatTokens()
    at_end = credit.predict == "last_token"
    appended: list[tuple[int, _Predictions]] = []
    for group in groups:
        shared = share_prefixes and all(torch.equal(rollout.prompt, group.rollouts[0].prompt) for rollout in group.rollouts)
        root = flat.add_segment(group.rollouts[0].prompt, -1, 0) if shared else -1
        appended += [_append_rollout(flat, rollout, root, at_end=at_end) for rollout in group.rollouts]
    predictions = [predicted for _, predicted in appended]
    target = torch.cat([predicted.target for predicted in predictions])
    if not len(target):
        raise ValueError("the policy sampled no token of this batch: all rollouts are empty")
    dtype = torch.get_default_dtype()
    sequence = torch.arange(len(rollouts)).repeat_interleave(torch.tensor([len(predicted.target) for predicted in predictions]))
    return Batch(
        tokens=torch.cat(flat.tokens),
        positions=torch.cat(flat.positions),
        segment_start=torch.tensor(flat.starts),
        segment_parent=torch.tensor(flat.parents),
        source=torch.cat([predicted.source for predicted in predictions]),
        target=target,
        sequence=sequence,
        rollout_logprobs=torch.cat([predicted.logprobs for predicted in predictions]),
        versions=torch.cat([predicted.versions for predicted in predictions]),
        advantages=credit.advantages.to(dtype)[sequence],
        mask=credit.mask.to(dtype)[sequence],
        leaf=torch.tensor([leaf for leaf, _ in appended]),
        group=torch.tensor([index for index, group in enumerate(groups) for _ in group.rollouts]),
        rewards=credit.rewards,
        totals=Totals(0, 0, 0),
        columns={} if at_end else _kept_token_ids(rollouts, target),
    ).with_totals()


def _no_credit(rollouts: Sequence[Rollout]) -> RolloutCredit:
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    return RolloutCredit(rewards=rewards, advantages=torch.zeros_like(rewards), mask=torch.ones_like(rewards))


def _kept_token_ids(rollouts: Sequence[Rollout], target: Tensor) -> dict[str, Tensor]:
    """Return the column ``kept_tokens``, [N, K] int32: the token ids that each target was sampled from, K the size of the largest set.

    Returns no column if none was recorded. Raises ValueError if only some turns recorded them, or if a target is not in its set.
    """
    turns = [turn for rollout in rollouts for turn in rollout.policy_turns if len(turn.tokens)]
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


def _append_rollout(flat: _FlatTokens, rollout: Rollout, root: int, *, at_end: bool) -> tuple[int, _Predictions]:
    """Append a rollout. Return its leaf segment and a prediction for every sampled token, or ``at_end`` one at the last of them.

    ``at_end``, the last sampled token is an input too; without sampled tokens it is the last token of the prompt.
    """
    prompt, tokens = rollout.prompt, _concatenate([turn.tokens for turn in rollout.turns], torch.int64)
    sampled = _concatenate([torch.full((len(turn.tokens),), turn.sampled) for turn in rollout.turns], torch.bool)
    end = int(sampled.nonzero().max()) + 1 if bool(sampled.any()) else 0
    read = tokens[: end if at_end else max(end - 1, 0)]
    if root >= 0:
        leaf = flat.add_segment(read, root, len(prompt))
        prompt_end = flat.starts[root] + len(prompt) - 1
    else:
        leaf = flat.add_segment(torch.cat([prompt, read]), -1, 0)
        prompt_end = flat.length - len(read) - 1
    if at_end:
        if not len(prompt) + len(read):
            raise ValueError(f"a rollout of task {rollout.task.id} has no tokens, so there is no token to score")
        source = torch.tensor([flat.length - 1 if len(read) else prompt_end])
        return leaf, _Predictions(source, torch.cat([prompt, read])[-1:], torch.zeros(1), torch.full((1,), -1, dtype=torch.int32))
    source = torch.arange(len(tokens)) + flat.length - len(read) - 1
    source[:1] = prompt_end
    logprobs = _concatenate([turn.logprobs for turn in rollout.turns], torch.float32)
    versions = _concatenate([turn.versions for turn in rollout.turns], torch.int32)
    return leaf, _Predictions(source[sampled], tokens[sampled], logprobs[sampled], versions[sampled])


def _concatenate(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:  # [L]
    return torch.cat(list(columns)) if columns else torch.zeros(0, dtype=dtype)
