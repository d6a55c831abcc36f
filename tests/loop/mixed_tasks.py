"""Tasks of which a policy can learn a part only: some have an answer, many are impossible, some are solved by anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loop.runs import tiny_config
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.types import Rollout, Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class MixedTasks(Environment[Task]):
    """A letter asks for a digit. Only letters that can be learnt are validated on. ``level`` in a row says how hard it is."""

    answers: str = "1379"  # digits that the letters that can be learnt ask for
    any_answer: bool = True  # each letter takes any of them; false: one each, in turn
    learnable: int = 8
    impossible: int = 32
    trivial: int = 8

    def tasks(self, data: DataSource) -> Sequence[Task]:
        rows = list(self._rows(data.held_out))
        return [
            Task(id=letter, question=letter, answer=answer, metadata={"level": level})
            for letter, (level, answer) in zip(LETTERS, rows, strict=False)
        ]

    def _rows(self, held_out: bool) -> Iterator[tuple[int, str]]:
        for place in range(self.learnable):
            yield 1, self.answers if self.any_answer else self.answers[place % len(self.answers)]
        if not held_out:
            yield from [(2, "é")] * self.impossible  # no character of the tokenizer
            yield from [(0, "")] * self.trivial

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: Task, rollout: Rollout) -> bool:
        return task.answer == "" or (rollout.text != "" and rollout.text[0] in task.answer)


def mixed_config(model: Any, seed: int, steps: int, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run on mixed tasks."""
    settings = {name: value for name, value in tiny_config(model).items() if not name.startswith(("env.", "data.validation"))}
    return settings | {
        "env.mixed.type": "loop.mixed_tasks:MixedTasks",
        "data.train.env_name": "mixed",
        "data.validation.env_name": "mixed",
        "policy.optimizer.kwargs.lr": 0.005,
        "policy.train_micro_batch_size": 64,
        "policy.generation.max_new_tokens": 2,
        "grpo.seed": seed,
        "grpo.num_prompts_per_step": 8,
        "grpo.num_generations_per_prompt": 16,
        "grpo.max_num_steps": steps,
        "grpo.val_period": 5,
        "grpo.val_at_start": True,
        "grpo.val_num_generations_per_prompt": 8,
        "checkpointing.enabled": False,
        "checkpointing.metric_name": None,
        **changes,
    }
