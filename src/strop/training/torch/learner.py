"""The learner in this process: a network, its optimizer and its schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop import metrics
from strop.algorithms.base import LossFn, Outputs
from strop.data.packing import Part, micro_batches
from strop.metrics import Metrics
from strop.models.adapters import adapter_folder, adapter_weights, load_adapters, low_rank_layers, merged_weights, save_adapters
from strop.models.loading import quiet
from strop.models.memory import give_back_freed_memory
from strop.sampling import Sampling
from strop.training.base import BackwardResult
from strop.training.torch.averaging import AveragedWeights
from strop.training.torch.master import MasterWeights
from strop.training.torch.optimizers import ParameterGroup, load_optimizer, make_optimizer, make_scheduler
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

    def __init__(self, network: TrainableNetwork, sampling: Sampling, *, score_tokens: int, offload: bool = False) -> None:
        self.network = network
        self.sampling = sampling
        self.score_tokens = score_tokens
        self.offload = offload and network.device.type != "cpu"
        network.model.requires_grad_(False)
        if self.offload:
            network.model.to("cpu")

    async def score(self, batch: Batch) -> Outputs:
        if self.offload:
            self.network.model.to(self.network.device)
        scores = score(self.network, batch, self.sampling, self.score_tokens)
        if self.offload:
            self.network.model.to("cpu")
        return scores


@dataclass(frozen=True)
class NetworkScorer:
    """A network as it is at the moment it is asked, whoever trains it."""

    network: TrainableNetwork
    sampling: Sampling
    score_tokens: int

    async def score(self, batch: Batch) -> Outputs:
        return score(self.network, batch, self.sampling, self.score_tokens)


@torch.no_grad()
def score(network: TrainableNetwork, batch: Batch, sampling: Sampling, token_budget: int) -> Outputs:
    """What a network says of a whole batch, micro-batch by micro-batch."""
    parts = micro_batches(batch, token_budget, padded=not network.packed)
    return joined([(part, _kept(network.outputs(part.batch, sampling))) for part in parts], len(batch.target))


def _kept(outputs: Outputs) -> Outputs:
    """Outputs without gradient, in float32 on the CPU."""
    tensors = {item.name: getattr(outputs, item.name) for item in fields(outputs)}
    kept: dict[str, Any] = {name: value.detach().float().cpu() for name, value in tensors.items() if value is not None}
    return replace(outputs, **kept)


def joined(pieces: Sequence[tuple[Part, Outputs]], size: int) -> Outputs:
    """The outputs of parts as those of the whole batch of ``size`` predicted tokens."""
    first = pieces[0][1]
    columns: dict[str, Any] = {}
    for item in fields(first):
        if (example := getattr(first, item.name)) is not None:
            column = torch.zeros(size, *example.shape[1:], dtype=example.dtype)
            for part, outputs in pieces:
                column[part.index] = getattr(outputs, item.name)
            columns[item.name] = column
    return replace(first, **columns)


class TorchLearner:
    """One network on one device. Gradients accumulate until ``step``; the loss decides what they are divided by."""

    def __init__(self, network: TrainableNetwork, sampling: Sampling, options: TorchLearnerOptions) -> None:
        """``sampling`` is the one rollouts are drawn with: log-probabilities are of that distribution (law 3)."""
        self.network = network
        self.sampling = sampling
        self.options = options
        self.model: nn.Module = network.model
        self.model.train(options.activation_checkpointing)
        if options.activation_checkpointing:
            network.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
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
        self.scheduler = make_scheduler(
            options.schedule, self.optimizer, total_steps=options.total_steps, section=options.section
        )
        self.average: AveragedWeights | None = None
        if options.average_decay is not None:
            self.average = AveragedWeights(self.masters.named, decay=options.average_decay, start_step=options.average_start)
        self._steps = 0

    async def score(self, batch: Batch) -> Outputs:
        return score(self.network, batch, self.sampling, self.options.score_tokens)

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        result = self._run(batch, loss, self.options.train_tokens, backward=True)
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:  # all idle: a zero gradient still moves the optimizer's momentum
                parameter.grad = torch.zeros_like(parameter)
        return result

    async def measure(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return self._run(batch, loss, self.options.score_tokens, backward=False)

    def _run(self, batch: Batch, loss: LossFn, token_budget: int, *, backward: bool) -> BackwardResult:
        logged: list[Metrics] = []
        pieces: list[tuple[Part, Outputs]] = []
        whole = self.options.whole_groups
        for part in micro_batches(batch, token_budget, padded=not self.network.packed, whole_groups=whole):
            outputs, measured = self._part(part, loss, backward=backward)
            pieces.append((part, outputs))
            logged.append(measured)
        return BackwardResult(metrics=metrics.merge(*logged), outputs=joined(pieces, len(batch.target)))

    def _part(self, part: Part, loss: LossFn, *, backward: bool) -> tuple[Outputs, Metrics]:
        idle = not backward or (part.batch.idle is not None and bool(part.batch.idle.all()))
        with torch.set_grad_enabled(not idle):
            outputs = self.network.outputs(part.batch, self.sampling)
            value, logged = loss(outputs, _on(part.batch, self.network.device))
        if not idle:
            value.backward()
        return _kept(outputs), logged

    async def step(self) -> Metrics:
        limit = self.options.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit if limit is not None else float("inf"))
        rate = float(self.optimizer.param_groups[0]["lr"])  # some optimizers keep a tensor, which the schedule changes in place
        if torch.isfinite(norm):
            self.optimizer.step()
            self.masters.write_back()
            if self.average is not None:
                self.average.update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
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
        yield from merged_weights(self.model)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """What a LoRA run trains, under the names of PEFT's files; nothing where the model has no adapters."""
        yield from adapter_weights(self.model).items()

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """``weights/`` as a Hugging Face folder, or adapters in PEFT's format; ``ema/`` with their average; and ``optimizer.pt``
        with what it takes to go on."""
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
        """Restore what ``save`` wrote, in place: whoever shares the module sees the restored weights."""
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
        self._load_average(state.get("average"), path)

    def _load_average(self, state: Mapping[str, Any] | None, path: Path) -> None:
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
    from safetensors.torch import load_file

    if low_rank_layers(model):
        return load_adapters(model, folder)
    if adapter_folder(str(folder)) is not None:
        raise ValueError(
            f"{folder} holds adapters, and this run trains all of the model; set dtensor_cfg.lora_cfg as it was when they were "
            "saved, or start with another checkpointing.checkpoint_dir"
        )
    stored = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    missing, unexpected = model.load_state_dict(stored, strict=False)
    own = model.state_dict()
    filled = {own[name].data_ptr() for name in stored if name in own}
    missing = [name for name in missing if own[name].data_ptr() not in filled]
    if missing or unexpected:
        raise ValueError(
            f"the weights in {folder} do not fit the model: missing {missing[:3]}, not of the model {unexpected[:3]}"
        )


def _on(batch: Batch, device: torch.device) -> Batch:
    """The columns a loss reads on the learner's device."""
    if device.type == "cpu":
        return batch
    names = ("target", "sequence", "sampler_logprobs", "versions", "advantages", "mask", "group", "rewards")
    moved = {name: getattr(batch, name).to(device) for name in names}
    return replace(batch, **moved, extras={name: column.to(device) for name, column in batch.extras.items()})
