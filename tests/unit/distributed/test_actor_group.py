"""A group whose members are plain objects: whom it blames, and that it waits for nobody who waits for the dead."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from strop.distributed.actor_group import ActorGroup, ActorGroupDied
from strop.distributed.base import ActorDied


class Member:
    """Answers, raises, or waits until it is killed."""

    pid: int | None = 1
    address = "here"

    def __init__(self, answer: Any = None, *, waits: bool = False) -> None:
        self.name = "member"
        self.alive = True
        self.answer = answer
        self.waits = waits
        self.killed = threading.Event()
        self.received: tuple[Any, ...] = ()

    def start_call(self, method: str, *arguments: Any, urgent: bool = False) -> Callable[[], Any]:
        def answer() -> Any:
            if self.waits:
                self.killed.wait(60)
                raise ActorDied("killed by its group")
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return answer

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Any:
        self.received = arguments
        return asyncio.to_thread(self.start_call(method))

    async def kill(self) -> None:
        self.killed.set()


def test_what_all_answer_comes_by_rank() -> None:
    group = ActorGroup("learner", [Member(1), Member(2)])
    assert group.call_all_sync("save") == [1, 2]
    assert asyncio.run(group.call_all("save")) == [1, 2]


def test_each_member_gets_arguments_of_its_own() -> None:
    members = [Member(1), Member(2)]
    group = ActorGroup("learner", members)
    assert asyncio.run(group.call_each("score", [("policy", "share 0"), ("policy", "share 1")])) == [1, 2]
    assert [member.received for member in members] == [("policy", "share 0"), ("policy", "share 1")]
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(group.call_each("score", [("policy", "share 0")]))


@pytest.mark.parametrize("peer", ["Connection closed by peer [127.0.0.1]:1234", "[gloo] Connection reset by peer"])
def test_the_dead_member_is_blamed_and_not_the_one_that_noticed(peer: str) -> None:
    group = ActorGroup("learner", [Member(RuntimeError(peer)), Member(ActorDied("learner-1 is gone"))])
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        group.call_all_sync("save")
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        group.call_all_sync("save")


def test_a_member_that_waits_for_a_dead_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.distributed.actor_group.ERROR_GRACE_SECONDS", 0.2)
    stuck = Member(waits=True)
    began = time.monotonic()
    with pytest.raises(ActorGroupDied, match="learner-1 is gone"):
        ActorGroup("learner", [stuck, Member(ActorDied("learner-1 is gone"))]).call_all_sync("save")
    assert time.monotonic() - began < 10
    stuck.killed.set()


def test_what_a_member_raises_by_itself_is_raised() -> None:
    group = ActorGroup("learner", [Member(OSError("no space left")), Member(1)])
    with pytest.raises(OSError, match="no space left"):
        group.call_all_sync("save")
