"""Questions about drawn images, generated from (seed, index): how many shapes there are, or which number is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from strop.data.sources.image_columns import write_data_url
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.answers import extract_last_number
from strop.environments.base import DEFAULT_NUM_TASKS, Environment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.extensions.images.drawn_rows import KINDS, Drawing, Kind
from strop.types import Image, Messages, Rollout


@dataclass(frozen=True, kw_only=True)
class DrawnImages(Environment[PromptedTask]):
    """The answer is the last number of the last turn. ``data.part`` or ``data.split`` "validation" selects held-out images.

    The other options are those of ``strop.extensions.images.drawn_rows.Drawing``."""

    kinds: tuple[Kind, ...] = KINDS
    image_size: int = 112  # pixels of each side
    max_count: int = 6  # of the counted shapes
    max_others: int = 0  # of additional shapes of another kind
    digits: int = 2  # of a number
    held_out_fraction: float = 0.2  # share of all images reserved for validation, with every seed
    wording: str = "{question} Answer with just the number."

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{question}" not in self.wording:
            raise EnvironmentConfigError(f"wording {self.wording!r} has no {{question}}, so the question would be missing")
        try:
            self.drawing  # noqa: B018
        except DataError as error:
            raise EnvironmentConfigError(str(error)) from error

    @property
    def drawing(self) -> Drawing:
        return Drawing(**{each.name: getattr(self, each.name) for each in fields(Drawing)})

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        template, drawing = data.load_template(), self.drawing

        def make(index: int) -> PromptedTask:
            drawn = drawing.draw(data.seed, index, held_out=data.held_out)
            question = self.wording.replace("{question}", drawn.question)
            *before, asked = template.render(question)
            shown = replace(asked, images=(Image(write_data_url(drawn.content)),))
            return PromptedTask(id=drawn.id, question=question, answer=drawn.answer, messages=(*before, shown))

        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, make)

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: PromptedTask, rollout: Rollout) -> bool:
        return extract_last_number(rollout.content) == int(task.answer)

    def answer_key(self, task: PromptedTask, rollout: Rollout) -> str | None:
        number = extract_last_number(rollout.content)
        return None if number is None else str(number)
