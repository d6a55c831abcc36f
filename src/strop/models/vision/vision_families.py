"""How families of vision-language models write an image in a prompt, and the inputs of their towers.

A family names the ``model_type`` of the configurations that it reads, in ``kinds``; one of another package is an entry point in the group
``strop.vision_families`` under that name. The text that stands for an image is that of the family's processor in Transformers; the tests
compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from strop import plugins

Pixels = Mapping[str, Tensor]  # tower inputs of ONE image, under their Transformers names
BidirectionalLayers = Literal["none", "windows", "all"]


class UnknownFamily(ValueError):
    """A model with images in an unsupported form."""


def find_image_token(config: Any) -> int:
    """Return the id of the token that stands for one row of the vision tower."""
    value = getattr(config, "image_token_id", None)
    return int(config.image_token_index if value is None else value)


@dataclass(frozen=True)
class VisionFamily(ABC):
    """The differences between families. ``config`` is the model's."""

    config: Any
    kinds: ClassVar[tuple[str, ...]] = ()
    token_types: ClassVar[str] = "token_type_ids"  # the model's argument for which tokens are images
    tower_inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
    )  # pixel keys; those of several images are joined along the first dimension
    grid_key: ClassVar[str | None] = None  # pixel key of the grid, for rotary positions in three dimensions

    @property
    def bidirectional(self) -> BidirectionalLayers:
        """The layers in which the tokens of an image attend to each other in both directions; ``windows``: those with a window."""
        return "none"

    @abstractmethod
    def placeholder(self, tokenizer: Any) -> str:
        """The chat template's text for an image."""

    @abstractmethod
    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        """The placeholder text of an image, with one image token per row of the tower."""

    @abstractmethod
    def count_rows(self, pixels: Pixels) -> int:
        """Number of tower rows of an image."""

    def process(self, processor: Any, image: Any) -> dict[str, Tensor]:
        """Return the tower inputs of a PIL image."""
        return {name: torch.as_tensor(value) for name, value in processor(images=[image], return_tensors="pt").items()}

    def arrange(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the joined inputs of several images in the form ``get_image_features`` takes."""
        return inputs

    def check(self, processor: Any) -> None:  # noqa: B027  most families take any settings
        """Raise ValueError for image processor settings that cannot be used in training."""

    def image_token(self, tokenizer: Any) -> str:
        token: str = tokenizer.convert_ids_to_tokens(find_image_token(self.config))
        return token


class QwenVL(VisionFamily):
    """Qwen2-VL to Qwen3.5 and GLM-4.1V to GLM-4.6V: patches of any number, merged in squares, with rotary positions in three dimensions."""

    kinds = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v")
    tower_inputs = ("pixel_values", "image_grid_thw")
    grid_key = "image_grid_thw"

    def placeholder(self, tokenizer: Any) -> str:
        return self.image_token(tokenizer)

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        return self.image_token(tokenizer) * self.count_rows(pixels)

    def count_rows(self, pixels: Pixels) -> int:
        merged: int = self.config.vision_config.spatial_merge_size**2
        return int(pixels["image_grid_thw"].prod()) // merged


class Gemma3(VisionFamily):
    """Gemma 3: a fixed number of tokens between two markers; they attend to each other in both directions."""

    kinds = ("gemma3",)

    @property
    def bidirectional(self) -> BidirectionalLayers:
        return "all"

    def placeholder(self, tokenizer: Any) -> str:
        token: str = tokenizer.convert_ids_to_tokens(self.config.boi_token_index)
        return token

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        end = tokenizer.convert_ids_to_tokens(self.config.eoi_token_index)
        return f"\n\n{self.placeholder(tokenizer)}{self.image_token(tokenizer) * self.count_rows(pixels)}{end}\n\n"

    def count_rows(self, pixels: Pixels) -> int:
        return int(self.config.mm_tokens_per_image)

    def process(self, processor: Any, image: Any) -> dict[str, Tensor]:
        return {"pixel_values": super().process(processor, image)["pixel_values"]}

    def check(self, processor: Any) -> None:
        if getattr(processor, "do_pan_and_scan", None):
            raise ValueError(
                "the image processor has do_pan_and_scan, which cuts an image into several with text between them; set "
                "policy.image_processor.do_pan_and_scan=false"
            )


class Gemma4(VisionFamily):
    """Gemma 4: patches of an image that keeps its proportions, averaged in squares, between two markers.

    The larger models let the tokens of an image see each other in both directions, in the layers with a window.
    """

    kinds = ("gemma4",)
    token_types = "mm_token_type_ids"
    tower_inputs = ("pixel_values", "image_position_ids")

    @property
    def bidirectional(self) -> BidirectionalLayers:
        return "windows" if self.config.text_config.use_bidirectional_attention == "vision" else "none"

    def placeholder(self, tokenizer: Any) -> str:
        return self.image_token(tokenizer)

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        begin, end = (tokenizer.convert_ids_to_tokens(token) for token in (self.config.boi_token_id, self.config.eoi_token_id))
        return f"{begin}{self.image_token(tokenizer) * self.count_rows(pixels)}{end}"

    def count_rows(self, pixels: Pixels) -> int:
        patches = int((pixels["image_position_ids"] >= 0).all(-1).sum())  # the others are padding
        return patches // int(self.config.vision_config.pooling_kernel_size) ** 2

    def process(self, processor: Any, image: Any) -> dict[str, Tensor]:
        read = super().process(processor, image)
        return {name: read[name] for name in self.tower_inputs}


class Llava(VisionFamily):
    """LLaVA: the patches of a fixed-size image, with or without the tower's class token."""

    kinds = ("llava",)

    def placeholder(self, tokenizer: Any) -> str:
        return self.image_token(tokenizer)

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        return self.image_token(tokenizer) * self.count_rows(pixels)

    def count_rows(self, pixels: Pixels) -> int:
        height, width = pixels["pixel_values"].shape[-2:]
        patch = self.config.vision_config.patch_size
        has_class = hasattr(self.config.vision_config, "projection_dim")  # CLIP's tower has a class token, SigLIP's has none
        cut = self.config.vision_feature_select_strategy == "default"
        rows: int = (height // patch) * (width // patch) + has_class - cut
        return rows


class Idefics3(VisionFamily):
    """Idefics3 and SmolVLM: an image is cut into tiles, each marked with its row and column, followed by the whole image."""

    kinds = ("idefics3", "smolvlm")
    tower_inputs = ("pixel_values", "pixel_attention_mask")

    def placeholder(self, tokenizer: Any) -> str:
        return self.image_token(tokenizer)

    def write(self, pixels: Pixels, tokenizer: Any) -> str:
        rows, columns = int(pixels["rows"]), int(pixels["cols"])
        fake, images = "<fake_token_around_image>", self.image_token(tokenizer) * self._rows_of_tile
        tiles = "".join(
            "".join(f"{fake}<row_{row}_col_{column}>{images}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        whole = f"{fake}<global-img>{images}{fake}"
        return f"{tiles}\n{whole}" if tiles else whole

    def count_rows(self, pixels: Pixels) -> int:
        return int(pixels["pixel_values"].shape[0]) * self._rows_of_tile

    def process(self, processor: Any, image: Any) -> dict[str, Tensor]:
        read = processor(images=[image], return_tensors="pt", return_row_col_info=True)
        tiles = {name: read[name][0] for name in ("pixel_values", "pixel_attention_mask")}  # [tiles, ...]
        return {**tiles, **{name: torch.tensor(read[name][0][0]) for name in ("rows", "cols")}}

    def arrange(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tiles[None] for name, tiles in inputs.items()}  # one row of tiles

    @property
    def _rows_of_tile(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2)


_OWN: Mapping[str, type[VisionFamily]] = {kind: each for each in (QwenVL, Gemma3, Gemma4, Llava, Idefics3) for kind in each.kinds}


def known_families() -> list[str]:
    """Return the ``model_type`` of all models whose images can be written."""
    return [*_OWN, *plugins.declared("vision_families")]


def find_family(config: Any) -> VisionFamily:
    """Return the family of a vision-language model. Raises UnknownFamily for an unsupported one."""
    kind = str(getattr(config, "model_type", ""))
    if kind not in known_families():
        raise UnknownFamily(
            f"policy.model_name: models of type {kind!r} read images in a way that Strop does not know; it knows "
            f"{', '.join(known_families())}. Without images in the data the model trains on text"
        )
    family: type[VisionFamily] = _OWN.get(kind) or plugins.load("vision_families", kind)
    return family(config)
