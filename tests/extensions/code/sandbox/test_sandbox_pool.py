"""The pool of workers: what comes back, what is left, what happens when workers die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from strop.environments.remote import EnvironmentDescription, EnvironmentServer
from strop.environments.resources import configure_resources
from strop.extensions.code.sandbox import launcher
from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, RunResult, SandboxError
from strop.extensions.code.sandbox.sandbox_check import check_sandbox
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool, get_sandbox
from strop.extensions.sandboxes.local import bubblewrap
from support.processes import is_alive, wait_until
from support.sweep import sweep

T = TypeVar("T")

LIMITS = Limits(cpu_s=2.0, wall_s=4.0, memory_mb=96, processes=16)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(SandboxConfig(**{"workers": 2, **options}))
    try:
        yield pool
    finally:
        await pool.close()


def use(work: Callable[[SandboxPool], Awaitable[T]], **options: Any) -> T:
    """Run ``work`` with a pool that is closed afterwards."""

    async def run() -> T:
        async with opened(**options) as pool:
            return await work(pool)

    return asyncio.run(run())


def run(source: str, *, limits: Limits = LIMITS, **program: Any) -> RunResult:
    return use(lambda pool: pool.run(Program(source=source, limits=limits, **program)))


C = """
#include <stdio.h>
int main() {
    char a[9], b[9];
    scanf("%8s", a);
    fscanf(fopen("data/a.txt", "r"), "%8s", b);
    printf("hello %s %s\\n", a, b);
}
"""
HELLO = {
    "python": "import sys\nprint('hello', sys.stdin.read().strip(), open('data/a.txt').read())",
    "bash": "read line; echo hello $line $(cat data/a.txt)",
    "javascript": "const fs=require('fs');console.log('hello',fs.readFileSync(0,'utf8').trim(),fs.readFileSync('data/a.txt','utf8'))",
    "c": C,
    "cpp": '#include <iostream>\n#include <fstream>\nint main(){std::string a,b;std::cin>>a;std::ifstream("data/a.txt")>>b;'
    'std::cout<<"hello "<<a<<" "<<b<<"\\n";}',
}  # fmt: skip


def test_every_language_reads_stdin_and_files_and_writes_stdout() -> None:
    async def work(pool: SandboxPool) -> list[RunResult]:
        programs = [
            Program(source=text, language=name, stdin="you\n", files={"data/a.txt": "there"}) for name, text in HELLO.items()
        ]
        return await asyncio.gather(*map(pool.run, programs))

    for result in use(work):
        assert (result.stdout, result.reason, result.exit_code) == ("hello you there\n", ExitReason.EXIT, 0), result


def test_how_a_program_ended_is_told() -> None:
    async def work(pool: SandboxPool) -> None:
        async def reason(source: str, language: str = "python", **limits: Any) -> tuple[str, int]:
            result = await pool.run(Program(source=source, language=language, limits=replace(LIMITS, **limits)))
            return result.reason.value, result.exit_code

        assert await reason("import sys; sys.exit(3)") == ("exit", 3)
        assert await reason("raise SystemExit('bye')") == ("exit", 1)
        assert await reason("exit()") == ("exit", 0)
        assert await reason("while True: pass", cpu_s=0.3) == ("time", -9)
        assert (await reason("import time; time.sleep(9)", wall_s=0.2))[0] == "time"
        assert (await reason("a = b'x' * (200 << 20)\nimport time; time.sleep(1)"))[0] == "memory"
        assert (await reason("print('x' * 10**6)"))[0] == "output"
        assert await reason("import os; os.abort()") == ("signal", -signal.SIGABRT)
        assert await reason("int main( {", "c") == ("compile", 1)
        assert await reason("int main(){return 7;}", "c") == ("exit", 7)

    use(work)


def test_an_uncaught_exception_shows_the_program_and_not_the_worker() -> None:
    result = run("def f():\n    return 1 / 0\nf()")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[:4] == ["Traceback (most recent call last):", '  File "main.py", line 3, in <module>', "    f()",
                                              '  File "main.py", line 2, in f']  # fmt: skip
    assert "worker" not in result.stderr


def test_a_program_is_a_main_module_of_its_own_with_its_files_beside_it() -> None:
    source = """
import helper, sys
from dataclasses import dataclass
@dataclass
class A:
    x: int
if __name__ == "__main__":
    print(A(helper.x), sys.argv)
