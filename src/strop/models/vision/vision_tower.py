"""Vision tower features, inserted at the positions of their image tokens, which see each other in both directions in Gemma 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec, masked_attention
from strop.models.vision.vision_processor import VisionProcessor
from strop.types import Batch, PromptImage


@dataclass(frozen=True)
class ImageGrid:
    """The tokens of an image: ``frames`` x ``rows`` x ``columns``."""

    frames: int
    rows: int
    columns: int

    @property
    def advance(self) -> int:
        """Number of positions between the image's first token and the token after it."""
        return max(self.rows, self.columns)

    def positions(self, start: int) -> Tensor:  # [3, frames * rows * columns]
        axes = (torch.arange(size) + start for size in (self.frames, self.rows, self.columns))
        return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


@dataclass(frozen=True, eq=False)
class RopePositions:
    """Positions of tokens, and the position of the token after each segment."""

    positions: Tensor  # [3, T] int64
    following: tuple[int, ...]  # of each segment


def row_positions(length: int, images: Sequence[PromptImage], grids: Sequence[ImageGrid]) -> RopePositions:
    """Return the positions of one row of ``length`` tokens, such as a prompt. A completion continues at ``following[0]``."""
    return tree_positions((0,), (length,), (-1,), images, grids)


def tree_positions(
    starts: Sequence[int],
    lengths: Sequence[int],
    parents: Sequence[int],
    images: Sequence[PromptImage],
    grids: Sequence[ImageGrid],
) -> RopePositions:
    """Return the positions of the tokens of a forest of segments, each of which continues its parent.

    Segments are in the order of the row, parents before their children, and each image lies in one segment. Text has one position in all
    three dimensions; the token after an image has the largest position of the image plus 1.
    """
    positions = torch.zeros(3, sum(lengths), dtype=torch.int64)
    waiting = list(zip(images, grids, strict=True))
    following: list[int] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        position, place, end = 0 if parent < 0 else following[parent], start, start + length
        while waiting and waiting[0][0].start < end:
            image, grid = waiting.pop(0)
            text = image.start - place
            positions[:, place : image.start] = torch.arange(position, position + text)
            positions[:, image.start : image.end] = grid.positions(position + text)
            position, place = position + text + grid.advance, image.end
        positions[:, place:end] = torch.arange(position, position + end - place)
        following.append(position + end - place)
    return RopePositions(positions, tuple(following))


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
    of_layers: Tensor | None = None  # [T, layers, E]: each layer's own embeddings of the tokens (Gemma 4)

    def arguments(self, *shape: int) -> dict[str, Any]:
        """Return the decoder's keyword arguments, for rows of the shape ``shape`` that together have T tokens."""
        arguments: dict[str, Any] = {"inputs_embeds": self.embeddings.view(*shape, -1)}
        if self.deepstack:
            arguments |= {"visual_pos_masks": self.is_image.view(shape), "deepstack_visual_embeds": list(self.deepstack)}
        if self.of_layers is not None:
            arguments["per_layer_inputs"] = self.of_layers.view(*shape, *self.of_layers.shape[1:])
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
        if not is_image.any():
            return self.insert(tokens, is_image, None)
        features = self.features(images)
        rows, count = torch.cat([each.rows for each in features]), int(is_image.sum())
        if len(rows) != count:
            raise ValueError(f"{count} tokens of a batch stand for images whose tower makes {len(rows)} rows")
        levels = zip(*(each.deepstack for each in features), strict=True)
        return self.insert(tokens, is_image, rows, tuple(torch.cat(level) for level in levels))

    def insert(self, tokens: Tensor, is_image: Tensor, rows: Tensor | None, deepstack: tuple[Tensor, ...] = ()) -> DecoderInputs:
        """Return the embeddings of tokens [T] with the tower's ``rows`` [images' tokens, H] in the places of images."""
        layer, decoder = self.model.get_input_embeddings(), self.model.get_decoder()
        device = layer.weight.device
        padding = getattr(decoder.config, "pad_token_id", None) or 0  # the image token may have no embedding
        tokens, is_image = tokens.masked_fill(is_image, padding).to(device), is_image.to(device)
        embeddings = layer(tokens)
        if rows is not None:
            embeddings = embeddings.index_copy(0, is_image.nonzero().squeeze(1), rows.to(embeddings.dtype))
        of_layers = None
        if getattr(decoder.config, "hidden_size_per_layer_input", None):
            of_layers = decoder.get_per_layer_inputs(tokens[None], None)[0]
        return DecoderInputs(embeddings, is_image, deepstack, of_layers)

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


def freeze_audio(model: Any) -> None:
    """Freeze what reads audio, which no data here has: weight decay would shrink it."""
    for name in ("audio_tower", "embed_audio"):
        if (module := getattr(model.model, name, None)) is not None:
            module.requires_grad_(False)


def _flatten(rows: Any) -> Tensor:
    """[[R, H], ...] or [images, R, H] -> [rows of all images, H]"""
    joined: Tensor = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows
    return joined.reshape(-1, joined.shape[-1])


# Decoder inputs for a batch with images, as one packed row or as padded rows.


