"""The tokens that indexers chose, the column CHOICES [T, layers, bytes]: for each token and layer with an indexer, a bitmap over the
positions of its path (``indexers``).

A bitmap is as long as the longest rollout of a batch needs, a byte for eight positions, and nothing was recorded where it is zero: such a
token chooses again. It is smaller than the indices of 2,048 tokens, as other libraries record them (8 KB), up to 64 thousand positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from strop.columns import TokenColumn
from strop.models.mixers.indexers import EVERYTHING, count_bytes, is_indexer
from strop.models.routing.recorded_experts import Replayed
from strop.models.routing.router_config import CHOICES


@dataclass(frozen=True)
class IndexedLayers:
    """The layers of a decoder that have an indexer."""

    places: Mapping[int, int]  # layer -> its place in the column
    longest: int  # tokens of a rollout, at most
    heads: int = 1  # choices of a layer

    column: ClassVar[TokenColumn] = CHOICES
    dtype: ClassVar[torch.dtype] = torch.int8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.places) * self.heads, count_bytes(self.longest)

    def record(self) -> RecordedChoices:
        return RecordedChoices(self)

    def replay(self, choices: Tensor, weights: Tensor) -> ReplayedChoices:
        return ReplayedChoices(self, choices, weights)


def find_indexed_layers(model: nn.Module, longest: int) -> IndexedLayers:
    """Raises ValueError for a model without indexers."""
    indexers: list[Any] = [module for module in model.modules() if is_indexer(module)]
    if not indexers:
        raise ValueError(
            f"policy.router_replay.indexers: {type(model).__name__} has no indexers that choose tokens to attend to; set it to false"
        )
    places = {int(indexer.layer_idx): place for place, indexer in enumerate(indexers)}
    return IndexedLayers(places, longest, getattr(indexers[0], "choices", 1))


class RecordedChoices:
    """Records the tokens that indexers choose."""

    def __init__(self, indexed: IndexedLayers) -> None:
        self.indexed = indexed
        self._chosen: dict[int, Tensor] = {}

    def choose(self, layer: int, own: Tensor) -> Tensor:
        self._chosen[layer] = own
        return own

    def stack(self) -> Tensor:  # [n, layers * heads, bytes]
        missing = self.indexed.places.keys() - self._chosen.keys()
        if missing:
            raise RuntimeError(f"the indexer of layer {min(missing)} chose nothing; set policy.router_replay.indexers=false")
        found = (_fit(self._chosen[layer], self.indexed.shape[1]) for layer in self.indexed.places)
        return torch.cat([each.view(len(each), -1, each.shape[-1]).expand(-1, self.indexed.heads, -1) for each in found], 1)


class ReplayedChoices(Replayed):
    """Replaces what indexers choose by what was recorded, where it was, and counts the choices among more tokens than they take."""

    def __init__(self, indexed: IndexedLayers, choices: Tensor, weights: Tensor) -> None:
        """``choices`` [n, layers * heads, bytes] of the tokens of the pass, and the weight of each token in the counts [n].

        Raises ValueError for those of another model.
        """
        if choices.shape[1] != indexed.shape[0]:
            raise ValueError(
                f"the recorded choices are of {choices.shape[1]} layers with indexers, and the model has {indexed.shape[0]}: the engine "
                "runs another model; set policy.router_replay.indexers=false, or let it load the learner's configuration"
            )
        super().__init__(weights)
        self.indexed = indexed
        self.choices = choices

    def choose(self, layer: int, own: Tensor) -> Tensor:
        if not own.shape[-1]:
            return own
        first, heads = self.indexed.places[layer] * self.indexed.heads, self.indexed.heads
        recorded = _fit(self.choices[:, first : first + heads], own.shape[-1]).view_as(own)
        known, differs, some = (each.flatten(1).any(1) for each in (recorded != 0, recorded != own, own != EVERYTHING))
        self.count(layer, differs, known & some)
        return torch.where(known.view(-1, *[1] * (own.dim() - 1)), recorded, own)


def _fit(chosen: Tensor, width: int) -> Tensor:
    """[n, ..., bytes] -> [n, ..., width]: positions that are missing or left out come after the token."""
    if not chosen.shape[-1]:
        return chosen.new_full((*chosen.shape[:-1], width), EVERYTHING)
    return pad(chosen[..., :width], (0, max(0, width - chosen.shape[-1])))
