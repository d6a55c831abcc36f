"""Build rollouts, groups and batches, and hypothesis strategies for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.data.packing import pack
from strop.generation.base import Completion
from strop.types import Batch, Branch, Ending, Group, Rollout, Task, Turn, observation_turn
from support.algorithms import grpo
from support.models import VOCABULARY


def sampled_turn(tokens: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0) -> Turn:
    """Build a sampled turn of the policy."""
    return Turn(
        author="policy",
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        text="",
        logprobs=torch.zeros(len(tokens)) if logprobs is None else torch.tensor(list(logprobs), dtype=torch.float32),
        versions=torch.full((len(tokens),), version, dtype=torch.int32),
    )


def make_turn(completion: Completion) -> Turn:
    """Build a turn from an engine's completion."""
    return Turn(
        author="policy",
        tokens=completion.tokens,
        text=completion.text,
        logprobs=completion.logprobs,
        versions=completion.versions,
        columns=completion.columns,
    )


def make_rollout(
    prompt: Sequence[int], *turns: Turn, reward: float = 0.0, ending: Ending = Ending.STOP, sample: int = 0
) -> Rollout:
    return Rollout(
        task=Task(id="task"),
        sample=sample,
        seed=sample,
        messages=(),
        prompt=torch.tensor(list(prompt), dtype=torch.int64),
        turns=turns,
        ending=ending,
        reward=reward,
    )


def make_group(*rollouts: Rollout, index: int = 0) -> Group:
    numbered = tuple(replace(rollout, sample=place) for place, rollout in enumerate(rollouts))
    return Group(index=index, environment="test", version=0, rollouts=numbered)


def simple_groups(*shapes: tuple[int, Sequence[int]], seed: int = 0) -> list[Group]:
    """Build groups from (prompt length, completion lengths), with random tokens, rollout log-probabilities and rewards."""
    return [
        _group(GroupShape(prompt, tuple(RolloutShape(((length, 0),)) for length in lengths)), index, seed)
        for index, (prompt, lengths) in enumerate(shapes)
    ]


@dataclass(frozen=True)
class BranchShape:
    parent: int  # among the paths before it, modulo their number
    start: float  # share of its parent's tokens that it continues
    opening: int  # tokens of the environment before its first turn; at least one where nothing is continued
    turns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RolloutShape:
    turns: tuple[tuple[int, int], ...]  # (policy tokens, environment tokens) per turn
    truncated: bool = False
    branches: tuple[BranchShape, ...] = ()


@dataclass(frozen=True)
class GroupShape:
    prompt: int
    rollouts: tuple[RolloutShape, ...]
    own_prompts: bool = False  # each rollout has a different prompt, so that no prefix is shared


def make_groups(shapes: Sequence[GroupShape], seed: int) -> list[Group]:
    return [_group(shape, index, seed) for index, shape in enumerate(shapes)]


