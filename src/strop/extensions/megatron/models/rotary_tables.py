"""Rotary embeddings of the positions that a row says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.extensions.megatron.families.architecture import Rotary


def rotation_tables(rotaries: Sequence[Rotary], positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of positions [T] for each of R rotary embeddings: [R, 2, T, 1, 1, D]."""
    frequencies = torch.stack([rotary.frequencies for rotary in rotaries]).to(positions.device)
    angles = positions.float()[None, :, None] * frequencies[:, None]
    angles = torch.cat((angles, angles), -1)[:, :, None, None]
    scales = torch.tensor([rotary.scale for rotary in rotaries], device=positions.device)
    return (torch.stack((angles.cos(), angles.sin()), 1) * scales.view(-1, 1, 1, 1, 1, 1)).to(dtype)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate the first D dimensions of heads [T, 1, heads, head_dim] by cosines and sines [2, T, 1, 1, D]."""
    size = table.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * table[0] + torch.cat((-second, first), -1) * table[1]
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
