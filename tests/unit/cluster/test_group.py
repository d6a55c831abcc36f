"""A group whose members are plain objects: whom it blames, and that it waits for nobody who waits for the dead."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from strop.cluster.base import HostDied
from strop.cluster.group import GroupDied, WorkerGroup


class Member:
    """Answers, raises, or waits until it is killed."""

    process: int | None = 1
    address = "here"

    def __init__(self, answer: Any = None, *, waits: bool = False) -> None:
        self.name = "member"
        self.alive = True
        self.answer = answer
        self.waits = waits
        self.killed = threading.Event()

    def wait(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        def answer() -> Any:
            if self.waits:
                self.killed.wait(60)
                raise HostDied("killed by its group")
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return answer

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Any:
        return asyncio.to_thread(self.wait(method))

    async def kill(self) -> None:
        self.killed.set()


def test_what_all_answer_comes_by_rank() -> None:
    group = WorkerGroup("learner", [Member(1), Member(2)])
    assert group.now("save") == [1, 2]
    assert asyncio.run(group.all("save")) == [1, 2]


@pytest.mark.parametrize("peer", ["Connection closed by peer [127.0.0.1]:1234", "[gloo] Connection reset by peer"])
def test_the_dead_member_is_blamed_and_not_the_one_that_noticed(peer: str) -> None:
    group = WorkerGroup("learner", [Member(RuntimeError(peer)), Member(HostDied("learner-1 is gone"))])
    with pytest.raises(GroupDied, match="learner-1 is gone"):
        group.now("save")
    with pytest.raises(GroupDied, match="learner-1 is gone"):
        group.now("save")


def test_a_member_that_waits_for_a_dead_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.cluster.group.REASONS", 0.2)
    stuck = Member(waits=True)
    began = time.monotonic()
    with pytest.raises(GroupDied, match="learner-1 is gone"):
        WorkerGroup("learner", [stuck, Member(HostDied("learner-1 is gone"))]).now("save")
    assert time.monotonic() - began < 10
    stuck.killed.set()


def test_what_a_member_raises_by_itself_is_raised() -> None:
    group = WorkerGroup("learner", [Member(OSError("no space left")), Member(1)])
    with pytest.raises(OSError, match="no space left"):
        group.now("save")
