"""Episodes of scripted policies, in sandboxes of this machine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import PromptedTask
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.resources import configure_resources, open_resources
from strop.extensions.sandboxes.sandboxes_config import SandboxesConfig
from strop.tools.base import ParsedReply
from strop.types import Rollout, ToolCall
from support.written_rollouts import rollout_of

Play = Callable[..., list[tuple[Rollout, list[str]]]]


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Run episodes of one kind, each of (task, calls, last message). Return their rollouts, with rewards, and what the policy read."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap, which `make setup-sandbox` installs")
    folder = tmp_path_factory.mktemp("images")

    def run_all(kind: str, episodes: Sequence[tuple[PromptedTask, Sequence[ToolCall], str]], **options: Any) -> Any:
        configure_resources({"sandboxes": SandboxesConfig(options={"folder": str(folder)}, memory_mb=512, max_open=4)})
        return asyncio.run(_run(kind, episodes, options))

    yield run_all
    configure_resources({})


async def _run(kind: str, episodes: Sequence[tuple[PromptedTask, Sequence[ToolCall], str]], options: dict[str, Any]) -> Any:
    handle = LocalEnvironment(make_environment(kind, options))

    async def run(task: PromptedTask, calls: Sequence[ToolCall], last: str) -> tuple[Rollout, list[str]]:
        rollout, read = rollout_of(task, last), list[str]()
        async with handle.open(task):
            for call in calls:
                read += [each.content for each in await handle.answer_calls(rollout, ParsedReply("", calls=(call,))) or ()]
            result = await handle.score(task, rollout)
        rollout.rewards.update(result.rewards)
        return rollout, read

    async with open_resources([handle], lambda note: None):
        return [await run(*episode) for episode in episodes]


def make_tasks(kind: str, size: int | None = None, **options: Any) -> list[PromptedTask]:
    return list(make_environment(kind, options).tasks(DataSource(size=size)))


def list_calls(task: PromptedTask) -> list[ToolCall]:
    """The calls of the scripted policy."""
    calls = [step["function"] for step in task.metadata["solution"] if not isinstance(step, str)]
    return [ToolCall(call["name"], call["arguments"]) for call in calls]


def last_message(task: PromptedTask) -> str:
    return next((step for step in task.metadata["solution"] if isinstance(step, str)), "done")
