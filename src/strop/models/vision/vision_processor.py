"""Messages with images to tokens, and images to what a vision tower reads."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.models.loading import from_pretrained, locate_model, quiet_transformers
from strop.models.vision.encoded_prompt import EncodedPrompt
from strop.models.vision.image_files import decode_image, hash_image, read_image
from strop.models.vision.vision_families import Pixels, VisionFamily, find_family, find_image_token
from strop.types import Image, PromptImage

log = logging.getLogger(__name__)

CACHED_BYTES = 512 * 2**20  # of pixels that are kept for the next pass


class VisionProcessor:
    """Writes the images of prompts as tokens, and makes what the tower reads of them.

    It has no state but a cache: equal files give equal tokens and pixels, in any order.
    """

    def __init__(
        self,
        family: VisionFamily,
        image_processor: Any,
        tokenizer: Any,
        *,
        folder: Path | None = None,
        allow_addresses: bool = False,
    ) -> None:
        """``folder``: that paths of images are relative to. ``allow_addresses``: images are downloaded."""
        family.check(image_processor)
        self.family = family
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.folder = folder
        self.allow_addresses = allow_addresses
        self.image_token_id = find_image_token(family.config)
        self.placeholder = family.placeholder(tokenizer)
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._cached_bytes = 0

    def read(self, image: Image) -> bytes:
        """Return the file of a message's image. Raises ImageError."""
        return read_image(image, folder=self.folder, allow_addresses=self.allow_addresses)

    def pixels(self, image: PromptImage | bytes) -> Pixels:
        """Return what the tower reads of one image: ``pixel_values`` and what else its family has, on the CPU. Raises ImageError."""
        content, digest = (image, hash_image(image)) if isinstance(image, bytes) else (image.content, image.digest)
        known = self._pixels.pop(digest, None)
        if known is None:
            known = self.family.process(self.image_processor, decode_image(content))
            self._cached_bytes += _size(known)
        self._pixels[digest] = known
        while self._cached_bytes > CACHED_BYTES and len(self._pixels) > 1:
            self._cached_bytes -= _size(self._pixels.popitem(last=False)[1])
        return known

    def write_images(self, text: str, contents: Sequence[bytes]) -> str:
        """Return a rendered text with what stands for its images in their places. Raises ValueError for another number of places."""
        parts = text.split(self.placeholder)
        if len(parts) != len(contents) + 1:
            raise ValueError(
                f"the rendered messages have {len(parts) - 1} places for images ({self.placeholder!r}), and {len(contents)} images: the "
                "text of a message contains that token, or the chat template leaves images out. Remove it from the text, or set "
                "policy.tokenizer.chat_template"
            )
        written = [self.family.write(self.pixels(content), self.tokenizer) for content in contents]
        return parts[0] + "".join(image + part for image, part in zip(written, parts[1:], strict=True))

    def find_images(self, tokens: Sequence[int], contents: Sequence[bytes]) -> tuple[PromptImage, ...]:
        """Return where images stand among tokens, in order. Raises ValueError unless the tokens have just the rows of these images."""
        places = [place for place, token in enumerate(tokens) if token == self.image_token_id]
        counts = [self.family.count_rows(self.pixels(content)) for content in contents]
        if sum(counts) != len(places):
            raise ValueError(
                f"{len(places)} tokens stand for images whose tower makes {sum(counts)} rows: the tokenizer splits or merges the image "
                "token; check that policy.tokenizer.name is the model's own tokenizer"
            )
        found, done = [], 0
        for content, count in zip(contents, counts, strict=True):
            first, last = places[done], places[done + count - 1]
            found.append(PromptImage(start=first, length=last - first + 1, content=content, digest=hash_image(content)))
            done += count
        return tuple(found)

    def encode_text(self, text: str, contents: Sequence[bytes]) -> EncodedPrompt:
        """Encode a rendered text whose places are for these images, in order. Raises ValueError, ImageError."""
        tokens: list[int] = self.tokenizer(self.write_images(text, contents), add_special_tokens=False)["input_ids"]
        return EncodedPrompt(tokens, self.find_images(tokens, contents))


def load_vision_processor(
    name: str,
    config: Any,
    tokenizer: Any,
    *,
    options: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    allow_addresses: bool = False,
) -> VisionProcessor:
    """Load the image processor of a model; ``options`` change its settings (``max_pixels``, ``do_image_splitting``, ...).

    It does not need torchvision: where that is missing, Transformers resizes with Pillow. Raises ModelNotFound, ValueError.
    """
    from transformers import AutoImageProcessor

    location, _ = locate_model(name)
    with quiet_transformers():
        image_processor = from_pretrained(AutoImageProcessor, location, **dict(options or {}))
    log.info("images are read by %s", type(image_processor).__name__)
    return VisionProcessor(find_family(config), image_processor, tokenizer, folder=folder, allow_addresses=allow_addresses)


def _size(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
