"""Evaluation on held-out tasks: avg@n, pass@k, cons@k and maj@k for any environment, with every sample stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import EnvironmentHandle, Grade
from strop.environments.mixture import TaskSource
from strop.generation.base import Generator, PastSelves
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_record import (
    encodable,
    list_images,
    list_prompt_images,
    make_turn_records,
    storable_metrics,
)
from strop.monitoring.rollout_store.stored_images import StoredImages
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.rollout_media import make_validation_media
from strop.rollouts.episode import EpisodeRules, run_group
from strop.safety.exits import contain_exits
from strop.safety.printable import shorten
from strop.sampling import Sampling, mix_seed
from strop.statistics import TaskResult, present_tasks, summarize_results
from strop.storage.files import RecordFiles, atomic_write
from strop.types import Group, Message, Rollout
from strop.user_code import MAX_ERROR_TEXT

CATEGORY_KEYS = ("category", "subject", "Subject")  # columns that say what a question is about
TRUNCATED = ("length", "context")


class FinishedTasks(Protocol):
    """Evaluated tasks, by index."""

    @property
    def tasks(self) -> Mapping[int, dict[str, Any]]: ...

    def add(self, index: int, task: dict[str, Any]) -> None: ...


def make_task_record(group: Group, grades: Sequence[Grade | None], *, keep_logprobs: bool = False) -> dict[str, Any]:
    """Return a task with its samples in JSON form. A sample without a grade is missing."""
    samples = [
        {
            "sample": rollout.sample,
            "messages": [_write_message(message) for message in rollout.messages],
            **({"prompt_images": images} if (images := list_prompt_images(rollout)) else {}),
            "turns": [vars(turn) for turn in make_turn_records(rollout)],
            "completion": rollout.text,
            "accuracy": None if grade is None else grade.accuracy,
            "answer": None if grade is None else grade.answer,
            "reward": rollout.reward,
            "rewards": dict(rollout.rewards),
            "metrics": storable_metrics(rollout),
            "tokens": rollout.sampled_tokens,
            "ending": None if rollout.ending is None else rollout.ending.value,
            "error": rollout.error,
            **({"unscored": True} if rollout.unscored else {}),
            **(_list_tokens(rollout) if keep_logprobs else {}),
        }
        for rollout, grade in zip(group.rollouts, grades, strict=True)
    ]
    task = group.task
    category = next((task.metadata[key] for key in CATEGORY_KEYS if isinstance(task.metadata.get(key), str)), None)
    about = {} if category is None else {"category": category}
    return {"task": task.id, "environment": group.environment, **about, "answer": task.answer, "samples": samples}


def _write_message(message: Message) -> dict[str, Any]:
    """Return a message in JSON form, with images by name instead of their content."""
    return {**message.as_dict(), "content": message.shown_content} if message.images else message.as_dict()


def _list_tokens(rollout: Rollout) -> dict[str, list[Any]]:
    turns = rollout.policy_turns
    return {
        "token_ids": [token for turn in turns for token in turn.tokens.tolist()],
        "logprobs": [logprob for turn in turns for logprob in turn.logprobs.tolist()],
    }


def read_result(task: Mapping[str, Any]) -> TaskResult:
    samples = task["samples"]
    return TaskResult(
        task["environment"], tuple(sample["accuracy"] for sample in samples), tuple(sample["answer"] for sample in samples)
    )


def summarize_samples(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over all samples that are present, and the numbers of errors and of missing samples."""
    every = [sample for task in tasks for sample in task["samples"]]
    samples = [sample for sample in every if sample["accuracy"] is not None]
    counts = {"errors": float(sum(sample["error"] is not None for sample in every))}
    counts |= {"missing": float(len(every) - len(samples))} if len(samples) < len(every) else {}
    if not samples:
        return counts
    unscored = sum(sample.get("unscored", False) for sample in samples)
    return {
        **({"unscored": float(unscored)} if unscored else {}),
        "reward": sum(sample["reward"] for sample in samples) / len(samples),
        "avg_length": sum(sample["tokens"] for sample in samples) / len(samples),
        "truncated": sum(sample["ending"] in TRUNCATED for sample in samples) / len(samples),
        **counts,
    }


