"""A run that is killed goes on in the middle of its episodes, or says that they begin again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loop.kinds import assert_same_run
from loop.runs import Outcome, grpo
from loop.tiny import build_tiny
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import read_traits
from strop.environments.registry import make_environment
from strop.extensions.sandboxes.kept_episodes import KeptGroup, drop_newer
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from strop.extensions.sandboxes.task_sandbox import SandboxState
from strop.types import Ending, Rollout, Task, Turn
from support import sandbox_episodes
from support.sandbox_episodes import KillInTheMiddle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_middle_of_its_episodes(
    make_local: Callable[[], LocalProvider], image: str, tiny: Path, tmp_path: Path
):
    store = make_local().store.folder

    def run(folder: Path, before: Any = None) -> Outcome:
        return grpo(
            tiny, folder, before=before, **{
                "data.train.env_name": "growing", "data.validation": ..., "data.validation.env_name": ..., "data.validation.size": ...,
                "env.arithmetic.max_operand": ..., "env.arithmetic.wording": ..., "env.growing.image": image,
                "env.growing.type": f"{sandbox_episodes.__file__}:Growing", "env.growing.snapshot_turns": 1,
                "sandboxes.options.folder": str(store),
                "sandboxes.memory_mb": 256, "grpo.num_prompts_per_step": 2, "grpo.num_generations_per_prompt": 2, "grpo.max_num_steps": 2,
                "grpo.val_period": 0, "grpo.max_rollout_turns": 3, "policy.max_total_sequence_length": 128,
                "checkpointing.save_period": 1, "checkpointing.metric_name": None, "logger.console": "plain",
                "policy.exact_on_policy": True,  # whatever else is sampled at the time
            },
        )  # fmt: skip

    def snapshots() -> list[Path]:
        return [each for each in (store / "images").glob("*.json") if '"snapshot:' in each.read_text()]

    before = snapshots()  # other tests use the store too
    assert run(tmp_path / "whole").code == 0
    assert snapshots() == before
    assert run(tmp_path / "killed", KillInTheMiddle(10)).code == -signal.SIGKILL  # 8 of the first step
    assert list((tmp_path / "killed" / "results" / "episodes").glob("*.pt"))
    outcome = run(tmp_path / "killed")
    said = outcome.out + outcome.err
    assert outcome.code == 0 and said.count("goes on after turn") >= 1 and "begins again" not in said, outcome
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed" / "results" / "episodes").glob("*"))


TASK = Task(id="t", question="why", metadata={"image": "i"})


def rollout_with(version: int, ending: Ending | None = None) -> Rollout:
    turn = Turn(
        author="policy",
        tokens=torch.tensor([1, 2]),
        text="ab",
        logprobs=torch.zeros(2),
        versions=torch.full((2,), version, dtype=torch.int32),
    )
    return Rollout(task=TASK, sample=1, seed=255, messages=(), prompt=torch.tensor([3]), turns=(turn,), version=2, ending=ending)


class Session:
    """An environment's handle, whose state is a word."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.restored = fails, b""
        self.traits = SimpleNamespace(episode_state=self)

    async def save(self, task: Task, rollout: Rollout) -> bytes:
        return b"state"

    async def restore(self, task: Task, rollout: Rollout, state: bytes) -> None:
        if self.fails:
            raise RuntimeError("the snapshot is gone")
        self.restored = state


def restore(
    folder: Path, session: Session, settings: str = "s", rollout: Rollout | None = None
) -> tuple[Rollout | None, list[str]]:
    notes: list[str] = []
    keeper = KeptGroup(folder, notes.append, settings, 7)
    return asyncio.run(keeper.restore(session, rollout or rollout_with(0))), notes  # type: ignore[arg-type]


def test_a_rollout_is_restored_as_it_was_kept_or_a_note_says_that_it_begins_again(tmp_path: Path):
    keeper = KeptGroup(tmp_path, print, "s", 7)
    asyncio.run(keeper.keep(Session(), rollout_with(3)))  # type: ignore[arg-type]
    session = Session()
    found, notes = restore(tmp_path, session)
    assert (
        found is not None and found.task is TASK and found.turns[0].versions.tolist() == [3, 3] and session.restored == b"state"
    )
    assert (
        notes == ["sample 1 of task t goes on after turn 1, where the run was killed"]
        and keeper.find_ended(rollout_with(0)) is None
    )
    found, notes = restore(tmp_path, Session(fails=True))
    assert found is None and "begins again, because its environment cannot go on: RuntimeError: the snapshot is gone" in notes[0]
    assert restore(tmp_path, Session(), settings="other") == (None, [])
    assert restore(tmp_path, Session(), rollout=replace(rollout_with(0), task=Task(id="another"))) == (None, [])
    (tmp_path / "7-ff.pt").write_bytes(b"half a file")
    assert restore(tmp_path, Session()) == (None, [])


def test_what_newer_weights_sampled_begins_again(tmp_path: Path):
    notes: list[str] = []
    asyncio.run(KeptGroup(tmp_path, print, "s", 7).keep(Session(), rollout_with(3)))  # type: ignore[arg-type]
    drop_newer(tmp_path, 3, notes.append)
    assert list(tmp_path.glob("*")) and not notes
    drop_newer(tmp_path, 2, notes.append)
    assert not list(tmp_path.glob("*"))
    assert notes == ["1 of 1 episodes in the middle begin again: newer weights than those of step 2 sampled them"]


def test_a_rollout_that_ended_is_kept_until_its_group_ends(tmp_path: Path):
    keeper = KeptGroup(tmp_path, print, "s", 7)
    asyncio.run(keeper.keep(Session(), rollout_with(3, Ending.STOP)))  # type: ignore[arg-type]
    found = keeper.find_ended(rollout_with(0))
    assert found is not None and found.ending == Ending.STOP and found.task is TASK
    keeper.forget()
    assert keeper.find_ended(rollout_with(0)) is None and not list(tmp_path.glob("*"))


def test_only_what_can_go_on_is_kept():
    assert read_traits(make_environment("sandbox", {})).episode_state is None
    assert read_traits(make_environment("sandbox", {"snapshot_turns": 2})).episode_state == SandboxState(2)
    with pytest.raises(EnvironmentConfigError, match="snapshot_turns=0 is no number of turns"):
        make_environment("sandbox", {"snapshot_turns": 0})
    with pytest.raises(EnvironmentConfigError, match="agent, whose process no snapshot keeps"):
        make_environment("sandbox_agent", {"snapshot_turns": 1, "command": ["a"]})