"""
    assert run(source, files={"helper.py": "x = 3"}).stdout == "A(x=3) ['main.py']\n"


def test_output_at_the_end_of_a_program_is_kept() -> None:
    assert run(
        "import atexit, threading\natexit.register(print, 'last')\nthreading.Thread(target=print, args=('thread',)).start()"
    ).stdout == ("thread\nlast\n")
    assert run("import os\nos.write(1, b'x' * 60000); os._exit(0)").stdout == "x" * 60000


def test_the_same_program_gives_the_same_result_in_every_worker() -> None:
    async def work(pool: SandboxPool) -> set[str]:
        program = Program(source="import random\nprint(random.random(), list({'a', 'b', 'c'}), hash('x'))")
        return {(await result).stdout for result in [asyncio.ensure_future(pool.run(program)) for _ in range(8)]}

    assert len(use(work)) == 1


def test_a_language_that_is_unknown_or_missing_and_files_outside_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no language 'cobol'"):
        run("", language="cobol")
    with pytest.raises(ValueError, match="not inside the program's folder"):
        run("", files={"../x": ""})
    with pytest.raises(ValueError, match="the limit wall_s is 0"):
        run("", limits=Limits(wall_s=0))
    monkeypatch.delitem(launcher.COMMANDS, "javascript")
    with pytest.raises(SandboxError, match=r"no nodejs.*apt-get install nodejs"):
        run("", language="javascript")


def test_a_session_keeps_variables_and_files_and_begins_anew_after_a_limit() -> None:
    async def work(pool: SandboxPool) -> None:
        async with pool.session(limits=LIMITS) as session:
            assert (await session.run("x = 20\nopen('a', 'w').write('kept')")).stdout == "4\n"
            assert (await session.run("x += 1\nprint('x is', x)\nx * 2")).stdout == "x is 21\n42\n"
            failed = await session.run("x = 5\n1 / 0")
            assert failed.exit_code == 1
            assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
            assert (await session.run("x, open('a').read()")).stdout == "(5, 'kept')\n"
            assert (await session.run("import sys\nsys.exit(4)")).exit_code == 4
            assert (await session.run("x")).stdout == "5\n"
            assert (await session.run("import time; time.sleep(9)", wall_s=0.2)).reason == ExitReason.TIME
            assert "NameError" in (await session.run("x")).stderr
            assert "FileNotFoundError" in (await session.run("open('a')")).stderr
            assert (await session.run("import os; os._exit(3)")).exit_code == 3
            assert (await session.run("1 +")).stderr.endswith("SyntaxError: invalid syntax\n")

    use(work)


def test_what_a_session_left_running_stands_still_between_calls() -> None:
    async def work(pool: SandboxPool) -> None:
        async with pool.session(limits=LIMITS) as session:
            await session.run("n = 0\ndef count():\n    global n\n    while True: n += 1\nimport threading\n"
                              "threading.Thread(target=count, daemon=True).start()")  # fmt: skip
            first = await session.run("before = n")
            await asyncio.sleep(0.3)
            assert (await session.run("import time; time.process_time() < 0.3")).stdout == "True\n", first

    use(work)


def test_sessions_are_bounded_and_do_not_keep_programs_waiting() -> None:
    async def work(pool: SandboxPool) -> None:
        async with pool.session() as one, pool.session() as two:
            await asyncio.gather(one.run("1"), two.run("1"))
            assert (await pool.run(Program(source="print(1)"))).stdout == "1\n"
            with pytest.raises(SandboxError, match=r"sandbox.sessions"):
                async with pool.session():
                    pass
        async with pool.session() as three:
            assert (await three.run("2")).stdout == "2\n"

    use(work, workers=1, sessions=2)


def test_a_worker_that_dies_is_replaced_and_its_job_runs_once_more() -> None:
    async def work(pool: SandboxPool) -> None:
        await pool.run(Program(source=""))
        worker = pool._idle.get()
        pool._idle.put(worker)
        os.kill(worker.process.pid, signal.SIGKILL)
        assert (await pool.run(Program(source="print('again')"))).stdout == "again\n"

    use(work, workers=1)


def test_a_pool_serves_several_event_loops_and_threads() -> None:
    pool = SandboxPool(SandboxConfig(workers=2))
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(pool.run(Program(source="print(1)"))).stdout))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(pool.close())
    assert results == ["1\n"] * 6


def test_closing_a_pool_ends_what_runs_and_leaves_no_process_and_no_group() -> None:
    async def work() -> tuple[float, list[int]]:
        pool = SandboxPool(SandboxConfig(workers=2))
        slow = [
            asyncio.ensure_future(pool.run(Program(source="import time; time.sleep(60)", limits=Limits(wall_s=60))))
            for _ in range(2)
        ]
        while len(pool._busy) < 2:
            await asyncio.sleep(0.05)
        pids = [worker.process.pid for worker in pool._busy]
        began = time.monotonic()
        await pool.close()
        await asyncio.gather(*slow, return_exceptions=True)
        return time.monotonic() - began, pids

    before = set(list_groups())  # of pools that other tests of this process left open, too
    seconds, pids = asyncio.run(work())
    assert len(pids) == 2
    assert seconds < 5
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not [group for group in set(list_groups()) - before if group.startswith(f"strop_sandbox_{os.getpid()}_")]


def list_groups() -> Iterator[str]:
    parents = bubblewrap.find_parents()
    if parents is not None:
        yield from (path.name for folder in {parents.memory, parents.pids} for path in folder.iterdir())


def test_killing_the_process_that_owns_a_pool_leaves_nothing_running() -> None:
    source = """
