"""The watchdog: what is over its limit is named in time, and status.json says how the run stands."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.monitoring.logger_config import WatchdogConfig
from strop.monitoring.waits import Wait, read_status, waiting
from strop.monitoring.watchdog import Backoff, Watchdog, WatchdogTimeout, find_stalls, format_report, select_longest_waits

LOOP = 1


def wait(number: int, who: str, on: str, **changes: Any) -> Wait:
    fields = {"detail": "", "kind": "", "limit": None, "seconds": 1.0, "parent": None, "thread": LOOP, "running": False}
    return Wait(**{**fields, "number": number, "who": who, "on": on, **changes})


def stuck_environment(number: int, parent: int | None = None, seconds: float = 90.0, **changes: Any) -> Wait:
    options = {"kind": "environment", "limit": 60.0, "seconds": seconds, "parent": parent, **changes}
    return wait(number, f"sample {number}", "environment Sandbox, turn 2", **options)


# --- what is too long -------------------------------------------------------------------------------------------------------


def test_of_nested_waits_over_their_limits_the_innermost_is_to_blame() -> None:
    waits = [wait(0, "training loop", "weight_sync", kind="weight_sync", limit=5.0, seconds=9.0),
             wait(1, "weight sync", "engine 1", kind="weight_sync", limit=5.0, seconds=8.0, parent=0)]  # fmt: skip
    (found,) = find_stalls(waits, WatchdogConfig(), loop_thread=LOOP)
    assert [found.kind, found.limit, [wait.number for wait in found.waits]] == ["weight_sync", 5.0, [1]]
    assert format_report(found, waits, 12) == (
        "step 12 has waited longer than the limit of 5 s (watchdog.weight_sync_seconds): "
        "training loop -> weight_sync -> weight sync -> engine 1, for 8.0 s"
    )


def test_a_wait_over_its_limit_is_told_down_to_what_it_waits_for_itself() -> None:
    waits = [wait(0, "training loop", "policy_training", kind="training", limit=5.0, seconds=9.0),
             wait(1, "learner", "rank 3", parent=0), wait(2, "rank 3", "all-reduce", parent=1)]  # fmt: skip
    (found,) = find_stalls(waits, WatchdogConfig(), loop_thread=LOOP)
    assert "learner -> rank 3 -> all-reduce, for 9.0 s" in format_report(found, waits, 1)


def test_while_the_event_loop_stands_still_only_who_holds_it_is_to_blame() -> None:
    waits = [stuck_environment(0), stuck_environment(1, running=True), stuck_environment(2, thread=2)]
    found = find_stalls(waits, WatchdogConfig(), loop_thread=LOOP, loop_blocked=88.0)
    assert [[wait.number for wait in trouble.waits] for trouble in found] == [[2], [1]]
    assert "blocked the event loop for 88.0 s" in format_report(found[1], waits, 1)


def test_a_loop_that_is_held_by_something_without_a_limit_has_the_event_loops() -> None:
    packing = wait(1, "training loop", "packing", seconds=500.0, running=True)
    assert find_stalls([packing], WatchdogConfig(event_loop_seconds=600.0), loop_thread=LOOP, loop_blocked=500.0) == []
    (found,) = find_stalls([packing], WatchdogConfig(event_loop_seconds=300.0), loop_thread=LOOP, loop_blocked=500.0)
    assert "(watchdog.event_loop_seconds): training loop -> packing" in format_report(found, [packing], 1)
    (nobody,) = find_stalls([], WatchdogConfig(), loop_thread=LOOP, loop_blocked=500.0)
    assert "the event loop" in format_report(nobody, [], 1)
    assert find_stalls([packing], WatchdogConfig(event_loop_seconds=0.0), loop_thread=LOOP, loop_blocked=500.0) == []


def test_reports_come_at_growing_intervals() -> None:
    backoff = Backoff()
    assert [now for now in range(0, 2000, 10) if backoff.due(now, 60.0)] == [0, 60, 180, 420, 900, 1860]


def test_status_keeps_the_longest_waits_with_what_they_are_part_of() -> None:
    waits = [wait(0, "loop", "generation"), *(stuck_environment(number, 0, float(number)) for number in range(1, 300))]
    kept = select_longest_waits(waits, 10)
    assert [wait.number for wait in kept] == [0, *range(290, 300)]


# --- the thread -------------------------------------------------------------------------------------------------------------


def watched(folder: Path, work: Callable[[Watchdog], Any], checkpoints: str | None = None, **limits: float) -> list[str]:
    """``work`` under a watchdog that looks 50 times a second; the notes."""
    notes: list[str] = []

    async def run() -> None:
        with Watchdog(
            folder, note=notes.append, config=WatchdogConfig(interval_seconds=0.02, **limits), checkpoints=checkpoints
        ) as watchdog:
            await work(watchdog)
            await asyncio.sleep(0.03)

    asyncio.run(run())
    return notes


def test_a_stuck_wait_is_named_within_its_limit_with_the_stacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def sandbox() -> None:
        with waiting("sample 3", on="environment Sandbox, turn 2", kind="environment", detail="task xyz"):
            await asyncio.sleep(0.4)

    async def work(watchdog: Watchdog) -> None:
        watchdog.status_tracker.log(11, {})
        with waiting("training loop", on="generation"):
            await sandbox()

    notes = watched(tmp_path, work, environment_seconds=0.1)
    assert "step 12 has waited longer than the limit of 0.1 s (watchdog.environment_seconds)" in notes[0]
    assert "training loop -> generation -> sample 3 -> environment Sandbox, turn 2 (task xyz), for 0." in notes[0]
    assert 1 <= len(notes) <= 3, "at 0.1 and 0.2 s, and once more on a slow machine"
    (stacks,) = tmp_path.glob("stacks_*.txt")
    assert str(stacks) in notes[0] and "in sandbox" in stacks.read_text() and "strop-watchdog" not in notes[0]
    assert "environment Sandbox" in caplog.text


def test_nothing_is_said_of_waits_within_their_limits(tmp_path: Path) -> None:
    async def work(_: Watchdog) -> None:
        with waiting("sample 3", on="environment", kind="environment"):
            await asyncio.sleep(0.1)

    assert watched(tmp_path, work) == [] and not list(tmp_path.glob("stacks_*"))


def test_a_blocked_event_loop_is_found_out_and_its_holder_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def holder() -> None:
        with waiting("sample 1", on="environment Blocking", kind="environment"):
            time.sleep(0.5)

    async def innocent() -> None:
        with waiting("sample 2", on="environment Fine", kind="environment"):
            await asyncio.sleep(0.01)

    async def work(_: Watchdog) -> None:
        await asyncio.gather(innocent(), holder())

    with caplog.at_level(logging.WARNING):
        watched(tmp_path, work, environment_seconds=0.2)
    assert "environment Blocking" in caplog.text and "blocked the event loop" in caplog.text
    assert "environment Fine" not in caplog.text
    (stacks,) = tmp_path.glob("stacks_*.txt")
    assert "in holder" in stacks.read_text()


def test_the_status_follows_the_run_and_ends_with_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def work(watchdog: Watchdog) -> None:
        watchdog.status_tracker.log(4, {"train/reward": 1.0})
        watchdog.status_tracker.note("checkpoint: results/step_4")
        watchdog.status_tracker.progress("generating: 1 of 4 groups")
        with waiting("training loop", on="generation"), waiting("generation", on="group 7", limit=0.01):
            await asyncio.sleep(0.1)
            seen.append(read_status(tmp_path))

    watched(tmp_path, work, checkpoints="results")
    (running,) = seen
    assert (running.state, running.step, running.doing) == ("running", 4, "generating: 1 of 4 groups")
    assert [wait.on for wait in running.waits] == ["generation", "group 7"] and running.waits[1].overdue
    assert "group 7" in running.troubles[0] and running.notes[-1].text == "checkpoint: results/step_4"
    assert abs(running.written - time.time()) < 5 and running.versions["strop"] and Path(running.checkpoints).is_absolute()
    finished = read_status(tmp_path)
    assert finished is not None and (finished.state, finished.waits, finished.troubles) == ("finished", (), ())
    assert len(finished.reports) >= 1 and finished.stacks is not None


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("bad"), "failed"), (KeyboardInterrupt(), "interrupted"), (asyncio.CancelledError(), "interrupted")],
)
def test_how_a_run_ended_stands_in_its_status(tmp_path: Path, error: BaseException, state: str) -> None:
    async def run() -> None:
        with Watchdog(tmp_path, note=print):
            raise error

    with pytest.raises(type(error)):
        asyncio.run(run())
    status = read_status(tmp_path)
    assert status is not None and status.state == state
    assert status.error == ("ValueError: bad" if state == "failed" else None)


def test_a_run_that_waits_too_long_is_ended(tmp_path: Path) -> None:
    async def work(_: Watchdog) -> None:
        with waiting("sample 3", on="environment Sandbox", kind="environment"):
            await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(WatchdogTimeout, match=r"watchdog\.stop_after_seconds = 0\.3: .*environment Sandbox"):
        watched(tmp_path, work, environment_seconds=0.1, stop_after_seconds=0.3)
    assert time.monotonic() - started < 10
    status = read_status(tmp_path)
    assert status is not None and status.state == "failed" and "environment Sandbox" in str(status.error)


def test_a_watchdog_that_cannot_write_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"

    async def work(_: Watchdog) -> None:
        (folder / "status.json").unlink()
        folder.rename(tmp_path / "gone")
        await asyncio.sleep(0.15)

    watched(folder, work)
    assert caplog.text.count("the watchdog failed") == 1


def test_a_status_of_another_version_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "running", "waits": [], "notes": [], "reports": [], "troubles": []})
    )
    with pytest.raises(ValueError, match=r"status\.json is not a status of this version"):
        read_status(tmp_path)
    assert read_status(tmp_path / "nowhere") is None
