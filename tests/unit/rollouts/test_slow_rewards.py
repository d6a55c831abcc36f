"""Slow rewards: other rollouts are generated meanwhile, slots go on, and every rollout knows the version that began its group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from loop.fakes import FakeGenerator, Request
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.stream import DropTooOld, RolloutStream
from strop.sampling import Sampling
from strop.types import Group, Rollout, Task

TOKENIZER = tiny_tokenizer()


@dataclass(frozen=True, kw_only=True)
class SlowlyJudged(Environment[Task]):
    """The rewards of the first task end after those of the seven others; ``log`` says what was scored when."""

    log: list[str] = field(default_factory=list)

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id=str(index), question=str(index)) for index in range(8)]

    @reward()
    async def judged(self, task: Task, rollout: Rollout) -> float:
        while task.id == "0" and len(self.log) < 14 and "scored 0" not in self.log:
            await asyncio.sleep(0.005)
        self.log.append(f"scored {task.id}")
        return 1.0


def says_two(request: Request) -> tuple[list[int], bool]:
    return [TOKENIZER.convert_tokens_to_ids("2"), TOKENIZER.eos_token_id], True


def test_a_slow_reward_holds_only_its_own_slot_while_others_are_generated_and_scored():
    environment = SlowlyJudged()
    tasks, generator = environment.tasks(DataSource()), FakeGenerator(TOKENIZER, says_two)

    async def start(index: int) -> Group:
        return await run_group(
            index,
            "slow",
            LocalEnvironment(environment),
            tasks[index],
            samples=2,
            generator=generator,
            template=ChatTemplate(TOKENIZER),
            sampling=Sampling(max_new_tokens=4),
            rules=EpisodeRules(max_length=200),
            seed=1,
        )

    async def run() -> list[Group]:
        stream = RolloutStream(start, slots=4, size=8, refill_on_release=True, order=DropTooOld())  # as they finish
        groups = []
        for _ in range(8):
            groups.append(await stream.next())
            stream.release(1)
        return groups

    groups = asyncio.run(run())
    assert [group.index for group in groups][-1] == 0, "seven groups went through three slots while the first was judged"
    assert environment.log[-2:] == ["scored 0", "scored 0"]
    assert all(rollout.reward == 1.0 and rollout.error is None for group in groups for rollout in group.rollouts)
