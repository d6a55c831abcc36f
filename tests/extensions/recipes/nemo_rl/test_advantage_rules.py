"""``grpo.adv_estimator`` of a recipe: its own options win, and the advantage is what NeMo-RL's estimator computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.algorithm_factory import format_algorithm, make_algorithm
from strop.algorithms.policy_gradient.baselines import BatchWhitened
from strop.algorithms.policy_gradient.group_credit import DecoupledRewards
from strop.algorithms.policy_gradient.grpo import GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage
from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.extensions.recipes.difference import Effect
from strop.runs.algorithm.run_algorithm import collect_settings

# As NeMo-RL's recipes have it: the estimator's options refer to those of the section, and a recipe that inherits overrides some.
RECIPE = """
policy: {model_name: m}
grpo:
  normalize_rewards: true
  use_leave_one_out_baseline: true
  adv_estimator:
    name: grpo
    normalize_rewards: ${grpo.normalize_rewards}
    use_leave_one_out_baseline: ${grpo.use_leave_one_out_baseline}
    minus_baseline: true
"""


def load(tmp_path: Path, *overrides: str, recipe: str = RECIPE) -> LoadedConfig[Any]:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    return load_config(path, overrides, root=GrpoRunConfig, check=False)


def advantage(loaded: LoadedConfig[Any]) -> Advantage:
    config = loaded.config
    made: Any = make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))
    found: Advantage = made.advantage
    return found


def test_the_leave_one_out_baseline_comes_with_the_deviation_of_the_others(tmp_path: Path) -> None:
    assert advantage(load(tmp_path)) == GroupRelative(leave_one_out=True, deviation="others")
    plain = load(tmp_path, "grpo.use_leave_one_out_baseline=false")
    assert advantage(plain) == GroupRelative(deviation="unbiased")


def test_an_option_of_the_estimator_wins_over_the_section_s_and_holds_on_the_command_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, "grpo.adv_estimator.normalize_rewards=false", "grpo.adv_estimator.use_leave_one_out_baseline=false")
    assert advantage(loaded) == GroupRelative(normalize=False, deviation="unbiased")
    config = loaded.config
    outline = format_algorithm("grpo", make_algorithm("grpo", {}, collect_settings(config)))
    assert "leave_one_out=False, normalize=False, deviation=unbiased" in outline


def test_options_without_a_name_are_those_of_grpo_and_absent_ones_have_nemo_rl_s_defaults(tmp_path: Path) -> None:
    bare = "policy: {model_name: m}\ngrpo: {adv_estimator: {normalize_rewards: false}}\n"
    assert advantage(load(tmp_path, recipe=bare)) == GroupRelative(leave_one_out=True, normalize=False, deviation="others")


def test_gdpo_reads_its_own_options_and_weighs_rewards_in_the_order_of_their_names(tmp_path: Path) -> None:
    own = ("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.use_leave_one_out_baseline=false")
    assert advantage(load(tmp_path, *own)) == DecoupledRewards(weights=None, deviation="unbiased")
    weighed = load(tmp_path, *own, "grpo.adv_estimator.reward_weights=[1.0, 0.5]")
    assert advantage(weighed) == DecoupledRewards(weights=(1.0, 0.5), deviation="unbiased")


def test_reinforce_plus_plus_reads_only_its_baseline(tmp_path: Path) -> None:
    loaded = load(tmp_path, "grpo.adv_estimator.name=reinforce_plus_plus")
    assert advantage(loaded) == BatchWhitened(group_mean=True)
    unused = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {"grpo.normalize_rewards", "grpo.adv_estimator.use_leave_one_out_baseline"} <= unused
    plain = load(tmp_path, "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false")
    assert advantage(plain) == BatchWhitened()


def test_distillation_by_several_teachers_is_refused_once_for_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "grpo.adv_estimator.name=opd")
    (problem,) = caught.value.problems
    assert problem.key == "grpo.adv_estimator.name" and "credit comes from teachers" in str(problem)
    assert "Use strop distillation" in str(problem)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "grpo.adv_estimator.name=opd", "on_policy_distillation.enabled=true")
    assert [problem.key for problem in caught.value.problems] == ["on_policy_distillation"]
