"""The PyTorch learner: a network, its optimizer and its schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop import metrics
from strop.algorithms.base import LossFn, Outputs
from strop.data.rollout_selector import SubBatch
from strop.data.shares import BatchShare, ShareRequest
from strop.learner.base import BackwardResult
from strop.learner.budget.device_memory import explain_full_memory, measure_free, measure_peak, trim_freed_memory
from strop.learner.budget.memory_probe import MemoryProbe, make_full_rollouts
from strop.learner.learner_config import policy_extensions
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.micro_batch import (
    MicroBatch,
    MicroBatchOutputs,
    assemble_outputs,
    assemble_result,
    dummy_loss,
    sum_outputs,
    to_device,
)
from strop.learner.parallel.parallel_dims import to_local
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.sharded_checkpoint import LearnerSnapshot, take_snapshot
from strop.learner.parallel.single_device import SingleDevice
from strop.learner.torch.companion import Companion, CompanionOptions, StagedWithCompanion
from strop.learner.torch.layer_compilation import choose_layer_compilation
from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import Hyperparameters, ScheduleUnit, make_optimizer, make_scheduler
from strop.learner.torch.optimizer_config import SchedulerConfig, ScheduleStageConfig
from strop.learner.torch.scorer import TrainableNetwork, score_local
from strop.learner.torch.tensor_offload import ActivationOffload, TensorOffload, checkpoint_layers
from strop.learner.torch.weight_average import AveragedWeights
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.models.layers.known_code import decoder_layers
from strop.models.network import Network
from strop.models.network_parts import forget_copies
from strop.models.routing.recorded_experts import measure_disagreement, measure_missing_routes, take_replay_counts
from strop.models.routing.router_observer import ObservedRouters
from strop.sampling import Sampling
from strop.types import Batch

log = logging.getLogger(__name__)

CONSTANT = SchedulerConfig(
    stages=(ScheduleStageConfig(name="constant"),)
)  # also counts the steps, for a schedule that is set later
MOMENTS = 2  # tensors of a parameter's size that an optimizer such as AdamW keeps


class TorchLearner:
    """One network and its optimizer. Gradients accumulate until ``step``; the loss determines their normalization.

    With several ranks, each rank has such a learner with a ``parallelism``, and all ranks make the same calls in the same order. Each rank
    returns the results of its own micro-batches (``score_local``, ``forward_backward_local``, ``evaluate_loss_local``), and
    ``assemble_result`` combines them.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        config: ModelConfig,
        sampling: Sampling,
        *,
        whole_groups: bool = False,
        total_steps: int | None = None,
        steps_per_batch: int = 1,
        section: str = "policy",
        parallelism: Parallelism | None = None,
    ) -> None:
        """Make a learner for a network that is loaded.

        Args:
            sampling: The parameters that rollouts are sampled with: log-probabilities refer to that distribution (law 3).
            whole_groups: Never split a group across micro-batches: the loss compares its rollouts.
            total_steps: Optimizer steps of the run; a schedule that sets no length ends with them. None if the run has no limit.
            steps_per_batch: Optimizer steps of one pass over a batch; the schedule advances once per pass, or according to
            ``scheduler_unit``. section: Key of ``config``, for messages.
            parallelism: How the network is sharded; None means a single device.
        """
        self.network = network
        self.parallelism = parallelism or SingleDevice(network)
        self.sampling = sampling
        self.config = config
        self.whole_groups = whole_groups
        budget = config.train_tokens
        self._budget_key = f"{section}.{config.batching_key}"
        self._train_tokens: int | None = None if budget == "auto" else budget  # None: until ``set_train_tokens``
        self.model: nn.Module = network.model
        self._activations = self._limit_activations(section)
        self._prepare_layers(section)
        self.trainable_parameters = self.parallelism.trainable_parameters()
        self.masters = MasterWeights(self.trainable_parameters)
        self.parameters = self.masters.parameters
        self.optimizer = make_optimizer(
            config.optimizer, self.masters.named_parameters, section=section, elsewhere=self.parallelism.elsewhere
        )
        self.parallelism.prepare_optimizer(self.optimizer, section)
        schedule_unit = ScheduleUnit(config.scheduler_unit, steps_per_batch)
        length = schedule_unit.count_steps(total_steps) if config.scheduler and total_steps is not None else None
        self.scheduler = make_scheduler(config.scheduler or CONSTANT, self.optimizer, total_steps=length, section=section)
        ema, named = config.ema, self.masters.named_parameters
        self.average = AveragedWeights(named, decay=ema.decay, start_step=ema.start_step) if ema.enabled else None
        self.state = TrainingState(
            trainable_parameters=self.trainable_parameters,
            masters=self.masters,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            schedule_unit=schedule_unit,
            average=self.average,
            configured=Hyperparameters.of(self.optimizer, self.scheduler),
        )
        self.companion = self._make_companion(schedule_unit, length, section)
        self._steps = 0
        self.weight_offload = TensorOffload(self.parallelism.weight_tensors, network.device)
        self.state_offload = TensorOffload(self._state_tensors, network.device, self._coming_state)

    def _prepare_layers(self, section: str) -> None:
        if isinstance(self.network, Network):  # a value head runs its trunk's layers
            choose_layer_compilation(self.network, self.config.compile, section, ranks=self.parallelism.rank_layers)
            if self.config.router_losses.observes:
                self.network.observe_routers(self.config.router_losses, section)

    def _make_companion(self, schedule_unit: ScheduleUnit, length: int | None, section: str) -> Companion | None:
        """Return what an extension trains alongside the network, if one does."""
        options = CompanionOptions(
            optimizer=self.config.optimizer,
            max_grad_norm=self.config.max_grad_norm,
            scheduler=self.config.scheduler or CONSTANT,
            schedule_unit=schedule_unit,
            schedule_length=length,
            sampling=self.sampling,
            section=section,
            on_ranks=not isinstance(self.parallelism, SingleDevice),
        )
        network = self.network
        found = (each.make_companion(network, options) for each in policy_extensions(self.config) if isinstance(network, Network))
        return next((each for each in found if each is not None), None)

    def _limit_activations(self, section: str) -> ActivationOffload | None:
        """Make some layers recompute their activations, and return the offload of the others, if configured."""
        options = self.config.dtensor_cfg
        share = float(options.activation_checkpointing)
        self.model.train(share > 0)
        layers = decoder_layers(self.network.decoder) if isinstance(self.network, Network) else []
        checkpointed = checkpoint_layers(self.model, layers, share)
        if 0 < share < 1:
            log.info("%s: %d of %d layers recompute their activations", section, checkpointed, len(layers))
        if not options.activation_offload:
            return None
        if self.network.device.type == "cpu":
            log.warning("%s.dtensor_cfg.activation_offload has no effect: the activations are in CPU memory already", section)
            return None
        return ActivationOffload(self.network.device)

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yield the training tensors other than weights: gradients, masters, optimizer state, average."""
        yield from self.state.tensors()
        for parameter in (*self.model.parameters(), *self.parameters):
            if parameter.grad is not None:
                yield parameter.grad
        if self.companion is not None:
            yield from self.companion.tensors()

    def _coming_state(self) -> Iterator[int]:
        """Yield the sizes in bytes of the tensors that Adam will create in its first step; other optimizers' are not known in
        advance.
        """
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) and not self.optimizer.state:
            for parameter in self.parameters:
                for _ in range(MOMENTS):
                    yield to_local(parameter).nbytes

    def score(self, batch: Batch) -> Outputs:
        return assemble_outputs([self.score_local(batch)], len(batch.target))

    def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return assemble_result([self.forward_backward_local(batch, loss)], len(batch.target))

    def evaluate_loss(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return assemble_result([self.evaluate_loss_local(batch, loss)], len(batch.target))

    def share_requests(self) -> dict[str, ShareRequest]:
        """Return, for each pass over a batch, the share that this rank reads."""
        score_tokens, whole = self.config.score_tokens, self.whole_groups
        request = partial(self.parallelism.share_request, read_columns=True)
        trained = {} if self._train_tokens is None else {"forward_backward": request(self._train_tokens, whole_groups=whole)}
        return {
            "score": request(score_tokens),
            "evaluate_loss": request(score_tokens, whole_groups=whole),
            **trained,
        }

    def set_train_tokens(self, tokens: int) -> dict[str, ShareRequest]:
        """Set the token budget of a training micro-batch if the configuration says auto. Return the shares that a rank now reads;
        empty on a single device.
        """
        self._train_tokens = tokens
        return {} if isinstance(self.parallelism, SingleDevice) else self.share_requests()

    def probe_memory(self, rollouts: int, length: int) -> MemoryProbe:
        """Measure a pass over synthetic rollouts of ``length`` tokens. It changes neither weights nor gradients.

        All ranks must call it, before the first step or between two of them. Raises DeviceMemoryFull.
        """
        reads: Any = getattr(self.network, "trunk", self.network)  # of a value head
        batch = make_full_rollouts(rollouts, length, int(reads.model.get_input_embeddings().weight.shape[0]))
        micro_batch = MicroBatch(SubBatch(batch, torch.arange(len(batch.target))), zero_gradient=False)

        def read() -> None:
            self.parallelism.run_passes([micro_batch], partial(self._compute_trained, []), sum_outputs, backward=True)

        device = self.network.device
        with explain_full_memory(f"{self._budget_key}.train_mb_tokens", rollouts * length, trains=True):
            read()  # compile kernels and allocate gradients
            peak = measure_peak(read, device)
        free = measure_free(device)
        weights = sum(each.nbytes for each in self.parameters if each.device.type == device.type)
        self._drop_gradients()
        take_replay_counts(self.network)
        return MemoryProbe(
            device=device.type,
            tokens=rollouts * length,
            peak_bytes=peak,
            free_bytes=free,
            gradient_bytes=weights,
            optimizer_bytes=0 if self.optimizer.state else MOMENTS * weights,
        )

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.companion is not None:
            self.companion.drop_gradients()
        self.parallelism.after_step()

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs:
        """Score this rank's micro-batches: the full batch on a single device."""
        with self.weight_offload.on_device():  # a canary may run while the learner is offloaded
            return score_local(self.parallelism, batch, self.sampling, self.config.score_tokens)

    def forward_backward_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        """Accumulate the gradient of the batch's loss; return the results of this rank's micro-batches."""
        if self._train_tokens is None:
            raise RuntimeError(
                f"{self._budget_key}.train_mb_tokens is auto: set the measured value (set_train_tokens) before training"
            )
        result = self._run_micro_batches(batch, loss, self._train_tokens, backward=True)
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:  # all losses have zero gradient: the step still updates the optimizer's momentum
                parameter.grad = torch.zeros_like(parameter)
        return result

    def evaluate_loss_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        return self._run_micro_batches(batch, loss, self.config.score_tokens, backward=False)

    def _run_micro_batches(
        self, batch: Batch | BatchShare, loss: LossFn, token_budget: int, *, backward: bool
    ) -> MicroBatchOutputs:
        micro_batches, balance = self.parallelism.split_batch(batch, token_budget, whole_groups=self.whole_groups)
        logged: list[Metrics] = [balance] if backward else []
        routers = self._observed_routers() if backward else None
        if routers is not None and routers.config.has_loss:  # a rollout has it regardless of its advantage
            micro_batches = [replace(each, zero_gradient=False) for each in micro_batches]

        def compute_loss(micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
            if micro_batch.dummy:
                return dummy_loss(outputs)
            value, measured = loss(outputs, to_device(micro_batch.sub_batch.batch, self.network.device))
            missing = measure_missing_routes(getattr(self.network, "routed", None), micro_batch.sub_batch.batch)
            logged.append({**measured, **missing})
            return value

        take_replay_counts(self.network)  # those of earlier scores
        key = f"{self._budget_key}.{'train' if backward else 'logprob'}_mb_tokens"
        observing = nullcontext() if routers is None else routers.observing()
        with explain_full_memory(key, token_budget, trains=backward), observing:
            compute = partial(self._compute_trained, logged) if backward else self._compute_outputs
            results = self.parallelism.run_passes(micro_batches, compute, compute_loss, backward=backward)
        for metric, counts in take_replay_counts(self.network).items():
            logged.append(measure_disagreement(torch.stack(list(self.parallelism.gather_stages(counts))).sum(0), metric))
        if routers is not None:
            logged.append(routers.take(self.parallelism.add_over_ranks))
        return MicroBatchOutputs(results, metrics.merge(*logged)) if self.parallelism.is_leader else MicroBatchOutputs()

    def _observed_routers(self) -> ObservedRouters | None:
        return self.network.observed_routers if isinstance(self.network, Network) else None

    def _compute_outputs(self, batch: Batch) -> Outputs:
        with nullcontext() if self._activations is None else self._activations.in_forward():
            return self.network.outputs(batch, self.sampling)

    def _compute_trained(self, logged: list[Metrics], batch: Batch) -> Outputs:
        """Compute the outputs of a pass that trains, and have the companion learn from it; its metrics are added to ``logged``."""
        if self.companion is None:
            return self._compute_outputs(batch)
        with self.companion.capturing():
            outputs = self._compute_outputs(batch)
        logged.append(self.companion.accumulate(batch))
        return outputs

    def step(self) -> Metrics:
        limit = self.config.max_grad_norm
        norm = self.parallelism.clip_grad_norm(self.parameters, limit if limit is not None else float("inf"))
        rate = float(self.optimizer.param_groups[0]["lr"])  # some optimizers keep a tensor that the schedule changes in place
        found = norm.item()  # the only number in a step that the host waits for
        if math.isfinite(found):
            self.optimizer.step()
            self.masters.write_back()
            if self.average is not None:
                self.average.update()
        forget_copies(self.network)
        self._steps += 1
        if self.scheduler is not None and self._steps % self.state.schedule_unit.optimizer_steps == 0:
            self.scheduler.step()
        of_companion = {} if self.companion is None else self.companion.step()
        self._drop_gradients()
        trim_freed_memory(self._steps)
        return {
            "grad_norm": metrics.mean(found, 1),
            "lr": metrics.mean(rate, 1),
            "steps_skipped_for_nonfinite_gradient": metrics.total(float(not math.isfinite(found))),
            **of_companion,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under their names in an ordinary model, with adapters merged in."""
        yield from self.parallelism.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters under the names of PEFT's files; nothing for a model without adapters."""
        yield from self.parallelism.adapters().items()

    def save(self, folder: Path, optimizer: bool = True) -> None:
        """Write the weights, their average and with ``optimizer`` the state of training, in the format of the parallelism.

        With several ranks, all of them must call it.
        """
        self.parallelism.save(folder, self.state, optimizer=optimizer)
        if self.companion is not None:
            self.companion.save(folder, optimizer=optimizer)

    def stage(self, *, optimizer: bool = True) -> LearnerSnapshot | StagedWithCompanion:
        """Copy this rank's part of the state to CPU memory. Its ``save`` may run during training."""
        snapshot = take_snapshot(self.parallelism, self.state, optimizer=optimizer)
        companion = self.companion
        return snapshot if companion is None else StagedWithCompanion(snapshot, companion.stage(optimizer=optimizer))

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote on any number of ranks, in place: everything that shares the module sees the restored weights."""
        self.parallelism.load(folder, self.state)
        if self.companion is not None:
            self.companion.load(folder)
        forget_copies(self.network)
        self._steps = 0