def _group(shape: GroupShape, index: int, seed: int) -> Group:
    generator = torch.Generator().manual_seed(seed * 1000 + index)

    def tokens(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    def make_turns(lengths: Sequence[tuple[int, int]]) -> list[Turn]:
        turns = []
        for policy, answer in lengths:
            turns.append(sampled_turn(tokens(policy), (-3 * torch.rand(policy, generator=generator)).tolist()))
            turns += [observation_turn(tokens(answer), "")] if answer else []
        return turns

    def make_branches(prompt: list[int], turns: list[Turn], shapes: Sequence[BranchShape]) -> Iterator[Branch]:
        lengths = [len(prompt) + sum(len(turn.tokens) for turn in turns)]
        for member in shapes:
            parent = member.parent % len(lengths)
            start = round(member.start * lengths[parent])
            opening = max(member.opening, 1 if start == 0 else 0)
            own = [*([observation_turn(tokens(opening), "")] if opening else []), *make_turns(member.turns)]
            lengths.append(start + sum(len(turn.tokens) for turn in own))
            yield Branch(parent=parent, start=start, turns=tuple(own))

    common = tokens(shape.prompt)
    rollouts = []
    for member in shape.rollouts:
        turns = make_turns(member.turns)
        prompt = tokens(shape.prompt) if shape.own_prompts else common
        made = make_rollout(
            prompt,
            *turns,
            reward=float(torch.rand((), generator=generator, dtype=torch.float64)),
            ending=Ending.LENGTH if member.truncated else Ending.STOP,
        )
        rollouts.append(replace(made, branches=tuple(make_branches(prompt, turns, member.branches))))
    return make_group(*rollouts, index=index)


def make_agent_groups() -> list[Group]:
    """An agent that retried, asked a sub-agent, rewrote its history in the middle of a turn; beside one of a single conversation."""
    prompt = [5, 6, 7, 8, 9, 10]
    turns = (sampled_turn([20, 21, 22, 23]), observation_turn([30, 31], ""), sampled_turn([24, 25, 26]))
    branches = (
        Branch(parent=0, start=6, turns=(sampled_turn([27, 28]),)),  # a retry of the first request
        Branch(parent=0, start=2, turns=(observation_turn([40, 41, 42], ""), sampled_turn([43, 44]))),  # leaves within the prompt
        Branch(parent=0, start=8, turns=(observation_turn([50], ""), sampled_turn([51, 52, 53]))),  # leaves within a turn
        Branch(
            parent=3, start=12, turns=(observation_turn([60, 61], ""), sampled_turn([62]))
        ),  # goes on after the whole of branch 3
        Branch(parent=0, start=15, turns=(observation_turn([70], ""), sampled_turn([71, 72]))),  # goes on after the main path
        Branch(parent=0, start=0, turns=(observation_turn([80, 81], ""), sampled_turn([82, 83]))),  # shares nothing
    )
    tree = replace(make_rollout(prompt, *turns), branches=branches)
    return [make_group(tree, make_rollout(prompt, *turns, reward=1.0), make_rollout(prompt, sampled_turn([90, 91]), reward=0.5))]


_lengths = st.integers(1, 7)
_turns = st.one_of(
    st.tuples(st.tuples(_lengths, st.just(0))),  # one turn, as in most runs
    st.lists(st.tuples(_lengths, st.integers(0, 4)), min_size=2, max_size=3).map(tuple),
)
_branches = st.builds(BranchShape, parent=st.integers(0, 3), start=st.floats(0, 1), opening=st.integers(0, 3), turns=_turns)
rollout_shapes = st.builds(
    RolloutShape,
    turns=_turns,
    truncated=st.booleans(),
    branches=st.one_of(*[st.just(())] * 4, st.lists(_branches, min_size=1, max_size=2).map(tuple)),
)
group_shapes = st.builds(
    GroupShape,
    prompt=st.integers(1, 9),
    rollouts=st.lists(rollout_shapes, min_size=1, max_size=4).map(tuple),
    own_prompts=st.sampled_from([False, False, False, True]),
)
batch_shapes = st.lists(group_shapes, min_size=1, max_size=4)


def shapes_to_cut(rollouts: int) -> Any:
    """Draw batches that have a gradient, and rows to divide: two or three groups of two or more rollouts, up to ``rollouts``."""
    shapes = st.builds(
        GroupShape,
        prompt=st.integers(1, 9),
        rollouts=st.lists(rollout_shapes, min_size=2, max_size=rollouts).map(tuple),
        own_prompts=st.sampled_from([False, False, False, True]),
    )
    return st.lists(shapes, min_size=2, max_size=3)


def with_columns(batch: Batch, logprobs: Tensor, seed: int = 0) -> Batch:
    """Add scored columns near ``logprobs`` [N], with ratios on both sides of the clip range and a different reference."""
    generator = torch.Generator().manual_seed(seed)
    count = len(batch.target)
    batch = batch.with_column("policy_logprobs", logprobs.float() + 0.3 * torch.randn(count, generator=generator))
    return batch.with_column("reference_logprobs", logprobs.float() + 0.5 * torch.randn(count, generator=generator))


def pack_for(groups: Sequence[Group], algorithm: Algorithm, *, share_prefixes: bool = True) -> Batch:
    """Pack the groups with the credit that an algorithm gives them."""
    return pack(groups, algorithm.group_credit(groups), share_prefixes=share_prefixes)


def pack_grpo(groups: Sequence[Group], *, share_prefixes: bool = True, **options: Any) -> Batch:
    """Pack the groups into a batch for GRPO with ``options``."""
    return pack_for(groups, grpo(**options), share_prefixes=share_prefixes)
