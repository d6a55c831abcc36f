"""Any reasoning-gym task by name, or several as one, scored by the task's own verifier."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from strop.data.sources.records import DataError, is_held_out
from strop.data.sources.source import DataSource
from strop.environments.answers import extract_last_number, extract_last_tagged
from strop.environments.base import (
    DEFAULT_NUM_TASKS,
    Environment,
    EnvironmentConfigError,
    GeneratedTasks,
    PromptedTask,
    reward,
)
from strop.environments.scoring.scoring_pool import ScoringResult, get_scoring_pool
from strop.extensions.adapters.reasoning_gym_datasets import COMPOSITE, create_reasoning_gym_dataset, options_of_level
from strop.sampling import mix_seed
from strop.types import Messages, Rollout
from strop.user_code import suggest_names

MAX_ATTEMPTS = 64  # draws until a question belongs to the requested split; each split has half of the questions


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Environment[PromptedTask]):
    """A reasoning-gym task. Validation questions (``data.part`` or ``data.split`` "validation") never occur in training."""

    task: str  # such as chain_sum, leg_counting, sudoku; composite for several, whose options are datasets: [{name, weight, config, level}]
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of the task's own configuration, except seed and size
    level: int | None = (
        None  # of the task's curriculum, 0 the easiest, in place of options that it sets; null for the task's defaults
    )
    instruction: str = "Give your final answer between <answer> and </answer>."  # appended to the question; "" for none
    # Where to find the answer. tags: in the last <answer>...</answer>; tags_or_text: there, else the whole text;
    # number: the last number in the text.
    extract: Literal["tags", "tags_or_text", "number"] = "tags"
    num_workers: int = 4  # scoring processes, started on demand
    timeout_s: float = 5.0  # CPU seconds to score one answer; an answer that needs more scores 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError("num_workers must be at least 1 and timeout_s positive")
        make_dataset(self.task, self._dataset_options, 0, 1)

    @cached_property
    def _dataset_options(self) -> str:
        """All options of the data set, levels replaced by what they mean, as JSON."""
        own = dict(self.options) if self.level is None else {**_level_options(self.task, self.level), **self.options}
        if self.task == COMPOSITE and isinstance(own.get("datasets"), Sequence):
            own["datasets"] = [_expand_part(part) for part in own["datasets"]]
        return json.dumps(own)

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        template = data.load_template()
        size = data.size or DEFAULT_NUM_TASKS

        def make(index: int) -> PromptedTask:
            entry = self._sample_entry(data, index, size)
            question = f"{entry['question']}\n\n{self.instruction}" if self.instruction else entry["question"]
            return PromptedTask(
                id=f"{self.task}:{data.seed}:{'validation' if data.held_out else 'train'}:{index}",
                question=question,
                answer=str(entry["answer"]),
                metadata=entry,
                messages=template.render(question),
            )

        return GeneratedTasks(size, make)

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages

    @reward(weight=1.0)
    async def score(self, task: PromptedTask, rollout: Rollout) -> float:
        """The score of the task's verifier: 1 if correct, often in between for partial credit."""
        value = (await self._verify(task, rollout)).value or 0.0
        if self.task == COMPOSITE:
            rollout.metrics[f"score/{task.metadata['metadata']['source_dataset']}"] = value
        return value

    @reward(weight=0.0, accuracy=True)
    async def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        return ((await self._verify(task, rollout)).value or 0.0) >= 1.0

    @reward(weight=0.0)
    async def unverified(self, task: PromptedTask, rollout: Rollout) -> bool:
        """1 if the answer could not be scored within the limits and got 0."""
        return (await self._verify(task, rollout)).failure is not None

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        return self.extract_answer(rollout.content)

    def extract_answer(self, text: str) -> str | None:
        """Return the final answer in ``text`` according to ``extract``, or None."""
        if self.extract == "number":
            number = extract_last_number(text)
            return None if number is None else str(int(number) if number.denominator == 1 else float(number))
        tagged = extract_last_tagged(text, "answer")
        if tagged is not None:
            return tagged
        return text.strip() if self.extract == "tags_or_text" else None

    def _sample_entry(self, data: DataSource, index: int, size: int) -> dict[str, Any]:
        """Return the entry of the first in a series of datasets whose question at this index belongs to the requested split."""
        for attempt in range(MAX_ATTEMPTS):
            seed = mix_seed(data.seed, attempt) % 2**31
            entry: dict[str, Any] = make_dataset(self.task, self._dataset_options, seed, size)[index]
            if is_held_out(entry["question"], 0.5) == data.held_out:
                return entry
        raise DataError(f"{self.task} with these options asks too few different questions to hold some out for validation")

    async def _verify(self, task: PromptedTask, rollout: Rollout) -> ScoringResult:
        """Score the answer in a resource-limited process, since scorers may pass it to SymPy."""
        answer = self.extract_answer(rollout.content)
        if answer is None:
            return ScoringResult(0.0)
        pool = get_scoring_pool(self.num_workers)
        return await pool.call(
            "reasoning_gym",
            self.timeout_s,
            loader="strop.extensions.adapters.reasoning_gym_datasets:load_scorer",
            task=self.task,
            options=self._dataset_options,
            answer=answer,
            entry=dict(task.metadata),
        )


@lru_cache(maxsize=4 * MAX_ATTEMPTS)
def make_dataset(task: str, options: str, seed: int, size: int) -> Any:
    """Create a reasoning-gym dataset; ``options`` is JSON.

    Raises EnvironmentConfigError if the package is missing, or the task or an option is invalid.
    """
    values = json.loads(options)
    if task == COMPOSITE:
        for part in values.get("datasets") or ():
            _check_options(part["name"], part["config"])
    _check_options(task, values)
    try:
        return create_reasoning_gym_dataset(task, values, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvironmentConfigError(f"the task {task} rejects the options {values}: {error}") from error


def _check_options(task: str, values: Mapping[str, Any]) -> None:
    datasets = _registered_datasets()
    if task not in datasets:
        raise EnvironmentConfigError(f"reasoning_gym has no task {task!r}{suggest_names(task, datasets)}")
    known = {item.name for item in dataclasses.fields(datasets[task][1])} - {"seed", "size"}
    for name in values:
        if name in ("seed", "size"):
            raise EnvironmentConfigError(
                f"set {name} in the data section, not in options: it differs between training and validation"
            )
        if name not in known:
            raise EnvironmentConfigError(f"the task {task} has no option {name!r}{suggest_names(name, known)}")


def _registered_datasets() -> Mapping[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise EnvironmentConfigError("the environment reasoning_gym needs a package: pip install reasoning-gym") from error
    registered: Mapping[str, Any] = DATASETS
    return registered


def _level_options(task: str, level: int) -> dict[str, Any]:
    _check_options(task, {})
    try:
        return options_of_level(task, level)
    except ValueError as error:
        raise EnvironmentConfigError(f"level: {error}") from error


def _expand_part(part: Any) -> dict[str, Any]:
    """Return a part of a composite with all its keys and no level. Raises EnvironmentConfigError."""
    keys = ("name", "weight", "config", "level")
    if not isinstance(part, Mapping) or "name" not in part or not set(part) <= set(keys):
        raise EnvironmentConfigError(
            f"options.datasets has {part!r:.200}; an entry is a mapping with name, and weight, config and level where wanted"
        )
    config = part.get("config") or {}
    if part.get("level") is not None:
        config = {**_level_options(part["name"], part["level"]), **config}
    return {"name": part["name"], "weight": part.get("weight", 1.0), "config": config}
