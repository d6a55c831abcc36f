"""Two real vLLM engines as one generator, whose processes are killed in the middle of what they do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.sampling import Sampling
from strop.weight_sync.base import EngineDied
from support.vllm_engines import compute_logprobs, perturb

if TYPE_CHECKING:
    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=100)
PROMPTS = tuple(tuple(range(start, start + 20)) for start in range(40, 240, 10))


@pytest.fixture(scope="module")
def pair(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import make_launch, save_model_folder, serve, served_model

    model = served_model()
    engines = [
        VllmEngine(
            f"engine {number}",
            make_launch(save_model_folder(model, tokenizer, tmp_path_factory.mktemp(f"engine{number}"))),
            tokenizer,
            stop_ids=(tokenizer.eos_token_id,),
        )
        for number in range(2)
    ]
    served = serve(model, tokenizer, engines, async_training=True)
    room.run(served.weights.publish(0))
    yield served
    room.run(served.close())


def publish(room: BackgroundLoop, served: ServedModel) -> None:
    room.run(served.weights.publish(served.weights.version + 1))


def kill(engine: VllmEngine) -> None:
    """The process with its scheduler, as a machine that runs out of memory does; its workers end with it."""
    processes = engine._engine.engine_core.resources.engine_manager.processes
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)


async def ask_all(served: ServedModel, seed: int = 1, sampling: Sampling = SAMPLING) -> list[Any]:
    return await asyncio.gather(*(served.pool.generate(prompt, sampling=sampling, seed=seed) for prompt in PROMPTS))


def assert_answers_are_the_policys(served: ServedModel, completions: list[Any]) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = compute_logprobs(served.model, prompt, completion.tokens, SAMPLING)
        assert (completion.logprobs - expected).abs().max() < 2e-4
        assert completion.versions.unique().tolist() == [served.weights.version]


@pytest.mark.exhaustive
def test_both_engines_get_every_publish(room: BackgroundLoop, pair: ServedModel) -> None:
    perturb(pair.model, 1)
    publish(room, pair)
    for engine in pair.engines:
        completion = room.run(engine.generate(PROMPTS[0], sampling=SAMPLING, seed=1))
        expected = compute_logprobs(pair.model, PROMPTS[0], completion.tokens, SAMPLING)
        assert (completion.logprobs - expected).abs().max() < 2e-4
        assert engine.version == pair.weights.version


@pytest.mark.exhaustive
def test_both_engines_work_and_give_what_one_would(room: BackgroundLoop, pair: ServedModel) -> None:
    before = [engine.counters()["sampled_tokens"] for engine in pair.engines]
    completions = room.run(ask_all(pair))
    assert_answers_are_the_policys(pair, completions)
    worked = [engine.counters()["sampled_tokens"] - count for engine, count in zip(pair.engines, before, strict=True)]
    assert min(worked) > 0.3 * sum(worked)
    alone = room.run(pair.engines[1].generate(PROMPTS[0], sampling=SAMPLING, seed=1))
    assert torch.equal(alone.tokens, completions[0].tokens)


def test_an_engine_killed_while_it_generates_is_started_anew_and_every_request_is_answered(
    room: BackgroundLoop, pair: ServedModel
) -> None:
    expected = room.run(ask_all(pair))
    restarts = pair.pool.restarts

    async def killed() -> list[Any]:
        requests = asyncio.create_task(ask_all(pair))
        await asyncio.sleep(0.3)
        kill(pair.engines[0])
        return await requests

    completions = room.run(killed())
    assert_answers_are_the_policys(pair, completions)
    assert [row.tokens.tolist() for row in completions] == [row.tokens.tolist() for row in expected], "seeds decide, not engines"
    assert pair.pool.restarts == restarts + 1
    publish(room, pair)


@pytest.mark.exhaustive
def test_an_engine_killed_during_a_publish_is_started_anew_and_the_publish_tried_again(
    room: BackgroundLoop, pair: ServedModel
) -> None:
    for place in range(2):
        perturb(pair.model, 10 + place)

        async def killed(engine: Any) -> None:
            load = engine.load

            async def dies(*arguments: Any) -> Any:
                engine.load = load
                kill(engine)
                return await load(*arguments)

            engine.load = dies
            await pair.weights.publish(pair.weights.version + 1)

        room.run(killed(pair.engines[place]))
        assert_answers_are_the_policys(pair, room.run(ask_all(pair)))


@pytest.mark.exhaustive
def test_an_engine_that_keeps_dying_ends_the_run_with_what_to_look_at(
    room: BackgroundLoop, pair: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(engine: Any) -> None:
        raise EngineDied(f"{engine.name} did not start: it was told not to")

    with monkeypatch.context() as patched:
        patched.setattr(pair.pool, "restart_engine", dies)

        async def killed() -> list[Any]:
            requests = [asyncio.create_task(pair.pool.generate(prompt, sampling=SAMPLING, seed=1)) for prompt in PROMPTS]
            await asyncio.sleep(0.3)
            kill(pair.engines[1])
            return await asyncio.gather(*requests, return_exceptions=True)

        ended = room.run(killed())
    failed = [found for found in ended if isinstance(found, EngineDied)]
    assert failed and all("max_restarts" in str(error) for error in failed)
    assert len(failed) < len(ended), "the other engine went on"
    publish(room, pair)
    assert_answers_are_the_policys(pair, room.run(ask_all(pair)))
