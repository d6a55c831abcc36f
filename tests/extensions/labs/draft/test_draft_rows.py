"""The rows of a draft head against the sequences that the batch was packed from."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from strop.data.splitting import split_micro_batches
from strop.extensions.labs.draft.draft_trainer import make_draft_rows
from strop.types import Batch
from support.packed import history
from support.rollouts import make_agent_groups, pack_grpo, simple_groups

SHAPES = ((5, (3, 6, 1)), (1, (4, 2)), (9, (1, 1)))


def expected_rows(batch: Batch) -> set[tuple[int, ...]]:
    """The tokens up to and with each sampled one that something is predicted from, of each rollout."""
    sampled = set()
    for place in range(len(batch.target)):
        sampled.add((int(batch.sequence[place]), *history(batch, place), int(batch.target[place])))
    found = set()
    for place in range(len(batch.source)):
        read = (int(batch.sequence[place]), *history(batch, place))
        if read in sampled:
            found.add(read)
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_a_row_stands_for_each_sampled_token_that_is_predicted_from(shared: bool) -> None:
    batch = pack_grpo(simple_groups(*SHAPES), share_prefixes=shared)
    rows = make_draft_rows(batch)
    found = set()
    for row, place in zip(rows.trained.tolist(), rows.predicted.tolist(), strict=True):
        read = history(batch, place)
        assert int(batch.tokens[rows.token[row]]) == read[-1]
        assert int(batch.tokens[rows.predecessor[row]]) == read[-2]
        assert int(rows.positions[row]) == len(read) - 2
        found.add((int(batch.sequence[place]), *read))
    assert found == expected_rows(batch) and len(found) == len(rows.trained)


@pytest.mark.parametrize("shared", [True, False])
def test_the_rows_are_a_tree_of_the_same_paths_without_their_first_token(shared: bool) -> None:
    batch = pack_grpo(simple_groups(*SHAPES), share_prefixes=shared)
    rows = make_draft_rows(batch)
    for segment, (start, length) in enumerate(zip(rows.segment_start.tolist(), rows.segment_length.tolist(), strict=True)):
        assert length > 0
        parent = int(rows.segment_parent[segment])
        inside = list(range(start, start + length))
        if parent >= 0:
            inside = [int(rows.segment_start[parent] + rows.segment_length[parent]) - 1, *inside]
        for left, right in pairwise(inside):
            assert int(rows.token[left]) == int(rows.predecessor[right])
            assert int(rows.positions[right]) == int(rows.positions[left]) + 1


def test_the_trained_rows_are_the_same_however_a_batch_is_cut() -> None:
    for groups in (simple_groups(*SHAPES), make_agent_groups()):
        batch = pack_grpo(groups)
        whole = make_draft_rows(batch).predicted.tolist()
        parts = split_micro_batches(batch, 12)
        assert len(parts) > 1
        found = [place for part in parts for place in part.index[make_draft_rows(part.batch).predicted].tolist()]
        assert sorted(found) == whole
        assert torch.equal(torch.tensor(whole), torch.tensor(whole).unique())
