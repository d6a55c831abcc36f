"""Images in vLLM's requests.

vLLM is given the pixels that the learner reads, and the tokens that stand for them: nothing is resized or written twice, so the two see the
same. Its own image processor is asked for the names of its inputs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage

IMAGE = "image"  # vLLM's name of the modality
TILES = "num_patches"  # vLLM's name of how many pictures the tower reads of an image, in families that cut it


def make_image_input(
    processor: Any, vision: VisionProcessor, prompt: Sequence[int], images: Sequence[PromptImage], *, salt: str
) -> Any:
    """Return a prompt with images as vLLM's engine takes it.

    Args:
        processor: vLLM's processor of the model.
        vision: Makes the pixels.
        prompt: Tokens, with all that stand for the images.
        images: Where they stand, and their files.
        salt: Names the weights: keys and values, and what the tower made of an image, are not reused with others.
    """
    pixels = join_pixels([vision.pixels(image) for image in images])
    fields = processor._get_mm_fields_config(pixels, {})
    items = MultiModalKwargsItems.from_hf_inputs(pixels, fields)
    places = [find_rows(prompt, image, vision.image_token_id) for image in images]
    hashes = [f"{image.digest} {salt}" for image in images]
    return mm_input(list(prompt), items, {IMAGE: hashes}, {IMAGE: places}, cache_salt=salt)


def find_rows(prompt: Sequence[int], image: PromptImage, placeholder: int) -> PlaceholderRange:
    """Return where the rows of an image stand; between them there may be other tokens."""
    rows = torch.tensor([token == placeholder for token in prompt[image.start : image.end]])
    return PlaceholderRange(offset=image.start, length=image.length, is_embed=None if bool(rows.all()) else rows)


def join_pixels(pixels: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the pixels of images, one after another, and count the pictures of each. Single numbers are about the tokens, and left out."""
    names = [name for name, tensor in pixels[0].items() if tensor.dim()]
    joined = {name: torch.cat([each[name] for each in pixels]) for name in names}
    return {**joined, TILES: torch.tensor([len(each["pixel_values"]) for each in pixels])}
