"""Images in the embedded engine: unique ids for their tokens, and the positions of later tokens.

All images have the same placeholder token, so a cache keyed by tokens would confuse images. Here each row of each image has its
own id, below 0, which represents it in all caches: prompts are equal only if their images are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.generation.torch.kv_cache import ImageRuns
from strop.models.vision.vision_tower import ImageFeatures, VisionTower, row_positions
from strop.types import PromptImage

ROWS = 1 << 24  # ids per image: more than any image has rows
REMEMBERED = 1 << 16  # images whose number is remembered; a forgotten one is read again under a new number


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt, and the positions of its tokens in rotary embeddings."""

    numbered: Mapping[int, PromptImage]  # by their number in the ids
    rotary: Tensor | None = None  # [3, P] int64, of the prompt (time, height, width); None: positions equal places

    @property
    def offset(self) -> int:
        """Difference between rotary positions and places for tokens after the prompt."""
        return 0 if self.rotary is None else int(self.rotary.max()) + 1 - self.rotary.shape[1]

    def positions(self, first: int, last: int) -> Tensor:
        """Return the rotary positions of the tokens in places [first, last), [3, last - first]; those after the prompt continue
        from it.
        """
        if self.rotary is None:
            return torch.arange(first, last).expand(3, -1)
        later = torch.arange(max(first, self.rotary.shape[1]), max(last, self.rotary.shape[1])) + self.offset
        return torch.cat([self.rotary[:, first:last], later.expand(3, -1)], 1)


class ImageNumbers:
    """Numbers images by their digests. A number is never reused for another image."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next = 0

    def number(self, image: PromptImage) -> int:
        if image.digest not in self._numbers:
            self._numbers[image.digest] = self._next
            self._next += 1
            if len(self._numbers) > self._remembered:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(image.digest)
        return self._numbers[image.digest]


def mark_images(tokens: Sequence[int], images: Sequence[PromptImage], numbers: ImageNumbers, placeholder: int) -> tuple[int, ...]:
    """Return a prompt's tokens with a unique id for each row of each image; ``placeholder`` is their common id in the prompt.

    Other tokens that some families write between the rows of an image are kept, and so are placeholders outside of images, which
    a policy may sample as ordinary tokens.
    """
    marked = list(tokens)
    for image in images:
        first = -1 - numbers.number(image) * ROWS
        rows = [place for place in range(image.start, image.end) if tokens[place] == placeholder]
        for row, place in enumerate(rows):
            marked[place] = first - row
    return tuple(marked)


def read_mark(token: int) -> tuple[int, int]:
    """Return (image number, row) of an id below 0."""
    return divmod(-1 - token, ROWS)


def find_blocks(marked: Sequence[int]) -> Tensor | None:
    """Return the run of image rows that each token belongs to, [P] int64 counted from 0, -1 for text; None without images."""
    is_row = torch.tensor(marked) < 0
    if not bool(is_row.any()):
        return None
    starts = is_row & ~torch.cat([torch.zeros(1, dtype=torch.bool), is_row[:-1]])
    return torch.where(is_row, starts.cumsum(0) - 1, -1)


# Vision inputs of the embedded engine's network: tower rows in place of images.
#
# The learner's own tower computes an image once for all prompts that contain it, until the weights change.

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

    def find_runs(self, marked: Sequence[int]) -> ImageRuns | None:
        """Return the images of a prompt whose tokens attend to later ones in it; None if there are none."""
        layers = self.tower.family.bidirectional
        blocks = None if layers == "none" else find_blocks(marked)
        return None if blocks is None else ImageRuns(blocks, layers == "windows")

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
        rows = torch.stack([features[number].rows[row] for number, row in marks]) if marks else None
        levels = range(min((len(each.deepstack) for each in features.values()), default=0))
        deepstack = tuple(torch.stack([features[number].deepstack[level][row] for number, row in marks]) for level in levels)
        return self.tower.insert(tokens, is_image, rows, deepstack).arguments(1, len(tokens))

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
