"""Vision inputs of the embedded engine's network: tower rows in place of images.

The learner's own tower computes an image once for all prompts that contain it, until the weights change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.generation.torch.image_tokens import ImageNumbers, PromptImages, mark_images, read_mark
from strop.models.vision.rope_positions import row_positions
from strop.models.vision.vision_tower import DecoderInputs, ImageFeatures, VisionTower
from strop.types import PromptImage

CACHED_ROWS = 1 << 14  # rows of recently read images


class ImageReader:
    """Reads the images of prompts with one network's vision tower."""

    def __init__(self, tower: VisionTower) -> None:
        self.tower = tower
        self.encoded = 0  # images computed by the tower
        self._numbers = ImageNumbers()
        self._features: OrderedDict[int, ImageFeatures] = OrderedDict()
        self._rows = 0  # in ``_features``

    @property
    def has_rotary_positions(self) -> bool:
        """Whether images give tokens three positions (m-RoPE)."""
        return self.tower.family.grid_key is not None

    @property
    def sees_both_ways(self) -> bool:
        """Whether the tokens of an image attend to later ones in it."""
        return self.tower.family.bidirectional

    def mark(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> tuple[tuple[int, ...], PromptImages]:
        """Return a prompt with ids for the rows of its images, and the images by number."""
        marked = mark_images(tokens, images, self._numbers, self.tower.processor.image_token_id)
        rotary = None
        if self.has_rotary_positions:
            rotary = row_positions(len(tokens), images, self.tower.grids(images)).positions
        return marked, PromptImages({self._numbers.number(image): image for image in images}, rotary)

    def make_inputs(self, tokens: Tensor, images: Mapping[int, PromptImage]) -> dict[str, Any]:
        """Return the decoder's inputs for tokens [T]; tokens below 0 are rows of ``images``, which are given by number."""
        is_image = tokens < 0
        places = is_image.nonzero().squeeze(1)
        marks = [read_mark(token) for token in tokens[places].tolist()]
        features = self._read(list(dict.fromkeys(number for number, _ in marks)), images)
        layer = self.tower.model.get_input_embeddings()
        device = layer.weight.device
        embeddings = layer(tokens.clamp(min=0).to(device))
        if len(places):
            rows = torch.stack([features[number].rows[row] for number, row in marks])
            embeddings = embeddings.index_copy(0, places.to(device), rows.to(embeddings.dtype))
        levels = range(min((len(each.deepstack) for each in features.values()), default=0))
        deepstack = tuple(torch.stack([features[number].deepstack[level][row] for number, row in marks]) for level in levels)
        return DecoderInputs(embeddings, is_image.to(device), deepstack).arguments(1, len(tokens))

    def _read(self, numbers: Sequence[int], images: Mapping[int, PromptImage]) -> dict[int, ImageFeatures]:
        """Return the tower's features of some images, computing those not cached."""
        found = {number: self._features[number] for number in numbers if number in self._features}
        missing = [number for number in numbers if number not in found]
        if missing:
            made = self.tower.features([images[number] for number in missing])
            self.encoded += len(missing)
            found |= dict(zip(missing, made, strict=True))
        self._keep(found)
        return found

    def _keep(self, features: Mapping[int, ImageFeatures]) -> None:
        for number, each in features.items():
            if number not in self._features:
                self._rows += len(each.rows)
            self._features[number] = each
            self._features.move_to_end(number)
        while self._rows > CACHED_ROWS and len(self._features) > 1:
            self._rows -= len(self._features.popitem(last=False)[1].rows)

    def forget(self) -> None:
        """Drop the results of earlier weights."""
        self._features.clear()
        self._rows = 0
