"""Tasks of lm-eval (the LM Evaluation Harness) by their names, with their own prompts, filters and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache, partial
from random import Random
from typing import Any

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.environments.scoring.scoring_pool import ScoringResult, get_scoring_pool
from strop.packages import install_command
from strop.types import Messages, Rollout
from strop.user_code import suggest_names


class LmEvalError(ValueError):
    """A task of lm-eval cannot be had, or is not of a kind that a generated answer decides."""


@lru_cache(maxsize=8)
def load_lm_eval_task(name: str, include_path: str) -> Any:
    """Load a task. Raises LmEvalError, and ImportError where the package is missing."""
    from lm_eval.tasks import TaskManager

    # The index of all its own tasks takes half a minute; a folder of the user's is enough where the task is in it.
    for with_own in (False, True) if include_path else (True,):
        manager = TaskManager(include_path=include_path or None, include_defaults=with_own)
        if name in manager.all_tasks:
            found = manager.load([name])["tasks"].get(name)
            break
    else:
        near = get_close_matches(name, manager.all_tasks)
        raise LmEvalError(
            f"lm-eval has no task {name!r}{suggest_names(name, near)}; include_path adds a folder with tasks of yours"
        )
    if found is None:
        raise LmEvalError(f"{name} is a group of lm-eval's tasks; name one of them")
    if found.OUTPUT_TYPE != "generate_until":
        raise LmEvalError(
            f"{name} compares log-likelihoods of given answers ({found.OUTPUT_TYPE}); only tasks in which the model writes an answer "
            "(generate_until) can be environments. Serve the model (strop serve), and let lm-eval ask it, for the others"
        )
    if getattr(found, "UNSAFE_CODE", False):
        raise LmEvalError(f"{name} runs code that the model wrote, in lm-eval's own process; use an environment with a sandbox")
    return found


def score_with_lm_eval(task: Any, doc: dict[str, Any], answer: str, metric: str) -> float:
    """Return the task's own metric of one answer, after the task's own filters. ``metric`` "": its first one."""
    from lm_eval.api.instance import Instance

    for stop in list_stops(task):
        answer = answer.partition(stop)[0]
    request = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0)
    request.resps.append(answer)
    chosen = task._filters[0]
    chosen.apply([request])
    found = task.process_results(doc, [request.filtered_resps[chosen.name]])
    name = metric or next(iter(found))
    if name not in found:
        raise LmEvalError(f"the task has no metric {name!r}; it has {', '.join(found)}")
    return float(found[name])


def load_scorer() -> Callable[..., Callable[[], float]]:
    """Return what scores an answer, in a process of ``strop.environments.scoring``."""

    def prepare(task: str, include_path: str, metric: str, answer: str, doc: dict[str, Any]) -> Callable[[], float]:
        return partial(score_with_lm_eval, load_lm_eval_task(task, include_path), doc, answer, metric)

    return prepare


def list_stops(task: Any) -> list[str]:
    """Return the texts at which the task ends an answer."""
    until = (task.config.generation_kwargs or {}).get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]


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
            loader="strop.extensions.adapters.lm_eval_environment:load_scorer",
            task=self.task,
            include_path=self.include_path,
            metric=self.metric,
            answer=rollout.content,
            doc=dict(task.metadata),
        )
