"""Credit over turns: GiGPO, discounted returns of turns and bi-level GAE against their formulas, on random games."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import formulas_critic
from conformance import formulas_turns as formulas
from conformance.compose import algorithm, part
from conformance.formulas_turns import PlayedTurn
from conformance.harness import SINGLE
from strop.algorithms.base import Plan
from strop.algorithms.critic import VALUES
from strop.algorithms.policy_gradient.turns import TURNS, make_step_columns, make_turn_columns
from strop.data.packing import pack
from strop.types import Batch, Group, StepReward, observation_turn
from support.each import each
from support.rollouts import make_group, make_rollout, sampled_turn

SEEDS = each("seed", range(6), ids=[f"game {seed}" for seed in range(6)])
Groups = list[list[list[PlayedTurn]]]


def play(seed: int) -> Groups:
    """Two groups of four rollouts of up to five turns. Half of the rewards are 0, and of the states one is unknown."""
    random = Random(seed)

    def turn() -> PlayedTurn:
        reward = random.choice([0.0, 0.0, 1.0, -0.5, random.random()])
        return PlayedTurn(random.randint(1, 4), reward, random.choice(["a", "b", "c", None]))

    return [[[turn() for _ in range(random.randint(1, 5))] for _ in range(4)] for _ in range(2)]


def groups_of(games: Groups) -> list[Group]:
    """The reward of each turn but the last is one of a step; that of the last turn is half a step and half the outcome."""
    groups = []
    for index, game in enumerate(games):
        rollouts = []
        for played in game:
            turns, steps, end = [], [], -1
            for turn in played:
                turns += [sampled_turn([7] * turn.tokens), observation_turn([9, 9], "")]
                end += turn.tokens
                steps.append(StepReward(end, turn.reward / 2 if turn is played[-1] else turn.reward))
            rollouts.append(
                replace(
                    make_rollout([1, 2], *turns[:-1], reward=sum(turn.reward for turn in played)),
                    step_rewards=tuple(steps),
                    turn_states=tuple(turn.state for turn in played),
                )
            )
        groups.append(make_group(*rollouts, index=index))
    return groups


def credited(games: Groups, name: str, *, share_prefixes: bool = True, **options: object) -> Batch:
    subject, groups = algorithm(name, **options), groups_of(games)
    batch = pack(groups, subject.group_credit(groups), share_prefixes=share_prefixes)
    batch = batch.with_columns({**make_step_columns(batch, groups), **make_turn_columns(batch, groups)})
    return subject.token_credit(batch.with_column(VALUES, values_of(batch)))


def values_of(batch: Batch) -> Tensor:
    return torch.linspace(-1, 1, len(batch.target)).sin()


def assert_credit(found: Tensor, wanted: Sequence[Sequence[Sequence[float]]]) -> None:
    flat = torch.tensor([value for group in wanted for tokens in group for value in tokens])
    torch.testing.assert_close(found.double(), flat.double(), rtol=10 * SINGLE, atol=10 * SINGLE)


@SEEDS
@pytest.mark.parametrize(("gamma", "omega", "normalize"), [(0.95, 1.0, True), (0.5, 0.3, False), (1.0, 0.0, True)])
def test_gigpo_is_its_papers_formula(gamma: float, omega: float, normalize: bool, seed: int) -> None:
    games = play(seed)
    advantage = part("step_grouped", gamma=gamma, step_weight=omega, normalize=normalize)
    wanted = [formulas.gigpo(game, gamma=gamma, omega=omega, normalize=normalize) for game in games]
    assert_credit(credited(games, "gigpo", advantage=advantage).advantages, wanted)


def test_gigpo_with_weight_0_or_without_states_is_grpo() -> None:
    games = play(3)
    unknown = [[[replace(turn, state=None) for turn in rollout] for rollout in game] for game in games]
    grpo = credited(games, "grpo").advantages
    assert torch.equal(credited(games, "gigpo", advantage=part("step_grouped", step_weight=0.0)).advantages, grpo)
    assert torch.equal(credited(unknown, "gigpo").advantages, grpo)


def test_a_state_is_only_compared_within_its_group_and_a_turn_alone_in_its_state_has_no_credit_of_its_own() -> None:
    one, other = [PlayedTurn(1, 1.0, "s")], [PlayedTurn(1, 0.0, "s")]
    assert not credited([[one, one], [other, other]], "gigpo").advantages.any()
    alone = [[PlayedTurn(1, 1.0, "s")], [PlayedTurn(1, 0.0, "t")]]
    assert torch.equal(credited([alone], "gigpo").advantages, credited([alone], "grpo").advantages)


@SEEDS
@pytest.mark.parametrize(("gamma", "same_turn"), [(0.4, False), (1.0, True), (0.0, False)])
def test_returns_of_turns_are_discounted_and_compared_over_the_group(gamma: float, same_turn: bool, seed: int) -> None:
    games = play(seed)
    advantage = part("discounted_turns", gamma=gamma, same_turn=same_turn)
    wanted = [formulas.turn_returns(game, gamma=gamma, same_turn=same_turn) for game in games]
    assert_credit(credited(games, "turn_returns", advantage=advantage).advantages, wanted)


@SEEDS
@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_bi_level_gae_is_its_papers_recursion(lam: float, seed: int) -> None:
    games = play(seed)
    options: dict[str, Any] = {"gamma": 0.99, "turn_gamma": 0.9, "turn_lambda": 0.8}
    advantage = part("bi_level_gae", lambda_policy=lam, lambda_value=1.0, whiten=False, **options)
    batch = credited(games, "bi_level_gae", advantage=advantage)
    values = batch.column(VALUES).double()
    rows: list[tuple[list[PlayedTurn], list[float]]] = []
    start = 0
    for rollout in (rollout for game in games for rollout in game):
        length = sum(turn.tokens for turn in rollout)
        rows.append((rollout, values[start : start + length].tolist()))
        start += length
    assert_credit(batch.advantages, [[formulas.bi_level_gae(*row, lam=lam, **options) for row in rows]])
    targets = [formulas.bi_level_gae(*row, lam=1.0, **options) for row in rows]
    assert_credit(
        batch.column("returns"),
        [[[a + v for a, v in zip(one, row[1], strict=True)] for one, row in zip(targets, rows, strict=True)]],
    )


def test_bi_level_gae_of_single_turns_is_gae() -> None:
    games = [[rollout[:1] for rollout in game] for game in play(1)]
    options = {"gamma": 0.97, "lambda_policy": 0.9}
    found = credited(games, "bi_level_gae", advantage=part("bi_level_gae", **options)).advantages
    torch.testing.assert_close(found, credited(games, "ppo", advantage=part("gae", **options)).advantages)
    wanted = formulas_critic.gae([0.0, 0.0, 1.0], [0.1, 0.2, 0.3], gamma=1.0, lam=1.0)
    assert wanted == pytest.approx(
        formulas.bi_level_gae([PlayedTurn(3, 1.0)], [0.1, 0.2, 0.3], gamma=1.0, lam=1.0, turn_gamma=0.5, turn_lambda=0.5)
    )


@pytest.mark.parametrize("name", ["gigpo", "turn_returns", "bi_level_gae"])
def test_credit_of_turns_does_not_depend_on_how_prompts_are_packed(name: str) -> None:
    games = play(2)
    assert torch.equal(credited(games, name).advantages, credited(games, name, share_prefixes=False).advantages)


@pytest.mark.parametrize("name", ["grpo", "ppo", "process_supervision"])
def test_credit_that_is_not_of_turns_is_the_same_with_their_columns(name: str) -> None:
    games = play(4)
    batch = credited(games, name)
    assert TURNS in batch.columns
    subject, groups = algorithm(name), groups_of(games)
    without = pack(groups, subject.group_credit(groups))
    without = without.with_columns(make_step_columns(without, groups)).with_column(VALUES, values_of(without))
    assert torch.equal(subject.token_credit(without).advantages, batch.advantages)


def test_rollouts_of_one_turn_have_no_columns_of_turns() -> None:
    groups = [make_group(make_rollout([1], sampled_turn([7])), make_rollout([1], sampled_turn([7, 8])))]
    assert not make_turn_columns(pack(groups), groups)


def test_gigpo_says_when_no_environment_has_states_and_options_out_of_range_are_refused() -> None:
    (problem,) = algorithm("gigpo").validate(Plan(group_size=4, turn_states=False))
    assert "turn_states" in problem and "grpo" in problem
    for name, option in (("step_grouped", "gamma"), ("discounted_turns", "gamma"), ("bi_level_gae", "turn_lambda")):
        with pytest.raises(ValueError, match=option):
            part(name, **{option: 1.5})
