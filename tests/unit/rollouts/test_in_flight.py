"""Which episodes start, and which are cancelled because their group can no longer be trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from loop.fakes import FakeGenerator, run_virtually
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import is_beyond_training
from strop.sampling import Sampling, mix_seed
from strop.types import Group, Messages, Rollout, Task, user

TOKENIZER = tiny_tokenizer()
SAMPLES = 4
SEEDS = [mix_seed(1, 0, sample) for sample in range(SAMPLES)]


@dataclass(frozen=True, kw_only=True)
class Slow(Environment[Task]):
    """Its reward takes an hour for each sample; those in ``fails`` raise at once, each as often as it says."""

    fails: dict[int, list[Exception]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return []

    def prompt(self, task: Task) -> Messages:
        return (user("go"),)

    @reward()
    async def patience(self, task: Task, rollout: Rollout) -> float:
        if self.fails.get(rollout.sample):
            raise self.fails[rollout.sample].pop()
        await asyncio.sleep(3600.0 * (1 + rollout.sample))
        self.done.append(rollout.sample)
        return 1.0


async def run(environment: Slow, generator: Any = None, *, retries: int = 0, **options: Any) -> Group:
    return await run_group(
        0, "slow", LocalEnvironment(environment), Task(id="t"), samples=SAMPLES, generator=generator or FakeGenerator(TOKENIZER), seed=1,
        template=ChatTemplate(TOKENIZER), sampling=Sampling(max_new_tokens=4),
        rules=EpisodeRules(max_length=99, retries=retries), **options,
    )  # fmt: skip


def lost_below(least: int):
    return lambda ended: is_beyond_training(ended, SAMPLES, least)


def lost() -> RolloutFailed:
    return RolloutFailed("the sandbox vanished", Ending.SANDBOX)


@pytest.mark.parametrize(
    ("fails", "least", "done"),
    [
        ({2: [LookupError("a bug")]}, 2, []),  # its group is dropped, so the hours of the others are saved
        ({2: [lost()]}, 2, [0, 1, 3]),  # it is left out alone
        ({2: [lost()], 3: [lost()]}, 3, []),  # two are left, and three are wanted
        ({2: [lost()], 3: [lost()]}, 2, [0, 1]),
        ({}, 4, [0, 1, 2, 3]),
    ],
)
def test_the_rollouts_of_a_group_that_will_be_dropped_are_cancelled(fails, least, done):
    environment = Slow(fails=fails)
    group = run_virtually(run(environment, is_lost=lost_below(least)))
    assert environment.done == done
    assert [rollout.sample for rollout in group.rollouts] == list(range(SAMPLES))
    aborted = [rollout.sample for rollout in group.rollouts if rollout.ending == Ending.ABORTED]
    assert aborted == [sample for sample in range(SAMPLES) if sample not in done and sample not in fails]
    assert all(not rollout.counts and rollout.error for rollout in group.rollouts if rollout.sample not in done)
    assert group.leave_out_failed().rollouts == tuple(group.rollouts[sample] for sample in done or range(SAMPLES))


def test_a_greedy_baseline_that_fails_ends_its_group():
    environment = Slow(fails={SAMPLES: [lost()]})
    group = run_virtually(run(environment, greedy_baseline=True, is_lost=lost_below(2)))
    assert environment.done == [] and group.errors


def test_a_group_is_cancelled_while_its_engine_works_once_the_weights_have_moved_on():
    """The engine is told: the request of a cancelled rollout is cancelled, which frees its place."""
    generator = FakeGenerator(TOKENIZER, latency=lambda seed: 5000.0)
    cancelled: list[int] = []

    async def generate(prompt: Sequence[int], *, seed: int, **options: Any) -> Any:
        try:
            return await FakeGenerator.generate(generator, prompt, seed=seed, **options)
        except asyncio.CancelledError:
            cancelled.append(seed)
            raise

    generator.generate = generate  # type: ignore[method-assign]

    async def main() -> tuple[Group, float]:
        task = asyncio.ensure_future(run(Slow(), generator, is_lost=lambda ended: generator.version > 2))
        await asyncio.sleep(100)
        assert not task.done()
        generator.version = 3
        return await task, asyncio.get_running_loop().time()

    group, seconds = run_virtually(main())
    assert seconds < 102 and len(set(cancelled)) == SAMPLES
    assert {rollout.ending for rollout in group.rollouts} == {Ending.ABORTED}


def test_a_cancelled_group_leaves_no_rollout_running():
    environment = Slow()

    async def main() -> None:
        task = asyncio.ensure_future(run(environment, is_lost=lost_below(2)))
        await asyncio.sleep(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())
    assert environment.done == []


@dataclass
class Gate:
    """Admits ``places`` episodes at once, and asks for failed ones again until ``patience`` is used up."""

    places: int = SAMPLES
    patience: int = 0
    seen: list[tuple[int, str]] = field(default_factory=list)
    inside: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.semaphore = asyncio.Semaphore(self.places)

    @asynccontextmanager
    async def admit(self, environment: str) -> AsyncIterator[None]:
        if self.places == 0:
            raise RuntimeError("closed for good")
        async with self.semaphore:
            self.inside += 1
            self.most = max(self.most, self.inside)
            yield
            self.inside -= 1

    def observe(self, environment: str, rollout: Rollout) -> bool:
        self.seen.append((rollout.sample, rollout.ending or ""))
        self.patience -= rollout.error is not None
        return rollout.error is not None and self.patience >= 0


def test_gates_admit_episodes_and_see_how_each_ended():
    gate, other = Gate(places=2), Gate(places=3)
    group = run_virtually(run(Slow(), gates=[gate, other]))
    assert (gate.most, other.most, gate.inside) == (2, 2, 0)
    assert sorted(gate.seen) == [(sample, "stop") for sample in range(SAMPLES)] and len(group.rollouts) == SAMPLES


@pytest.mark.parametrize(
    ("patience", "retries", "scored"), [(0, 0, False), (0, 2, False), (0, 3, True), (2, 0, False), (2, 1, True)]
)
def test_a_failed_rollout_is_sampled_again_as_often_as_retries_and_gates_allow(patience, retries, scored):
    """A gate's attempts are not counted; each attempt has a seed of its own, and the first that of a run without retries."""
    generator, gate = FakeGenerator(TOKENIZER), Gate(patience=patience)
    group = run_virtually(run(Slow(fails={1: [lost() for _ in range(3)]}), generator, retries=retries, gates=[gate]))
    assert group.rollouts[1].counts == scored
    seeds = [rollout.seed for rollout in group.rollouts]
    attempts = 1 + min(3, patience + retries)
    expected = [*SEEDS[:1], SEEDS[1] if attempts == 1 else mix_seed(1, 0, 1, attempts - 1), *SEEDS[2:]]
    assert seeds == expected and len(generator.requests) == SAMPLES + attempts - 1


def test_a_gate_that_gives_up_ends_the_run():
    with pytest.raises(RuntimeError, match="closed for good"):
        run_virtually(run(Slow(), gates=[Gate(places=0)]))


def test_the_policys_own_failure_is_never_sampled_again():
    gate = Gate(patience=5)
    gate.observe = lambda environment, rollout: True  # type: ignore[method-assign]
    generator = FakeGenerator(TOKENIZER)
    group = run_virtually(
        run(Slow(fails={1: [RolloutFailed("its program died", Ending.CRASH)]}), generator, gates=[gate], retries=4)
    )
    assert group.rollouts[1].ending == Ending.CRASH and len(generator.requests) == SAMPLES
