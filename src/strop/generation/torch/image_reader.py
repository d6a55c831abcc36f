"""What the embedded engine's network reads in place of images: the rows of the vision tower.

The tower computes an image once for all prompts that show it, until the weights change, with the learner's own modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.generation.torch.image_tokens import ImageNumbers, PromptImages, mark_images, read_mark
from strop.models.network import Network
from strop.models.vision.image_features import ImageFeatures, encode_images, make_decoder_inputs
from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage

CACHED_ROWS = 1 << 14  # of images that were read lately


class ImageReader:
    """Reads the images of prompts for one network."""

    def __init__(self, network: Network, vision: VisionProcessor) -> None:
        self.network = network
        self.vision = vision
        self.encoded = 0  # images that the tower has computed
        self._numbers = ImageNumbers()
        self._features: OrderedDict[int, ImageFeatures] = OrderedDict()
        self._rows = 0  # in ``_features``

    @property
    def has_rotary_positions(self) -> bool:
        """Whether images give tokens three positions (m-RoPE)."""
        return self.vision.has_rope_positions

    @property
    def sees_both_ways(self) -> bool:
        """Whether the rows of an image attend to those after them."""
        return self.vision.bidirectional

    def mark(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> tuple[tuple[int, ...], PromptImages]:
        """Return a prompt with ids for the rows of its images, and the images by number."""
        marked = mark_images(tokens, images, self._numbers, self.vision.image_token_id)
        rotary = self.vision.rope_positions(tokens, images)
        return marked, PromptImages({self._numbers.number(image): image for image in images}, rotary)

    def make_inputs(self, tokens: Tensor, images: Mapping[int, PromptImage]) -> dict[str, Any]:
        """Return the decoder's inputs for tokens [T], of which those below 0 are rows of ``images``, which are given by number."""
        places = (tokens < 0).nonzero().squeeze(1)
        marks = [read_mark(token) for token in tokens[places].tolist()]
        features = {number: self._read(number, images[number]) for number, _ in dict.fromkeys(marks)}
        device = self.network.device
        rows = [features[number].select(row) for number, row in marks]
        return make_decoder_inputs(self.network.model, tokens.clamp(min=0).to(device), places.to(device), rows)

    def _read(self, number: int, image: PromptImage) -> ImageFeatures:
        if number not in self._features:
            self._keep(number, encode_images(self.network.model, self.vision.pixels(image)))
        self._features.move_to_end(number)
        return self._features[number]

    def _keep(self, number: int, features: ImageFeatures) -> None:
        self.encoded += 1
        self._features[number] = features
        self._rows += len(features.rows)
        while self._rows > CACHED_ROWS and len(self._features) > 1:
            self._rows -= len(self._features.popitem(last=False)[1].rows)

    def forget(self) -> None:
        """Drop what was computed with earlier weights."""
        self._features.clear()
        self._rows = 0
