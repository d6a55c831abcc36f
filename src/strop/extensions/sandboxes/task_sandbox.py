"""Environments whose tasks bring an image: tools and agents work in a sandbox of it, and hidden tests judge in a second one.

Columns of a row: ``image``; ``environment``, variables; ``folder``, where the work is done; ``files``, absolute paths with their texts, and
``setup_command``, which both sandboxes get before anything else; ``remove``, paths of the image that the episode must not see;
``test_command``, whose exit code 0 is the reward 1, ``test_timeout_s``, and ``test_files``, which only the second sandbox gets.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from posixpath import basename, dirname
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from strop.endings import Ending, RolloutFailed
from strop.environments.base import Environment, EnvironmentConfigError, PromptedTask
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardFunction, RewardMark
from strop.extensions.agents.agent_environment import AgentEnvironment, AgentFailed, AgentResult, AgentTimeout, read_result
from strop.extensions.agents.endpoint import Endpoint
from strop.extensions.agents.external_agent import SCORE, format_task, last_json, score
from strop.extensions.sandboxes.base import CommandResult, ExitReason, FailureCause, Sandbox, SandboxCommand, SandboxFailure
from strop.extensions.sandboxes.providers import get_pool, make_spec
from strop.extensions.sandboxes.trees import check_tree, make_archive, write_files
from strop.safety.printable import shorten
from strop.tools.base import Tool, ToolError
from strop.types import Rollout, Task

log = logging.getLogger(__name__)

TESTS = "tests"  # the reward of a row's own tests
# Columns that an agent inside the sandbox is not told, nor the answer: they would give its task away.
HIDDEN = {
    "test_command", "test_files", "remove", "solution", "expected", "patch", "test_patch", "fail_to_pass", "pass_to_pass",
    "expected_output_json",
}  # fmt: skip


@dataclass
class TaskSandbox:
    """The sandbox of an episode, made when something first needs it."""

    task: Task
    image: str
    stack: AsyncExitStack
    sandbox: Sandbox | None = field(default=None, init=False)
    folder: str = field(default="/", init=False)  # where the image's commands run
    kept: list[str] = field(default_factory=list, init=False)  # snapshots: the newest, and the one before until that one is noted

    async def open(self, forward: tuple[int, ...] = ()) -> Sandbox:
        """Return the sandbox. ``forward``: ports of this machine that it reaches, if it is made now. Raises SandboxFailure."""
        if self.sandbox is None:
            self.sandbox = await self.stack.enter_async_context(lend_sandbox(self.task, self.image, forward))
            self.folder = await prepare(self.sandbox, self.task)
            if hidden := self.task.metadata.get("remove"):
                with failing_as_task(self.task):
                    await self.sandbox.exec(SandboxCommand(argv=("rm", "-rf", *hidden)))
        return self.sandbox

    async def keep(self) -> bytes:
        """Keep the files in a snapshot. Raises SandboxFailure."""
        image = "" if self.sandbox is None else await self.sandbox.snapshot()
        self.kept += [image] if image else []
        await self.forget(all_but=2)
        return json.dumps({"image": image, "folder": self.folder}).encode()

    async def go_on(self, state: bytes) -> None:
        """Make the sandbox from a snapshot. Raises SandboxFailure."""
        values = json.loads(state)
        if values["image"]:
            self.sandbox = await self.stack.enter_async_context(lend_sandbox(self.task, values["image"]))
            self.folder, self.kept = values["folder"], [values["image"]]

    async def forget(self, all_but: int = 0) -> None:
        """Remove snapshots, the oldest first."""
        while len(self.kept) > all_but:
            with suppress(SandboxFailure):
                await get_pool().provider.remove_snapshot(self.kept.pop(0))


@dataclass(frozen=True)
class SandboxState:
    """Keeps the sandboxes of episodes after every few turns; an ``EpisodeState``. Processes that run in them are not kept."""

    turns: int

    async def save(self, task: Task, rollout: Rollout) -> bytes | None:
        provider = get_pool().provider
        if not provider.capabilities.snapshot:
            _warn_of(provider.name)
        elif len(rollout.policy_turns) % self.turns == 0:
            return await current_sandbox().keep()
        return None

    async def restore(self, task: Task, rollout: Rollout, state: bytes) -> None:
        await current_sandbox().go_on(state)


@cache
def _warn_of(provider: str) -> None:
    log.warning("the provider %s makes no snapshots: the episodes of a run that is killed begin again", provider)


def lend_sandbox(
    task: Task, image: str, forward: tuple[int, ...] = (), *, judging: bool = False
) -> AbstractAsyncContextManager[Sandbox]:
    spec = replace(make_spec(image, forward), environment=task.metadata.get("environment") or {})
    return get_pool().lend(spec, judging=judging)


@contextmanager
def failing_as_task(task: Task) -> Iterator[None]:
    """Report what does not exist in a sandbox that the policy has not used as a fault of the task."""
    try:
        yield
    except SandboxFailure as failure:
        if failure.cause != FailureCause.REQUEST:
            raise
        raise RolloutFailed(f"task {task.id!r} is broken: {failure}", Ending.BROKEN_TASK) from failure


@contextmanager
def failing_as_call() -> Iterator[None]:
    """Report what does not exist in a sandbox to the policy, as a tool call that failed."""
    try:
        yield
    except SandboxFailure as failure:
        if failure.cause != FailureCause.REQUEST:
            raise
        raise ToolError(str(failure)) from failure


async def write_column(sandbox: Sandbox, task: Task, column: str) -> None:
    """Write the files of a column, a mapping of paths to texts or its JSON. Raises SandboxFailure."""
    files = task.metadata.get(column) or {}
    files = json.loads(files) if isinstance(files, str) else files
    await write_files(sandbox, {str(path): str(text).encode("utf-8", "surrogateescape") for path, text in files.items()})


async def prepare(sandbox: Sandbox, task: Task) -> str:
    """Write the files of a task and run its setup_command. Return the folder in which its commands run. Raises RolloutFailed."""
    script = f'here=$(pwd)\n(\n{task.metadata.get("setup_command") or ":"}\n) >&2 || exit\nprintf "%s" "$here"'
    folder = str(task.metadata.get("folder") or "")
    with failing_as_task(task):
        if folder:
            await sandbox.put_tree(folder, make_archive({}))
        await write_column(sandbox, task, "files")
        result = await sandbox.exec(SandboxCommand(argv=("sh", "-c", script), cwd=folder, wall_s=1800.0, output_kb=1 << 16))
    if not result.succeeded:
        raise RolloutFailed(f"the setup_command of task {task.id!r} failed: {result.text[-500:]}", Ending.BROKEN_TASK)
    return result.stdout.decode("utf-8", "replace")


_current: ContextVar[TaskSandbox | None] = ContextVar("strop_task_sandbox", default=None)


def current_sandbox() -> TaskSandbox:
    """Return the sandbox of this episode, for tools and rewards. Raises EnvironmentConfigError."""
    found = _current.get()
    if found is None:
        raise EnvironmentConfigError(
            "this episode has no sandbox: the tool shell and rewards that use one need env.ALIAS.type=sandbox"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class InSandbox(Environment[PromptedTask]):
    """Gives each episode a sandbox. Put it before other environment classes: ``class Mine(InSandbox, DatasetEnvironment)``."""

    needed_resources: ClassVar[tuple[str, ...]] = ("sandboxes",)
    image: str | None = None  # of tasks whose rows name none in the column ``image``
    snapshot_turns: int | None = None  # after how many turns the files are kept, so that a killed run goes on there; None: never

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.snapshot_turns is None:
            return
        if self.snapshot_turns < 1:
            raise EnvironmentConfigError(
                f"snapshot_turns={self.snapshot_turns} is no number of turns; set 1 or more, or leave it out"
            )
        if self.episode_runner:
            why = f"{type(self).__name__} drives its episodes with an agent, whose process no snapshot keeps"
            raise EnvironmentConfigError(f"{why}: they begin again after a kill; leave snapshot_turns out")

    @property
    def episode_state(self) -> SandboxState | None:
        return None if self.snapshot_turns is None else SandboxState(self.snapshot_turns)

    def session(self, task: PromptedTask) -> AbstractAsyncContextManager[TaskSandbox]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[TaskSandbox]:
            image = task.metadata.get("image") or self.image
            if not isinstance(image, str):
                why = f"task {task.id!r} has no image: give its row the column image, or set env.ALIAS.image"
                raise RolloutFailed(why, Ending.BROKEN_TASK)
            async with AsyncExitStack() as stack:
                sandbox = TaskSandbox(task, image, stack)
                token = _current.set(sandbox)
                try:
                    yield sandbox
                except asyncio.CancelledError:  # the run ends, and may go on
                    raise
                except BaseException:
                    await sandbox.forget()
                    raise
                else:
                    await sandbox.forget()
                finally:
                    _current.reset(token)

        return opened()


@dataclass(frozen=True, kw_only=True)
class GradedInSandbox(InSandbox, FunctionEnvironment):
    """Adds the reward ``tests`` where no other is set: the row's test_command passes on the episode's files."""

    test_timeout_s: float = 600.0
    test_folder: str = ""  # what the tests get of the episode; "": the folder in which the image's commands run
    max_test_mb: int = 256  # of that folder

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        if self.reward is None and self.rewards is None:
            return {TESTS: RewardFunction(self.tests_pass, RewardMark(accuracy=True), "the row's test_command")}
        return super().reward_functions

    @property
    def declares_accuracy(self) -> bool:
        return (self.reward is None and self.rewards is None) or super().declares_accuracy

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        if options.get("reward") is None and options.get("rewards") is None:
            return {TESTS: RewardMark(accuracy=True)}
        return super().list_marks(options)

    async def tests_pass(self, task: PromptedTask, rollout: Rollout) -> float:
        """Judge the episode's files in a second sandbox, with files that the first one never had. Raises SandboxFailure."""
        self.check_gradable(task)
        episode = current_sandbox()
        used = await episode.open()
        folder = (self.test_folder or episode.folder).rstrip("/")
        async with lend_sandbox(task, episode.image, judging=True) as fresh:
            await prepare(fresh, task)
            try:
                archive = await self.collect_work(task, rollout, used, folder)
            except SandboxFailure as failure:
                if failure.cause != FailureCause.REQUEST:
                    raise
                return 0.0  # the policy removed it, or made it larger than allowed
            await self.place_work(fresh, folder, archive)
            await write_column(fresh, task, "test_files")
            with failing_as_task(task):
                return await self.judge(task, rollout, fresh, folder)

    def check_gradable(self, task: PromptedTask) -> None:
        """Raise RolloutFailed for a task that cannot be judged."""
        if not isinstance(task.metadata.get("test_command"), str):
            raise RolloutFailed(f"task {task.id!r} has no test_command, and no reward is set", Ending.BROKEN_TASK)

    async def collect_work(self, task: PromptedTask, rollout: Rollout, used: Sandbox, folder: str) -> bytes:
        """Return what the tests get of the episode: a tar archive of the folder. Raises SandboxFailure, ``request`` for the policy's."""
        return check_tree(await used.get_tree(folder, self.max_test_mb), basename(folder)) if folder else b""

    async def place_work(self, fresh: Sandbox, folder: str, archive: bytes) -> None:
        """Put the episode's work in the second sandbox, in place of what is there."""
        if folder:
            await fresh.exec(SandboxCommand(argv=("rm", "-rf", folder), cwd="/"))
            await fresh.put_tree(dirname(folder) or "/", archive)

    async def judge(self, task: PromptedTask, rollout: Rollout, fresh: Sandbox, folder: str) -> float:
        """Run the tests in the second sandbox. Return the reward."""
        return float((await self.run_tests(task, rollout, fresh, folder)).succeeded)

    async def run_tests(self, task: PromptedTask, rollout: Rollout, fresh: Sandbox, folder: str) -> CommandResult:
        limit = float(task.metadata.get("test_timeout_s") or self.test_timeout_s)
        command = ("sh", "-c", str(task.metadata["test_command"]))
        result = await fresh.exec(SandboxCommand(argv=command, cwd=folder, wall_s=limit, output_kb=1 << 16))
        rollout.metrics["test_seconds"] = result.wall_s
        return result


