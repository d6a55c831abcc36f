"""Files of pixels that requests share."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.extensions.sglang.shared_pixels import SharedPixels
from strop.types import PromptImage


class CountingVision:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def pixels(self, image: Any) -> dict[str, torch.Tensor]:
        self.asked.append(image.digest)
        if image.content == b"broken":
            raise ValueError("no image")
        return {"pixel_values": torch.ones(2, 3)}


def image(digest: str = "a", content: bytes = b"") -> PromptImage:
    return PromptImage(start=2, length=4, content=content, digest=digest)


def test_requests_with_an_image_in_common_share_its_file_until_the_last_ends(tmp_path: Path) -> None:
    vision: Any = CountingVision()
    shared = SharedPixels(vision, tmp_path)

    async def hold(*images: PromptImage) -> None:
        async with shared.hold(images, salt="load 1") as said:
            fields = [json.loads(each) for each in said]
            assert [(each["start"], each["length"]) for each in fields] == [(2, 4)] * len(images)
            assert fields[0]["identity"] == f"{images[0].digest} load 1"
            await asyncio.sleep(0.01)
            for each in fields:
                assert torch.equal(torch.load(tmp_path / each["file"], weights_only=True)["pixel_values"], torch.ones(2, 3))

    async def together() -> None:
        await asyncio.gather(hold(image("a")), hold(image("a"), image("b")), hold(image("b"), image("b")))

    asyncio.run(together())
    assert sorted(vision.asked) == ["a", "b"] and not list(tmp_path.iterdir())


def test_an_image_that_cannot_be_read_is_an_error_of_its_request_and_leaves_no_file(tmp_path: Path) -> None:
    vision: Any = CountingVision()
    shared = SharedPixels(vision, tmp_path)

    async def hold() -> None:
        async with shared.hold([image("c", b"broken")], salt=""):
            pytest.fail("it was held")

    for _ in range(2):
        with pytest.raises(ValueError, match="no image"):
            asyncio.run(hold())
    assert not list(tmp_path.iterdir()) and vision.asked == ["c", "c"]
