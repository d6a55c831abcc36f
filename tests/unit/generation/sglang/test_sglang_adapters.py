"""Low-rank adapters sent alone to a real SGLang engine, over a base that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.sglang.sglang_launch import LaunchedAdapters
from strop.models.adapters import lora_layers
from strop.sampling import Sampling
from strop.weight_sync.exporter import LocalAdapterSource
from strop.weight_sync.verification import VerificationFailed, combine_regions
from support.lora import with_random_adapters
from support.sglang_engines import make_sglang_engine, needs_sglang
from support.vllm_engines import compute_logprobs, save_model_folder, serve, served_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
needs_sglang()

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(temperature=0.8, max_new_tokens=8)
RANK = 12


def move(model: Any, seed: int, size: float = 0.1) -> None:
    """Another policy: every adapter moved a little."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model):
            for matrix in (layer.down, layer.up):
                matrix.add_(size * torch.randn(matrix.shape, generator=noise))


def serve_adapters(
    room: BackgroundLoop,
    folder: Path,
    tokenizer: Any,
    *,
    model: Any = None,
    tolerance: float = 0.002,
    lora: dict[str, Any] | None = None,
    **keys: Any,
) -> ServedModel:
    model = with_random_adapters(model or served_model(), **{"dim": RANK, "alpha": 8, "spread": 0.1, **(lora or {})})
    adapters = LaunchedAdapters.of_layers(RANK, (layer.name for layer in lora_layers(model)))
    engine = make_sglang_engine(save_model_folder(model, tokenizer, folder), tokenizer, faulty=True, adapters=adapters, **keys)
    served = serve(model, tokenizer, [engine], adapters=LocalAdapterSource(model), tolerance=tolerance)
    room.run(served.weights.publish(0), seconds=600)
    return served


@pytest.fixture(scope="module")
def beside(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_adapters(room, tmp_path_factory.mktemp("beside"), tokenizer)
    yield served
    room.run(served.close())


def publish(room: BackgroundLoop, served: ServedModel) -> dict[str, float]:
    published = room.run(served.weights.publish(served.weights.version + 1), seconds=600)
    return {name: metric.value for name, metric in published.items()}


def disagreement(room: BackgroundLoop, served: ServedModel, seed: int = 1) -> float:
    completion = room.run(served.pool.generate(PROMPT, sampling=SAMPLING, seed=seed))
    expected = compute_logprobs(served.model, PROMPT, completion.tokens, SAMPLING)
    return float((completion.logprobs - expected).abs().max())


@contextmanager
def planted(room: BackgroundLoop, served: ServedModel, fault: str) -> Iterator[None]:
    room.run(served.engine._call("plant", fault))
    try:
        yield
    finally:
        room.run(served.engine._call("plant", ""))
        publish(room, served)
        assert disagreement(room, served) < 2e-4


def held_adapters(room: BackgroundLoop, served: ServedModel) -> dict[str, int]:
    held: dict[str, Any] = {}
    for rank in room.run(served.engine._call("adapter_fingerprints")):
        for name, shards in rank.items():
            held.setdefault(name, []).extend(shards)
    return {name: combine_regions(shards)[0] for name, shards in held.items()}


def test_the_base_is_sent_once_and_the_adapters_each_time(room: BackgroundLoop, beside: ServedModel) -> None:
    base = sum(
        weight.spec.numel() * 4 for weight in LocalAdapterSource(beside.model).base_weights() if weight.name != "lm_head.weight"
    )
    for seed in range(2):
        move(beside.model, seed)
        said = publish(room, beside)
        assert 0 < said["weights/bytes"] < base / 2
        assert said["weights/canary_error"] < 1e-4
        assert disagreement(room, beside) < 2e-4


def test_requests_of_one_batch_all_use_the_adapters(room: BackgroundLoop, beside: ServedModel) -> None:
    async def together() -> list[Any]:
        prompts = [PROMPT[: 5 + 3 * (seed % 5)] for seed in range(12)]
        asked = [beside.pool.generate(prompt, sampling=SAMPLING, seed=seed) for seed, prompt in enumerate(prompts)]
        return list(zip(prompts, await asyncio.gather(*asked), strict=True))

    for prompt, completion in room.run(together()):
        expected = compute_logprobs(beside.model, prompt, completion.tokens, SAMPLING)
        assert (completion.logprobs - expected).abs().max() < 2e-4


def test_without_a_publish_the_engine_keeps_the_adapters_before(room: BackgroundLoop, beside: ServedModel) -> None:
    move(beside.model, 11)
    assert disagreement(room, beside) > 1e-2
    publish(room, beside)
    assert disagreement(room, beside) < 2e-4


def test_the_base_was_read_back_under_its_names(room: BackgroundLoop, beside: ServedModel) -> None:
    names = {weight.name for weight in LocalAdapterSource(beside.model).base_weights()}
    assert names - {"lm_head.weight"} <= room.run(beside.engine.read_back_fingerprints()).keys(), "the head is tied"


def test_adapters_are_read_back_as_the_learner_has_them(room: BackgroundLoop, beside: ServedModel) -> None:
    assert held_adapters(room, beside) == LocalAdapterSource(beside.model).fingerprints(torch.float32)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("adapter forgotten", r"self_attn\.q_proj\.[AB] did not arrive"),
        ("stale adapter in one layer", r"layers\.1\.mlp\.down_proj\.B did not arrive"),
    ],
)
def test_an_adapter_that_is_not_replaced_is_caught_and_the_matrix_named(
    room: BackgroundLoop, beside: ServedModel, fault: str, named: str
) -> None:
    move(beside.model, 31)
    with planted(room, beside, fault), pytest.raises(VerificationFailed, match=named):
        publish(room, beside)


