"""Groups, batches and outputs made up for the check of an algorithm: no model, no engine, no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import CANDIDATES, Algorithm, Outputs, TokenOutputs, ValueOutputs
from strop.algorithms.distillation import TEACHER_CANDIDATES
from strop.algorithms.policy_gradient.turns import make_step_columns, make_turn_advantages, make_turn_columns
from strop.data.packing import pack
from strop.endings import Ending
from strop.extensions.checks.algorithm_report import REWARD_NAMES
from strop.types import Batch, Group, Rollout, StepReward, Task, Turn, observation_turn

VOCABULARY = 64
CANDIDATE_COUNT = 4


@dataclass(frozen=True)
class GroupShape:
    """A group to make up: the turns of each rollout as numbers of sampled tokens, and the rewards."""

    turns: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


# Two groups of several rollouts with several turns, one without signal, one with a long rollout among short ones.
SHAPES = (
    GroupShape(((3,), (5, 2), (1,), (4,)), (1.0, 0.0, 0.5, 0.25)),
    GroupShape(((2, 3), (6,)), (0.0, 1.0)),
    GroupShape(((3,), (2,), (2, 2)), (1.0, 1.0, 1.0)),
    GroupShape(((1,), (17,), (2,)), (1.0, 0.75, 0.0)),
)
PAIRS = tuple(GroupShape(((3 + index,), (5 - index,)), (1.0, 0.0)) for index in range(4))
JUDGEMENTS = tuple(GroupShape(((2 + index,), (3,)), (float(index % 2), 0.0)) for index in range(5))  # each with an unrelated one
CONVERSATIONS = tuple(GroupShape(((2 + index,),), (1.0,)) for index in range(5))


def make_groups(algorithm: Algorithm) -> list[Group]:
    """Make groups of the kind that the algorithm trains on: sampled ones, or recorded conversations, pairs or judgements."""
    recorded = {"preferences": PAIRS, "judgements": JUDGEMENTS, "conversations": CONVERSATIONS}
    shapes = recorded.get(algorithm.recorded_data, SHAPES)
    return [make_group(index, shape, algorithm) for index, shape in enumerate(shapes)]


def make_group(index: int, shape: GroupShape, algorithm: Algorithm) -> Group:
    noise = torch.Generator().manual_seed(index)
    prompt = torch.randint(VOCABULARY, (4,), generator=noise)
    rollouts = [
        _make_rollout(index, sample, prompt, turns, reward, noise, recorded=bool(algorithm.recorded_data))
        for sample, (turns, reward) in enumerate(zip(shape.turns, shape.rewards, strict=True))
    ]
    return Group(
        index=index,
        environment="check",
        version=0,
        rollouts=tuple(rollouts),
        baseline=replace(rollouts[0], reward=0.4) if algorithm.greedy_baseline else None,
    )


def _make_rollout(
    index: int, sample: int, prompt: Tensor, lengths: Sequence[int], reward: float, noise: torch.Generator, *, recorded: bool
) -> Rollout:
    turns: list[Turn] = []
    for place, length in enumerate(lengths):
        turns += [observation_turn([1, 2], "")] if place else []
        turns.append(
            Turn(
                author="policy",
                tokens=torch.randint(VOCABULARY, (length,), generator=noise),
                text="",
                logprobs=-0.1 - 3 * torch.rand(length, generator=noise),
                versions=torch.zeros(length, dtype=torch.int32),
            )
        )
    ends = [sum(lengths[: place + 1]) - 1 for place in range(len(lengths))]
    return Rollout(
        task=Task(id=f"check-{index}"),
        sample=sample,
        seed=sample,
        messages=(),
        prompt=prompt,
        turns=tuple(turns),
        ending=Ending.LENGTH if sample == 1 else Ending.STOP,
        reward=reward,
        rewards=dict(zip(REWARD_NAMES, (reward, 0.5 * sample), strict=True)),
        step_rewards=() if recorded else tuple(StepReward(end, reward / (2 * len(ends))) for end in ends),
        turn_states=tuple("start" if place == 0 else f"state-{sample % 2}" for place in range(len(lengths))),
    )


@dataclass(frozen=True)
class Step:
    """One optimizer step of a learner: its batch, prepared, and the outputs of its network."""

    batch: Batch
    outputs: Outputs


def make_step(algorithm: Algorithm, groups: Sequence[Group], learner: str, *, spread: float = 0.2) -> Step:
    """Pack groups and prepare the step as a run does. ``spread``: how far the policy is from what sampled, in nats.

    Everything is float64, so that two ways to compute one number agree far below the rounding of float32.
    """
    noise = torch.Generator().manual_seed(17)
    packed = pack(groups, algorithm.group_credit(groups))
    batch = replace(packed, advantages=packed.advantages.double(), mask=packed.mask.double())
    for make_columns in (make_step_columns, make_turn_columns, make_turn_advantages):
        batch = batch.with_columns(make_columns(batch, groups))
    logprobs = -0.1 - 3 * torch.rand(len(batch.target), generator=noise, dtype=torch.float64)

    def near(width: float) -> Tensor:
        return (logprobs + width * torch.randn(len(logprobs), generator=noise, dtype=torch.float64)).clamp(max=-1e-3)

    batch = replace(batch, rollout_logprobs=near(spread)).with_column("policy_logprobs", near(spread))
    for name in sorted(algorithm.requires - set(batch.columns)):
        batch = batch.with_columns(_make_candidates(noise, len(logprobs)) if name == TEACHER_CANDIDATES else {name: near(0.5)})
    outputs = TokenOutputs(
        logprobs=logprobs,
        entropy=0.5 + torch.rand(len(logprobs), generator=noise, dtype=torch.float64),
        candidates=_logprobs_of_some(noise, len(logprobs)) if CANDIDATES in batch.columns else None,
        log_sum_sq_probs=2 * logprobs - 0.5,
    )
    batch = algorithm.token_credit(batch)
    batch = algorithm.prepare_step(batch, outputs if algorithm.needs_step_outputs else None)
    batch = replace(batch, zero_gradient=algorithm.zero_gradient(batch, learner))
    return Step(batch, ValueOutputs(near(0.5)) if learner == "value" or algorithm.predict == "last_token" else outputs)


def _logprobs_of_some(noise: torch.Generator, count: int) -> Tensor:  # [N, K]: log-probabilities of K tokens, below 1 in sum
    scores = torch.randn(count, CANDIDATE_COUNT + 1, generator=noise, dtype=torch.float64)
    return scores.log_softmax(-1)[:, :CANDIDATE_COUNT]


def _make_candidates(noise: torch.Generator, count: int) -> dict[str, Any]:
    ids = torch.rand(count, VOCABULARY, generator=noise).topk(CANDIDATE_COUNT).indices
    return {CANDIDATES: ids, TEACHER_CANDIDATES: _logprobs_of_some(noise, count)}


def make_unit(algorithm: Algorithm, log_ratio: float, advantage: float) -> Step:
    """Make the smallest batch in which a policy has moved: one token whose log-probability differs by ``log_ratio`` from that of the
    policy before; for pairs of recorded data, the difference is half in the chosen and half in the rejected answer.
    """
    pair = algorithm.recorded_data == "preferences"
    shape = GroupShape(((1,), (1,)), (1.0, 0.0)) if pair else GroupShape(((1,),), (1.0,))
    step = make_step(algorithm, [make_group(0, shape, algorithm)], "policy", spread=0.0)
    before = torch.full((len(step.batch.target),), -1.0, dtype=torch.float64)
    columns = dict.fromkeys(algorithm.requires | {"policy_logprobs"}, before)
    batch = replace(step.batch, rollout_logprobs=before, columns={**step.batch.columns, **columns})
    if not pair:
        batch = replace(batch, advantages=torch.full_like(before, advantage))
    moved = before + log_ratio * (torch.tensor([0.5, -0.5]) if pair else torch.tensor([1.0]))
    outputs = TokenOutputs(moved, torch.ones_like(moved), None, 2 * moved - 0.5)
    return Step(algorithm.prepare_step(batch, outputs if algorithm.needs_step_outputs else None), outputs)
