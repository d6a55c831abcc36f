"""Groups -> batch: every predicted token sees what it saw in its rollout."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.packing import pack
from strop.data.shares import SplitRule, divide_batch
from strop.data.splitting import select_rollouts, split_micro_batches, split_mini_batches
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.sampling import KEPT, KEPT_TOKENS, pad_kept_tokens
from strop.types import Batch, Branch, Group, PromptImage, Rollout, RolloutCredit, Task, Totals, Turn, observation_turn
from support.algorithms import grpo
from support.packed import check_routes, described, expected, history, routed_turn
from support.rollouts import (
    GroupShape,
    batch_shapes,
    make_agent_groups,
    make_group,
    make_groups,
    make_rollout,
    pack_for,
    sampled_turn,
    simple_groups,
)

properties = settings(max_examples=60, deadline=None, derandomize=True)


@properties
@given(shapes=batch_shapes, seed=st.integers(0, 3), share=st.booleans())
def test_every_sampled_token_is_predicted_once_after_exactly_its_own_history(
    shapes: list[GroupShape], seed: int, share: bool
) -> None:
    groups = make_groups(shapes, seed)
    batch = pack_for(groups, grpo(), share_prefixes=share)
    assert described(batch) == expected(groups)
    for place in range(len(batch.target)):
        assert int(batch.positions[batch.source[place]]) == len(history(batch, place)) - 1, "positions continue from the parent"
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert batch.rewards.tolist() == [rollout.reward for rollout in rollouts]
    assert batch.totals == Totals(len(batch.target), len(rollouts), len(groups))
    assert int(batch.segment_length.sum()) == len(batch.tokens)


def test_a_prompt_is_read_once_a_group() -> None:
    groups = simple_groups((50, (3, 3, 3)))
    assert len(pack_for(groups, grpo()).tokens) == 56
    assert len(pack_for(groups, grpo(), share_prefixes=False).tokens) == 156


def test_a_batch_of_empty_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="all rollouts are empty"):
        pack_for([make_group(make_rollout([4, 5]))], grpo())


def recording(*sets: Sequence[int]) -> Turn:
    """A turn of the first token of each set, drawn from that set."""
    return replace(sampled_turn([row[0] for row in sets]), columns={KEPT: pad_kept_tokens([torch.tensor(row) for row in sets])})


def test_what_each_token_was_drawn_from_is_a_column_as_wide_as_the_largest_set() -> None:
    first = make_rollout([5, 6], recording([7], [8, 9]), observation_turn([1, 2], ""), recording([10, 11, 12]))
    second = make_rollout([5, 6], recording([13, 14]))
    empty = make_rollout([5, 6])
    batch = pack_for([make_group(first, second, empty), make_group(make_rollout([4], recording([20, 21, 22])), index=1)], grpo())
    wanted = [[7, -1, -1], [8, 9, -1], [10, 11, 12], [13, 14, -1], [20, 21, 22]]
    assert batch.column(KEPT_TOKENS).dtype == torch.int32
    assert batch.column(KEPT_TOKENS).tolist() == wanted
    assert batch.target.tolist() == [row[0] for row in wanted]
    for part in [*split_micro_batches(batch, 4), *split_mini_batches(batch, 2)]:
        assert part.batch.column(KEPT_TOKENS).tolist() == [wanted[place] for place in part.index.tolist()]


def test_without_recorded_sets_there_is_no_such_column() -> None:
    assert KEPT_TOKENS not in pack_for(simple_groups((4, (3, 2))), grpo()).columns


def test_turns_sampled_with_and_without_recording_do_not_go_into_one_batch() -> None:
    group = make_group(make_rollout([5, 6], recording([7, 8])), make_rollout([5, 6], sampled_turn([7])))
    with pytest.raises(ValueError, match=r"1 of the 2 turns .*keep_sampling_mask of the run's beginning"):
        pack_for([group], grpo())


def test_a_token_that_its_own_set_lacks_is_refused() -> None:
    wrong = replace(recording([7, 8], [9]), tokens=torch.tensor([7, 8]))
    with pytest.raises(ValueError, match="not among the recorded tokens that it was sampled from"):
        pack_for([make_group(make_rollout([5], wrong))], grpo())


def test_columns_of_the_wrong_length_and_missing_columns_are_named() -> None:
    batch = pack_for(simple_groups((4, (3,))), grpo())
    with pytest.raises(ValueError, match="'short' has 2 entries, but 3 tokens are predicted"):
        batch.with_column("short", torch.zeros(2))
    with pytest.raises(KeyError, match="no column 'values'; it has \\['known'\\]"):
        batch.with_column("known", torch.zeros(3)).column("values")


def test_the_credit_of_a_rollout_is_that_of_all_its_tokens() -> None:
    groups = simple_groups((4, (3, 1)), (2, (2,)))
    credit = RolloutCredit(
        rewards=torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, -2.0, 0.1], dtype=torch.float64),
        mask=torch.tensor([True, False, True]),
    )
    batch = pack(groups, credit)
    assert batch.rewards.tolist() == [0.5, 0.25, 1.0]
    assert torch.equal(batch.advantages, torch.tensor([1.0, 1.0, 1.0, -2.0, 0.1, 0.1]))
    assert batch.mask.tolist() == [1, 1, 1, 0, 1, 1] and batch.totals == Totals(5, 2, 2)


def test_a_batch_that_is_only_scored_needs_no_credit() -> None:
    groups = simple_groups((4, (3, 1)), (2, (2,)))
    batch = pack(groups)
    assert torch.equal(batch.target, pack_for(groups, grpo()).target)
    assert not batch.advantages.any() and batch.mask.all()


def test_the_credit_of_other_groups_is_refused() -> None:
    credit = grpo().group_credit(simple_groups((4, (3, 1))))
    with pytest.raises(ValueError, match="the credit of 2 rollouts, not of 3: pass the same groups"):
        pack(simple_groups((4, (3, 1, 2))), credit)


# --- Images of a packed batch: each once, where its tokens are, and never another one's ---------------------------------------


IMAGE = 7  # the token of images


def image(start: int, name: str, length: int = 3) -> PromptImage:
    return PromptImage(start=start, length=length, content=name.encode(), digest=name)


def turn(*tokens: int) -> Turn:
    length = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(tokens),
        text="",
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


def rollout(images: Sequence[PromptImage], *turns: Turn, branches: Sequence[Branch] = ()) -> Rollout:
    """A prompt of ten tokens with an image at 2 and one at 6."""
    prompt = torch.tensor([1, 2, IMAGE, IMAGE, IMAGE, 3, IMAGE, IMAGE, IMAGE, 4])
    return Rollout(
        task=Task(id="t"),
        sample=0,
        seed=0,
        messages=(),
        prompt=prompt,
        turns=turns,
        branches=tuple(branches),
        images=tuple(images),
    )


def group(index: int, *rollouts: Rollout) -> Group:
    return Group(index=index, environment="", version=0, rollouts=rollouts)


def seen(batch: Batch) -> list[tuple[int, str]]:
    return [(each.start, each.digest) for each in batch.images]


BOTH = (image(2, "a"), image(6, "b"))


def test_the_images_of_a_shared_prompt_stand_once() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(6)))])
    assert seen(batch) == [(2, "a"), (6, "b")]
    assert batch.image_segments == [0, 0]
    flat = pack([group(0, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(6)))], share_prefixes=False)
    assert seen(flat) == [(2, "a"), (6, "b"), (13, "a"), (17, "b")]


def test_equal_tokens_with_other_images_are_no_shared_prompt() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)), rollout((image(2, "a"), image(6, "c")), turn(6)))])
    assert seen(batch) == [(2, "a"), (6, "b"), (13, "a"), (17, "c")]
    assert batch.segment_parent.tolist() == [-1, -1]


def test_an_image_after_the_last_sampled_token_is_not_read() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(13, "o")])
    batch = pack([group(0, rollout(BOTH, turn(5, 5), observed, turn(6, 6)), rollout(BOTH, turn(5, 5), observed))])
    assert seen(batch) == [(2, "a"), (6, "b"), (13, "o")]


def test_a_branch_has_the_images_of_its_context_and_its_own() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(6, "o")])
    left = Branch(parent=0, start=5, turns=(observed, turn(9, 9)))
    alone = Branch(parent=0, start=0, turns=(observation_turn([IMAGE, IMAGE, IMAGE], "", [image(0, "p")]), turn(9)))
    batch = pack([group(0, rollout(BOTH, turn(5, 5), branches=[left, alone]))])
    assert [digest for _, digest in seen(batch)] == ["a", "b", "o", "p"]
    for each in batch.images:
        assert batch.tokens[each.start : each.end].tolist() == [IMAGE] * 3
    flat = pack([group(0, rollout(BOTH, turn(5, 5), branches=[left, alone]))], share_prefixes=False)
    assert [digest for _, digest in seen(flat)] == ["a", "b", "a", "o", "p"]


def test_a_branch_within_an_image_is_refused() -> None:
    cut = Branch(parent=0, start=3, turns=(turn(9, 9),))
    with pytest.raises(ValueError, match="leaves its path within an image"):
        pack([group(0, rollout(BOTH, turn(5, 5), branches=[cut]))])


def test_a_part_of_a_batch_has_its_own_images_in_their_new_places() -> None:
    observed = observation_turn([8, IMAGE, IMAGE, IMAGE], "", [image(13, "o")])
    groups = [
        group(0, rollout((), turn(5, 5))),
        group(1, rollout(BOTH, turn(5, 5)), rollout(BOTH, turn(5, 5), observed, turn(6, 6))),
        group(2, rollout((image(2, "c"), image(6, "d")), turn(5))),
    ]
    batch = pack(groups)
    part = select_rollouts(batch, [2, 3]).batch
    assert [digest for _, digest in seen(part)] == ["a", "b", "o", "c", "d"]
    for each in part.images:
        assert part.tokens[each.start : each.end].tolist() == [IMAGE] * 3
    parts = [each.batch for each in split_micro_batches(batch, 16)]
    assert sorted("".join(sorted(digest for _, digest in seen(each))) for each in parts) == ["", "ab", "abo", "cd"]


def test_a_share_that_travels_has_its_images() -> None:
    batch = pack([group(index, rollout((image(2, f"{index}"), image(6, "b")), turn(5, 5))) for index in range(4)])
    shares = [pickle.loads(pickle.dumps(share)) for share in divide_batch(batch, SplitRule(ranks=2, token_budget=30))]
    digests = [digest for share in shares for _, digest in seen(share.batch)]
    assert sorted(digests) == ["0", "1", "2", "3", "b", "b", "b", "b"]


def test_an_image_past_the_end_of_a_batch_is_an_error() -> None:
    batch = pack([group(0, rollout(BOTH, turn(5, 5)))])
    with pytest.raises(ValueError, match="an image that ends at token"):
        type(batch)(**{**vars(batch), "images": (image(50, "x"),)})


# --- Recorded experts in a packed batch: each token that is read has those of the turn that read it first -------------------------


def with_routes(group: Group) -> Group:
    """The group, as if an engine had sampled every policy turn of every path."""

    def recorded(rollout: Rollout) -> Rollout:
        rows = [(rollout.prompt.tolist(), rollout.turns)]
        rows += [([], branch.turns) for branch in rollout.branches]
        full: list[list[int]] = []
        paths = []
        for place, (context, turns) in enumerate(rows):
            tokens = context if place == 0 else full[rollout.branches[place - 1].parent][: rollout.branches[place - 1].start]
            found = []
            for turn in turns:
                found.append(replace(turn, columns=routed_turn(tokens, turn.tokens.tolist()).columns) if turn.sampled else turn)
                tokens = [*tokens, *turn.tokens.tolist()]
            full.append(tokens)
            paths.append(tuple(found))
        branches = tuple(replace(branch, turns=turns) for branch, turns in zip(rollout.branches, paths[1:], strict=True))
        return replace(rollout, turns=paths[0], branches=branches)

    return replace(group, rollouts=tuple(map(recorded, group.rollouts)))


@pytest.mark.parametrize("share", [True, False])
def test_every_token_read_has_its_experts(share: bool) -> None:
    """Shared prompts, several turns, and branches that leave prompts and turns anywhere."""
    batch = pack(list(map(with_routes, make_agent_groups())), share_prefixes=share)
    check_routes(batch)
    routes = batch.read_columns["routes"]
    assert bool((routes >= 0).all()) and routes.dtype == torch.int8
    check_routes(select_rollouts(batch, [0, 2]).batch)
    for part in split_micro_batches(batch, 12):
        check_routes(part.batch)


def test_turns_keep_only_the_experts_that_earlier_ones_lack() -> None:
    rollout = make_rollout([5, 6, 7])
    for answer, observed in (((8, 9), (10, 11)), ((12, 13, 14), ())):
        rollout = rollout.with_turn(routed_turn(rollout.tokens().tolist(), answer))
        rollout = rollout.with_turn(observation_turn(observed, "")) if observed else rollout
    first, second = rollout.policy_turns
    lengths = len(first.columns[ROUTES]), len(second.columns[ROUTES])
    assert lengths == (3 + 1, 1 + 2 + 2)  # the last of the first turn, the observation, its own
    check_routes(pack([make_group(rollout)]))


def test_tokens_that_nobody_recorded_have_no_route() -> None:
    (group,) = map(with_routes, make_agent_groups())
    plain = make_agent_groups()[0].rollouts[1]
    batch = pack([make_group(group.rollouts[2], plain), make_group(plain, index=1)])
    routes = batch.read_columns["routes"]
    known = routes[:, 0, 0] >= 0
    lengths = batch.segment_length.tolist()
    assert known.split(lengths)[0].all() and known.split(lengths)[1].all(), "the shared prompt and the recorded completion"
    assert not torch.cat(known.split(lengths)[2:]).any()
    assert bool((routes[~known] == NO_ROUTE).all())
    assert not pack([make_group(plain)]).read_columns


def test_experts_of_different_models_do_not_go_together() -> None:
    (group,) = map(with_routes, make_agent_groups())
    turn = group.rollouts[2].turns[0]
    other = replace(group.rollouts[2], turns=(replace(turn, columns={ROUTES: turn.columns[ROUTES][:, :1]}),))
    with pytest.raises(ValueError, match="recorded for models of different shapes"):
        pack([make_group(group.rollouts[2], other)])
