"""Bad input through the command line: a message that names the fault and exit code 1 or 2, or a counted drop. Never a traceback alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Environ, Outcome, grpo, metrics_of
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow

GOOD = '{"problem": "1+1", "answer": "2"}\n'
LONG = json.dumps({"problem": "9" * 90, "answer": "9"}) + "\n"

ENVIRONMENT = """
from dataclasses import dataclass
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Task

@dataclass(frozen=True, kw_only=True)
class Mine(Environment[Task]):
    where: str = "reward"
    every: int = 1

    def fail(self, where, task):
        if where == self.where and int(task.id) % self.every == 0:
            raise KeyError("the table of answers is gone")

    def tasks(self, data):
        if self.where == "tasks":
            raise KeyError("the table of answers is gone")
        def make(index):
            task = Task(id=str(index), question=str(index))
            self.fail("task", task)
            return task
        return GeneratedTasks(100, make)

    @reward()
    def length(self, task, rollout):
        self.fail("reward", task)
        return len(rollout.text)
"""
ALGORITHM = """
from dataclasses import dataclass
from strop.algorithms.policy_gradient.grpo import GRPO

@dataclass(frozen=True, kw_only=True)
class Mean(GRPO):
    def loss(self, outputs, batch):
        return -outputs.logprobs.mean(), {}
"""
WITHOUT_ARITHMETIC: dict[str, Any] = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "grpo.val_period": 0,
    "checkpointing.metric_name": None,
}
ROWS = {
    **WITHOUT_ARITHMETIC,
    "data.train.env_name": "math",
    "env.math.verifier": "exact",
    "data.train.dataset_name": "rows.jsonl",
    "grpo.max_num_epochs": 1,
}
MINE = {**WITHOUT_ARITHMETIC, "data.train.env_name": "mine", "env.mine.type": "mine.py:Mine"}


@pytest.fixture
def refused(tiny: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs with these files and settings; what was said, if it was said properly."""

    def run(code: int, files: dict[str, str] | None = None, before: Callable[[], None] | None = None, **changes: Any) -> str:
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text)
        return message_of(grpo(tiny, tmp_path, before=before, **changes), code)

    return run


def message_of(outcome: Outcome, code: int) -> str:
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err and outcome.err.startswith("error: "), outcome.err
    assert len(outcome.err) < 2500
    return outcome.err


# --- configuration ------------------------------------------------------------------------------------------------------------


def test_a_cache_that_holds_no_sequence_says_what_to_raise(refused):
    said = refused(1, **{"policy.generation.torch_cfg.kv_cache_memory_gb": 1e-6})
    assert "policy.generation.torch_cfg.kv_cache_memory_gb" in said and "raise the first or lower the second" in said


# --- data -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.extensions
def test_prompts_that_are_all_too_long_stop_the_run_with_the_limit(refused):
    said = refused(1, {"rows.jsonl": LONG * 20}, **ROWS)
    assert "16 groups in a row failed" in said and "PromptTooLong: the prompt of task" in said
    assert "at most 60 fit (data.max_input_seq_length, policy.max_total_sequence_length)" in said


@pytest.mark.exhaustive
def test_a_few_prompts_that_are_all_too_long_do_not_pass_for_a_finished_run(refused):
    said = refused(1, {"rows.jsonl": LONG * 5}, **ROWS)
    assert "nothing was trained" in said and "5 groups were dropped" in said and "PromptTooLong" in said


@pytest.mark.exhaustive
def test_fewer_tasks_than_a_step_needs_do_not_pass_for_a_finished_run(refused):
    said = refused(1, {"rows.jsonl": GOOD * 3}, **ROWS)
    assert "nothing was trained" in said and "grpo.num_prompts_per_step" in said and "grpo.max_num_epochs" in said


@pytest.mark.extensions
def test_a_prompt_that_is_too_long_is_dropped_counted_and_stored(tiny, tmp_path):
    (tmp_path / "rows.jsonl").write_text((GOOD + GOOD + LONG) * 4)
    outcome = grpo(tiny, tmp_path, **ROWS)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    stored = [record for record in RolloutStore(tmp_path / "logs").read_all() if not record.kept]
    groups = {record.group for record in stored}
    assert sum(line["train/groups_dropped_for_errors"] for line in metrics.values()) == len(groups) > 0
    assert all("PromptTooLong" in str(record.error) for record in stored)


