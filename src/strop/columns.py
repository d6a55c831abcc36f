"""Columns of tokens: what is recorded of tokens besides their ids and log-probabilities, and is read where a policy learns.

A column is declared once, by its owner, as a ``TokenColumn``. Its values travel under that declaration: with a turn or a rollout, into the
packed batch, its micro-batches and the shares of ranks, into stored rollouts and out of them when a step is replayed. None of these names
a column: they ask its declaration. Packages list the columns that a replay reads again in the entry points ``strop.columns``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

from strop.lazy_torch import Tensor, torch

Alignment = Literal["read", "predicted", "turn", "rollout"]


@dataclass(frozen=True)
class TokenColumn:
    """How the values of one column lie along the tokens. Values may have more dimensions after the first.

    read: [R, ...] of a turn, of the R tokens of its path before its last one; [T, ...] in ``Batch.read_columns``. Of a token that several
        turns have read, the first value counts.
    predicted: [L, ...] of a turn, of its own tokens; [N, ...] in ``Batch.columns``, as wide as the largest set if they are ragged.
    turn: [1, ...] of a turn; [N, ...] in ``Batch.columns``, that of its turn for each token.
    rollout: [1, ...] of a rollout; [S, ...] in ``Batch.rollout_columns``.
    """

    name: str  # in a batch, and of the column of stored rollouts
    dtype: str  # of torch, such as "int32"; integers may come in a narrower type
    aligned: Alignment
    fill: float = field(default=0, compare=False)  # where nothing was recorded; may be NaN, which equals nothing
    stored: bool | str = True  # with rollouts: always, never, or the key of the configuration that says so
    key: str = ""  # of the configuration, that has the column recorded
    when: str = ""  # a property of the configuration that says whether the key has an effect, if it has not always
    ragged: bool = False  # the sets [K] of tokens have different sizes: one more dimension, padded with ``fill``
    bits: bool = False  # the last dimension is a bit for each token of a path, eight a byte; padded with ``fill``
    complete: bool = False  # every turn of a batch has it, or none
    check: Callable[[Tensor, Tensor], None] | None = None  # raises ValueError for values [N, ...] that do not go with tokens [N]

    def __post_init__(self) -> None:
        if self.ragged and (self.aligned, self.dtype) != ("predicted", "int32"):
            raise ValueError(f"the ragged column {self.name!r} is {self.aligned}, {self.dtype}; ragged ones are predicted, int32")

    def is_on(self, config: object) -> bool:
        """Return whether a run of this configuration records the column."""
        return all(_is_set(config, key) for key in (self.key, self.when) if key)

    def is_stored(self, config: object) -> bool:
        """Return whether a run of this configuration stores the column with its rollouts."""
        return _is_set(config, self.stored) if isinstance(self.stored, str) else self.stored

    def cut(self, values: Tensor, length: int) -> Tensor:
        """Return the values [n, ...] of tokens of a path of this length."""
        return values[..., : -(-length // 8)] if self.bits else values

    def find_known(self, values: Tensor) -> Tensor:
        """Return of which entries something was recorded, [n] bool, for values [n, ...]."""
        known = ~values.isnan() if self.fill != self.fill else values != self.fill
        return known.flatten(1).any(1) if known.dim() > 1 else known

    def find_dtype(self, itemsize: int) -> torch.dtype:
        """Return the type of values of ``itemsize`` bytes each."""
        declared: torch.dtype = getattr(torch, self.dtype)
        if itemsize == declared.itemsize or declared.is_floating_point:
            return declared
        return {1: torch.int8, 2: torch.int16, 4: torch.int32}[itemsize]


Columns = Mapping[TokenColumn, Tensor]


def _is_set(config: object, key: str) -> bool:
    return bool(reduce(lambda section, name: getattr(section, name, None), key.split("."), config))
