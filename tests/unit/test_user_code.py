"""What user code raises beside exceptions ends a rollout, never the run; what comes from outside passes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from loop.fakes import FakeGenerator
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.environments.remote import EnvironmentDescription, EnvironmentServer
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.runs.exit_codes import run_command
from strop.safety.exits import RunExited, contain_exits, exit_process, run_coroutine
from strop.sampling import Sampling
from strop.types import Ending, Group, Messages, Rollout, Task, user
from strop.user_code import UserCodeError, import_attribute

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
TASK = Task(id="t", question="guess", answer="12")
EXITS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)


@dataclass(frozen=True, kw_only=True)
class Exits(Environment[Task]):
    """Raises ``error`` in the method ``where``."""

    error: Any = "SystemExit"
    where: str = "score"

    def tasks(self, data: DataSource) -> Sequence[Task]:
        self._reach("tasks")
        return [TASK]

    def _reach(self, method: str) -> None:
        if method == self.where:
            named = {kind.__name__: kind for kind in EXITS}
            raise (named[self.error] if isinstance(self.error, str) else self.error)("that is all")

    def prompt(self, task: Task) -> Messages:
        self._reach("prompt")
        return (user(task.question),)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        await asyncio.sleep(0)
        self._reach("respond")
        return None

    @reward()
    async def score(self, task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(0)
        self._reach("score")
        return 1.0


@dataclass(frozen=True, kw_only=True)
class GroupExits(Exits):
    @reward(group=True)
    def compare(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        self._reach("compare")
        return [0.0] * len(rollouts)


def says() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, lambda request: ([5, TOKENIZER.eos_token_id], True))


async def group(environment: Environment[Any]) -> Group:
    return await run_group(
        0,
        "exits",
        LocalEnvironment(environment),
        TASK,
        samples=2,
        generator=says(),
        template=TEMPLATE,
        sampling=Sampling(temperature=1.0, max_new_tokens=4),
        rules=EpisodeRules(max_turns=2, max_length=64),
        seed=0,
    )


@pytest.mark.parametrize("kind", EXITS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", ["prompt", "respond", "score", "compare"])
def test_an_exit_in_an_environment_is_recorded_with_its_reason_on_the_rollout(kind: type[BaseException], where: str) -> None:
    rollouts = asyncio.run(group(GroupExits(error=kind, where=where))).rollouts
    assert [rollout.ending for rollout in rollouts] == [Ending.ERROR] * 2
    for rollout in rollouts:
        assert rollout.error is not None and kind.__name__ in rollout.error and "that is all" in rollout.error


@pytest.mark.parametrize("kind", EXITS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("method", ["tasks", "score"])
def test_an_exit_in_another_process_comes_back_as_an_error(kind: type[BaseException], method: Any) -> None:
    name = f"{__name__}:Exits"
    options = {"error": kind.__name__, "where": method}
    server = EnvironmentServer(EnvironmentDescription(alias="a", name=name, options=options, sources=(DataSource(),)))

    async def call() -> Any:
        if method == "tasks":
            return await server.answer("task_count", (0,))
        (described,) = (await server.answer("tasks", (0, (0,)))).unwrap()
        rollout = (await group(Exits(where="none"))).rollouts[0]
        return await server.answer("score", (described.unwrap(), rollout))

    reply = asyncio.run(call())
    assert kind.__name__ in reply.message and "that is all" in reply.message


def test_a_real_cancellation_passes() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(group(Slow()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@dataclass(frozen=True, kw_only=True)
class Slow(Exits):
    where: str = "none"

    @reward()
    async def score(self, task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(30)
        return 0.0


@pytest.mark.parametrize("presses", [1, 2])
def test_a_real_ctrl_c_passes_even_the_second_one_that_interrupts_the_reward_itself(presses: int) -> None:
    """asyncio answers the first with a cancellation, and raises KeyboardInterrupt from its handler at the second."""

    async def main() -> None:
        with contain_exits():
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_where_ctrl_c_is_ignored_a_keyboard_interrupt_is_of_the_code_itself() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Exception, match="of the code"), contain_exits():
            raise KeyboardInterrupt("of the code")
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_where_no_rollout_can_record_it_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async def unwatched() -> None:
            raise SystemExit(0)

        asyncio.create_task(unwatched())  # noqa: RUF006
        await asyncio.sleep(1)

    assert run_command(work()) == 1
    assert "SystemExit(0)" in capsys.readouterr().err
    with pytest.raises(RunExited, match="costs one rollout"):
        run_coroutine(work())


def count_forked(work: Callable[[], int]) -> int:
    """Do work in a fork, which may end by itself, and return what it returned; its exit code where it ended by itself is negative."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(writing, bytes([work()]))
        exit_process(17)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        written = file.read()
    assert written and os.waitstatus_to_exitcode(status) == 17, f"the process ended with {os.waitstatus_to_exitcode(status)}"
    return written[0]


