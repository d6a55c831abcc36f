"""Images through real vLLM engines: log-probabilities, cache and weights of two families. It takes torchvision, which vLLM asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import publish
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
    generate_with_images,
    make_image_processor,
    mixed_prompts,
    show,
)
from support.vision_models import build_vision_model, build_vision_tokenizer, draw_image, save_vision_model
from support.vllm_engines import FAULTY, perturb

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's processors need torchvision: pip install torchvision"),
]


def serve_family(room: BackgroundLoop, family: str, folder: Path, **options: Any) -> ServedFamily:
    """Return an engine of a family, with weights published once; its folder has no weights that it could have read."""
    import transformers

    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import make_launch, serve

    save_vision_model(family, folder, seed=1)
    kind = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    patch = 14 if family == "qwen2_5_vl" else 16
    getattr(transformers, kind)(patch_size=patch, temporal_patch_size=2, merge_size=2).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = build_vision_tokenizer(family)
    launch = replace(make_launch(folder, **options), reads_images=True)
    engine = VllmEngine("engine 0", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,), vision=make_image_processor(family))
    served = serve(build_vision_model(family), tokenizer, [engine], tolerance=0.1 if options else 0.002)
    metrics = room.run(served.weights.publish(0))
    assert metrics["weights/tensors_not_read_back"].number == 0
    return ServedFamily(family, served, room)


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: Any, room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFamily]:
    seen = serve_family(room, request.param, tmp_path_factory.mktemp(request.param))
    yield seen
    room.run(seen.served.close())


def test_qwen3_5_reads_text_and_images_in_bfloat16_and_weights_that_do_not_arrive_are_named(
    room: BackgroundLoop, tmp_path: Path
) -> None:
    seen = serve_family(room, "qwen3_5", tmp_path, precision="bfloat16", worker_extension=FAULTY)
    try:
        for prompt in mixed_prompts("qwen3_5"):
            request = ImageRequest(prompt, seed=1)
            assert seen.disagreement(request, seen.run(request)[0]) < 0.08
        request, other = (ImageRequest(show("qwen3_5", draw_image(seed))) for seed in (1, 5))
        assert seen.disagreement(other, seen.run(request)[0]) > 0.15
        for seed, name in enumerate(("language_model.layers.0.linear_attn.conv1d", "visual.blocks.0.attn.qkv")):
            perturb(seen.served.model, seed)
            room.run(seen.served.engine._call_workers("plant", f"drops model.{name}.weight"))
            with pytest.raises(VerificationFailed, match=rf"model\.{name}\.weight"):
                publish(room, seen.served)
    finally:
        room.run(seen.served.close())


def test_a_cancelled_request_with_an_image_leaves_the_engine_in_order(seen: ServedFamily) -> None:
    request = ImageRequest(show(seen.family, draw_image(1)), seed=1)

    async def cancel() -> None:
        task = asyncio.ensure_future(generate_with_images(seen.served.pool, [request]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    seen.room.run(cancel())
    assert seen.disagreement(request, seen.run(request)[0]) < FLOAT32


def test_images_for_an_engine_that_reads_text_are_refused(seen: ServedFamily) -> None:
    engine = seen.served.engine
    vision, engine.vision = engine.vision, None
    try:
        with pytest.raises(ValueError, match="a request has 1 images, and the model of engine 0 reads text only"):
            seen.run(ImageRequest(show(seen.family, draw_image(1))))
    finally:
        engine.vision = vision
