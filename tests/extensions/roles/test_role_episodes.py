"""Episodes of several roles: what each role reads and writes, and what each is rewarded and trained for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from strop.algorithms.policy_gradient.grpo import GRPO
from strop.data.packing import pack
from strop.data.sources.source import DataSource
from strop.endings import Ending
from strop.environments.base import EnvironmentConfigError, reward
from strop.environments.handle import LocalEnvironment
from strop.extensions.roles.player import Player
from strop.extensions.roles.role_environment import RoleEnvironment
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.rollouts.reward_shaping_config import RewardScalingConfig
from strop.sampling import Sampling
from strop.trainer.dropped import drop_reason
from strop.trainer.step_metrics import group_metrics
from strop.types import TRAINED_POLICY, Group, Rollout, Task, user
from support.games import ScriptedGenerator


@dataclass(frozen=True, kw_only=True)
class Classroom(RoleEnvironment[Task]):
    """A teacher asks, and a student answers twice, the second time without its memory. Nobody asks the guest."""

    role_names: ClassVar[tuple[str, ...]] = ("teacher", "student", "guest")
    turns: int = 1  # of the teacher

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id="lesson")]

    async def play(self, task: Task, cast: Mapping[str, Player]) -> int:
        question = await cast["teacher"].say(user("Ask."))
        answers = [await cast["student"].say(user(question))]
        cast["student"].begin()
        answers.append(await cast["student"].say(user(question)))
        for _ in range(self.turns):
            await cast["teacher"].say(user(" ".join(answers)))
        return len(answers[-1])

    @reward()
    def played(self, task: Task, rollout: Rollout) -> float:
        return 1.0

    @reward(weight=2.0, role="student", accuracy=True)
    def length(self, task: Task, rollout: Rollout) -> float:
        return self.outcome + rollout.sample

    @reward(role="teacher", group=True)
    def rank(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        assert {rollout.role for rollout in rollouts} == {"teacher"}
        return [10.0 * rollout.sample for rollout in rollouts]


def play(environment: Classroom, *texts: str, samples: int = 2, own: Any = None, **rules: Any) -> Group:
    generator = ScriptedGenerator(*texts)
    return asyncio.run(
        run_group(
            0, "classroom", LocalEnvironment(environment), Task(id="lesson"), samples=samples, generator=generator,
            template=ChatTemplate(generator.tokenizer), sampling=Sampling(max_new_tokens=100), seed=5,
            rules=EpisodeRules(**{"max_turns": 2, "max_length": 1000, **rules}),
            policies=dict.fromkeys(("student", "base"), own) if own else {},
        )
    )  # fmt: skip


def test_each_role_has_its_own_conversations_rewards_and_group() -> None:
    group = play(Classroom(), *["why?", "so", "abc", "well"], *["why?", "so", "abcd", "done"])
    teacher, student, guest = group.by_role()
    assert [each.rollouts[0].role for each in (teacher, student, guest)] == ["teacher", "student", "guest"]
    assert len({rollout.sample for each in (teacher, student, guest) for rollout in each.rollouts}) == 6
    asked, answered = teacher.rollouts[0], student.rollouts[0]
    assert [turn.text for turn in asked.policy_turns] == ["why?", "well"] and "so abc" in asked.turns[1].text
    assert [turn.text for turn in answered.policy_turns] == ["so", "abc"], "both conversations are of one rollout"
    assert answered.branches[0].start == 0 and torch.equal(answered.branches[0].turns[0].tokens, answered.prompt)
    assert not guest.rollouts[0].policy_turns and guest.rollouts[0].reward == 1
    assert [rollout.reward for rollout in teacher.rollouts] == [1, 11]
    assert [rollout.reward for rollout in student.rollouts] == [1 + 2 * 3, 1 + 2 * (4 + 1)]
    assert student.rollouts[0].rewards == {"played": 1, "length": 3}
    credit = GRPO().group_credit(group.by_role())
    assert credit.advantages.reshape(3, 2).sum(1).abs().max() < 1e-6 and not credit.advantages[4:].any()
    batch = pack(group.by_role(), credit)
    assert batch.num_groups == 3 and batch.totals.sequences == 4, "who said nothing is in no divisor"
    logged = group_metrics(group.by_role(), (), [0] * 3)
    assert (logged["train/reward/teacher"], logged["train/reward/student"], logged["train/reward/guest"]) == (6, 9, 1)
    scaled = play(Classroom(), samples=1, scaling=RewardScalingConfig(enabled=True, source_max=2.0, target_max=20.0))
    assert scaled.rollouts[0].others[1].reward == 10


def test_a_role_with_its_own_policy_is_sampled_from_it_and_numbered() -> None:
    own = ScriptedGenerator("from", "the other")
    group = play(Classroom(roles={"student": "own", "guest": "base"}), "why?", "well", samples=1, own=own)
    teacher, student = group.by_role()
    assert [turn.text for turn in student.rollouts[0].policy_turns] == ["from", "the other"]
    assert pack([teacher, student]).rollout_columns[TRAINED_POLICY.name].tolist() == [0, 1]


def test_a_group_is_kept_if_one_role_can_learn_from_it() -> None:
    algorithm = GRPO(drop_constant_groups=True)
    run: Any = SimpleNamespace(options=SimpleNamespace(drop_stale=False, min_rollouts=2), algorithm=algorithm)
    constant = Classroom(reward_weights={"length": 0.0})
    assert drop_reason(run, play(constant)) is None, "the teachers' ranks differ"
    still = Classroom(reward_weights={"length": 0.0, "rank": 0.0})
    assert drop_reason(run, play(still)) == "filtered"


def test_a_role_that_is_asked_too_often_names_the_limit() -> None:
    rollout = play(Classroom(turns=2), samples=1).rollouts[0]
    assert rollout.error is not None and "max_rollout_turns" in rollout.error and not rollout.counts


def test_a_full_conversation_is_the_policys_failure() -> None:
    rollout = play(Classroom(), "why?", "x" * 45, "y" * 45, samples=1, max_length=120).rollouts[0]
    assert rollout.ending is not None and rollout.counts and not rollout.others and rollout.reward == 0
    assert rollout.ending == Ending.CONTEXT


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"pupil": "own"}, "no role 'pupil'"),
        ({"student": "frozen"}, "policy, own, base"),
        ({"student": {"base_url": "http://localhost/v1"}}, "needs model"),
        (dict.fromkeys(("teacher", "student", "guest"), "base"), "no role of Classroom is trained"),
    ],
)
def test_a_binding_that_cannot_be_is_refused(roles: Mapping[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=said):
        Classroom(roles=roles)


def test_without_a_run_that_keeps_it_a_policy_of_its_own_says_what_to_set() -> None:
    rollout = play(cast(Any, Classroom(roles={"student": "own"})), samples=1).rollouts[0]
    assert rollout.error is not None and "bind the role to policy" in rollout.error
