"""state.pt is read without running what is in it."""

from __future__ import annotations

import datetime
import enum
import logging
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from strop.checkpointing import base
from strop.checkpointing.base import RunState, UntrustedClass, read_run_state, write_run_state
from strop.environments.base import PromptedTask
from strop.environments.remote import RemoteTask
from strop.rollouts.stream import StreamState
from strop.stopping import EarlyStop
from strop.types import Ending, Group, Rollout, Task, observation_turn, user


class Difficulty(enum.Enum):
    HARD = 2


@dataclass(frozen=True)
class Board:
    size: int


@dataclass(frozen=True, kw_only=True)
class PuzzleTask(Task):
    """A task as users define them, beside their environment."""

    board: Board
    difficulty: Difficulty = Difficulty.HARD


class Handle:
    """Not data: what a task must not hold if it is to be saved."""


def group(index: int, task: Task) -> Group:
    rollout = Rollout(
        task=task,
        sample=0,
        seed=1,
        messages=(user("a"),),
        prompt=torch.tensor([1, 2]),
        turns=(observation_turn([3], "c"),),
        ending=Ending.STOP,
        rewards={"right": 1.0},
    )
    return Group(index=index, environment="e", version=2, rollouts=(rollout,))


def saved(*tasks: Task) -> RunState:
    stream = StreamState(next_index=9, unfinished=(7,), finished=tuple(group(index, task) for index, task in enumerate(tasks)))
    return RunState(
        step=3, stream=stream, logged={"train/loss": float("nan")}, early_stop=EarlyStop(metric="validation/accuracy")
    )


TASKS = [
    Task(id="t", metadata={"when": datetime.datetime(2026, 1, 2), "array": numpy.arange(3), "one": numpy.float64(2), "set": {1}}),
    PromptedTask(id="t", messages=(user("a"),)),
    RemoteTask(id="t", part=0, index=3),
    PuzzleTask(id="t", board=Board(3)),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_every_kind_of_task_comes_back(tmp_path: Path, task: Task) -> None:
    write_run_state(tmp_path / "state.pt", saved(task), {"numpy": numpy.random.get_state(), "torch": torch.get_rng_state()})
    state, randomness = read_run_state(tmp_path / "state.pt")
    found = state.stream.finished[0]
    assert repr(found.task) == repr(task) and type(found.task) is type(task)
    assert found.rollouts[0].turns[0].tokens.tolist() == [3] and found.rollouts[0].ending is Ending.STOP
    assert state.stream.unfinished == (7,) and state.early_stop == EarlyStop(metric="validation/accuracy")
    assert torch.equal(randomness["torch"], torch.get_rng_state())
    assert (randomness["numpy"][1] == numpy.random.get_state()[1]).all()


def test_a_group_whose_task_could_not_be_read_is_sampled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base._warn_once.cache_clear()
    unreadable = [Task(id="h", metadata={"handle": Handle()}), Task(id="l", metadata={"f": lambda: 0})]
    with caplog.at_level(logging.WARNING):
        write_run_state(tmp_path / "state.pt", saved(TASKS[0], *unreadable), {})
    stream = read_run_state(tmp_path / "state.pt")[0].stream
    assert [found.index for found in stream.finished] == [0] and stream.unfinished == (1, 2, 7)
    assert "are sampled again after a restart" in caplog.text and "Handle" in caplog.text


class Runs:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "attack",
    [
        Runs(os.system, "touch hacked"),
        Runs(eval, "open('hacked', 'w')"),
        Runs(getattr, Task, "__init__"),
        Runs(sorted, "hacked"),
        Runs(base.write_run_state, "hacked", None, {}),
        Runs(torch.load, "hacked"),
        Runs(Handle),
    ],
    ids=lambda attack: attack.call[0].__name__,
)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_that_names_anything_else_is_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Any, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state": attack, "random": {}}, "state.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(Exception, match=r"which is not part of a run's state|not a zip file"):
        read_run_state(tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(pickle.dumps(attack))
    with pytest.raises(Exception, match="not a zip file"):
        read_run_state(tmp_path / "state.pt")
    assert not (tmp_path / "hacked").exists()


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.save(torch.jit.trace(Module(), torch.ones(1)), str(tmp_path / "state.pt"))  # type: ignore[no-untyped-call]
    with pytest.raises(UntrustedClass, match="TorchScript"):
        read_run_state(tmp_path / "state.pt")
