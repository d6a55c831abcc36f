"""Stored inputs of a learner besides a rollout's tokens, for training a step again (``strop replay``)."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy

from strop.monitoring.rollout_store.stored_images import image_name

if TYPE_CHECKING:
    from torch import Tensor

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
class StoredRoutes:
    """The experts of the tokens read and written by a policy turn."""

    turn: int  # index, among the record's tokens, of the turn's first token
    shape: tuple[int, int, int]  # [R, layers, k], for the R tokens of the path before the turn's last token
    data: bytes  # little-endian integers of one or two bytes, row by row


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """The ids that each token of a record was sampled from; none for tokens of the environment.

    In a file they are a list of lists. In memory they are the bytes of arrays, because a step has millions of ids."""

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
    """Return the column of records as an Arrow array, list<list<int32>>, without creating Python objects."""
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
    """Return the positions of a rollout's images: those of its prompt, then those of its turns."""
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


def list_routes(rollout: Rollout) -> tuple[StoredRoutes, ...]:
    """Return the recorded experts."""
    return tuple(
        StoredRoutes(turn=start, shape=_shape(turn.routes), data=turn.routes.contiguous().numpy().tobytes())
        for start, turn in _list_turns(rollout)
        if turn.routes is not None
    )


def read_routes(stored: StoredRoutes) -> Tensor:
    """Return the experts of a turn, [R, layers, k], in their original type."""
    import torch

    count = stored.shape[0] * stored.shape[1] * stored.shape[2]
    dtype = torch.int16 if len(stored.data) == 2 * count else torch.int8
    if not count:
        return torch.zeros(stored.shape, dtype=dtype)
    return torch.frombuffer(bytearray(stored.data), dtype=dtype).reshape(stored.shape)


def decode_inputs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record from plain values; None where a run did not store them."""
    baseline, places, kept, routes = (row.get(name) for name in ("baseline", "image_places", "kept_tokens", "routes"))
    return {
        "baseline": None if baseline is None else StoredBaseline(**{**baseline, "reward": float(baseline["reward"])}),
        "image_places": None if places is None else tuple(ImagePlace(**each) for each in places),
        "kept_tokens": None if kept is None else KeptTokens.of(kept),
        "routes": None if routes is None else tuple(_decode_routes(each) for each in routes),
    }


def _decode_routes(stored: Mapping[str, Any]) -> StoredRoutes:
    data, shape = stored["data"], stored["shape"]
    return StoredRoutes(
        turn=stored["turn"], shape=(shape[0], shape[1], shape[2]), data=b64decode(data) if isinstance(data, str) else data
    )


def _list_turns(rollout: Rollout) -> list[tuple[int, Turn]]:
    """Return the turns of all paths, each with the index of its first token among the tokens of the record."""
    start, found = 0, []
    for turn in (*rollout.turns, *(turn for branch in rollout.branches for turn in branch.turns)):
        found.append((start, turn))
        start += len(turn.tokens)
    return found


def _find_kept(turn: Turn) -> tuple[Any, Any]:
    """Return the sizes of a turn's sets, and their concatenated ids."""
    if turn.kept is None:
        return numpy.zeros(len(turn.tokens), dtype=numpy.int32), numpy.zeros(0, dtype=numpy.int32)
    kept = turn.kept.numpy().astype(numpy.int32, copy=False)
    return (kept >= 0).sum(1, dtype=numpy.int32), kept[kept >= 0]


def _shape(routes: Tensor) -> tuple[int, int, int]:
    tokens, layers, width = routes.shape
    return tokens, layers, width
