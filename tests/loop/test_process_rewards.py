"""Whole runs whose environment rewards turns, and steps inside them; and online DPO, which a kill does not change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import sampling_config
from loop.runs import metrics_of, overrides, strop
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep_rows

pytestmark = pytest.mark.slow

TALK = """
from dataclasses import dataclass

from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Task, user


@dataclass(frozen=True, kw_only=True)
class Talk(Environment[Task]):
    '''Two turns. The share of sevens of a turn is its reward, and each digit of the second is one of a step inside the turn.'''

    def tasks(self, data):
        return GeneratedTasks(data.size or 1000, lambda index: Task(id=str(index), question="hard"))

    async def respond(self, task, rollout):
        return None if len(rollout.policy_turns) == 2 else (user("again"),)

    @reward(per_turn=True)
    def sevens(self, task, rollout):
        return [turn.text.count("7") / max(len(turn.text), 1) for turn in rollout.policy_turns]

    @reward(weight=0.1, per_turn=True)
    def digits(self, task, rollout):
        first, *others = rollout.policy_turns
        return [None, *({0: turn.text[:1].isdigit(), len(turn.tokens) - 1: turn.text[-1:].isdigit()} for turn in others)]

    @reward(weight=0.5)
    def two(self, task, rollout):
        return len(rollout.policy_turns) == 2
"""


def config(section: str, model: Path, folder: Path, **changes: Any) -> list[str]:
    (folder / "talk.py").write_text(TALK)
    settings: Mapping[str, Any] = {
        "env.graded.type": "talk.py:Talk",
        f"{section}.max_rollout_turns": 2,
        f"{section}.val_period": 0,
        "data.validation.env_name": ...,
        "data.validation.size": ...,
        "checkpointing.metric_name": None,
        **changes,
    }
    return overrides(sampling_config(section, model, **settings))


@pytest.mark.parametrize(("section", "name"), sweep_rows([("grpo", "process_supervision"), ("ppo", "ppo")]))
def test_rewards_of_turns_are_credited_stored_and_learned_from(section: str, name: str, tiny: Path, tmp_path: Path) -> None:
    changes = {"algorithm.name": name, f"{section}.max_num_steps": 10, "policy.optimizer.kwargs.lr": 0.01}
    outcome = strop(section, *config(section, tiny, tmp_path, **changes), folder=tmp_path)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
    assert logged[10]["train/rewards/sevens"] > logged[1]["train/rewards/sevens"] + 0.2, "the sum over two turns"
    for record in RolloutStore(tmp_path / "logs").read_all():
        turns = [turn for turn in record.turns if turn.sampled]
        of_steps = [turn.reward for turn in turns if turn.reward is not None]
        assert len(of_steps) == len(turns), "every turn has a reward"
        assert record.reward == pytest.approx(sum(of_steps) + 0.5 * record.rewards["two"], abs=1e-6)
        assert all(turn.reward is None for turn in record.turns if not turn.sampled)
    if name == "process_supervision":
        assert 1 <= logged[1]["train/steps_per_sample"] <= 3