@dataclass(frozen=True, kw_only=True)
class SandboxEnvironment(GradedInSandbox):
    """``type: sandbox``: the policy works in its task's sandbox by the tool ``shell``, or others in ``tools``."""

    tools: Any = ("shell",)


@dataclass(frozen=True, kw_only=True)
class SandboxAgent(GradedInSandbox, AgentEnvironment[PromptedTask]):
    """``type: sandbox_agent``: an agent that runs inside its task's sandbox, and reaches the policy at a forwarded port."""

    needed_resources: ClassVar[tuple[str, ...]] = ("gateway", "sandboxes")
    command: list[str]  # a program of the image and its arguments
    reward_from: Literal["tests", "stdout"] = "tests"  # the row's test_command, or JSON in the last line of the agent's output

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        if self.reward_from == "stdout" and self.reward is None and self.rewards is None:
            return {SCORE: RewardFunction(score, RewardMark(accuracy=True), "the agent's result")}
        return super().reward_functions

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        if options.get("reward_from") == "stdout" and options.get("reward") is None and options.get("rewards") is None:
            return {SCORE: RewardMark(accuracy=True)}
        return super().list_marks(options)

    async def run(self, task: PromptedTask, endpoint: Endpoint) -> Any:
        address = urlsplit(endpoint.base_url)
        local = address.hostname in ("127.0.0.1", "localhost") and address.port is not None
        sandbox = await current_sandbox().open((address.port,) if local and address.port else ())
        columns = {name: each for name, each in task.metadata.items() if name.lower() not in HIDDEN}
        told = replace(task, answer="", metadata=columns)
        command = SandboxCommand(
            argv=tuple(self.command), stdin=format_task(told).encode() + b"\n", environment=endpoint.environ,
            cwd=current_sandbox().folder, wall_s=self.agent_timeout_s, output_kb=1 << 16,
        )  # fmt: skip
        result = await sandbox.exec(command)
        if result.reason == ExitReason.TIME:
            raise AgentTimeout(f"the agent took longer than {self.agent_timeout_s:g} s on task {task.id!r}")
        if not result.succeeded:
            raise AgentFailed(
                f"the agent {self.command[0]} {_describe(result, self.agent_timeout_s)}: {result.text.strip()[-500:]}"
            )
        output = result.stdout.decode("utf-8", "replace")
        return read_result(last_json(output)) if self.reward_from == "stdout" else AgentResult(output=output)


