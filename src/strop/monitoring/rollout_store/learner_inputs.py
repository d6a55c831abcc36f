"""Stored inputs of a learner besides a rollout's tokens, for training a step again (``strop replay``)."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from strop.monitoring.rollout_store.stored_images import image_name

if TYPE_CHECKING:
    from torch import Tensor

    from strop.columns import TokenColumn
    from strop.types import Group, Rollout, Turn

PROMPT = -1  # instead of the index of a turn's first token


@dataclass(frozen=True, kw_only=True)
class StoredBaseline:
    """The greedy rollout of a group, with the fields that credit needs."""

    reward: float
    tokens: int  # sampled
    ending: str


@dataclass(frozen=True, kw_only=True)
class ImagePlace:
    """The position of an image in a rollout."""

    turn: int  # index, among the record's tokens, of the first token of the turn that shows it; or PROMPT
    start: int  # its first placeholder token, counted on its path
    length: int
    image: str  # the name of its file


@dataclass(frozen=True, kw_only=True)
class StoredValues:
    """The values of a column (``strop.columns``) of a turn of the policy, or of a rollout."""

    turn: int  # index of the first token of the turn among the tokens of the record; PROMPT: of the rollout
    shape: tuple[int, ...]
    data: bytes  # little-endian, row by row


@dataclass(frozen=True, kw_only=True)
class StoredSets:
    """The values of a ragged column, such as the ids that each token of a record was sampled from; none for tokens of the environment.

    In a file they are a list of lists. In memory they are the bytes of arrays, because a step has millions of ids."""

    sizes: bytes  # int32, of each token
    ids: bytes  # int32, one set after the other

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> StoredSets:
        sizes = numpy.fromiter(map(len, sets), dtype=numpy.int32, count=len(sets))
        ids = numpy.fromiter(chain.from_iterable(sets), dtype=numpy.int32, count=int(sizes.sum()))
        return cls(sizes=sizes.tobytes(), ids=ids.tobytes())

    @property
    def lengths(self) -> Any:
        return numpy.frombuffer(self.sizes, dtype=numpy.int32)

    def split(self) -> list[Any]:
        """Return the set of each token as an array."""
        found: list[Any] = numpy.split(numpy.frombuffer(self.ids, dtype=numpy.int32), numpy.cumsum(self.lengths)[:-1])
        return found if len(self.lengths) else []

    def to_lists(self) -> list[list[int]]:
        return [each.tolist() for each in self.split()]


StoredColumn = tuple[StoredValues, ...] | StoredSets


def make_set_column(stored: Sequence[StoredSets | None]) -> Any:
    """Return the ragged column of records as an Arrow array, list<list<int32>>; no value passes through Python."""
    import pyarrow as pa

    known = [each for each in stored if each is not None]
    ids = pa.array(numpy.frombuffer(b"".join(each.ids for each in known), dtype=numpy.int32))
    sizes = numpy.frombuffer(b"".join(each.sizes for each in known), dtype=numpy.int32)
    sets = pa.ListArray.from_arrays(pa.array(_offsets(sizes)), ids)
    ends = _offsets([0 if each is None else len(each.lengths) for each in stored])
    absent = [each is None for each in stored]
    return pa.ListArray.from_arrays(pa.array(ends, mask=numpy.array([*absent, False])), sets)


def _offsets(sizes: Any) -> Any:
    return numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int32)


def make_baseline(group: Group) -> StoredBaseline | None:
    """Return the greedy rollout of a group; None if it has none."""
    baseline = group.baseline
    if baseline is None:
        return None
    ending = "" if baseline.ending is None else baseline.ending.value
    return StoredBaseline(reward=float(baseline.reward), tokens=baseline.sampled_tokens, ending=ending)


def list_image_places(rollout: Rollout) -> tuple[ImagePlace, ...]:
    """Return the positions of a rollout's images: those of its prompt, then those of its turns."""
    placed = [(PROMPT, image) for image in rollout.images]
    placed += [(start, image) for start, turn in _list_turns(rollout) for image in turn.images]
    return tuple(
        ImagePlace(turn=turn, start=image.start, length=image.length, image=image_name(image.digest)) for turn, image in placed
    )


