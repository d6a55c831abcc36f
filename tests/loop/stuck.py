"""Hang a run at the n-th call of a function, which then waits forever or blocks the event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loop.killing import replace_function
from loop.runs import Running, heed_interrupts, overrides, start, tiny_config
from strop.monitoring.waits import Status, read_status

POINTS = {
    "environment": "strop.environments.handle:compute_rewards",
    "engine": "strop.generation.torch.torch_engine:TorchEngine.generate",
    "learner": "strop.learner.client:LearnerClient.step",
}


@dataclass(frozen=True)
class StuckAt:
    """For ``before``: hang at the ``nth`` call of ``point``."""

    point: Literal["environment", "engine", "learner"]
    nth: int
    how: Literal["waits", "blocks", "in a thread"]

    def __call__(self) -> None:
        from strop.monitoring import watchdog

        watchdog.SHUTDOWN_SECONDS = 1.0
        replace_function(POINTS[self.point], self._around)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(function)
        async def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                if self.how == "blocks":
                    time.sleep(3600)
                if self.how == "in a thread":
                    await asyncio.to_thread(time.sleep, 3600)
                await asyncio.sleep(3600)
            return await function(*arguments, **options)

        return wrapped


@dataclass(frozen=True)
class SamplerOff:
    """For ``before``: make the engine report log-probabilities that are ``nats`` too low."""

    nats: float

    def __call__(self) -> None:
        from dataclasses import replace

        from strop.generation.torch.torch_engine import TorchEngine

        generate = TorchEngine.generate

        async def shifted(*arguments: Any, **options: Any) -> Any:
            completion = await generate(*arguments, **options)
            return replace(completion, logprobs=completion.logprobs - self.nats)

        TorchEngine.generate = shifted  # type: ignore[method-assign,assignment]


LIMITS = {
    "watchdog.interval_seconds": 0.1,
    "watchdog.environment_seconds": 0.5,
    "watchdog.generation_seconds": 0.5,
    "watchdog.training_seconds": 0.5,
}


def begun(tiny: Path, folder: Path, before: Callable[[], None] = heed_interrupts, **changes: Any) -> Running:
    settings = {**LIMITS, "grpo.val_period": 0, "checkpointing.metric_name": None, "checkpointing.save_period": 1, **changes}
    return start(["grpo", *overrides(tiny_config(tiny, **settings))], folder, before=before)


def until(folder: Path, seen: Callable[[Status], bool], seconds: float = 60) -> Status:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (status := read_status(folder / "logs")) is not None and seen(status):
            return status
        time.sleep(0.02)
    raise AssertionError(f"not seen in time; the last status is {read_status(folder / 'logs')}")


def end(running: Running, signal_number: int = signal.SIGKILL) -> None:
    os.kill(running.process.pid, signal_number)
    running.process.join(30)
