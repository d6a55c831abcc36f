"""Questions about drawn images, generated from (seed, index) and drawn by PIL: how many shapes there are, or which number is shown."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Literal

from strop.data.builtin_dataset import Purpose
from strop.data.sources.image_columns import write_data_url
from strop.data.sources.records import DataError, Indexed, Record, is_held_out
from strop.data.sources.source import DataSource
from strop.environments.answers import extract_last_number
from strop.environments.base import DEFAULT_NUM_TASKS, Environment, EnvironmentConfigError, GeneratedTasks, PromptedTask, reward
from strop.sampling import mix_seed
from strop.types import Image, Messages, Rollout

Kind = Literal["count", "number"]
KINDS: tuple[Kind, ...] = ("count", "number")
SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": (200, 30, 30), "green": (30, 140, 50), "blue": (40, 70, 200), "black": (20, 20, 20)}
BACKGROUND = (255, 255, 255)
MAX_ATTEMPTS = 10_000  # draws until a question falls into the requested split
SMALLEST_CELL = 6  # side of a shape's or digit's square, in pixels

# The bars of each digit: top, upper left, upper right, middle, lower left, lower right, bottom.
BARS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
# (x0, y0, x1, y1) of each bar in a digit 4 wide and 7 high
BAR_BOXES = ((0, 0, 4, 1), (0, 0, 1, 4), (3, 0, 4, 4), (0, 3, 4, 4), (0, 3, 1, 7), (3, 3, 4, 7), (0, 6, 4, 7))


@dataclass(frozen=True)
class DrawnQuestion:
    """A question, its answer, and its image as a PNG file."""

    id: str  # description of the drawing, in words
    question: str
    answer: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Options of drawings and questions."""

    kinds: tuple[Kind, ...] = KINDS
    image_size: int = 112  # pixels of each side
    max_count: int = 6  # of the counted shapes; at least 1
    max_others: int = 0  # of additional shapes of another kind
    digits: int = 2  # of a number
    held_out_fraction: float = 0.2  # share of all images reserved for validation, with every seed

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise DataError(f"kinds is {list(self.kinds)}; choose from {', '.join(KINDS)}")
        if self.max_count < 1 or self.max_others < 0 or self.digits < 1:
            raise DataError(
                f"max_count is {self.max_count}, max_others {self.max_others} and digits {self.digits}; set the first and the last to at "
                "least 1, and max_others to at least 0"
            )
        if not 0 < self.held_out_fraction < 1:
            raise DataError(f"held_out_fraction is {self.held_out_fraction}; it must lie between 0 and 1")
        cells = max(self.cells_a_side, self.digits + 1)
        if self.image_size < cells * SMALLEST_CELL:
            raise DataError(
                f"image_size is {self.image_size} pixels, too small for {cells} places in a row; set it to at least {cells * SMALLEST_CELL}"
            )

    @property
    def cells_a_side(self) -> int:
        """Cells for shapes in each row and column, of which at least a third stay empty."""
        wanted = 1.5 * (self.max_count + self.max_others)
        return next(side for side in range(1, 10_000) if side * side >= wanted)

    def draw(self, seed: int, index: int, *, held_out: bool) -> DrawnQuestion:
        """Return the first question from this index's own random stream that belongs to the split. Raises DataError if there is
        none.
        """
        random = Random(mix_seed(seed, index))
        for _ in range(MAX_ATTEMPTS):
            plan = self._plan(random)
            if is_held_out(plan.content, self.held_out_fraction) == held_out:
                return DrawnQuestion(f"{plan.colour} {plan.content}", plan.question, plan.answer, _paint(plan, self.image_size))
        side = "validation" if held_out else "training"
        raise DataError(f"no image is left for {side}: raise max_count or digits, or change held_out_fraction")

    def _plan(self, random: Random) -> _Plan:
        colour = random.choice([*COLOURS])
        if random.choice(self.kinds) == "number":
            number = str(random.randrange(10**self.digits)).zfill(self.digits)
            return _Plan(f"number {number}", "What number is shown?", str(int(number)), colour, number)
        return self._plan_shapes(random, colour)

    def _plan_shapes(self, random: Random, colour: str) -> _Plan:
        asked, *others = random.sample(SHAPES, len(SHAPES))
        count, beside = random.randint(1, self.max_count), random.randint(0, self.max_others)
        cells = random.sample(range(self.cells_a_side**2), count + beside)
        kinds = [asked] * count + [random.choice(others) for _ in range(beside)]
        shapes = tuple(sorted(zip(cells, kinds, strict=True)))
        layout = " ".join(f"{kind}@{cell}" for cell, kind in shapes)
        return _Plan(layout, f"How many {asked}s are there?", str(count), colour, "", self.cells_a_side, shapes)


