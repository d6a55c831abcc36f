"""How long threads of OpenMP wait awake, in the processes that Strop starts, and work in separate threads.

Torch's operators and the compiled kernels meet at a barrier after every parallel loop. By default threads of libgomp spin there for
300,000 rounds before they sleep. If another process takes the core of one of them (another terminal, container, service or job of
a CI), the others spin until the kernel switches, at every barrier: a step takes thirty to fifty times as long. A short spin
costs up to a tenth of a step on cores that are not shared.

libgomp reads the variables once, when it is loaded: before that they have to be in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

SPIN_COUNT = "1000"  # rounds
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # a user who sets either has chosen


def openmp_variables() -> dict[str, str]:
    """Return the variables for a process of Strop: what the environment of this process says, or a short spin."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ} or {VARIABLES[0]: SPIN_COUNT}


async def call_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of torch in a thread that ends with it.

    A thread that stays would keep OpenMP threads of its own. libgomp then counts more threads than cores, and those of this thread sleep at
    each barrier.
    """
    import asyncio  # here, since every command imports this module
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(max_workers=1)
    called = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    pool.shutdown(wait=False)
    return await called
