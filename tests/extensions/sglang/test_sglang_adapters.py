"""Low-rank adapters sent alone to a real SGLang engine, over a base that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.engine_launch import LaunchedAdapters
from strop.models.adapters import lora_layers
from strop.weight_sync.exporter import LocalAdapterSource
from strop.weight_sync.verification import VerificationFailed, combine_regions
from support.engine_contract import (  # noqa: F401
    ADAPTED,
    PROMPT,
    RANK,
    disagreement,
    move,
    planted,
    publish,
    test_requests_that_run_go_on_with_the_new_adapters,
    test_the_base_is_sent_once_and_the_adapters_each_time,
)
from support.lora import with_random_adapters
from support.sglang_engines import LIMIT, make_sglang_engine, needs_sglang
from support.vllm_engines import compute_logprobs, save_model_folder, serve, served_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
needs_sglang()

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel


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
    adapters = LaunchedAdapters(RANK, tuple(layer.name for layer in lora_layers(model)))
    engine = make_sglang_engine(save_model_folder(model, tokenizer, folder), tokenizer, faulty=True, adapters=adapters, **keys)
    served = serve(model, tokenizer, [engine], adapters=LocalAdapterSource(model), tolerance=tolerance)
    room.run(served.weights.publish(0), seconds=LIMIT)
    return served


@pytest.fixture(scope="module")
def beside(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_adapters(room, tmp_path_factory.mktemp("beside"), tokenizer)
    yield served
    room.run(served.close())


def held_adapters(room: BackgroundLoop, served: ServedModel) -> dict[str, int]:
    held: dict[str, Any] = {}
    for rank in room.run(served.engine._call("adapter_fingerprints")):
        for name, shards in rank.items():
            held.setdefault(name, []).extend(shards)
    return {name: combine_regions(shards)[0] for name, shards in held.items()}


def test_requests_of_one_batch_all_use_the_adapters(room: BackgroundLoop, beside: ServedModel) -> None:
    async def together() -> list[Any]:
        prompts = [PROMPT[: 5 + 3 * (seed % 5)] for seed in range(12)]
        asked = [beside.pool.generate(prompt, sampling=ADAPTED, seed=seed) for seed, prompt in enumerate(prompts)]
        return list(zip(prompts, await asyncio.gather(*asked), strict=True))

    for prompt, completion in room.run(together()):
        expected = compute_logprobs(beside.model, prompt, completion.tokens, ADAPTED)
        assert (completion.logprobs - expected).abs().max() < 2e-4


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
    assert disagreement(room, beside, ADAPTED) < 2e-4


def test_an_engine_that_was_killed_gets_base_and_adapters_again(room: BackgroundLoop, beside: ServedModel) -> None:
    import os
    import signal

    process = beside.engine.process
    assert process is not None
    os.killpg(process, signal.SIGKILL)
    move(beside.model, 71)
    publish(room, beside)
    assert disagreement(room, beside, ADAPTED) < 2e-4


def test_adapters_on_some_layers_with_the_scale_of_rslora(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    """In bfloat16: the engine holds the adapters as they were rounded. q without k and v is what SGLang's own loader cannot read."""
    lora = {"target_modules": ("q_proj", "up_proj", "down_proj"), "use_rslora": True}
    served = serve_adapters(room, tmp_path, tokenizer, tolerance=0.3, lora=lora, dtype="bfloat16")
    try:
        move(served.model, 3)
        publish(room, served)
        assert held_adapters(room, served) == LocalAdapterSource(served.model).fingerprints(torch.bfloat16)
        assert disagreement(room, served, ADAPTED) < 0.5
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
        assert disagreement(room, served, ADAPTED) < 2e-4
    finally:
        room.run(served.close())
