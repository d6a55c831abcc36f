"""Runs an environment of verifiers (its v1 interface) in an interpreter that has it. It does not import Strop.

``runner.py`` calls it. A rollout talks to the policy through verifiers' own client, at the address that its request names.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable
from typing import Any

MAX_TASKS = 100_000  # that an infinite task set is read to, where no size is given


class VerifiersRunner:
    """One environment, its tasks, and the rollouts in progress."""

    environment: Any
    _serving: Any = None

    def __init__(self) -> None:
        self._tasks: list[Any] = []
        self._key_numbers = itertools.count()

    async def load(self, config: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = config.setdefault("agent", {}) if not config.get("id") else config.get("agent")
        if isinstance(agent, dict):
            agent.setdefault("runtime", {"type": "subprocess"})  # its default is a service
        self.environment = load_environment(resolve_env_config(config))
        self._serving = self.environment.serving()
        await self._serving.__aenter__()

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.__aexit__(None, None, None)

    async def tasks(self, size: int | None) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._list_tasks, size)

    def _list_tasks(self, size: int | None) -> list[dict[str, Any]]:
        taskset = self.environment.taskset
        tasks: Iterable[Any] = taskset if taskset.bounded and size is None else taskset.take(size or MAX_TASKS)
        self._tasks = list(tasks)
        return [{"key": task.key, "question": task.data.prompt_text} for task in self._tasks]

    async def run(self, index: int, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Run one episode and return its reward. Raises RuntimeError for an episode that verifiers calls failed."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        variable = f"STROP_EPISODE_API_KEY_{next(self._key_numbers)}"
        os.environ[variable] = api_key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = ModelContext(client=client, model=model, sampling=SamplingConfig())
            episode = await self.environment.run_episode(self._tasks[index], context)
        finally:
            del os.environ[variable]
        return read_episode(episode)


def read_episode(episode: Any) -> dict[str, Any]:
    traces = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)] or episode.traces
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not traces:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode has no trace")
    metrics: dict[str, float] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[f"{name}"] = float(value)
        for name, reward in trace.rewards.items():
            if reward is not None:
                metrics[f"reward/{name}"] = float(getattr(reward, "value", reward))
    return {"reward": sum(trace.reward for trace in traces) / len(traces), "metrics": metrics}