def packed_inputs(tower: VisionTower, batch: Batch, plan: AttentionPlan, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the decoder for a packed row."""
    inputs = tower.embed(batch.tokens, batch.images)
    inputs = replace(inputs, embeddings=tower.touch(inputs.embeddings))
    positions = batch.positions[None]
    starts, lengths, parents = (column.tolist() for column in (batch.segment_start, batch.segment_length, batch.segment_parent))
    if batch.images and tower.family.grid_key is not None:
        positions = tree_positions(starts, lengths, parents, batch.images, tower.grids(batch.images)).positions[:, None]
    if batch.images and (layers := tower.family.bidirectional) != "none":
        plan = ImageBlockPlan(plan, starts, lengths, parents, batch.images, device, windows_only=layers == "windows")
    return {**inputs.arguments(1, len(batch.tokens)), "position_ids": positions.to(device), "plan": plan}


def padded_inputs(
    tower: VisionTower, batch: Batch, rows: Sequence[Tensor], device: torch.device
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the module that reads padded rows (one per path of the batch) with the model's own attention, and its keyword
    arguments.
    """
    count, longest = len(rows), max(len(row) for row in rows)
    tokens, mask = torch.zeros(2, count, longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], mask[index, : len(row)] = row, 1
    images = [image.moved(index * longest) for index, own in enumerate(_images_of_paths(batch)) for image in own]
    inputs = tower.embed(tokens.flatten(), images)
    inputs = replace(inputs, embeddings=tower.touch(inputs.embeddings))
    arguments = {**inputs.arguments(count, longest), "attention_mask": mask.to(device)}
    if images and tower.family.grid_key is not None:
        starts = range(0, count * longest, longest)
        found = tree_positions(starts, [longest] * count, [-1] * count, images, tower.grids(images))
        arguments["position_ids"] = found.positions.view(3, count, longest).to(device)
    if tower.family.bidirectional == "none":
        return tower.model.get_decoder(), arguments
    # the masks of images are created one level above the decoder
    arguments[tower.family.token_types] = inputs.is_image.view(count, longest).to(torch.int64)
    return tower.model.model, arguments


def _images_of_paths(batch: Batch) -> list[list[PromptImage]]:
    """Return the images of each path of the rollouts, with positions counted on it."""
    starts, lengths = batch.segment_start.tolist(), batch.segment_length.tolist()
    of_segment: dict[int, list[PromptImage]] = {}
    for image, segment in zip(batch.images, batch.image_segments, strict=True):
        of_segment.setdefault(segment, []).append(image.moved(-starts[segment]))
    found = []
    for path in (path for paths in batch.rollout_paths() for path in paths):
        offsets = [0, *accumulate(lengths[segment] for segment in path)]
        found.append(
            [image.moved(offset) for segment, offset in zip(path, offsets, strict=False) for image in of_segment.get(segment, ())]
        )
    return found


@dataclass(frozen=True, eq=False)
class _Block:
    """The tokens of one image, and all tokens that they attend to."""

    queries: Tensor  # [L] int64, positions in the row
    keys: Tensor  # [K] int64: of its ancestors, and of its own segment up to the image's end
    distance: Tensor  # [L, K] int64: position of the query minus that of the key; negative within the image


class ImageBlockPlan:
    """A plan over a forest of segments in which each image's tokens attend to the whole image in addition to their causal
    context.

    A window limits only backward attention, as in Transformers: a token always sees the end of its image. Image rows are
    computed twice, first causally with the others and then completely; the first result is discarded and has no gradient.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        starts: Sequence[int],
        lengths: Sequence[int],
        parents: Sequence[int],
        images: Sequence[PromptImage],
        device: torch.device,
        *,
        windows_only: bool = False,
    ) -> None:
        """``windows_only``: only in layers with a window."""
        self.plan = plan
        self.windows_only = windows_only
        self.blocks = [_make_block(starts, lengths, parents, image, device) for image in images]
        self.rows = torch.cat([block.queries for block in self.blocks])  # [rows of images]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention [T, heads, D] x [T, kv_heads, D] -> [T, heads, V]."""
        output = self.plan.attend(query, key, value, spec)
        if self.windows_only and spec.window is None:
            return output
        whole = torch.cat([_attend_block(block, query, key, value, spec) for block in self.blocks])
        return output.index_copy(0, self.rows, whole.to(output.dtype))


def _attend_block(block: _Block, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:  # [L, heads, V]
    rows, keys, values = (
        tensor.index_select(0, index).transpose(0, 1)[None]
        for tensor, index in ((query, block.queries), (key, block.keys), (value, block.keys))
    )
    mask = None if spec.window is None else block.distance < spec.window
    return masked_attention(rows, keys, values, mask, spec)[0].transpose(0, 1)


def _make_block(
    starts: Sequence[int], lengths: Sequence[int], parents: Sequence[int], image: PromptImage, device: torch.device
) -> _Block:
    own = next(index for index in reversed(range(len(starts))) if starts[index] <= image.start and lengths[index])
    path, segment = [torch.arange(starts[own], image.end)], parents[own]
    while segment != -1:
        path.insert(0, torch.arange(starts[segment], starts[segment] + lengths[segment]))
        segment = parents[segment]
    keys = torch.cat(path)
    positions = torch.arange(len(keys))
    distance = positions[-image.length :, None] - positions[None]
    return _Block(torch.arange(image.start, image.end).to(device), keys.to(device), distance.to(device))
