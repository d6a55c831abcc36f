"""What a step says about its rollouts, and about how well sampler and learner agree."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.base import TokenOutputs
from strop.data.packing import pack
from strop.reports import batch_metrics, group_metrics
from strop.types import Ending, Group, Rollout, Task, Turn, observation
from support.algorithms import grpo


def rollout(
    sample: int, reward: float, tokens: int, *, ending: Ending = Ending.STOP, turns: int = 1, **rewards: float
) -> Rollout:
    written: list[Turn] = []
    for turn in range(turns):
        written += [observation([9, 9], "so")] if turn else []
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
    group(1, rollout(0, 0.5, 1, turns=2, right=0.5, brief=1.0), rollout(1, 0.5, 3, right=0.5, brief=0.0), environment="b"),
]


def test_means_are_over_the_rollouts_that_are_trained_on():
    dropped = [(group(index, rollout(0, 9.0, 50)), why) for index, why in enumerate(("error", "filtered", "filtered", "stale"), 2)]
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
            "train/reward_std_in_group": 0.25,
            "train/groups_without_signal": 0.5,
            "train/mean_gen_tokens_per_sample": (2 + 4 + 2 + 3) / 4,
            "train/max_gen_tokens_per_sample": 4,
            "train/turns_per_sample": 5 / 4,
            "train/truncated": 0.25,
            "train/ended_by_stop": 0.75,
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


def test_agreement_is_perfect_where_the_log_probabilities_are_equal():
    batch = pack(KEPT, grpo())
    found = batch_metrics(batch, TokenOutputs(logprobs=batch.sampler_logprobs, entropy=torch.full((len(batch.target),), 0.5)))
    assert (found["train/token_mult_prob_error"], found["train/token_mult_prob_error_max"]) == (1.0, 1.0)
    assert found["train/gen_kl_error"] == 0 and found["train/entropy"] == 0.5 and found["train/logprob"] == -1
    assert found["train/tokens_trained"] == 2 + 4 + 2 + 3 and found["train/tokens_read"] == len(batch.tokens)


def test_disagreement_is_measured_in_both_directions():
    batch = pack(KEPT, grpo())
    shift = torch.zeros(len(batch.target))
    shift[0], shift[1] = 0.3, -0.3
    found = batch_metrics(batch, TokenOutputs(logprobs=batch.sampler_logprobs + shift, entropy=shift))
    count = len(batch.target)
    assert found["train/token_mult_prob_error"] == pytest.approx((2 * math.exp(0.3) + count - 2) / count)
    assert found["train/token_mult_prob_error_max"] == pytest.approx(math.exp(0.3))
    k3 = math.exp(0.3) - 1 - 0.3 + math.exp(-0.3) - 1 + 0.3
    assert found["train/gen_kl_error"] == pytest.approx(k3 / count, rel=1e-5)


def test_tokens_that_do_not_count_are_left_out():
    batch = pack(KEPT, grpo(overlong_filtering=True))
    wrong = torch.where(batch.mask > 0, 0.0, 5.0)
    found = batch_metrics(batch, TokenOutputs(logprobs=batch.sampler_logprobs + wrong, entropy=wrong))
    assert found["train/token_mult_prob_error"] == 1 and found["train/entropy"] == 0
    assert found["train/tokens_trained"] == 7
