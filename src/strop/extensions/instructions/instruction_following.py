"""Instructions that a program can check: IFEval (Zhou et al. 2023, arXiv:2311.07911), and its training counterpart RLVR-IFeval."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.environments.scoring.scoring_pool import get_scoring_pool
from strop.environments.verifiers.base import Reply, Score, Verifier, check_positive
from strop.extensions.instructions.instruction_checks import LOOSELY, PACKAGES, STRICTLY, find_fault, find_missing_package
from strop.extensions.instructions.rlvr_checks import has_sentence_model
from strop.packages import install_command
from strop.thoughts import read_answer
from strop.types import Rollout, Task

LOADER = "strop.extensions.instructions.instruction_checks:load_instruction"  # of the processes that check


@dataclass(frozen=True)
class Instruction:
    """An instruction by its name in IFEval or RLVR-IFeval, with its options."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class FollowedInstructions:
    """Which instructions a reply follows, in their order."""

    strictly: tuple[bool, ...]
    loosely: tuple[bool, ...]
    unverified: bool  # one of them could not be checked within the limits, and counts as not followed


def read_instructions(row: Mapping[str, Any], where: str) -> tuple[Instruction, ...]:
    """Return the instructions of a row of IFEval (``instruction_id_list``, ``kwargs``) or of RLVR-IFeval (``ground_truth``).

    Raises DataError, and EnvironmentConfigError where a package is missing.
    """
    try:
        found = _read_ifeval(row) if "instruction_id_list" in row else _read_rlvr(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where} has no instructions that can be read ({type(error).__name__}: {error}). A row has the columns "
            "instruction_id_list and kwargs, as IFEval's, or ground_truth with func_name, as RLVR-IFeval's"
        ) from error
    if not found:
        raise DataError(f"{where} has no instructions; leave it out")
    for each in found:
        if fault := find_fault(each.name, each.options):
            raise DataError(f"{where}: {fault}. Fix the row, or leave it out")
        _check_packages(each.name)
    return found


def _read_ifeval(row: Mapping[str, Any]) -> tuple[Instruction, ...]:
    given = [json.loads(each) if isinstance(each, str) else each or {} for each in row["kwargs"]]
    options = [{key: value for key, value in each.items() if value is not None} for each in given]
    return tuple(Instruction(name, each) for name, each in zip(row["instruction_id_list"], options, strict=True))


def _read_rlvr(row: Mapping[str, Any]) -> tuple[Instruction, ...]:
    given = row["ground_truth"]
    constraint = dict(json.loads(given) if isinstance(given, str) else given)
    name = constraint.pop("func_name")
    return (Instruction(name, {key: value for key, value in constraint.items() if value is not None}),)


@cache
def _check_packages(name: str) -> None:
    """Raise EnvironmentConfigError if a package is missing, and warn if its data is missing."""
    if package := find_missing_package(name):
        raise EnvironmentConfigError(f"the instruction {name} needs the package {package}: {install_command('ifeval')}")
    if PACKAGES.get(name) == "nltk" and "sentences" in name and not has_sentence_model():
        warnings.warn(
            "NLTK's model of sentences is not installed: sentences are told apart with a list of abbreviations, and their number may "
            "differ from what IFEval reports. Install it with `python -m nltk.downloader punkt_tab`",
            stacklevel=2,
        )


def read_response(text: str, opening: str = "") -> str:
    """Return the reply after its thoughts, without the white space between them."""
    answer = read_answer(text, opening)
    return answer if answer == text else answer.strip()


async def check_instructions(
    instructions: Sequence[Instruction], text: str, *, num_workers: int, timeout_s: float
) -> FollowedInstructions:
    """Check a response in the scoring pool, whose workers can read this machine's files, because NLTK loads its data from there."""
    pool = get_scoring_pool(num_workers, isolated=False)
    calls = [{"name": each.name, "options": dict(each.options), "text": text} for each in instructions]
    scores = await asyncio.gather(*(pool.call("instruction", timeout_s, loader=LOADER, **each) for each in calls))
    return FollowedInstructions(
        strictly=tuple(score.value == STRICTLY for score in scores),
        loosely=tuple((score.value or 0.0) >= LOOSELY for score in scores),
        unverified=any(score.value is None for score in scores),
    )


