"""A batch divided into the shares of the ranks is the batch, and each rank cuts out of its share what it cuts out of the whole."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.data.rollout_selector import RolloutSelector, SubBatch
from strop.data.shares import BatchShare, SplitRule, count_tokens, divide_batch, require_whole, take_share, without_read_columns
from strop.data.splitting import partition_batch, split_mini_batches
from strop.types import Batch
from support.rollouts import GroupShape, batch_shapes, make_agent_groups, make_groups, pack_grpo, simple_groups


def cut_out(batch: Batch, sequences: tuple[int, ...]) -> SubBatch:
    """What ranks did before batches were divided: find a micro-batch's tokens in the whole batch."""
    starts, lengths, parents = (column.tolist() for column in (batch.segment_start, batch.segment_length, batch.segment_parent))
    kept = batch.rollout_paths(sequences)
    segments = sorted({segment for paths in kept for path in paths for segment in path})
    renumbered = {old: new for new, old in enumerate(segments)}
    token_index = torch.cat([torch.arange(starts[segment], starts[segment] + lengths[segment]) for segment in segments])
    new_position = torch.full((len(batch.tokens),), -1)
    new_position[token_index] = torch.arange(len(token_index))
    new_sequence = torch.full((batch.num_sequences,), -1)
    new_sequence[list(sequences)] = torch.arange(len(sequences))
    index = (new_sequence[batch.sequence] >= 0).nonzero().squeeze(1)
    segment_length = torch.tensor([lengths[segment] for segment in segments])
    _, group = batch.group[list(sequences)].unique(return_inverse=True)
    rows = {name: getattr(batch, name)[index] for name in ("target", "rollout_logprobs", "versions", "advantages", "mask")}
    part = replace(
        batch,
        **rows,
        tokens=batch.tokens[token_index],
        positions=batch.positions[token_index],
        segment_start=segment_length.cumsum(0) - segment_length,
        segment_parent=torch.tensor([renumbered.get(parents[segment], -1) for segment in segments]),
        source=new_position[batch.source[index]],
        sequence=new_sequence[batch.sequence[index]],
        leaf=torch.tensor([renumbered[path[-1]] for paths in kept for path in paths]),
        leaf_sequence=None
        if batch.leaf_sequence is None
        else torch.tensor([new for new, paths in enumerate(kept) for _ in paths]),
        group=group,
        rewards=batch.rewards[list(sequences)],
        zero_gradient=None if batch.zero_gradient is None else batch.zero_gradient[list(sequences)],
        columns={name: column[index] for name, column in batch.columns.items()},
        read_columns={name: column[token_index] for name, column in batch.read_columns.items()},
        rollout_columns={name: column[list(sequences)] for name, column in batch.rollout_columns.items()},
    )
    return SubBatch(part, index)


def assert_same(found: Any, wanted: Any) -> None:
    """Two batches have the same bits, types and shapes."""
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, Batch):
        for field in fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, column in wanted.items():
            assert_same(found[name], column)
    else:
        assert found == wanted


def with_everything(batch: Batch, seed: int) -> Batch:
    """Add what a batch may have: recorded experts, columns of the tokens, rollouts without gradient."""
    generator = torch.Generator().manual_seed(seed)
    tokens, predicted = len(batch.tokens), len(batch.target)
    read = {"read": torch.randint(0, 8, (tokens, 2, 2), dtype=torch.int16, generator=generator)}
    of_rollouts = {"whole": torch.rand(batch.num_sequences, 2, generator=generator)}
    batch = replace(batch, read_columns=read, rollout_columns=of_rollouts)
    batch = batch.with_columns({"one": torch.rand(predicted), "many": torch.randint(0, 99, (predicted, 3))})
    return replace(batch, zero_gradient=torch.rand(batch.num_sequences, generator=generator) < 0.4) if seed else batch


def check_shares(batch: Batch, rule: SplitRule) -> None:
    partition = partition_batch(batch, rule.ranks, rule.token_budget, padded=rule.padded, whole_groups=rule.whole_groups)
    shares = divide_batch(batch, rule)
    rewards: list[float] = []
    places: list[int] = []
    for share, plan in zip(shares, partition.ranks, strict=True):
        wanted = [(part, kind) for parts, kind in ((plan.trained, False), (plan.forward_only, True)) for part in parts]
        for (found, found_kind), (part, kind) in zip(share.micro_batches(), wanted, strict=True):
            assert found_kind == kind
            if not part:
                assert found is None, "a dummy"
                continue
            assert found is not None
            expected = cut_out(batch, part)
            assert_same(found.batch, expected.batch)
            assert_same(found.index, expected.index)
        if rule.fills_up or any(not part for part, _ in wanted):
            assert_same(share.dummy, cut_out(batch, (partition.dummy_sequence,)).batch)
        else:
            assert share.dummy is None, "nothing travels that no rank reads"
        places += share.index.tolist()
        rewards += [] if share.batch is None else share.batch.rewards.tolist()
        assert share.whole_tokens == len(batch.tokens) and share.max_over_mean == partition.max_over_mean
    assert sorted(places) == list(range(len(batch.target))), "each predicted token is in one share"
    assert sorted(rewards) == sorted(batch.rewards.tolist())


