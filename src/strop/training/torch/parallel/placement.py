"""Where a network is: on one device, or divided over many ranks (``strop.training.torch.parallel.sharding``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from strop.algorithms.base import Outputs
from strop.data.packing import micro_batches
from strop.metrics import Metrics
from strop.models.adapters import adapter_weights, merged_weights
from strop.sampling import Sampling
from strop.training.torch.parallel.share import Share
from strop.types import Batch

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class PlacedNetwork(Protocol):
    """A network as a placement sees it."""

    model: Any
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


class Placement(Protocol):
    """What differs between a network on one device and one on many ranks. Ranks call everything in the same order."""

    leads: bool  # whether this rank speaks for those that read the same micro-batches

    def trained(self) -> NamedParameters:
        """What the optimizer steps, under the model's names: plain tensors on this rank."""
        ...

    def check_optimizer(self, optimizer: Optimizer, section: str) -> None:
        """Raises ValueError for one whose update of a number depends on numbers that another rank has."""
        ...

    def shares(self, batch: Batch, token_budget: int, *, whole_groups: bool = False) -> tuple[Sequence[Share], Metrics]:
        """The micro-batches of this rank, as many as any rank has, and what there is to log of the division."""
        ...

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs:
        """The network's outputs of one of these micro-batches."""
        ...

    def collect(self) -> None:
        """After the passes over a batch: the parameters have their gradients, and nothing is held that the next pass does not need."""
        ...

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients of ``parameters`` down to a norm of ``limit``; the norm they had, over all ranks. Once a step."""
        ...

    def stepped(self) -> None:
        """After an optimizer step: gradients are gone, and the next pass reads the new weights."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All of them whole, one at a time, under their names in an ordinary model: adapters are merged in."""
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """What a LoRA run trains, whole, under the names of PEFT's files."""
        ...


class OneDevice:
    """All of the network is here, and all of every batch is read here."""

    leads = True

    def __init__(self, network: PlacedNetwork) -> None:
        self.network = network

    def trained(self) -> NamedParameters:
        model: nn.Module = self.network.model
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def check_optimizer(self, optimizer: Optimizer, section: str) -> None:
        pass

    def shares(self, batch: Batch, token_budget: int, *, whole_groups: bool = False) -> tuple[Sequence[Share], Metrics]:
        parts = micro_batches(batch, token_budget, padded=not self.network.packed, whole_groups=whole_groups)
        idle = (part.batch.idle for part in parts)
        return [Share(part, here is not None and bool(here.all())) for part, here in zip(parts, idle, strict=True)], {}

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs:
        return self.network.outputs(batch, sampling)

    def collect(self) -> None:
        pass

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)

    def stepped(self) -> None:
        pass

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.network.model)

    def adapters(self) -> Mapping[str, Tensor]:
        return adapter_weights(self.network.model)