def test_requests_that_go_without_the_adapter_are_caught_by_the_canary(
    room: BackgroundLoop, beside: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(beside.engine, "launch", replace(beside.engine.launch, adapters=None))
        with pytest.raises(VerificationFailed, match=r"disagree on the canary.*adapter may not be applied"):
            publish(room, beside)
    publish(room, beside)
    assert disagreement(room, beside) < 2e-4


def test_requests_that_run_go_on_with_the_new_adapters(room: BackgroundLoop, beside: ServedModel) -> None:
    sampling = Sampling(max_new_tokens=150)

    async def in_flight() -> list[Any]:
        before = beside.weights.options
        beside.weights.options = replace(before, in_flight=True, recompute=True)
        try:
            requests = [asyncio.create_task(beside.pool.generate(PROMPT, sampling=sampling, seed=seed)) for seed in range(3)]
            await asyncio.sleep(0.3)
            move(beside.model, 61)
            await beside.weights.publish(beside.weights.version + 1)
            return [await request for request in requests]
        finally:
            beside.weights.options = before

    first = beside.weights.version
    completions = room.run(in_flight())
    assert any(set(completion.versions.tolist()) == {first, first + 1} for completion in completions), "at least one was running"
    for completion in completions:
        new = completion.versions == first + 1
        expected = compute_logprobs(beside.model, PROMPT, completion.tokens, sampling)
        assert ((completion.logprobs - expected)[new].abs() < 2e-4).all()


def test_an_engine_that_was_killed_gets_base_and_adapters_again(room: BackgroundLoop, beside: ServedModel) -> None:
    import os
    import signal

    process = beside.engine.process
    assert process is not None
    os.killpg(process, signal.SIGKILL)
    move(beside.model, 71)
    publish(room, beside)
    assert disagreement(room, beside) < 2e-4


def test_adapters_on_some_layers_with_the_scale_of_rslora(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    """In bfloat16: the engine holds the adapters as they were rounded. q without k and v is what SGLang's own loader cannot read."""
    lora = {"target_modules": ("q_proj", "up_proj", "down_proj"), "use_rslora": True}
    served = serve_adapters(room, tmp_path, tokenizer, tolerance=0.3, lora=lora, dtype="bfloat16")
    try:
        move(served.model, 3)
        publish(room, served)
        assert held_adapters(room, served) == LocalAdapterSource(served.model).fingerprints(torch.bfloat16)
        assert disagreement(room, served) < 0.5
    finally:
        room.run(served.close())


def test_a_model_with_biases_gets_its_whole_base(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    """Inside SGLang's LoRA layers a bias has another name, under which its loader would pass it over."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = served_model().config
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    served = serve_adapters(room, tmp_path, tokenizer, model=model)
    try:
        said = publish(room, served)
        assert said["weights/tensors_not_read_back"] == 0
        assert disagreement(room, served) < 2e-4
    finally:
        room.run(served.close())
