"""Rotary positions in three dimensions (time, row, column) of rows of tokens with images (Qwen2-VL, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.types import PromptImage


@dataclass(frozen=True)
class ImageGrid:
    """The tokens of an image: ``frames`` x ``rows`` x ``columns``."""

    frames: int
    rows: int
    columns: int

    @property
    def advance(self) -> int:
        """Number of positions between the image's first token and the token after it."""
        return max(self.rows, self.columns)

    def positions(self, start: int) -> Tensor:  # [3, frames * rows * columns]
        axes = (torch.arange(size) + start for size in (self.frames, self.rows, self.columns))
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


@dataclass(frozen=True, eq=False)
class RopePositions:
    """Positions of tokens, and the position of the token after each segment."""

    positions: Tensor  # [3, T] int64
    following: tuple[int, ...]  # of each segment


def row_positions(length: int, images: Sequence[PromptImage], grids: Sequence[ImageGrid]) -> RopePositions:
    """Return the positions of one row of ``length`` tokens, such as a prompt. A completion continues at ``following[0]``."""
    return tree_positions((0,), (length,), (-1,), images, grids)


def tree_positions(
    starts: Sequence[int],
    lengths: Sequence[int],
    parents: Sequence[int],
    images: Sequence[PromptImage],
    grids: Sequence[ImageGrid],
) -> RopePositions:
    """Return the positions of the tokens of a forest of segments, each of which continues its parent.

    Segments are in the order of the row, parents before their children, and each image lies in one segment. Text has one position in all
    three dimensions; the token after an image has the largest position of the image plus 1.
    """
    positions = torch.zeros(3, sum(lengths), dtype=torch.int64)
    waiting = list(zip(images, grids, strict=True))
    following: list[int] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        position, place, end = 0 if parent < 0 else following[parent], start, start + length
        while waiting and waiting[0][0].start < end:
            image, grid = waiting.pop(0)
            text = image.start - place
            positions[:, place : image.start] = torch.arange(position, position + text)
            positions[:, image.start : image.end] = grid.positions(position + text)
            position, place = position + text + grid.advance, image.end
        positions[:, place:end] = torch.arange(position, position + end - place)
        following.append(position + end - place)
    return RopePositions(positions, tuple(following))
