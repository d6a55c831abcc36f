"""What tasks for agents have in common, of whatever kind.

A task is an instruction, files, what prepares its sandbox, what judges the work, and a solution: a ``PromptedTask`` whose metadata has the
columns of ``strop.extensions.sandboxes.task_sandbox`` and ``solution``, the calls of a scripted policy. Without a dataset, a kind makes
tiny tasks itself; task i depends on the data's seed and i only.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from strop.data.messages import make_prompt
from strop.data.prompt_template import PromptTemplate
from strop.data.sources.source import DataSource
from strop.data.sources.streamed import is_streamed
from strop.environments.base import DatasetEnvironment, GeneratedTasks, PromptedTask, reward
from strop.sampling import mix_seed
from strop.types import Rollout, ToolCall

MACHINE = "machine:"  # the image of tasks that name none: a shell, git and Python, copied from this machine (provider local)
TINY = 10  # tasks without a dataset, unless data.size is set
_ANSWER = re.compile(r"^[ \t*]*answer:(.*)$", re.IGNORECASE | re.MULTILINE)


def make_task(
    name: str, instruction: str, answer: str = "", *, solution: Sequence[ToolCall | str], **columns: Any
) -> PromptedTask:
    """Return a task. ``columns``: those of its sandbox. ``solution``: calls, and the last message."""
    steps = [each.as_dict() if isinstance(each, ToolCall) else each for each in solution]
    return PromptedTask(id=name, question=instruction, answer=answer, metadata={**columns, "solution": steps}, messages=())


@cache
def read_inside(name: str) -> bytes:
    """Return a program that runs inside a sandbox."""
    return Path(__file__).with_name("inside").joinpath(name).read_bytes()


@dataclass(frozen=True, kw_only=True)
class AgentTasks(DatasetEnvironment):
    """Tasks of one kind. Put it before the environment class that judges: ``class Mine(AgentTasks, SandboxEnvironment)``."""

    @abstractmethod
    def make(self, index: int, random: Random) -> PromptedTask:
        """Return a tiny task."""

    def adapt(self, task: PromptedTask) -> PromptedTask:
        """Return the task of a row, whose columns its metadata has. Raises DataError. Default: the row's columns are a sandbox's."""
        return task

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        if data.dataset_name is not None or data.rows is not None:
            rows = super().tasks(data)
            return rows.map(self.adapt) if is_streamed(rows) else GeneratedTasks(len(rows), lambda index: self.adapt(rows[index]))
        template = data.load_template()

        def make(index: int) -> PromptedTask:
            task = self.make(index, Random(mix_seed(data.seed, data.held_out, index)))
            return prompted(replace(task, id=f"{task.id}_{index}"), template)

        return GeneratedTasks(data.size or TINY, make)


def prompted(task: PromptedTask, template: PromptTemplate) -> PromptedTask:
    return replace(task, messages=make_prompt(task.question, template, task.id, ()))


@dataclass(frozen=True, kw_only=True)
class AnsweredTasks(AgentTasks):
    """Tasks whose last message has a line ``Answer: ...``, which is compared with the reference answer."""

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        return same_answer(find_answer(rollout.content), task.answer)

    def reference_turns(self, task: PromptedTask) -> Sequence[str]:
        return [str(step) for step in task.metadata.get("solution") or () if isinstance(step, str)]


def find_answer(text: str) -> str | None:
    """Return what the last line ``Answer: ...`` says; None if there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip(" \t*`.") if found else None


def same_answer(given: str | None, wanted: str) -> bool:
    """Whether an answer is the reference answer: the same number, or the same words in any case."""
    if given is None:
        return False
    try:
        return abs(float(given) - float(wanted)) < 1e-6
    except ValueError:
        return " ".join(given.casefold().split()) == " ".join(wanted.casefold().split())
