"""Runs an environment of verifiers (its v1 interface) in an interpreter that has it. It does not import Strop.

``verifiers_process.py`` starts it. Protocol: lines of JSON on standard input and output, requests and answers with an ``id``. A rollout
talks to the policy through verifiers' own client, at the address that its request names. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

MAX_TASKS = 100_000  # that an infinite task set is read to, where no size is given


class VerifiersRunner:
    """One environment, its tasks, and the rollouts in progress."""

    def __init__(self, config: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = config.setdefault("agent", {}) if not config.get("id") else config.get("agent")
        if isinstance(agent, dict):
            agent.setdefault("runtime", {"type": "subprocess"})  # its default is a service
        self.environment: Any = load_environment(resolve_env_config(config))
        self._tasks: list[Any] = []
        self._key_numbers = itertools.count()

    def list_tasks(self, size: int | None) -> list[dict[str, Any]]:
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


async def serve(replies: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}
    runner: VerifiersRunner | None = None
    serving: Any = None

    async def answer(request: dict[str, Any]) -> None:
        nonlocal runner, serving
        try:
            if request["call"] == "load":
                runner = VerifiersRunner(request["config"])
                serving = runner.environment.serving()
                await serving.__aenter__()
                value: Any = None
            elif request["call"] == "tasks":
                assert runner is not None
                value = await asyncio.to_thread(runner.list_tasks, request["size"])
            else:
                assert runner is not None
                value = await runner.run(request["index"], request["base_url"], request["api_key"], request["model"])
            reply = {"id": request["id"], "value": value}
        except asyncio.CancelledError:
            return
        except BaseException as error:  # whatever the environment raises is the answer
            reply = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def forget(number: int, task: asyncio.Task[None]) -> None:
        running.pop(number, None)

    while line := await reader.readline():
        request = json.loads(line)
        if request["call"] == "cancel":
            if (cancelled := running.pop(request["of"], None)) is not None:
                cancelled.cancel()
            continue
        running[request["id"]] = task = asyncio.create_task(answer(request))
        task.add_done_callback(partial(forget, request["id"]))
    for task in running.values():
        task.cancel()
    await asyncio.gather(*running.values(), return_exceptions=True)
    if serving is not None:
        await serving.__aexit__(None, None, None)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    asyncio.run(serve(answers))
