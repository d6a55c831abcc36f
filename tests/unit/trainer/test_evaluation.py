"""pass@k, avg@n and cons@k, and what is written down of every sample."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass

import pytest

from loop.fakes import FakeGenerator, Letters, Recorder, Tasks
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.environments.base import reward
from strop.environments.handle import LocalEnvironment
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.validation_samples import ValidationSamples
from strop.rollouts.episode import EpisodeRules
from strop.sampling import Sampling
from strop.statistics import TaskResult, pass_at_k, summarize_results
from strop.trainer.evaluation import Evaluator
from strop.types import Rollout, Task, user

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [1] * correct + [0] * (samples - correct)
        choices = list(itertools.combinations(outcomes, k))
        brute = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(samples, correct, k) == pytest.approx(brute)


@pytest.mark.parametrize(
    ("answers", "accuracies", "voters", "consensus"),
    [
        (("1", "2", "2"), (1, 0, 0), None, 0),
        (("1", "2", "2"), (0, 1, 1), None, 1),
        (("1", "2"), (1, 0), None, 1),  # a tie: the earlier answer
        (("2", "1"), (0, 1), None, 0),
        (("3", "2", "1", "1", "2"), (0, 0, 1, 1, 0), None, 0),  # 2 and 1 tie: 2 came first
        ((None, None, "5"), (0, 0, 1), None, 1),  # who gave no answer does not vote
        ((None, None), (0, 0), None, 0),
        (("1", "2", "2"), (1, 0, 0), 1, 1),  # only the first votes
        ((None, "2"), (0, 1), 1, 0),
    ],
)
def test_the_most_frequent_answer_wins(answers, accuracies, voters, consensus):
    assert TaskResult("e", accuracies, answers).consensus(voters) == consensus


def test_summaries_are_means_over_tasks():
    results = [
        TaskResult("e", (1.0, 0.0, 0.0, 0.0), ("7", "8", "8", None)),
        TaskResult("e", (1.0, 1.0, 1.0, 0.5), ("7", "7", "7", "8")),
    ]
    found = summarize_results(results, (1, 2, 4), (1, 4))
    assert found == pytest.approx(
        {
            "accuracy": (0.25 + 3.5 / 4) / 2,
            "avg@4": (0.25 + 3.5 / 4) / 2,
            "pass@1": (0.25 + 0.75) / 2,
            "pass@2": (0.5 + 1) / 2,
            "pass@4": 1.0,
            "cons@1": 1.0,
            "cons@4": 0.5,
        }
    )


def test_answers_that_nobody_gives_are_not_voted_on():
    results = [TaskResult("e", (1.0, 0.0), (None, None))]
    assert not any(name.startswith("cons") for name in summarize_results(results, (1, 2), (2,)))
    assert summarize_results(results, ()) == {"accuracy": 0.5}


@dataclass(frozen=True, kw_only=True)
class Voting(Letters):
    def answer_key(self, task: Task, rollout: Rollout) -> str | None:
        return rollout.text[:1] or None


def evaluator(folder=None, *, environment=None, size=6, samples=3, **changes) -> Evaluator:
    environment = environment or Voting(broken=(2,))
    return Evaluator(
        **{
            "source": Tasks(LocalEnvironment(environment), environment.tasks(DataSource(size=size))),
            "size": size,
            "samples": samples,
            "generator": FakeGenerator(TOKENIZER),
            "template": ChatTemplate(TOKENIZER),
            "sampling": Sampling(max_new_tokens=8),
            "rules": EpisodeRules(max_length=100),
            "seed": 5,
            "folder": folder,
            **changes,
        }
    )


def test_every_sample_is_written_down(tmp_path):
    found = asyncio.run(evaluator(tmp_path).evaluate(12))
    written = json.loads((tmp_path / "step_000012.json").read_text())
    assert written["step"] == 12 and len(written["tasks"]) == 6
    assert {f"validation/{name}": value for name, value in written["metrics"].items()}.items() <= found.items()
    for place, task in enumerate(written["tasks"]):
        assert task["task"] == str(place) and task["environment"] == "letters" and len(task["samples"]) == 3
        for sample in task["samples"]:
            assert [message["role"] for message in sample["messages"]] == ["user", "assistant"]
            assert sample["messages"][0]["content"] == f"task {place}"
            if place == 2:
                assert "the verifier of task 2 is broken" in sample["error"] and sample["accuracy"] is None
                assert sample["ending"] == "error" and sample["answer"] is None
            else:
                text = sample["completion"]
                assert sample["accuracy"] == sample["rewards"]["share"] == sample["reward"] == text.count("a") / len(text)
                assert sample["tokens"] == len(text) + 1 and sample["error"] is None and sample["answer"] == text[0]
    accuracies = [sample["accuracy"] for task in written["tasks"] for sample in task["samples"] if sample["error"] is None]
    assert found["validation/accuracy"] == pytest.approx(sum(accuracies) / 15)
    assert found["validation/errors"] == found["validation/missing"] == 3 and found["validation/seconds"] > 0
    assert {"validation/pass@1", "validation/pass@2", "validation/avg@3", "validation/cons@3"} <= found.keys()


@dataclass(frozen=True, kw_only=True)
class Counting(Letters):
    """Sets a metric; the answers of its tasks are a lone surrogate."""

    def tasks(self, data: DataSource):
        return [Task(id=f"{index}", question=f"task {index}", answer="\udcff") for index in range(3)]

    @reward(weight=0.0)
    def letters(self, task: Task, rollout: Rollout) -> int:
        rollout.metrics["place"] = int(task.id)
        return len(rollout.text)


def test_metrics_of_the_environment_are_means_and_samples_are_stored_by_turn(tmp_path):
    found = asyncio.run(evaluator(tmp_path / "validation", environment=Counting(), size=3).evaluate(2))
    assert found["validation/environments/letters/place"] == 1.0
    samples = ValidationSamples(tmp_path)
    assert samples.steps() == [2]
    for record in samples.read(2):
        (turn,) = record.turns
        assert (turn.role, turn.text, turn.sampled, turn.start) == ("assistant", record.completion, True, 0)
        assert record.prompt_messages == ({"role": "user", "content": f"task {record.task_id}"},)
        assert record.metrics["place"] == int(record.task_id) and record.answer == "\N{REPLACEMENT CHARACTER}"


def test_an_evaluation_does_not_depend_on_the_step_nor_on_what_ran_before(tmp_path):
    one = evaluator(tmp_path)
    first, second = asyncio.run(one.evaluate(0)), asyncio.run(one.evaluate(7))
    fresh = asyncio.run(evaluator().evaluate(3))
    for name in first.keys() - {"validation/seconds"}:
        assert first[name] == second[name] == fresh[name]
    samples = [json.loads((tmp_path / f"step_{step:06d}.json").read_text())["tasks"] for step in (0, 7)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_how_many_tasks_are_sampled_at_once_changes_nothing(at_once):
    whole, parts = asyncio.run(evaluator().evaluate(0)), asyncio.run(evaluator(concurrent_tasks=at_once).evaluate(0))
    assert whole.keys() == parts.keys()
    assert all(whole[name] == parts[name] for name in whole.keys() - {"validation/seconds"})


def test_tasks_are_sampled_so_many_at_a_time():
    limited = evaluator(concurrent_tasks=2, generator=FakeGenerator(TOKENIZER, latency=lambda seed: 0.001))
    running, most = 0, 0
    generate = limited.generator.generate

    async def counted(*args, **kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await generate(*args, **kwargs)
        finally:
            running -= 1

    limited.generator.generate = counted
    asyncio.run(limited.evaluate(0))
    assert most == 2 * 3


def test_validation_has_other_seeds_than_training():
    own = evaluator()
    asyncio.run(own.evaluate(0))
    from strop.sampling import mix_seed

    training = {mix_seed(mix_seed(5, index, sample), 0) for index in range(6) for sample in range(3)}
    assert not training & {request.seed for request in own.generator.requests}


def test_one_sample_a_task_reports_accuracy_alone():
    found = asyncio.run(evaluator(samples=1).evaluate(0))
    assert not any("@" in name for name in found)


def test_the_environments_of_a_mixture_are_reported_each(tmp_path):
    environments = {"low": Letters(), "high": Letters(constant=tuple(range(100)))}

    class Two:
        def __len__(self):
            return 4

        def at(self, index):
            name = "high" if index % 2 else "low"
            return name, LocalEnvironment(environments[name]), environments[name].tasks(DataSource())[index]

    found = asyncio.run(evaluator(source=Two(), size=4).evaluate(0))
    assert found["validation/high/accuracy"] == 1 and found["validation/low/accuracy"] < 1
    mean = (found["validation/high/accuracy"] + found["validation/low/accuracy"]) / 2
    assert found["validation/accuracy"] == pytest.approx(mean)


@dataclass(frozen=True, kw_only=True)
class Scored(Letters):
    """Answers the policy once, and has no reward that is declared to be the accuracy."""

    async def respond(self, task, rollout):
        return (user("the tool says 4824"),) if len(rollout.policy_turns) == 1 else None

    @reward(weight=1.0)
    def share(self, task, rollout):
        return 0.25


def test_a_sample_of_several_turns_is_shown_with_the_question_of_the_task_and_the_last_answer():
    tracker = Recorder()
    rules = EpisodeRules(max_turns=2)
    found = asyncio.run(evaluator(environment=Scored(), samples_to_print=1, samples=1, rules=rules).evaluate(0, tracker))
    (note,) = tracker.notes
    assert note.startswith("'task 0' -> ") and note.endswith("(reward 0.25, 2 turns)") and "4824" not in note
    assert found["validation/score"] == found["validation/accuracy"] == 0.25


def test_a_declared_accuracy_is_no_score():
    found = asyncio.run(evaluator().evaluate(0))
    assert "validation/accuracy" in found and "validation/score" not in found


@dataclass(frozen=True, kw_only=True)
class Sometimes(Letters):
    """Some samples of each task cannot be scored."""

    unscored: tuple[int, ...] = ()

    @reward(weight=1.0, accuracy=True)
    def share(self, task: Task, rollout: Rollout) -> float | None:
        return None if rollout.sample in self.unscored else 1.0


@pytest.mark.parametrize("unscored", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_sample_that_cannot_be_scored_counts_as_wrong_and_is_counted(tmp_path, unscored):
    found = asyncio.run(evaluator(tmp_path, environment=Sometimes(unscored=unscored)).evaluate(1))
    share = (3 - len(unscored)) / 3
    assert found["validation/accuracy"] == found["validation/reward"] == pytest.approx(share)
    assert found["validation/pass@1"] == pytest.approx(share) and found["validation/errors"] == 0
    assert found.get("validation/unscored", 0) == 6 * len(unscored)
    stored = json.loads((tmp_path / "step_000001.json").read_text())["tasks"]
    assert all(
        [sample.get("unscored", False) for sample in task["samples"]] == [n in unscored for n in range(3)] for task in stored
    )
