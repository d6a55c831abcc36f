"""The embedded engine with weights of its own: what it is sent, it computes with, and nothing else goes unnoticed."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.generation.base import Completion
from strop.generation.pool import EnginePool
from strop.generation.torch.standalone import StandaloneTorchEngine
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.adapters import lora_layers
from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits
from strop.weight_sync.base import CanarySample, EngineDied
from strop.weight_sync.exporter import LocalAdapterSource, make_local_exporter
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.verification import Canary, VerificationFailed
from strop.weight_sync.weight_sync_config import WeightSyncConfig
from support import every_family
from support.lora import with_random_adapters
from support.models import build
from support.torch_engine import make_runner

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=12, temperature=0.9)
PROMPTS = [[5, 40, 200, 31, 7, 7, 90, 301], [17, 300], [5, 40, 200, 31, 7, 7, 90, 301]]
CANARY = (tuple(range(10, 40)), tuple(range(200, 170, -1)))


class NoText:
    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return ""


def engine_on(model: Any, **options: Any) -> TorchEngine:
    runner = make_runner(Network(model, packed=True, precision=options.pop("precision", torch.float32)), **options)
    return TorchEngine(runner, NoText(), stop_ids=(2,))


def apart(make: Callable[[], Any], dtype: torch.dtype = torch.float32, **options: Any) -> StandaloneTorchEngine:
    return StandaloneTorchEngine("engine 0", lambda: engine_on(make(), **options), dtype)


def moved(model: Any, seed: int, size: float = 0.05) -> None:
    """Another policy."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def scored_by(model: Any) -> Callable[[Sequence[Sequence[int]], Sequence[CanarySample]], Awaitable[list[Tensor]]]:
    async def score(prompts: Sequence[Sequence[int]], answers: Sequence[CanarySample]) -> list[Tensor]:
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            row = torch.cat([torch.tensor(list(prompt)), answer.tokens])
            with torch.no_grad():
                logits = model(row[None]).logits[0, len(prompt) - 1 : -1]
            logprobs = filtered_logits(logits, SAMPLING, answer.tokens).log_softmax(-1)
            found.append(logprobs.gather(-1, answer.tokens[:, None])[:, 0])
        return found

    return score


@dataclass
class Pair:
    learner: Any
    engine: StandaloneTorchEngine
    weights: WeightPublisher

    async def sample(self, seed: int = 0) -> list[Completion]:
        return await sampled(self.engine, seed)


async def sampled(engine: Any, seed: int = 0) -> list[Completion]:
    requests = (engine.generate(prompt, sampling=SAMPLING, seed=seed + place) for place, prompt in enumerate(PROMPTS))
    return list(await asyncio.gather(*requests))


def pair(
    learner: Any,
    engine: StandaloneTorchEngine,
    *,
    weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    canary: bool = True,
    adapters: Any = None,
    **options: Any,
) -> Pair:
    exporter = make_local_exporter(
        weights or (lambda: learner.state_dict().items()), MemorySender, dtype=engine.dtype, adapters=adapters
    )
    published = WeightPublisher(
        exporter,
        [engine],
        WeightSyncConfig(proof="always"),
        PublishOptions(**{"separate_devices": True, "adapters": adapters is not None, **options}),
        canary=Canary(prompts=CANARY, sampling=SAMPLING, score=scored_by(learner), tolerance=1e-4) if canary else None,
    )
    return Pair(learner, engine, published)


