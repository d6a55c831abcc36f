"""Programs that try to get out of the sandbox, to live on, or to spoil what comes after them."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from extensions.code.sandbox.hostile_programs import PROGRAMS, HostileProgram
from strop.extensions.code.sandbox import launcher
from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, RunResult
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool

LIMITS = Limits(cpu_s=0.6, wall_s=1.0, memory_mb=64, processes=16, open_files=32, file_mb=8, disk_mb=16, output_kb=16)
HONEST = Program(source="import json\nprint(json.dumps(sum(range(len('abcd')))), input())", stdin="and more\n")


@dataclass(frozen=True)
class Ran:
    """What a hostile program did, and what the honest one after it said."""

    hostile: RunResult
    honest: RunResult


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    """Run every program once, several at a time in one pool, each followed by an honest one."""
    secret = tmp_path_factory.mktemp("secrets") / "secret"
    secret.write_text("the secret of this machine")
    before = _descendants()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("STROP_WITNESS", "1")
        with suppress(OSError):
            abstract.bind("\0strop_witness")
            abstract.listen()
        results = asyncio.run(_run_all(PROGRAMS, {"SECRET": repr(str(secret)), "PORT": str(server.getsockname()[1])}))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert _descendants() == before, "processes are left"
    yield results


def _limits_of(hostile: HostileProgram) -> Limits:
    """A program that is to end by itself has the time for it on a busy machine too, beside three others that are stopped."""
    return LIMITS if "time" in hostile.ends else replace(LIMITS, wall_s=20.0)


async def _run_all(programs: tuple[HostileProgram, ...], names: dict[str, str]) -> dict[str, Ran]:
    pool = SandboxPool(SandboxConfig(workers=4))

    async def run(hostile: HostileProgram) -> tuple[str, Ran]:
        source = hostile.source
        for name, value in names.items():
            source = source.replace(name, value)
        result = await pool.run(Program(source=source, language=hostile.language, limits=_limits_of(hostile)))
        return hostile.name, Ran(result, await pool.run(HONEST))

    try:
        return dict(await asyncio.gather(*map(run, programs)))
    finally:
        await pool.close()


def _descendants() -> set[int]:
    found, ahead = set(), [os.getpid()]
    while ahead:
        parent = ahead.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                children = {int(child) for child in task.read_text().split()}
                found |= children
                ahead += children
    return found


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name)
def test_a_hostile_program_does_not_get_out_and_the_next_honest_one_is_right(
    hostile: HostileProgram, ran: dict[str, Ran]
) -> None:
    result, honest = ran[hostile.name].hostile, ran[hostile.name].honest
    assert "ESCAPED" not in result.stdout, result
    assert result.reason in hostile.ends, result
    assert hostile.says in result.stdout, result
    assert len(result.stdout.encode()) <= 3 * LIMITS.output_kb << 10
    assert honest.reason == ExitReason.EXIT, honest
    assert honest.stdout == "6 and more\n", honest


@pytest.mark.exhaustive
def test_every_order_of_hostile_programs_in_one_worker_without_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "make_cgroup", lambda: None)

    async def work() -> list[tuple[str, RunResult]]:
        pool, wrong = SandboxPool(SandboxConfig(workers=1)), []
        for seed in range(3):
            programs = [*PROGRAMS]
            random.Random(seed).shuffle(programs)
            for hostile in programs:
                source = hostile.source.replace("SECRET", "'/etc/hostname'").replace("PORT", "9")
                result = await pool.run(Program(source=source, language=hostile.language, limits=_limits_of(hostile)))
                honest = await pool.run(HONEST)
                if "ESCAPED" in result.stdout or result.reason not in hostile.ends or honest.stdout != "6 and more\n":
                    wrong.append((hostile.name, result))
        await pool.close()
        return wrong

    assert asyncio.run(work()) == []
