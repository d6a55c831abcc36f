"""What a check of an environment found: as data, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from strop.environments.base import Environment
from strop.environments.handle import read_prompt
from strop.extensions.checks.row_checks import fold_text
from strop.types import Task
from strop.user_code import describe_error

Level = Literal["fault", "note"]
CHECKS = {  # in the order of the table; the names that --skip takes
    "tasks_valid": "every task has a prompt that is not empty",
    "tasks_same": "task i is the same when asked again, in another order and after a rebuild",
    "splits": "no validation task is among the training tasks",
    "reward_errors": "no completion makes a reward or respond raise",
    "reward_deterministic": "an episode has one reward and the same answers: again, in another order, concurrently",
    "reference": "the reference answer scores near the maximum",
    "degenerate": "answers without knowledge score low",
}

EPISODE_CHECKS = tuple(CHECKS)[tuple(CHECKS).index("reward_errors") :]


@dataclass(frozen=True)
class CheckFinding:
    check: str  # of ``CHECKS``
    level: Level  # a note does not fail the check
    message: str


@dataclass(frozen=True)
class PolicyScore:
    """The mean scores of texts that were made by one rule for several tasks."""

    policy: str
    reward: float
    accuracy: float
    tasks: int
    flagged: bool = False


@dataclass
class EnvironmentReport:
    """Everything that was found of one environment."""

    name: str
    title: str
    num_tasks: int
    num_validation_tasks: int
    looked_at: int
    findings: list[CheckFinding] = field(default_factory=list)
    scores: list[PolicyScore] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)  # check -> why not

    def fault(self, check: str, message: str) -> None:
        self._add(CheckFinding(check, "fault", message))

    def note(self, check: str, message: str) -> None:
        self._add(CheckFinding(check, "note", message))

    def leave_out(self, checks: Sequence[str], why: str) -> None:
        """Say why checks were not made. What one of them found stays."""
        found = {finding.check for finding in self.findings}
        self.not_checked |= {check: why for check in checks if check not in found}

    def _add(self, finding: CheckFinding) -> None:
        assert finding.check in CHECKS
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def faults(self) -> list[CheckFinding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return {
            "environment": self.name,
            "class": self.title,
            "tasks": self.num_tasks,
            "validation_tasks": self.num_validation_tasks,
            "looked_at": self.looked_at,
            "ok": not self.faults,
            "findings": [vars(finding) for finding in self.findings],
            "scores": [vars(score) for score in self.scores],
            "not_checked": self.not_checked,
        }


def format_reports(reports: Sequence[EnvironmentReport]) -> str:
    """Return the tables of all environments and the verdict."""
    faults = sum(len(report.faults) for report in reports)
    verdict = "no faults" if not faults else f"{faults} fault{'s' if faults > 1 else ''}"
    return "\n\n".join([*map(_format_report, reports), verdict])


def _format_report(report: EnvironmentReport) -> str:
    validation = f", {report.num_validation_tasks} for validation" if report.num_validation_tasks else ""
    lines = [f"{report.name} ({report.title}): {report.num_tasks} tasks{validation}; {report.looked_at} looked at", ""]
    for check, meaning in CHECKS.items():
        found = [finding for finding in report.findings if finding.check == check]
        if check in report.not_checked:
            lines.append(f"  -      {check:<21}{report.not_checked[check]}")
        elif not found:
            lines.append(f"  ok     {check:<21}{meaning}")
        lines += [
            f"  {finding.level.upper() if finding.level == 'fault' else 'note':<7}{check:<21}{finding.message}"
            for finding in found
        ]
    if report.scores:
        lines += ["", f"  {'answers':<28}{'reward':>9}{'accuracy':>10}"]
        lines += [
            f"  {score.policy:<28}{score.reward:>9.3f}{score.accuracy:>10.3f}{'  <- FAULT' if score.flagged else ''}"
            for score in report.scores
        ]
    return "\n".join(lines)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest_task(environment: Environment[Any], task: Task) -> str:
    """Return a digest of everything in a task and of its prompt."""
    messages = [message.as_dict() for message in read_prompt(environment, task)]
    return hashlib.sha256(repr((_canonical(task), _canonical(messages))).encode(errors="surrogatepass")).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    """Return nested tuples of plain values that do not depend on the order of sets or on addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *((item.name, _canonical(getattr(value, item.name))) for item in dataclasses.fields(value)))
    if isinstance(value, Mapping):
        return tuple(sorted(((str(key), _canonical(inner)) for key, inner in value.items()), key=repr))
    if isinstance(value, Set):
        return tuple(sorted((_canonical(inner) for inner in value), key=repr))
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    if isinstance(value, Sequence):
        return tuple(_canonical(inner) for inner in value)
    if hasattr(value, "tolist"):
        return _canonical(value.tolist())
    return _ADDRESS.sub("", repr(value))


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
) -> None:
    """Check that tasks are the same when asked again."""
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
