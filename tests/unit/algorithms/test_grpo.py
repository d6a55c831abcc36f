"""GRPO's settings: what each changes, on batches small enough to work out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.algorithms.base import TokenOutputs
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.types import Batch, Ending, Group
from support.algorithms import grpo
from support.rollouts import make_group, make_rollout, pack_for, pack_grpo, sampled_turn, simple_groups


def outputs(logprobs: torch.Tensor) -> TokenOutputs:
    return TokenOutputs(logprobs, torch.zeros_like(logprobs))


def rewarded(*rewards: float, endings: dict[int, Ending] | None = None) -> Group:
    rollouts = [
        make_rollout(
            [5, 6], sampled_turn([7 + place] * (place + 1)), reward=reward, ending=(endings or {}).get(place, Ending.STOP)
        )
        for place, reward in enumerate(rewards)
    ]
    return make_group(*rollouts)


def loss_of(algorithm: GRPO, batch: Batch, logprobs: torch.Tensor) -> tuple[float, dict[str, float]]:
    value, logged = algorithm.loss(outputs(logprobs), batch)
    return float(value), {name: metric.value for name, metric in logged.items()}


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_the_ratio_one() -> None:
    batch = pack_for([rewarded(0.0, 1.0)], grpo())
    value, logged = loss_of(grpo(), batch, torch.tensor([-1.0, -2.0, -3.0]))
    assert value == pytest.approx(-(-1.0 + 1.0 + 1.0) / 3, rel=1e-5)
    assert logged["probs_ratio"] == pytest.approx(1.0)
    assert logged["ratio_outside_clip"] == 0.0
    assert logged["loss"] == value


def test_the_ratio_is_to_the_policy_before_the_update() -> None:
    batch = pack_for([rewarded(0.0, 1.0)], grpo())
    before = torch.tensor([-1.0, -2.0, -3.0])
    batch = batch.with_column("policy_logprobs", before)
    shift = torch.tensor([0.1, 0.5, -0.5])
    value, logged = loss_of(grpo(clip_high=0.3), batch, before + shift)
    ratios = shift.exp().tolist()
    wanted = -(min(-ratios[0], -ratios[0]) + min(ratios[1], 1.3) + min(ratios[2], 0.8)) / 3
    assert value == pytest.approx(wanted, rel=1e-5)
    assert logged["probs_ratio"] == pytest.approx(sum(ratios) / 3, rel=1e-6)
    assert logged["probs_ratio_max"] == pytest.approx(ratios[1], rel=1e-6)
    assert logged["ratio_outside_clip"] == pytest.approx(2 / 3, rel=1e-6)
    assert loss_of(grpo(on_policy_ratio=True), batch, before + shift)[0] == pytest.approx(-1 / 3, rel=1e-5)


def test_the_largest_ratio_is_of_tokens_that_count() -> None:
    batch = pack_for([rewarded(0.0, 1.0)], grpo()).with_column("policy_logprobs", torch.zeros(3))
    batch = replace(batch, mask=torch.tensor([1.0, 1.0, 0.0]))
    assert loss_of(grpo(), batch, torch.tensor([0.1, 0.2, 5.0]))[1]["probs_ratio_max"] == pytest.approx(math.exp(0.2), rel=1e-6)


def test_a_sequence_ratio_is_the_geometric_mean_over_the_rollout() -> None:
    batch = pack_for([rewarded(0.0, 1.0)], grpo()).with_column("policy_logprobs", torch.zeros(3))
    logprobs = torch.tensor([0.05, 0.02, 0.10], requires_grad=True)
    value, logged = grpo(sequence_ratio=True).loss(outputs(logprobs), batch)
    geometric = math.exp((0.02 + 0.10) / 2)
    assert float(value.detach()) == pytest.approx(-(-math.exp(0.05) + 2 * geometric) / 3, rel=1e-5)
    assert logged["probs_ratio_max"].value == pytest.approx(geometric, rel=1e-6)
    value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[1] == logprobs.grad[2], "each token of a rollout gets the same slope"


def test_the_kl_penalty_is_added_to_the_loss_and_logged() -> None:
    algorithm = grpo(kl_penalty=0.5, kl_estimator="k2")
    assert algorithm.requires == {"reference_logprobs"}
    assert grpo().requires == frozenset()
    assert replace(grpo(), kl=Kl(place="token_reward")).requires == {"reference_logprobs", "policy_logprobs"}
    batch = pack_for([rewarded(1.0, 1.0)], algorithm).with_column("reference_logprobs", torch.tensor([-1.0, -2.0, -4.0]))
    value, logged = loss_of(algorithm, batch, torch.tensor([-1.0, -3.0, -2.0]))
    kl = (0 + 0.5 + 2.0) / 3
    assert logged["kl_penalty"] == pytest.approx(kl, rel=1e-6)
    assert value == pytest.approx(0.5 * kl, rel=1e-6)


def test_overlong_filtering_keeps_a_truncated_rollout_in_the_baseline_and_out_of_the_loss() -> None:
    group = rewarded(0.0, 1.0, 1.0, endings={2: Ending.LENGTH})
    algorithm = grpo(overlong_filtering=True)
    batch = pack_for([group], algorithm)
    assert batch.mask.tolist() == [1, 1, 1, 0, 0, 0]
    assert (batch.totals.tokens, batch.totals.sequences, batch.totals.groups) == (3, 2, 1)
    assert torch.allclose(algorithm.advantages(group), grpo().advantages(group))
    logprobs = torch.zeros(6, requires_grad=True)
    algorithm.loss(outputs(logprobs), batch)[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad[3:].tolist() == [0.0, 0.0, 0.0]
    assert bool((logprobs.grad[:3] != 0).all())


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, [True, True, False, False]),
        ({"kl_penalty": 0.1}, [False] * 4),
        ({"kl_penalty": 0.1, "kl_in_reward": True}, [True, True, False, False]),
        ({"sequence_ratio": True, "dual_clip": 2.0}, [True, True, False, False]),
        ({"overlong_filtering": True}, [True, True, False, True]),
    ],
)
def test_rollouts_said_to_be_idle_have_no_gradient_and_the_others_have(options: dict[str, Any], idle: list[bool]) -> None:
    algorithm = grpo(**options)
    groups = [rewarded(1.0, 1.0), rewarded(0.0, 1.0, endings={1: Ending.LENGTH})]
    batch = pack_for(groups, algorithm).with_column("reference_logprobs", torch.full((6,), -0.3))
    assert algorithm.zero_gradient(batch).tolist() == idle
    logprobs = torch.linspace(-2, -1, 6).requires_grad_()
    algorithm.loss(outputs(logprobs), batch)[0].backward()
    assert logprobs.grad is not None
    moved = torch.zeros(4).index_add(0, batch.sequence, logprobs.grad.abs())
    assert (moved == 0).tolist() == idle


def test_a_micro_batch_without_a_predicted_token_has_a_loss_of_zero() -> None:
    """A rollout whose policy never spoke may be alone in its micro-batch."""
    batch = pack_grpo(simple_groups((3, (2,))))
    empty = replace(
        batch,
        **{
            name: getattr(batch, name)[:0]
            for name in ("source", "target", "sequence", "rollout_logprobs", "versions", "advantages", "mask")
        },
    )
    value, _ = loss_of(grpo(), empty, torch.zeros(0))
    assert value == 0.0
