"""Attention in which the tokens of an image see each other in both directions (Gemma 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.attention.plain_attention import masked_attention
from strop.types import PromptImage


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
