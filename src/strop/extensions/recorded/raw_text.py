"""Raw text, trained on as it is: without a prompt or chat template."""

from __future__ import annotations

from collections.abc import Sequence

from strop.data.sources.records import DataError, Record, Records, has_key


class PackedTexts(Records):
    """Samples of consecutive texts joined by newlines; each ends with the text that reaches the required number of characters."""

    uniform = True

    def __init__(self, records: Records, key: str, characters: int) -> None:
        self.name, self._records, self._key = records.name, records, key
        find_texts(records, key)
        lengths = {row: len(text) for row, (text,) in enumerate(records.iter_values((key,))) if is_text(text)}
        self._texts, self._starts, length = tuple(lengths), [0], 0
        for position, characters_here in enumerate(lengths.values(), start=1):
            length += characters_here
            if length >= characters or position == len(lengths):
                self._starts.append(position)
                length = 0

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read_record(self, index: int) -> Record:
        return {self._key: "\n".join(self._records[row][self._key] for row in self._rows(index))}

    def location(self, index: int) -> str:
        rows = self._rows(index)
        return f"{self._records.location(rows[0])} and the {len(rows) - 1} after it"

    def _rows(self, index: int) -> Sequence[int]:
        return self._texts[self._starts[index] : self._starts[index + 1]]


def find_texts(records: Records, key: str) -> Sequence[int]:
    """Return the indices of the records with a text. Raises DataError if there are none."""
    if not has_key(records[0], key):
        raise DataError(
            f"{records.location(0)} has no key {key!r}; its keys are {sorted(records[0])}. Set text_key to one of them"
        )
    found = [index for index, (text,) in enumerate(records.iter_values((key,))) if is_text(text)]
    if not found:
        raise DataError(
            f"none of the {len(records)} records of {records.name!r} has a text under {key!r}. Set text_key to another"
        )
    return found


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