import asyncio
from strop.extensions.code.sandbox.base import Limits, Program
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool
async def main():
    pool = SandboxPool()
    run = asyncio.ensure_future(pool.run(Program(source='import time; time.sleep(60)', limits=Limits(wall_s=60))))
    while not pool._busy:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    print(*[worker.process.pid for worker in pool._busy], flush=True)
    await run
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert pids
        process.kill()
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)


@pytest.mark.parametrize("level", sweep(["namespaces", "seccomp", "limits"], "seccomp"))
def test_a_level_keeps_what_it_promises(level: Any) -> None:
    findings = asyncio.run(check_sandbox(SandboxConfig(level=level, workers=1)))
    assert [finding.what for finding in findings if finding.promised and not finding.held] == []


def test_weaker_levels_clean_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: SandboxPool) -> None:
        result = await pool.run(Program(source="setsid sleep 61 & mkdir -p a/b; pwd", language="bash", limits=LIMITS))
        assert result.reason == ExitReason.EXIT, result
        assert not Path(result.stdout.strip()).exists()
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "sleep 61" not in found

    use(work, level="limits")


def test_a_level_that_cannot_be_had_is_an_error_that_names_weaker_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *a, **k: None)
    with pytest.raises(
        SandboxError, match=r"no bwrap.*apt-get install bubblewrap.*sandbox.level=seccomp or sandbox.level=limits"
    ):
        use(lambda pool: pool.run(Program(source="")), workers=1)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"needs Linux, and this is darwin.*strop sandbox serve"):
        launcher.check_level("limits")


def test_what_bubblewrap_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SandboxError, match="did not start: No permissions to create new namespace"):
        use(lambda pool: pool.run(Program(source="")), workers=1)


def test_without_control_groups_the_measured_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "make_cgroup", lambda: None)

    async def work(pool: SandboxPool) -> None:
        hungry = "import os\nfor i in range(2): os.fork()\na = b'x' * (40 << 20)\nimport time; time.sleep(3)"
        assert (await pool.run(Program(source=hungry, limits=LIMITS))).reason == ExitReason.MEMORY
        forks = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        n += 1
except OSError:
    print(n)
