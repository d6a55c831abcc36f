"""Sandboxed jobs from many concurrent rollouts: throughput, latency, warm against cold workers, and that nothing is left.

python benchmarks/sandbox.py --jobs 5000 --rollouts 64
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from strop.base_config import validate_section
from strop.extensions.code.sandbox.base import Program
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool
from strop.extensions.sandboxes.local import bubblewrap

SOURCE = """
import sys
def solve(n):
    seen = {}
    for i in range(n):
        seen[i * i % 97] = i
    return sum(seen.values())
print(solve(int(sys.stdin.read())))
"""


def expected(n: int) -> str:
    return f"{sum({i * i % 97: i for i in range(n)}.values())}\n"


async def measure(jobs: int, rollouts: int, workers: int | None) -> dict[str, float]:
    """Run ``jobs`` programs from ``rollouts`` coroutines, check each answer, and return what was measured."""
    pool = SandboxPool(validate_section(SandboxConfig, {"workers": workers}))
    waited: list[float] = []
    worked: list[float] = []
    lags: list[float] = []
    numbers = iter(range(jobs))

    async def rollout() -> None:
        for number in numbers:
            began = time.perf_counter()
            result = await pool.run(Program(source=SOURCE, stdin=str(number % 1000)))
            waited.append(time.perf_counter() - began)
            worked.append(result.wall_s)
            assert result.stdout == expected(number % 1000), result

    async def watch_loop() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - began - 0.01)

    await asyncio.gather(*(pool.run(Program(source="")) for _ in range(pool.size)))
    watch = asyncio.ensure_future(watch_loop())
    began = time.perf_counter()
    await asyncio.gather(*(rollout() for _ in range(rollouts)))
    seconds = time.perf_counter() - began
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    await pool.close()
    return {
        "jobs": jobs,
        "workers": pool.size,
        "jobs/s": jobs / seconds,
        **{f"latency {name} (ms)": 1000 * quantile(waited, share) for name, share in QUANTILES.items()},
        **{f"job itself {name} (ms)": 1000 * quantile(worked, share) for name, share in QUANTILES.items()},
        "event loop lag p99 (ms)": 1000 * quantile(lags, 0.99),
    }


async def measure_cold(jobs: int) -> float:
    """Milliseconds of a job in a worker that is started for it."""
    began = time.perf_counter()
    for _ in range(jobs):
        pool = SandboxPool(validate_section(SandboxConfig, {"workers": 1}))
        await pool.run(Program(source=""))
        await pool.close()
    return 1000 * (time.perf_counter() - began) / jobs


QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def list_what_could_leak() -> dict[str, set[str]]:
    """Processes below this one, its open files, its control groups, its mounts, its temporary files."""
    gc.collect()
    parents = bubblewrap.find_parents()
    groups = {
        path.name for folder in ((parents.memory, parents.pids) if parents else ()) for path in folder.glob("strop_sandbox_*")
    }
    children = {child for task in Path("/proc/self/task").glob("*/children") for child in task.read_text().split()}
    return {
        "processes": children,
        "open files": set(os.listdir("/proc/self/fd")),
        "control groups": groups,
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "temporary files": {path.name for path in Path("/tmp").glob("strop_sandbox_*")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--workers", type=int, help="default: the number of processors")
    parser.add_argument("--cold", type=int, default=20, help="jobs that each start a worker of their own")
    options = parser.parse_args()
    asyncio.run(measure(8, 2, 1))  # what is opened once, such as files of the event loop's policy
    before = list_what_could_leak()
    numbers = asyncio.run(measure(options.jobs, options.rollouts, options.workers))
    numbers["cold worker (ms)"] = asyncio.run(measure_cold(options.cold))
    after = list_what_could_leak()
    leaked = {name: sorted(after[name] - before[name]) for name in after if after[name] - before[name]}
    assert not leaked, f"left behind: {leaked}"
    print(json.dumps({name: round(value, 2) for name, value in numbers.items()}, indent=1))
    print("nothing is left: no process, open file, control group, mount or temporary file")


if __name__ == "__main__":
    main()
