"""Checks of tasks: are they the same when asked again, whole and split?"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.environments.base import Environment
from strop.environments.handle import read_prompt
from strop.extensions.checks.data.folded_text import fold_text
from strop.extensions.checks.environments.check_report import EnvironmentReport
from strop.extensions.checks.environments.task_digests import digest_task
from strop.types import Task
from strop.user_code import describe_error

OVERLAP = 0.01  # share of validation tasks above which those that training sees, too, are a fault
MOST_COMPARED, SECONDS_TO_READ = 5000, 3.0  # tasks of each part whose texts are compared


@dataclass(frozen=True)
class CheckedTask:
    index: int
    task: Task
    prompt: str  # its messages as text
    images: str = ""  # a digest of those that its messages show

    @property
    def asked(self) -> tuple[str, str]:
        """The prompt without case, marks and white space, and its images: equal for equal questions."""
        return fold_text(self.prompt), self.images

    @property
    def has_answer(self) -> bool:
        """Whether it has a reference answer; libraries write None for those that they do not know."""
        return self.task.answer.strip() not in ("", "None")


def read_tasks(
    environment: Environment[Any], tasks: Sequence[Task], indices: Sequence[int], report: EnvironmentReport
) -> list[CheckedTask]:
    """Return the tasks that have a prompt; say what is wrong with the others."""
    read: list[CheckedTask] = []
    for index in indices:
        try:
            task = tasks[index]
            text = format_prompt(environment, task)
        except Exception as error:
            report.fault("tasks_valid", f"task {index} cannot be made: {describe_error(error)}")
            continue
        if not text.strip() and not digest_images(environment, task):
            report.fault("tasks_valid", f"task {index} ({task.id!r}) has an empty prompt")
        elif not isinstance(task, Task):
            report.fault("tasks_valid", f"task {index} is of type {type(task).__name__}, which is no strop.types.Task")
        else:
            read.append(CheckedTask(index, task, text, digest_images(environment, task)))
    return read


def format_prompt(environment: Environment[Any], task: Task) -> str:
    return "\n".join(message.content for message in read_prompt(environment, task))


def digest_images(environment: Environment[Any], task: Task) -> str:
    """Return a digest of the images of a prompt; empty without any."""
    sources = [image.source for message in read_prompt(environment, task) for image in message.images]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest() if sources else ""


def check_same(
    environment: Environment[Any],
    tasks: Sequence[Task],
    rebuild: Callable[[], Sequence[Task]],
    read: Sequence[CheckedTask],
    report: EnvironmentReport,
) -> list[str]:
    """Check that tasks are the same when asked again. Return their digests."""
    first = [digest_task(environment, each.task) for each in read]
    state = random.getstate()
    try:
        for how, again in (("asked again, in reverse order,", None), ("made by another call of tasks()", rebuild)):
            random.seed(13)
            asked = tasks if again is None else again()
            second = [digest_task(environment, asked[each.index]) for each in reversed(read)][::-1]
            say_different(read, first, second, f"{how} in this process", report)
    finally:
        random.setstate(state)
    return first


def say_different(
    read: Sequence[CheckedTask], first: Sequence[str], second: Sequence[str], how: str, report: EnvironmentReport
) -> None:
    different = [each.index for each, one, other in zip(read, first, second, strict=True) if one != other]
    if different:
        report.fault(
            "tasks_same",
            f"{len(different)} of {len(read)} tasks are different when {how} (the first: task {different[0]}); draw random numbers from "
            "mix_seed(data.seed, index), and do not depend on the time or on the order of a set",
        )


def read_prompts(environment: Environment[Any], tasks: Sequence[Task], report: EnvironmentReport) -> list[CheckedTask]:
    """Return the first tasks, as many as can be made in a few seconds, to compare their texts."""
    read: list[CheckedTask] = []
    until = time.monotonic() + SECONDS_TO_READ
    for index in range(min(len(tasks), MOST_COMPARED)):
        if time.monotonic() > until:
            break
        try:
            task = tasks[index]
            read.append(CheckedTask(index, task, format_prompt(environment, task), digest_images(environment, task)))
        except Exception as error:
            report.fault("tasks_valid", f"task {index} cannot be made: {describe_error(error)}")
            break
    return read


def check_splits(train: Sequence[CheckedTask], validation: Sequence[CheckedTask], report: EnvironmentReport) -> None:
    """Check that the tasks of validation are not those of training."""
    exact, near = {(each.prompt, each.images) for each in train}, {each.asked for each in train}
    same = [each.prompt for each in validation if (each.prompt, each.images) in exact]
    alike = [each.prompt for each in validation if (each.prompt, each.images) not in exact and each.asked in near]
    for found, what in (
        (same, "are training tasks, too"),
        (alike, "differ from training tasks in case, white space or marks only"),
    ):
        if found:
            message = f"{len(found)} of {len(validation)} validation tasks {what}, such as {found[0][-80:]!r}"
            (report.fault if len(found) > OVERLAP * len(validation) else report.note)("splits", message)


def find_common_answer(read: Sequence[CheckedTask]) -> str | None:
    counted = Counter(each.task.answer for each in read if each.has_answer)
    return counted.most_common(1)[0][0] if len(counted) > 1 else None


def spread(size: int, count: int) -> list[int]:
    """Return at most ``count`` indices, spread evenly."""
    return list(range(size)) if size <= count else [index * size // count for index in range(count)]
