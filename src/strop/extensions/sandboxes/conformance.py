"""What every provider of sandboxes must do, as checks that anyone can run: ``strop sandbox check --provider NAME --image IMAGE``, or

    results = await check_provider(provider, image)
    assert not [result for result in results if result.error]

The image needs sh, cat, sleep, id, head and dd. A check of what the provider's capabilities lack is left out.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from strop.extensions.sandboxes.base import (
    Capabilities,
    CommandResult,
    ExitReason,
    FailureCause,
    Resources,
    Sandbox,
    SandboxCommand,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)
from strop.extensions.sandboxes.trees import make_archive, read_file, write_files

AT_A_TIME = 6  # checks; most of them wait
RESOURCES = Resources(memory_mb=256, disk_mb=64, processes=32)


@dataclass(frozen=True)
class CheckResult:
    """How one check went. ``error``: what is wrong; "" if nothing; None if it was left out."""

    name: str
    error: str | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Bench:
    """What a check works with."""

    provider: SandboxProvider
    spec: SandboxSpec

    @asynccontextmanager
    async def sandbox(self, **changes: Any) -> AsyncIterator[Sandbox]:
        sandbox = await self.provider.create(replace(self.spec, **changes))
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


Check = Callable[[Bench], Awaitable[None]]
Shared = Callable[[Sandbox], Awaitable[None]]
CHECKS: dict[str, tuple[Check | Shared, str]] = {}  # by name: the function, and the capability that it is about


def check(needs: str = "") -> Callable[[Any], Any]:
    """Add a check, named as its function. One that takes a sandbox shares it with others, which run at the same time."""

    def add(function: Any) -> Any:
        CHECKS[function.__name__.strip("_").replace("_", " ")] = (function, needs)
        return function

    return add


async def check_provider(
    provider: SandboxProvider, image: str, report: Callable[[CheckResult], object] = lambda result: None
) -> list[CheckResult]:
    """Run every check. ``report`` gets each result at once. Raises SandboxFailure if no sandbox can be made."""
    bench, places = Bench(provider, SandboxSpec(image=image, resources=RESOURCES)), asyncio.Semaphore(AT_A_TIME)

    async def run(name: str, function: Any, needs: str, shared: Sandbox) -> CheckResult:
        async with places:
            began, error = time.monotonic(), None
            takes_sandbox = next(iter(inspect.signature(function).parameters)) == "sandbox"
            if not needs or _has(provider.capabilities, needs):
                error = await _try(function(shared if takes_sandbox else bench))
            result = CheckResult(name, error, time.monotonic() - began)
            report(result)
            return result

    async with bench.sandbox() as shared:
        return await asyncio.gather(*(run(name, *each, shared) for name, each in CHECKS.items()))


def _has(capabilities: Capabilities, name: str) -> bool:
    kind, _, value = name.partition("=")
    found = getattr(capabilities, kind)
    return value in found if value else bool(found)


async def _try(work: Awaitable[None]) -> str:
    try:
        async with asyncio.timeout(120.0):
            await work
        return ""
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def _shell(sandbox: Sandbox, script: str, **options: Any) -> CommandResult:
    return await sandbox.exec(SandboxCommand(argv=("sh", "-c", script), **options))


def _expect(found: object, expected: object, what: str) -> None:
    assert found == expected, f"{what} is {found!r:.300}, not {expected!r:.300}"


async def _fails(work: Awaitable[object], cause: FailureCause) -> None:
    try:
        found = await work
    except SandboxFailure as failure:
        _expect(failure.cause, cause, f"the cause ({failure})")
    else:
        raise AssertionError(f"it did not fail, as {cause}; it returned {found!r:.200}")


async def _is_running(sandbox: Sandbox, seconds: str) -> bool:
    """Whether a ``sleep`` of this many seconds runs."""
    return f"sleep\0{seconds}\0".encode() in (await _shell(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null")).stdout


# --- commands ---------------------------------------------------------------------------------------------------------------


@check()
async def _exit_code_and_both_streams_are_returned(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "echo out; echo err >&2; exit 3")
    found = (result.reason, result.exit_code, result.stdout, result.stderr)
    _expect(found, (ExitReason.EXIT, 3, b"out\n", b"err\n"), "the result")


@check()
async def _bytes_pass_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    result = await sandbox.exec(SandboxCommand(argv=("cat",), stdin=data))
    assert result.stdout == data, f"{len(data)} bytes of stdin came back as {len(result.stdout)}, or changed"


@check()
async def _a_command_that_reads_no_input_ends(sandbox: Sandbox) -> None:
    _expect((await sandbox.exec(SandboxCommand(argv=("true",), stdin=b"x" * 300_000))).exit_code, 0, "the exit code")


@check()
async def _arguments_and_environment_are_not_interpreted(sandbox: Sandbox) -> None:
    words = ("a b", "$HOME", "'\"`;\n*", "", "ümlaut")
    command = SandboxCommand(argv=("sh", "-c", 'printf "%s|" "$@" "$GIVEN"', "sh", *words), environment={"GIVEN": "x = $y\n"})
    _expect((await sandbox.exec(command)).stdout.decode(), "|".join((*words, "x = $y\n", "")), "the words")


@check()
async def _a_command_runs_where_it_should(sandbox: Sandbox) -> None:
    _expect((await _shell(sandbox, "pwd", cwd="/tmp")).stdout, b"/tmp\n", "the working folder")


@check()
async def _a_program_that_is_not_there_is_refused(sandbox: Sandbox) -> None:
    await _fails(sandbox.exec(SandboxCommand(argv=("/no/such/program",))), FailureCause.REQUEST)


@check("users")
async def _a_command_runs_as_the_user_that_is_set(sandbox: Sandbox) -> None:
    _expect((await _shell(sandbox, "id -u", user="4321")).stdout, b"4321\n", "the user")


@check()
async def _a_time_limit_ends_a_command_and_what_it_started(sandbox: Sandbox) -> None:
    began = time.monotonic()
    result = await _shell(sandbox, "echo begun; (sleep 44 & sleep 44)", wall_s=1.5)
    _expect((result.reason, result.stdout), (ExitReason.TIME, b"begun\n"), "the result")
    assert time.monotonic() - began < 30, "it took much longer than its limit"
    assert not await _is_running(sandbox, "44"), "what it started still runs"


@check()
async def _an_output_limit_ends_a_command(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "while true; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", output_kb=16, wall_s=30)
    _expect((result.reason, len(result.stdout)), (ExitReason.OUTPUT, 16 << 10), "the result")


@check()
async def _output_arrives_while_a_command_runs(sandbox: Sandbox) -> None:
    arrived: list[tuple[float, bytes]] = []
    command = SandboxCommand(argv=("sh", "-c", "echo first; sleep 1; echo second"))
    result = await sandbox.exec(command, lambda stream, part: arrived.append((time.monotonic(), part)))
    _expect((b"".join(part for _, part in arrived), result.stdout), (b"first\nsecond\n",) * 2, "the output")
    assert arrived[-1][0] - arrived[0][0] > 0.5, "all of it arrived at the end"


@check()
async def _a_signal_is_reported(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "kill -9 $$")
    _expect((result.reason, result.exit_code), (ExitReason.SIGNAL, -9), "the result")


@check()
async def _commands_run_at_the_same_time(sandbox: Sandbox) -> None:
    began = time.monotonic()
    results = await asyncio.gather(*(_shell(sandbox, f"sleep 1; echo {number}") for number in range(6)))
    _expect([result.stdout for result in results], [f"{number}\n".encode() for number in range(6)], "the outputs")
    assert time.monotonic() - began < 5, "they ran one after another"


@check()
async def _a_server_in_the_background_stays(sandbox: Sandbox) -> None:
    began = time.monotonic()
    await _shell(
        sandbox, "echo $$ > /tmp/server; (exec setsid sleep 60 >/dev/null 2>&1 &) || true; sleep 60 & echo $! > /tmp/server"
    )
    assert time.monotonic() - began < 20, "the command ended only with its background process"
    _expect((await _shell(sandbox, "kill -0 $(cat /tmp/server)")).exit_code, 0, "the exit code of kill -0")


@check()
async def _a_cancelled_command_ends(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        running = asyncio.ensure_future(_shell(sandbox, "sleep 45; touch /tmp/ended"))
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _ in range(20):
            if not await _is_running(sandbox, "45"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it still runs 2 s later")


# --- files ------------------------------------------------------------------------------------------------------------------


@check()
async def _files_come_back_unchanged(sandbox: Sandbox) -> None:
    files = {"/data/a b/ü": b"\0\xff" * 1000, "/data/empty": b"", "/data/large": b"0123456789abcdef" * 200_000}
    await write_files(sandbox, files)
    for path, content in files.items():
        assert await read_file(sandbox, path) == content, f"{path} changed"
    _expect((await _shell(sandbox, "cat '/data/a b/ü' | head -c 2")).stdout, b"\0\xff", "what a command reads")


@check()
async def _folders_keep_modes_and_links(sandbox: Sandbox) -> None:
    await sandbox.put_tree("/tree", make_archive({"run": b"#!/bin/sh\necho ran\n"}, mode=0o755))
    await _shell(sandbox, "mkdir /tree/sub && ln -s ../run /tree/sub/link")
    await sandbox.put_tree("/copy", await sandbox.get_tree("/tree"))
    _expect((await _shell(sandbox, "/copy/tree/sub/link")).stdout, b"ran\n", "what the copy of a link runs")


@check()
async def _a_file_that_is_not_there_is_refused(sandbox: Sandbox) -> None:
    await _fails(sandbox.get_tree("/no/such/file"), FailureCause.REQUEST)


@check()
async def _a_file_larger_than_allowed_is_refused(sandbox: Sandbox) -> None:
    await _shell(sandbox, "head -c 3000000 /dev/zero > /tmp/large")
    await _fails(sandbox.get_tree("/tmp/large", limit_mb=1), FailureCause.REQUEST)


# --- walls ------------------------------------------------------------------------------------------------------------------


@check()
async def _sandboxes_of_one_image_share_nothing(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as other:
        await _shell(one, "echo mine > /tmp/mine; echo changed > /etc/passwd")
        found = await _shell(other, "cat /tmp/mine; cat /etc/passwd; kill -0 -1")
        assert b"mine" not in found.stdout and b"changed" not in found.stdout, "a sandbox sees the files of another"


@check("egress=none")
async def _a_sandbox_without_network_has_none(sandbox: Sandbox) -> None:
    found = (await _shell(sandbox, "cat /proc/net/dev")).stdout.decode()
    names = [line.partition(":")[0].strip() for line in found.splitlines() if ":" in line]
    _expect([name for name in names if name != "lo"], [], "the list of its network devices")


@check()
async def _a_command_beyond_its_memory_ends_and_the_sandbox_lives(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await sandbox.exec(SandboxCommand(argv=("dd", "if=/dev/zero", "of=/dev/null", "bs=700000000", "count=1")))
        assert not result.succeeded, f"a command held 700 MB, and {bench.spec.resources.memory_mb} are allowed"
        _expect((await _shell(sandbox, "echo well")).stdout, b"well\n", "what the next command prints")


@check("limits_disk")
async def _a_full_disk_is_an_error_of_the_program(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        result = await _shell(sandbox, "head -c 200000000 /dev/zero > /full")
        assert result.exit_code and b"space" in result.stderr.lower(), (
            f"it ended with {result.exit_code}: {result.stderr[:200]!r}"
        )
        _expect((await _shell(sandbox, "rm /full; echo well > /new; cat /new")).stdout, b"well\n", "what the next command prints")


@check("limits_processes")
async def _a_fork_bomb_is_contained(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await _shell(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 2", wall_s=5, output_kb=4096)
        await _shell(sandbox, "kill -9 -1; true", wall_s=5)
        _expect((await _shell(sandbox, "echo well")).stdout, b"well\n", "what the next command prints")


# --- life -------------------------------------------------------------------------------------------------------------------


@check("snapshot")
async def _a_snapshot_is_an_image_of_which_forks_differ(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        await _shell(sandbox, "mkdir /kept; echo one > /kept/file; rm /etc/passwd")
        image = await sandbox.snapshot()
        await _shell(sandbox, "echo later > /kept/file")
    try:
        async with bench.sandbox(image=image) as left, bench.sandbox(image=image) as right:
            await _shell(left, "echo two > /kept/file")
            _expect((await _shell(right, "cat /kept/file; cat /etc/passwd 2>/dev/null")).stdout, b"one\n", "the files of a fork")
    finally:
        await bench.provider.remove_snapshot(image)


@check()
async def _a_sandbox_answers_and_its_clock_is_right(sandbox: Sandbox) -> None:
    health = await sandbox.health()
    assert health.answers, "it does not answer"
    assert abs(health.clock_skew_s or 0.0) < 60, f"its clock is wrong by {health.clock_skew_s:g} s"


@check()
async def _a_destroyed_sandbox_is_lost(bench: Bench) -> None:
    async with bench.sandbox() as sandbox:
        running = asyncio.ensure_future(_shell(sandbox, "sleep 60"))
        await asyncio.sleep(0.3)
        await sandbox.destroy()
        await _fails(running, FailureCause.LOST)
        await _fails(_shell(sandbox, "true"), FailureCause.LOST)
        _expect((await sandbox.health()).answers, False, "whether it answers")


@check()
async def _an_image_that_is_not_there_is_the_tasks_fault(bench: Bench) -> None:
    await _fails(bench.provider.create(replace(bench.spec, image=f"{bench.spec.image}-not-there")), FailureCause.IMAGE)
