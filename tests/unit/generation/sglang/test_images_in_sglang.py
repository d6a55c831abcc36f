"""Images through real SGLang engines: log-probabilities, cache, weights and adapters of two families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from strop.generation.sglang.sglang_launch import LaunchedAdapters
from strop.models.adapters import lora_layers
from strop.weight_sync.exporter import LocalAdapterSource
from support.image_requests import (
    ImageRequest,
    generate_with_images,
    make_image_processor,
    mixed_prompts,
    rollout_of,
    show,
)
from support.lora import with_random_adapters
from support.sglang_engines import make_sglang_engine, needs_sglang
from support.vision_models import build_vision_model, build_vision_tokenizer, draw_image, save_vision_model
from support.vllm_engines import serve

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
needs_sglang()

FLOAT32 = 2e-5
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@dataclass
class SeenFamily:
    family: str
    served: ServedModel
    room: BackgroundLoop

    def run(self, *requests: ImageRequest) -> list[Any]:
        return self.room.run(generate_with_images(self.served.pool, requests))

    def disagreement(self, request: ImageRequest, completion: Any) -> float:
        """Largest difference of log-probabilities from those of the learner."""
        from strop.learner.torch.scorer import NetworkScorer
        from strop.models.network import Network
        from support.rollouts import make_group, pack_grpo

        network = Network(self.served.model)
        network.enable_vision(make_image_processor(self.family))
        batch = pack_grpo([make_group(rollout_of(request.prompt, completion))])
        scores = NetworkScorer(network, request.sampling, score_tokens=400).score(batch)
        network.use_native_attention()
        return float((scores.logprobs - batch.rollout_logprobs).abs().max())


def serve_family(room: BackgroundLoop, family: str, folder: Path, *, adapters: bool = False) -> SeenFamily:
    """An engine of a family, with weights published once; its folder has no weights that it could have read."""
    save_vision_model(family, folder, seed=1)
    (folder / "model.safetensors").unlink()
    tokenizer, model, launched = build_vision_tokenizer(family), build_vision_model(family), None
    if adapters:
        with_random_adapters(model, dim=8, alpha=8, spread=0.1)
        launched = LaunchedAdapters.of_layers(8, (layer.name for layer in lora_layers(model)))
    engine = make_sglang_engine(folder, tokenizer, adapters=launched)
    engine.vision = make_image_processor(family)
    served = serve(model, tokenizer, [engine], adapters=LocalAdapterSource(model) if adapters else None)
    room.run(served.weights.publish(0), seconds=600)
    return SeenFamily(family, served, room)


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: Any, room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeenFamily]:
    seen = serve_family(room, request.param, tmp_path_factory.mktemp(request.param))
    yield seen
    room.run(seen.served.close())


def test_sglang_and_learner_agree_about_images(seen: SeenFamily) -> None:
    requests = [ImageRequest(prompt, seed=seed) for prompt in mixed_prompts(seen.family) for seed in (1, 2)]
    for request, completion in zip(requests, seen.run(*requests), strict=True):
        assert len(completion.tokens) > 3
        assert seen.disagreement(request, completion) < FLOAT32


def test_another_image_is_seen_in_sglangs_log_probabilities(seen: SeenFamily) -> None:
    request, other = (ImageRequest(show(seen.family, draw_image(seed))) for seed in (1, 5))
    assert request.prompt.tokens == other.prompt.tokens
    assert seen.disagreement(other, seen.run(request)[0]) > 100 * FLOAT32


def test_prompts_with_equal_tokens_and_different_images_share_no_cache_in_sglang(seen: SeenFamily) -> None:
    text = "a long text after the image, " * 3
    prompts = [ImageRequest(show(seen.family, draw_image(seed), text=text), seed=3) for seed in (1, 5, 1, 5)]
    for request in prompts:
        assert seen.disagreement(request, seen.run(request)[0]) < FLOAT32
    for request, completion in zip(prompts, seen.run(*prompts), strict=True):
        assert seen.disagreement(request, completion) < FLOAT32


def test_new_weights_of_the_tower_are_used_at_once_in_sglang(seen: SeenFamily) -> None:
    """What the tower made of an image with earlier weights is not used again."""
    request = ImageRequest(show(seen.family, draw_image(1)), seed=3)
    before = seen.run(request)[0]
    with torch.no_grad():
        for parameter in seen.served.model.model.visual.parameters():
            parameter.mul_(1.2)
    stats = seen.room.run(seen.served.weights.publish(1))
    assert stats["weights/tensors_not_read_back"].value == 0
    after = seen.run(request)[0]
    assert not torch.equal(before.logprobs, after.logprobs)
    assert seen.disagreement(request, after) < FLOAT32
    assert set(after.versions.tolist()) == {1}


def test_a_conversation_goes_on_with_an_image_in_sglang(seen: SeenFamily) -> None:
    first = ImageRequest(show(seen.family, draw_image(1)), seed=1, session="s")
    answer = seen.run(first)[0]
    observed = show(seen.family, draw_image(2, 90, 30), text="and now?")
    start = len(first.prompt.tokens) + len(answer.tokens)
    images = (*first.prompt.images, *(image.moved(start) for image in observed.images))
    tokens = [*first.prompt.tokens, *answer.tokens.tolist(), *observed.tokens]
    second = ImageRequest(replace(first.prompt, tokens=tokens, images=images), seed=2, session="s")
    assert seen.disagreement(second, seen.run(second)[0]) < FLOAT32


def test_files_of_pixels_are_gone_after_the_requests(seen: SeenFamily) -> None:
    seen.run(*(ImageRequest(show(seen.family, draw_image(1)), seed=seed) for seed in range(4)))
    engine: Any = seen.served.engine
    assert not list(engine._server.folder.glob("pixels-*"))


def test_images_are_refused_where_they_were_not_compared_or_cannot_be_read(seen: SeenFamily) -> None:
    engine = seen.served.engine
    vision = engine.vision
    try:
        engine.vision = None
        with pytest.raises(ValueError, match="a request has 1 images, and the model of engine 0 reads text only"):
            seen.run(ImageRequest(show(seen.family, draw_image(1))))
        engine.vision = make_image_processor("gemma3")
        with pytest.raises(ValueError, match="images of gemma3 were not compared"):
            seen.run(ImageRequest(show(seen.family, draw_image(1))))
    finally:
        engine.vision = vision


def test_adapters_are_added_to_a_model_that_reads_images(room: BackgroundLoop, tmp_path: Path) -> None:
    seen = serve_family(room, "qwen2_5_vl", tmp_path, adapters=True)
    try:
        for prompt in mixed_prompts(seen.family):
            request = ImageRequest(prompt, seed=1)
            assert seen.disagreement(request, seen.run(request)[0]) < 2 * FLOAT32
    finally:
        room.run(seen.served.close())
