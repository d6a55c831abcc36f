"""Instruction following as part of a reward: the share of a row's instructions that a reply follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.data.sources.records import DataError
from strop.environments.base import EnvironmentConfigError
from strop.environments.instructions.instruction import check_instructions, read_instructions, read_response
from strop.environments.verifiers.base import Reply, Score, Verifier, check_positive
from strop.types import Task


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
