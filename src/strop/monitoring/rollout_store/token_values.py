"""Values of tokens in stored rollouts: of a record, and per-token results of an update as Arrow columns, without a Python object each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from torch import Tensor


class TokenValues(Sequence[Any]):
    """An array that reads as the tuple of its values, and equals it."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def join(cls, tensors: Iterable[Tensor], empty: Any) -> TokenValues:
        """Join the values of tensors; without any, the type is ``empty``."""
        return cls(numpy.concatenate([numpy.zeros(0, dtype=empty), *(tensor.numpy() for tensor in tensors)], dtype=empty))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        return tuple(self.array[place].tolist()) if isinstance(place, slice) else self.array[place].item()

    def __eq__(self, other: object) -> bool:
        return other is self or tuple(self) == (tuple(other) if isinstance(other, TokenValues) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __iter__(self) -> Any:
        return iter(self.array.tolist())

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.asarray(self.array, dtype=dtype)


def make_list_column(values: Sequence[Sequence[Any] | None], type: Any) -> Any:
    """Return the values of records as an Arrow array, list<type>; None is null."""
    import pyarrow as pa

    dtype = type.to_pandas_dtype()
    arrays = [numpy.zeros(0, dtype=dtype), *(numpy.asarray(each, dtype=dtype) for each in values if each is not None)]
    ends = numpy.cumsum([0, *(0 if each is None else len(each) for each in values)]).astype(numpy.int32)
    absent = numpy.array([*(each is None for each in values), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=absent), pa.array(numpy.concatenate(arrays), type=type))


# Why a token has no gradient. Tokens of the environment and of excluded rollouts do not count in the loss at all.
REASONS = ("", "environment", "left_out", "overlong", "sequence_error", "rejected", "not_selected", "not_predicted")
NO_REASON, ENVIRONMENT, LEFT_OUT, OVERLONG, SEQUENCE_ERROR, REJECTED, NOT_SELECTED, NOT_PREDICTED = range(len(REASONS))

FLOATS = ("trained_logprobs", "entropy", "reference_logprobs", "token_advantages", "correction")
FLAGS = ("mask", "clipped")
BY_TERM = ("loss_terms", "loss_gradients")
NAMES = (*FLOATS, *FLAGS, "mask_reason", *BY_TERM)  # fields of a RolloutRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumns:
    """The columns of a batch over its predicted tokens, [N] each; columns that the algorithm lacks are left out."""

    sequence: Tensor  # [N] the rollout of each token, ascending
    num_rollouts: int
    columns: Mapping[str, Tensor]  # FLOATS and FLAGS
    reasons: Tensor  # [N] uint8, an index into REASONS
    by_term: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # BY_TERM -> term -> [N]
    at_end: bool = False  # one value for each rollout, at its last sampled token

    def split(self, rollouts: Sequence[Sequence[bool]]) -> list[dict[str, Any]]:
        """Return the columns of each rollout as fields of its record, given which of its tokens were sampled."""
        import torch

        ends = torch.bincount(self.sequence, minlength=self.num_rollouts).cumsum(0).tolist()
        return [
            self._of_rollout(slice(start, end), torch.tensor(sampled, dtype=torch.bool))
            for start, end, sampled in zip([0, *ends[:-1]], ends, rollouts, strict=True)
        ]

    def _of_rollout(self, tokens: slice, sampled: Tensor) -> dict[str, Any]:
        places = sampled.nonzero().squeeze(1)
        places = places[-1:] if self.at_end else places
        if len(places) != tokens.stop - tokens.start:
            return {}  # nothing was sampled; the predicted token is not part of the completion

        def expand(column: Tensor, fill: int = 0) -> tuple[Any, ...]:
            expanded = column.new_full((len(sampled),), fill)
            expanded[places] = column[tokens]
            return tuple(expanded.tolist())

        reasons = list(expand(self.reasons, ENVIRONMENT))
        if self.at_end:
            for place in sampled.nonzero().squeeze(1)[:-1].tolist():
                reasons[place] = NOT_PREDICTED
        return {
            **{name: expand(column) for name, column in self.columns.items()},
            "mask_reason": tuple(REASONS[reason] for reason in reasons),
            **{name: {term: expand(column) for term, column in terms.items()} for name, terms in self.by_term.items()},
        }


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
