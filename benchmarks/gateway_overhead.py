"""What the gateway costs: requests of agents over HTTP against calls of the engine in the same process.

    python benchmarks/gateway_overhead.py FOLDER_OF_A_MODEL

64 episodes of 8 requests each. The agents run in a process of their own, as plain HTTP clients that keep their connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import torch

from strop.base_config import validate_section
from strop.extensions.agents.gateway.agent_session import SessionOptions
from strop.extensions.agents.gateway.gateway import Gateway
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import Completion
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_torch_engine
from strop.learner.model_config import ModelConfig
from strop.runs.models import load_policy
from strop.sampling import Sampling, mix_seed
from strop.types import Rollout, Task, user

EPISODES, REQUESTS, LENGTH = 64, 8, 512
SAMPLING = Sampling(max_new_tokens=16)


class Instant:
    """An engine that answers at once, so that only the gateway is measured."""

    version = 0

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        return Completion(
            tokens=torch.tensor([9]), logprobs=torch.zeros(1), versions=torch.zeros(1, dtype=torch.int32), text="x", stopped=True
        )

    async def close(self) -> None: ...


async def repeat(ask: Callable[[int, int], Awaitable[Any]], episodes: int = EPISODES) -> list[float]:
    """Return the seconds of each request, of all episodes at once."""
    seconds: list[float] = []

    async def run(episode: int) -> None:
        for number in range(REQUESTS):
            begun = time.perf_counter()
            await ask(episode, number)
            seconds.append(time.perf_counter() - begun)

    await asyncio.gather(*(run(episode) for episode in range(episodes)))
    return seconds


def run_clients(address: str, keys: Sequence[str], results: Any) -> None:
    async def run() -> tuple[list[float], float]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=EPISODES)) as http:

            async def ask(episode: int, number: int) -> None:
                body = {"messages": [{"role": "user", "content": f"request {number} of {episode}"}]}
                headers = {"Authorization": f"Bearer {keys[episode]}"}
                async with http.post(f"{address}/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.json()

            await ask(0, 99)  # connect
            begun = time.perf_counter()
            seconds = await repeat(ask, len(keys))
            return seconds, time.perf_counter() - begun

    results.put(asyncio.run(run()))


async def measure_gateway(generator: Any, template: Any, episodes: int = EPISODES) -> tuple[list[float], float]:
    gateway = Gateway(validate_section(GatewayConfig, {"processes": 0}))
    async with AsyncExitStack() as stack:
        endpoints = []
        for episode in range(episodes):
            empty = torch.zeros(0, dtype=torch.int64)
            rollout = Rollout(task=Task(id="t"), sample=episode, seed=episode, messages=(), prompt=empty)
            options = SessionOptions(seed=episode, sample=episode, sampling=SAMPLING, max_turns=1000, max_length=LENGTH)
            opened = await stack.enter_async_context(gateway.open(rollout, options, generator, template))
            endpoints.append(opened.endpoint)
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        keys = [endpoint.api_key for endpoint in endpoints]
        process = context.Process(target=run_clients, args=(endpoints[0].base_url, keys, results))
        process.start()
        found: tuple[list[float], float] = await asyncio.to_thread(results.get)
        process.join()
        return found


async def measure_engine(engine: Any, template: Any) -> tuple[list[float], float]:
    async def ask(episode: int, number: int) -> None:
        prompt = template.encode_prompt([user(f"request {number} of {episode}")])
        await engine.generate(prompt, sampling=SAMPLING, seed=mix_seed(episode, number))

    await ask(0, 99)
    begun = time.perf_counter()
    seconds = await repeat(ask)
    return seconds, time.perf_counter() - begun


def describe(name: str, measured: tuple[list[float], float]) -> None:
    seconds, total = measured
    quantiles = statistics.quantiles(seconds, n=100)
    row = {
        "requests/s": len(seconds) / total,
        "p50 ms": 1000 * quantiles[49],
        "p95 ms": 1000 * quantiles[94],
        "mean ms": 1000 * sum(seconds) / len(seconds),
    }
    print(name, json.dumps({key: round(value, 2) for key, value in row.items()}))


async def main(folder: str) -> None:
    policy = load_policy(
        validate_section(
            ModelConfig,
            {
                "model_name": folder,
                "precision": "float32",
                "device": "cpu",
                "num_threads": 1,
                "tokenizer": {"name": folder},
            },
        )
    )
    config = validate_section(TorchGenerationConfig, {"kv_cache_memory_gb": 0.05})
    engine = make_torch_engine(policy.network, policy.tokenizer, config, length=LENGTH, stop_ids=policy.stop_ids)
    engine.resume(0)
    describe("gateway, an engine that answers at once:", await measure_gateway(Instant(), policy.template))
    describe("the same, one episode at a time:         ", await measure_gateway(Instant(), policy.template, episodes=1))
    for _ in range(2):
        describe("embedded engine, called directly:       ", await measure_engine(engine, policy.template))
        describe("embedded engine, through the gateway:   ", await measure_gateway(engine, policy.template))
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of a model")
    asyncio.run(main(parser.parse_args().model))
