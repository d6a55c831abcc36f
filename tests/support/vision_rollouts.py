"""Networks that read images in float64, and groups of rollouts with images."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch

from strop.models.network import Network
from strop.models.vision.vision_families import find_family
from strop.models.vision.vision_processor import VisionProcessor
from strop.types import Group, PromptImage, Rollout, Task, Turn, observation_turn
from support.vision_models import FAMILIES, build_vision_model, build_vision_tokenizer, draw_image, make_vision_config


@cache
def make_vision_processor(family: str) -> VisionProcessor:
    config, tokenizer = make_vision_config(family), build_vision_tokenizer(family)
    return VisionProcessor(find_family(config), FAMILIES[family].image_processor(), tokenizer)


def make_vision_network(family: str, *, packed: bool | None = True, seed: int = 0) -> Network:
    network = Network(build_vision_model(family, dtype=torch.float64, seed=seed), packed=packed)
    network.enable_vision(make_vision_processor(family))
    return network


def policy_turn(tokens: Sequence[int]) -> Turn:
    length = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(tokens),
        text="",
        logprobs=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int32),
    )


def encode_images(family: str, text: str, files: Sequence[bytes]) -> tuple[list[int], tuple[PromptImage, ...]]:
    encoded = make_vision_processor(family).encode_text(text, files)
    return encoded.tokens, encoded.images


def make_image_groups(family: str, seed: int) -> list[Group]:
    """Groups with 0 to 2 images in the prompt, some with an image in an observation, and the image token among sampled ones."""
    chosen, place = random.Random(seed), make_vision_processor(family).placeholder
    image_token = make_vision_processor(family).image_token_id
    groups = []
    for index in range(3):
        files = [
            draw_image(chosen.randrange(9), 30 + 30 * chosen.randrange(3), 30 + 14 * chosen.randrange(3))
            for _ in range(index % 3)
        ]
        prompt, images = encode_images(family, "look " + f"{place} and ".join(["at"] * (len(files) + 1)) + "?", files)
        rollouts = []
        for sample in range(2):
            sampled = [chosen.randrange(256) for _ in range(2 + chosen.randrange(4))]
            turns = [policy_turn([*sampled, image_token])]
            if (index + sample) % 2:
                tokens, seen = encode_images(family, f"now {place}!", [draw_image(50 + sample)])
                start = len(prompt) + len(sampled) + 1
                turns.append(observation_turn(tokens, "", [image.moved(start) for image in seen]))
                turns.append(policy_turn([chosen.randrange(256) for _ in range(3)]))
            rollouts.append(
                Rollout(
                    task=Task(id=f"t{index}"),
                    sample=sample,
                    seed=0,
                    messages=(),
                    prompt=torch.tensor(prompt),
                    turns=tuple(turns),
                    images=images,
                )
            )
        groups.append(Group(index=index, environment="", version=0, rollouts=tuple(rollouts)))
    return groups
