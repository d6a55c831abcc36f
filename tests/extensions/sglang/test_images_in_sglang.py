"""Images through real SGLang engines: log-probabilities, cache, weights and adapters of two families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from strop.generation.engine_launch import LaunchedAdapters
from strop.models.adapters import lora_layers
from strop.weight_sync.exporter import LocalAdapterSource
from support.image_contract import (  # noqa: F401
    FAMILIES,
    FLOAT32,
    ServedFamily,
    test_a_conversation_goes_on_with_an_image,
    test_another_image_is_seen_in_the_engines_log_probabilities,
    test_engine_and_learner_agree_about_images,
    test_new_weights_of_the_tower_are_used_at_once,
    test_prompts_with_equal_tokens_and_different_images_share_no_cache,
)
from support.image_requests import (
    ImageRequest,
    make_image_processor,
    mixed_prompts,
    show,
)
from support.lora import with_random_adapters
from support.sglang_engines import LIMIT, make_sglang_engine, needs_sglang
from support.vision_models import build_vision_model, build_vision_tokenizer, draw_image, save_vision_model
from support.vllm_engines import serve

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
needs_sglang()


def serve_family(room: BackgroundLoop, family: str, folder: Path, *, adapters: bool = False) -> ServedFamily:
    """An engine of a family, with weights published once; its folder has no weights that it could have read."""
    save_vision_model(family, folder, seed=1)
    (folder / "model.safetensors").unlink()
    tokenizer, model, launched = build_vision_tokenizer(family), build_vision_model(family), None
    if adapters:
        with_random_adapters(model, dim=8, alpha=8, spread=0.1)
        launched = LaunchedAdapters(8, tuple(layer.name for layer in lora_layers(model)))
    engine = make_sglang_engine(folder, tokenizer, adapters=launched)
    engine.vision = make_image_processor(family)
    served = serve(model, tokenizer, [engine], adapters=LocalAdapterSource(model) if adapters else None)
    room.run(served.weights.publish(0), seconds=LIMIT)
    return ServedFamily(family, served, room)


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: Any, room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFamily]:
    seen = serve_family(room, request.param, tmp_path_factory.mktemp(request.param))
    yield seen
    room.run(seen.served.close())


def test_files_of_pixels_are_gone_after_the_requests(seen: ServedFamily) -> None:
    seen.run(*(ImageRequest(show(seen.family, draw_image(1)), seed=seed) for seed in range(4)))
    engine: Any = seen.served.engine
    assert not list(engine._server.folder.glob("pixels-*"))


def test_images_are_refused_where_they_were_not_compared_or_cannot_be_read(seen: ServedFamily) -> None:
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
