"""Pixels of images that were read lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from strop.models.vision.vision_families import Pixels

CACHED_BYTES = 512 * 2**20


class PixelCache:
    """What the tower reads of an image, by the digest of its file, for several threads. A copy of it, and a pickle, is empty."""

    def __init__(self, limit: int = CACHED_BYTES) -> None:
        self.limit = limit
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, digest: str, make: Callable[[], Pixels]) -> Pixels:
        """Return the pixels of an image; what was not asked for longest makes room for new ones."""
        with self._lock:
            if digest in self._pixels:
                self._pixels.move_to_end(digest)
                return self._pixels[digest]
        pixels = make()
        with self._lock:
            if digest not in self._pixels:
                self._pixels[digest] = pixels
                self._bytes += _count_bytes(pixels)
            while self._bytes > self.limit and len(self._pixels) > 1:
                self._bytes -= _count_bytes(self._pixels.popitem(last=False)[1])
        return pixels

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelCache, (self.limit,)


def _count_bytes(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
