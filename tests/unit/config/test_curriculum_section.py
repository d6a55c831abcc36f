"""Sections ``data.curriculum`` and quotas of entries: what fits together, and what the messages say."""

from __future__ import annotations

from typing import Any

import pytest

from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS

QUICK = "examples/configs/quickstart.yaml"
TWO = "data.train=[{env_name: arithmetic, prompts_per_step: 3}, {env_name: arithmetic, prompts_per_step: 1}]"


def load(*overrides: str, kind: str = "grpo") -> LoadedConfig[Any]:
    return load_config(QUICK if kind == "grpo" else None, overrides, root=TRAINING_RUNS[kind])


def refused(*overrides: str, kind: str = "grpo") -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, kind=kind)
    return " ".join("\n".join(str(problem) for problem in caught.value.problems).split())


def warned(*overrides: str) -> str:
    return "\n".join(str(problem) for problem in load(*overrides).warnings)


def test_quotas_that_add_up_to_a_step_are_the_shares() -> None:
    found = load(TWO, "grpo.num_prompts_per_step=4").config
    assert [entry.share for entry in found.data.train] == [3, 1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [TWO, "grpo.num_prompts_per_step=8"],
            "data.train.0.prompts_per_step: the entries of data.train have 3 + 1 = 4 groups per step, but grpo.num_prompts_per_step is 8 "
            "Set grpo.num_prompts_per_step=4, or prompts_per_step of the entries so that they add up to 8.",
        ),
        (["data.train=[{env_name: arithmetic, prompts_per_step: 3}, {env_name: arithmetic}]"],
         "data.train: some entries have prompts_per_step and some do not ([3, None])"),
        (["data.train.prompts_per_step=4", "data.train.weight=2", "grpo.num_prompts_per_step=4"],
         "data.train.weight: found 2.0, but prompts_per_step=4"),
        (["data.curriculum.name=success"],
         "data.curriculum.name: found 'success', which is no curriculum; did you mean 'success_rate'?"),
        (["data.curriculum.name=difficulty"], "data.curriculum.difficulty.by: found null"),
        (["data.curriculum.name=success_rate", "data.curriculum.success_rate.decay=0"],
         "data.curriculum.success_rate.decay: found 0"),
        (["data.curriculum.success_rate.repeat=3"], "repeats"),
    ],
)  # fmt: skip
def test_what_cannot_work_says_what_to_set(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


def test_recorded_data_has_quotas_and_no_curriculum() -> None:
    model = ("policy.model_name=m", "sft.val_period=0", "checkpointing.enabled=false")
    two = "data.train=[{dataset_name: squad, prompts_per_step: 24}, {dataset_name: squad, prompts_per_step: 8}]"
    found = load(*model, two, "policy.train_global_batch_size=32", kind="sft").config
    assert [entry.share for entry in found.data.train] == [24, 8]
    assert "policy.train_global_batch_size is null Set policy.train_global_batch_size=32." in refused(
        *model, two, "policy.train_global_batch_size=null", kind="sft"
    )
    curriculum = ("data.train.dataset_name=squad", "data.curriculum.name=success_rate")
    assert "a curriculum chooses tasks to sample, and sft reads recorded data" in refused(*model, *curriculum, kind="sft")


def test_keys_that_change_nothing_are_warned_about() -> None:
    assert "data.curriculum.difficulty.steps has no effect: data.curriculum.name is none" in warned(
        "data.curriculum.difficulty.steps=5"
    )
    unused = ("data.curriculum.name=success_rate", "data.curriculum.difficulty.steps=5", "data.curriculum.kwargs={a: 1}")
    assert (
        "data.curriculum.difficulty.steps, data.curriculum.kwargs have no effect: data.curriculum.name is success_rate"
        in warned(*unused)
    )
    by = ("data.curriculum.name=difficulty", "data.curriculum.difficulty.by=level", "data.curriculum.reward=correct")
    assert "data.curriculum.reward has no effect: data.curriculum.name is difficulty" in warned(*by)
    assert "data.validation.prompts_per_step: it has no effect" in warned("data.validation.prompts_per_step=4")
    assert "curriculum" not in warned("data.curriculum.name=success_rate", "data.curriculum.reward=correct")
