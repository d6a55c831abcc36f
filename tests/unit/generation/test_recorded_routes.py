"""The embedded engine says the experts of every token it read: those that the model chooses for the same tokens, cached or not."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from strop.generation.torch.model_runner import RecomputeRunner
from strop.models.network import Network
from strop.models.routing.recorded_experts import RecordedRoutes
from strop.models.routing.router_config import NO_ROUTE, ROUTES
from strop.sampling import Sampling
from support.each import each
from support.models import build
from support.torch_engine import Request, generate_all, make_engine, make_runner, run_requests

PROMPT = [5, 40, 200, 31, 7]


def make_network(family: str) -> Network:
    network = Network(build(family))
    network.enable_router_replay()
    return network


def chosen(network: Network, tokens: list[int]) -> Tensor:
    """The experts that the model chooses in one pass of its own attention."""
    assert network.routed is not None
    routes = RecordedRoutes(network.routed)
    network.use_native_attention()
    with torch.no_grad():
        network.decoder(input_ids=torch.tensor([tokens]), use_cache=False, routes=routes)
    network.use_plan_attention()
    return routes.stack()


def check(network: Network, requests: list[Request], completions: list[Any]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        read = [*request.prompt, *completion.tokens.tolist()][:-1]
        expected = chosen(network, read)
        assert completion.columns[ROUTES].dtype == torch.int8
        assert torch.equal(completion.columns[ROUTES].sort(-1).values, expected.sort(-1).values)


def many_requests() -> list[Request]:
    prompts = [PROMPT, PROMPT, [9, 8, 7], PROMPT[:3], [*PROMPT, 60, 61], [9, 8, 7], [250]]
    return [Request(prompt, Sampling(max_new_tokens=2 + 3 * place % 7), seed=place) for place, prompt in enumerate(prompts)]


@each("family", ("qwen3_moe", "mixtral"))
def test_experts_of_prompts_and_completions_are_those_of_the_model(family: str) -> None:
    """More requests than slots: slots move, prompts are shared and found in the cache."""
    network = make_network(family)
    requests = many_requests()
    check(network, requests, run_requests(make_engine(make_runner(network, slots=3)), requests))


def test_a_model_without_a_cache_says_them_too() -> None:
    network = make_network("deepseek_v3")
    engine = make_engine(RecomputeRunner(network, max_slots=3, length=48))
    completions = run_requests(engine, many_requests())
    check(network, many_requests(), completions)
    assert bool((completions[0].columns[ROUTES][:, 0] == NO_ROUTE).all()), "its first layer has no experts"


def test_a_conversation_keeps_the_experts_of_its_earlier_turns() -> None:
    network = make_network("qwen3_moe")

    async def converse() -> None:
        engine = make_engine(make_runner(network, slots=2))
        first = Request(PROMPT, Sampling(max_new_tokens=4), session="a")
        (answer,) = await generate_all(engine, [first])
        second = Request([*PROMPT, *answer.tokens.tolist(), 17, 18, 19], Sampling(max_new_tokens=3), session="a")
        read = engine.counters.prompt_tokens
        (completion,) = await generate_all(engine, [second])
        await engine.close()
        assert engine.counters.prompt_tokens - read < len(second.prompt), "its beginning is cached"
        check(network, [second], [completion])
        known = answer.columns[ROUTES]
        assert torch.equal(completion.columns[ROUTES][: len(known)], known)

    asyncio.run(converse())


def test_nothing_is_recorded_without_router_replay() -> None:
    network = Network(build("qwen3_moe"))
    runner = make_runner(network)
    (completion,) = run_requests(make_engine(runner), [Request(PROMPT)])
    assert not completion.columns and not runner.cache.columns
