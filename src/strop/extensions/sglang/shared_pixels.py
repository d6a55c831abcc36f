"""Pixels of a request's images, in files that the processes of its server read."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch

from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage


class SharedPixels:
    """The images of requests that run now: requests with an image in common share its file."""

    def __init__(self, vision: VisionProcessor, folder: Path) -> None:
        self._vision, self._folder = vision, folder
        self._users = Counter[str]()  # of each file, by the hash of its image
        self._written: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def hold(self, images: Sequence[PromptImage], *, salt: str) -> AsyncIterator[list[str]]:
        """Write the images' pixels and yield what the request says of each; the files are there until it ends.

        ``salt`` names the weights: what the tower made of an image is not reused with others. Raises ImageError.
        """
        names = [image.digest for image in images]
        self._users.update(names)
        try:
            for image in images:
                if image.digest not in self._written:
                    self._written[image.digest] = asyncio.create_task(asyncio.to_thread(self._write, image))
                await asyncio.shield(self._written[image.digest])  # a request that is cancelled leaves it to the others
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
            for image in {image.digest: image for image in images}.values():
                if self._users[image.digest] <= 0:
                    del self._users[image.digest]
                    self._remove(image)

    def _path(self, image: PromptImage) -> Path:
        return self._folder / f"pixels-{image.digest}.pt"

    def _write(self, image: PromptImage) -> None:
        torch.save(dict(self._vision.pixels(image)), self._path(image))

    def _remove(self, image: PromptImage) -> None:
        if (task := self._written.pop(image.digest, None)) is not None:
            task.add_done_callback(partial(self._unlink, image))  # at once, where it is written

    def _unlink(self, image: PromptImage, _: asyncio.Task[None]) -> None:
        if image.digest not in self._written:  # by a later request
            self._path(image).unlink(missing_ok=True)
