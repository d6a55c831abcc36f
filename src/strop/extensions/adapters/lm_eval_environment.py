"""Tasks of lm-eval (the LM Evaluation Harness) by their names, with their own prompts, filters and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.environments.scoring.scoring_pool import ScoringResult, get_scoring_pool
from strop.extensions.adapters.lm_eval_tasks import LmEvalError, load_lm_eval_task
from strop.packages import install_command
from strop.types import Messages, Rollout


@dataclass(frozen=True, kw_only=True)
class LmEvalEnvironment(Environment[PromptedTask]):
    """A task of lm-eval in which the model writes its answer. Validation and evaluation ask the documents that lm-eval evaluates on;
    training asks those that the task has for training."""

    task: str  # such as gsm8k
    include_path: str = ""  # a folder with your tasks, in addition to lm-eval's own
    num_fewshot: int | None = None  # examples before the question; null for what the task says
    metric: str = ""  # the one that is the reward; "" for the task's first
    num_workers: int = 2  # scoring processes, started on demand
    timeout_s: float = 10.0  # CPU seconds to score one answer; an answer that needs more scores 0

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._task  # noqa: B018 a task that cannot be had is an error when the run starts
        except ImportError as error:
            raise EnvironmentConfigError(
                f"the environment lm_eval needs a package: {install_command('lm-eval')} ({error})"
            ) from error
        except LmEvalError as error:
            raise EnvironmentConfigError(str(error)) from error

    @cached_property
    def _task(self) -> Any:
        return load_lm_eval_task(self.task, self.include_path)

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        documents = self._documents(data)
        template = data.load_template()
        kind = "eval" if data.held_out else "train"
        shots = self.num_fewshot if self.num_fewshot is not None else self._task.config.num_fewshot or 0

        def make(index: int) -> PromptedTask:
            document = documents[index]
            self._task.fewshot_rnd = Random(data.seed)  # the same examples, whatever was asked before
            if getattr(self._task, "sampler", None) is not None:
                self._task.sampler.rnd = self._task.fewshot_rnd
            question = str(self._task.fewshot_context(document, num_fewshot=shots))
            return PromptedTask(
                id=f"{self.task}:{kind}:{index}",
                question=question,
                answer=str(self._task.doc_to_target(document)),
                metadata=document,
                messages=template.render(question),
            )

        return GeneratedTasks(min(len(documents), data.size or len(documents)), make)

    def _documents(self, data: DataSource) -> Sequence[dict[str, Any]]:
        if data.held_out:
            return list(self._task.eval_docs)
        if not self._task.has_training_docs():
            raise EnvironmentConfigError(
                f"the task {self.task} of lm-eval has no documents for training, only to evaluate on; name it in data.validation"
            )
        return list(self._task.training_docs())

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages

    @reward(weight=1.0, accuracy=True)
    async def score(self, task: PromptedTask, rollout: Rollout) -> float:
        """The task's own metric; 0 if the answer could not be scored within the limits."""
        return (await self._score(task, rollout)).value or 0.0

    @reward(weight=0.0)
    async def unverified(self, task: PromptedTask, rollout: Rollout) -> bool:
        return (await self._score(task, rollout)).failure is not None

    async def _score(self, task: PromptedTask, rollout: Rollout) -> ScoringResult:
        """Score in a process with limits: filters and metrics are regular expressions and parsers, and the text is hostile."""
        return await get_scoring_pool(self.num_workers, isolated=False).call(
            "lm_eval",
            self.timeout_s,
            loader="strop.extensions.adapters.lm_eval_tasks:load_scorer",
            task=self.task,
            include_path=self.include_path,
            metric=self.metric,
            answer=rollout.content,
            doc=dict(task.metadata),
        )
