"""Credit over turns from a configuration: its options, and what it needs of the environments."""

from __future__ import annotations

import pytest

from strop.algorithms.critic import BiLevelGae, BiLevelPPO
from strop.config import TRAINING_RUNS, load_config
from strop.extensions.policy_gradients.turn_credit import DiscountedTurns, GiGPO, StepGrouped, TurnReturns
from strop.runs.run_algorithm import make_run_algorithm

PUZZLE = ["policy.model_name=m", "data.train.env_name=sliding_puzzle", "env={sliding_puzzle: {}, arithmetic: {}}"]


def made(section: str, *words: str) -> object:
    return make_run_algorithm(load_config(None, [*PUZZLE, *words], root=TRAINING_RUNS[section]).config)


def test_each_option_of_the_page_sets_what_it_says() -> None:
    options = ("algorithm.advantage.step_weight=0.5", "algorithm.advantage.gamma=0.9", "algorithm.advantage.normalize=false")
    assert made("grpo", "algorithm.name=gigpo", *options) == GiGPO(
        advantage=StepGrouped(step_weight=0.5, gamma=0.9, normalize=False)
    )
    returns = made("grpo", "algorithm.name=turn_returns", "algorithm.advantage.gamma=0.7", "algorithm.advantage.same_turn=true")
    assert returns == TurnReturns(advantage=DiscountedTurns(gamma=0.7, same_turn=True))
    keys = ("ppo.adv_estimator.gae_gamma=0.99", "ppo.adv_estimator.gae_lambda=0.9", "algorithm.advantage.turn_lambda=0.5")
    advantage = BiLevelGae(gamma=0.99, lambda_policy=0.9, turn_lambda=0.5)
    assert made("ppo", "algorithm.name=bi_level_gae", *keys) == BiLevelPPO(advantage=advantage)


def test_gigpo_is_refused_where_no_environment_says_in_which_state_a_turn_was_taken() -> None:
    with pytest.raises(ValueError, match=r"define turn_states in it, or set algorithm\.name to grpo"):
        made("grpo", "algorithm.name=gigpo", "data.train.env_name=arithmetic")
