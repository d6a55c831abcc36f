"""Section ``image_processor`` of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig


class ImageProcessorConfig(BaseConfig):
    """Image processing, the same for learner and engines."""

    identity_keys: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "options")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("allow_addresses",)

    min_pixels: int | None = Field(
        None,
        ge=1,
        description="Smaller images are enlarged to this (pixels); null is the model's default. For models that accept any size.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="Larger images are shrunk to this (pixels), which takes fewer tokens; null is the model's default.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Other settings of the model's image processor in Transformers, such as do_image_splitting or backend: pil.",
    )
    allow_addresses: bool = Field(
        False, description="Download images that the data references by http or https URLs, when they are read."
    )

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments used to load the image processor."""
        pixels = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {**{key: value for key, value in pixels.items() if value is not None}, **self.options}