def list_columns(rollout: Rollout, columns: Iterable[TokenColumn]) -> dict[str, StoredColumn]:
    """Return what was recorded of a rollout, by the names of the columns."""
    turns = _list_turns(rollout)
    holders = [(PROMPT, rollout.columns), *((start, turn.columns) for start, turn in turns)]
    return {
        column.name: _store_sets([turn for _, turn in turns], column)
        if column.ragged
        else tuple(_store(start, held[column]) for start, held in holders if column in held)
        for column in columns
    }


def _store_sets(turns: Sequence[Turn], column: TokenColumn) -> StoredSets:
    nothing = numpy.zeros(0, dtype=numpy.int32)
    sizes, ids = [nothing], [nothing]
    for turn in turns:
        sets = turn.columns[column].numpy() if column in turn.columns else numpy.full((len(turn.tokens), 0), 0, dtype=numpy.int32)
        sizes.append((sets != column.fill).sum(1, dtype=numpy.int32))
        ids.append(sets[sets != column.fill])
    return StoredSets(sizes=numpy.concatenate(sizes).tobytes(), ids=numpy.concatenate(ids).tobytes())


def _store(start: int, values: Tensor) -> StoredValues:
    import torch

    return StoredValues(
        turn=start, shape=tuple(values.shape), data=values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def read_column(stored: StoredColumn, column: TokenColumn, start: int, end: int) -> Tensor | None:
    """Return the values of a turn with the tokens ``start`` to ``end`` of the record, or of the rollout, PROMPT; None without any."""
    if isinstance(stored, StoredSets):
        import torch

        sets = [torch.from_numpy(each.copy()) for each in stored.split()[start:end]] if start != PROMPT else []
        return torch.nn.utils.rnn.pad_sequence(sets, batch_first=True, padding_value=column.fill) if sets else None
    found = next((each for each in stored if each.turn == start), None)
    return None if found is None else _read_values(found, column)


def _read_values(stored: StoredValues, column: TokenColumn) -> Tensor:
    """Return stored values in the type that they had."""
    import torch

    count = prod(stored.shape)
    dtype = column.find_dtype(len(stored.data) // count if count else 0)
    if not count:
        return torch.zeros(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=dtype).reshape(stored.shape)


def decode_inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record from plain values; None where a run did not store them."""
    baseline, places = row.get("baseline"), row.get("image_places")
    return {
        "baseline": None if baseline is None else StoredBaseline(**{**baseline, "reward": float(baseline["reward"])}),
        "image_places": None if places is None else tuple(ImagePlace(**each) for each in places),
    }


def decode_columns(row: Mapping[str, Any]) -> dict[str, StoredColumn]:
    """Return those columns of a row that hold columns of its rollout. They are known by their form: readers need no declaration."""
    found: dict[str, StoredColumn] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            continue
        if all(isinstance(each, Mapping) and each.keys() == {"turn", "shape", "data"} for each in value):
            found[name] = tuple(map(_decode_values, value))
        elif all(isinstance(each, list) for each in value) and isinstance(next(chain.from_iterable(value), 0), int):
            found[name] = StoredSets.of(value)
    return found


def _decode_values(stored: Mapping[str, Any]) -> StoredValues:
    data = stored["data"]
    return StoredValues(
        turn=stored["turn"], shape=tuple(stored["shape"]), data=b64decode(data) if isinstance(data, str) else data
    )


def _list_turns(rollout: Rollout) -> list[tuple[int, Turn]]:
    """Return the turns of all paths, each with the index of its first token among the tokens of the record."""
    start, found = 0, []
    for turn in (*rollout.turns, *(turn for branch in rollout.branches for turn in branch.turns)):
        found.append((start, turn))
        start += len(turn.tokens)
    return found
