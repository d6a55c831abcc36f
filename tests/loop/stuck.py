"""Hang a run at the n-th call of a function, which then waits forever or blocks the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from loop.killing import replace_function

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