@dataclass(frozen=True)
class _Plan:
    content: str  # in words, without colour: an image is held out in all colours
    question: str
    answer: str
    colour: str
    number: str = ""
    side: int = 0  # cells
    shapes: tuple[tuple[int, str], ...] = ()  # (cell, kind)


def _paint(plan: _Plan, size: int) -> bytes:
    """Draw a plan as a PNG file. Raises DataError without PIL."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DataError(f"images are drawn by PIL, which cannot be imported here ({error}): pip install pillow") from error
    image = Image.new("RGB", (size, size), BACKGROUND)
    draw: Any = ImageDraw.Draw(image)
    colour = COLOURS[plan.colour]
    for box in _place_digits(plan.number, size):
        draw.rectangle(box, fill=colour)
    for cell, kind in plan.shapes:
        _draw_shape(draw, kind, _place_cell(cell, plan.side, size), colour)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _place_digits(number: str, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bars of a number in the middle of the image, in pixels."""
    unit = size / (6 * max(len(number), 1) + 2)  # a digit is 4 units wide, with a gap of 2
    top = (size - 7 * unit) / 2
    for place, digit in enumerate(number):
        left = (2 + 6 * place) * unit
        for bar, (x0, y0, x1, y1) in zip(BARS[int(digit)], BAR_BOXES, strict=True):
            if bar == "1":
                yield (round(left + x0 * unit), round(top + y0 * unit), round(left + x1 * unit) - 1, round(top + y1 * unit) - 1)


def _place_cell(cell: int, side: int, size: int) -> tuple[int, int, int, int]:
    """Return the box of a shape in its cell, with a margin, in pixels."""
    row, column = divmod(cell, side)
    width = size / side
    margin = width / 8
    x0, y0 = column * width + margin, row * width + margin
    return round(x0), round(y0), round(x0 + width - 2 * margin) - 1, round(y0 + width - 2 * margin) - 1


def _draw_shape(draw: Any, kind: str, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> None:
    x0, y0, x1, y1 = box
    match kind:
        case "circle":
            draw.ellipse(box, fill=colour)
        case "square":
            draw.rectangle(box, fill=colour)
        case _:
            draw.polygon([((x0 + x1) // 2, y0), (x0, y1), (x1, y1)], fill=colour)


DEFAULT_SIZE = 10_000


class DrawnRows(Indexed[Record]):
    """Rows with the columns image (a PNG file), problem and answer. ``dataset_kwargs`` are the options of ``Drawing``.

    Questions of validation and evaluation never occur in training, with any seed."""

    def __init__(
        self,
        *,
        purpose: Purpose = "train",
        size: int | None = None,
        seed: int = 42,
        kinds: Sequence[Kind] = KINDS,
        image_size: int = 112,
        max_count: int = 6,
        max_others: int = 0,
        digits: int = 2,
        held_out_fraction: float = 0.2,
    ) -> None:
        self._held_out, self._seed, self._size = purpose != "train", seed, size or DEFAULT_SIZE
        self._drawing = Drawing(
            kinds=tuple(kinds),
            image_size=image_size,
            max_count=max_count,
            max_others=max_others,
            digits=digits,
            held_out_fraction=held_out_fraction,
        )

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> Record:
        drawn = self._drawing.draw(self._seed, index, held_out=self._held_out)
        return {"image": {"bytes": drawn.content, "path": None}, "problem": drawn.question, "answer": drawn.answer}


@dataclass(frozen=True, kw_only=True)
class DrawnImages(Environment[PromptedTask]):
    """The answer is the last number of the last turn. ``data.part`` or ``data.split`` "validation" selects held-out images.

    The other options are those of ``Drawing``."""

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
