"""Vision tower features, inserted at the positions of their image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.vision.rope_positions import ImageGrid
from strop.models.vision.vision_processor import VisionProcessor
from strop.types import PromptImage

TOWERS = ("visual", "vision_tower", "vision_model")  # attribute names in a model's base, by family


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The tower's rows for one image."""

    rows: Tensor  # [R, H]: embeddings of the image's tokens
    deepstack: tuple[Tensor, ...] = ()  # [R, H] each: added to the outputs of the first decoder layers (Qwen3-VL)


@dataclass(frozen=True, eq=False)
class DecoderInputs:
    """Decoder inputs for a row of tokens with images."""

    embeddings: Tensor  # [T, H]
    is_image: Tensor  # [T] bool: whether a token stands for a tower row
    deepstack: tuple[Tensor, ...] = field(default=())  # [images' tokens, H] each, in the order of the row

    def arguments(self, *shape: int) -> dict[str, Any]:
        """Return the decoder's keyword arguments, for rows of the shape ``shape`` that together have T tokens."""
        arguments: dict[str, Any] = {"inputs_embeds": self.embeddings.view(*shape, -1)}
        if self.deepstack:
            arguments |= {"visual_pos_masks": self.is_image.view(shape), "deepstack_visual_embeds": list(self.deepstack)}
        return arguments


def find_tower(model: Any) -> nn.Module:
    """Return the vision tower of a model, without a separate projector into the language model."""
    tower: nn.Module = next(module for name in TOWERS if (module := getattr(model.model, name, None)) is not None)
    return tower


class VisionTower:
    """The tower of a vision-language model with its image processor: images -> rows of embeddings.

    Each image is computed independently of its neighbours, and equal images within a call are computed once.
    """

    def __init__(self, model: Any, processor: VisionProcessor) -> None:
        self.model = model
        self.processor = processor
        self.family = processor.family

    def grids(self, images: Sequence[PromptImage]) -> list[ImageGrid]:
        """Return the grids of images' tokens, for rotary positions in three dimensions."""
        key, merge = self.family.grid_key, getattr(self.family.config.vision_config, "spatial_merge_size", 1)
        assert key is not None
        sizes = (self.processor.pixels(image)[key].flatten().tolist() for image in images)
        return [ImageGrid(frames, rows // merge, columns // merge) for frames, rows, columns in sizes]

    def features(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        """Return the tower's features of each image; images with equal pixel shapes share a pass."""
        distinct = {image.digest: image for image in images}
        by_shape: dict[tuple[int, ...], list[PromptImage]] = {}
        for image in distinct.values():
            shape = tuple(self.processor.pixels(image)["pixel_values"].shape[1:])
            by_shape.setdefault(shape, []).append(image)
        made = {
            image.digest: features
            for alike in by_shape.values()
            for image, features in zip(alike, self._pass(alike), strict=True)
        }
        return [made[image.digest] for image in images]

    def _pass(self, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        pixels = [self.processor.pixels(image) for image in images]
        counts = [self.family.count_rows(each) for each in pixels]
        device = self.model.get_input_embeddings().weight.device
        together = {name: torch.cat([each[name] for each in pixels]).to(device) for name in self.family.tower_inputs}
        output = self.model.model.get_image_features(**self.family.arrange(together), return_dict=True)
        rows = _flatten(output.pooler_output).split(counts)
        deepstack = [_flatten(level).split(counts) for level in getattr(output, "deepstack_features", None) or ()]
        return [ImageFeatures(own, tuple(level[index] for level in deepstack)) for index, own in enumerate(rows)]

    def embed(self, tokens: Tensor, images: Sequence[PromptImage]) -> DecoderInputs:
        """Return the embeddings of a row of tokens [T] with images at their places, on the model's device.

        The policy may also sample the image token; outside of an image it is an ordinary token.
        """
        is_image = torch.zeros(len(tokens), dtype=torch.bool)
        for image in images:
            own = slice(image.start, image.end)
            is_image[own] = tokens[own] == self.processor.image_token_id
        layer = self.model.get_input_embeddings()
        places = is_image.nonzero().squeeze(1)
        embeddings = layer(tokens.masked_fill(is_image, 0).to(layer.weight.device))  # the image token may have no embedding
        if not len(places):
            return DecoderInputs(embeddings, is_image.to(embeddings.device))
        features = self.features(images)
        rows = torch.cat([each.rows for each in features]).to(embeddings.dtype)
        if len(rows) != len(places):
            raise ValueError(f"{len(places)} tokens of a batch stand for images whose tower makes {len(rows)} rows")
        embeddings = embeddings.index_copy(0, places.to(embeddings.device), rows)
        levels = zip(*(each.deepstack for each in features), strict=True)
        return DecoderInputs(embeddings, is_image.to(embeddings.device), tuple(torch.cat(level) for level in levels))

    def touch(self, embeddings: Tensor) -> Tensor:
        """Return embeddings that depend on each trained weight outside the decoder, with a gradient of zero.

        A micro-batch without images then has the same gradients as one with them, which ranks that train together need.
        """
        inside = {id(parameter) for parameter in self.model.get_decoder().parameters()}
        head = self.model.get_output_embeddings()
        inside |= {id(parameter) for parameter in head.parameters()}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad and id(parameter) not in inside]
        if not trained or not torch.is_grad_enabled():
            return embeddings
        nothing = torch.stack([parameter.sum().to(embeddings.dtype) * 0 for parameter in trained]).sum()
        return embeddings + nothing


def freeze_tower(model: Any) -> int:
    """Freeze the vision tower, and return its number of weights. A separate projector is still trained."""
    parameters = list(find_tower(model).parameters())
    for parameter in parameters:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in parameters)


def _flatten(rows: Any) -> Tensor:
    """[[R, H], ...] or [images, R, H] -> [rows of all images, H]"""
    joined: Tensor = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return joined.reshape(-1, joined.shape[-1])
