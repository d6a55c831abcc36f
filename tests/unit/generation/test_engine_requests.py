"""Whatever the embedded engine is asked, that request is answered or fails, and all others are served."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from loop.tiny import tiny_tokenizer
from strop.generation.base import InvalidRequest, RequestTooLong
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.network import Network
from strop.sampling import Sampling
from support import torch_engine as support
from support.each import each
from support.models import build
from support.torch_engine import make_engine

PROMPT = [5, 40, 200, 31, 7]
GOOD = Sampling(max_new_tokens=4)
HUGE = 10**400
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(params=["slots", "pages"])
def engine(request: Any) -> TorchEngine:
    network = Network(build("llama"))
    runner: Any = support.make_runner(network) if request.param == "slots" else support.make_paged_runner(network)
    return make_engine(runner, tiny_tokenizer())


async def serves(engine: TorchEngine) -> list[int]:
    found = await asyncio.wait_for(engine.generate(PROMPT, sampling=GOOD, seed=1), 20)
    assert engine.failure is None and len(found.tokens) == 4
    return [int(token) for token in found.tokens]


def vocabulary(engine: TorchEngine) -> int:
    return int(engine.runner.network.model.get_input_embeddings().weight.shape[0])


TOKENS = (True, False, -1, -(2**63), 2**31, 2**63, HUGE, 1.0, NAN, "5", "\ud800", None, [5], (5,), {}, b"5", torch.tensor(5))


def test_a_prompt_holds_token_ids_of_the_vocabulary_alone(engine: TorchEngine) -> None:
    async def work() -> None:
        wanted, size = await serves(engine), vocabulary(engine)
        for token in (*TOKENS, size, size + 1):
            for prompt in ([token], [*PROMPT, token], [token, *PROMPT]):
                with pytest.raises(InvalidRequest, match="token id"):
                    await engine.generate(prompt, sampling=GOOD, seed=1)  # type: ignore[arg-type]
        for whole in (None, "text", b"bytes", 5, [], (), {}, {5: 1}, iter(PROMPT)):
            with pytest.raises(InvalidRequest, match="prompt"):
                await engine.generate(whole, sampling=GOOD, seed=1)  # type: ignore[arg-type]
        assert len((await engine.generate([size - 1], sampling=GOOD, seed=1)).tokens) == 4
        assert await serves(engine) == wanted
        await engine.close()

    asyncio.run(work())


def test_seeds_sessions_options_and_lengths_are_checked_before_they_are_used(engine: TorchEngine) -> None:
    async def work() -> None:
        wanted = await serves(engine)
        for odd in (
            {"seed": "1"},
            {"seed": 1.5},
            {"seed": None},
            {"seed": True},
            {"session": 5},
            {"session": []},
            {"sampling": None},
        ):
            with pytest.raises(InvalidRequest):
                await engine.generate(PROMPT, **{"sampling": GOOD, "seed": 1, **odd})  # type: ignore[arg-type]
        with pytest.raises(RequestTooLong, match="max_total_sequence_length"):
            await engine.generate([5] * 48, sampling=GOOD, seed=1)
        for seed in (-1, 2**64, -HUGE, HUGE):
            assert len((await engine.generate(PROMPT, sampling=GOOD, seed=seed)).tokens) == 4
        assert await serves(engine) == wanted
        await engine.close()

    asyncio.run(work())


@each("options", [
    *({"temperature": value} for value in (NAN, INFINITE, -INFINITE, -1.0, 1e-300, 5e-324, 1e-40, 1e300, HUGE, True, "1", None)),
    *({"top_p": value} for value in (NAN, 0.0, 1e-300, 1.5, INFINITE, True, "1", None)),
    *({"min_p": value} for value in (NAN, -0.1, 1.5, INFINITE, True, "0")),
    *({"top_k": value} for value in (0, -1, 1.5, NAN, True, "5", HUGE, 2**63)),
    *({"max_new_tokens": value} for value in (0, -1, 1.5, NAN, True, "5", None, HUGE)),
    *({"stop_strings": value} for value in (("\ud800",), ("ok", "a\udfff"), ("",), (5,), (None,), ("x",) * 2000, ("x" * 100_000,))),
    *({"stop_token_ids": value} for value in ((True,), (-1,), (1.5,), ("5",), (HUGE,))),
], ids=str)  # fmt: skip
def test_sampling_options_that_define_no_distribution_are_refused_when_they_are_made(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|surrogate|the limit is"):
        Sampling(**options)


@each("options", [
    {"temperature": 1e-6}, {"temperature": 1e6}, {"top_p": 1e-6}, {"min_p": 1e-300}, {"min_p": 1.0, "top_k": 2**31 - 1}, {"temperature": 2},
    {"stop_strings": ("\U0001f600", "x" * 60_000)}, {"stop_token_ids": (0, 2**31 - 1)}, {"max_new_tokens": 2**31 - 1},
], ids=str)  # fmt: skip
def test_sampling_options_at_their_bounds_are_sampled_with(options: dict[str, Any]) -> None:
    async def work() -> None:
        engine = make_engine(support.make_runner(Network(build("llama"))), tiny_tokenizer())
        found = await engine.generate(PROMPT, sampling=replace(Sampling(max_new_tokens=4), **options), seed=1)
        assert len(found.tokens) and torch.isfinite(found.logprobs).all() and engine.failure is None
        await engine.close()

    asyncio.run(work())


def test_a_fuzz_of_requests_beside_good_ones_ends_none_of_them(engine: TorchEngine) -> None:
    """Seeded: arguments of every kind, several at once, with good requests among them."""
    draw = random.Random(34)

    def make() -> dict[str, Any]:
        prompt: Any = [draw.randrange(300) for _ in range(draw.choice((0, 1, 5, 40, 60)))]
        if draw.random() < 0.3:
            prompt.append(draw.choice(TOKENS))
        options: dict[str, Any] = {
            "temperature": draw.choice((0, 0.0, 1e-300, 1e-6, 0.7, 1.0, 1e6, NAN, HUGE)),
            "top_k": draw.choice((None, None, 1, 5, 2**31 - 1, 0, True)),
            "top_p": draw.choice((1.0, 1.0, 0.5, 1e-6, 1e-300, 0)),
            "min_p": draw.choice((0.0, 0.0, 1.0, 1e-300, -1)),
            "max_new_tokens": draw.choice((1, 3, 2**31 - 1, 0)),
            "stop_strings": draw.choice(((), ("7",), ("\ud800",), ("",), ("ab" * 40, "\U0001f600"))),
            "stop_token_ids": draw.choice(((), (5,), (-1,), (10**9,))),
            "entropy": draw.random() < 0.5,
        }
        keep = draw.sample(sorted(options), draw.randrange(3))
        return {
            "prompt": draw.choice((prompt, prompt, prompt, tuple(prompt), None, "text")),
            "options": {name: options[name] for name in keep},
            "seed": draw.choice((0, 1, -1, 2**64, HUGE, "seed")),
            "session": draw.choice(("", "", "", "one", "two", 5)),
        }  # fmt: skip

    async def ask(asked: dict[str, Any]) -> int:
        try:
            sampling = replace(GOOD, **asked["options"])
            found = await engine.generate(asked["prompt"], sampling=sampling, seed=asked["seed"], session=asked["session"])
        except ValueError:
            return 0
        assert torch.isfinite(found.logprobs).all()
        return 1

    async def work() -> None:
        wanted, answered = await serves(engine), 0
        for _ in range(12):
            odd = [ask(make()) for _ in range(16)]
            found = await asyncio.wait_for(asyncio.gather(*odd, serves(engine)), 60)
            assert found[-1] == wanted
            answered += sum(found[:-1])
        assert answered > 20
        await engine.close()

    asyncio.run(work())


def test_an_exception_while_one_request_is_served_fails_that_request_alone(engine: TorchEngine) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int], **_: Any) -> str:
            if self.broken:
                raise OverflowError("no text for these")
            return ""

        broken = True

    tokenizer = engine.tokenizer = Tokenizer()

    def listener(token: int, logprob: float) -> None:
        raise KeyError("the queue is gone")

    async def work() -> None:
        tokenizer.broken = False
        wanted = await serves(engine)
        with pytest.raises(KeyError, match="the queue is gone"):
            await engine.generate(PROMPT, sampling=GOOD, seed=1, on_token=listener)
        stopping = replace(GOOD, stop_strings=("stop",))
        tokenizer.broken = True
        failing = [engine.generate(PROMPT, sampling=stopping, seed=seed) for seed in range(3)]
        assert {type(error) for error in await asyncio.gather(*failing, return_exceptions=True)} == {OverflowError}
        tokenizer.broken = False
        assert await serves(engine) == wanted and not engine.load
        await engine.close()

    asyncio.run(work())


@each("sampling", [
    Sampling(max_new_tokens=4), Sampling(max_new_tokens=4, temperature=0.0), Sampling(max_new_tokens=4, temperature=0.7, top_k=5),
    Sampling(max_new_tokens=4, top_p=0.9, entropy=True), Sampling(max_new_tokens=4, min_p=0.1),
], ids=str)  # fmt: skip
@each("value", [NAN, INFINITE, -INFINITE])
def test_a_prompt_that_makes_the_model_overflow_fails_alone_beside_others(sampling: Sampling, value: float) -> None:
    """Token 9 has an embedding that is not finite, as activations that overflow would be."""
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = value

    async def work(engine: TorchEngine) -> None:
        wanted = await serves(engine)
        asked = [engine.generate([*PROMPT, 9], sampling=sampling, seed=seed) for seed in range(3)]
        *failed, good = await asyncio.gather(*asked, serves(engine), return_exceptions=True)
        assert {type(error) for error in failed} == {FloatingPointError} and "not finite" in str(failed[0])
        assert good == wanted == await serves(engine)
        await engine.close()

    for runner in (support.make_runner(Network(model)), support.make_paged_runner(Network(model))):
        asyncio.run(work(make_engine(runner, tiny_tokenizer())))


def test_a_request_that_has_the_whole_cache_and_finds_no_room_fails_alone() -> None:
    async def work() -> None:
        engine = make_engine(support.make_paged_runner(Network(build("llama"))), tiny_tokenizer())
        reserve = engine.runner.reserve
        engine.runner.reserve = lambda prompt: len(prompt.tokens) < 20 and reserve(prompt)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no room for a sequence of 30 tokens"):
            await asyncio.wait_for(engine.generate([5] * 30, sampling=GOOD, seed=1), 10)
        await serves(engine)
        await engine.close()

    asyncio.run(work())
