"""The groups of a step, made again from its stored rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import torch

from strop.build.replay.replay_error import ReplayError
from strop.monitoring.rollout_store.rollout_record import DropReason, RolloutRecord
from strop.monitoring.rollout_store.turn_record import TurnRecord
from strop.types import Branch, Ending, Group, Rollout, StepReward, Task, Turn


@dataclass(frozen=True, eq=False)
class StoredStep:
    """What a step trained on, in its order, and what it dropped."""

    groups: tuple[Group, ...]
    dropped: tuple[tuple[Group, DropReason], ...] = ()


def rebuild_groups(records: Sequence[RolloutRecord]) -> StoredStep:
    """Make the groups of a step from its records, which are in the order in which the step packed them. Raises ReplayError."""
    kept: list[Group] = []
    dropped: list[tuple[Group, DropReason]] = []
    for _, members in groupby(records, lambda record: (record.group, record.kept)):
        rollouts = list(members)
        group = _rebuild_group(rollouts)
        if rollouts[0].dropped_because is None:
            kept.append(group)
        else:
            dropped.append((group, rollouts[0].dropped_because))
    return StoredStep(tuple(kept), tuple(dropped))


def _rebuild_group(records: Sequence[RolloutRecord]) -> Group:
    first = records[0]
    if first.group_version is None or first.step_rewards is None:
        raise ReplayError(
            f"the stored rollouts of step {first.step} are of an earlier version, which did not store the rewards of steps and the "
            "advantages of turns; only steps that this version trained can be replayed"
        )
    rollouts = tuple(_rebuild_rollout(record) for record in records)
    return Group(index=first.group, environment=first.environment, version=first.group_version, rollouts=rollouts)


def _rebuild_rollout(record: RolloutRecord) -> Rollout:
    if record.prompt_images or any(turn.images for turn in record.turns):
        raise ReplayError(
            f"step {record.step} shows images, which stored rollouts hold as files without their places in the tokens; such a step cannot "
            "be replayed"
        )
    paths = [_rebuild_turns(record, path) for path in range(1 + len(record.branches))]
    branches = [
        Branch(parent=parent, start=start, turns=turns) for (parent, start), turns in zip(record.branches, paths[1:], strict=True)
    ]
    return Rollout(
        task=Task(id=record.task_id, answer=record.answer),
        sample=record.sample,
        seed=0,
        messages=(),
        prompt=torch.tensor(record.prompt_tokens, dtype=torch.int64),
        turns=paths[0],
        branches=tuple(branches),
        ending=Ending(record.ending) if record.ending else None,
        version=record.group_version or 0,
        reward=record.reward,
        step_rewards=tuple(StepReward(token, reward) for token, reward in record.step_rewards or ()),
        turn_advantages=record.turn_advantages or (),
        turn_states=_turn_states(record),
        rewards=record.rewards,
        metrics=dict(record.metrics),
        output=record.output,
        error=record.error,
    )


def _turn_states(record: RolloutRecord) -> tuple[str | None, ...]:
    states = tuple(turn.state for turn in record.turns if turn.sampled)
    return states if any(state is not None for state in states) else ()


def _rebuild_turns(record: RolloutRecord, path: int) -> tuple[Turn, ...]:
    """Make the turns of a path. Messages that an environment gave at once are one turn."""
    messages = [turn for turn in record.turns if turn.path == path]
    starts = messages[:1] + [after for before, after in pairwise(messages) if not _is_same_turn(before, after)]
    return tuple(_rebuild_turn(record, turn) for turn in starts)


def _is_same_turn(before: TurnRecord, after: TurnRecord) -> bool:
    return not before.sampled and not after.sampled and (before.start, before.end) == (after.start, after.end)


def _rebuild_turn(record: RolloutRecord, turn: TurnRecord) -> Turn:
    tokens = slice(turn.start, turn.end)
    author: Literal["policy", "environment"] = "policy" if turn.sampled else "environment"
    return Turn(
        author=author,
        tokens=torch.tensor(record.tokens[tokens], dtype=torch.int64),
        text=turn.text,
        logprobs=torch.tensor(record.sampler_logprobs[tokens], dtype=torch.float32),
        versions=torch.tensor(record.versions[tokens], dtype=torch.int32),
    )
