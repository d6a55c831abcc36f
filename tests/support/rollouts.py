"""Build rollouts, groups and batches, and hypothesis strategies for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.data.packing import pack
from strop.generation.base import Completion
from strop.types import Batch, Ending, Group, Rollout, Task, Turn, observation_turn
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
        entropies=completion.entropies,
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
class RolloutShape:
    turns: tuple[tuple[int, int], ...]  # (policy tokens, environment tokens) per turn
    truncated: bool = False


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

    common = tokens(shape.prompt)
    rollouts = []
    for member in shape.rollouts:
        turns = []
        for policy, answer in member.turns:
            turns.append(sampled_turn(tokens(policy), (-3 * torch.rand(policy, generator=generator)).tolist()))
            turns += [observation_turn(tokens(answer), "")] if answer else []
        rollouts.append(
            make_rollout(
                tokens(shape.prompt) if shape.own_prompts else common,
                *turns,
                reward=float(torch.rand((), generator=generator, dtype=torch.float64)),
                ending=Ending.LENGTH if member.truncated else Ending.STOP,
            )
        )
    return make_group(*rollouts, index=index)


_lengths = st.integers(1, 7)
_turns = st.one_of(
    st.tuples(st.tuples(_lengths, st.just(0))),  # one turn, as in most runs
    st.lists(st.tuples(_lengths, st.integers(0, 4)), min_size=2, max_size=3).map(tuple),
)
rollout_shapes = st.builds(RolloutShape, turns=_turns, truncated=st.booleans())
group_shapes = st.builds(
    GroupShape,
    prompt=st.integers(1, 9),
    rollouts=st.lists(rollout_shapes, min_size=1, max_size=4).map(tuple),
    own_prompts=st.sampled_from([False, False, False, True]),
)
batch_shapes = st.lists(group_shapes, min_size=1, max_size=4)


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
