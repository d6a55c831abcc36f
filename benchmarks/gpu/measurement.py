"""Measurements with a time budget each, run one after the other in a process that is replaced when one fails or takes too long."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GROUPS = {"parity": "Parity", "speed": "Speed"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One row of the table."""

    name: str
    value: str
    note: str = ""
    numbers: dict[str, float] | None = None  # the same, for the JSON file
    ok: bool = True


@dataclass(frozen=True)
class Target:
    """The device that is measured, and the sizes: those of a GPU, or tiny ones that try the benchmark on a CPU."""

    device: str
    tiny: bool


@dataclass(frozen=True)
class Measurement:
    """A function of a module-level name, which a new process can import, and its limit."""

    name: str
    run: Callable[..., list[Reading]]  # takes the target, then ``arguments``
    budget: float  # seconds
    arguments: tuple[Any, ...] = ()


def failed(measurement: Measurement, reason: str) -> Reading:
    return Reading(name=measurement.name, value=f"failed: {reason}", ok=False)


def run_all(measurements: Sequence[Measurement], target: Target, limit: float) -> Iterator[Reading]:
    """Yield the readings of all measurements. One that fails, or for which no time is left of ``limit`` seconds, is a row too."""
    end = time.monotonic() + limit
    worker = _Worker(target)
    for measurement in measurements:
        left = end - time.monotonic()
        if left < min(measurement.budget, 5.0):
            yield failed(measurement, f"no time was left of {limit:.0f} s")
            continue
        started = time.monotonic()
        readings = worker.measure(measurement, min(measurement.budget, left))
        print(f"  {measurement.name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        yield from readings
        if not all(reading.ok for reading in readings):  # an error on a GPU may leave its process without one
            worker.stop()
            worker = _Worker(target)
    worker.stop()


class _Worker:
    """A process that measures. It is started by the first measurement."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.process: Any = None
        self.connection: Any = None

    def measure(self, measurement: Measurement, seconds: float) -> list[Reading]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.target, theirs), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.connection.send(measurement)
            if not self.connection.poll(seconds):
                return [failed(measurement, f"it took longer than {seconds:.0f} s")]
            readings: list[Reading] = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return [failed(measurement, f"its process ended with exit code {self.process.exitcode}")]
        return readings

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()


def _serve(target: Target, connection: Connection) -> None:
    from pydantic_stand_in import install_if_missing

    install_if_missing()
    while True:
        try:
            measurement: Measurement = connection.recv()
        except EOFError:
            return
        try:
            readings = measurement.run(target, *measurement.arguments)
        except Exception as error:  # such as no memory left: a result too
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            readings = [failed(measurement, f"{type(error).__name__}: {reason:.200}")]
        connection.send(readings)


def format_table(heading: str, readings: Sequence[Reading]) -> str:
    """Return the rows as Markdown, to be pasted into docs/log.md."""
    lines = [heading, "", "| | | |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.value} | {each.note} |" for each in readings]
    return "\n".join(lines)


def write_json(path: Path, heading: str, readings: Sequence[Reading]) -> None:
    path.write_text(json.dumps({"machine": heading, "rows": [asdict(each) for each in readings]}, indent=1))
