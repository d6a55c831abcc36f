"""The weights of a model's stages, for an exporter on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from strop.extensions.megatron.adapters.adapter_checkpoint import gather_adapters
from strop.extensions.megatron.adapters.adapter_folder import AdapterFolder
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.extensions.megatron.weights.stage_export import iter_weights
from strop.weight_sync.base import AdapterFiles
from strop.weight_sync.exporter import fingerprint_adapters
from strop.weight_sync.weight_source import Weight, local_weights


@dataclass(frozen=True)
class StageWeights:
    """The weights of a network under Hugging Face names. All ranks gather them one after another."""

    network: MegatronNetwork

    @property
    def device(self) -> torch.device:
        return self.network.device

    def iter_weights(self) -> Iterator[Weight]:
        self.network.gather_weights()  # those that a distributed optimizer has updated
        with self.network.layout.activate():
            adapters = self.network.adapters
            weights = list(
                iter_weights(self.network.stages, self.network.hf_config) if adapters is None else adapters.iter_merged()
            )
        drafted = self.network.draft if self.network.publishes_draft else None  # every rank has all of it
        return chain(self.in_layout(weights), () if drafted is None else local_weights(drafted.published_weights()))

    def in_layout(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Return weights that are gathered in the network's layout, whichever is active."""
        return (replace(weight, gather=partial(self._gather, weight)) for weight in weights)

    def _gather(self, weight: Weight) -> Tensor:
        with self.network.layout.activate():
            return weight.gather()

    def adapter_source(self) -> StageAdapterSource:
        return StageAdapterSource(self)


class StageAdapterSource:
    """An ``AdapterSource`` of a network's stages. All ranks call each method at the same time."""

    def __init__(self, weights: StageWeights) -> None:
        adapters = weights.network.adapters
        assert adapters is not None
        self.weights, self.adapters = weights, adapters

    def base_weights(self) -> Iterable[Weight]:
        network = self.weights.network
        with network.layout.activate():
            return self.weights.in_layout(list(iter_weights(network.stages, network.hf_config)))

    def export_files(self) -> AdapterFiles:
        return self._gather().files()

    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, int]:
        tensors = self._gather().tensors
        return fingerprint_adapters(
            ((each, tensors[each.down.weight.name], tensors[each.up.weight.name]) for each in self.adapters.adapted), dtype
        )

    def _gather(self) -> AdapterFolder:
        network = self.weights.network
        network.gather_weights()
        with network.layout.activate():
            return gather_adapters(self.adapters)
