"""A key of TRL in a configuration of Strop is answered with what it is here."""

from __future__ import annotations

import pytest

from strop.config import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.problems import ConfigError


@pytest.mark.parametrize(
    ("section", "written", "hint"),
    [
        ("grpo", "max_steps=20", "TRL's max_steps: grpo.max_num_steps=20 here, 20 optimizer steps."),
        ("grpo", "num_generations=4", "TRL's num_generations: grpo.num_generations_per_prompt=4 here."),
        ("grpo", "grpo.beta=0.04", "TRL's beta: loss_fn.reference_policy_kl_penalty=0.04 here."),
        ("grpo", "beta=0.04", "TRL's beta: loss_fn.reference_policy_kl_penalty=0.04 here."),
        ("dpo", "dpo.beta=0.2", "TRL's beta: dpo.reference_policy_kl_penalty=0.2 here."),
        ("grpo", "max_completion_length=64", "TRL's max_completion_length: policy.generation.max_new_tokens=64 here."),
        ("grpo", "grpo.scale_rewards=false", "algorithm.advantage.name=group_relative here, with normalize=false."),
        ("grpo", "gradient_accumulation_steps=2",
         "policy.train_global_batch_size=16 here. That is with TRL's defaults for the rest."),
        ("grpo", "per_device_train_batch_size=4", "Look at policy.train_global_batch_size and policy.train_micro_batch_size."),
        ("sft", "max_length=512", "TRL's max_length: policy.max_total_sequence_length=512 here"),
        ("sft", "logging_steps=1", "TRL's logging_steps: every step is logged"),
        ("rm", "rm.center_rewards_coefficient=0.01", "TRL's center_rewards_coefficient: rm.centering=0.01 here."),
        ("grpo", "vllm_mode=colocate", "TRL's vllm_mode: it has its default there, for which nothing is set here."),
        ("grpo", "max_steps=often", "It is an argument of TRL's; `strop translate` says what becomes of it in a file."),
        ("grpo", "policy.generation.max_completion_length=64", "The keys of policy.generation are"),
        ("ppo", "scale_rewards=false", "The sections are"),
    ],
)  # fmt: skip
def test_a_word_of_trl_is_told_what_it_is_here(section: str, written: str, hint: str) -> None:
    given = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*(given if section in ("grpo", "ppo") else given[:1]), written], root=TRAINING_RUNS[section])
    (problem,) = [each for each in refused.value.problems if each.key == written.partition("=")[0]]
    assert hint in problem.fix and problem.message == "there is no such key"
