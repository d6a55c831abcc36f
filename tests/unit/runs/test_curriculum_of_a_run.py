"""The tasks of a run with a curriculum: from the configuration to the mixture, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.config import GrpoRunConfig, load_config
from strop.data.sources.records import DataError
from strop.environments.base import EnvironmentConfigError
from strop.runs.rollout_run import describe_order
from strop.runs.tasks import make_training_tasks, make_validation_tasks

SUMS = ("data.train.env_name=arithmetic", "data.validation.env_name=arithmetic", "env.arithmetic={}", "policy.model_name=m")
BY_SUCCESS = "data.curriculum.name=success_rate"


def config(*overrides: str) -> GrpoRunConfig:
    return load_config(None, [*SUMS, "grpo.num_prompts_per_step=4", *overrides], root=GrpoRunConfig).config


def test_training_has_a_curriculum_over_the_slots_of_its_stream_and_validation_has_none() -> None:
    found = config(BY_SUCCESS, "data.curriculum.reward=correct", "data.validation.size=5")
    training, validation = make_training_tasks(found), make_validation_tasks(found)
    assert training.chooser is not None and training.chooser.name == "success_rate" and training.scored_by == "correct"
    assert validation is not None and validation.chooser is None and not validation.resumable
    assert make_training_tasks(config()).chooser is None


def test_a_reward_that_an_environment_lacks_is_an_error() -> None:
    with pytest.raises(
        EnvironmentConfigError, match=r"data\.curriculum\.reward is 'corect', and env\.arithmetic has no such reward; did you"
    ):
        make_training_tasks(config(BY_SUCCESS, "data.curriculum.reward=corect"))


def test_difficulty_is_read_from_the_rows(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": str(n), "level": n % 3} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (f"data.train.dataset_name={tmp_path}/rows.jsonl", "data.train.env_name=math", "env.math={}")
    by = ("data.curriculum.name=difficulty", "data.curriculum.difficulty.start=0.3", "data.curriculum.difficulty.by=level")
    tasks = make_training_tasks(config(*data, *by))
    assert {tasks.at(position)[2].metadata["level"] for position in range(4)} == {0}
    with pytest.raises(DataError, match="has no column 'grade'; there are: problem, answer, level"):
        make_training_tasks(config(*data, *by[:2], "data.curriculum.difficulty.by=grade"))


def test_a_run_says_what_an_epoch_is() -> None:
    assert describe_order(config()) == ""
    said = describe_order(config(BY_SUCCESS, "grpo.max_num_epochs=3"))
    assert said == (
        "; the curriculum success_rate draws them with replacement, and an epoch is as many draws as there are tasks, 3 "
        "(max_num_epochs) in all"
    )