def run(pair: Pair, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            return await work()
        finally:
            await pair.engine.close()
            await pair.weights.close()

    return asyncio.run(whole())


async def by_the_learner(model: Any, seed: int = 0) -> list[Completion]:
    """What the embedded engine samples on the learner's own module (a copy, whose attention may be switched)."""
    engine = engine_on(copy.deepcopy(model), prepack=True)
    engine.resume(0)
    try:
        return await sampled(engine, seed)
    finally:
        await engine.close()


def same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    return all(
        left.tokens.tolist() == right.tokens.tolist() and torch.equal(left.logprobs, right.logprobs)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gpt2"]
)  # an untied head, a tied one with biases, layers that are no nn.Linear
def test_after_each_publish_it_samples_what_the_learners_own_module_would_token_for_token(family: str) -> None:
    """Its own model began elsewhere, and version, arrival, read-back and canary are proven each time."""
    found = pair(build(family), apart(lambda: build(family, seed=9), prepack=True))

    async def work() -> None:
        for version in range(3):
            metrics = await found.weights.publish(version)
            assert metrics["weights/canary_error"].value < 1e-5 and metrics["weights/tensors_not_read_back"].value == 0
            assert found.engine.version == version
            mine = await found.sample(seed=100 * version)
            assert {int(token) for completion in mine for token in completion.versions} == {version}
            assert same(mine, await by_the_learner(found.learner, seed=100 * version))
            moved(found.learner, version)

    run(found, work)


def test_weights_may_be_sent_narrower_than_the_module_that_takes_them() -> None:
    found = pair(build("qwen2"), apart(lambda: build("qwen2", seed=9), torch.bfloat16, prepack=True), canary=False)
    rounded = build("qwen2")
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())

    async def work() -> None:
        metrics = await found.weights.publish(0)
        assert metrics["weights/tensors_not_read_back"].value == 0
        assert same(await found.sample(), await by_the_learner(rounded))

    run(found, work)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", ["lm_head", "model.layers.1.mlp.down_proj"])
def test_a_layer_whose_copy_is_not_refreshed_is_found_by_name(layer: str, precision: torch.dtype) -> None:
    """The head is tied to the embedding, which is fresh: its packed copy is what sampling reads."""
    engine = apart(lambda: build("qwen2", seed=9), prepack=True, precision=precision)
    found = pair(build("qwen2"), engine, canary=False)

    async def work() -> None:
        await found.weights.publish(0)
        linears = engine._engine.runner.linears  # type: ignore[union-attr, attr-defined]
        place = [own.name for own in linears.layers].index(layer)
        before = linears.copies[place]
        refresh = linears.enable

        def forgetful() -> None:
            refresh()
            linears.copies[place] = before
            linears.layers[place].module.forward = linears._make_forward(before, linears.layers[place])

        linears.enable = forgetful
        moved(found.learner, 1)
        with pytest.raises(VerificationFailed, match=layer):
            await found.weights.publish(1)

    run(found, work)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(build, "llama"), "model.norm.weight"),
        (partial(every_family.build, "deepseek_v32"), "model.layers.1.self_attn.indexer.wk.weight"),
    ],
)
def test_a_wrong_tensor_in_the_module_is_found_by_name(make: Callable[[], Any], name: str) -> None:
    engine = apart(make, prepack=False)
    found = pair(make(), engine)

    async def work() -> None:
        await found.weights.publish(0)
        activate_version = engine._engine.activate_version  # type: ignore[union-attr]

        def spoilt(version: int) -> None:
            weight = engine._engine.runner.network.model.get_parameter(name)  # type: ignore[union-attr]
            weight.data.view(-1)[3] += 1e-3
            activate_version(version)

        engine._engine.activate_version = spoilt  # type: ignore[union-attr, method-assign]
        with pytest.raises(VerificationFailed, match=name):
            await found.weights.publish(1)

    run(found, work)


def test_a_head_that_is_tied_at_the_learner_alone_is_refused_before_it_goes_stale() -> None:
    """The learner sends the embedding once; an untied head would keep whatever it began with."""

    def untied() -> Any:
        model = build("qwen2", seed=9)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    found = pair(build("qwen2"), apart(untied))

    async def work() -> None:
        with pytest.raises(RuntimeError, match=r"lm_head\.weight would keep arbitrary values.*tie_word_embeddings"):
            await found.weights.publish(0)

    run(found, work)


def test_weights_of_another_model_are_refused_with_both_shapes() -> None:
    found = pair(build("qwen3"), apart(lambda: build("llama")))

    async def work() -> None:
        with pytest.raises(RuntimeError, match=r"is sent .*q_norm\.weight .* but its model has no tensor of that name"):
            await found.weights.publish(0)
        assert found.engine.version == -1

    run(found, work)


def test_the_canary_finds_what_cannot_be_read_back() -> None:
    engine = apart(lambda: build("llama", seed=9), prepack=True)
    found = pair(build("llama"), engine)

    async def work() -> None:
        await engine.start()
        runner = engine._engine.runner  # type: ignore[union-attr]
        forward = runner._forward  # type: ignore[attr-defined]
        runner._forward = lambda *arguments: 1.2 * forward(*arguments)  # type: ignore[attr-defined]
        with pytest.raises(VerificationFailed, match="disagree on the canary"):
            await found.weights.publish(0)

    run(found, work)


