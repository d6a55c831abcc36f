"""How a network is parallelized: on a single device, or sharded over several ranks (``strop.learner.parallel.sharded``)."""

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
    """The interface of a network to its parallelism."""

    model: Any
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


class Placement(Protocol):
    """Operations that differ between a single device and several ranks. All ranks make the same calls in the same order."""

    leads: bool  # whether this rank reports the results of all ranks that read the same micro-batches

    def trained(self) -> NamedParameters:
        """Return the parameters that the optimizer steps, under the model's names: plain tensors on this rank."""
        ...

    def check_optimizer(self, optimizer: Optimizer, section: str) -> None:
        """Raises ValueError for optimizers that are not elementwise (Muon, Shampoo)."""
        ...

    def shares(self, batch: Batch, token_budget: int, *, whole_groups: bool = False) -> tuple[Sequence[Share], Metrics]:
        """Return this rank's micro-batches, equally many on every rank, and metrics of the split."""
        ...

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs:
        """Return the network's outputs for one micro-batch."""
        ...

    def collect(self) -> None:
        """Finish the passes over a batch: set the gradients of the trained parameters and release gathered weights."""
        ...

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients of ``parameters`` to a norm of ``limit`` over all ranks; return their norm before. Call it once per step."""
        ...

    def stepped(self) -> None:
        """Clean up after an optimizer step: drop gradients, so that the next pass uses the new weights."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights one at a time, under their names in an ordinary model, with adapters merged in."""
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the full adapters of a LoRA run under the names of PEFT's files."""
        ...


class OneDevice:
    """The full network is on one device, which reads every batch."""

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
