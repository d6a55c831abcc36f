"""Checks of episodes: do they end, are they repeatable, and what do they leave behind in the process?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from strop.build.env_check.check_report import EnvironmentReport
from strop.build.env_check.process_state import (
    OpenResources,
    describe_changes,
    own_temporary_folder,
    read_global_state,
    restore_global_state,
    traced_memory,
)
from strop.build.env_check.reward_checks import ScoredTexts, ScoringLimits
from strop.build.env_check.scripted_episode import PlayedEpisode, play
from strop.build.env_check.task_checks import CheckedTask
from strop.environments.base import Environment
from strop.user_code import describe_error

BLOCKS, EPISODES_PER_BLOCK, SECONDS_PER_BLOCK = 4, 40, 3.0  # of the search for leaks
LEAKED_BYTES = 400  # of Python objects, by each episode
LEAKED_MEMORY = 64 * 1024  # of the whole process, by each episode
SET_BY_IMPORTS = ("the state of random", "the state of numpy.random", "the state of torch's generator", "the recursion limit")
OPENED = {
    "processes": "processes",
    "threads": "threads",
    "files": "open files",
    "sockets": "open sockets",
    "temporary_files": "temporary files",
}


class SessionProbe(Exception):
    """Raised inside of a session to see whether it is let through."""


async def check_global_state(
    environment: Environment[Any], each: CheckedTask, limits: ScoringLimits, report: EnvironmentReport
) -> None:
    """Compare the state of the process before and after an episode, and set it back."""
    changed: list[str] = []
    for number, text in enumerate(("0", "0", each.task.answer)):
        before = read_global_state()
        await play(environment, each.task, text, max_turns=limits.max_turns)
        found = describe_changes(before, read_global_state())
        changed += (
            found if number else [name for name in found if name not in SET_BY_IMPORTS and not name.startswith("environment")]
        )
        restore_global_state(before)
    if changed:
        report.fault(
            "global_state", f"an episode changed {', '.join(dict.fromkeys(changed))}, which every other part of the run shares"
        )


def check_turns(environment: Environment[Any], texts: ScoredTexts, limits: ScoringLimits, report: EnvironmentReport) -> None:
    """Check whether any episode of several turns ended by itself."""
    if not environment.responds:
        report.not_checked["episode_ends"] = report.not_checked["respond_same"] = "episodes have one turn"
        return
    if limits.max_turns == 1:
        report.not_checked["episode_ends"] = "max_rollout_turns is 1: every episode ends after one turn"
        return
    if texts.form is None:
        report.not_checked["episode_ends"] = "no turns are known that would end an episode (task.answer, reference_turns)"
        return
    played = [episode for episodes in texts.played.values() for episode in episodes.values() if episode.error is None]
    if played and not any(episode.ended for episode in played):
        report.fault(
            "episode_ends",
            f"respond never returned None in {len(played)} episodes of {limits.max_turns} turns, not even for the reference answer",
        )


async def check_respond(
    environment: Environment[Any],
    tasks: Sequence[CheckedTask],
    texts: ScoredTexts,
    limits: ScoringLimits,
    report: EnvironmentReport,
) -> None:
    """Check that an environment answers the same rollout in the same way, one episode after the other and beside each other."""
    if not environment.responds:
        return
    first: list[tuple[CheckedTask, PlayedEpisode]] = []
    for each in tasks[:8]:
        first += [
            (each, episodes[each.index])
            for policy, episodes in texts.played.items()
            if each.index in episodes and policy in ("0", f"reference, {texts.form}")
        ]
    again = await asyncio.gather(
        *(
            play(environment, each.task, played.script, max_turns=limits.max_turns, sample=played.rollout.sample)
            for each, played in first
        )
    )
    different = [(one, two) for (_, one), two in zip(first, again, strict=True) if one.responses != two.responses]
    if different:
        one, _ = different[0]
        report.fault(
            "respond_same",
            f"{len(different)} of {len(first)} episodes were answered differently when played again, beside others (task "
            f"{one.rollout.task.id!r}); what respond knows must come from the task, the rollout and the session",
        )


async def check_session(environment: Environment[Any], each: CheckedTask, report: EnvironmentReport) -> None:
    """Raise inside of sessions: the error must come out, and everything that was opened must be closed."""
    if type(environment).session is Environment.session:
        report.not_checked["session"] = "it has none"
        return
    try:
        await _fail_in_session(environment, each)
        with own_temporary_folder():
            before = OpenResources.count()
            swallowed = [await _fail_in_session(environment, each) for _ in range(5)]
            grown = OpenResources.count().growth(before)
    except Exception as error:
        report.fault("session", f"a session in which an error is raised fails: {describe_error(error)}")
        return
    if any(swallowed):
        report.fault("session", "it swallows errors that are raised inside of it, so a broken episode would look like a good one")
    if left := [f"{grown[name]} {what}" for name, what in OPENED.items() if grown[name] >= 5]:
        report.fault("session", f"5 sessions in which an error was raised left {', '.join(left)}; close them in a finally")


async def _fail_in_session(environment: Environment[Any], each: CheckedTask) -> bool:
    """Return whether the session swallows an error."""
    try:
        async with environment.session(each.task):
            await environment.first_messages(each.task)
            raise SessionProbe
    except SessionProbe:
        return False
    return True


async def check_leaks(
    environment: Environment[Any], tasks: Sequence[CheckedTask], limits: ScoringLimits, report: EnvironmentReport
) -> None:
    """Repeat the same episodes in blocks. A leak grows in every block; a cache that fills and a pool that starts do not."""
    loop = asyncio.get_running_loop()

    async def repeat(count: int) -> int:
        until = loop.time() + SECONDS_PER_BLOCK
        for number in range(count):
            each = tasks[number % min(len(tasks), 4)]
            await play(environment, each.task, each.task.answer or "0", max_turns=limits.max_turns)
            if loop.time() > until:
                return number + 1
        return count

    with own_temporary_folder(), traced_memory():
        count = await repeat(EPISODES_PER_BLOCK)
        counts = [OpenResources.count()]
        for _ in range(BLOCKS - 1):
            await repeat(count)
            await asyncio.sleep(0)
            counts.append(OpenResources.count())
    growths = [after.growth(before) for before, after in pairwise(counts)]
    least = {name: min(growth[name] for growth in growths) for name in growths[0]}
    found = [f"{least[name] / count:.2g} {what}" for name, what in OPENED.items() if least[name] >= max(count // 4, 1)]
    if least["python_memory"] > LEAKED_BYTES * count:
        found.append(f"{least['python_memory'] / count / 1024:.1f} KiB of Python objects")
    elif least["memory"] > LEAKED_MEMORY * count:
        found.append(f"{least['memory'] / count / 1024:.0f} KiB of memory")
    if found:
        report.fault(
            "leaks",
            f"every episode leaves behind {', '.join(found)} (at least, over {BLOCKS - 1} x {count} repetitions of the same)",
        )
