"""A full network on one device, and its checkpoints.

    weights/       a Hugging Face folder, or adapters in PEFT's format
    ema/           the same for the averaged weights
    optimizer.pt   the state of training besides the weights

It also loads a checkpoint of several ranks (``strop.learner.parallel.sharded_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strop.data.shares import BatchShare, ShareRequest, require_whole
from strop.data.splitting import split_micro_batches
from strop.learner.parallel import sharded_checkpoint
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatch, OutputsT, run_in_turn
from strop.learner.parallel.parallelism import NamedParameters, ParallelNetwork, RankLayers
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.models.adapters import adapter_weights, load_adapters, lora_layers, merged_weights, save_adapters
from strop.models.layers.compiled_layers import use_learner_layers
from strop.models.loading import quiet_transformers
from strop.types import Batch


class SingleDevice:
    """The full network on one device, which reads every batch."""

    is_leader = True
    param_dtype: torch.dtype | None = None
    rank_layers: RankLayers | None = None
    elsewhere: NamedParameters = ()

    def __init__(self, network: ParallelNetwork) -> None:
        self.network = network
        self.sharded: Mapping[str, Any] = {}

    def trainable_parameters(self) -> NamedParameters:
        model: nn.Module = self.network.model
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def prepare_optimizer(self, optimizer: Optimizer, section: str) -> None:
        pass

    def weight_tensors(self) -> Iterator[Tensor]:
        yield from self.network.model.parameters()

    def share_request(self, token_budget: int, *, whole_groups: bool = False, read_columns: bool = False) -> ShareRequest:
        raise TypeError("a network on a single device reads whole batches, not shares; send whole batches")

    def split_batch(
        self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False
    ) -> tuple[Sequence[MicroBatch], Metrics]:
        whole = require_whole(batch)
        parts = split_micro_batches(whole, token_budget, padded=not self.network.packed, whole_groups=whole_groups)
        flags = (part.batch.zero_gradient for part in parts)
        return [MicroBatch(part, flag is not None and bool(flag.all())) for part, flag in zip(parts, flags, strict=True)], {}

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[Batch], OutputsT],
        loss: Callable[[MicroBatch, OutputsT], Tensor] | None = None,
        *,
        backward: bool = False,
    ) -> LocalOutputs[OutputsT]:
        with use_learner_layers(self.network, keep_copies=True):
            return run_in_turn(self.network, micro_batches, compute, loss, backward=backward)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)

    def after_step(self) -> None:
        pass

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.network.model)

    def adapters(self) -> Mapping[str, Tensor]:
        return adapter_weights(self.network.model)

    def gather_stages(self, value: Any) -> Sequence[Any]:
        return [value]

    def add_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor

    def save(self, folder: Path, state: TrainingState, *, optimizer: bool = True) -> None:
        model = self.network.model
        save_weights(model, folder / "weights")
        if state.average is not None:
            with state.average.swap_in(state.trainable_parameters):
                save_weights(model, folder / "ema")
        if optimizer:
            torch.save(state.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path, state: TrainingState) -> None:
        if sharded_checkpoint.is_sharded_checkpoint(folder):
            return sharded_checkpoint.load(self, folder, state)
        load_weights(self.network.model, folder / "weights")
        path = folder / "optimizer.pt"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was saved with checkpointing.save_optimizer=false and cannot resume"
            )
        state.load_state_dict(torch.load(path, map_location=self.network.device, weights_only=True), path)


def save_weights(model: Any, folder: Path) -> None:
    """Write a Hugging Face folder, or only the adapters of a model that has them."""
    with quiet_transformers():
        if lora_layers(model):
            save_adapters(model, folder)
        else:
            model.save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the result of ``save_weights`` into a module, in place. Raises ValueError unless every weight is present.

    Tied weights are stored once.
    """
    if lora_layers(model):
        return load_adapters(model, folder)
    sharded_checkpoint.load_weights(model, folder)
