"""The Megatron Core learner: a rank's stages of a model, their optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop import metrics
from strop.algorithms.base import LossFn, Outputs
from strop.data.packing_config import require_number
from strop.data.shares import BatchShare, ShareRequest, count_tokens
from strop.extensions.labs.draft.draft_trainer import DraftTrainer
from strop.extensions.megatron.checkpoint.megatron_snapshot import MegatronSnapshot, load_learner, snapshot_learner
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_draft import MegatronDraftedPolicy, add_over_ranks, make_megatron_draft_options
from strop.extensions.megatron.megatron_network import MegatronNetwork, MegatronScorer
from strop.extensions.megatron.megatron_optimizer import (
    GradientBuffers,
    make_megatron_optimizer,
    make_megatron_scheduler,
    step_optimizer,
    wrap_stages,
)
from strop.extensions.megatron.schedule import RouterLosses, prepare_schedule
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.micro_batch import MicroBatch, MicroBatchOutputs, detach_to_cpu, dummy_loss, to_device
from strop.learner.torch.companion import StagedWithCompanion
from strop.learner.torch.optimizer import ScheduleUnit
from strop.learner.torch.tensor_offload import TensorOffload
from strop.metrics import Metrics
from strop.models.routing.recorded_experts import measure_disagreement, measure_missing_routes
from strop.sampling import Sampling
from strop.types import Batch


class MegatronLearner:
    """One network and its optimizer on this rank. Gradients accumulate until ``step``; the loss determines their normalization.

    All ranks make the same calls in the same order. Each returns the results of its own micro-batches, if it leads the ranks that read
    them; ``assemble_result`` combines them.
    """

    def __init__(
        self,
        network: MegatronNetwork,
        config: ModelConfig,
        sampling: Sampling,
        *,
        whole_groups: bool = False,
        total_steps: int | None = None,
        steps_per_batch: int = 1,
        section: str = "policy",
    ) -> None:
        """Make a learner for a network whose weights are loaded. The arguments are those of ``TorchLearner``."""
        megatron = MegatronConfig.of(config)
        self.network = network
        self.config = config
        self.sampling = sampling
        self.whole_groups = whole_groups
        self.layout = network.layout
        self.transformer: Any = network.stages[0].config  # Megatron Core's; the stages share it
        self.schedule_unit = ScheduleUnit("batch", steps_per_batch)
        if megatron.freeze_moe_router:
            freeze_routers(network)
        key = f"{section}.megatron_cfg"
        with self.layout.activate():
            prepare_schedule(self.transformer)
            for stage in network.stages:
                stage.train()
            trained = [parameter.dtype for _, parameter in network.named_parameters() if parameter.requires_grad]
            dtype = min(trained, key=lambda dtype: dtype.itemsize)  # adapters are float32 on a bfloat16 base
            network.chunks = wrap_stages(
                network.stages,
                megatron.distributed_data_parallel_config,
                distributed_optimizer=megatron.optimizer.use_distributed_optimizer,
                key=key,
            )
            self.gradients = GradientBuffers(network.chunks)
            self.optimizer: Any = make_megatron_optimizer(
                megatron.optimizer,
                network.chunks,
                dtype,
                gloo_groups=megatron.use_gloo_process_groups,
                key=f"{key}.optimizer",
            )
            self.scheduler: Any = make_megatron_scheduler(
                megatron.scheduler,
                megatron.optimizer,
                self.optimizer,
                total_steps=None if total_steps is None else self.schedule_unit.count_steps(total_steps),
                key=f"{key}.scheduler",
            )
        self.router_losses = RouterLosses(self.transformer, self.layout, per_layer=megatron.moe_per_layer_logging)
        biased = self.transformer.moe_router_enable_expert_bias and self.transformer.moe_router_bias_update_rate > 0
        self.routers_learn = biased or bool(self.router_losses.names)  # also of tokens for which the loss has no gradient
        self.draft = self._make_draft()
        self._steps = 0
        self.weight_offload = TensorOffload(self._weight_tensors, network.device)
        self.state_offload = TensorOffload(self._state_tensors, network.device)

    def _make_draft(self) -> DraftTrainer | None:
        """Return the trainer of the network's draft head, if it has one."""
        network = self.network
        if network.draft is None:
            return None
        options = make_megatron_draft_options(MegatronConfig.of(self.config), getattr(self.config, "draft", None))
        add = partial(add_over_ranks, group=self.layout.data)
        return DraftTrainer(MegatronDraftedPolicy(network), network.draft, options, self.sampling, add)

    # --- passes -----------------------------------------------------------------------------------------------------------

    def share_requests(self) -> dict[str, ShareRequest]:
        """Return, for each pass over a batch, the share that this rank reads."""
        whole = self.whole_groups
        request = partial(self.network.share_request, read_columns=True)
        return {
            "score": request(self.config.score_tokens),
            "forward_backward": request(require_number(self.config.train_tokens), whole_groups=whole),
            "evaluate_loss": request(self.config.score_tokens, whole_groups=whole),
        }

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs:
        """Score this rank's micro-batches."""
        with self.weight_offload.on_device():  # a canary may run while the learner is offloaded
            tokens = self.config.score_tokens
            return MegatronScorer(self.network, self.sampling, tokens, replays=True).score_local(batch)

    def forward_backward_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        """Accumulate the gradient of the batch's loss; return the results of this rank's micro-batches."""
        return self._run_micro_batches(batch, loss, require_number(self.config.train_tokens), backward=True)

    def evaluate_loss_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        return self._run_micro_batches(batch, loss, self.config.score_tokens, backward=False)

    def _run_micro_batches(
        self, batch: Batch | BatchShare, loss: LossFn, token_budget: int, *, backward: bool
    ) -> MicroBatchOutputs:
        micro_batches, balance = self.network.split_batch(batch, token_budget, whole_groups=self.whole_groups)
        trained = [each for each in micro_batches if backward and (self.routers_learn or not each.zero_gradient)]
        scale = self._scale_loss(batch) if trained else 1.0

        draft = self.draft if backward else None

        def finish(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, tuple[MicroBatch, Outputs, Metrics]]:
            part = micro_batch.sub_batch.batch
            drafted = {} if draft is None or micro_batch.dummy else draft.accumulate(part)
            outputs = self.network.outputs(hidden, part, self.sampling)
            value, logged = (
                (dummy_loss(outputs), {}) if micro_batch.dummy else loss(outputs, to_device(part, self.network.device))
            )
            logged = {**logged, **drafted, **measure_missing_routes(self.network.routed, part)}
            return value * scale if scale != 1.0 else value, (micro_batch, detach_to_cpu(outputs), logged)

        router_losses: Metrics = {}
        with nullcontext() if draft is None else draft.capturing():
            results = self.network.run([each for each in micro_batches if each not in trained], finish)
            if trained:
                self.gradients.overlap_with_next_pass(self.transformer)
                self.router_losses.start()
                results += self.network.run(trained, finish, backward=True)
                router_losses = self.router_losses.take(len(trained))
        disagreement = measure_disagreement(self.network.take_router_counts())
        if not self.layout.is_leader:
            return MicroBatchOutputs()
        real = [(micro_batch, outputs, logged) for micro_batch, outputs, logged in results if not micro_batch.dummy]
        measured = [{"tokens_per_rank_max_over_mean": metrics.mean(balance, 1)}] if backward else []
        return MicroBatchOutputs(
            tuple((micro_batch.sub_batch.index, outputs) for micro_batch, outputs, _ in real),
            metrics.merge(disagreement, router_losses, *measured, *(logged for _, _, logged in real)),
        )

    def _scale_loss(self, batch: Batch | BatchShare) -> float:
        """Set the scale of the gradients, and return the factor that the loss is multiplied with before it.

        Megatron Core weighs the auxiliary losses of its routers by the tokens of a micro-batch and divides all gradients by the tokens of
        the step at the end. We divide nothing at the end (law 1), so the scale, which multiplies both kinds of losses, divides them here.
        Where ranks share the tokens of a micro-batch, it weighs by those of a rank, so that the divisor is a rank's share too.
        """
        sharing = self.layout.dims.tensor * self.layout.dims.context
        tokens = count_tokens(batch) / sharing if self.router_losses.names else 1
        self.transformer.grad_scale_func = (lambda loss: loss / tokens) if tokens != 1 else None
        return float(tokens)

    # --- steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> Metrics:
        """Add the gradients over the ranks, clip them, take one optimizer step, advance the schedule and zero the gradients."""
        rate = float(self.scheduler.get_lr({}))
        with self.layout.activate():
            self.gradients.add_over_ranks()
            norm, finite = step_optimizer(self.optimizer)
            self._steps += 1
            if self._steps % self.schedule_unit.optimizer_steps == 0:
                self.scheduler.step(1)
            self.gradients.zero()
            self.optimizer.zero_grad()
        drafted = {} if self.draft is None else self.draft.step()
        return {
            "grad_norm": metrics.mean(norm, 1),
            "lr": metrics.mean(rate, 1),
            "steps_skipped_for_nonfinite_gradient": metrics.total(float(not finite)),
            **drafted,
        }

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, optimizer: bool = True) -> None:
        """Write the weights, and with ``optimizer`` the state of training. All ranks must call it."""
        snapshot_learner(self, optimizer=optimizer, copies=False).save(folder, optimizer=optimizer)
        if self.draft is not None and dist.get_rank() == 0:
            self.draft.save(folder, optimizer=optimizer)

    def stage(self, *, optimizer: bool = True) -> MegatronSnapshot | StagedWithCompanion:
        """Return a copy of the state in CPU memory, which may be written while training continues."""
        snapshot = snapshot_learner(self, optimizer=optimizer)
        if self.draft is None or dist.get_rank() != 0:
            return snapshot
        return StagedWithCompanion(snapshot, self.draft.stage(optimizer=optimizer))

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote in any layout, in place."""
        load_learner(self, folder)
        if self.draft is not None:
            self.draft.load(folder)
        self._steps = 0

    # --- memory -----------------------------------------------------------------------------------------------------------

    def _weight_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that refers to the memory of this rank's weights, also the optimizer's views of it."""
        self.network.gather_weights()
        weights = memory_of(self._parameters())
        yield from self._parameters()
        yield from (tensor for tensor in find_tensors((self.network.chunks, self.optimizer)) if memory_of([tensor]) & weights)

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of training besides the weights: gradients, masters, the optimizer's state."""
        weights = memory_of(self._parameters())
        yield from (tensor for tensor in find_tensors((self.network.chunks, self.optimizer)) if not memory_of([tensor]) & weights)
        if self.draft is not None:
            yield from self.draft.tensors()

    def _parameters(self) -> Sequence[Tensor]:
        return [
            tensor for stage in self.network.stages for tensor in (*stage.parameters(), *(buffer for buffer in stage.buffers()))
        ]


def freeze_routers(network: MegatronNetwork) -> None:
    """Stop training the weights that choose the experts of each token."""
    for name, parameter in network.named_parameters():
        if ".router." in name:
            parameter.requires_grad_(False)


# The tensors that Megatron Core's objects hold: weights, gradients, optimizer state, and views of them.


def find_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield every tensor that is reachable from ``roots`` through containers, modules, optimizers and Megatron Core's objects, once.

    Views of a buffer stand in many places (buckets, shards of the distributed optimizer, ``main_grad``), and each of them keeps its memory
    alive.
    """
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
            pending += [value for value in vars(found).values() if isinstance(value, Tensor)]  # main_grad, main_param
            pending += [] if found.grad is None else [found.grad]
        elif isinstance(found, Mapping):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set | frozenset):
            pending += found
        elif isinstance(found, nn.Module | torch.optim.Optimizer) or type(found).__module__.startswith("megatron."):
            pending += vars(found).values() if hasattr(found, "__dict__") else ()


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.untyped_storage().nbytes()}
