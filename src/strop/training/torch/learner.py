"""The PyTorch learner: a network, its optimizer and its schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop import metrics
from strop.algorithms.base import LossFn, Outputs
from strop.metrics import Metrics
from strop.models.adapters import load_adapters, low_rank_layers, save_adapters
from strop.models.loading import quiet
from strop.models.memory import give_back_freed_memory
from strop.sampling import Sampling
from strop.training.base import BackwardResult
from strop.training.torch.averaging import AveragedWeights
from strop.training.torch.master import MasterWeights
from strop.training.torch.optimizers import ParameterGroup, load_optimizer, make_optimizer, make_scheduler
from strop.training.torch.parallel import checkpoint as divided
from strop.training.torch.parallel.placement import OneDevice, Placement
from strop.training.torch.parallel.share import Share, Shares, assemble, assemble_outputs, kept, present
from strop.types import Batch

log = logging.getLogger(__name__)

STEPS_BETWEEN_TRIMS = 10  # optimizer steps between two returns of unused CPU memory to the system


class TrainableNetwork(Protocol):
    """What a learner trains: a language model (``strop.models.network``) or one with a scalar head (``strop.models.value``)."""

    model: Any
    device: torch.device
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


@dataclass(frozen=True, kw_only=True)
class TorchLearnerOptions:
    """Options of training; the model and its precision belong to the network."""

    optimizer: str = "torch.optim.AdamW"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01})
    no_decay: Sequence[str] = ()  # name patterns of parameters without weight decay
    parameter_groups: Sequence[ParameterGroup] = ()
    schedule: Sequence[Mapping[str, Any]] = ()
    total_steps: int | None = None  # optimizer steps of the run if known: the default length of a schedule
    average_decay: float | None = None  # None: no moving average of the weights
    average_start: int = 0  # optimizer steps before averaging begins
    section: str = "policy"  # section of the configuration, for messages
    max_grad_norm: float | None = 1.0  # None: no clipping
    train_tokens: int = 8192  # tokens of one micro-batch, forward and backward
    score_tokens: int = 8192  # tokens of one forward pass without gradient
    activation_checkpointing: bool = False
    whole_groups: bool = False  # never split a group across micro-batches: the loss compares its rollouts


class FrozenScorer:
    """A frozen network that only scores, such as a reference policy. ``offload`` keeps its weights on the CPU between uses."""

    def __init__(
        self,
        network: TrainableNetwork,
        sampling: Sampling,
        *,
        score_tokens: int,
        offload: bool = False,
        placement: Placement | None = None,
    ) -> None:
        """Raises ValueError for ``offload`` of a sharded network, whose parallelism decides where shards are kept."""
        if offload and placement is not None:
            raise ValueError("a sharded network is not moved between uses; shard it with cpu_offload instead")
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.placement = placement or OneDevice(network)
        self.offload = offload and network.device.type != "cpu"
        network.model.requires_grad_(False)
        if self.offload:
            network.model.to("cpu")

    async def score(self, batch: Batch) -> Outputs:
        if self.offload:
            self.network.model.to(self.network.device)
        scores = assemble_outputs([self.score_shares(batch)], len(batch.target))
        if self.offload:
            self.network.model.to("cpu")
        return scores

    def score_shares(self, batch: Batch) -> Shares:
        """Score this rank's micro-batches: on several ranks a part of what ``score`` returns."""
        return score_shares(self.placement, batch, self.sampling, self.score_tokens)


@dataclass(frozen=True)
class NetworkScorer:
    """Scores with the current weights of a network that may be in training."""

    network: TrainableNetwork
    sampling: Sampling
    score_tokens: int
    placement: Placement | None = None

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_shares(batch)], len(batch.target))

    def score_shares(self, batch: Batch) -> Shares:
        """Score this rank's micro-batches: on several ranks a part of what ``score`` returns."""
        return score_shares(self.placement or OneDevice(self.network), batch, self.sampling, self.score_tokens)


