"""The training sections of a recipe: numbers that stand for "off", failures, shaping, and what only NeMo-Gym can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.algorithm_factory import format_algorithm, make_algorithm
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections import Icepop
from strop.algorithms.policy_gradient.grpo import GroupRelative, Reinforce
from strop.algorithms.policy_gradient.grpo_variants import SoftOverlong
from strop.algorithms.policy_gradient.parts import Advantage
from strop.algorithms.policy_gradient.sequence_objectives import SequenceClip
from strop.config import ConfigError, LoadedConfig, dump_config, load_config
from strop.config.schema.run_config import TRAINING_RUNS, GrpoRunConfig
from strop.extensions.policy_gradients.baselines import BatchWhitened
from strop.extensions.policy_gradients.group_credit import DecoupledRewards
from strop.extensions.recipes.rules import Effect
from strop.runs.run_algorithm import collect_settings, make_run_algorithm

NEEDED = {"distillation": ["teacher.model_name=t"]}


def load(section: str, *overrides: str) -> LoadedConfig[Any]:
    needed = ["policy.model_name=m", *NEEDED.get(section, [])]
    return load_config(None, [*needed, *overrides], root=TRAINING_RUNS[section], check=False)


def of(loaded: LoadedConfig[Any], effect: Effect) -> dict[str, str]:
    return {difference.key: difference.text for difference in loaded.differences if difference.effect is effect}


def refusals(section: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(section, *overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("section", TRAINING_RUNS)
def test_minus_one_turns_validation_off_and_leaves_the_number_of_epochs_open_in_every_section(section: str) -> None:
    loaded = load(section, f"{section}.val_period=-1", f"{section}.max_num_epochs=-1")
    assert (loaded.config.training.val_period, loaded.config.training.max_num_epochs) == (0, None)
    assert f"{section}.val_period" in of(loaded, Effect.RENAMED)
    assert "trains nothing unless" in of(loaded, Effect.CHANGED)[f"{section}.max_num_epochs"]


@pytest.mark.parametrize("section", ["sft", "dpo", "rm"])
def test_no_batches_of_validation_are_all_of_them(section: str) -> None:
    assert load(section, f"{section}.val_batches=0").config.training.val_batches == -1
    assert load(section, f"{section}.val_batches=3").config.training.val_batches == 3
    assert load(section, f"{section}.max_num_steps=-1").config.training.last_step > 10**9


def test_all_tasks_are_validated_for_minus_one_and_whole_batches_of_them_otherwise() -> None:
    assert load("grpo", "grpo.max_val_samples=-1").config.grpo.max_val_samples is None
    assert load("grpo", "grpo.max_val_samples=null").config.grpo.max_val_samples is None
    whole = load("grpo", "grpo.max_val_samples=960", "grpo.val_batch_size=256")
    assert whole.config.grpo.max_val_samples == 768 and "768" in of(whole, Effect.RENAMED)["grpo.val_batch_size"]
    assert load("grpo", "grpo.max_val_samples=512", "grpo.val_batch_size=256").config.grpo.max_val_samples == 512
    assert load("grpo", "grpo.max_val_samples=30", "grpo.val_batch_size=256").config.grpo.max_val_samples == 30


def test_a_checkpoint_after_every_step_is_what_minus_one_saves() -> None:
    loaded = load("grpo", "checkpointing.save_period=-1")
    assert (
        loaded.config.checkpointing.save_period == 1
        and "0 turns saving off" in of(loaded, Effect.CHANGED)["checkpointing.save_period"]
    )


def test_failures_that_are_tolerated_are_one_less_than_those_that_end_the_run() -> None:
    for tolerated in (0, 3):
        loaded = load("grpo", "grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_generation_failures={tolerated}")
        assert loaded.config.grpo.max_errors_in_a_row == tolerated + 1
    synchronous = load("ppo", "ppo.async_ppo.max_generation_failures=3")
    assert synchronous.config.ppo.max_errors_in_a_row == 16 and "ppo.async_ppo.max_generation_failures" in of(
        synchronous, Effect.UNUSED
    )


def test_the_factor_of_truncated_rollouts_replaces_the_punishment_of_long_ones() -> None:
    shaping = ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_penalty=1")
    both = make_run_algorithm(load("grpo", *shaping, "grpo.reward_shaping.stop_properly_penalty_coef=0.1").config)
    assert isinstance(both, PolicyGradient) and isinstance(both.shaping, SoftOverlong)
    assert (both.shaping.truncated_factor, both.shaping.penalty) == (0.1, 0.0)
    alone = make_run_algorithm(load("grpo", *shaping).config)
    assert isinstance(alone, PolicyGradient) and isinstance(alone.shaping, SoftOverlong) and alone.shaping.penalty == 1.0


def test_what_only_changes_the_speed_or_is_not_read_is_left_out() -> None:
    keys = [
        "grpo.batch_multiplier=1.5",
        "grpo.dynamic_sampling_oversample_ratio=1.3",
        "grpo.zero_variance_prompt_filtering=false",
        "grpo.penalize_invalid_tool_call=true",
        "grpo.penalize_malformed_thinking=true",
        "grpo.invalid_tool_call_strategy=mask",
        "grpo.num_val_generations_per_prompt=1",
        "grpo.calculate_advantages_on_gpu=true",
        "grpo.skip_reference_policy_logprobs_calculation=true",
        "grpo.use_best_at_k=false",
        "grpo.best_at_k_k=8",
        "grpo.combined_training_weight_mode=auto",
    ]
    assert of(load("grpo", *keys), Effect.UNUSED).keys() == {key.partition("=")[0] for key in keys}
    lead = load("ppo", "ppo.async_ppo.warmup_generation_lead_steps=4", "ppo.async_ppo.drop_incomplete_targets_on_restore=true")
    assert len(of(lead, Effect.UNUSED)) == 2


def test_penalties_on_messages_are_penalties_on_turns() -> None:
    loaded = load("grpo", "grpo.invalid_tool_call_advantage=-5.0", "grpo.malformed_thinking_advantage=-3.0")
    penalties = loaded.config.reward_penalties
    assert (penalties.invalid_tool_call_advantage, penalties.malformed_think_tag_advantage) == (-5.0, -3.0)
    assert len(of(loaded, Effect.RENAMED)) == 2
    off = load("grpo", "grpo.invalid_tool_call_advantage=null", "grpo.malformed_thinking_advantage=null")
    assert len(of(off, Effect.UNUSED)) == 2


def test_a_teacher_s_training_keys_each_have_their_reason_and_what_would_change_it_is_refused() -> None:
    keys = {
        "teacher.train_global_batch_size=64": "the teacher is not trained",
        "teacher.hf_config_overrides.router_aux_loss_coef=0": "the teacher is not trained",
        "teacher.generation={backend: vllm}": "the teacher does not sample",
        "teacher.logprob_batch_size=1": "teacher.logprob_mb_tokens cuts what the teacher reads",
    }
    said = of(load("distillation", *keys), Effect.UNUSED)
    assert {key: said[key] for key in (key.partition("=")[0] for key in keys)} == {
        key.partition("=")[0]: why for key, why in keys.items()
    }
    (refused,) = refusals("distillation", "teacher.hf_config_overrides.rope_scaling={factor: 4}")
    assert "set teacher.model_name to the copy" in refused


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


def load_estimator(tmp_path: Path, *overrides: str, recipe: str = RECIPE) -> LoadedConfig[Any]:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    return load_config(path, overrides, root=GrpoRunConfig, check=False)


def advantage(loaded: LoadedConfig[Any]) -> Advantage:
    config = loaded.config
    made: Any = make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))
    found: Advantage = made.advantage
    return found


def test_the_leave_one_out_baseline_comes_with_the_deviation_of_the_others(tmp_path: Path) -> None:
    assert advantage(load_estimator(tmp_path)) == GroupRelative(leave_one_out=True, deviation="others")
    plain = load_estimator(tmp_path, "grpo.use_leave_one_out_baseline=false")
    assert advantage(plain) == GroupRelative(deviation="unbiased")


def test_an_option_of_the_estimator_wins_over_the_section_s_and_holds_on_the_command_line(tmp_path: Path) -> None:
    loaded = load_estimator(
        tmp_path, "grpo.adv_estimator.normalize_rewards=false", "grpo.adv_estimator.use_leave_one_out_baseline=false"
    )
    assert advantage(loaded) == GroupRelative(normalize=False, deviation="unbiased")
    config = loaded.config
    outline = format_algorithm("grpo", make_algorithm("grpo", {}, collect_settings(config)))
    assert "leave_one_out=False, normalize=False, deviation=unbiased" in outline


def test_options_without_a_name_are_those_of_grpo_and_absent_ones_have_nemo_rl_s_defaults(tmp_path: Path) -> None:
    bare = "policy: {model_name: m}\ngrpo: {adv_estimator: {normalize_rewards: false}}\n"
    assert advantage(load_estimator(tmp_path, recipe=bare)) == GroupRelative(
        leave_one_out=True, normalize=False, deviation="others"
    )


def test_gdpo_reads_its_own_options_and_weighs_rewards_in_the_order_of_their_names(tmp_path: Path) -> None:
    own = ("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.use_leave_one_out_baseline=false")
    assert advantage(load_estimator(tmp_path, *own)) == DecoupledRewards(weights=None, deviation="unbiased")
    weighed = load_estimator(tmp_path, *own, "grpo.adv_estimator.reward_weights=[1.0, 0.5]")
    assert advantage(weighed) == DecoupledRewards(weights=(1.0, 0.5), deviation="unbiased")


def test_reinforce_plus_plus_reads_only_its_baseline(tmp_path: Path) -> None:
    loaded = load_estimator(tmp_path, "grpo.adv_estimator.name=reinforce_plus_plus")
    assert advantage(loaded) == BatchWhitened(group_mean=True)
    unused = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {"grpo.normalize_rewards", "grpo.adv_estimator.use_leave_one_out_baseline"} <= unused
    plain = load_estimator(tmp_path, "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false")
    assert advantage(plain) == BatchWhitened()


def test_distillation_by_several_teachers_is_refused_once_for_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_estimator(tmp_path, "grpo.adv_estimator.name=opd")
    (problem,) = caught.value.problems
    assert problem.key == "grpo.adv_estimator.name" and "credit comes from teachers" in str(problem)
    assert "Use strop distillation" in str(problem)
    with pytest.raises(ConfigError) as caught:
        load_estimator(tmp_path, "grpo.adv_estimator.name=opd", "on_policy_distillation.enabled=true")
    assert [problem.key for problem in caught.value.problems] == ["on_policy_distillation"]


PENALTY = "loss_fn.reference_policy_kl_penalty=0.01"


def load_loss(*overrides: str) -> LoadedConfig[Any]:
    return load_config(None, ["policy.model_name=m", *overrides], root=GrpoRunConfig, check=False)


def made(loaded: LoadedConfig[Any]) -> Any:
    return make_algorithm(loaded.config.algorithm.name, loaded.config.algorithm.kwargs, collect_settings(loaded.config))


def texts(loaded: LoadedConfig[Any], effect: Effect) -> dict[str, str]:
    return {difference.key: difference.text for difference in loaded.differences if difference.effect is effect}


def test_without_a_ratio_there_is_nothing_to_clip_or_to_set_to_one() -> None:
    clips = ("loss_fn.ratio_clip_min=0.2", "loss_fn.ratio_clip_max=0.28", "loss_fn.ratio_clip_c=10")
    loaded = load_loss("loss_fn.disable_ppo_ratio=true", *clips, "loss_fn.force_on_policy_ratio=true")
    assert made(loaded).objective == Reinforce() and not made(loaded).on_policy_ratio
    assert len(texts(loaded, Effect.UNUSED)) == 4
    assert made(load_loss("loss_fn.disable_ppo_ratio=false", *clips)).objective.high == 0.28


def test_the_kl_term_of_a_recipe_has_the_gradient_through_the_sampling_probability() -> None:
    recipe = load_loss(PENALTY, "loss_fn.use_on_policy_kl_approximation=false")
    assert made(recipe).kl == Kl(weight=0.01, score_gradient=True)
    assert made(load_loss(PENALTY)).kl == Kl(weight=0.01), "a key that nobody set means nothing"
    assert made(load_loss(PENALTY, "loss_fn.use_on_policy_kl_approximation=true")).kl == Kl(weight=0.01, unbiased=True)
    without = load_loss("loss_fn.reference_policy_kl_penalty=0", "loss_fn.use_on_policy_kl_approximation=false")
    assert (not without.differences and made(without).kl is None) or made(without).kl.weight == 0


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_saved_run_keeps_its_kl_term(value: str, tmp_path: Any) -> None:
    loaded = load_loss(PENALTY, f"loss_fn.use_on_policy_kl_approximation={value}")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(loaded.config))
    assert made(load_config(path, root=GrpoRunConfig, check=False)) == made(loaded)


def test_reinforce_plus_plus_subtracts_the_kl_term_from_each_token_s_own_credit() -> None:
    loaded = load_loss(PENALTY, "grpo.adv_estimator.name=reinforce_plus_plus", "loss_fn.use_kl_in_reward=true")
    assert made(loaded).kl == Kl(weight=0.01, place="token_credit")


def test_a_kl_term_in_the_reward_that_nemo_rl_s_estimator_does_not_read_is_said() -> None:
    loaded = load_loss(PENALTY, "grpo.adv_estimator.name=grpo", "loss_fn.use_kl_in_reward=true")
    assert made(loaded).kl.place == "reward"
    assert "trains without a KL term" in texts(loaded, Effect.CHANGED)["loss_fn.use_kl_in_reward"]


def test_icepop_with_a_ratio_per_sequence_weighs_whole_rollouts() -> None:
    options = ["type=icepop", "ratio=5", "ratio_min=0.5"]
    keys = [f"loss_fn.truncated_importance_sampling_{option}" for option in options]
    gspo = ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false")
    found = made(load_loss("loss_fn.use_importance_sampling_correction=true", *gspo, *keys))
    assert isinstance(found.objective, SequenceClip) and found.corrections == (Icepop(low=0.5, high=5.0, level="sequence"),)


RECIPE_RULES = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, async_grpo: null, val_period: 0}
env: {math: {}}
data: {train: {dataset_name: OpenMathInstruct-2, env_name: math}}
cluster: {gpus_per_node: 2, backend: ray}
policy: {model_name: m, generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}}
async_rl: {%s, min_groups_for_streaming_train: 4, max_inflight_prompts: 8, max_buffered_rollouts: 24, stall_watchdog: {interval_s: 30.0}}
"""


