"""Section ``image_processor`` of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig


class ImageProcessorConfig(BaseConfig):
    """How images are read: by learner and engines alike."""

    identity_keys: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "options")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("allow_addresses",)

    min_pixels: int | None = Field(
        None,
        ge=1,
        description="Smaller images are enlarged to this (pixels); null is the model's own. For models that read any size.",
    )
    max_pixels: int | None = Field(
        None, ge=1, description="Larger images are shrunk to this (pixels), and take fewer tokens; null is the model's own."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Other settings of the model's image processor in Transformers, such as do_image_splitting or backend: pil.",
    )
    allow_addresses: bool = Field(
        False, description="Download images that the data names by http or https addresses, when they are read."
    )

    def settings(self) -> Mapping[str, Any]:
        """Return what the image processor is loaded with."""
        pixels = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {**{key: value for key, value in pixels.items() if value is not None}, **self.options}
