"""Images in vLLM's requests.

vLLM receives the learner's pixels and image tokens: nothing is resized or tokenized twice, so both see the same. vLLM's own
image processor provides only the names of its inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage

log = logging.getLogger(__name__)

IMAGE = "image"  # vLLM's name of the modality
CHECKED_KINDS = ("qwen2_5_vl", "qwen3_vl")  # families compared with the learner's log-probabilities, on vLLM 0.32
TILES = "num_patches"  # vLLM's name for the number of pictures per image that the tower reads, in families that cut it


@cache
def warn_if_unchecked(kind: str) -> None:
    """Warn once that a family's images were not tested with vLLM."""
    if kind not in CHECKED_KINDS:
        log.warning(
            "images of %s in vLLM were not compared with the learner's (only those of %s were): watch train/token_mult_prob_error, or "
            "set policy.generation.backend=torch",
            kind,
            " and ".join(CHECKED_KINDS),
        )


def make_image_input(
    processor: Any, vision: VisionProcessor, prompt: Sequence[int], images: Sequence[PromptImage], *, salt: str
) -> Any:
    """Return a prompt with images in the form vLLM's engine takes.

    Args:
        processor: vLLM's processor of the model.
        vision: Creates the pixels.
        prompt: Tokens, including all image tokens.
        images: Their positions and files.
        salt: Identifies the weights: keys and values, and image features, are not reused with others.
    """
    warn_if_unchecked(str(vision.family.config.model_type))
    pixels = join_pixels([vision.pixels(image) for image in images])
    fields = processor._get_mm_fields_config(pixels, {})
    items = MultiModalKwargsItems.from_hf_inputs(pixels, fields)
    places = [find_rows(prompt, image, vision.image_token_id) for image in images]
    hashes = [f"{image.digest} {salt}" for image in images]
    return mm_input(list(prompt), items, {IMAGE: hashes}, {IMAGE: places}, cache_salt=salt)


def find_rows(prompt: Sequence[int], image: PromptImage, placeholder: int) -> PlaceholderRange:
    """Return the positions of an image's rows; there may be other tokens between them."""
    rows = torch.tensor([token == placeholder for token in prompt[image.start : image.end]])
    return PlaceholderRange(offset=image.start, length=image.length, is_embed=None if bool(rows.all()) else rows)


def join_pixels(pixels: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the pixels of images, and count the pictures of each. Scalars concern only tokens, and are left out."""
    names = [name for name, tensor in pixels[0].items() if tensor.dim()]
    joined = {name: torch.cat([each[name] for each in pixels]) for name in names}
    return {**joined, TILES: torch.tensor([len(each["pixel_values"]) for each in pixels])}
