"""Bad input through the command line: a message that names the fault and exit code 1 or 2, or a counted drop. Never a traceback alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop.runs import Environ, Outcome, grpo, metrics_of, overrides, strop
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

    def prompt(self, task):
        self.fail("prompt", task)
        return super().prompt(task)

    async def respond(self, task, rollout):
        self.fail("respond", task)

    @reward()
    def length(self, task, rollout):
        self.fail("reward", task)
        return len(rollout.text)
"""
ALGORITHM = """
from dataclasses import dataclass
from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.advantages.grpo import GRPO

@dataclass(frozen=True, kw_only=True)
class Strong(GRPO):
    strength: float = 1.0

@dataclass(frozen=True, kw_only=True)
class Needs(GRPO):
    something: int

class Unmarked(GRPO):
    strength: float = 1.0

@dataclass(frozen=True, kw_only=True)
class Mean(GRPO):
    def loss(self, outputs, batch):
        return -outputs.logprobs.mean(), {}

@dataclass(frozen=True, kw_only=True)
class Half(Algorithm):
    def advantages(self, group):
        return group.rewards
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


def test_an_unknown_key_is_refused_with_the_nearest_one(refused):
    assert "Did you mean grpo.num_prompts_per_step?" in refused(2, **{"grpo.num_promts_per_step": 3})


def test_a_wrong_type_is_refused_with_the_right_one(refused):
    assert "grpo.num_prompts_per_step: found 'many' (a text); it must be int >= 1" in refused(
        2, **{"grpo.num_prompts_per_step": "many"}
    )


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    outcome = strop("grpo", "--config", "nowhere.yaml", folder=tmp_path)
    assert "there is no file nowhere.yaml" in message_of(outcome, 2)


def test_a_group_of_one_cannot_be_normalised(refused):
    said = refused(2, **{"grpo.num_generations_per_prompt": 1})
    assert "the group size is 1" in said and "raise num_generations_per_prompt to 2 or more" in said


def test_a_cache_that_holds_no_sequence_says_what_to_raise(refused):
    said = refused(1, **{"policy.generation.torch_cfg.kv_cache_memory_gb": 1e-6})
    assert "policy.generation.torch_cfg.kv_cache_memory_gb" in said and "raise the first or lower the second" in said


def test_an_argument_that_the_optimizer_does_not_take_is_named(refused):
    changes = {"policy.optimizer.kwargs.lr": ..., "policy.optimizer.kwargs": {"lr": 0.1, "speed": 3}}
    assert "policy.optimizer.kwargs.speed: torch.optim.AdamW takes" in refused(2, **changes)


def test_a_metric_to_stop_at_that_does_not_exist_is_named_after_the_first_validation(refused):
    changes = {"grpo.stop_at_validation_metric": "acuracy", "grpo.stop_at_validation_threshold": 0.5}
    assert "there is no metric validation/acuracy; there are validation/accuracy" in refused(1, **changes)


# --- data -----------------------------------------------------------------------------------------------------------------------


def test_a_missing_dataset_is_named(refused):
    assert "data.train.dataset_name: there is no file rows.jsonl" in refused(2, **ROWS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'rows.jsonl' is empty; a dataset needs at least one row"),
        ("\n\n", "'rows.jsonl' has no rows"),
        (GOOD + "{oops\n" + GOOD, "rows.jsonl:2 is not JSON"),
        (GOOD + "[1, 2]\n", "rows.jsonl:2 is a JSON list, not an object"),
        (GOOD + '{"question": "x", "answer": "2"}\n', "rows.jsonl:2 has no key 'problem'; its keys are ['answer', 'question']"),
        (GOOD + '{"problem": " ", "answer": "2"}\n', "rows.jsonl:2: 'problem' is empty"),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_line(refused, text, said):
    assert said in refused(1, {"rows.jsonl": text}, **ROWS)


def test_prompts_that_are_all_too_long_stop_the_run_with_the_limit(refused):
    said = refused(1, {"rows.jsonl": LONG * 20}, **ROWS)
    assert "16 groups in a row failed" in said and "PromptTooLong: the prompt of task" in said
    assert "at most 60 fit (data.max_input_seq_length, policy.max_total_sequence_length)" in said


def test_a_few_prompts_that_are_all_too_long_do_not_pass_for_a_finished_run(refused):
    said = refused(1, {"rows.jsonl": LONG * 5}, **ROWS)
    assert "nothing was trained" in said and "5 groups were dropped" in said and "PromptTooLong" in said


def test_fewer_tasks_than_a_step_needs_do_not_pass_for_a_finished_run(refused):
    said = refused(1, {"rows.jsonl": GOOD * 3}, **ROWS)
    assert "nothing was trained" in said and "grpo.num_prompts_per_step" in said and "grpo.max_num_epochs" in said


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
        pytest.param("prompt", "KeyError: 'the table of answers is gone'", marks=pytest.mark.exhaustive),
        pytest.param("respond", "KeyError: 'the table of answers is gone'", marks=pytest.mark.exhaustive),
        ("task", "of the stream could not be created: KeyError: 'the table of answers is gone'"),
    ],
)
def test_an_environment_that_always_raises_stops_the_run_in_its_own_words(refused, where, said):
    message = refused(1, {"mine.py": ENVIRONMENT}, **MINE, **{"env.mine.where": where})
    assert "16 groups in a row failed" in message and said in message and "the table of answers is gone" in message
    assert "STROP_LOG=debug" in message


@pytest.mark.parametrize("where", ["reward", "task"])
def test_an_environment_that_sometimes_raises_is_counted_and_the_run_goes_on(tiny, tmp_path, where):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    outcome = grpo(tiny, tmp_path, **MINE, **{"env.mine.where": where, "env.mine.every": 3})
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


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine.py:Mine", "def broken(:\n", "env.mine.type: mine.py:Mine: importing 'mine.py' failed: SyntaxError"),
        ("mine.py:Mein", ENVIRONMENT, "'mine.py' has no 'Mein'; did you mean 'Mine'?"),
        ("other.py:Mine", ENVIRONMENT, "there is no file"),
        ("nowhere.at.all:Mine", ENVIRONMENT, "No module named 'nowhere'"),
        ("arithmetics", ENVIRONMENT, "there is no environment 'arithmetics'; did you mean 'arithmetic'?"),
    ],
)
def test_an_environment_that_cannot_be_found_is_named(refused, name, text, said):
    assert said in refused(2, {"mine.py": text}, **{**MINE, "env.mine.type": name})


def test_an_option_that_the_environment_does_not_have_is_named(refused):
    assert "has no option 'max_operant'; did you mean 'max_operand'?" in refused(1, **{"env.arithmetic.max_operant": 3})


# --- models and checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_model_folder_that_is_not_there_is_named(refused):
    assert "policy.model_name: there is no folder ./no/such/model" in refused(2, **{"policy.model_name": "./no/such/model"})


def test_a_folder_that_holds_no_model_is_named(refused, tmp_path):
    assert str(tmp_path) in refused(2, **{"policy.model_name": str(tmp_path)})


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


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("gprpo", {}, "algorithm.name: 'gprpo' is neither one of Strop's algorithms nor module:Class; did you mean 'grpo'?"),
        ("mine.py:Stronk", {}, "'mine.py' has no 'Stronk'; did you mean 'Strong'?"),
        ("nowhere:Mine", {}, "No module named 'nowhere'"),
        ("mine.py:dataclass", {}, "is not a subclass of strop.algorithms.base.Algorithm"),
        (
            "mine.py:Strong",
            {"strenght": 2},
            "algorithm.kwargs.strenght: mine.py:Strong has no such field; did you mean 'strength'?",
        ),
        ("mine.py:Strong", {"strength": "big"}, "algorithm.kwargs.strength: found 'big': Input should be a valid number"),
        ("mine.py:Needs", {}, "algorithm.kwargs: mine.py:Needs needs something"),
        ("mine.py:Unmarked", {}, "has options but is not decorated with @dataclass"),
        ("mine.py:Half", {}, "mine.py:Half does not define loss, which every algorithm must define"),
        ("grpo", {"objective": {"hihg": 1}}, "algorithm.kwargs.objective.hihg: Clip has no such option; did you mean 'high'?"),
    ],
)
def test_an_algorithm_that_cannot_be_made_is_refused(refused, name, kwargs, said):
    assert said in refused(2, {"mine.py": ALGORITHM}, **{"algorithm.name": name, "algorithm.kwargs": kwargs})


def test_a_loss_that_depends_on_how_a_batch_is_cut_is_refused_before_the_first_step(refused, tmp_path):
    message = refused(1, {"mine.py": ALGORITHM}, **{"algorithm.name": "mine.py:Mean"})
    assert "the loss of Mean depends on how a batch is cut" in message and "Divide by batch.totals" in message
    assert not list(tmp_path.glob("**/step_*"))


# --- evaluation -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"generation.model_name": "./nothing"}, 2, "there is no folder ./nothing"),
        ({"eval.num_tests_per_promt": 3}, 2, "Did you mean eval.num_tests_per_prompt?"),
        ({"data.env_name": "maths"}, 2, "found 'maths'"),
        ({"eval.metric": "cons@k"}, 1, "votes on final answers, and the environment defines no answer_key"),
    ],
)
def test_an_evaluation_that_cannot_be_done_is_refused(tiny, tmp_path, changes, code, said):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    settings = {
        "generation.model_name": str(tiny),
        "generation.vllm_cfg.max_model_len": 64,
        "generation.precision": "float32",
        "generation.max_new_tokens": 4,
        "generation.torch_cfg.kv_cache_memory_gb": 0.01,
        "data.env_name": "mine",
        "data.max_input_seq_length": 60,
        "data.size": 4,
        "env.mine.type": "mine.py:Mine",
        "env.mine.where": "nowhere",
    }
    assert said in message_of(strop("eval", *overrides({**settings, **changes}), folder=tmp_path), code)


def test_a_plot_of_a_folder_without_metrics_says_so(tmp_path):
    assert "metrics.jsonl" in message_of(strop("plot", str(tmp_path), folder=tmp_path), 2)
