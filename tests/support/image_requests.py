"""Prompts with images for engines, and the rollouts that come of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from strop.generation.base import Completion
from strop.models.network import Network
from strop.models.vision.image_files import EncodedPrompt
from strop.models.vision.vision_families import find_family
from strop.models.vision.vision_processor import VisionProcessor
from strop.sampling import Sampling
from strop.types import Batch, Rollout
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.vision_models import FAMILIES, build_vision_model, build_vision_tokenizer, draw_image, make_vision_config


@cache
def make_image_processor(family: str) -> VisionProcessor:
    config, tokenizer = make_vision_config(family), build_vision_tokenizer(family)
    return VisionProcessor(find_family(config), FAMILIES[family].image_processor(), tokenizer)


def make_vision_network(family: str, *, precision: torch.dtype = torch.float32, seed: int = 0) -> Network:
    network = Network(build_vision_model(family, seed=seed), precision=precision)
    network.enable_vision(make_image_processor(family))
    return network


def show(family: str, *files: bytes, text: str = "what is it") -> EncodedPrompt:
    """Encode a text after images."""
    processor = make_image_processor(family)
    return processor.encode_text(processor.placeholder * len(files) + text, files)


@dataclass(frozen=True)
class ImageRequest:
    prompt: EncodedPrompt
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=10))
    seed: int = 0
    session: str = ""


def mixed_prompts(family: str) -> list[EncodedPrompt]:
    """A prompt with one image, one with two of different sizes, one with text alone."""
    first, wide = draw_image(1), draw_image(2, 90, 30)
    return [show(family, first), show(family, wide, first, text="and this?"), show(family, text="no image")]


async def generate_with_images(engine: Any, requests: Sequence[ImageRequest]) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(
                engine.generate(
                    each.prompt.tokens, sampling=each.sampling, seed=each.seed, session=each.session, images=each.prompt.images
                )
                for each in requests
            )
        )
    )


def run_image_requests(engine: Any, requests: Sequence[ImageRequest]) -> list[Completion]:
    """Run all requests without an event loop, then close the engine."""

    async def run() -> list[Completion]:
        try:
            return await generate_with_images(engine, requests)
        finally:
            await engine.close()

    return asyncio.run(run())


def rollout_of(prompt: EncodedPrompt, completion: Completion) -> Rollout:
    return replace(make_rollout(prompt.tokens, make_turn(completion)), images=prompt.images)


def sample_batch(engine: Any, prompts: Sequence[EncodedPrompt], sampling: Sampling, copies: int = 3) -> Batch:
    """Sample a group of ``copies`` rollouts of each prompt, and pack them."""
    requests = [
        ImageRequest(prompt, sampling, seed=10 * place + copy) for place, prompt in enumerate(prompts) for copy in range(copies)
    ]
    completions = run_image_requests(engine, requests)
    rollouts = [rollout_of(request.prompt, found) for request, found in zip(requests, completions, strict=True)]
    groups = [make_group(*rollouts[index * copies : (index + 1) * copies], index=index) for index in range(len(prompts))]
    return pack_grpo(groups)
