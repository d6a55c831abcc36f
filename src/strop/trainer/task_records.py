"""Evaluated tasks as stored: each with its scored samples, from which all metrics are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from strop.environments.handle import Grade
from strop.monitoring.rollout_store.rollout_record import list_prompt_images, storable_metrics
from strop.monitoring.rollout_store.turn_record import make_turn_records
from strop.statistics import TaskResult
from strop.types import Group, Message, Rollout

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
