"""The training sections of a recipe: numbers that stand for "off", failures, shaping, and what only NeMo-Gym can do."""

from __future__ import annotations

from typing import Any

import pytest

from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import SoftOverlong
from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.extensions.recipes.difference import Effect
from strop.runs.algorithm.run_algorithm import make_run_algorithm

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