@dataclass(frozen=True, kw_only=True)
class ShellTool:
    """``shell(command)``: runs a command in the sandbox of the episode's task. Files stay; each call is a new shell."""

    needed_resources: ClassVar[tuple[str, ...]] = ("sandboxes",)
    timeout_s: float = 50.0  # of a call; less than the environment's tool_timeout_s, which ends the call without its output
    max_output_chars: int = 8000
    user: str = ""  # of the image

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        async def shell(command: str) -> str:
            episode = current_sandbox()
            sandbox = await episode.open()
            words = ("sh", "-c", command)
            with failing_as_call():
                result = await sandbox.exec(SandboxCommand(argv=words, cwd=episode.folder, wall_s=self.timeout_s, user=self.user))
            text = shorten(result.text.rstrip("\n"), self.max_output_chars, around="\n")
            return text or "(no output)" if result.succeeded else f"{text}\n[{_describe(result, self.timeout_s)}]".lstrip("\n")

        description = "Run a shell command. Files stay from one call to the next."
        return open_tools(make_text_tool("shell", description, {"command": "The command, for sh."}, shell))


def make_text_tool(name: str, description: str, parameters: Mapping[str, str], function: Callable[..., Awaitable[str]]) -> Tool:
    """Return a tool whose parameters, given with their descriptions, are texts."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    return Tool(name, description, {"type": "object", "properties": properties, "required": list(properties)}, function)


def open_tools(*tools: Tool) -> AbstractAsyncContextManager[Sequence[Tool]]:
    """Open tools that work in the sandbox of an episode. Raises EnvironmentConfigError where there is none."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Sequence[Tool]]:
        current_sandbox()
        yield tools

    return opened()


def _describe(result: CommandResult, wall_s: float) -> str:
    """How a command ended, in words for the policy."""
    endings = {
        ExitReason.TIME: f"was ended after {wall_s:g} s",
        ExitReason.MEMORY: "was ended because it used more memory than allowed",
        ExitReason.OUTPUT: "was ended because it wrote more than allowed",
        ExitReason.SIGNAL: f"was ended by signal {-result.exit_code}",
    }
    return endings.get(result.reason, f"ended with exit code {result.exit_code}")
