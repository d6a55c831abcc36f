"""Objects that tests put into other processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from typing import Any


class Thing:
    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"a thing cannot have the number {number}")
        self.number = number
        self.stopped = False

    def add(self, other: int) -> int:
        return self.number + other

    def process(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def package_version(self) -> str:
        return str(importlib.import_module("strop_test_package").VERSION)

    def fail(self) -> None:
        raise KeyError("no such thing")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, limit: float = 60.0) -> bool:
        deadline = time.monotonic() + limit
        while not self.stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.stopped

    def stop(self) -> None:
        self.stopped = True

    def size(self, value: Any) -> int:
        return len(value)


class AsyncThing:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.waiting = 0

    async def wait(self) -> int:
        self.waiting += 1
        await self.event.wait()
        return self.waiting

    async def open(self) -> None:
        self.event.set()