@settings(max_examples=60, deadline=None)
@given(
    shapes=batch_shapes,
    ranks=st.integers(1, 6),
    budget=st.integers(1, 60),
    padded=st.booleans(),
    whole=st.booleans(),
    share_prefixes=st.booleans(),
    fills_up=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_rank_cuts_the_same_bits_out_of_its_share_as_out_of_the_whole_batch(
    shapes: list[GroupShape], ranks: int, budget: int, padded: bool, whole: bool, share_prefixes: bool, fills_up: bool, seed: int
) -> None:
    batch = with_everything(pack_grpo(make_groups(shapes, seed), share_prefixes=share_prefixes), seed)
    check_shares(batch, SplitRule(ranks=ranks, token_budget=budget, padded=padded, whole_groups=whole, fills_up=fills_up))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_rollouts_with_branches_are_divided_whole(ranks: int, seed: int) -> None:
    batch = with_everything(pack_grpo(make_agent_groups()), seed)
    assert batch.leaf_sequence is not None
    check_shares(batch, SplitRule(ranks=ranks, token_budget=20))


@settings(max_examples=30, deadline=None)
@given(shapes=batch_shapes, seed=st.integers(0, 5))
def test_a_selection_has_the_bits_of_one_that_searches_the_whole_batch(shapes: list[GroupShape], seed: int) -> None:
    batch = with_everything(pack_grpo(make_groups(shapes, seed)), seed)
    selector, generator = RolloutSelector(batch), torch.Generator().manual_seed(seed)
    for _ in range(3):  # of one selector, which keeps its memory between selections
        count = int(torch.randint(1, batch.num_sequences + 1, (1,), generator=generator))
        chosen = tuple(torch.randperm(batch.num_sequences, generator=generator)[:count].tolist())
        found, wanted = selector.select(chosen), cut_out(batch, chosen)
        assert_same(found.batch, wanted.batch)
        assert_same(found.index, wanted.index)


def test_predicted_tokens_in_any_order_are_selected_in_the_order_of_the_batch() -> None:
    batch = pack_grpo(simple_groups((4, (6, 2)), (3, (5, 5))))
    order = torch.randperm(len(batch.target), generator=torch.Generator().manual_seed(0))
    names = ("source", "target", "sequence", "rollout_logprobs", "versions", "advantages", "mask")
    shuffled = replace(batch, **{name: getattr(batch, name)[order] for name in names})
    found, wanted = RolloutSelector(shuffled).select((2, 0)), cut_out(shuffled, (2, 0))
    assert_same(found.batch, wanted.batch)
    assert_same(found.index, wanted.index)


def test_mini_batches_keep_their_order_and_their_totals_when_each_is_divided() -> None:
    batch = pack_grpo(simple_groups(*[(3, (4, 2)), (2, (5, 1)), (4, (3, 3)), (1, (6, 6))]))
    for mini_batch in split_mini_batches(batch, 2):
        shares = divide_batch(mini_batch.batch, SplitRule(ranks=2, token_budget=100))
        assert {share.batch.totals for share in shares if share.batch is not None} == {mini_batch.batch.totals}
        places = torch.cat([mini_batch.index[share.index] for share in shares]).sort().values
        assert torch.equal(places, mini_batch.index)


def test_a_share_travels_with_what_its_rank_reads_and_no_more() -> None:
    batch = pack_grpo(simple_groups(*[(100, (300, 300))] * 16))
    shares = divide_batch(batch, SplitRule(ranks=8, token_budget=10_000))
    whole = len(pickle.dumps(batch))
    assert max(len(pickle.dumps(share)) for share in shares) < 1.2 * whole / 8 + 2_000


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("ranks", [2, 30])
def test_a_share_arrives_as_it_was_sent_and_may_be_written_to(protocol: int, ranks: int) -> None:
    batch = with_everything(pack_grpo(make_agent_groups()), 1)
    for share in divide_batch(batch, SplitRule(ranks=ranks, token_budget=20, fills_up=True)):
        buffers: list[Any] = []
        sent = pickle.dumps(share, protocol=protocol, buffer_callback=buffers.append if protocol == 5 else None)
        arrived: BatchShare = pickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers])
        assert len(buffers) == (protocol == 5), "all tensors travel as one piece of memory"
        for field in fields(share):
            assert_same(getattr(arrived, field.name), getattr(share, field.name))
        arrived.require_dummy().tokens.zero_()


def test_a_rank_takes_its_own_share_and_no_other() -> None:
    batch = pack_grpo(simple_groups((4, (6, 2)), (3, (5, 5))))
    rule = SplitRule(ranks=2, token_budget=20)
    own = take_share(batch, rule, 1)
    assert take_share(own, rule, 1) is own
    with pytest.raises(ValueError, match=r"was sent share 1 of a batch.* reads share 0"):
        take_share(own, rule, 0)
    with pytest.raises(ValueError, match=r"token_budget=20.* reads share 1 by .*token_budget=30"):
        take_share(own, replace(rule, token_budget=30), 1)


def test_a_share_stands_for_a_batch_where_only_its_experts_and_its_size_matter() -> None:
    batch = with_everything(pack_grpo(simple_groups((4, (6, 2)), (3, (5, 5)))), 1)
    share, other = divide_batch(batch, SplitRule(ranks=2, token_budget=20, fills_up=True))
    plain = without_read_columns(share)
    assert isinstance(plain, BatchShare) and plain.batch is not None
    assert not plain.batch.read_columns and not plain.require_dummy().read_columns and share.require_dummy().read_columns
    assert count_tokens(share) == count_tokens(other) == count_tokens(batch) == len(batch.tokens)
    assert require_whole(batch) is batch
    with pytest.raises(TypeError, match="share 0 of 2 of a batch arrived at a network on a single device"):
        require_whole(share)


def test_more_ranks_than_rollouts_have_shares_without_rollouts() -> None:
    batch = pack_grpo(simple_groups((4, (6,))))
    shares = divide_batch(batch, SplitRule(ranks=3, token_budget=20))
    assert sum(share.batch is None for share in shares) == 2
    (empty,) = [share for share in shares if share.batch is None][:1]
    assert [part for part, _ in empty.micro_batches()] == [None] and len(empty.index) == 0
