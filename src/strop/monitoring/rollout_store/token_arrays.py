"""Per-token columns as Arrow arrays, created from whole tensors without Python objects per value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy

from strop.monitoring.rollout_store.token_columns import BY_TERM, ENVIRONMENT, NOT_PREDICTED, REASONS, TokenColumns

if TYPE_CHECKING:
    from torch import Tensor


def make_arrow_columns(tokens: TokenColumns, sampled: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Return the columns of a step's records by name. ``sampled``: per record, which tokens the policy sampled. Trained records
    come first; the others have no values."""
    import pyarrow as pa

    trained = sampled[: tokens.num_rollouts]
    lengths = [len(each) for each in trained]
    layout = _Layout(tokens, trained, lengths)
    ends = numpy.cumsum([0, *lengths], dtype=numpy.int32)
    rest = len(sampled) - len(trained)

    def to_lists(values: Any) -> Any:
        return pa.chunked_array([pa.ListArray.from_arrays(ends, values), pa.nulls(rest, pa.list_(values.type))])

    found = {name: to_lists(pa.array(layout.place(column))) for name, column in tokens.columns.items()}
    found["mask_reason"] = to_lists(pa.array(REASONS).take(pa.array(layout.place_reasons(tokens.reasons))))
    for name in BY_TERM:
        columns = {term: layout.place(column) for term, column in tokens.by_term.get(name, {}).items()}
        maps = _make_maps(columns, lengths, ends)
        found[name] = pa.chunked_array([maps, pa.array([[]] * rest, type=maps.type)])
    return found


def _make_maps(columns: Mapping[str, Any], lengths: Sequence[int], ends: Any) -> Any:
    """Return a map from term to its values for each rollout."""
    import pyarrow as pa

    rows, terms = len(lengths), len(columns)
    stacked = numpy.stack([*columns.values()]) if columns else numpy.zeros((0, int(ends[-1])), dtype=numpy.float32)
    values = numpy.concatenate([stacked[:, start:end].ravel() for start, end in pairwise(ends)])
    starts = numpy.cumsum([0, *numpy.repeat(numpy.array(lengths, dtype=numpy.int32), terms)], dtype=numpy.int32)
    items = pa.ListArray.from_arrays(starts, pa.array(values.astype(numpy.float32)))
    keys = pa.array([*columns] * rows, type=pa.string())
    return pa.MapArray.from_arrays(numpy.arange(rows + 1, dtype=numpy.int32) * terms, keys, items)


class _Layout:
    """Positions of a batch's predicted tokens among all tokens of its rollouts."""

    def __init__(self, tokens: TokenColumns, sampled: Sequence[Sequence[bool]], lengths: Sequence[int]) -> None:
        self.at_end = tokens.at_end
        self.sampled = numpy.concatenate([numpy.zeros(0, dtype=bool), *(numpy.asarray(each, dtype=bool) for each in sampled)])
        self.kept: Any = slice(None)  # of the predicted tokens; all, unless a rollout has no own token to attach to
        places = self.sampled.nonzero()[0]
        if tokens.at_end:
            of = numpy.repeat(numpy.arange(len(lengths)), lengths)[places]
            last = numpy.append(of[1:] != of[:-1], True) if len(of) else numpy.zeros(0, dtype=bool)
            places, self.kept = places[last], of[last]
        elif len(places) != len(tokens.sequence):
            raise ValueError(f"{len(tokens.sequence)} tokens were predicted, and the records have {len(places)} sampled ones")
        self.places = places

    def place(self, column: Tensor) -> Any:
        """Place a column [N] among all tokens; 0 or False elsewhere."""
        values = column.numpy()
        placed = numpy.zeros(len(self.sampled), dtype=values.dtype)
        placed[self.places] = values[self.kept]
        return placed

    def place_reasons(self, reasons: Tensor) -> Any:
        """Place why tokens have no gradient, as indices into REASONS."""
        placed = numpy.where(self.sampled, NOT_PREDICTED if self.at_end else 0, ENVIRONMENT).astype(numpy.uint8)
        placed[self.places] = reasons.numpy()[self.kept]
        return placed
