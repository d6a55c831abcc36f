"""One rank of a run on a cluster, in its own process: its shards of the policy, the critic, the reference and the teachers.

The driver (``strop.build.cluster.ray_backend``) calls the same method on every rank. Batches are passed by reference, so that each
node reads them once; each rank processes its part of a batch and returns the result for it. Ranks build models from the
configuration of the run.
"""

from __future__ import annotations

import copy
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from strop.algorithms.base import Algorithm, LossFn
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.build.cluster.column_shards import ColumnShard, split_groups
from strop.build.cluster.device_plan import make_parallel_dims
from strop.build.engines import make_sender_factory, write_model_folder
from strop.build.lifecycle import seed_everything
from strop.build.models import LoadedPolicy, load_reward_policy, load_training_policy, make_critic, make_learner
from strop.build.teachers import find_teacher_columns, get_student_info, load_teacher, named_teachers
from strop.config import TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, PpoRunConfig, RmRunConfig
from strop.learner.base import ColumnSource
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from strop.learner.parallel.parallel_dims import DeviceMeshes
from strop.learner.parallel.rank_zero_loading import load_on_rank_zero, probe_on_rank_zero
from strop.learner.parallel.sharded import Sharded, parallelize_head, parallelize_network
from strop.learner.parallel.sharded_export import iter_sharded_weights
from strop.learner.torch import sharded_checkpoint
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.reference_store import model_fingerprint
from strop.learner.torch.scorer import AdapterOffScorer, FrozenScorer, NetworkScorer
from strop.metrics import Metrics
from strop.models.adapters import lora_layers
from strop.models.network import Network
from strop.models.value_head import ValueHead
from strop.sampling import Sampling
from strop.types import Batch, Group
from strop.weight_sync.base import ChannelAddress, TransportError
from strop.weight_sync.exporter import BlockingExporter, Fingerprints, SentAdapters, TransferContent, TransferPlan

log = logging.getLogger(__name__)
dist: Any = torch.distributed

POLICY = "policy"


class RankZeroLoader:
    """``ModelLoader`` for ranks: rank 0 loads the model; the others hold it on the meta device until it is sharded."""

    def load_model(self, load: Callable[[str], Any], device: torch.device) -> Any:
        return load_on_rank_zero(lambda: load("cpu"))

    def make_network(self, model: Any, make: Callable[..., Any]) -> Any:
        return probe_on_rank_zero(model, make)