# --- environments -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reward", "RewardError: Mine.length raised KeyError on task"),
        ("task", "of the stream could not be created: KeyError: 'the table of answers is gone'"),
    ],
)
def test_an_environment_that_always_raises_stops_the_run_in_its_own_words(refused, where, said):
    message = refused(1, {"mine.py": ENVIRONMENT}, **MINE, **{"env.mine.where": where})
    assert "16 groups in a row failed" in message and said in message and "the table of answers is gone" in message
    assert "STROP_LOG=debug" in message


def test_a_task_that_sometimes_cannot_be_made_is_counted_and_the_run_goes_on(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    outcome = grpo(tiny, tmp_path, **MINE, **{"env.mine.where": "task", "env.mine.every": 3})
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert len(metrics) == 6 and sum(line["train/groups_dropped_for_errors"] for line in metrics.values()) > 0


def test_an_environment_that_has_no_tasks_to_give_is_refused(refused):
    message = refused(1, {"mine.py": ENVIRONMENT}, **MINE, **{"env.mine.where": "tasks"})
    assert "env.mine: Mine.tasks raised KeyError: 'the table of answers is gone'" in message


@pytest.mark.exhaustive
def test_whoever_asks_is_shown_where_an_error_was_raised(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    outcome = grpo(tiny, tmp_path, before=Environ({"STROP_LOG": "debug"}), **MINE)
    assert outcome.code == 1 and 'raise KeyError("the table of answers is gone")' in outcome.err


# --- models and checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_hub_name_without_network_says_what_was_tried(refused):
    said = refused(1, before=Environ({"HF_ENDPOINT": "http://127.0.0.1:9"}), **{"policy.model_name": "acme/never-heard-of"})
    assert "acme/never-heard-of is neither a local folder nor in the local hub cache" in said
    assert "set policy.model_name to a folder with the model" in said


TWO_STEPS = {"grpo.max_num_steps": 2, "checkpointing.save_period": 1, "checkpointing.keep_top_k": None}


@pytest.fixture(scope="module")
def two_steps(tiny, tmp_path_factory):
    """A run that saved both of its steps."""
    folder = tmp_path_factory.mktemp("two_steps")
    assert grpo(tiny, folder, **TWO_STEPS).code == 0
    return folder


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param("state.pt", "cut", marks=pytest.mark.exhaustive),
        pytest.param("state.pt", "scrambled", marks=pytest.mark.exhaustive),
        pytest.param("policy/optimizer.pt", "scrambled", marks=pytest.mark.exhaustive),
        pytest.param("policy/weights/model.safetensors", "scrambled", marks=pytest.mark.exhaustive),
        ("policy/weights/model.safetensors", "gone"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_can_be_used(tiny, two_steps, tmp_path, file, damage):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    changes = TWO_STEPS
    before = metrics_of(tmp_path / "logs")
    path = tmp_path / "results" / "step_2" / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else os.urandom(len(content)))
    said = message_of(grpo(tiny, tmp_path, **{**changes, "grpo.max_num_steps": 3}), 1)
    assert "step_2 cannot be resumed from: " in said and "remove that folder to go back to the previous checkpoint" in said
    assert metrics_of(tmp_path / "logs") == before, "nothing is lost"
    (tmp_path / "results" / "step_2").rename(tmp_path / "broken")
    assert grpo(tiny, tmp_path, **changes).code == 0
    assert metrics_of(tmp_path / "logs")[2]["train/loss"] == before[2]["train/loss"]


@pytest.mark.exhaustive
def test_starting_over_in_the_same_folders_writes_over_nothing(tiny, tmp_path):
    changes = {"grpo.max_num_steps": 2, "logger.console": "plain"}
    assert grpo(tiny, tmp_path, **changes).code == 0
    first = metrics_of(tmp_path / "logs")
    outcome = grpo(tiny, tmp_path, **changes, **{"checkpointing.resume": False, "grpo.seed": 7})
    assert outcome.code == 0 and "moved the checkpoints of an earlier run to results/previous_1" in outcome.out
    assert metrics_of(tmp_path / "logs" / "previous_1") == first
    assert metrics_of(tmp_path / "logs")[2]["train/loss"] != first[2]["train/loss"]
    assert (tmp_path / "results" / "previous_1" / "step_2").exists() and (tmp_path / "results" / "step_2").exists()
    for file in ("config.yaml", "rollouts", "validation"):
        assert (tmp_path / "logs" / "previous_1" / file).exists()


# --- algorithms -----------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_depends_on_how_a_batch_is_cut_is_refused_before_the_first_step(refused, tmp_path):
    message = refused(1, {"mine.py": ALGORITHM}, **{"algorithm.name": "mine.py:Mean"})
    assert "the loss of Mean depends on how a batch is cut" in message and "Divide by batch.totals" in message
    assert not list(tmp_path.glob("**/step_*"))