@dataclass(frozen=True, kw_only=True)
class InstructionTask(PromptedTask):
    instructions: tuple[Instruction, ...]
    share: float  # number of instructions, relative to the mean over all tasks


@dataclass(frozen=True, kw_only=True)
class InstructionFollowing(DatasetEnvironment):
    """Whether the last turn, without its thoughts, follows the instructions of its row. ``prompt_strict`` is the most commonly
    reported metric.
    """

    num_workers: int = 4  # processes that check replies, started on demand
    timeout_s: float = 5.0  # CPU seconds per instruction; those that need more count as not followed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )

    @property
    def needs_answers(self) -> bool:
        return False

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        rows = super().tasks(data)
        count = len(rows)  # unknown for streams
        numbers = [len(read_instructions(row.metadata, row.id)) for row in rows]  # check every row at the start of the run
        mean = sum(numbers) / max(1, count)

        def make(index: int) -> InstructionTask:
            row = rows[index]
            known = {each.name: getattr(row, each.name) for each in fields(row)}
            return InstructionTask(**known, instructions=read_instructions(row.metadata, row.id), share=numbers[index] / mean)

        return GeneratedTasks(count, make)

    @reward(weight=1.0, accuracy=True)
    async def prompt_strict(self, task: InstructionTask, rollout: Rollout) -> bool:
        """1 where the reply follows all instructions."""
        found = await self._check(task, rollout)
        for way, followed in (("strict", found.strictly), ("loose", found.loosely)):
            rollout.metrics[f"prompt_level_{way}"] = float(all(followed))
            # weighted so that the mean over tasks is the share of all instructions, as IFEval reports it
            rollout.metrics[f"instruction_level_{way}"] = task.share * _mean(followed)
        return all(found.strictly)

    @reward(weight=0.0)
    async def prompt_loose(self, task: InstructionTask, rollout: Rollout) -> bool:
        """The same for the reply as it is, or without its first line, its last line or asterisks."""
        return all((await self._check(task, rollout)).loosely)

    @reward(weight=0.0)
    async def instruction_strict(self, task: InstructionTask, rollout: Rollout) -> float:
        """The share of the instructions that it follows."""
        return _mean((await self._check(task, rollout)).strictly)

    @reward(weight=0.0)
    async def instruction_loose(self, task: InstructionTask, rollout: Rollout) -> float:
        return _mean((await self._check(task, rollout)).loosely)

    @reward(weight=0.0)
    async def unverified(self, task: InstructionTask, rollout: Rollout) -> bool:
        """1 if an instruction could not be checked within the limits and counts as not followed."""
        return (await self._check(task, rollout)).unverified

    async def _check(self, task: InstructionTask, rollout: Rollout) -> FollowedInstructions:
        """Check each instruction; the scoring pool caches the results."""
        text = read_response(rollout.text, rollout.opening)
        return await check_instructions(task.instructions, text, num_workers=self.num_workers, timeout_s=self.timeout_s)


def _mean(followed: Sequence[bool]) -> float:
    return sum(followed) / len(followed)


@dataclass(frozen=True, kw_only=True)
class InstructionVerifier(Verifier):
    """1 where the reply follows all instructions of its row, or the share of them that it follows."""

    is_accuracy: ClassVar[bool] = True

    credit: Literal["all", "fraction"] = "all"
    loose: bool = False  # also accept the reply without its first line, its last line or asterisks
    num_workers: int = 4  # processes of the scoring pool
    timeout_s: float = 5.0  # CPU seconds to check one instruction

    def __post_init__(self) -> None:
        check_positive(self, "num_workers", "timeout_s")

    def check_task(self, task: Task) -> None:
        try:
            read_instructions(task.metadata, task.id)
        except DataError as error:
            raise EnvironmentConfigError(str(error)) from error

    async def score(self, task: Task, reply: Reply) -> Score:
        instructions = read_instructions(task.metadata, task.id)
        text = read_response(reply.text, reply.opening)
        found = await check_instructions(instructions, text, num_workers=self.num_workers, timeout_s=self.timeout_s)
        followed = found.loosely if self.loose else found.strictly
        value = sum(followed) / len(followed) if self.credit == "fraction" else float(all(followed))
        return Score(value, {"unverified": float(found.unverified)})