@pytest.fixture
def load_sampler_section(tmp_path: Path) -> Any:
    def load_sampler(section: str) -> LoadedConfig[GrpoRunConfig]:
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE_RULES % section)
        return load_config(path, root=GrpoRunConfig)

    return load_sampler


def changed(loaded: LoadedConfig[Any]) -> dict[str, str]:
    return {difference.key: difference.text for difference in loaded.differences if difference.effect is Effect.CHANGED}


def test_batches_in_order_are_trained_on_in_order(load_sampler_section: Any) -> None:
    loaded = load_sampler_section(
        "sampler: {name: in_order, max_lookahead_versions: 2}, recompute_kv_cache_after_weight_updates: true"
    )
    section = loaded.config.grpo.async_grpo
    assert section.enabled and section.order == "fifo" and section.max_trajectory_age_steps == 2
    assert section.in_flight_weight_updates and section.recompute_kv_cache_after_weight_updates and not changed(loaded)


def test_no_lookahead_is_synchronous_training(load_sampler_section: Any) -> None:
    loaded = load_sampler_section("sampler: {name: in_order, max_lookahead_versions: 0}")
    assert not loaded.config.grpo.async_grpo.enabled and not changed(loaded)


def test_a_section_without_a_sampler_has_nemo_rl_s_default(load_sampler_section: Any) -> None:
    section = load_sampler_section("diagnostics: false").config.grpo.async_grpo
    assert section.enabled and section.order == "fifo" and section.max_trajectory_age_steps == 1


