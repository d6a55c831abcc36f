"""Optimizer steps as plain numbers: random ones, and those on which implementations go wrong.

A ``Sample`` is one rollout as lists of Python floats, one number a token. ``Step`` is what one optimizer step sees: groups of samples.
Nothing here knows a formula or the implementation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Sample:
    """One rollout. Log-probabilities are of the sampled tokens."""

    reward: float
    now: list[float]  # by the policy that is trained
    before: list[float]  # by the learner before the update
    sampler: list[float]  # as the sampler recorded them
    reference: list[float]  # by the reference
    teacher: list[float]
    entropy: list[float]
    value: list[float]  # the critic's, before the update
    new_value: list[float]  # the critic's, as it is trained
    advantage: float = 0.0  # where a test of a loss does not want to go through rewards
    truncated: bool = False  # where a filter is on, its tokens do not count
    parts: Mapping[str, float] = field(default_factory=dict)  # rewards by name

    @property
    def length(self) -> int:
        return len(self.now)


@dataclass(frozen=True)
class Step:
    name: str
    groups: tuple[tuple[Sample, ...], ...]
    greedy: tuple[float, ...] = ()  # for each group, the reward of its greedy rollout

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]

    def map(self, change: Callable[[Sample], Sample], name: str | None = None) -> Step:
        groups = tuple(tuple(change(sample) for sample in group) for group in self.groups)
        return replace(self, name=name or self.name, groups=groups)


# Rewards of one group. What is wrong with each is what libraries got wrong.
REWARDS: dict[str, list[float]] = {
    "random": [0.3, -1.2, 2.5, 0.9, -0.4],
    "binary": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    "a lone success in 16": [1.0] + [0.0] * 15,
    "a lone failure in 16": [1.0] * 15 + [0.0],
    "all right": [1.0] * 8,
    "all wrong": [0.0] * 8,
    "all the same, not representable": [0.1] * 7,
    "float residue": [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
    "float32 residue": [0.30000001192092896, 0.3, 0.3],
    "residue of large numbers": [1e8, 1e8 + 1e-7, 1e8],
    "negative and all the same": [-2.5] * 4,
    "a pair": [0.0, 1.0],
    "tiny": [1e-8, 0.0, 3e-8, 0.0],
    "huge": [1e8, 0.0, 3e8, -1e8],
    "all negative": [-1.0, -0.5, -2.0],
    "sum to zero": [1.0, -1.0, 2.0, -2.0],
    "ties at the top": [2.0, 2.0, 1.0, 0.0],
}

LENGTHS: dict[str, list[int]] = {"short": [3, 1, 4, 2, 5], "very unequal": [1, 40, 2, 17, 1], "single tokens": [1, 1, 1, 1, 1]}


def sample(draw: random.Random, length: int, reward: float, *, spread: float = 0.3, **given: object) -> Sample:
    """A rollout whose log-probabilities by the different policies are ``spread`` apart: ratios on both sides of every clip range."""
    now = [-draw.expovariate(1.0) - 0.01 for _ in range(length)]

    def near(scale: float) -> list[float]:
        return [min(-1e-3, number + draw.gauss(0.0, scale)) for number in now]

    columns: dict[str, object] = {
        "now": now,
        "before": near(spread),
        "sampler": near(1.5 * spread),
        "reference": near(2 * spread),
        "teacher": near(2 * spread),
        "entropy": [draw.uniform(0.0, 3.0) for _ in range(length)],
        "value": [draw.gauss(0.2, 0.5) for _ in range(length)],
        "new_value": [draw.gauss(0.2, 0.5) for _ in range(length)],
        "advantage": draw.gauss(0.0, 1.0),
        "parts": {"correct": reward, "format": draw.choice([0.0, 0.5, 1.0])},
    }
    return Sample(reward=reward, **{**columns, **given})  # type: ignore[arg-type]


def step(
    name: str,
    lengths: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float]] | None = None,
    *,
    seed: int = 0,
    spread: float = 0.3,
) -> Step:
    """Groups of rollouts of these ``lengths``; random rewards unless given."""
    draw = random.Random(f"{name} {seed}")
    groups = []
    for place, members in enumerate(lengths):
        given = rewards[place] if rewards else [draw.gauss(0.0, 1.0) for _ in members]
        groups.append(tuple(sample(draw, length, reward, spread=spread) for length, reward in zip(members, given, strict=True)))
    return Step(name, tuple(groups), tuple(draw.choice([0.0, 1.0]) for _ in groups))


def extreme(name: str, size: float) -> Step:
    """Log ratios of 0 and +-``size`` between trained policy, learner before the update and sampler, all combinations in turn, with
    advantages of both signs."""
    plain = step(name, [[8, 3, 5], [8, 8]])

    def stretch(one: Sample) -> Sample:
        def column(period: int) -> list[float]:
            return [now / 100 - size * (t // period % 2) for t, now in enumerate(one.now)]

        return replace(one, now=column(1), before=column(2), sampler=column(4))

    return plain.map(stretch)


def truncated_every(other: int, plain: Step) -> Step:
    count = iter(range(10**6))
    return plain.map(lambda one: replace(one, truncated=next(count) % other == 0))


def on_policy(plain: Step) -> Step:
    """All policies agree: a first step on fresh rollouts."""
    return plain.map(lambda one: replace(one, before=one.now, sampler=one.now, reference=one.now, teacher=one.now))


def steps() -> dict[str, Step]:
    """What every policy-gradient objective is tried on."""
    plain = [
        step("random", [[3, 5, 2], [4, 1, 6, 2]]),
        step("random, far apart", [[3, 5], [4, 6]], spread=1.5),
        step("very unequal lengths", [[1, 33, 2], [17, 1]]),
        step("single tokens", [[1, 1, 1], [1, 1]]),
        step("binary rewards", [[3, 2, 4, 1], [2, 2, 3]], [[1, 0, 0, 1], [0, 0, 1]]),
        step("a lone success in 16", [[2] * 16], [[1.0] + [0.0] * 15]),
        step("one-sided groups", [[3, 2, 4], [2, 5], [3, 1]], [[1, 1, 1], [0, 0], [1, 0]]),
        step("float residue", [[3, 2], [2, 4]], [[0.1 + 0.2, 0.3], [1.0, 0.0]]),
        step("empty completions", [[0, 3, 2], [4, 0]], [[1, 0, 1], [1, 0]]),
        step("a group of empty completions", [[0, 0], [3, 2]], [[1, 0], [1, 0]]),
        step("tiny rewards", [[3, 2, 1]], [[1e-8, 0.0, 3e-8]]),
        step("huge rewards", [[3, 2, 1]], [[1e8, 0.0, -3e8]]),
        extreme("log ratios of 5", 5.0),
        extreme("log ratios of 50", 50.0),
    ]
    plain.append(truncated_every(2, step("every other rollout masked", [[3, 2, 4], [2, 5, 1]])))
    masked = step("all rollouts of a group masked", [[3, 2], [2, 4]])
    plain.append(replace(masked, groups=(truncated_every(1, masked).groups[0], masked.groups[1])))
    plain.append(on_policy(step("on policy", [[3, 5], [2, 4]])))
    return {one.name: one for one in plain}


STEPS = steps()


def pairs() -> dict[str, Step]:
    """Groups of two: chosen and rejected."""
    plain = [
        step("random pairs", [[3, 5], [4, 1], [2, 2]], [[1, 0]] * 3),
        step("one pair", [[4, 6]], [[1, 0]]),
        step("single tokens", [[1, 1], [1, 1]], [[1, 0]] * 2),
        step("very unequal lengths", [[1, 40], [30, 2]], [[1, 0]] * 2),
        step("margins", [[3, 4], [2, 5], [3, 3]], [[3, 0], [0.5, 0], [2, 0]]),
        step("far from the reference", [[3, 5], [6, 4]], [[1, 0]] * 2, spread=15.0),
        on_policy(step("at the start", [[3, 5], [4, 2]], [[1, 0]] * 2)),
    ]
    nearly = step("nearly certain tokens", [[3, 2], [2, 4]], [[1, 0]] * 2)
    plain.append(nearly.map(lambda one: replace(one, now=[-(10.0 ** -(3 + place)) for place in range(one.length)])))
    return {one.name: one for one in plain}


PAIRS = pairs()


def numbers(values: Sequence[float]) -> Iterator[float]:
    """Finite ones, or the test itself is wrong."""
    for value in values:
        assert math.isfinite(value)
        yield value
