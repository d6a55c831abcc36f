"""Drawn images: the same for the same seed, held out by what they show, and with as many shapes as the answer says."""

from __future__ import annotations

import io

import pytest

from strop.data.sources.image_columns import write_data_url
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.images.drawn_images import COLOURS, Drawing, DrawnRows
from strop.extensions.recorded.examples import conversations

ROWS = "strop.extensions.images.drawn_images.DrawnRows"


def count_regions(content: bytes) -> int:
    """Count the connected regions that are not background."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        left = {(x, y) for x in range(width) for y in range(height) if image.getpixel((x, y)) in COLOURS.values()}
    regions = 0
    while left:
        regions, edge = regions + 1, [left.pop()]
        while edge:
            x, y = edge.pop()
            near = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & left
            left -= near
            edge += near
    return regions


def test_the_same_seed_and_index_give_the_same_file_and_others_give_others() -> None:
    drawing = Drawing(image_size=56)
    drawn = [drawing.draw(seed, index, held_out=False) for seed in (0, 1) for index in range(20)]
    assert drawn == [drawing.draw(seed, index, held_out=False) for seed in (0, 1) for index in range(20)]
    assert len({each.content for each in drawn}) > 30


def test_there_are_as_many_shapes_as_the_answer_says() -> None:
    drawing = Drawing(kinds=("count",), image_size=48, max_count=5)
    for index in range(12):
        drawn = drawing.draw(3, index, held_out=False)
        assert count_regions(drawn.content) == int(drawn.answer), drawn.id
    several = Drawing(kinds=("count",), image_size=48, max_count=3, max_others=3).draw(0, 1, held_out=False)
    asked = several.question.split()[2].removesuffix("s")
    assert several.id.count(f"{asked}@") == int(several.answer) and count_regions(several.content) == several.id.count("@")


def test_every_digit_is_drawn_otherwise() -> None:
    drawing = Drawing(kinds=("number",), digits=1, image_size=32)
    drawn = {(each.answer, each.id.split()[0]): each.content for each in (drawing.draw(0, n, held_out=False) for n in range(300))}
    red = {answer: content for (answer, colour), content in drawn.items() if colour == "red"}
    assert len(red) >= 7 and len(set(red.values())) == len(red)


def test_what_is_held_out_is_never_trained_on_in_any_colour() -> None:
    drawing = Drawing(kinds=("number",), image_size=40)
    shown = {held_out: {drawing.draw(0, n, held_out=held_out).answer for n in range(200)} for held_out in (False, True)}
    assert shown[True] and not shown[False] & shown[True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("smell",)}, "kinds is .*smell.*; choose from count, number"),
        ({"max_count": 0}, "max_count is 0"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0"),
        ({"image_size": 10}, "image_size is 10 pixels, too small for 3 places in a row; set it to at least 18"),
    ],
)
def test_a_drawing_that_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Drawing(**options)


def test_rows_are_recorded_answers_of_training_and_of_validation() -> None:
    examples = conversations(DataSource(dataset_name=ROWS, size=3, dataset_kwargs={"image_size": 56, "kinds": ["count"]}))
    drawn = Drawing(image_size=56, kinds=("count",)).draw(42, 1, held_out=False)
    asked, answered = examples[1].messages
    assert len(examples) == 3 and (asked.content, answered.content) == (drawn.question, drawn.answer)
    assert [each.source for each in asked.images] == [write_data_url(drawn.content)]
    held_out = DrawnRows(purpose="validation", size=5, image_size=56)
    assert held_out[2]["image"]["bytes"] == Drawing(image_size=56).draw(42, 2, held_out=True).content and len(held_out[1:3]) == 2
