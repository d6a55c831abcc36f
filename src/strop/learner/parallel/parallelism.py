"""How a network is parallelized: on a single device (``strop.learner.parallel.single_device``), or sharded over several ranks
(``strop.learner.parallel.sharded``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strop.algorithms.base import Outputs
from strop.data.shares import BatchShare, ShareRequest
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatch, OutputsT
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.sampling import Sampling
from strop.types import Batch

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ParallelNetwork(Protocol):
    """The attributes of a network that its parallelism uses."""

    model: Any
    device: torch.device
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


@dataclass(frozen=True)
class RankLayers:
    """The layers of a network on ranks."""

    dtype: torch.dtype  # of the gathered weights
    divided: bool  # over tensor ranks


class Parallelism(Protocol):
    """Operations that differ between a single device and several ranks. All ranks make the same calls in the same order."""

    is_leader: bool  # whether this rank reports the results of all ranks that read the same micro-batches
    sharded: Mapping[str, Any]  # DTensors of the trained parameters by name; empty on a single device
    elsewhere: NamedParameters  # trained parameters that only other pipeline stages have, on the meta device
    param_dtype: torch.dtype | None  # dtype of the computation if the trained weights have a higher precision
    rank_layers: RankLayers | None  # None on a single device

    @property
    def network(self) -> ParallelNetwork: ...

    def trainable_parameters(self) -> NamedParameters:
        """Return the parameters that the optimizer steps, under the model's names: plain tensors on this rank."""
        ...

    def prepare_optimizer(self, optimizer: Optimizer, section: str) -> None:
        """Let Muon see whole matrices. Raises ValueError for other optimizers that are not elementwise (Shampoo)."""
        ...

    def weight_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that refers to the memory of this rank's weights."""
        ...

    def share_request(self, token_budget: int, *, whole_groups: bool = False, read_columns: bool = False) -> ShareRequest:
        """Return the share of a batch that this rank reads in micro-batches of ``token_budget``."""
        ...

    def split_batch(
        self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False
    ) -> tuple[Sequence[MicroBatch], Metrics]:
        """Return this rank's micro-batches of a batch or of its share (equally many on every rank), and metrics of the split."""
        ...

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[Batch], OutputsT],
        loss: Callable[[MicroBatch, OutputsT], Tensor] | None = None,
        *,
        backward: bool = False,
    ) -> LocalOutputs[OutputsT]:
        """Run all passes over this rank's micro-batches and set the gradients of the trained parameters.

        ``compute`` reads one micro-batch with the network's weights, on a device that has its outputs; ``loss`` is called with what it
        returns. With ``backward``, the loss of each micro-batch that is not ``zero_gradient`` has a backward pass. Return the detached
        outputs, without dummies; nothing if another rank that reads the same micro-batches reports them.
        """
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

    def gather_stages(self, value: Any) -> Sequence[Any]:
        """Return the picklable ``value`` of each pipeline stage of this rank's copy, in order; of this device alone without stages."""
        ...

    def add_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor of all ranks; on a single device the tensor."""
        ...

    def save(self, folder: Path, state: TrainingState, *, optimizer: bool = True) -> None:
        """Write the weights and their average, and with ``optimizer`` the rest of the state needed to resume, under ``folder``."""
        ...

    def load(self, folder: Path, state: TrainingState) -> None:
        """Restore what any parallelism saved, in place. Raises FileNotFoundError without an optimizer state, and ValueError if the
        checkpoint does not fit."""
        ...
