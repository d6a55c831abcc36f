"""``loss_fn`` of a recipe: keys that NeMo-RL reads only together with others."""

from __future__ import annotations

from typing import Any

import pytest

from strop.algorithm_factory import make_algorithm
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.baselines import Reinforce
from strop.algorithms.policy_gradient.corrections import Icepop
from strop.algorithms.policy_gradient.sequence_objectives import SequenceClip
from strop.config import LoadedConfig, dump_config, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.extensions.recipes.difference import Effect
from strop.runs.algorithm.run_algorithm import collect_settings

PENALTY = "loss_fn.reference_policy_kl_penalty=0.01"


def load(*overrides: str) -> LoadedConfig[Any]:
    return load_config(None, ["policy.model_name=m", *overrides], root=GrpoRunConfig, check=False)


def made(loaded: LoadedConfig[Any]) -> Any:
    return make_algorithm(loaded.config.algorithm.name, loaded.config.algorithm.kwargs, collect_settings(loaded.config))


def texts(loaded: LoadedConfig[Any], effect: Effect) -> dict[str, str]:
    return {difference.key: difference.text for difference in loaded.differences if difference.effect is effect}


def test_without_a_ratio_there_is_nothing_to_clip_or_to_set_to_one() -> None:
    clips = ("loss_fn.ratio_clip_min=0.2", "loss_fn.ratio_clip_max=0.28", "loss_fn.ratio_clip_c=10")
    loaded = load("loss_fn.disable_ppo_ratio=true", *clips, "loss_fn.force_on_policy_ratio=true")
    assert made(loaded).objective == Reinforce() and not made(loaded).on_policy_ratio
    assert len(texts(loaded, Effect.UNUSED)) == 4
    assert made(load("loss_fn.disable_ppo_ratio=false", *clips)).objective.high == 0.28


def test_the_kl_term_of_a_recipe_has_the_gradient_through_the_sampling_probability() -> None:
    recipe = load(PENALTY, "loss_fn.use_on_policy_kl_approximation=false")
    assert made(recipe).kl == Kl(weight=0.01, score_gradient=True)
    assert made(load(PENALTY)).kl == Kl(weight=0.01), "a key that nobody set means nothing"
    assert made(load(PENALTY, "loss_fn.use_on_policy_kl_approximation=true")).kl == Kl(weight=0.01, unbiased=True)
    without = load("loss_fn.reference_policy_kl_penalty=0", "loss_fn.use_on_policy_kl_approximation=false")
    assert (not without.differences and made(without).kl is None) or made(without).kl.weight == 0


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_saved_run_keeps_its_kl_term(value: str, tmp_path: Any) -> None:
    loaded = load(PENALTY, f"loss_fn.use_on_policy_kl_approximation={value}")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(loaded.config))
    assert made(load_config(path, root=GrpoRunConfig, check=False)) == made(loaded)


def test_reinforce_plus_plus_subtracts_the_kl_term_from_each_token_s_own_credit() -> None:
    loaded = load(PENALTY, "grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true")
    assert made(loaded).kl == Kl(weight=0.01, place="token_credit")


def test_a_kl_term_in_the_reward_that_nemo_rl_s_estimator_does_not_read_is_said() -> None:
    loaded = load(PENALTY, "grpo.adv_estimator.name=grpo", "loss_fn.use_kl_in_reward=true")
    assert made(loaded).kl.place == "reward"
    assert "trains without a KL term" in texts(loaded, Effect.CHANGED)["loss_fn.use_kl_in_reward"]


def test_icepop_with_a_ratio_per_sequence_weighs_whole_rollouts() -> None:
    options = ["type=icepop", "ratio=5", "ratio_min=0.5"]
    keys = [f"loss_fn.truncated_importance_sampling_{option}" for option in options]
    gspo = ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false")
    found = made(load("loss_fn.use_importance_sampling_correction=true", *gspo, *keys))
    assert isinstance(found.objective, SequenceClip) and found.corrections == (Icepop(low=0.5, high=5.0, level="sequence"),)
