"""Image files: read from paths, data: URLs and columns of data sets, and decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from strop.types import Image, PromptImage

MAX_BYTES = 64 * 2**20  # of one encoded file
MAX_PIXELS = 64 * 10**6  # of one image: even a small file may declare any size
_TIMEOUT = 30  # seconds


class ImageError(ValueError):
    """An image cannot be read; the message says which and why."""


def read_image(source: Any, *, folder: Path | None = None, allow_addresses: bool = False) -> bytes:
    """Return the encoded file of an image. Raises ImageError.

    ``source``: an ``Image`` or its path, ``file://`` or ``data:`` URL, the encoded file itself, a value of a column of images
    (``{"bytes": ..., "path": ...}``), or an image of PIL. Paths are relative to ``folder``. URLs (http, https) are read only
    with ``allow_addresses``, because a run would depend on a server's current answers.
    """
    if isinstance(source, Image):
        source = source.source
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        content = bytes(source)
    elif isinstance(source, str | Path):
        content = _read_reference(str(source), folder, allow_addresses)
    elif hasattr(source, "save") and hasattr(source, "convert"):
        content = encode_image(source)
    else:
        raise ImageError(f"an image is {source!r:.80}; it must be a path, a data: URL, the bytes of a file, or an image of PIL")
    _check_file(content, source)
    return content


def hash_image(content: bytes) -> str:
    """Return a digest that identifies equal images."""
    return hashlib.sha256(content).hexdigest()


def decode_image(content: bytes) -> Any:
    """Return an image as a PIL RGB image, rotated by its EXIF orientation, with transparency on white. Raises ImageError.

    Learner and engine decode with this function, so that they see the same pixels.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(io.BytesIO(content)) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except Exception as error:  # decoders raise all kinds of errors for broken files
        raise ImageError(f"an image of {len(content)} bytes cannot be decoded: {error}") from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layers = image.convert("RGBA")
        image = Pillow.alpha_composite(Pillow.new("RGBA", layers.size, "white"), layers)
    return image.convert("RGB")


def encode_image(image: Any) -> bytes:
    """Return PIL's image as a PNG file."""
    memory = io.BytesIO()
    image.save(memory, "PNG")
    return memory.getvalue()


def _read_reference(source: str, folder: Path | None, allow_addresses: bool) -> bytes:
    scheme = source.partition(":")[0].lower() if ":" in source else ""
    if scheme == "data":
        return _decode_data_url(source)
    if scheme in ("http", "https"):
        if not allow_addresses:
            raise ImageError(
                f"an image is a URL, {source:.120}: a run would depend on a server's answers, and data could make this machine contact "
                "any server. Download it and name the file, or set policy.image_processor.allow_addresses=true"
            )
        return _download(source)
    path = Path(source[len("file://") :] if scheme == "file" else source).expanduser()
    path = path if folder is None or path.is_absolute() else folder / path
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(_too_large(path.stat().st_size, source))
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"the image {source:.200} cannot be read: {error.strerror or error}") from error


def _decode_data_url(source: str) -> bytes:
    header, comma, payload = source.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        return base64.b64decode(payload, validate=True) if header.endswith(";base64") else unquote_to_bytes(payload)
    except (ValueError, binascii.Error) as error:
        raise ImageError(f"an image is a data: URL that cannot be decoded ({error}): {source:.60}") from error


def _download(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:
            content: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ImageError(f"the image {address:.200} cannot be downloaded: {error}") from error
    return content


def _check_file(content: bytes, source: object) -> None:
    """Raise ImageError for a file that is not an image, or too large to decode. Reads only its header."""
    from PIL import Image as Pillow

    named = f"{source!r:.120}" if isinstance(source, str | Path) else f"of {len(content)} bytes"
    if len(content) > MAX_BYTES:
        raise ImageError(_too_large(len(content), named))
    try:
        with Pillow.open(io.BytesIO(content)) as opened:
            width, height = opened.size
    except Exception as error:  # as above
        raise ImageError(f"the image {named} has an unsupported format: {error!s:.120}") from error
    if width * height > MAX_PIXELS:
        raise ImageError(f"the image {named} has {width} x {height} pixels, more than {MAX_PIXELS:,}; make it smaller")


def _too_large(size: int, named: object) -> str:
    return f"the image {named} has {size:,} bytes, more than {MAX_BYTES:,}; make it smaller"


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Tokens, and the images among them; positions count from the first token."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()
