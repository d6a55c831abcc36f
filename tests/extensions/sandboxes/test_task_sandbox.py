"""Tasks that bring an image: the policy works in one sandbox, and hidden tests judge in another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from strop.endings import Ending, RolloutFailed, find_ending
from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.resources import configure_resources, open_resources
from strop.extensions.agents.endpoint import Endpoint
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from strop.extensions.sandboxes.sandboxes_config import SandboxesConfig
from strop.extensions.sandboxes.task_sandbox import SandboxAgent, current_sandbox
from strop.extensions.sandboxes.trees import read_file
from strop.tools.base import InfrastructureError, ParsedReply
from strop.types import Rollout, ToolCall, user
from support.oci_images import CONFIG
from support.written_rollouts import rollout_of

TESTS = {
    "setup_command": "echo broken > program; echo left over > old",
    "test_command": "sh /hidden/test.sh",
    "test_files": {"/hidden/test.sh": '[ "$(cat program)" = fixed ] && [ ! -e old ]'},
}


@pytest.fixture
def sandboxes(make_local: Callable[[], LocalProvider]) -> Iterator[None]:
    configure_resources(
        {"sandboxes": SandboxesConfig(options={"folder": str(make_local().store.folder)}, memory_mb=256, disk_mb=64, processes=8)}
    )
    yield
    configure_resources({})


def make_task(image: str | None, **columns: object) -> PromptedTask:
    metadata = {**TESTS, **({"image": image} if image else {}), **columns}
    return PromptedTask(id="t", question="Repair it.", metadata=metadata, messages=(user("Repair it."),))


def play(task: PromptedTask, *commands: str, **options: object) -> tuple[list[str], Rollout]:
    """Run an episode whose policy calls ``shell``. Return what it read, and the rollout with its rewards."""

    async def run() -> tuple[list[str], Rollout]:
        handle = LocalEnvironment(make_environment("sandbox", options))
        notes: list[str] = []
        async with open_resources([handle], notes.append):
            assert notes == ["images of tasks run in sandboxes of the provider local"]
            rollout, said = rollout_of(task, "done"), list[str]()
            async with handle.open(task):
                for command in commands:
                    reply = ParsedReply("", calls=(ToolCall("shell", {"command": command}),))
                    said += [message.content for message in await handle.answer_calls(rollout, reply) or ()]
                result = await handle.score(task, rollout)
            rollout.rewards.update(result.rewards)
            return said, rollout

    return asyncio.run(run())


def test_a_scripted_policy_solves_a_task_that_brings_its_image(sandboxes: None, image: str):
    said, rollout = play(make_task(image), "cat program; exit 3", "echo fixed > program; rm old", "ls /hidden")
    assert said[0] == "broken\n[ended with exit code 3]" and said[1] == "(no output)" and "No such file" in said[2]
    assert rollout.rewards == {"tests": 1.0} and rollout.metrics["test_seconds"] > 0


@pytest.mark.parametrize(
    "commands",
    [
        [],
        ["echo fixed > program"],  # the tests also want the other file gone
        ["cd /; rm -rf /work"],
        ["rm -f /bin/sh /bin/rm"],
        ["(sleep 9 & sleep 9 & sleep 9 &) ; for i in 1 2 3 4 5 6 7 8 9; do (sleep 9 &); done"],
        ["mkdir -p /hidden; echo exit 0 > /hidden/test.sh", "printf '#!/bin/sh\\nexit 0' > /bin/sh", "chmod 777 /bin/sh"],
    ],
    ids=["nothing", "half", "no folder", "no shell", "no processes", "its own tests and shell"],
)
def test_a_policy_that_does_not_solve_it_gets_nothing(sandboxes: None, image: str, commands: list[str]):
    assert play(make_task(image), *commands)[1].rewards == {"tests": 0.0}


def test_a_call_has_its_limits_and_says_so(sandboxes: None, image: str):
    said, _ = play(
        make_task(image),
        "sleep 9",
        "id -u",
        "seq 100000",
        tools=[{"shell": {"timeout_s": 0.5, "max_output_chars": 100, "user": "ann"}}],
    )
    assert said[0] == "[was ended after 0.5 s]" and said[1] == "1000" and "characters ..." in said[2]


@pytest.mark.parametrize(
    "given, columns, match",
    [
        (None, {}, "has no image"),
        ("IMAGE", {"setup_command": "echo why >&2; false"}, "setup_command of task 't' failed: why"),
        ("IMAGE", {"test_command": None}, "has no test_command"),
        ("oci:/nowhere", {}, "there is no /nowhere"),
        ("IMAGE", {"setup_command": "rm /bin/sh"}, "no test_command|cannot start"),
    ],
)
def test_a_broken_task_ends_as_one(sandboxes: None, image: str, given: str | None, columns: dict[str, object], match: str):
    given = image if given == "IMAGE" else given
    with pytest.raises(Exception, match=match) as found:
        play(make_task(given, **columns), "true")
    assert find_ending(found.value) == Ending.BROKEN_TASK


def test_a_provider_that_cannot_keep_the_network_policy_ends_the_run_at_its_start(image: str):
    configure_resources({"sandboxes": SandboxesConfig(provider="docker", egress="allow", hosts=("a.b",))})
    try:
        with pytest.raises(InfrastructureError, match="the provider docker has no network egress=allow; set one of all, none"):
            play(make_task(image))
    finally:
        configure_resources({})


def test_the_tool_without_a_sandbox_is_an_error():
    with pytest.raises(EnvironmentConfigError, match=r"need env.ALIAS.type=sandbox"):
        current_sandbox()


def test_an_agent_of_the_image_reaches_the_policy_at_a_forwarded_port(sandboxes: None, image: str):
    agent = 'read -r task; echo "$task" > program; exec 3<>/dev/null; printf \'{"reward": 0.5}\\n\''

    async def run() -> object:
        served: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(await reader.readline())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        environment = SandboxAgent(command=["sh", "-c", agent], reward_from="stdout")
        handle = LocalEnvironment(environment)
        task = make_task(image)
        async with open_resources([], print), handle.open(task):
            result = await environment.run_agent(task, Endpoint(base_url=f"http://127.0.0.1:{port}/v1", api_key="k"))
            sandbox = await current_sandbox().open()
            assert sandbox._started.ports == [port]  # type: ignore[attr-defined]
            told = await read_file(sandbox, f"{CONFIG['WorkingDir']}/program")
            assert b"Repair it." in told and b"hidden" not in told and b"[ -e old ]" not in told
        server.close()
        return result

    result = asyncio.run(run())
    assert result.reward == 0.5  # type: ignore[attr-defined]


def test_an_agent_that_fails_is_the_policys_fault(sandboxes: None, image: str):
    async def run() -> None:
        environment = SandboxAgent(command=["sh", "-c", "echo why >&2; exit 4"])
        task = make_task(image)
        async with environment.session(task):
            await environment.run_agent(task, Endpoint(base_url="http://127.0.0.1:9/v1", api_key="k"))

    with pytest.raises(RuntimeError, match="ended with exit code 4: why") as found:
        asyncio.run(run())
    assert find_ending(found.value) == Ending.CRASH and not isinstance(found.value, RolloutFailed)
