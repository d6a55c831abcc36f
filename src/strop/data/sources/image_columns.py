"""Images of records: columns of paths, URLs, bytes or opened images, converted to references for messages
(``strop.types.Image``).

An image stored in the data itself becomes a ``data:`` URL with its bytes unchanged; an opened image (PIL) is written as PNG.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.data.sources.records import DataError, Record, Records, check_text, get_value, has_key
from strop.data.sources.streamed import StreamedRecords
from strop.types import Image, Message

IMAGES = "images"  # the column that holds a record's image references once it is read
USUAL_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of parts of a message
REFERENCE_KEYS = ("image", "image_url", "url", "path")  # of a part
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FORMATS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp"))  # by first bytes
MEDIA_TAGS = {"audio": ("<audio>", "<sound>"), "sound": ("<sound>",), "video": ("<video>",), "videos": ("<video>",)}


@dataclass(frozen=True)
class ImageColumns:
    """The location of a record's images."""

    key: str | None = None  # the column; None: images, otherwise image, if it holds images
    folder: str | None = None  # base folder of relative paths; None: the working directory
    beside: str | None = None  # the data file's folder, for relative paths not found in the working directory

    def may_be_in(self, record: Record) -> bool:
        """Whether records with these columns may have images."""
        return any(name in record for name in (*USUAL_COLUMNS, *MEDIA_TAGS)) or self.key is not None or self.folder is not None

    def read(self, record: Record, where: str) -> Record:
        """Return the record with its images as a list of references in the column ``images``. Raises DataError."""
        refuse_sound_and_video(record, where)
        column = self._find_column(record, where)
        if column is not None:
            found = get_value(record, column, "image_key", where)
            values = found if isinstance(found, list | tuple) else [found]
            references = [self._place(read_reference(value, f"{where}: {column!r}")) for value in values if value is not None]
            record = {**{name: value for name, value in record.items() if name != column}, IMAGES: references}
        return self._place_parts(record) if self.folder is not None or self.beside is not None else record

    def _find_column(self, record: Record, where: str) -> str | None:
        if self.key is not None:
            if not has_key(record, self.key):
                raise DataError(
                    f"{where} has no column {self.key!r}, which image_key names; it has {sorted(record)}. Set image_key to one of them"
                )
            return self.key
        return next((name for name in USUAL_COLUMNS if name in record and holds_images(record[name])), None)

    def _place(self, reference: str) -> str:
        """Return a relative path joined to its folder, anything else unchanged."""
        if is_address(reference) or os.path.isabs(reference):
            return reference
        if self.folder is not None:
            return str(Path(self.folder, reference))
        beside = None if self.beside is None else Path(self.beside, reference)
        return str(beside) if beside is not None and not os.path.exists(reference) and beside.exists() else reference

    def _place_parts(self, record: Record) -> Record:
        """Resolve the paths in the content parts of messages."""
        columns = [name for name, value in record.items() if _has_parts(value)]
        return (
            {**record, **{name: [self._place_message(each) for each in record[name]] for name in columns}} if columns else record
        )

    def _place_message(self, message: Any) -> Any:
        if not _has_parts([message]):
            return message
        return {**message, "content": [self._place_part(part) for part in message["content"]]}

    def _place_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
            return part
        return {**part, **{key: self._place(part[key]) for key in REFERENCE_KEYS if isinstance(part.get(key), str)}}


def _has_parts(value: Any) -> bool:
    """Whether the value of a column is a list of messages, some of which have a list of parts."""
    listed = value if isinstance(value, list | tuple) else ()
    return any(isinstance(each, Mapping) and isinstance(each.get("content"), list | tuple) for each in listed)


def holds_images(value: Any) -> bool:
    """Whether the value of a column with an image name holds an image, or a list of images.

    A text counts if it is a URL or ends in an image suffix, because other columns use such names too."""
    if isinstance(value, list | tuple):
        return all(holds_images(each) for each in value)
    if isinstance(value, str):
        return is_address(value) or value.lower().endswith(SUFFIXES)
    if isinstance(value, Mapping):
        return bool({"bytes", "path", "url"} & set(value))
    return value is None or isinstance(value, bytes) or is_opened(value)


def read_reference(value: Any, where: str) -> str:
    """Return the reference of an image: a path, an address, bytes, an object with one of them, or an opened image. Raises DataError."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key)), None)
    if isinstance(value, bytes):
        return write_data_url(value)
    if is_opened(value):
        content = io.BytesIO()
        value.save(content, format="PNG")
        return write_data_url(content.getvalue())
    if isinstance(value, str) and value:
        return check_text(value, "image", where)
    raise DataError(
        f"{where} has the image {value!r:.80}; write a path, an address, a data: URL, or an object with bytes or path, as the library "
        "datasets stores images"
    )


def is_opened(value: Any) -> bool:
    """Whether this is an image of PIL; code that has one has imported it."""
    return callable(getattr(value, "save", None)) and hasattr(value, "getbands")


def is_address(reference: str) -> bool:
    return reference.startswith(("data:", "http://", "https://", "hf://"))


def write_data_url(content: bytes) -> str:
    """Return the bytes of an image file as a ``data:`` URL."""
    kind = next((f"image/{name}" for start, name in FORMATS if content.startswith(start)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def refuse_sound_and_video(record: Record, where: str) -> None:
    """Raise DataError for a record whose text has placeholders for audio or video, which supported models do not read."""
    for column, tags in MEDIA_TAGS.items():
        if record.get(column) and any(tag in text for text in _iter_texts(record) for tag in tags):
            raise DataError(
                f"{where} has the column {column!r} and a place for it in a text: audio and video cannot be trained on in this version, "
                "only text and images. Leave the record out"
            )


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_texts(each)


class ImageRecords(Records):
    """Records with their images as references. Images are read together with their record."""

    def __init__(self, records: Records, columns: ImageColumns) -> None:
        self.name, self.uniform, self.lenient = records.name, records.uniform, records.lenient
        self._records, self._columns = records, columns

    def __len__(self) -> int:
        return len(self._records)

    def read_record(self, index: int) -> Record:
        return self._columns.read(self._records.read_record(index), self.location(index))

    def location(self, index: int) -> str:
        return self._records.location(index)

    def iter_values(self, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return self._records.iter_values(columns)

    def __iter__(self) -> Iterator[Record]:
        return (self._columns.read(record, self.location(index)) for index, record in enumerate(self._records))


def read_images(records: Records, columns: ImageColumns) -> Records:
    """Return the records with their images read, or unchanged if they cannot have any."""
    if isinstance(records, StreamedRecords):
        return StreamedRecords(replace(records.stream, change=columns.read))
    is_text = records.uniform and not columns.may_be_in(records[0])
    return records if is_text else ImageRecords(records, columns)


# Assigns the images of a record to the placeholders of its messages.

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
