"""A key that has no effect beside another one says so, and names both."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from support.overrides import RUN

P = "policy.sequence_packing."


def warnings(*overrides: str) -> list[tuple[str, str]]:
    return [(problem.key, problem.message) for problem in load_config(None, [*RUN, *overrides], root=GrpoRunConfig).warnings]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.train_micro_batch_size=8"], []),
        ([f"{P}train_mb_tokens=4096", f"{P}logprob_mb_tokens=8192"], []),
        (["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=2048"], []),  # it still sets the budget without gradients
        (["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=4096"], []),  # the same number twice
        (
            ["policy.train_micro_batch_size=8", f"{P}train_mb_tokens=2048", f"{P}logprob_mb_tokens=2048"],
            ["policy.train_micro_batch_size"],
        ),
        (["policy.logprob_batch_size=2", f"{P}logprob_mb_tokens=8192"], ["policy.logprob_batch_size"]),
        (["policy.dynamic_batching.train_mb_tokens=9999"], ["policy.dynamic_batching.train_mb_tokens"]),
        ([f"{P}train_mb_tokens=9999", "policy.dynamic_batching.train_mb_tokens=9999"], []),
        ([f"{P}enabled=false", f"{P}logprob_mb_tokens=9999"], [f"{P}logprob_mb_tokens"]),
    ],
)
def test_batch_sizes_beside_budgets_in_tokens(overrides: list[str], keys: list[str]) -> None:
    found = warnings(*overrides)
    assert [key for key, _ in found] == keys
    assert all("has no effect" in message and "mb_tokens = " in message for _, message in found)


@pytest.mark.parametrize(
    ("override", "off"),
    [
        ("policy.dtensor_cfg.lora_cfg.dim=16", "policy.dtensor_cfg.lora_cfg.enabled"),
        ("policy.ema.decay=0.5", "policy.ema.enabled"),
        ("grpo.reward_shaping.overlong_buffer_length=64", "grpo.reward_shaping.enabled"),
    ],
)
def test_keys_of_a_section_that_is_off(override: str, off: str) -> None:
    (found,) = warnings(override)
    assert found == (override.partition("=")[0], f"{override.partition('=')[0]} has no effect: {off} is false")


@pytest.mark.parametrize("section", ["sft", "dpo", "rm"])
def test_the_micro_batch_of_validation_names_what_cuts_it(section: str) -> None:
    kind: Any = TRAINING_RUNS[section]
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "data.validation.dataset_name=squad"]
    (problem,) = load_config(None, [*base, f"{section}.val_micro_batch_size=4"], root=kind).warnings
    assert (
        problem.key == f"{section}.val_micro_batch_size" and "policy.sequence_packing.logprob_mb_tokens = 2048" in problem.message
    )


def test_a_reward_model_that_is_turned_off_is_refused() -> None:
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "rm.val_period=0"]
    with pytest.raises(ConfigError, match=r"reward_model_cfg\.enabled: found false, but strop rm trains"):
        load_config(None, [*base, "policy.reward_model_cfg.enabled=false"], root=TRAINING_RUNS["rm"])
