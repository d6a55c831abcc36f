"""How a network is parallelized: on a single device, or sharded over several ranks (``strop.learner.parallel.sharded``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from strop.algorithms.base import Outputs
from strop.data.splitting import split_micro_batches
from strop.learner.parallel.micro_batch import MicroBatch
from strop.metrics import Metrics
from strop.models.adapters import adapter_weights, merged_weights
from strop.sampling import Sampling
from strop.types import Batch

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ParallelNetwork(Protocol):
    """The attributes of a network that its parallelism uses."""

    model: Any
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


class Parallelism(Protocol):
    """Operations that differ between a single device and several ranks. All ranks make the same calls in the same order."""

    is_leader: bool  # whether this rank reports the results of all ranks that read the same micro-batches

    def trainable_parameters(self) -> NamedParameters:
        """Return the parameters that the optimizer steps, under the model's names: plain tensors on this rank."""
        ...

    def check_optimizer(self, optimizer: Optimizer, section: str) -> None:
        """Raises ValueError for optimizers that are not elementwise (Muon, Shampoo)."""
        ...

    def split_batch(self, batch: Batch, token_budget: int, *, whole_groups: bool = False) -> tuple[Sequence[MicroBatch], Metrics]:
        """Return this rank's micro-batches, equally many on every rank, and metrics of the split."""
        ...

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs:
        """Return the network's outputs for one micro-batch."""
        ...

    def finish_passes(self) -> None:
        """Finish the passes over a batch: set the gradients of the trained parameters and free gathered weights."""
        ...

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients of ``parameters`` to a norm of ``limit`` over all ranks; return their norm before clipping.

        Call it once per step.
        """
        ...

    def after_step(self) -> None:
        """Clean up after an optimizer step: drop gradients, so that the next pass uses the new weights."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights one at a time, under their names in an ordinary model, with adapters merged in."""
        ...

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the full adapters of a LoRA run under the names of PEFT's files."""
        ...


class SingleDevice:
    """The full network is on one device, which reads every batch."""

    is_leader = True

    def __init__(self, network: ParallelNetwork) -> None:
        self.network = network

    def trainable_parameters(self) -> NamedParameters:
        model: nn.Module = self.network.model
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def check_optimizer(self, optimizer: Optimizer, section: str) -> None:
        pass

    def split_batch(self, batch: Batch, token_budget: int, *, whole_groups: bool = False) -> tuple[Sequence[MicroBatch], Metrics]:
        parts = split_micro_batches(batch, token_budget, padded=not self.network.packed, whole_groups=whole_groups)
        flags = (part.batch.zero_gradient for part in parts)
        return [MicroBatch(part, flag is not None and bool(flag.all())) for part, flag in zip(parts, flags, strict=True)], {}

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs:
        return self.network.outputs(batch, sampling)

    def finish_passes(self) -> None:
        pass

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)

    def after_step(self) -> None:
        pass

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.network.model)

    def adapters(self) -> Mapping[str, Tensor]:
        return adapter_weights(self.network.model)
