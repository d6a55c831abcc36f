"""The pool of a run: places, sandboxes that wait ready, and what it does about each fault."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from strop.extensions.sandboxes import check_command, warm_pool
from strop.extensions.sandboxes.base import (
    Capabilities,
    CommandResult,
    ExitReason,
    FailureCause,
    Health,
    NetworkPolicy,
    SandboxCommand,
    SandboxFailure,
    SandboxSpec,
    UnsupportedSpec,
)
from strop.extensions.sandboxes.check_command import Fault, FaultyProvider, find_faults
from strop.extensions.sandboxes.providers import make_provider
from strop.extensions.sandboxes.trees import check_tree, make_archive
from strop.extensions.sandboxes.warm_pool import WarmPool
from support.each import each

SPEC = SandboxSpec(image="any", environment={"A": "1"})


class FakeSandbox:
    def __init__(self, provider: FakeProvider, name: str) -> None:
        self.provider, self.id, self.open = provider, name, True

    async def exec(self, command: SandboxCommand, on_output: Any = None) -> CommandResult:
        if not self.open:
            raise SandboxFailure(FailureCause.LOST, "gone")
        return CommandResult(reason=ExitReason.EXIT, exit_code=0)

    async def put_tree(self, path: str, archive: bytes) -> None: ...

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        return b""

    async def snapshot(self) -> str:
        return "any"

    async def health(self) -> Health:
        return Health(self.open, 0.0)

    async def destroy(self) -> None:
        self.open = False


class FakeProvider:
    name, capabilities = "fake", Capabilities()

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        await asyncio.sleep(0)
        self.made.append(FakeSandbox(self, str(len(self.made))))
        return self.made[-1]

    async def remove_left_over(self) -> int:
        return 0

    async def close(self) -> None:
        for sandbox in self.made:
            await sandbox.destroy()


def use(work: Callable[[WarmPool, FakeProvider], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        provider = FakeProvider()
        pool = WarmPool(provider, **{"max_open": 4, **options})
        try:
            return await work(pool, provider)
        finally:
            await pool.close()
            assert not [sandbox for sandbox in provider.made if sandbox.open]

    return asyncio.run(run())


def test_no_more_sandboxes_are_lent_than_there_are_places_and_none_twice():
    most = 0

    async def work(pool: WarmPool, provider: FakeProvider) -> None:
        async def episode() -> str:
            nonlocal most
            async with pool.lend(SPEC) as sandbox:
                most = max(most, sum(each.open for each in provider.made))
                await asyncio.sleep(0.001)
                return sandbox.id

        names = await asyncio.gather(*(episode() for _ in range(50)))
        assert len(set(names)) == 50 and most == 4

    use(work)


def test_episodes_in_all_places_still_get_a_second_sandbox_that_judges():
    async def work(pool: WarmPool, provider: FakeProvider) -> None:
        async def episode() -> str:
            async with pool.lend(SPEC):
                await asyncio.sleep(0.001)  # until all places are taken
                async with pool.lend(SPEC, judging=True) as judge:
                    assert sum(each.open for each in provider.made) <= 5
                    return judge.id

        async with asyncio.timeout(10):
            assert len(set(await asyncio.gather(*(episode() for _ in range(20))))) == 20

    use(work)


def test_the_next_episode_of_an_image_finds_a_sandbox_ready():
    async def work(pool: WarmPool, provider: FakeProvider) -> None:
        for number in range(3):
            async with pool.lend(SandboxSpec(image="any", environment={"A": "1"})):
                await asyncio.sleep(0.01)
            assert pool.taken_ready == number
        await asyncio.sleep(0.01)
        assert sum(sandbox.open for sandbox in provider.made) == 2
        (await asyncio.gather(*(sandbox.destroy() for sandbox in provider.made)))
        async with pool.lend(SPEC) as sandbox:
            assert (await sandbox.health()).answers, "one that died while it waited is not lent"
        for number in range(warm_pool.KINDS + 3):
            async with pool.lend(SandboxSpec(image=str(number))):
                await asyncio.sleep(0.01)
        assert len(pool._ready) <= warm_pool.KINDS

    use(work, ready=2)


def test_a_slow_refusal_ends_an_episode_and_its_place_is_free_again():
    async def run() -> None:
        pool = WarmPool(FaultyProvider(FakeProvider(), Fault.REFUSED), max_open=1, tries=1)
        for _ in range(3):
            with pytest.raises(SandboxFailure):
                async with pool.lend(SPEC):
                    pass

    asyncio.run(run())


SANDBOX, LIMIT = "the rollout ends as sandbox (infrastructure)", "the rollout ends as provider_limit (infrastructure)"
AGAIN = "the episode goes on, after 1 more tries"
TABLE = {  # docs/sandboxes.md has the same
    Fault.REFUSED: (AGAIN, f"refused: {SANDBOX}"),
    Fault.SLOW: (AGAIN, f"slow: {SANDBOX}"),
    Fault.THROTTLED: (AGAIN, f"throttled: {LIMIT}"),
    Fault.LOST: (f"lost: {SANDBOX}", f"lost: {SANDBOX}"),
    Fault.HANGING: (f"hanging: {SANDBOX}", f"hanging: {SANDBOX}"),
    Fault.ORPHANED: ("the episode goes on", "the episode goes on"),
    Fault.CLOCK: (AGAIN, f"clock: {SANDBOX}"),
    Fault.DISK: (AGAIN, f"disk: {SANDBOX}"),
}


def test_what_a_run_does_about_each_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_pool, "PAUSE_S", 0.001)
    monkeypatch.setattr(check_command, "HANG_GRACE_S", -0.9)
    monkeypatch.setattr(check_command, "START_S", 0.1)
    rows = asyncio.run(find_faults(FakeProvider, "any"))
    assert {row.fault: (row.once, row.always) for row in rows} == TABLE


def test_an_unknown_option_and_an_impossible_policy_are_errors():
    with pytest.raises(UnsupportedSpec, match=r"no option 'cache_bg'.*did you mean 'cache_gb'"):
        make_provider("local", {"cache_bg": 3})
    with pytest.raises(ValueError, match="hosts are for egress=allow"):
        NetworkPolicy(egress="all", hosts=("a.b",))


def hostile(*entries: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, target in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return buffer.getvalue()


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@each("entries", [
    [("bin/sh", FILE, "")], [("../bin/sh", FILE, "")], [("/repo/a", FILE, "")], [("repo/../bin/sh", FILE, "")],
    [("repo/x", LINK, "/bin"), ("repo/x/sh", FILE, "")], [("repo", LINK, "/"), ("repo/bin/sh", FILE, "")],
    [("repo/a", HARD, "bin/sh")], [("repo/x", LINK, "/bin/sh"), ("repo/a", HARD, "repo/x")], [("repository/a", FILE, "")],
])  # fmt: skip
def test_a_folder_to_be_graded_cannot_bring_other_files(entries):
    with pytest.raises(SandboxFailure) as found:
        check_tree(hostile(*entries), "repo")
    assert found.value.ending == "crash"


def test_a_folder_to_be_graded_keeps_its_files_and_links():
    data = hostile(("repo", tarfile.DIRTYPE, ""), ("repo/a", FILE, ""), ("repo/b", LINK, "/anywhere"), ("repo/c", HARD, "repo/a"))
    assert check_tree(data, "repo") == data
    with pytest.raises(SandboxFailure, match="damaged"):
        check_tree(b"x" * 2000, "repo")
    assert make_archive({"a": b"b"})
