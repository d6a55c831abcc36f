"""Sharded LoRA adapters, as they are sent to engines that keep the base model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.models.adapters import low_rank_layers, save_adapters
from strop.training.torch.parallel.export import exported
from strop.training.torch.parallel.sharding import ManyRanks
from strop.weights.adapters import adapter_marks, files_in
from strop.weights.base import AdapterFiles
from strop.weights.source import Weight


class GatheredAdapters:
    """An ``AdapterSource`` of sharded adapters. All ranks call each method at the same time."""

    def __init__(self, placement: ManyRanks) -> None:
        self.placement = placement

    def base(self) -> Iterable[Weight]:
        return exported(self.placement, adapters=False)

    def files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.placement.network.model, Path(name), self.placement.adapters())
            return files_in(Path(name))

    @torch.no_grad()
    def marks(self, dtype: torch.dtype) -> Mapping[str, int]:
        return adapter_marks(
            ((layer, self._whole(layer.down), self._whole(layer.up)) for layer in low_rank_layers(self.placement.network.model)),
            dtype,
        )

    def _whole(self, tensor: Tensor) -> Tensor:
        return self.placement.gathered(tensor) if isinstance(tensor, DTensor) else tensor
