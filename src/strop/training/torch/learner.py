"""The learner in this process: a network, its optimizer and its schedule."""

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

STEPS_BETWEEN_TRIMS = 10  # optimizer steps after which unused memory goes back to the system, on a CPU


class TrainableNetwork(Protocol):
    """What a learner trains: a language model (``strop.models.network``) or one with a scalar head (``strop.models.value``)."""

    model: Any
    device: torch.device
    packed: bool

    def outputs(self, batch: Batch, sampling: Sampling) -> Outputs: ...


@dataclass(frozen=True, kw_only=True)
class TorchLearnerOptions:
    """How to train; models and precision belong to the network."""

    optimizer: str = "torch.optim.AdamW"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01})
    no_decay: Sequence[str] = ()  # patterns of the names of parameters without weight decay
    parameter_groups: Sequence[ParameterGroup] = ()
    schedule: Sequence[Mapping[str, Any]] = ()
    total_steps: int | None = None  # optimizer steps of the run, where that is known: a schedule's default length
    average_decay: float | None = None  # None: no moving average of the weights
    average_start: int = 0  # optimizer steps until which the average is the weights
    section: str = "policy"  # of the configuration, for messages
    max_grad_norm: float | None = 1.0  # None: no clipping
    train_tokens: int = 8192  # tokens read by one micro-batch, forward and backward
    score_tokens: int = 8192  # tokens read by one forward pass without gradient
    activation_checkpointing: bool = False
    whole_groups: bool = False  # a micro-batch never cuts a group: the loss compares its rollouts


class FrozenScorer:
    """A network that only scores: a reference policy. Its weights may wait on the CPU between uses."""

    def __init__(
        self,
        network: TrainableNetwork,
        sampling: Sampling,
        *,
        score_tokens: int,
        offload: bool = False,
        placement: Placement | None = None,
    ) -> None:
        """Raises ValueError for ``offload`` on many ranks, where the placement keeps shards on the CPU or does not."""
        if offload and placement is not None:
            raise ValueError("a network on many ranks is not moved between uses; divide it with cpu_offload instead")
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
        """What this rank says of a batch: a part of ``score``'s answer where there are many."""
        return score_shares(self.placement, batch, self.sampling, self.score_tokens)


@dataclass(frozen=True)
class NetworkScorer:
    """A network as it is at the moment it is asked, whoever trains it."""

    network: TrainableNetwork
    sampling: Sampling
    score_tokens: int
    placement: Placement | None = None

    async def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_shares(batch)], len(batch.target))

    def score_shares(self, batch: Batch) -> Shares:
        """What this rank says of a batch: a part of ``score``'s answer where there are many."""
        return score_shares(self.placement or OneDevice(self.network), batch, self.sampling, self.score_tokens)


def score(network: TrainableNetwork, batch: Batch, sampling: Sampling, token_budget: int) -> Outputs:
    """What a network on one device says of a whole batch, micro-batch by micro-batch."""
    return assemble_outputs([score_shares(OneDevice(network), batch, sampling, token_budget)], len(batch.target))


@torch.no_grad()
def score_shares(placement: Placement, batch: Batch, sampling: Sampling, token_budget: int) -> Shares:
    """What this rank's part of a network says of its micro-batches."""
    shares, _ = placement.shares(batch, token_budget)
    pieces = [(share, kept(placement.outputs(share.part.batch, sampling))) for share in shares]
    placement.collect()
    counted = ((share.part.index, outputs) for share, outputs in pieces if placement.leads and not share.stand_in)
    return Shares(tuple(counted))


class TorchLearner:
    """One network and its optimizer. Gradients accumulate until ``step``; the loss decides what they are divided by.

    On many ranks each has a learner like this one, with a ``placement``; all of them are called alike and at the same time, each says
    what it found of its share of a batch (``score_shares``, ``forward_backward_shares``, ``measure_shares``), and ``assemble`` puts
    that together.
    """

    def __init__(
        self, network: TrainableNetwork, sampling: Sampling, options: TorchLearnerOptions, placement: Placement | None = None
    ) -> None:
        """``sampling`` is the one rollouts are drawn with: log-probabilities are of that distribution (law 3)."""
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
        """What this rank says of a batch: all there is to say on one device."""
        return score_shares(self.placement, batch, self.sampling, self.options.score_tokens)

    def forward_backward_shares(self, batch: Batch, loss: LossFn) -> Shares:
        """Add the gradient of the batch's loss to what there is; this rank's part of the answer."""
        result = self._run(batch, loss, self.options.train_tokens, backward=True)
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:  # all idle: a zero gradient still moves the optimizer's momentum
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
        rate = float(self.optimizer.param_groups[0]["lr"])  # some optimizers keep a tensor, which the schedule changes in place
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
        """All of them, under their names in an ordinary model: adapters are merged in."""
        yield from self.placement.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """What a LoRA run trains, under the names of PEFT's files; nothing where the model has no adapters."""
        yield from self.placement.adapters().items()

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """``weights/`` as a Hugging Face folder, or adapters in PEFT's format; ``ema/`` with their average; and ``optimizer.pt``
        with what it takes to go on. On many ranks, all of which call it, pieces (``strop.training.torch.parallel.checkpoint``)."""
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
        """Restore what ``save`` wrote, on any number of ranks, in place: whoever shares the module sees the restored weights."""
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
        """Restore the average's state, if there is an average; without a state it begins anew, with a warning."""
        if self.average is None:
            return
        if state is not None:
            self.average.load_state_dict(state)
            return
        log.warning("%s has no average of the weights (policy.ema): it begins at the weights of this checkpoint", path)
        self.average.restart()


def save_weights(model: Any, folder: Path) -> None:
    """A Hugging Face folder, or the adapters alone where there are any."""
    with quiet():
        if low_rank_layers(model):
            save_adapters(model, folder)
        else:
            model.save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill a module, in place, from what ``save_weights`` wrote. Raises ValueError unless every weight is there.

    A weight that is tied to another is stored once.
    """
    if low_rank_layers(model):
        return load_adapters(model, folder)
    divided.load_weights(model, folder)


def _nothing(outputs: Outputs) -> tuple[Tensor, Metrics]:
    """The loss of a stand-in: its gradient is zero, and reaches every weight."""
    _, first = next(present(outputs))
    return first.sum() * 0.0, {}


def _on(batch: Batch, device: torch.device) -> Batch:
    """The columns a loss reads on the learner's device."""
    if device.type == "cpu":
        return batch
    names = ("target", "sequence", "sampler_logprobs", "versions", "advantages", "mask", "group", "rewards")
    moved = {name: getattr(batch, name).to(device) for name in names}
    return replace(batch, **moved, extras={name: column.to(device) for name, column in batch.extras.items()})