def test_requests_wait_for_weights_and_those_that_run_are_finished_before_new_ones_come() -> None:
    found = pair(build("llama"), apart(lambda: build("llama", seed=9), slots=2))

    async def work() -> None:
        await found.engine.start()
        waiting = asyncio.create_task(found.sample())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await found.weights.publish(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        moved(found.learner, 1)
        await found.weights.publish(1)
        versions = [set(completion.versions.tolist()) for completion in await waiting]
        assert all(len(own) == 1 for own in versions), versions

    run(found, work)


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_that_run_go_on_with_the_new_weights_where_they_stood(recompute: bool) -> None:
    found = pair(
        build("llama"), apart(lambda: build("llama", seed=9), prepack=True, slots=3), in_flight=True, recompute=recompute
    )
    long = Sampling(max_new_tokens=30, temperature=0.9)

    async def work() -> Completion:
        await found.weights.publish(0)
        running = asyncio.create_task(found.engine.generate(PROMPTS[0], sampling=long, seed=5))
        while found.engine.counters()["sampled_tokens"] < 40:  # the canary's 24, and some
            await asyncio.sleep(0)
        moved(found.learner, 1)
        await found.weights.publish(1)
        return await running

    completion: Completion = run(found, work)
    versions = completion.versions.tolist()
    assert sorted(versions) == versions and set(versions) == {0, 1}
    if recompute:  # then every token after the change is one of the new weights alone
        row = torch.cat([torch.tensor(PROMPTS[0]), completion.tokens])
        with torch.no_grad():
            logits = found.learner(row[None]).logits[0, len(PROMPTS[0]) - 1 : -1]
        wanted = filtered_logits(logits, long, completion.tokens).log_softmax(-1).gather(-1, completion.tokens[:, None])[:, 0]
        new = completion.versions == 1
        assert torch.allclose(completion.logprobs[new], wanted[new], atol=1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_adapters_alone_are_taken_where_its_model_has_some_of_the_same_form(precision: torch.dtype) -> None:
    learner = with_random_adapters(build("qwen2"), dim=4)
    engine = apart(lambda: with_random_adapters(build("qwen2", seed=9), dim=4, seed=7), prepack=True, precision=precision)
    found = pair(learner, engine, adapters=LocalAdapterSource(learner), canary=precision is torch.float32)

    async def work() -> None:
        for version in range(2):
            metrics = await found.weights.publish(version)
            if version == 1:
                assert metrics["weights/bytes"].value < 50_000
            with torch.no_grad():
                for layer in lora_layers(learner):
                    layer.up.mul_(1.5)

    run(found, work)


def test_adapters_for_a_model_without_any_are_refused() -> None:
    learner = with_random_adapters(build("qwen2"), dim=4)
    found = pair(learner, apart(lambda: build("qwen2", seed=9)), adapters=LocalAdapterSource(learner))

    async def work() -> None:
        with pytest.raises(RuntimeError, match=r"its model has none: build it with the learner's dtensor_cfg\.lora_cfg"):
            await found.weights.publish(0)

    run(found, work)


def test_an_engine_that_fails_is_started_anew_and_its_requests_are_issued_again() -> None:
    engine = apart(lambda: build("llama", seed=9), prepack=True)
    found = pair(build("llama"), engine)
    replicas = EnginePool([engine])
    replicas.restart_engine = found.weights.restart_engine

    async def work() -> None:
        await found.weights.publish(0)
        wanted = await sampled(replicas)

        def breaks(*_: Any) -> Tensor:
            raise RuntimeError("out of memory")

        engine._engine.runner.decode = breaks  # type: ignore[union-attr, method-assign]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = await sampled(replicas)
        assert same(again, wanted) and replicas.restarts == 1

    run(found, work)


def test_a_closed_engine_says_that_it_is_gone() -> None:
    engine = apart(lambda: build("llama"))

    async def work() -> None:
        assert not engine.alive
        with pytest.raises(EngineDied, match="engine 0 is not started"):
            await engine.pause(keep_running=False)
        await engine.start()
        assert engine.alive and engine.version == -1
        with pytest.raises(RuntimeError, match="holds those of version -1"):
            await engine.resume(3)
        await engine.close()
        assert not engine.alive and engine.counters() == {}

    asyncio.run(work())
