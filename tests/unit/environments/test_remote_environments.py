"""Environments in other processes: rollouts are what they are with the environment here, and a death costs what was open there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import FakeGenerator, Request
from loop.tiny import tiny_tokenizer
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.endings import Ending
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.remote import EnvironmentDescription, EnvironmentServer, RemoteEnvironment, SessionLost, connect
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.types import Group, Rollout
from support.environment_servers import EnvironmentServerProcess, EnvironmentServerThread

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
DATA = DataSource(size=70)

NOTES = '''
import os
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Task, user

notebook = ContextVar("notebook")

class OddTask(Exception):
    pass

@dataclass(frozen=True, kw_only=True)
class PageTask(Task):
    secret: int = 0

@dataclass(frozen=True, kw_only=True)
class Notes(Environment[PageTask]):
    """Everything the policy writes goes into a notebook that lives as long as the episode."""

    pages: int = 3
    fails: str = ""
    log: str = ""

    def _visit(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(what + "\\n")
        if what == self.fails:
            raise OddTask(what + " lost its notes")

    def tasks(self, data):
        def make(index):
            if index == 13:
                raise OddTask("no task 13")
            return PageTask(id=str(index), question=f"note {index}?", answer="a", secret=index)
        return GeneratedTasks(data.size, make)

    def prompt(self, task):
        notebook.get().append(f"prompt {task.secret}")
        return (user(f"{task.question}"),)

    @asynccontextmanager
    async def session(self, task):
        self._visit("open")
        token = notebook.set([])
        try:
            yield
            self._visit("fine")
        except Exception as error:
            self._visit(f"told {error}")
            raise
        finally:
            notebook.reset(token)
            self._visit("close")

    async def respond(self, task, rollout):
        self._visit("respond")
        notebook.get().append(rollout.text)
        return None if len(notebook.get()) > self.pages else (user("next"),)

    @reward(weight=0.5)
    def pages_written(self, task, rollout):
        self._visit("reward")
        assert isinstance(rollout.task, PageTask) and rollout.task is task
        return len(notebook.get())

    @reward(accuracy=True)
    async def different(self, task, rollout):
        return len(set(notebook.get())) > 2

    def answer_key(self, task, rollout):
        return rollout.text or None
'''


@pytest.fixture
def notes(tmp_path: Path) -> str:
    (tmp_path / "notes.py").write_text(NOTES)
    return f"{tmp_path / 'notes.py'}:Notes"


@pytest.fixture
def threads() -> Iterator[list[EnvironmentServerThread]]:
    """Whoever starts one puts it here."""
    started: list[EnvironmentServerThread] = []
    yield started
    for thread in started:
        thread.close()


def description(name: str, data: tuple[DataSource, ...] = (DATA,), **options: Any) -> EnvironmentDescription:
    return EnvironmentDescription(alias="mine", name=name, options=options, sources=data)


def remote(threads: list[EnvironmentServerThread], name: str, count: int = 1, **options: Any) -> RemoteEnvironment:
    threads += [EnvironmentServerThread(description(name, **options)) for _ in range(count)]
    return connect(threads[0].description, [thread.transport for thread in threads])


def letters() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, latency=lambda seed: (seed % 7) / 1000)


async def group_of(environment: Any, task: Any, *, samples: int = 4, turns: int = 8) -> Group:
    return await run_group(
        task if isinstance(task, int) else 0,
        "mine",
        environment,
        environment.tasks(DATA)[task] if isinstance(task, int) else task,
        samples=samples,
        generator=letters(),
        template=TEMPLATE,
        sampling=Sampling(max_new_tokens=6),
        rules=EpisodeRules(max_turns=turns, max_length=400),
        seed=5,
    )


def seen(group: Group) -> list[tuple[Any, ...]]:
    rewarded = [(own.reward, dict(own.rewards), own.step_rewards, own.unscored, own.error) for own in group.rollouts]
    return [
        (own.task.id, own.messages, own.tokens().tolist(), own.ending, *rewards)
        for own, rewards in zip(group.rollouts, rewarded, strict=True)
    ]


@pytest.mark.parametrize("hosts", [1, 3])
def test_rollouts_are_those_of_the_environment_in_this_process(
    notes: str, threads: list[EnvironmentServerThread], hosts: int
) -> None:
    """Many episodes at once, each with a notebook of its own, over one host or several."""
    here, there = LocalEnvironment(make_environment(notes, {"pages": 3})), remote(threads, notes, hosts, pages=3)

    async def all_of(environment: Any) -> list[Group]:
        return list(await asyncio.gather(*(group_of(environment, place) for place in range(5))))

    wanted, found = asyncio.run(all_of(here)), asyncio.run(all_of(there))
    assert [seen(group) for group in found] == [seen(group) for group in wanted]
    assert all(rollout.rewards["pages_written"] == 4 and rollout.error is None for group in found for rollout in group.rollouts)
    assert there.traits.title == "Notes"
    assert asyncio.run(there.grade(there.tasks(DATA)[0], found[0].rollouts[0])).answer == found[0].rollouts[0].text
    for thread in threads:
        assert thread.calls.count("open") == thread.calls.count("close") > 0


BY_TURN = """
    @reward(weight=0.5, per_turn=True)
    def lengths(self, task, rollout):
        return [{0: 1.0, len(turn.tokens) - 1: len(turn.text)} for turn in rollout.policy_turns]

    def answer_key("""


def test_rewards_of_turns_come_back_with_the_step_that_each_is_of(tmp_path: Path, threads: list[EnvironmentServerThread]) -> None:
    (tmp_path / "notes.py").write_text(NOTES.replace("    def answer_key(", BY_TURN.lstrip("\n")))
    name = f"{tmp_path / 'notes.py'}:Notes"
    here, there = LocalEnvironment(make_environment(name, {"pages": 2})), remote(threads, name, pages=2)
    wanted, found = asyncio.run(group_of(here, 0)), asyncio.run(group_of(there, 0))
    assert seen(found) == seen(wanted)
    assert all(len(rollout.step_rewards) > len(rollout.policy_turns) > 1 for rollout in found.rollouts)


FUNCTIONS = """
def correct(task, rollout) -> bool:
    return task.metadata["level"] == 2 and task.answer in rollout.text

def shorter(task, rollouts):
    if task.answer == "4":
        raise KeyError("no four")
    return [-rollout.sampled_tokens for rollout in rollouts]
"""


def test_functions_score_there_as_they_would_here(threads: list[EnvironmentServerThread], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    data = DataSource(rows=[{"prompt": f"{n}+0", "answer": n, "level": 2} for n in range(6)])
    options = {"rewards": {"right": f"{tmp_path}/mine.py:correct", "short": f"{tmp_path}/mine.py:shorter"}}
    here = LocalEnvironment(make_environment("reward_function", options))
    threads += [EnvironmentServerThread(description("reward_function", (data,), **options)) for _ in range(2)]
    there = connect(threads[0].description, [thread.transport for thread in threads])
    assert there.traits.has_group_rewards

    async def all_of(environment: Any) -> list[Group]:
        tasks = environment.tasks(data)
        return list(await asyncio.gather(*(group_of(environment, tasks[index]) for index in range(6))))

    wanted, found = asyncio.run(all_of(here)), asyncio.run(all_of(there))
    assert [seen(group) for group in found] == [seen(group) for group in wanted]
    assert ["no four" in str(group.errors) for group in found] == [False] * 4 + [True, False]
    rollout = found[1].rollouts[0]
    assert there.accuracy(rollout) == here.accuracy(rollout) == rollout.rewards["right"]


NO_REWARD = """
def one(task, rollout):
    return None if rollout.sample == 1 else float(len(rollout.text))

def all(task, rollouts):
    return [None if rollout.sample in (0, 3) else 1.0 for rollout in rollouts]

def none(task, rollout):
    return None
"""


def test_a_reward_of_none_there_leaves_out_its_rollout_as_it_would_here(
    tmp_path: Path, threads: list[EnvironmentServerThread]
) -> None:
    (tmp_path / "mine.py").write_text(NO_REWARD)
    data = DataSource(rows=[{"prompt": f"{n}+0", "answer": n} for n in range(3)])
    for names, unscored in ((["one"], {1}), (["all"], {0, 3}), (["one", "all"], {0, 1, 3}), (["all", "none"], {0, 1, 2, 3})):
        options = {"rewards": {name: f"{tmp_path}/mine.py:{name}" for name in names}}
        here = LocalEnvironment(make_environment("reward_function", options))
        threads.append(EnvironmentServerThread(description("reward_function", (data,), **options)))
        there = connect(threads[-1].description, [threads[-1].transport])
        wanted, found = (asyncio.run(group_of(each, each.tasks(data)[1])) for each in (here, there))
        assert seen(found) == seen(wanted) and all(rollout.error is None for rollout in found.rollouts)
        assert {rollout.sample for rollout in found.rollouts if rollout.unscored} == unscored


@pytest.mark.parametrize("fails", ["open", "respond", "reward", "fine", "close"])
def test_an_error_there_is_recorded_as_it_would_be_here(notes: str, threads: list[EnvironmentServerThread], fails: str) -> None:
    here, there = LocalEnvironment(make_environment(notes, {"fails": fails})), remote(threads, notes, fails=fails)
    wanted, found = asyncio.run(group_of(here, 2, samples=2)), asyncio.run(group_of(there, 2, samples=2))
    assert seen(found) == seen(wanted)
    assert all("lost its notes" in error for error in found.errors) and len(found.errors) == 2


def test_a_session_is_told_why_its_episode_failed_elsewhere(
    notes: str, threads: list[EnvironmentServerThread], tmp_path: Path
) -> None:
    there = remote(threads, notes, log=str(tmp_path / "log"))

    class Broken:
        version = 0

        async def generate(self, *_: Any, **__: Any) -> Any:
            raise OSError("no engine")

    async def work() -> Rollout:
        group = await run_group(
            0,
            "mine",
            there,
            there.tasks(DATA)[0],
            samples=1,
            generator=Broken(),  # type: ignore[arg-type]
            template=TEMPLATE,
            sampling=Sampling(),
            rules=EpisodeRules(),
            seed=0,
        )
        return group.rollouts[0]

    rollout = asyncio.run(work())
    assert rollout.error == "OSError: no engine"
    assert (tmp_path / "log").read_text().split("\n")[:3] == ["open", "told OSError: no engine", "close"]


def test_tasks_come_in_blocks_and_one_that_cannot_be_made_fails_alone(notes: str, threads: list[EnvironmentServerThread]) -> None:
    tasks = remote(threads, notes).tasks(DATA)
    assert len(tasks) == 70 and [task.question for task in tasks[10:13]] == ["note 10?", "note 11?", "note 12?"]
    assert tasks[-1].id == "69" and threads[0].calls.count("tasks") == 2
    with pytest.raises(Exception, match="no task 13") as raised:
        tasks[13]
    assert type(raised.value).__name__ == "OddTask" and "in the environment's process" in raised.value.__notes__[0]
    with pytest.raises(IndexError):
        tasks[70]


def test_what_an_environment_does_not_do_is_not_asked(threads: list[EnvironmentServerThread]) -> None:
    """A single turn without session or votes: a prompt and a score."""
    there = remote(threads, "arithmetic", max_operand=3)
    before = len(threads[0].calls)
    group = asyncio.run(group_of(there, 0, samples=2, turns=1))
    calls = [call for call in threads[0].calls[before:] if call not in ("task_count", "tasks")]
    assert group.errors == () and sorted(calls) == ["prompt", "prompt", "score", "score"]


@pytest.mark.parametrize("method", ["prompt", "score", "task_count", "tasks"])
def test_a_call_outside_of_a_session_is_made_again_where_the_host_died(
    threads: list[EnvironmentServerThread], method: Any
) -> None:
    there = remote(threads, "arithmetic", max_operand=3)
    threads[0].deaths.append(method)
    wanted = asyncio.run(group_of(LocalEnvironment(make_environment("arithmetic", {"max_operand": 3})), 4))
    assert seen(asyncio.run(group_of(there, 4))) == seen(wanted) and threads[0].num_servers == 2


def test_a_host_that_dies_again_at_once_is_an_error_of_the_rollout(threads: list[EnvironmentServerThread]) -> None:
    there = remote(threads, "arithmetic", max_operand=3)
    threads[0].deaths += ["score", "score"]
    group = asyncio.run(group_of(there, 4, samples=1))
    assert group.errors == ("EnvironmentServerDied: the server died in score",)
    assert group.rollouts[0].ending == Ending.ENVIRONMENT


@pytest.mark.parametrize("method", ["prompt", "respond", "score"])
def test_a_session_that_was_open_is_lost_with_its_host_and_the_rollout_says_so(
    notes: str, threads: list[EnvironmentServerThread], method: Any
) -> None:
    """The episodes beside it were in the same process: each says so, whether its own call failed or its session is unknown now."""
    there = remote(threads, notes)
    task = there.tasks(DATA)[3]
    threads[0].deaths.append(method)
    group = asyncio.run(group_of(there, task, samples=3))
    assert any("died during an episode's session" in error for error in group.errors)
    assert group.errors and all(error.startswith("SessionLost: ") for error in group.errors)
    assert {rollout.ending for rollout in group.rollouts if rollout.error} == {Ending.ENVIRONMENT}
    assert asyncio.run(group_of(there, task)).errors == ()


def test_a_host_that_dies_as_a_session_is_closed_costs_nothing(notes: str, threads: list[EnvironmentServerThread]) -> None:
    there = remote(threads, notes)
    task = there.tasks(DATA)[3]
    threads[0].deaths.append("close")
    group = asyncio.run(group_of(there, task, samples=1))
    assert group.errors == () and group.rollouts[0].rewards["pages_written"] == 4


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"pagse": 3}, EnvironmentConfigError, r"env\.mine: .*no option 'pagse'"),
        ({"pages": "many"}, EnvironmentConfigError, "the option pages"),
    ],
)
def test_what_is_wrong_with_a_description_is_said_here(
    notes: str, threads: list[EnvironmentServerThread], changes: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        remote(threads, notes, **changes)


@pytest.mark.extensions
def test_what_is_wrong_with_the_data_is_said_here(threads: list[EnvironmentServerThread]) -> None:
    threads.append(EnvironmentServerThread(description("math", (DataSource(dataset_name="nowhere.jsonl"),))))
    there = connect(threads[0].description, [threads[0].transport])
    with pytest.raises(DataError, match="nowhere"):
        there.tasks(DataSource(dataset_name="nowhere.jsonl"))
    with pytest.raises(EnvironmentConfigError, match="was created without the data source"):
        there.tasks(DataSource(size=1))


def test_a_closed_or_foreign_session_is_unknown(notes: str) -> None:
    async def work() -> None:
        host = EnvironmentServer(description(notes))
        (reply,) = await host.tasks(0, [1])
        session = await host.open(0, 1)
        await host.prompt(reply.value, session)
        await host.close(session)
        await host.close(session)  # nothing to close is no fault
        with pytest.raises(SessionLost, match="has no session"):
            await host.prompt(reply.value, session)
        await host.open(0, 2)
        await host.close_all()

    asyncio.run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_another_process_that_is_killed_in_the_middle_is_replaced(notes: str) -> None:
    """The episode that was in it is lost, with an error on its rollouts, and the next one is not."""
    process = EnvironmentServerProcess(description(notes))
    try:
        there = connect(process.description, [process.transport])
        wanted = asyncio.run(group_of(LocalEnvironment(make_environment(notes)), 3))
        assert seen(asyncio.run(group_of(there, 3))) == seen(wanted)
        asked: list[Request] = []
        generator = letters()

        def kills(request: Request) -> tuple[list[int], bool]:
            asked.append(request)
            if len(asked) == 2:
                os.kill(process.process.pid, signal.SIGKILL)
                process.process.join(10)
            return generator._letters(request)

        async def work() -> Group:
            return await run_group(
                0,
                "mine",
                there,
                there.tasks(DATA)[3],
                samples=1,
                generator=FakeGenerator(TOKENIZER, kills),
                template=TEMPLATE,
                sampling=Sampling(max_new_tokens=6),
                rules=EpisodeRules(max_turns=8, max_length=400),
                seed=5,
            )

        (error,) = asyncio.run(work()).errors
        assert error.startswith("SessionLost: ")
        assert seen(asyncio.run(group_of(there, 3))) == seen(wanted) and process.starts == 2
    finally:
        process.close()


DRIVEN = '''
import torch
from contextvars import ContextVar
from dataclasses import dataclass, replace
from strop.endings import Ending
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.rollouts.policy_turns import make_policy_turn
from strop.types import Task

result = ContextVar("result")

@dataclass(frozen=True, kw_only=True)
class Driven(Environment[Task]):
    """An environment that brings the way in which its episodes run."""

    episode_runner = "driven:drive"
    fails: bool = False

    def tasks(self, data):
        return GeneratedTasks(data.size, lambda index: Task(id=str(index), question=f"{index}?"))

    async def run_agent(self, task, ask):
        if self.fails:
            raise KeyError("the agent lost its way")
        result.set(len(task.question) + len(ask))
        return "ran " + task.id

    @reward()
    def length(self, task, rollout):
        return result.get()

async def drive(environment, rollout, generator, template, sampling, rules):
    """The policy writes once; the environment, wherever it is, gets what it wrote."""
    prompt = template.tokenizer("go", add_special_tokens=False)["input_ids"]
    completion = await generator.generate(prompt, sampling=sampling, seed=rollout.seed)
    rollout = replace(rollout, prompt=torch.tensor(prompt))
    rollout = rollout.with_turn(make_policy_turn(completion, prompt, template, generator, sampling))
    try:
        output = await environment.run_agent(rollout.task, completion.text)
    except Exception as error:
        error.ending = Ending.CRASH
        return rollout, error
    return replace(rollout, output=output, ending=Ending.STOP), None
'''


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_brings_the_function_that_runs_its_episodes(
    tmp_path: Path, threads: list[EnvironmentServerThread], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It runs in this process, with the generator, and the environment may be in another."""
    (tmp_path / "driven.py").write_text(DRIVEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "driven", raising=False)
    here = asyncio.run(group_of(LocalEnvironment(make_environment("driven:Driven", {"fails": fails})), 3))
    there = asyncio.run(group_of(remote(threads, "driven:Driven", fails=fails), 3))
    assert [each[:-1] for each in seen(there)] == [each[:-1] for each in seen(here)] and not here.errors
    for rollout in (*here.rollouts, *there.rollouts):
        assert (rollout.error or "").startswith("KeyError: 'the agent lost its way'" if fails else "")
        assert len(rollout.policy_turns) == 1 and rollout.output == ("" if fails else "ran 3")
        assert rollout.ending == (Ending.CRASH if fails else Ending.STOP)
        assert rollout.reward == (0.0 if fails else 2 + len(rollout.text))
