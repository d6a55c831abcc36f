"""Sums, differences and products of a few integers, generated from (seed, index). The policy answers in free text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from strop.data.sources.records import DataError, is_held_out
from strop.data.sources.source import DataSource
from strop.environments.answers import extract_last_number
from strop.environments.base import (
    DEFAULT_NUM_TASKS,
    Environment,
    EnvironmentConfigError,
    GeneratedTasks,
    PromptedTask,
    reward,
)
from strop.sampling import mix_seed
from strop.types import Messages, Rollout

OPERATORS = ("+", "-", "*")
MAX_ATTEMPTS = 10_000  # draws until a task falls into the requested split; far more than any sensible fraction needs


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Environment[PromptedTask]):
    """Integer arithmetic.

    ``data.part`` or ``data.split`` "validation" selects held-out expressions: training sees neither them nor their reorderings.
    """

    operators: tuple[str, ...] = ("+",)  # drawn from: + - *
    operands: int = 2  # numbers in one expression
    min_operand: int = 0
    max_operand: int = 50
    wording: str = "What is {expression}? Answer with just the number."
    held_out_fraction: float = 0.2  # of all expressions, reserved for validation with every seed

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.operators or not set(self.operators) <= set(OPERATORS):
            raise EnvironmentConfigError(f"operators is {list(self.operators)}; choose from {', '.join(OPERATORS)}")
        if self.operands < 2:
            raise EnvironmentConfigError(f"operands is {self.operands}; an expression needs at least 2")
        if self.min_operand > self.max_operand:
            raise EnvironmentConfigError(f"min_operand {self.min_operand} is above max_operand {self.max_operand}")
        if "{expression}" not in self.wording:
            raise EnvironmentConfigError(f"wording {self.wording!r} has no {{expression}}, so the question would be missing")
        if not 0 < self.held_out_fraction < 1:
            raise EnvironmentConfigError(f"held_out_fraction is {self.held_out_fraction}; it must lie between 0 and 1")

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        template = data.load_template()

        def make(index: int) -> PromptedTask:
            numbers, operators = self._sample_expression(data, index)
            expression = _format_expression(numbers, operators)
            question = self.wording.replace("{expression}", expression)
            answer = str(evaluate_expression(numbers, operators))
            return PromptedTask(id=expression, question=question, answer=answer, messages=template.render(question))

        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, make)

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        return extract_last_number(rollout.content) == int(task.answer)

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        number = extract_last_number(rollout.content)
        return None if number is None else str(number)

    def _sample_expression(self, data: DataSource, index: int) -> tuple[list[int], list[str]]:
        """Return the first draw from this index's own random stream that belongs to the requested split."""
        random = Random(mix_seed(data.seed, index))
        for _ in range(MAX_ATTEMPTS):
            numbers = [random.randint(self.min_operand, self.max_operand) for _ in range(self.operands)]
            operators = [random.choice(self.operators) for _ in range(self.operands - 1)]
            if is_held_out(f"{sorted(numbers)}{sorted(operators)}", self.held_out_fraction) == data.held_out:
                return numbers, operators
        side = "validation" if data.held_out else "training"
        raise DataError(f"no expression is left for {side}: widen min_operand..max_operand, or change held_out_fraction")


def evaluate_expression(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """Evaluate products first, then sums and differences from left to right."""
    terms = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


def _format_expression(numbers: Sequence[int], operators: Sequence[str]) -> str:
    texts = [str(numbers[0])] + [str(number) if number >= 0 else f"({number})" for number in numbers[1:]]
    return texts[0] + "".join(f" {operator} {text}" for operator, text in zip(operators, texts[1:], strict=True))
