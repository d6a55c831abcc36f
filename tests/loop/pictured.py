"""An environment about drawn images: the second turn shows another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.models.vision.image_files import as_data_url
from strop.types import Image, Message, Messages, Rollout, Task
from support.vision_models import draw_image


def show(number: int, text: str) -> Message:
    return Message("user", text, images=(Image(as_data_url(draw_image(number, 30 + 30 * (number % 3), 44))),))


@dataclass(frozen=True, kw_only=True)
class Pictured(Environment[Task]):
    """Rewards the share of letters of the first half of the alphabet."""

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(data.size or 100, lambda index: Task(id=str(index)))

    def prompt(self, task: Task) -> Messages:
        return (show(int(task.id), "what?"),)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        return None if len(rollout.policy_turns) == 2 else (show(50 + int(task.id) % 3, "and now?"),)

    @reward(weight=1.0, accuracy=True)
    def early(self, task: Task, rollout: Rollout) -> float:
        text = "".join(turn.text for turn in rollout.policy_turns)
        return sum(letter < "n" for letter in text) / max(len(text), 1)
