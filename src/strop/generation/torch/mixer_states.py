"""States of layers that carry them from token to token: the last inputs of a convolution, and the state of a scan.

They are held for each running sequence, and at the end of stored prefixes. Keys can be read up to any token, a state only after
the last one: a sequence whose drafts turn out wrong is computed again from the state before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from strop.models.attention.tree_mixing import group_by_length
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows

StateKey = tuple[Literal["convolution", "scan"], MixerSpec]
States = dict[StateKey, Tensor]  # of one sequence, [k - 1, C] of a convolution, or of several [n, ...]


@dataclass(frozen=True)
class StateShape:
    """Size and type of a state of one sequence."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class MixerPass:
    """Convolutions and scans of the new tokens of some sequences, which follow each other in a row."""

    def __init__(self, before: States, lengths: Sequence[int], *, replayed: bool = False) -> None:
        """``before`` [n, ...]: states of the sequences; ``lengths``: their numbers of new tokens; ``replayed``: a part of the
        tokens may be taken back.
        """
        self.before = before
        self.after: States = {}  # [n, ...]
        self.lengths = list(lengths)
        self._replayed: dict[StateKey, tuple[Recurrence | None, Rows]] | None = {} if replayed else None
        everything = range(len(self.lengths))
        self._uniform = len(set(self.lengths)) == 1
        self._groups = [list(everything)] if self._uniform or replayed else group_by_length(everything, self.lengths)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """[T, C] and [C, k] -> [T, C]"""

        def compute(rows: Rows, before: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
            row = torch.cat([before, rows[0]], 1)  # [n, k - 1 + L, C]
            outputs = F.conv1d(row.mT, weight.unsqueeze(1), bias, groups=weight.shape[0]).mT  # rounded as the learner's
            return outputs, _last_inputs(row, lengths, before.shape[1])

        return self._compute(("convolution", spec), None, [inputs.to(weight.dtype)], compute)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """[T, ...] -> [T, ...]"""
        return self._compute(("scan", spec), recurrence, rows, lambda padded, before, _: recurrence(padded, before))

    def _compute(
        self,
        key: StateKey,
        recurrence: Recurrence | None,
        rows: Rows,
        compute: Callable[[Rows, Tensor, Sequence[int]], tuple[Tensor, Tensor]],
    ) -> Tensor:
        before, lengths = self.before[key], self.lengths
        if self._uniform:
            padded: Rows = [each.unflatten(0, (len(lengths), -1)) for each in rows]  # type: ignore[no-untyped-call]
            output, self.after[key] = compute(padded, before, lengths)
            outputs = [output.flatten(0, 1)]
        else:
            parts = [each.split(lengths) for each in rows]
            outputs, self.after[key] = [rows[0]] * len(lengths), torch.empty_like(before)
            for members in self._groups:
                padded = [pad_sequence([part[member] for member in members], batch_first=True) for part in parts]
                output, self.after[key][members] = compute(padded, before[members], [lengths[member] for member in members])
                for member, own in zip(members, output, strict=True):
                    outputs[member] = own[: lengths[member]]
        if self._replayed is not None:
            self._replayed[key] = recurrence, padded
        return torch.cat(outputs)

    def replay(self, sequences: Sequence[int], counts: Sequence[int], before: States) -> States:
        """The states [m, ...] of some of the sequences after as many of their tokens, given those before."""
        assert self._replayed is not None
        after: States = {}
        for key, (recurrence, rows) in self._replayed.items():
            taken = [each[list(sequences), : max(counts)] for each in rows]
            if recurrence is None:
                row = torch.cat([before[key], taken[0]], 1)
                after[key] = _last_inputs(row, counts, before[key].shape[1])
                continue
            places = torch.arange(max(counts), device=taken[0].device)
            beyond = places[None] >= torch.tensor(counts, device=places.device)[:, None]
            # Rows of zeros leave a state unchanged.
            zeroed = [each.masked_fill(beyond.view(*beyond.shape, *(1,) * (each.dim() - 2)), 0) for each in taken]
            after[key] = recurrence(zeroed, before[key])[1]
        return after


def _last_inputs(row: Tensor, counts: Sequence[int], size: int) -> Tensor:
    """The last ``size`` inputs [n, size, C] of each sequence, given those before its tokens and its tokens, of which it has read
    ``counts``.
    """
    if min(counts) == row.shape[1] - size:
        return row[:, row.shape[1] - size :]
    places = torch.tensor(counts, device=row.device)[:, None] + torch.arange(size, device=row.device)
    return row.gather(1, places.unsqueeze(-1).expand(-1, -1, row.shape[2]))


class SlotStates:
    """The states of the running sequences, [slots, ...] each; nothing for a model without such layers."""

    def __init__(self, shapes: Mapping[StateKey, StateShape], slots: int, device: torch.device) -> None:
        self.held: States = {
            key: torch.zeros((slots, *each.size), dtype=each.dtype, device=device) for key, each in shapes.items()
        }
        self._drafted: dict[int, tuple[MixerPass, int, int]] = {}  # slot -> the pass, its sequence, and its first position

    def open_prompts(self, lengths: Sequence[int], cached: Sequence[States]) -> MixerPass | None:
        """Begin a pass over prompts, each after the states of its cached part, or empty ones. None for a model without states."""
        if not self.held:
            return None
        before = {
            key: torch.stack([held.new_zeros(held.shape[1:]) if not each else each[key] for each in cached])
            for key, held in self.held.items()
        }
        return MixerPass(before, lengths)

    @contextmanager
    def decoding(self, positions: Sequence[int], lengths: Sequence[int]) -> Iterator[MixerPass | None]:
        """Append tokens to the first slots, the first of each at ``positions``. Of several tokens some may be taken back: a slot
        goes on where its next tokens are.
        """
        if not self.held:
            yield None
            return
        self._settle(dict(enumerate(positions)))
        count, drafted = len(positions), max(lengths) > 1
        mixing = MixerPass({key: held[:count] for key, held in self.held.items()}, lengths, replayed=drafted)
        yield mixing
        if drafted:
            self._drafted = {slot: (mixing, slot, position) for slot, position in enumerate(positions)}
            return
        for key, states in mixing.after.items():
            self.held[key][:count] = states

    def _settle(self, lengths: Mapping[int, int]) -> None:
        """Read the drafts of slots up to their lengths."""
        slots = [slot for slot in lengths if slot in self._drafted]
        if not slots:
            return
        drafted = [self._drafted.pop(slot) for slot in slots]
        counts = [lengths[slot] - first for slot, (_, _, first) in zip(slots, drafted, strict=True)]
        before = {key: held[slots] for key, held in self.held.items()}
        mixing = drafted[0][0]  # the latest pass, which all of them are of
        for key, states in mixing.replay([sequence for _, sequence, _ in drafted], counts, before).items():
            self.held[key][slots] = states

    def read(self, slot: int, length: int) -> States:
        """Return a copy of the states of a slot after its first ``length`` tokens, of which it has read no fewer."""
        self._settle({slot: length})
        return {key: held[slot].clone() for key, held in self.held.items()}

    def write(self, slot: int, states: States) -> None:
        for key, held in self.held.items():
            held[slot] = states[key]

    def copy(self, source: int, target: int) -> None:
        for held in self.held.values():
            held[target] = held[source]
        if source in self._drafted:
            self._drafted[target] = self._drafted[source]

    def release(self, slot: int) -> None:
        self._drafted.pop(slot, None)


def split_states(mixing: MixerPass | None, index: int) -> States:
    """Return a copy of the states of one sequence after a pass."""
    return {} if mixing is None else {key: states[index].clone() for key, states in mixing.after.items()}
