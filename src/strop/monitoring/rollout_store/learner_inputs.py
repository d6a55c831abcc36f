"""What a learner reads of a rollout besides its tokens, as it is stored: for a step that is trained again (``strop replay``)."""

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

PROMPT = -1  # in place of the first token of a turn


@dataclass(frozen=True, kw_only=True)
class StoredBaseline:
    """The greedy rollout of a group, as far as its credit reads it."""

    reward: float
    tokens: int  # sampled
    ending: str


@dataclass(frozen=True, kw_only=True)
class ImagePlace:
    """Where an image of a rollout stands."""

    turn: int  # index of the first token of the turn that shows it, among the tokens of the record; PROMPT
    start: int  # of the first token that stands for it, counted on its path
    length: int
    image: str  # the name of its file


@dataclass(frozen=True, kw_only=True)
class StoredValues:
    """The values of a column (``strop.columns``) of a turn of the policy, or of a rollout."""

    turn: int  # index of the first token of the turn among the tokens of the record; PROMPT: of the rollout
    shape: tuple[int, ...]
    data: bytes  # little-endian, row by row


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """The ids that each token of a record was sampled from; none for tokens of the environment.

    In a file they are a list of lists. Here they are the bytes of arrays: a step has millions of ids, which should not be Python's."""

    sizes: bytes  # int32, of each token
    ids: bytes  # int32, one set after the other

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> KeptTokens:
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


def make_kept_column(kept: Sequence[KeptTokens | None]) -> Any:
    """Return the column of records as an Arrow array, list<list<int32>>; no value passes through Python."""
    import pyarrow as pa

    known = [each for each in kept if each is not None]
    ids = pa.array(numpy.frombuffer(b"".join(each.ids for each in known), dtype=numpy.int32))
    sizes = numpy.frombuffer(b"".join(each.sizes for each in known), dtype=numpy.int32)
    sets = pa.ListArray.from_arrays(pa.array(_offsets(sizes)), ids)
    ends = _offsets([0 if each is None else len(each.lengths) for each in kept])
    absent = [each is None for each in kept]
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
    """Return where the images of a rollout stand: those of its prompt, then those of its turns."""
    placed = [(PROMPT, image) for image in rollout.images]
    placed += [(start, image) for start, turn in _list_turns(rollout) for image in turn.images]
    return tuple(
        ImagePlace(turn=turn, start=image.start, length=image.length, image=image_name(image.digest)) for turn, image in placed
    )


def list_kept_tokens(rollout: Rollout) -> KeptTokens | None:
    """Return the ids that each token was sampled from, none for tokens of the environment; None if nothing was recorded."""
    turns = [turn for _, turn in _list_turns(rollout)]
    if all(turn.kept is None for turn in turns):
        return None
    parts = [_find_kept(turn) for turn in turns]
    return KeptTokens(
        sizes=numpy.concatenate([sizes for sizes, _ in parts]).tobytes(),
        ids=numpy.concatenate([ids for _, ids in parts]).tobytes(),
    )


def list_columns(rollout: Rollout, columns: Iterable[TokenColumn]) -> dict[str, tuple[StoredValues, ...]]:
    """Return what was recorded of a rollout, by the names of the columns."""
    holders = [(PROMPT, rollout.columns), *((start, turn.columns) for start, turn in _list_turns(rollout))]
    return {column.name: tuple(_store(start, held[column]) for start, held in holders if column in held) for column in columns}


def _store(start: int, values: Tensor) -> StoredValues:
    import torch

    return StoredValues(
        turn=start, shape=tuple(values.shape), data=values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def read_values(stored: StoredValues, column: TokenColumn) -> Tensor:
    """Return stored values in the type that they had."""
    import torch

    count = prod(stored.shape)
    dtype = column.find_dtype(len(stored.data) // count if count else 0)
    if not count:
        return torch.zeros(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=dtype).reshape(stored.shape)


def decode_inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record from plain values; None where a run did not store them."""
    baseline, places, kept = (row.get(name) for name in ("baseline", "image_places", "kept_tokens"))
    return {
        "baseline": None if baseline is None else StoredBaseline(**{**baseline, "reward": float(baseline["reward"])}),
        "image_places": None if places is None else tuple(ImagePlace(**each) for each in places),
        "kept_tokens": None if kept is None else KeptTokens.of(kept),
    }


def decode_columns(row: Mapping[str, Any]) -> dict[str, tuple[StoredValues, ...]]:
    """Return those columns of a row that hold columns of its rollout."""
    return {name: tuple(map(_decode_values, value)) for name, value in row.items() if _is_column(value)}


def _is_column(value: Any) -> bool:
    """Return whether a value of a row is a column of the rollout: known by its form, so that readers need no declaration."""
    return isinstance(value, list) and all(
        isinstance(each, Mapping) and each.keys() == {"turn", "shape", "data"} for each in value
    )


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


def _find_kept(turn: Turn) -> tuple[Any, Any]:
    """Return the sizes of the sets of a turn, and their ids, one set after the other."""
    if turn.kept is None:
        return numpy.zeros(len(turn.tokens), dtype=numpy.int32), numpy.zeros(0, dtype=numpy.int32)
    kept = turn.kept.numpy().astype(numpy.int32, copy=False)
    return (kept >= 0).sum(1, dtype=numpy.int32), kept[kept >= 0]
