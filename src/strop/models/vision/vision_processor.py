"""Converts messages with images to tokens, and images to vision tower inputs."""

from __future__ import annotations

import logging
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from strop.models.loading import from_pretrained, is_vision_config, locate_model, quiet_transformers
from strop.models.vision.image_files import decode_image, hash_image, read_image
from strop.models.vision.vision_families import Pixels, UnknownFamily, VisionFamily, find_family, find_image_token
from strop.types import Image, PromptImage


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Tokens, and the images among them; positions count from the first token."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()


log = logging.getLogger(__name__)

OTHER_FILES = ("processor_config.json", "video_preprocessor_config.json")  # in addition to the image processor's file


class VisionProcessor:
    """Writes the images of prompts as tokens, and creates the tower's inputs.

    Its only state is a cache: equal files give equal tokens and pixels, in any order.
    """

    def __init__(
        self,
        family: VisionFamily,
        image_processor: Any,
        tokenizer: Any,
        *,
        folder: Path | None = None,
        allow_addresses: bool = False,
        settings: Mapping[str, Any] | None = None,
        source: Path | None = None,
    ) -> None:
        """``folder``: base folder of image paths. ``allow_addresses``: download images. ``settings``: changes to the image
        processor, for engines that load their own. ``source``: the model's folder."""
        family.check(image_processor)
        self.settings = dict(settings or {})
        self.source = source
        self.family = family
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.folder = folder
        self.allow_addresses = allow_addresses
        self.image_token_id = find_image_token(family.config)
        self.placeholder = family.placeholder(tokenizer)
        self._pixels = PixelCache()

    def save(self, folder: Path) -> None:
        """Write the image processor, and the model's other processor files, to a model's folder."""
        self.image_processor.save_pretrained(folder)
        for path in () if self.source is None else (self.source / name for name in OTHER_FILES):
            if path.exists() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    def read(self, image: Image) -> bytes:
        """Return the file of a message's image. Raises ImageError."""
        return read_image(image, folder=self.folder, allow_addresses=self.allow_addresses)

    def pixels(self, image: PromptImage | bytes) -> Pixels:
        """Return the tower inputs of one image, on the CPU: ``pixel_values`` and further keys of its family. Raises ImageError."""
        content, digest = (image, hash_image(image)) if isinstance(image, bytes) else (image.content, image.digest)
        return self._pixels.get(digest, lambda: self.family.process(self.image_processor, decode_image(content)))

    def write_images(self, text: str, contents: Sequence[bytes]) -> str:
        """Return a rendered text with each placeholder replaced by its image's tokens. Raises ValueError if their numbers differ."""
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
        """Return the images with their positions among tokens, in order. Raises ValueError unless the tokens match their rows
        exactly.
        """
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
        """Encode a rendered text with placeholders for these images, in order. Raises ValueError, ImageError."""
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

    Works without torchvision; Transformers then resizes with Pillow. Raises ModelNotFound, ValueError.
    """
    from transformers import AutoImageProcessor

    location, _ = locate_model(name)
    family, settings = find_family(config), dict(options or {})
    for key in ("min_pixels", "max_pixels"):
        if key in settings and family.grid_key is None:
            raise ValueError(
                f"policy.image_processor.{key}: models of type {config.model_type} read images of fixed sizes; leave it out, or set their "
                "own settings (policy.image_processor.options)"
            )
    with quiet_transformers():
        image_processor = from_pretrained(AutoImageProcessor, location, **settings)
    kind = getattr(image_processor, "valid_kwargs", None)  # of Transformers' own
    if kind is not None and (unknown := sorted(settings.keys() - {"backend", *kind.__annotations__})):
        raise ValueError(f"policy.image_processor.options.{unknown[0]}: {type(image_processor).__name__} has no such setting")
    log.info("images are read by %s", type(image_processor).__name__)
    source = Path(location) if Path(location).is_dir() else None
    return VisionProcessor(
        family, image_processor, tokenizer, folder=folder, allow_addresses=allow_addresses, settings=settings, source=source
    )


def find_vision_processor(
    name: str, config: Any, tokenizer: Any, *, options: Mapping[str, Any] | None = None, allow_addresses: bool = False
) -> VisionProcessor | None:
    """Return the image processor of a model that reads images; None for others, with a log message if the model has a vision
    tower.
    """
    if not is_vision_config(config):
        if options:
            log.warning("policy.image_processor has no effect: %s reads only text", name)
        return None
    try:
        return load_vision_processor(name, config, tokenizer, options=options, allow_addresses=allow_addresses)
    except OSError as error:
        log.warning("%s reads only text here: its folder has no image processor (%s)", name, str(error).splitlines()[0])
    except UnknownFamily as error:
        log.warning("%s", error)
    return None


# Pixels of recently read images.


CACHED_BYTES = 512 * 2**20


class PixelCache:
    """Thread-safe cache of tower inputs by the digest of an image file. Copies and pickles of it are empty."""

    def __init__(self, limit: int = CACHED_BYTES) -> None:
        self.limit = limit
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, digest: str, make: Callable[[], Pixels]) -> Pixels:
        """Return the pixels of an image; the least recently used entries are evicted."""
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