async def in_a_thread() -> None:
    await asyncio.to_thread(os._exit, 0)


@pytest.mark.parametrize("leave", [lambda: os._exit(0), lambda: os._exit(3), in_a_thread], ids=["0", "3", "in a thread"])
def test_a_hard_exit_in_a_reward_is_an_error_of_its_rollout_alone(leave: Callable[[], Any]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Leaves(Exits):
        where: str = "none"

        @reward()
        async def score(self, task: Task, rollout: Rollout) -> float:
            if rollout.sample == 0 and (left := leave()) is not None:
                await left
            return 1.0

    def count_errors() -> int:
        first, second = run_coroutine(group(Leaves())).rollouts
        assert "os._exit(" in str(first.error) and second.error is None
        return 1

    assert count_forked(count_errors) == 1


def test_a_hard_exit_outside_of_what_is_contained_ends_the_process_as_ever() -> None:
    async def outside() -> None:
        os._exit(5)

    with pytest.raises(AssertionError, match="the process ended with 5"):
        count_forked(lambda: run_coroutine(outside()) or 1)
    before = os._exit
    run_coroutine(asyncio.sleep(0))
    assert os._exit is before


def test_a_file_that_exits_when_it_is_imported_is_named(tmp_path: Any) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserCodeError, match=r"leaves.py.* failed: SystemExit"):
        import_attribute(f"{tmp_path / 'leaves.py'}:reward")


def forked_reward(child: Callable[[], Any]) -> type[Environment[Any]]:
    @dataclass(frozen=True, kw_only=True)
    class Forks(Exits):
        where: str = "none"

        @reward()
        async def score(self, task: Task, rollout: Rollout) -> float:
            if os.fork() == 0:
                result = child()
                if result is not None:
                    await result
            return 1.0

    return Forks


@pytest.mark.parametrize(
    "child",
    [lambda: None, lambda: asyncio.sleep(0.01), lambda: os._exit(0), lambda: (_ for _ in ()).throw(SystemExit(0))],
    ids=["returns", "awaits", "exits at once", "calls sys.exit"],
)
def test_a_fork_that_a_reward_makes_never_runs_on_in_the_run(child: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    from strop.environments import forks

    process, others = os.getpid(), forks._list_children()
    forks._said[0] = 0
    rollouts = asyncio.run(group(forked_reward(child)())).rollouts
    assert os.getpid() == process
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    for _ in range(200):
        forks.reap_forks()
        if not forks._children:
            break
        signal.sigtimedwait([], 0.02)
    assert not forks._children and forks._list_children() <= others
    assert capfd.readouterr().err.count("forked this process") <= 1


def test_a_fork_that_stays_is_killed_with_the_run() -> None:
    from strop.environments import forks

    others = forks._list_children()
    asyncio.run(group(forked_reward(lambda: signal.pause())()))
    assert len(forks._children) == 2
    forks.end_forks()
    assert not forks._children and forks._list_children() <= others
