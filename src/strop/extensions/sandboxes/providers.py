"""The provider and the pool of this process, as the section ``sandboxes`` configures them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from strop import plugins
from strop.environments.resources import find_section
from strop.extensions.sandboxes.base import NetworkPolicy, Resources, SandboxProvider, SandboxSpec, UnsupportedSpec, check_spec
from strop.extensions.sandboxes.sandboxes_config import SandboxesConfig
from strop.extensions.sandboxes.warm_pool import WarmPool
from strop.user_code import suggest_names

_pools: dict[tuple[int, int], WarmPool] = {}  # by process and event loop


def make_provider(name: str, options: Mapping[str, Any]) -> SandboxProvider:
    """Make a provider that a package declares: a class with ``options_type``, a dataclass. Raises UnsupportedSpec."""
    kind = plugins.load("sandbox_providers", name)
    known = kind.options_type.__dataclass_fields__
    for option in options:
        if option not in known:
            raise UnsupportedSpec(
                f"sandboxes.options: the provider {name} has no option {option!r}{suggest_names(option, known)}"
            )
    provider: SandboxProvider = kind(kind.options_type(**options))
    return provider


def get_pool() -> WarmPool:
    """Return the pool of this process and event loop."""
    key = (os.getpid(), id(asyncio.get_running_loop()))
    if key not in _pools:
        config = find_section(SandboxesConfig)
        provider = make_provider(config.provider, config.options)
        _pools[key] = WarmPool(provider, max_open=config.max_open, ready=config.ready, start_s=config.start_timeout_s)
    return _pools[key]


def make_spec(image: str, forward: tuple[int, ...] = ()) -> SandboxSpec:
    """Return what a task's sandbox is made from, by the section ``sandboxes``."""
    config = find_section(SandboxesConfig)
    return SandboxSpec(
        image=image,
        resources=Resources(cpus=config.cpus, memory_mb=config.memory_mb, disk_mb=config.disk_mb, processes=config.processes),
        network=NetworkPolicy(egress=config.egress, hosts=config.hosts, forward=forward),
    )


@asynccontextmanager
async def open_sandboxes() -> AsyncIterator[str]:
    """Open the pool of a run, remove what killed runs have left, and close it at the end. Yields where images run."""
    pool = get_pool()
    try:
        check_spec(make_spec(""), pool.provider.name, pool.provider.capabilities)
        left = await pool.provider.remove_left_over()
        note = f"; {left} of runs that were killed are removed" if left else ""
        yield f"images of tasks run in sandboxes of the provider {pool.provider.name}{note}"
    finally:
        _pools.pop((os.getpid(), id(asyncio.get_running_loop())), None)
        await pool.close()
