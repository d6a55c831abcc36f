"""Drawn questions as rows of a data set, for training on recorded answers: ``dataset_name: strop.data.images.drawn_rows.DrawnRows``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from strop.data.builtin.builtin_dataset import Purpose
from strop.data.images.drawn_questions import KINDS, Drawing, Kind
from strop.data.sources.records import Record

DEFAULT_SIZE = 10_000


class DrawnRows(Sequence[Record]):
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

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        drawn = self._drawing.draw(self._seed, range(len(self))[index], held_out=self._held_out)
        return {"image": {"bytes": drawn.content, "path": None}, "problem": drawn.question, "answer": drawn.answer}
