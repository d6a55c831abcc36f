"""The image files shown in stored rollouts, each once: ``<log folder>/rollouts/images/DIGEST.png``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from strop.data.sources.image_columns import FORMATS

if TYPE_CHECKING:
    from strop.storage.files import RecordFiles
    from strop.types import PromptImage

IMAGES_FOLDER = "images"
DIGEST_LETTERS = 32  # letters of a digest in file names and records


def image_name(digest: str) -> str:
    """Return the name of an image in records: the first letters of its digest."""
    return digest[:DIGEST_LETTERS]


class StoredImages:
    """Image files in a folder, named by their content."""

    def __init__(self, rollouts: Path) -> None:
        self.folder = rollouts / IMAGES_FOLDER
        self._written: set[str] = set()

    def write(self, images: Iterable[PromptImage], files: RecordFiles) -> None:
        """Store the images that are not stored yet."""
        for image in images:
            name = image_name(image.digest)
            if name in self._written:
                continue
            self._written.add(name)
            if self.find(name) is None:
                files.write(self.folder / f"{name}.{_find_suffix(image.content)}", image.content)

    def find(self, name: str) -> Path | None:
        """Return the file of an image by its name in a record; None if it is not stored."""
        return next(self.folder.glob(f"{name}.*"), None) if name.isalnum() else None


def _find_suffix(content: bytes) -> str:
    return next((suffix for start, suffix in FORMATS if content.startswith(start)), "bin")
