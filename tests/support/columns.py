"""Columns of tokens that nothing in Strop has heard of, one of each alignment, and rollouts whose turns an engine reported with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.columns import Columns, TokenColumn
from strop.models.mixers.indexers import pack_bits
from strop.types import Batch, Branch, Group, Rollout, Turn
from support.packed import history, path_rows

READ = TokenColumn("stranger_read", dtype="int32", aligned="read", fill=-7)
PREDICTED = TokenColumn("stranger_predicted", dtype="float64", aligned="predicted", fill=float("nan"))
TURN = TokenColumn("stranger_turn", dtype="float32", aligned="turn", fill=-1)
ROLLOUT = TokenColumn("stranger_rollout", dtype="int64", aligned="rollout")
SETS = TokenColumn("stranger_sets", dtype="int32", aligned="predicted", fill=-5, ragged=True)
BITS = TokenColumn("stranger_bits", dtype="int8", aligned="read", bits=True)
STRANGERS = (READ, PREDICTED, TURN, ROLLOUT, SETS, BITS)


def read_values(tokens: Sequence[int]) -> Tensor:
    """[n, 2] int32: what an engine recorded of tokens that it read, each by what is before it."""
    sums = torch.tensor(list(tokens), dtype=torch.int64).cumsum(0)
    return torch.stack([sums % 997, sums // 3], 1).to(torch.int32)


def bits_of(tokens: Sequence[int]) -> Tensor:
    """[n, 2, bytes] int8: a bit for itself and for some of the tokens before it."""
    count = len(tokens)
    before = (torch.tensor(list(tokens), dtype=torch.int64) % 3 == 0).expand(count, -1).tril() | torch.eye(
        count, dtype=torch.bool
    )
    return torch.stack([pack_bits(before, -(-count // 8))] * 2, 1)


def pad_sets(sets: Sequence[Sequence[int]], width: int = 0) -> Tensor:
    """[L, K] int32: sets of different sizes, as wide as the largest."""
    width = max([width, *map(len, sets)])
    return torch.tensor([[*each, *[-5] * (width - len(each))] for each in sets], dtype=torch.int32)


def report(context: Sequence[int], tokens: Sequence[int]) -> Columns:
    """What an engine says of a completion with its tokens."""
    whole = [*context, *tokens]
    sums = torch.tensor(whole, dtype=torch.float64).cumsum(0)
    return {
        READ: read_values(whole[:-1]),
        BITS: bits_of(whole[:-1]),
        PREDICTED: sums[len(context) :] / 7,
        TURN: torch.tensor([[len(context), sum(tokens)]], dtype=torch.float32),
        SETS: pad_sets([[*range(token % 4), token] for token in tokens]),
    }


def with_strangers(group: Group, silent: Sequence[int] = ()) -> Group:
    """The group, as if an engine had sampled each turn of each path; it reported nothing of the turns with numbers ``silent``."""
    number = 0

    def recorded(rollout: Rollout, place: int) -> Rollout:
        paths = []
        for context, tokens, turns in path_rows(rollout):
            nonlocal number
            start, found = context, list[Turn]()
            for turn in turns:
                end = start + len(turn.tokens)
                said = report(tokens[:start], tokens[start:end]) if turn.sampled and number not in silent else {}
                found.append(replace(turn, columns=said))
                number += turn.sampled
                start = end
            paths.append(tuple(found))
        branches: list[Branch] = [replace(branch, turns=turns) for branch, turns in zip(rollout.branches, paths[1:], strict=True)]
        whole = {} if place in silent else {ROLLOUT: torch.tensor([[place, group.index, 2**40 + place]])}
        return replace(rollout, turns=paths[0], branches=tuple(branches), columns=whole)

    return replace(group, rollouts=tuple(recorded(rollout, place) for place, rollout in enumerate(group.rollouts)))


def check_strangers(groups: Sequence[Group], batch: Batch) -> None:
    """A packed batch has what was reported, and the fill of the declaration where nothing was."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.policy_turns]
    if any(TURN in turn.columns for turn in turns):
        lengths = [len(turn.tokens) for turn in turns]
        missing = [torch.full((length,), PREDICTED.fill, dtype=torch.float64) for length in lengths]
        predicted = [turn.columns.get(PREDICTED, rest) for turn, rest in zip(turns, missing, strict=True)]
        assert torch.equal(batch.columns[PREDICTED.name].nan_to_num(-9), torch.cat(predicted).nan_to_num(-9))
        of_turns = [turn.columns.get(TURN, torch.full((1, 2), TURN.fill)) for turn in turns]
        spread = [values.expand(length, 2) for values, length in zip(of_turns, lengths, strict=True)]
        assert torch.equal(batch.columns[TURN.name], torch.cat(spread))
        sets = [
            [row[row != SETS.fill].tolist() for row in turn.columns[SETS]] if SETS in turn.columns else [[]] * len(turn.tokens)
            for turn in turns
        ]
        assert torch.equal(batch.columns[SETS.name], pad_sets([row for rows in sets for row in rows]))
        check_read(batch, every=all(TURN in turn.columns for turn in turns))
    if any(rollout.columns for rollout in rollouts):
        whole = [rollout.columns.get(ROLLOUT, torch.zeros(1, 3, dtype=torch.int64)) for rollout in rollouts]
        assert torch.equal(batch.rollout_columns[ROLLOUT.name], torch.cat(whole))


def check_read(batch: Batch, *, every: bool) -> None:
    """What is recorded of a token that something is predicted from is that of its history."""
    column, bits = batch.read_columns[READ.name], batch.read_columns[BITS.name]
    for place, source in enumerate(batch.source.tolist()):
        known = bool((column[source] != READ.fill).any())
        assert known or not every
        assert torch.equal(
            column[source], read_values(history(batch, place))[-1] if known else torch.full((2,), -7, dtype=torch.int32)
        )
        chosen = bits_of(history(batch, place))[-1] if known else bits.new_zeros(2, 0)
        assert torch.equal(bits[source], pad(chosen, (0, bits.shape[2] - chosen.shape[1])))


def check_part(part: Batch, index: Tensor, whole: Batch, rollouts: Sequence[int]) -> None:
    """A part of a batch has the values of its tokens, with places ``index`` in the whole N, and of its rollouts."""
    assert part.columns.keys() == whole.columns.keys() and part.read_columns.keys() == whole.read_columns.keys()
    for name, column in whole.columns.items():
        assert torch.equal(part.columns[name].nan_to_num(-9), column[index].nan_to_num(-9)), name
    for name, column in whole.read_columns.items():
        assert torch.equal(part.read_columns[name][part.source], column[whole.source[index]]), name
    for name, column in whole.rollout_columns.items():
        assert torch.equal(part.rollout_columns[name], column[list(rollouts)]), name
