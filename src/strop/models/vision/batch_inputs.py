"""Decoder inputs for a batch with images, as one packed row or as padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionPlan
from strop.models.attention.image_blocks import ImageBlockPlan
from strop.models.vision.rope_positions import tree_positions
from strop.models.vision.vision_tower import VisionTower
from strop.types import Batch, PromptImage


def packed_inputs(tower: VisionTower, batch: Batch, plan: AttentionPlan, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the decoder for a packed row."""
    inputs = tower.embed(batch.tokens, batch.images)
    inputs = replace(inputs, embeddings=tower.touch(inputs.embeddings))
    positions = batch.positions[None]
    starts, lengths, parents = (column.tolist() for column in (batch.segment_start, batch.segment_length, batch.segment_parent))
    if batch.images and tower.family.grid_key is not None:
        positions = tree_positions(starts, lengths, parents, batch.images, tower.grids(batch.images)).positions[:, None]
    if batch.images and tower.family.bidirectional:
        plan = ImageBlockPlan(plan, starts, lengths, parents, batch.images, device)
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
    if tower.family.bidirectional:  # the masks of images are created one level above the decoder
        arguments["token_type_ids"] = inputs.is_image.view(count, longest).to(torch.int64)
    return tower.model.model if tower.family.bidirectional else tower.model.get_decoder(), arguments


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
