"""Assigns the images of a record to the placeholders of its messages."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from strop.data.sources.images.image_columns import read_reference
from strop.data.sources.records import DataError
from strop.types import Image, Message

PLACE = re.compile(r"<image(?:_\d+)?>")  # placeholders in the text of a record with images


class RecordImages:
    """The images of a record, handed out in order."""

    def __init__(self, values: Sequence[object], where: str = "the record") -> None:
        self._left = deque(values)
        self._where = where
        self.given = len(self._left)

    @property
    def left(self) -> int:
        return len(self._left)

    def take(self) -> str | None:
        """Return the reference of the next image; None if there is no other."""
        return read_reference(self._left.popleft(), self._where) if self._left else None

    def place(self, text: str, where: str) -> tuple[str, tuple[Image, ...]]:
        """Return a text without its ``<image>`` placeholders, and the images at those positions. Raises DataError for more
        placeholders than images.

        In a record without images, the text is left unchanged."""
        if not self.given:
            return text, ()
        kept, images, position = "", [], 0
        for found in PLACE.finditer(text):
            kept += text[position : found.start()]
            position = found.end()
            if (reference := self.take()) is None:
                raise DataError(
                    f"{where} has more places {found[0]} than the record has images, which are {self.given}; fix the record"
                )
            images.append(Image(reference, position=len(kept)))
        return kept + text[position:], tuple(images)

    def place_first(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages without placeholders, with all images at the beginning of the user's first message."""
        asked = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if asked is None or self.left < self.given:
            return tuple(messages)
        references = [self.take() for _ in range(self.left)]
        images = tuple(Image(reference) for reference in references if reference is not None)
        return (*messages[:asked], replace(messages[asked], images=images), *messages[asked + 1 :])


def render_question(text: str, images: Sequence[object], prefix: str, where: str) -> tuple[str, tuple[Image, ...]]:
    """Return a question without its placeholders, and its images positioned after ``prefix``, the text before it.

    An image at the very start of the question, or without a placeholder, goes before the prefix, as in NeMo-RL. Raises DataError
    if the numbers of placeholders and images differ.
    """
    record = RecordImages(images, where)
    asked, placed = record.place(text, where)
    if not placed:
        placed = tuple(Image(read_reference(value, where)) for value in images)
    elif record.left:
        raise DataError(f"{where} has places for all but {record.left} of the images of the record; fix the record")
    return asked, tuple(replace(each, position=each.position + len(prefix) if each.position else 0) for each in placed)
