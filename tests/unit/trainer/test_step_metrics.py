"""What a step says about its rollouts and its tokens."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.base import TokenOutputs
from strop.trainer.step_metrics import batch_metrics, group_metrics
from strop.types import Ending, Group, Rollout, Task, Turn, observation_turn
from support.algorithms import grpo
from support.rollouts import pack_for


def rollout(
    sample: int, reward: float, tokens: int, *, ending: Ending = Ending.STOP, turns: int = 1, **rewards: float
) -> Rollout:
    written: list[Turn] = []
    for turn in range(turns):
        written += [observation_turn([9, 9], "so")] if turn else []
        written.append(
            Turn(
                author="policy",
                tokens=torch.full((tokens,), 5),
                text="x",
                logprobs=torch.full((tokens,), -1.0),
                versions=torch.zeros(tokens, dtype=torch.int32),
            )
        )
    return Rollout(
        task=Task(id="t"),
        sample=sample,
        seed=0,
        messages=(),
        prompt=torch.tensor([1, 2, 3]),
        turns=tuple(written),
        ending=ending,
        reward=reward,
        rewards=rewards,
    )


def group(index: int, *rollouts: Rollout, environment: str = "a") -> Group:
    return Group(index=index, environment=environment, version=0, rollouts=rollouts)


KEPT = [
    group(0, rollout(0, 1.0, 2, right=1.0), rollout(1, 0.0, 4, ending=Ending.LENGTH, right=0.0)),
    group(
        1,
        rollout(0, 0.5, 1, turns=2, right=0.5, brief=1.0),
        rollout(1, 0.5, 3, ending=Ending.TURNS, right=0.5, brief=0.0),
        environment="b",
    ),
]


def test_means_are_over_the_rollouts_that_are_trained_on():
    dropped = [
        (group(index, rollout(0, 9.0, 50)), why) for index, why in enumerate(("error", "filtered", "filtered", "stale"), 2)
    ]
    found = group_metrics(KEPT, dropped, [0, 2])
    assert found == pytest.approx(
        {
            "train/groups_dropped": 4,
            "train/groups_dropped_for_errors": 1,
            "train/groups_dropped_by_filter": 2,
            "train/groups_dropped_stale": 1,
            "train/rewards/right": 0.5,
            "train/rewards/brief": 0.5,
            "train/environments/a/reward": 0.5,
            "train/environments/b/reward": 0.5,
            "train/reward": 0.5,
            "train/reward_min": 0,
            "train/reward_max": 1,
            "train/reward_std_in_group": 0.25,
            "train/groups_without_signal": 0.5,
            "train/mean_gen_tokens_per_sample": (2 + 4 + 2 + 3) / 4,
            "train/max_gen_tokens_per_sample": 4,
            "train/turns_per_sample": 5 / 4,
            "train/truncated": 0.25,
            "train/ended_by_stop": 0.5,
            "train/ended_by_turns": 0.25,
            "train/staleness": 1,
            "train/staleness_max": 2,
        }
    )


def test_a_step_that_kept_nothing_reports_what_was_dropped():
    assert group_metrics([], [(KEPT[0], "error")], []) == {
        "train/groups_dropped": 1,
        "train/groups_dropped_for_errors": 1,
        "train/groups_dropped_by_filter": 0,
        "train/groups_dropped_stale": 0,
    }


def test_entropy_and_log_probability_are_means_over_counted_tokens():
    batch = pack_for(KEPT, grpo())
    found = batch_metrics(batch, TokenOutputs(logprobs=batch.rollout_logprobs, entropy=torch.full((len(batch.target),), 0.5)))
    assert found["train/entropy"] == 0.5 and found["train/logprob"] == -1
    assert found["train/tokens_trained"] == 2 + 4 + 2 + 3 and found["train/tokens_read"] == len(batch.tokens)


def test_tokens_that_do_not_count_are_left_out():
    batch = pack_for(KEPT, grpo(overlong_filtering=True))
    wrong = torch.where(batch.mask > 0, 0.0, 5.0)
    found = batch_metrics(batch, TokenOutputs(logprobs=batch.rollout_logprobs + wrong, entropy=wrong))
    assert found["train/logprob"] == -1 and found["train/entropy"] == 0
    assert found["train/tokens_trained"] == 7


def test_of_recorded_tokens_there_is_no_advantage_to_report():
    batch = pack_for(KEPT, grpo())
    outputs = TokenOutputs(logprobs=batch.rollout_logprobs, entropy=torch.ones(len(batch.target)))
    assert "train/advantages_abs" not in batch_metrics(batch, outputs, recorded=True)
    assert "train/advantages_abs" in batch_metrics(batch, outputs)