def mean_metrics(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``environments/NAME/METRIC``: the mean of each metric that an environment set, over its samples that have it."""
    values: dict[str, list[float]] = {}
    for task in tasks:
        for sample in task["samples"]:
            for name, value in sample["metrics"].items() if sample["error"] is None else ():
                values.setdefault(f"environments/{task['environment']}/{name}", []).append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


_VALIDATION_SEED = 0x76616C  # separates the seeds of validation from those of training


@dataclass(kw_only=True)
class Evaluator:
    """Samples every task ``samples`` times, scores the samples and writes them to ``<folder>/step_N.json``."""

    source: TaskSource
    size: int  # tasks
    samples: int
    generator: Generator
    template: ChatTemplate
    sampling: Sampling
    rules: EpisodeRules
    seed: int
    folder: Path | None = None
    ks: tuple[int, ...] | None = None  # of pass@k; None: the powers of two up to ``samples``, if that is above 1
    voters: tuple[int, ...] | None = None  # of cons@k; None: all ``samples``, if that is above 1
    majorities: tuple[int, ...] = ()  # of maj@k
    concurrent_tasks: int | None = None  # tasks sampled concurrently; None: all
    past: PastSelves | None = None  # earlier selves of the policy, for environments that play against them
    policies: Mapping[str, Generator] = field(default_factory=dict)  # of roles
    samples_to_print: int = 0  # samples to print at each evaluation
    samples_to_track: int | None = None  # samples that services show of each evaluation; None: there is no service
    finished: FinishedTasks | None = None  # tasks already done, if the evaluation was interrupted, and where to keep more
    name_set: Callable[[int], str] | None = None  # from the index of a task to the name of its data set
    identity: Mapping[str, Any] | None = None  # what the samples depend on, for the file
    keep_logprobs: bool = False  # ids and log-probabilities of the sampled tokens, in the file
    on_sampled: Callable[[], object] = lambda: None  # called when all tasks are sampled
    files: RecordFiles = field(default_factory=lambda: RecordFiles("validation samples"))
    last_groups: list[Group] = field(default_factory=list)  # what the last evaluation sampled, for display
    last_tasks: list[dict[str, Any]] = field(default_factory=list)  # every task with its scores, as stored

    async def evaluate(self, step: int, tracker: Tracker | None = None) -> dict[str, float]:
        """Return metrics under ``validation/``. Rollouts with errors are counted in ``validation/errors``. Those that failed by no fault of
        the policy are in no other metric, and counted in ``validation/missing`` too. Those that cannot be scored count as wrong and are
        counted in ``validation/unscored``."""
        started = time.perf_counter()
        self.last_tasks = await self._evaluate_tasks(tracker)
        self.on_sampled()
        metrics = self._summarize(self.last_tasks)
        if self.folder is not None:
            path = self.folder / f"step_{step:06d}.json"
            write_results(path, step, metrics, self.last_tasks, identity=self.identity, files=self.files)
        if tracker is not None:
            self._print_samples(tracker)
            if self.samples_to_track is not None:
                tracker.log_media(step, make_validation_media(self.last_tasks, samples=self.samples_to_track))
        metrics["seconds"] = time.perf_counter() - started
        return {f"validation/{name}": value for name, value in metrics.items()}

    def _summarize(self, tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        environments = {name: environment for name, environment, _ in (self.source.at(index) for index in range(self.size))}
        multiple = self.samples > 1
        powers_of_two = tuple(1 << power for power in range(self.samples.bit_length())) if multiple else ()
        ks = powers_of_two if self.ks is None else self.ks
        voters = ((self.samples,) if multiple else ()) if self.voters is None else self.voters
        results = [read_result(task) for task in present_tasks(tasks)]
        metrics = {**summarize_results(results, ks, voters, self.majorities, samples=self.samples), **summarize_samples(tasks)}
        if not any(environment.traits.declares_accuracy for environment in environments.values()):
            metrics |= {"score": metrics["accuracy"]} if results else {}  # the accuracy, where no reward is declared as accuracy
        for name in environments if len(environments) > 1 else ():
            means = summarize_results(
                [result for result in results if result.environment == name], ks, voters, self.majorities, samples=self.samples
            )
            metrics |= {f"{name}/{key}": value for key, value in means.items()}
        return metrics | mean_metrics(tasks)

    async def _evaluate_tasks(self, tracker: Tracker | None) -> list[dict[str, Any]]:
        """Return every task with its scored samples. Finished tasks are reused; the rest are sampled ``concurrent_tasks`` at a
        time.
        """
        known = {} if self.finished is None else self.finished.tasks
        tasks = {index: known[index] for index in range(self.size) if index in known}
        groups: dict[int, Group] = {}
        slots = asyncio.Semaphore(self.concurrent_tasks or self.size)

        async def evaluate_task(index: int) -> None:
            async with slots:
                group, environment = await self._sample_group(index)
                if self.folder is not None:
                    StoredImages(self.folder).write(list_images([group]), self.files)
                grades = await asyncio.gather(*(_grade(rollout, environment) for rollout in group.rollouts))
                task = make_task_record(group, grades, keep_logprobs=self.keep_logprobs)
                if self.name_set is not None:
                    task = {"task": task.pop("task"), "set": self.name_set(index), **task}
                if self.finished is not None:
                    self.finished.add(index, task)
            groups[index], tasks[index] = group, task
            if tracker is not None:
                tracker.progress(f"validating: {len(tasks)} of {self.size} tasks")

        if tracker is not None:
            tracker.progress(f"validating: {len(tasks)} of {self.size} tasks")
        await asyncio.gather(*(evaluate_task(index) for index in range(self.size) if index not in tasks))
        self.last_groups = [groups[index] for index in sorted(groups)]
        return [tasks[index] for index in range(self.size)]

    async def _sample_group(self, index: int) -> tuple[Group, EnvironmentHandle[Any]]:
        try:
            with contain_exits():
                name, environment, task = self.source.at(index)
        except Exception as error:
            message = (
                f"validation task {index} could not be created: {type(error).__name__}: {shorten(str(error), MAX_ERROR_TEXT)}"
            )
            raise EnvironmentConfigError(message) from error
        group = await run_group(
            index,
            name,
            environment,
            task,
            samples=self.samples,
            generator=self.generator,
            template=self.template,
            sampling=self.sampling,
            rules=self.rules,
            seed=mix_seed(self.seed, _VALIDATION_SEED),
            past=self.past,
            policies=self.policies,
        )
        return group, environment

    def _print_samples(self, tracker: Tracker) -> None:
        sampled = {group.index: group for group in self.last_groups}
        for index in range(min(self.samples_to_print, self.size)):
            if index not in sampled:
                continue
            rollout, (_, environment, _) = sampled[index].rollouts[0], self.source.at(index)
            score = "accuracy" if environment.traits.declares_accuracy else "reward"
            turns = f", {len(rollout.policy_turns)} turns" if len(rollout.policy_turns) > 1 else ""
            accuracy = self.last_tasks[index]["samples"][0]["accuracy"]
            scored = "missing" if accuracy is None else f"{score} {accuracy:.4g}"
            tracker.note(f"{_find_question(rollout)!r} -> {rollout.text!r} ({scored}{turns})")


def write_results(
    path: Path,
    step: int,
    metrics: Mapping[str, float],
    tasks: Sequence[Mapping[str, Any]],
    *,
    identity: Mapping[str, Any] | None = None,
    files: RecordFiles | None = None,
) -> None:
    """Write the results of an evaluation and the settings they depend on. ``files`` may skip this on a full disk."""
    known = {} if identity is None else {"identity": identity}
    content = {"step": step, **known, "metrics": metrics, "tasks": tasks}
    data = encodable(json.dumps(content, ensure_ascii=False, indent=1)).encode()
    if files is not None:
        files.write(path, data)
        return
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


def _find_question(rollout: Rollout) -> str:
    """Return the last question before the policy's first turn: later messages are answers of the environment."""
    of_assistant = [index for index, message in enumerate(rollout.messages) if message.role == "assistant"]
    written = (
        of_assistant[-len(rollout.policy_turns) :] if rollout.policy_turns else []
    )  # earlier ones are few-shot examples in the prompt
    questions = [
        message.content for message in rollout.messages[: written[0] if written else None] if message.role != "assistant"
    ]
    return questions[-1] if questions else rollout.task.question


async def _grade(rollout: Rollout, environment: EnvironmentHandle[Any]) -> Grade | None:
    """Return the grade of a rollout; None if it failed by no fault of the policy."""
    if not (rollout.counts or rollout.unscored):
        return None
    failed = rollout.unscored or (rollout.error is not None and not rollout.rewards)
    return Grade(0.0, None) if failed else await environment.grade(rollout.task, rollout)
