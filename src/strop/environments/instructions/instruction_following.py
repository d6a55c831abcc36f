"""Instructions that a program can check: IFEval (Zhou et al. 2023, arXiv:2311.07911), and its training counterpart RLVR-IFeval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.environments.instructions.instruction import (
    FollowedInstructions,
    Instruction,
    check_instructions,
    read_instructions,
    read_response,
)
from strop.types import Rollout


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