"""
        assert int((await pool.run(Program(source=forks, limits=LIMITS))).stdout) <= LIMITS.processes

    use(work, workers=1)


def test_installed_packages_can_be_imported_where_that_is_configured() -> None:
    source = "import numpy\nprint(numpy.arange(3).sum())"
    limits = Limits(cpu_s=20, wall_s=40, memory_mb=512)
    assert "ModuleNotFoundError" in run(source, limits=limits).stderr
    assert use(lambda pool: pool.run(Program(source=source, limits=limits)), workers=1, site_packages=True).stdout == "3\n"


def test_the_sandbox_of_a_process_is_the_configured_one() -> None:
    try:
        configure_resources({"sandbox": SandboxConfig(workers=1)})
        first = get_sandbox()
        assert first is get_sandbox()
        assert isinstance(first, SandboxPool)
        assert first.size == 1
        configure_resources({"sandbox": SandboxConfig(workers=3)})
        second = get_sandbox()
        assert isinstance(second, SandboxPool)
        assert second.size == 3
    finally:
        configure_resources({})


def test_groups_of_processes_that_were_killed_are_removed() -> None:
    parents = bubblewrap.find_parents()
    if parents is None:  # nothing to remove
        return
    left = parents.memory / "strop_sandbox_999999999_0"
    left.mkdir()
    bubblewrap._remove_left_over.cache_clear()
    use(lambda pool: pool.run(Program(source="")), workers=1)
    assert not left.exists()


def test_environments_in_other_processes_are_told_which_sandbox_to_use() -> None:
    sections = {"sandbox": SandboxConfig(workers=1, level="limits")}
    description = EnvironmentDescription(alias="a", name="arithmetic", resources=sections)
    try:
        assert EnvironmentServer(description).environment
        sandbox = get_sandbox()
        assert isinstance(sandbox, SandboxPool)
        assert (sandbox.size, sandbox.config.level) == (1, "limits")
    finally:
        configure_resources({})


def test_an_interpreter_that_is_ended_from_outside_is_an_error_and_no_crash_of_its_program() -> None:
    """The policy would be told of a crash that was none, and its variables would be gone: that costs the group, as everywhere."""

    async def work(pool: SandboxPool) -> None:
        async with pool.session(limits=LIMITS) as session:
            for source in (None, "import time; time.sleep(20)"):
                await session.run("x = 1")
                running = asyncio.ensure_future(session.run("" if source is None else source))
                await asyncio.sleep(0.3)
                worker = session._worker
                assert worker is not None
                os.kill(worker.process.pid, signal.SIGKILL)
                await asyncio.to_thread(worker.process.wait)
                with pytest.raises(SandboxError, match="ended from outside"):
                    await running
                    for _ in range(100):  # the kernel ends what is in its namespace a moment later
                        assert (await session.run("print(x)")).stdout == "1\n"
                assert "NameError" in (await session.run("print(x)")).stderr, "it begins anew"

    use(work)


def test_a_lone_surrogate_is_for_the_program_to_stumble_over() -> None:
    async def work(pool: SandboxPool) -> None:
        odd = "\ud83d"
        for program in (
            Program(source=f"print(1)  # {odd}"),
            Program(source="print(1)", stdin=odd),
            Program(source="print(1)", files={"a": odd}),
        ):
            assert (await pool.run(program)).reason is ExitReason.EXIT
        async with pool.session(limits=LIMITS) as session:
            await session.run("x = 5")
            assert "UnicodeEncodeError" in (await session.run(f"print('{odd}')")).stderr
            assert (await session.run("print(x)")).stdout == "5\n", "its variables are kept"

    use(work)


def test_a_pair_of_unix_sockets_is_what_a_program_may_have() -> None:
    found = run("import socket\na, b = socket.socketpair()\na.sendall(b'x')\nprint(b.recv(1))")
    assert found.stdout == "b'x'\n"


def test_an_interpreter_whose_idle_worker_had_died_begins_with_another() -> None:
    async def work(pool: SandboxPool) -> None:
        await pool.run(Program(source=""))
        worker = pool._idle.get()
        pool._idle.put(worker)
        os.kill(worker.process.pid, signal.SIGKILL)
        await asyncio.to_thread(worker.process.wait)
        async with pool.session(limits=LIMITS) as session:
            assert (await session.run("print(1)")).stdout == "1\n"

    use(work, workers=1)


def test_open_interpreters_hold_no_more_memory_together_than_is_configured() -> None:
    async def work(pool: SandboxPool) -> None:
        async with (
            pool.session(limits=LIMITS) as small,
            pool.session(limits=LIMITS) as large,
            pool.session(limits=LIMITS) as last,
        ):
            await small.run("x = 1")
            await large.run("kept = bytearray(60_000_000)")
            assert (await large.run("len(kept)")).stdout == "60000000\n", "alone it may"
            await last.run("kept = bytearray(50_000_000)")
            with pytest.raises(
                SandboxError, match=r"held \d+ MB together, more than sandbox.memory_mb = 100; the largest, with 6\d MB"
            ):
                await large.run("len(kept)")
            assert (await small.run("x")).stdout == "1\n" and (await last.run("len(kept)")).stdout == "50000000\n"
            assert sum(session.held for session in (small, large, last)) < 100 << 20

    use(work, memory_mb=100)
