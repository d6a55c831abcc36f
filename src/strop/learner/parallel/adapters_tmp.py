"""Sharded LoRA adapters, as they are sent to engines that keep the base model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.learner.parallel.sharded import Sharded
from strop.learner.parallel.sharded_export import iter_sharded_weights
from strop.models.adapters import lora_layers, save_adapters
from strop.weight_sync.adapters_tmp import fingerprint_adapters, read_adapter_files
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.weight_source import Weight


class ShardedAdapterSource:
    """An ``AdapterSource`` of sharded adapters. All ranks call each method at the same time."""

    def __init__(self, parallelism: Sharded) -> None:
        self.parallelism = parallelism

    def base_weights(self) -> Iterable[Weight]:
        return iter_sharded_weights(self.parallelism, adapters=False)

    def export_files(self) -> AdapterFiles:
        with tempfile.TemporaryDirectory(prefix="strop-adapter-") as name:
            save_adapters(self.parallelism.network.model, Path(name), self.parallelism.adapters())
            return read_adapter_files(Path(name))

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        return fingerprint_adapters(
            (
                (layer, self._full_tensor(layer.down), self._full_tensor(layer.up))
                for layer in lora_layers(self.parallelism.network.model)
            ),
            dtype,
        )

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return self.parallelism.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
