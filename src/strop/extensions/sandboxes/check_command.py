"""``strop sandbox check --provider NAME --image IMAGE``: the conformance suite and the faults, for any provider that a package declares."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from strop.cli.output import USAGE_ERROR
from strop.extensions.sandboxes.base import UnsupportedSpec
from strop.extensions.sandboxes.conformance import CheckResult, check_provider
from strop.extensions.sandboxes.faults import FaultRow, find_faults
from strop.extensions.sandboxes.providers import make_provider
from strop.user_code import UserCodeError


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
