"""An environment that shows drawn images: one in the prompt, and another in the answer to the first turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Image, Message, Messages, Rollout, Task
from support.vision_models import as_data_url, draw_image


@cache
def draw(seed: int) -> Image:
    return Image(as_data_url(draw_image(seed, 30 + 30 * (seed % 3), 44)))


@dataclass(frozen=True, kw_only=True)
class Shown(Environment[Task]):
    turns: int = 1

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(data.size or 1000, lambda index: Task(id=str(index), question="which?"))

    def prompt(self, task: Task) -> Messages:
        images = (draw(int(task.id)),) if int(task.id) % 4 else ()
        return (Message("user", task.question, images=images),)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        if len(rollout.policy_turns) == self.turns:
            return None
        return (Message("user", "and now?", images=(draw(100 + int(task.id)),)),)

    @reward(weight=1.0, accuracy=True)
    def low(self, task: Task, rollout: Rollout) -> float:
        text = "".join(turn.text for turn in rollout.policy_turns)
        return sum(letter < "n" for letter in text) / max(len(text), 1)
