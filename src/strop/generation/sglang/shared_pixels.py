"""Pixels of a request's images, in files that the processes of its server read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage


class SharedPixels:
    """The images of requests that run now: requests with an image in common share its file."""

    def __init__(self, vision: VisionProcessor, folder: Path) -> None:
        self._vision, self._folder = vision, folder
        self._users = Counter[str]()  # of each file, by the hash of its image

    @asynccontextmanager
    async def hold(self, images: Sequence[PromptImage], *, salt: str) -> AsyncIterator[list[str]]:
        """Write the images' pixels and yield what the request says of each; the files are there until it ends.

        ``salt`` names the weights: what the tower made of an image is not reused with others. Raises ImageError.
        """
        names = [image.digest for image in images]
        self._users.update(names)
        try:
            for image in images:
                if not self._path(image).exists():
                    await asyncio.to_thread(self._write, image)
            yield [
                json.dumps(
                    {
                        "file": self._path(image).name,
                        "start": image.start,
                        "length": image.length,
                        "identity": f"{image.digest} {salt}",
                    }
                )
                for image in images
            ]
        finally:
            self._users.subtract(names)
            for image in images:
                if self._users[image.digest] <= 0:
                    del self._users[image.digest]
                    self._path(image).unlink(missing_ok=True)

    def _path(self, image: PromptImage) -> Path:
        return self._folder / f"pixels-{image.digest}.pt"

    def _write(self, image: PromptImage) -> None:
        path = self._path(image)
        writing = path.with_suffix(f".{id(image)}")
        torch.save(dict(self._vision.pixels(image)), writing)
        writing.rename(path)  # whole, for requests that find it
