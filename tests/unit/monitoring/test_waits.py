"""Open waits: who waits for whom, across tasks and threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from strop.monitoring.waits import Wait, describe_wait, snapshot_waits, wait_chain, waiting


def named(on: str) -> Wait:
    (found,) = [wait for wait in snapshot_waits() if wait.on == on]
    return found


def test_a_wait_is_open_for_as_long_as_its_block_runs_also_when_it_raises() -> None:
    with waiting("learner", on="optimizer step 3", kind="training", detail="mini-batch 2"):
        found = named("optimizer step 3")
        assert (found.who, found.kind, found.detail) == ("learner", "training", "mini-batch 2") and found.parent is None
    with pytest.raises(ZeroDivisionError), waiting("learner", on="nothing"):
        _ = 1 / 0
    assert snapshot_waits() == ()


def test_nested_waits_are_a_chain() -> None:
    with waiting("training loop", on="generation"), waiting("generation", on="group 87", detail="task xyz"):
        with waiting("sample 3", on="environment Sandbox, turn 2"):
            waits = snapshot_waits()
            innermost = named("environment Sandbox, turn 2")
            assert describe_wait(innermost, waits) == (
                "training loop -> generation -> group 87 (task xyz) -> sample 3 -> environment Sandbox, turn 2"
            )
        with waiting("sample 4", on="engine"):
            assert [wait.on for wait in wait_chain(named("engine"), snapshot_waits())] == ["generation", "group 87", "engine"]


def test_tasks_and_threads_inherit_what_they_were_begun_in() -> None:
    async def inner(name: str) -> list[str]:
        with waiting(name, on=f"{name}'s answer"):
            await asyncio.sleep(0)
            return await asyncio.to_thread(in_thread, name)

    def in_thread(name: str) -> list[str]:
        with waiting(f"{name}'s thread", on=f"{name}'s disk"):
            waits = snapshot_waits()
            return [wait.on for wait in wait_chain(named(f"{name}'s disk"), waits)]

    async def outer() -> list[list[str]]:
        with waiting("all", on="both"):
            return list(await asyncio.gather(inner("a"), inner("b")))

    assert asyncio.run(outer()) == [["both", f"{name}'s answer", f"{name}'s disk"] for name in "ab"]


def test_what_was_begun_ahead_hangs_below_whoever_waits_for_it_by_name() -> None:
    async def group(release: asyncio.Event) -> None:
        with waiting("generation", on="group 5"):
            await release.wait()

    async def run() -> None:
        release = asyncio.Event()
        with waiting("training loop", on="generation"):
            task = asyncio.create_task(group(release))
            await asyncio.sleep(0)
        assert named("group 5").parent is None, "the step it was begun in is over"
        with waiting("training loop", on="generation"):
            assert describe_wait(named("group 5"), snapshot_waits()) == "training loop -> generation -> group 5"
        release.set()
        await task

    asyncio.run(run())
    assert snapshot_waits() == ()


def test_waits_that_name_each_other_are_no_endless_chain() -> None:
    threads, release = [], threading.Event()

    def wait_for(who: str, on: str) -> None:
        with waiting(who, on=on):
            release.wait(5)

    for who, on in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "d")):
        threads.append(threading.Thread(target=wait_for, args=(who, on)))
        threads[-1].start()
    while len(snapshot_waits()) < 4:
        time.sleep(0.001)
    assert all(describe_wait(wait, snapshot_waits()) for wait in snapshot_waits())
    release.set()
    for thread in threads:
        thread.join()


def test_limits_are_by_kind_or_a_waits_own_and_zero_is_none() -> None:
    with (
        waiting("a", on="x", kind="environment"),
        waiting("b", on="y", kind="environment", limit=3.0),
        waiting("c", on="z", limit=0.0, kind="environment"),
        waiting("d", on="w", kind="training"),
    ):
        limits = {wait.who: wait.limit for wait in snapshot_waits({"environment": 60.0, "training": 0.0})}
    assert limits == {"a": 60.0, "b": 3.0, "c": None, "d": None}


def test_a_wait_is_over_its_limit_when_it_has_lasted_longer() -> None:
    with waiting("a", on="x", limit=0.01):
        assert not snapshot_waits()[0].overdue
        time.sleep(0.02)
        assert snapshot_waits()[0].overdue and snapshot_waits()[0].seconds >= 0.02
