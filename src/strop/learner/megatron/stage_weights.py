"""The weights of a model's stages, for an exporter on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.learner.megatron.megatron_network import MegatronNetwork
from strop.learner.megatron.weights.stage_export import iter_weights
from strop.weight_sync.exporter import AdapterSource
from strop.weight_sync.weight_source import Weight


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
            weights = list(iter_weights(self.network.stages, self.network.hf_config))
        return (replace(weight, gather=self._in_layout(weight)) for weight in weights)

    def _in_layout(self, weight: Weight):  # type: ignore[no-untyped-def]
        def gather() -> Tensor:
            with self.network.layout.activate():
                return weight.gather()

        return gather

    def adapter_source(self) -> AdapterSource:
        raise ValueError(
            "policy.generation.weight_sync.lora: adapters of Megatron Core are merged into the weights before they are sent; set it to "
            "merged"
        )
