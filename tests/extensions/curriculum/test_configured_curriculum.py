"""``data.curriculum`` of a configuration: what is refused, warned about, and made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.data.sources.records import DataError
from strop.environments.base import EnvironmentConfigError
from strop.extensions.curriculum.task_chooser import CurriculumChooser
from strop.runs.rollout_run import describe_order
from strop.runs.tasks import make_training_tasks, make_validation_tasks

SUMS = ("data.train.env_name=arithmetic", "data.validation.env_name=arithmetic", "env.arithmetic={}", "policy.model_name=m")
BY_SUCCESS = "data.curriculum.name=success_rate"


def curriculum_config(*overrides: str) -> GrpoRunConfig:
    return load_config(None, [*SUMS, "grpo.num_prompts_per_step=4", *overrides], root=GrpoRunConfig).config


def test_training_has_a_curriculum_over_the_slots_of_its_stream_and_validation_has_none() -> None:
    found = curriculum_config(BY_SUCCESS, "data.curriculum.reward=correct", "data.validation.size=5")
    training, validation = make_training_tasks(found), make_validation_tasks(found)
    assert (
        isinstance(training.chooser, CurriculumChooser)
        and training.chooser.name == "success_rate"
        and training.chooser.scored_by == "correct"
    )
    assert validation is not None and validation.chooser is None and not validation.resumable
    assert make_training_tasks(curriculum_config()).chooser is None


def test_a_reward_that_an_environment_lacks_is_an_error() -> None:
    with pytest.raises(
        EnvironmentConfigError, match=r"data\.curriculum\.reward is 'corect', and env\.arithmetic has no such reward; did you"
    ):
        make_training_tasks(curriculum_config(BY_SUCCESS, "data.curriculum.reward=corect"))


def test_difficulty_is_read_from_the_rows(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": str(n), "level": n % 3} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (f"data.train.dataset_name={tmp_path}/rows.jsonl", "data.train.env_name=math", "env.math={}")
    by = ("data.curriculum.name=difficulty", "data.curriculum.difficulty.start=0.3", "data.curriculum.difficulty.by=level")
    tasks = make_training_tasks(curriculum_config(*data, *by))
    assert {tasks.at(position)[2].metadata["level"] for position in range(4)} == {0}
    with pytest.raises(DataError, match="has no column 'grade'; there are: problem, answer, level"):
        make_training_tasks(curriculum_config(*data, *by[:2], "data.curriculum.difficulty.by=grade"))


def test_a_run_says_what_an_epoch_is() -> None:
    assert describe_order(curriculum_config()) == ""
    said = describe_order(curriculum_config(BY_SUCCESS, "grpo.max_num_epochs=3"))
    assert said == (
        "; the curriculum success_rate draws them with replacement, and an epoch is as many draws as there are tasks, 3 "
        "(max_num_epochs) in all"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["name=success"], "data.curriculum.name: found 'success', which is no curriculum; did you mean 'success_rate'?"),
        (["name=difficulty"], "data.curriculum.difficulty.by: found null"),
        (["name=success_rate", "success_rate.decay=0"], "data.curriculum.success_rate.decay: found 0"),
        (["success_rate.repeat=3"], "repeats"),
    ],
)
def test_what_cannot_work_says_what_to_set(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        curriculum_config(*(f"data.curriculum.{each}" for each in overrides))
    assert said in str(refused.value)


def test_recorded_data_has_no_curriculum() -> None:
    settings = [
        "policy.model_name=m",
        "sft.val_period=0",
        "checkpointing.enabled=false",
        "data.train.dataset_name=squad",
        BY_SUCCESS,
    ]
    with pytest.raises(ConfigError, match="a curriculum chooses tasks to sample, and sft reads recorded data"):
        load_config(None, settings, root=TRAINING_RUNS["sft"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["difficulty.steps=5"], "data.curriculum.difficulty.steps has no effect: data.curriculum.name is none"),
        (
            ["name=success_rate", "difficulty.steps=5", "kwargs={a: 1}"],
            "data.curriculum.difficulty.steps, data.curriculum.kwargs have no effect: data.curriculum.name is success_rate",
        ),
        (
            ["name=difficulty", "difficulty.by=level", "reward=correct"],
            "data.curriculum.reward has no effect: data.curriculum.name is difficulty",
        ),
        (["name=success_rate", "reward=correct"], ""),
    ],
)
def test_keys_that_change_nothing_are_warned_about(overrides: list[str], said: str) -> None:
    settings = [*SUMS, *(f"data.curriculum.{each}" for each in overrides)]
    warned = " ".join(map(str, load_config(None, settings, root=GrpoRunConfig).warnings))
    assert said in warned if said else "curriculum" not in warned
