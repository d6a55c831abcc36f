"""``strop sandbox check --provider NAME --image IMAGE``: the conformance suite, and faults, for any provider that a package declares.

FaultyProvider(provider, Fault.LOST, after=2)       the sandbox vanishes at its third command
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from strop.cli.output import USAGE_ERROR
from strop.extensions.sandboxes.base import (
    CommandResult,
    FailureCause,
    Health,
    OnOutput,
    Sandbox,
    SandboxCommand,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
    UnsupportedSpec,
)
from strop.extensions.sandboxes.conformance import CheckResult, check_provider
from strop.extensions.sandboxes.providers import make_provider
from strop.extensions.sandboxes.warm_pool import WarmPool
from strop.user_code import UserCodeError


class Fault(StrEnum):
    """What goes wrong."""

    REFUSED = "refused at creation"
    SLOW = "slow pull"
    THROTTLED = "throttled"
    LOST = "dies in mid-episode"
    HANGING = "hangs"
    ORPHANED = "orphaned by a killed run"
    CLOCK = "wrong clock"
    DISK = "full disk of the provider"


_AT_CREATION: dict[Fault, tuple[FailureCause, str]] = {
    Fault.REFUSED: (FailureCause.REFUSED, "injected: no capacity"),
    Fault.THROTTLED: (FailureCause.THROTTLED, "injected: 429"),
    Fault.DISK: (FailureCause.DISK, "injected: no space left on device"),
}


class FaultyProvider:
    """A provider with one fault, in its first ``times`` sandboxes, or in all."""

    def __init__(
        self, inner: SandboxProvider, fault: Fault, *, times: int | None = None, after: int = 0, delay_s: float = 3600.0
    ) -> None:
        self.inner, self.fault, self.after, self.delay_s = inner, fault, after, delay_s
        self.name, self.capabilities = inner.name, inner.capabilities
        self._left = float("inf") if times is None else times

    async def create(self, spec: SandboxSpec) -> Sandbox:
        faulty, self._left = self._left > 0, self._left - 1
        if not faulty:
            return await self.inner.create(spec)
        if self.fault in _AT_CREATION:
            raise SandboxFailure(*_AT_CREATION[self.fault])
        if self.fault == Fault.SLOW:
            await asyncio.sleep(self.delay_s)
        return _FaultySandbox(await self.inner.create(spec), self)

    async def remove_snapshot(self, image: str) -> None:
        await self.inner.remove_snapshot(image)

    async def remove_left_over(self) -> int:
        return await self.inner.remove_left_over()

    async def close(self) -> None:
        await self.inner.close()


class _FaultySandbox:
    """A sandbox whose commands or health show the fault."""

    def __init__(self, inner: Sandbox, provider: FaultyProvider) -> None:
        self.inner, self.provider, self.id, self.used = inner, provider, inner.id, 0

    async def _pass(self) -> None:
        self.used += 1
        if self.used <= self.provider.after:
            return
        if self.provider.fault == Fault.LOST:
            await self.inner.destroy()
        if self.provider.fault == Fault.HANGING:
            await asyncio.sleep(self.provider.delay_s)

    async def exec(self, command: SandboxCommand, on_output: OnOutput | None = None) -> CommandResult:
        try:
            async with asyncio.timeout(command.wall_s + HANG_GRACE_S):
                await self._pass()
        except TimeoutError as error:
            await self.inner.destroy()
            raise SandboxFailure(FailureCause.HANGING, f"injected: no answer to {command.argv[0]}") from error
        return await self.inner.exec(command, on_output)

    async def put_tree(self, path: str, archive: bytes) -> None:
        await self._pass()
        await self.inner.put_tree(path, archive)

    async def get_tree(self, path: str, limit_mb: int = 64) -> bytes:
        await self._pass()
        return await self.inner.get_tree(path, limit_mb)

    async def snapshot(self) -> str:
        await self._pass()
        return await self.inner.snapshot()

    async def health(self) -> Health:
        found = await self.inner.health()
        return Health(found.answers, 86_400.0) if self.provider.fault == Fault.CLOCK else found

    async def destroy(self) -> None:
        if self.provider.fault != Fault.ORPHANED:
            await self.inner.destroy()


HANG_GRACE_S, START_S = 1.0, 2.0


@dataclass(frozen=True)
class FaultRow:
    """What a run does about a fault: a row of ``strop sandbox check --faults``."""

    fault: Fault
    once: str  # if the next sandbox is well
    always: str


async def find_faults(
    make_provider: Callable[[], SandboxProvider], image: str, report: Callable[[FaultRow], object] = lambda row: None
) -> list[FaultRow]:
    """Inject each fault into a provider, in one sandbox and in every one, and return what an episode gets."""
    rows = []
    for fault in Fault:
        once = await _observe(make_provider(), fault, image, times=1)
        rows.append(FaultRow(fault, once, await _observe(make_provider(), fault, image, times=None)))
        report(rows[-1])
    return rows


async def _observe(inner: SandboxProvider, fault: Fault, image: str, times: int | None) -> str:
    provider = FaultyProvider(inner, fault, times=times, after=1)
    pool = WarmPool(provider, max_open=2, start_s=START_S, tries=2)
    try:
        return await _episode(pool, image)
    except SandboxFailure as failure:
        return f"{failure.cause}: the rollout ends as {failure.cause.ending} ({failure.cause.ending.who})"
    finally:
        await pool.close()
        left = await inner.remove_left_over()
        if fault == Fault.ORPHANED and left:
            raise AssertionError(f"{left} sandboxes outlived the provider that made them")


async def _episode(pool: WarmPool, image: str) -> str:
    async with pool.lend(SandboxSpec(image=image)) as sandbox:
        commands: list[Awaitable[CommandResult]] = [sandbox.exec(SandboxCommand(argv=("true",), wall_s=1.0)) for _ in range(2)]
        for command in commands:
            await command
    return f"the episode goes on, after {pool.retried} more tries" if pool.retried else "the episode goes on"


async def check_named(name: str, image: str, options: Sequence[str], faults: bool) -> int:
    """Print how each check goes, and what a run does about each fault. Return the exit code. Raises SandboxError."""
    if not image:
        print("error: --provider needs --image, an image that the provider can get", file=sys.stderr)
        return USAGE_ERROR
    values = dict(_read_option(option) for option in options)
    try:
        provider = make_provider(name, values)
    except (UnsupportedSpec, UserCodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(f"sandboxes.provider={name}{f' (tested {provider.capabilities.tests})' if provider.capabilities.tests else ''}")
    try:
        results = await check_provider(provider, image, _print_result)
        if faults:
            print("what a run does about a fault in one sandbox | in all")
            await find_faults(lambda: make_provider(name, values), image, _print_fault)
    finally:
        await provider.close()
    broken = [result.name for result in results if result.error]
    if broken:
        print(f"error: the provider does not keep the protocol: {'; '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _read_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _print_result(result: CheckResult) -> None:
    answer = "left out" if result.error is None else "NO" if result.error else "yes"
    print(f"  {result.name:<58}{answer:<9}{result.error or f'{result.seconds:.2f} s'}", flush=True)


def _print_fault(row: FaultRow) -> None:
    print(f"  {row.fault:<28}{row.once} | {row.always}", flush=True)