def score(network: TrainableNetwork, batch: Batch, sampling: Sampling, token_budget: int) -> Outputs:
    """Score a batch with a network on a single device, micro-batch by micro-batch."""
    return assemble_outputs([score_shares(OneDevice(network), batch, sampling, token_budget)], len(batch.target))


@torch.no_grad()
def score_shares(placement: Placement, batch: Batch, sampling: Sampling, token_budget: int) -> Shares:
    """Score this rank's micro-batches of a batch."""
    shares, _ = placement.shares(batch, token_budget)
    pieces = [(share, kept(placement.outputs(share.part.batch, sampling))) for share in shares]
    placement.collect()
    counted = ((share.part.index, outputs) for share, outputs in pieces if placement.leads and not share.stand_in)
    return Shares(tuple(counted))


class TorchLearner:
    """One network and its optimizer. Gradients accumulate until ``step``; the loss determines their normalization.

    With several ranks, each rank has such a learner with a ``parallelism``, and all ranks make the same calls in the same order. Each rank
    returns the results of its own micro-batches (``score_local``, ``forward_backward_local``, ``evaluate_loss_local``), and
    ``assemble_result`` combines them.
    """

    def __init__(
        self, network: TrainableNetwork, sampling: Sampling, options: TorchLearnerOptions, placement: Placement | None = None
    ) -> None:
        """``sampling`` are the parameters that rollouts are sampled with: log-probabilities refer to that distribution (law 3)."""
        self.network = network
        self.placement = placement or OneDevice(network)
        self.sampling = sampling
        self.options = options
        self.model: nn.Module = network.model
        self.model.train(options.activation_checkpointing)
        if options.activation_checkpointing:
            network.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.trained = self.placement.trained()
        self.masters = MasterWeights(self.trained)
        self.parameters = self.masters.parameters
        self.optimizer = make_optimizer(
            options.optimizer,
            self.masters.named,
            options.optimizer_kwargs,
            groups=options.parameter_groups,
            no_decay=options.no_decay,
            section=options.section,
        )
        self.placement.check_optimizer(self.optimizer, options.section)
        self.scheduler = make_scheduler(
            options.schedule, self.optimizer, total_steps=options.total_steps, section=options.section
        )
        self.average: AveragedWeights | None = None
        if options.average_decay is not None:
            self.average = AveragedWeights(self.masters.named, decay=options.average_decay, start_step=options.average_start)
        self._steps = 0

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_shares(batch)], len(batch.target))

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return assemble([self.forward_backward_shares(batch, loss)], len(batch.target))

    async def measure(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return assemble([self.measure_shares(batch, loss)], len(batch.target))

    def score_shares(self, batch: Batch) -> Shares:
        """Score this rank's micro-batches: the whole batch on a single device."""
        return score_shares(self.placement, batch, self.sampling, self.options.score_tokens)

    def forward_backward_shares(self, batch: Batch, loss: LossFn) -> Shares:
        """Accumulate the gradient of the batch's loss; return the results of this rank's micro-batches."""
        result = self._run(batch, loss, self.options.train_tokens, backward=True)
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:  # all losses have zero gradient: the step still updates the optimizer's momentum
                parameter.grad = torch.zeros_like(parameter)
        return result

    def measure_shares(self, batch: Batch, loss: LossFn) -> Shares:
        return self._run(batch, loss, self.options.score_tokens, backward=False)

    def _run(self, batch: Batch, loss: LossFn, token_budget: int, *, backward: bool) -> Shares:
        shares, balance = self.placement.shares(batch, token_budget, whole_groups=self.options.whole_groups)
        logged: list[Metrics] = [balance] if backward else []
        pieces: list[tuple[Tensor, Outputs]] = []
        for share in shares:
            outputs, measured = self._part(share, loss, backward=backward and not share.idle)
            if not share.stand_in:
                pieces.append((share.part.index, outputs))
                logged.append(measured)
        self.placement.collect()
        return Shares(tuple(pieces), metrics.merge(*logged)) if self.placement.leads else Shares()

    def _part(self, share: Share, loss: LossFn, *, backward: bool) -> tuple[Outputs, Metrics]:
        batch = share.part.batch
        with torch.set_grad_enabled(backward):
            outputs = self.placement.outputs(batch, self.sampling)
            value, logged = _nothing(outputs) if share.stand_in else loss(outputs, _on(batch, self.network.device))
        if backward:
            value.backward()
        return kept(outputs), logged

    async def step(self) -> Metrics:
        limit = self.options.max_grad_norm
        norm = self.placement.clip(self.parameters, limit if limit is not None else float("inf"))
        rate = float(self.optimizer.param_groups[0]["lr"])  # some optimizers keep a tensor that the schedule changes in place
        if torch.isfinite(norm):
            self.optimizer.step()
            self.masters.write_back()
            if self.average is not None:
                self.average.update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.placement.stepped()
        self._steps += 1
        if self._steps % STEPS_BETWEEN_TRIMS == 0 and self.network.device.type == "cpu":
            give_back_freed_memory()
        return {
            "grad_norm": metrics.mean(norm.item(), 1),
            "lr": metrics.mean(rate, 1),
            "steps_skipped_for_nonfinite_gradient": metrics.total(float(not torch.isfinite(norm))),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under their names in an ordinary model, with adapters merged in."""
        yield from self.placement.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters under the names of PEFT's files; nothing for a model without adapters."""
        yield from self.placement.adapters().items()

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write ``weights/`` as a Hugging Face folder or as adapters in PEFT's format, ``ema/`` with their average, and ``optimizer.pt``
        with the state needed to resume. On several ranks, all of which must call it, write shards
        (``strop.learner.parallel.sharded_checkpoint``)."""
        if not isinstance(self.placement, OneDevice):
            return divided.save(self, folder, optimizer=optimizer)
        save_weights(self.model, folder / "weights")
        if self.average is not None:
            with self.average.swapped_in(self.trained):
                save_weights(self.model, folder / "ema")
        if optimizer:
            state = {
                "masters": self.masters.state_dict(),
                "average": self.average.state_dict() if self.average else None,
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            }
            torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote on any number of ranks, in place: everything that shares the module sees the restored weights."""
        if not isinstance(self.placement, OneDevice) or divided.is_divided_checkpoint(folder):
            return divided.load(self, folder)
        load_weights(self.model, folder / "weights")
        path = folder / "optimizer.pt"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was saved with checkpointing.save_optimizer=false and cannot resume"
            )
        state = torch.load(path, map_location=self.network.device, weights_only=True)
        self.masters.load_state_dict(state.get("masters", {}))
        load_optimizer(self.optimizer, state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.load_average(state.get("average"), path)

    def load_average(self, state: Mapping[str, Any] | None, path: Path) -> None:
        """Restore the state of the average, if this run has one; without a saved state restart it, with a warning."""
        if self.average is None:
            return
        if state is not None:
            self.average.load_state_dict(state)
            return
        log.warning("%s has no average of the weights (policy.ema): it restarts from the weights of this checkpoint", path)
        self.average.restart()


def save_weights(model: Any, folder: Path) -> None:
    """Write a Hugging Face folder, or only the adapters of a model that has them."""
    with quiet():
        if low_rank_layers(model):
            save_adapters(model, folder)
        else:
            model.save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load what ``save_weights`` wrote into a module, in place. Raises ValueError unless every weight is present.

    Tied weights are stored once.
    """
    if low_rank_layers(model):
        return load_adapters(model, folder)
    divided.load_weights(model, folder)


def _nothing(outputs: Outputs) -> tuple[Tensor, Metrics]:
    """Return the loss of a dummy micro-batch: a zero gradient that reaches every weight."""
    _, first = next(present(outputs))
    return first.sum() * 0.0, {}


def _on(batch: Batch, device: torch.device) -> Batch:
    """Move the columns that a loss reads to the learner's device."""
    if device.type == "cpu":
        return batch
    names = ("target", "sequence", "sampler_logprobs", "versions", "advantages", "mask", "group", "rewards")
    moved = {name: getattr(batch, name).to(device) for name in names}
    return replace(batch, **moved, extras={name: column.to(device) for name, column in batch.extras.items()})
