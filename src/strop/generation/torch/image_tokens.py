"""Images in the embedded engine: unique ids for their tokens, and the positions of later tokens.

All images have the same placeholder token, so a cache keyed by tokens would confuse images. Here each row of each image has its
own id, below 0, which represents it in all caches: prompts are equal only if their images are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