class RankScorer(Protocol):
    """A network that scores this rank's part of a batch."""

    def score_local(self, batch: Batch) -> MicroBatchOutputs: ...


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """What the driver needs to know about the policy, which only the ranks hold."""

    packed: bool  # whether it supports packed rows
    fallback: str | None  # why it reads padded rows
    on_cpu: bool
    stop_ids: tuple[int, ...]
    fingerprint: str  # of the weights before training
    vocab_size: int  # size of the output layer; 0 for a network without one
    address: str  # of rank 0's machine


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How the learner exports weights to engines."""

    dtype: torch.dtype
    keep_snapshot: bool
    adapters: bool
    same_machine: bool  # whether all engines are on the machine of rank 0
    folder: Path  # for transports that use files


class LearnerWorker:
    """The actor of one rank. Calls run one after another on one thread; only ``close_export`` and ``write_staged`` may run concurrently."""

    def __init__(self, config: TrainingRunConfig, rank: int, world: int) -> None:
        self.config = config
        self.rank = rank
        self.world = world
        self.learners: dict[str, TorchLearner] = {}
        self.scorers: dict[str, RankScorer] = {}
        self.columns: dict[tuple[str, str], ColumnSource] = {}  # by (source, column)
        self.busy_seconds = 0.0
        self._store: Any = None
        self._export: BlockingExporter | None = None
        self._staged: dict[str, sharded_checkpoint.LearnerSnapshot] = {}

    # --- process group ----------------------------------------------------------------------------------------------------

    def open_store(self, host: str) -> int:
        """Open the store of the process group on rank 0. Return its port."""
        self._store = dist.TCPStore(host, 0, self.world, True, timeout=datetime.timedelta(seconds=300), wait_for_workers=False)
        return int(self._store.port)

    def init_process_group(self, host: str, port: int, timeout: float) -> None:
        """Initialize the process group. ``timeout``: seconds after which a collective fails if a rank does not take part."""
        limit = datetime.timedelta(seconds=timeout)
        store = self._store or dist.TCPStore(host, port, self.world, False, timeout=limit)
        device = self._device()
        backend = "gloo" if device == "cpu" else "nccl"
        if device != "cpu":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)

    def _device(self) -> str:
        device = self.config.policy.device
        return "cuda" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "cpu"

    # --- models -----------------------------------------------------------------------------------------------------------

    def load_policy(self, address: str) -> PolicyInfo:
        """Load the policy, not yet sharded. ``address``: of rank 0's machine. Raises ModelNotFound, ValueError."""
        config = self.config
        seed_everything(config.training.seed)
        if isinstance(config, RmRunConfig):
            self.policy: LoadedPolicy = load_reward_policy(config, RankZeroLoader())
        else:
            self.policy = load_training_policy(config.policy, config.training.seed, RankZeroLoader())
        network = self.policy.network
        return PolicyInfo(
            packed=network.packed,
            fallback=network.fallback,
            on_cpu=self._device() == "cpu",
            stop_ids=self.policy.stop_ids,
            fingerprint=model_fingerprint(network.model) if self.rank == 0 else "",
            vocab_size=0 if isinstance(config, RmRunConfig) else get_student_info(self.policy).vocab_size,
            address=address,
        )

    def shard_models(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> list[str]:
        """Load the other models and shard all of them over the ranks. Return the names of the learners.

        Raises ValueError for settings that do not go together."""
        config, policy = self.config, self.policy
        self.sampling = sampling
        critic = make_critic(config, policy, RankZeroLoader()) if isinstance(config, PpoRunConfig) else None
        reference = self._copy_reference() if REFERENCE_LOGPROBS in algorithm.requires else None
        device = self._device()
        parallelism = self._parallelize(
            policy.network, config.policy, DeviceMeshes(make_parallel_dims(config.policy.dtensor_cfg, self.world), device)
        )
        self.parallelism = parallelism
        self.learners[POLICY] = make_learner(
            policy.network,
            config.policy,
            sampling,
            whole_groups=algorithm.whole_groups,
            total_steps=total_steps,
            parallelism=parallelism,
        )
        if critic is not None:
            assert isinstance(config, PpoRunConfig)
            if isinstance(critic, ValueHead):
                critic_parallelism = parallelize_head(critic, parallelism)
            else:
                assert isinstance(critic, Network)
                critic_parallelism = self._parallelize(
                    critic, config.value, DeviceMeshes(make_parallel_dims(config.value.dtensor_cfg, self.world), device)
                )
            self.learners["value"] = make_learner(
                critic, config.value, sampling, total_steps=total_steps, section="value", parallelism=critic_parallelism
            )
        self.scorers.update(self.learners)
        self._make_scorers(reference, algorithm)
        return list(self.learners)

    def _parallelize(self, network: Network, model: ModelConfig, meshes: DeviceMeshes) -> Sharded:
        plan: Mapping[str, str] | None = None
        if (name := model.dtensor_cfg.custom_parallel_plan) is not None and meshes.dims.tensor > 1:
            from strop.learner.parallel.tensor_plan import load_tensor_plan

            plan = load_tensor_plan(name)
        return parallelize_network(
            network,
            meshes,
            weights_dtype=torch.bfloat16 if model.weights_dtype == "bfloat16" else None,
            cpu_offload=model.dtensor_cfg.cpu_offload,
            tensor_plan=plan,
        )

    def _copy_reference(self) -> Network | None:
        """Copy the policy with its current weights; return None with LoRA, where the policy without adapters is the reference."""
        network = self.policy.network
        if lora_layers(network.model):
            return None
        model = copy.deepcopy(network.model).eval()
        model.requires_grad_(False)
        return Network(model, precision=network.precision, chunk=network.chunk, packed=network.packed)

    def _make_scorers(self, reference: Network | None, algorithm: Algorithm) -> None:
        config = self.config
        packing = config.policy.sequence_packing if config.policy.sequence_packing.enabled else config.policy.dynamic_batching
        tokens = packing.logprob_mb_tokens
        network = self.policy.network
        if lora_layers(network.model):
            self.scorers["reference"] = AdapterOffScorer(
                network, self.sampling, score_tokens=tokens, parallelism=self.parallelism
            )
        elif reference is not None:
            meshes = DeviceMeshes(make_parallel_dims(config.policy.dtensor_cfg, self.world), self._device())
            reference_parallelism = parallelize_network(
                reference,
                meshes,
                weights_dtype=torch.bfloat16 if config.policy.weights_dtype == "bfloat16" else None,
                cpu_offload=config.policy.reference.offload or config.policy.dtensor_cfg.cpu_offload,
            )
            self.scorers["reference"] = FrozenScorer(
                reference, self.sampling, score_tokens=tokens, parallelism=reference_parallelism
            )
        self.scorers["untrained"] = NetworkScorer(network, self.sampling, tokens, self.parallelism)
        if isinstance(config, DistillationRunConfig):
            self._load_teachers(config, algorithm)

    def _load_teachers(self, config: DistillationRunConfig, algorithm: Algorithm) -> None:
        """Load the teachers without separate processes, unsharded."""
        columns = find_teacher_columns(config, algorithm)
        for key, teacher in named_teachers(config).items():
            if teacher.model_name == "self":
                raise ValueError(
                    f"{key}.model_name is self, which works in one process only: ranks hold shards of the policy. Name a model, or set "
                    "cluster.backend=local"
                )
            if not teacher.hosts:
                make_source = load_teacher(key, config, get_student_info(self.policy), columns, self.sampling)
                self.columns.update({(key, column): make_source(column) for column in columns})

    def write_model_folder(self, folder: Path) -> None:
        """Write the folder that engines build the policy from, without weights. Called on rank 0."""
        write_model_folder(self.policy, folder)

    # --- training ---------------------------------------------------------------------------------------------------------

    def score(self, name: str, batch: Batch) -> MicroBatchOutputs:
        with self._count_busy_seconds():
            return self.scorers[name].score_local(batch)

    def forward_backward(self, name: str, batch: Batch, loss: LossFn) -> MicroBatchOutputs:
        with self._count_busy_seconds():
            return self.learners[name].forward_backward_local(batch, loss)

    def evaluate_loss(self, name: str, batch: Batch, loss: LossFn) -> MicroBatchOutputs:
        with self._count_busy_seconds():
            return self.learners[name].evaluate_loss_local(batch, loss)

    def step(self, name: str) -> Metrics:
        with self._count_busy_seconds():
            metrics: Metrics = _run_sync(self.learners[name].step())
            return metrics

    @contextmanager
    def _count_busy_seconds(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - started

    def get_busy_seconds(self) -> float:
        """Return the seconds that this rank has spent in scoring and training since its start."""
        return self.busy_seconds

    def fill(self, source: str, column: str, batch: Batch, groups: Sequence[Group]) -> ColumnShard | None:
        """Fill columns for this rank's groups; return None if it has no groups or another rank fills them."""
        meshes = self.parallelism.meshes
        group_range = split_groups(len(groups), meshes.data_rank, meshes.dims.data)
        if group_range.is_empty or not meshes.is_leader:
            return None
        sub_batch = group_range.select(batch)
        return ColumnShard(
            sub_batch.index,
            _run_sync(self.columns[source, column].columns(sub_batch.batch, groups[group_range.start : group_range.stop])),
        )

    # --- weights ----------------------------------------------------------------------------------------------------------

    def open_export(self, options: ExportOptions, host: str) -> None:
        config = self.config.policy
        source = None
        if options.adapters:
            from strop.learner.parallel.sharded_export import ShardedAdapterSource

            source = ShardedAdapterSource(self.parallelism)
        self._export = BlockingExporter(
            lambda: iter_sharded_weights(self.parallelism),
            make_sender_factory(
                config.generation, self.policy.network.device, options.folder, host=host, same_machine=options.same_machine
            ),
            dtype=options.dtype,
            keep_snapshot=options.keep_snapshot,
            adapters=source,
            is_sender=self.rank == 0,
        )

    def _require_export(self) -> BlockingExporter:
        assert self._export is not None
        return self._export

    def prepare_export(self, content: TransferContent) -> TransferPlan:
        return self._require_export().prepare(content)

    def open_sender(self, receivers: int) -> ChannelAddress:
        return self._require_export().open(receivers)

    def send(self, read_back: bool) -> Fingerprints | TransportError:
        """Send the prepared weights. Return, not raise, a TransportError: a lost receiver must not end the ranks."""
        try:
            return self._require_export().send(read_back=read_back)
        except TransportError as error:
            return error

    def export_adapters(self, resend: bool) -> SentAdapters:
        return self._require_export().export_adapters(resend=resend)

    def close_export(self) -> None:
        if self._export is not None:
            self._export.close()

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def save(self, name: str, folder: Path, optimizer: bool) -> None:
        sharded_checkpoint.save(self.learners[name], folder, optimizer=optimizer)

    def stage(self, name: str, optimizer: bool) -> None:
        """Copy the state of a learner to CPU memory, for ``write_staged``."""
        self._staged[name] = sharded_checkpoint.take_snapshot(self.learners[name], optimizer=optimizer)

    def write_staged(self, name: str, folder: Path, optimizer: bool) -> None:
        """Write the staged state to ``folder``. May run concurrently with training."""
        self._staged.pop(name).save(folder, optimizer=optimizer)

    def load_checkpoint(self, name: str, folder: Path) -> None:
        sharded_checkpoint.load(self.learners[name], folder)

    def process(self) -> int:
        return os.getpid()


def _run_sync(coroutine: Any) -> Any:
    """Run a coroutine that never suspends and return its result. Local learners never suspend; only remote ones need the async protocol."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("a coroutine of a rank suspended; local learners must not await anything")


def get_engine_precision(config: TrainingRunConfig) -> str:
    """Return the precision of an engine's weights: vLLM's own setting, or for the torch engine the learner's."""
    generation = config.policy.generation
    return generation.vllm_cfg.precision if generation.backend == "vllm" else config.policy.weights_dtype