def test_what_gets_too_old_is_dropped_with_as_many_groups_buffered(load_sampler_section: Any) -> None:
    loaded = load_sampler_section("sampler: {name: windowed, max_staleness_versions: 1}")
    section = loaded.config.grpo.async_grpo
    assert section.order == "drop_too_old" and section.slots == 24 + 8 and not changed(loaded)


@pytest.mark.parametrize(("sampler", "order"), [("ready_first", "windowed"), ("weight_fifo", "fifo")])
def test_an_order_that_differs_a_little_is_said(load_sampler_section: Any, sampler: str, order: str) -> None:
    loaded = load_sampler_section(f"sampler: {{name: {sampler}}}")
    assert loaded.config.grpo.async_grpo.order == order and "async_rl.sampler.name" in changed(loaded)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("{name: custom, target: 'mine:Sampler'}", "no counterpart"),
        ("{name: windowed, sample_freshest_first: true}", "no counterpart"),
        ("{name: in_order, max_lookahead_versions: -1}", "at least 0"),
    ],
)
def test_a_sampler_without_a_counterpart_is_refused(load_sampler_section: Any, sampler: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_sampler_section(f"sampler: {sampler}")
    assert len(caught.value.problems) == 1


def test_two_sections_of_asynchronous_training_are_refused_as_by_nemo_rl(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text((RECIPE_RULES % "sampler: {name: in_order}").replace("async_grpo: null", "async_grpo: {enabled: true}"))
    with pytest.raises(ConfigError, match="reads async_rl alone"):
        load_config(path, root=GrpoRunConfig)
