"""Sandboxes from an image on this machine: how long making one and a command in it take, alone and with many open at a time.

python benchmarks/sandboxes.py --open 256

The image is made on the spot: a shell and a few programs of this machine. Numbers of other images differ by their first pull only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from strop.extensions.sandboxes.base import Resources, Sandbox, SandboxCommand, SandboxSpec
from strop.extensions.sandboxes.local.bubblewrap import find_parents
from strop.extensions.sandboxes.local.local_provider import LocalOptions, LocalProvider
from support.oci_images import programs_layer, write_layout

TRUE = SandboxCommand(argv=("true",))


def quantiles(seconds: list[float]) -> dict[str, float]:
    found = sorted(seconds)
    return {
        name: round(1000 * found[min(len(found) - 1, int(share * len(found)))], 1)
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


async def measure(folder: str, count: int) -> dict[str, object]:
    provider = LocalProvider(LocalOptions(folder=f"{folder}/cache"))
    spec = SandboxSpec(
        image=write_layout(Path(folder, "image"), [programs_layer()]), resources=Resources(memory_mb=64, disk_mb=64)
    )
    began = time.perf_counter()
    await (await provider.create(spec)).destroy()
    first, made, ran, alone, gone = time.perf_counter() - began, list[float](), list[float](), list[float](), list[float]()

    async def timed(work: object, into: list[float]) -> object:
        began = time.perf_counter()
        found = await work  # type: ignore[misc]
        into.append(time.perf_counter() - began)
        return found

    for _ in range(20):  # one at a time
        sandbox = await provider.create(spec)
        await timed(sandbox.exec(TRUE), alone)
        await sandbox.destroy()
    one = list[float]()
    for _ in range(20):
        sandbox = await timed(provider.create(spec), one)
        await sandbox.destroy()  # type: ignore[attr-defined]
    began = time.perf_counter()
    sandboxes: list[Sandbox] = await asyncio.gather(*(timed(provider.create(spec), made) for _ in range(count)))  # type: ignore[arg-type]
    all_made = time.perf_counter() - began
    for _ in range(4):
        for at in range(0, count, 4):  # four at a time, on any number that are open
            await asyncio.gather(*(timed(each.exec(TRUE), ran) for each in sandboxes[at : at + 4]))
    memory = measure_memory()
    began = time.perf_counter()
    await asyncio.gather(*(each.exec(TRUE) for each in sandboxes))
    together = time.perf_counter() - began
    began = time.perf_counter()
    await asyncio.gather(*(timed(each.destroy(), gone) for each in sandboxes))
    ended = time.perf_counter() - began
    await provider.close()
    parents = find_parents()
    left = [str(path) for path in parents.memory.glob("strop_sandbox_*")] if parents else []
    assert not left, left
    return {
        "first, with unpacking (ms)": round(1000 * first, 1),
        "create alone (ms)": quantiles(one),
        "exec alone (ms)": quantiles(alone),
        f"create, {count} asked for at once (ms)": quantiles(made),
        f"all {count} made (s)": round(all_made, 2),
        "made per second": round(count / all_made, 1),
        f"exec with {count} open, 4 at a time (ms)": quantiles(ran),
        f"a command in each of {count} at once, all (s)": round(together, 2),
        "memory of one, idle (MB)": round(memory / count / 1e6, 2),
        f"all {count} destroyed (s)": round(ended, 2),
        "peak of this process (MB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000),
    }


def measure_memory() -> int:
    """Bytes that the processes of all sandboxes hold together."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/smaps_rollup"):
        try:
            line = (path.parent / "cmdline").read_bytes()
            if b"sandbox_init.pyc" in line or b"bwrap" in line:
                total += next(int(row.split()[1]) << 10 for row in path.read_text().splitlines() if row.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=int, default=256, help="sandboxes at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(folder, options.open)), indent=1))


if __name__ == "__main__":
    main()
