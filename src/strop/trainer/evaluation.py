"""Evaluation on held-out tasks: avg@n, pass@k and cons@k for any environment, with every sample stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.environments.base import Environment, EnvironmentConfigError, Grade
from strop.environments.mixture import TaskSource
from strop.generation.base import Generator, PastSelves
from strop.models.chat_template import ChatTemplate
from strop.monitoring.rollout_store.rollout_record import encodable, storable_metrics
from strop.monitoring.rollout_store.turn_record import make_turn_records
from strop.monitoring.trackers.base import Tracker
from strop.rollouts.episode import EpisodeRules, run_group
from strop.safety.exits import contain_exits
from strop.safety.printable import shorten
from strop.sampling import Sampling, mix_seed
from strop.statistics.task_results import TaskResult, summarize_results
from strop.storage.deferred_files import DeferredFiles
from strop.trainer.step_metrics import environment_metrics
from strop.types import Group, Rollout
from strop.user_code import MAX_ERROR_TEXT

_VALIDATION_SEED = 0x76616C  # separates the seeds of validation from those of training


class Validator(Protocol):
    """Measures the policy between steps."""

    async def evaluate(self, step: int, tracker: Tracker) -> dict[str, float]:
        """Return metrics under ``validation/``."""
        ...


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
    concurrent_tasks: int | None = None  # tasks sampled concurrently; None: all
    past: PastSelves | None = None  # earlier selves of the policy, for environments that play against them
    samples_to_print: int = 0  # samples to print at each evaluation
    files: DeferredFiles = field(default_factory=lambda: DeferredFiles("validation samples"))
    last_groups: list[Group] = field(default_factory=list)  # the groups of the last evaluation, for display
    last_tasks: list[dict[str, Any]] = field(default_factory=list)  # the same with their scores, as stored

    async def evaluate(self, step: int, tracker: Tracker | None = None) -> dict[str, float]:
        """Return metrics under ``validation/``. Rollouts with errors count as wrong and are counted in ``validation/errors``."""
        started = time.perf_counter()
        if tracker is not None:
            tracker.progress(f"validating: 0 of {self.size} tasks")
        groups = self.last_groups = await self._sample_groups(tracker)
        environments = {name: environment for name, environment, _ in (self.source.at(index) for index in range(self.size))}
        results = await asyncio.gather(*(_grade_group(group, environments[group.environment]) for group in groups))
        multiple = self.samples > 1
        powers_of_two = tuple(1 << power for power in range(self.samples.bit_length())) if multiple else ()
        ks = powers_of_two if self.ks is None else self.ks
        voters = ((self.samples,) if multiple else ()) if self.voters is None else self.voters
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        metrics = {
            **summarize_results(results, ks, voters),
            "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
            "avg_length": sum(rollout.sampled_tokens for rollout in rollouts) / len(rollouts),
            "truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
            "errors": float(sum(rollout.error is not None for rollout in rollouts)),
        }
        if not any(environment.declares_accuracy for environment in environments.values()):
            metrics["score"] = metrics["accuracy"]  # what the accuracy is where no reward is declared to be one
        for name in environments if len(environments) > 1 else ():
            means = summarize_results([result for result in results if result.environment == name], ks, voters)
            metrics |= {f"{name}/{key}": value for key, value in means.items()}
        metrics |= environment_metrics(groups)
        self.last_tasks = [_to_json(group, result) for group, result in zip(groups, results, strict=True)]
        if self.folder is not None:
            self._write_samples(self.folder / f"step_{step:06d}.json", step, metrics)
        if tracker is not None:
            self._print_samples(tracker, groups, results, environments)
        metrics["seconds"] = time.perf_counter() - started
        return {f"validation/{name}": value for name, value in metrics.items()}

    async def _sample_groups(self, tracker: Tracker | None) -> list[Group]:
        """Sample every task, ``concurrent_tasks`` at a time."""
        groups: list[Group] = []
        finished = 0

        async def sample(index: int) -> Group:
            nonlocal finished
            group = await self._sample_group(index)
            finished += 1
            if tracker is not None:
                tracker.progress(f"validating: {finished} of {self.size} tasks")
            return group

        for start in range(0, self.size, self.concurrent_tasks or self.size):
            indices = range(start, min(start + (self.concurrent_tasks or self.size), self.size))
            groups += await asyncio.gather(*(sample(index) for index in indices))
        return groups

    async def _sample_group(self, index: int) -> Group:
        try:
            with contain_exits():
                name, environment, task = self.source.at(index)
        except Exception as error:
            message = (
                f"validation task {index} could not be created: {type(error).__name__}: {shorten(str(error), MAX_ERROR_TEXT)}"
            )
            raise EnvironmentConfigError(message) from error
        return await run_group(
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
        )

    def _write_samples(self, path: Path, step: int, metrics: dict[str, float]) -> None:
        content = {"step": step, "metrics": metrics, "tasks": self.last_tasks}
        self.files.write(path, encodable(json.dumps(content, ensure_ascii=False, indent=1)).encode())

    def _print_samples(
        self,
        tracker: Tracker,
        groups: Sequence[Group],
        results: Sequence[TaskResult],
        environments: Mapping[str, Environment[Any]],
    ) -> None:
        for group, result in list(zip(groups, results, strict=True))[: self.samples_to_print]:
            rollout = group.rollouts[0]
            score = "accuracy" if environments[group.environment].declares_accuracy else "reward"
            turns = f", {len(rollout.policy_turns)} turns" if len(rollout.policy_turns) > 1 else ""
            tracker.note(f"{_find_question(rollout)!r} -> {rollout.text!r} ({score} {result.accuracies[0]:.4g}{turns})")


def _find_question(rollout: Rollout) -> str:
    """Return the last question before the policy's first turn: later messages are answers of the environment."""
    of_assistant = [index for index, message in enumerate(rollout.messages) if message.role == "assistant"]
    written = (
        of_assistant[-len(rollout.policy_turns) :] if rollout.policy_turns else []
    )  # those before are examples in the prompt
    questions = [
        message.content for message in rollout.messages[: written[0] if written else None] if message.role != "assistant"
    ]
    return questions[-1] if questions else rollout.task.question


async def _grade_group(group: Group, environment: Environment[Any]) -> TaskResult:
    grades = await asyncio.gather(*(_grade(rollout, environment) for rollout in group.rollouts))
    return TaskResult(group.environment, tuple(grade.accuracy for grade in grades), tuple(grade.answer for grade in grades))


async def _grade(rollout: Rollout, environment: Environment[Any]) -> Grade:
    return Grade(0.0, None) if rollout.error is not None else await environment.grade(rollout.task, rollout)


def _to_json(group: Group, result: TaskResult) -> dict[str, Any]:
    samples = [
        {
            "sample": rollout.sample,
            "messages": [message.as_dict() for message in rollout.messages],
            "turns": [vars(turn) for turn in make_turn_records(rollout)],
            "completion": rollout.text,
            "accuracy": accuracy,
            "answer": answer,
            "reward": rollout.reward,
            "rewards": dict(rollout.rewards),
            "metrics": storable_metrics(rollout),
            "tokens": rollout.sampled_tokens,
            "ending": None if rollout.ending is None else rollout.ending.value,
            "error": rollout.error,
        }
        for rollout, accuracy, answer in zip(group.rollouts, result.accuracies, result.answers, strict=True)
    ]
    return {"task": group.task.id, "environment": group.environment, "answer": group.task.answer, "samples": samples}
