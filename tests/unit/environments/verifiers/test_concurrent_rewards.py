"""Verifiers of a rollout run side by side, and nothing else of them changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from strop.environments.base import import_user_code
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardError, RewardResult
from strop.environments.verifiers.base import Reply, Score, Verifier
from strop.types import Task

HERE = str(Path(__file__))
TASK = Task(id="t", question="q?")


@dataclass(frozen=True, kw_only=True)
class Waits(Verifier):
    """Returns its value once ``needs`` others are being computed, and then waits for ``turns`` turns of the event loop."""

    needs: int = 1
    turns: int = 0
    value: float = 1.0
    fails: bool = False
    running: ClassVar[set[int]] = set()
    most: ClassVar[list[int]] = [0]

    async def score(self, task: Task, reply: Reply) -> Score:
        me = id(asyncio.current_task())
        self.running.add(me)
        self.most[0] = max(self.most[0], len(self.running))
        try:
            for _ in range(2000):
                if self.most[0] >= self.needs:
                    break
                await asyncio.sleep(0)
            else:
                raise RuntimeError(f"{self.most[0]} run side by side")
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if self.fails:
                raise ValueError(f"value {self.value}")
            return Score(self.value, {"seen": self.value})
        finally:
            self.running.discard(me)


LOADED: type[Waits] = import_user_code(f"{HERE}:Waits")  # as an environment loads it


@pytest.fixture(autouse=True)
def nobody_runs() -> None:
    LOADED.running.clear()
    LOADED.most[0] = 0


def waits(**options: Any) -> dict[str, Any]:
    return {"verifier": f"{HERE}:Waits", **options}


def score(rewards: dict[str, Any], rollout: Any) -> RewardResult:
    return asyncio.run(compute_rewards(FunctionEnvironment(rewards=rewards), TASK, rollout))


def plain(task: Task, rollout: Any) -> float:
    assert "slow/seen" in rollout.metrics, "a function sees what is before it, and nothing of what is after it"
    assert "fast/seen" not in rollout.metrics
    return 0.25


def test_verifiers_run_side_by_side_and_their_order_is_as_it_was(talk) -> None:
    rewards = {"slow": waits(needs=2, turns=50, value=0.1), "own": plain, "fast": waits(needs=2, value=0.2)}
    result = score(rewards, talk(TASK, "a"))
    assert list(result.rewards) == ["slow", "own", "fast"] and result.reward == 0.1 + 0.25 + 0.2
    assert list(result.metrics) == ["slow/seen", "weighted/slow", "fast/seen", "weighted/fast"]


def test_a_gated_reward_starts_when_its_gate_is_known_and_only_if_it_is_open(talk) -> None:
    rewards = {"a": waits(gate="gate", needs=2), "b": waits(gate="gate", needs=2), "gate": waits()}
    assert score(rewards, talk(TASK, "a")).reward == 3.0
    LOADED.most[0] = 0
    rewards["gate"] = waits(value=0.0)
    assert dict(score(rewards, talk(TASK, "a")).rewards) == {"gate": 0.0, "a": 0.0, "b": 0.0} and LOADED.most == [1]


def test_the_error_is_that_of_the_first_reward_and_the_others_are_given_up(talk) -> None:
    rewards = {
        "first": waits(turns=50, value=1.0, fails=True),
        "second": waits(value=2.0, fails=True),
        "long": waits(turns=10**6),
    }
    with pytest.raises(RewardError, match=r"value 1\.0"):
        score(rewards, talk(TASK, "a"))
    assert not LOADED.running


def test_the_turns_of_a_rollout_are_scored_side_by_side(talk) -> None:
    result = score({"steps": waits(per_turn=True, needs=3, value=0.5)}, talk(TASK, "a", "b", "c"))
    assert result.reward == 1.5 and [step.reward for step in result.step_rewards] == [0.5] * 3
