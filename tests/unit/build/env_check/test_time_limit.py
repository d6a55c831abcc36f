"""Environments whose methods never return: the check ends, and says where."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.build.env_check import time_limit
from strop.build.env_check.check_report import EnvironmentReport
from strop.build.env_check.checked_environments import CheckedEnvironment
from strop.build.env_check.environment_check import EnvironmentCheckOptions, check_environment
from strop.build.env_check.reward_checks import ScoringLimits
from strop.cli import main
from strop.data.sources.source import DataSource
from strop.environments.base import reward
from strop.types import Messages, Rollout, Task
from support.planted_faults import Sound

ended = threading.Event()


class LoopsInReward(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue


class WaitsForEver(Sound):
    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await asyncio.Event().wait()
        return None


class BlocksThread(Sound):
    @reward(weight=1.0)
    async def slow(self, task: Task, rollout: Rollout) -> float:
        return float(await asyncio.to_thread(ended.wait, 60))


class LoopsInPrompt(Sound):
    def prompt(self, task: Task) -> Messages:
        while True:
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(time_limit, "LIMIT_S", 0.3)
    monkeypatch.setattr(time_limit, "AGAIN_S", 0.2)
    ended.clear()
    before = signal.getsignal(signal.SIGALRM)
    yield
    ended.set()
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def check(kind: type[Sound]) -> EnvironmentReport:
    environment = kind()
    each = CheckedEnvironment(kind.__name__, environment, environment.tasks(DataSource(size=8)))
    return check_environment(each, EnvironmentCheckOptions(tasks=4), ScoringLimits(max_turns=2, longest=200))[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (LoopsInReward, "episode_ends: it did not return within 0.3 s, in LoopsInReward.score"),
        (WaitsForEver, "episode_ends: an episode of task 'False:0' did not end within 0.3 s"),
        (BlocksThread, "episode_ends: an episode of task 'False:0' did not end within 0.3 s"),
        (
            LoopsInPrompt,
            "tasks_valid: task 0 cannot be made: NeverReturned: it did not return within 0.3 s, in LoopsInPrompt.prompt",
        ),
    ],
)
def test_a_method_that_never_returns_is_a_fault_and_not_a_check_that_never_ends(kind: type[Sound], said: str) -> None:
    started = time.monotonic()
    report = check(kind)
    assert time.monotonic() - started < 20 and report.hung == (kind is not LoopsInPrompt)
    faults = [f"{finding.check}: {finding.message}" for finding in report.faults]
    assert any(fault.startswith(said) for fault in faults), faults
    if report.hung:
        assert report.not_checked["leaks"] == "the checks of episodes were not finished"


def test_the_command_leaves_threads_that_hang_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import time\n\ndef waits(task, rollout):\n    while True:\n        time.sleep(0.01)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"problem": f"{n}?", "answer": str(n)}) + "\n" for n in range(8)))
    values: dict[str, Any] = {
        "policy": {"model_name": "no_model"},
        "data": {"train": {"dataset_name": "rows.jsonl", "env_name": "own"}},
        "env": {"own": {"reward": "own.py:waits"}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    main(["env", "check", "run.yaml", "--tasks", "2"])
    assert left == [1]
    assert "in waits (" in capsys.readouterr().out
