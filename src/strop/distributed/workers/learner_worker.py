"""One rank of a run on a cluster, in its own process: its shards of the policy, the critic, the reference and the teachers.

The driver (``strop.distributed.workers.remote_learner``) calls the same method on every rank. It passes the ranks picklable
functions that build their models; this module does not depend on the configuration. Each rank processes its part of a batch and
returns the result for it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from strop.algorithms.base import LossFn
from strop.checkpointing.base import Saveable
from strop.data.rollout_selector import SubBatch
from strop.data.shares import BatchShare, ShareRequest
from strop.data.splitting import select_rollouts
from strop.distributed.base import serve_store
from strop.learner.budget.memory_probe import MemoryProbe
from strop.learner.parallel.micro_batch import MicroBatchOutputs
from strop.learner.torch.tensor_offload import ModelOffload
from strop.metrics import Metrics
from strop.types import Batch
from strop.weight_sync.base import ChannelAddress, TransportError
from strop.weight_sync.exporter import AdapterSource, BlockingExporter, Fingerprints, SentAdapters, TransferContent, TransferPlan
from strop.weight_sync.weight_source import Weight


@dataclass(frozen=True)
class ColumnShard:
    """Columns for some of the predicted tokens of a batch."""

    index: Tensor  # [n] int64, positions in the N of the whole batch
    columns: Mapping[str, Tensor]  # [n] or [n, K]


@dataclass(frozen=True)
class GroupRange:
    """Groups ``start`` to ``stop`` (excluded) of a batch."""

    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    def select(self, batch: Batch) -> SubBatch:
        """Return the batch of these groups only. The range must not be empty."""
        rollouts = ((batch.group >= self.start) & (batch.group < self.stop)).nonzero().flatten().tolist()
        return select_rollouts(batch, rollouts)


def split_groups(groups: int, rank: int, count: int) -> GroupRange:
    """Return the range of groups for process ``rank`` of ``count``; it may be empty if there are fewer groups than processes."""
    return GroupRange(rank * groups // count, (rank + 1) * groups // count)


def merge_columns(shards: Sequence[ColumnShard], length: int) -> dict[str, Tensor]:
    """Merge columns with disjoint indices into columns of the whole batch, [N] or [N, K] with N = ``length``."""
    merged: dict[str, Tensor] = {}
    for name, example in shards[0].columns.items():
        merged[name] = torch.zeros(length, *example.shape[1:], dtype=example.dtype)
        for shard in shards:
            merged[name][shard.index] = shard.columns[name]
    return merged


dist: Any = torch.distributed

RankTarget = str | tuple[str, str]
"""The name of a learner or scorer, or (teacher, column) of a column source."""


class RankPolicy(Protocol):
    """The policy as loaded on a rank, before its models are built."""

    @property
    def packed(self) -> bool: ...

    @property
    def fallback(self) -> str | None: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def adapter_layers(self) -> tuple[str, ...]: ...

    def fingerprint(self) -> str:
        """Return a hash of the weights before training."""
        ...


class RankScorer(Protocol):
    """A network that scores this rank's part of a batch."""

    def share_requests(self) -> Mapping[str, ShareRequest]:
        """Return, for each pass over a batch (``score``, ...), the share that this rank reads."""
        ...

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs: ...


class RankLearner(RankScorer, Protocol):
    """A learner's part on this rank. All ranks make the same calls in the same order."""

    def forward_backward_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs: ...

    def evaluate_loss_local(self, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs: ...

    def step(self) -> Metrics: ...

    def save(self, folder: Path, optimizer: bool = True) -> None: ...

    def stage(self, *, optimizer: bool = True) -> Saveable:
        """Copy the state to CPU memory."""
        ...

    def load(self, folder: Path) -> None: ...


@runtime_checkable
class ProbedLearner(Protocol):
    """A learner that derives the size of its micro-batches from memory."""

    def probe_memory(self, rollouts: int, length: int) -> MemoryProbe: ...

    def set_train_tokens(self, tokens: int) -> dict[str, ShareRequest]: ...


class RankWeights(Protocol):
    """The policy's weights for publishing: known on every rank, and gathered by all ranks one after another."""

    @property
    def device(self) -> torch.device: ...

    def iter_weights(self) -> Iterator[Weight]:
        """Yield the weights under Hugging Face names, in the order of an ordinary model."""
        ...

    def adapter_source(self) -> AdapterSource:
        """Return the adapters of a LoRA run, for engines that load them over the base weights."""
        ...


class RankColumns(Protocol):
    """Columns for this rank's part of a batch."""

    def share_requests(self) -> Mapping[str, ShareRequest]: ...

    def columns_local(self, batch: Batch | BatchShare) -> Sequence[tuple[Tensor, Mapping[str, Tensor]]]: ...


@dataclass(frozen=True, kw_only=True)
class RankModels:
    """The sharded models of a rank."""

    weights: RankWeights  # of the policy
    learners: Mapping[str, RankLearner]
    scorers: Mapping[str, RankScorer]  # besides the learners
    columns: Mapping[tuple[str, str], RankColumns] = field(default_factory=dict)  # by (teacher, column)
    offload: ModelOffload = field(default_factory=lambda: ModelOffload(()))  # all of them


@dataclass(frozen=True, kw_only=True)
class PolicyInfo:
    """What the driver needs to know about the policy, which only the ranks hold."""

    packed: bool  # whether it supports packed rows
    fallback: str | None  # why it reads padded rows
    on_cpu: bool
    stop_ids: tuple[int, ...]
    fingerprint: str  # of the weights before training
    vocab_size: int  # size of the output layer; 0 for a network without one
    adapter_layers: tuple[str, ...] = ()  # names of the layers with LoRA adapters, if the ranks use PEFT


class LearnerWorker:
    """The actor of one rank. Calls run one after another on one thread; only ``close_export`` and ``write_staged`` may run concurrently."""

    models: RankModels

    def __init__(self, device: str, rank: int, world: int) -> None:
        """``device``: cpu, cuda, or auto for a GPU if there is one."""
        self.device = "cuda" if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else "cpu"
        self.rank = rank
        self.world = world
        self.busy_seconds = 0.0
        self._store: Any = None
        self._export: BlockingExporter | None = None
        self._staged: dict[str, Saveable] = {}

    # --- process group ----------------------------------------------------------------------------------------------------

    def open_store(self, host: str) -> int:
        """Open the store of the process group on rank 0. Return its port."""
        self._store = serve_store(host, self.world, 300)
        return int(self._store.port)

    def init_process_group(self, host: str, port: int, timeout: float) -> None:
        """Initialize the process group. ``timeout``: seconds after which a collective fails if a rank does not take part."""
        limit = datetime.timedelta(seconds=timeout)
        store = self._store or dist.TCPStore(host, port, self.world, False, timeout=limit)
        # Gloo alongside NCCL: collectives of CPU tensors, such as pickled objects, then work on any device.
        backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        if self.device != "cpu":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)

    # --- models -----------------------------------------------------------------------------------------------------------

    def load_policy(self, load: Callable[[], RankPolicy]) -> PolicyInfo:
        """Load the policy, not yet sharded. Raises what ``load`` raises."""
        self.policy = policy = load()
        return PolicyInfo(
            packed=policy.packed,
            fallback=policy.fallback,
            on_cpu=self.device == "cpu",
            stop_ids=policy.stop_ids,
            fingerprint=policy.fingerprint() if self.rank == 0 else "",
            vocab_size=policy.vocab_size,
            adapter_layers=policy.adapter_layers,
        )

    def build_models(self, build: Callable[[RankPolicy, str, int], RankModels]) -> list[str]:
        """Shard the policy over the ranks and build the other models: ``build(policy, device, world)``. Return the learners' names."""
        self.models = build(self.policy, self.device, self.world)
        return list(self.models.learners)

    def share_requests(self) -> dict[RankTarget, dict[str, ShareRequest]]:
        """Return the share of a batch that this rank reads in each pass of each of its models: by model name, then by method."""
        models = self.models
        requests: dict[RankTarget, dict[str, ShareRequest]] = {}
        for name, scorer in (*models.scorers.items(), *models.learners.items()):
            requests[name] = dict(scorer.share_requests())
        for column, source in models.columns.items():
            requests[column] = dict(source.share_requests())
        return requests

    def call_with_policy(self, function: Callable[[RankPolicy], Any]) -> None:
        """Call a function of the driver with the policy, such as one that writes its tokenizer and configuration."""
        function(self.policy)

    # --- training ---------------------------------------------------------------------------------------------------------

    def score(self, name: str, batch: Batch | BatchShare) -> MicroBatchOutputs:
        scorer: RankScorer = self.models.learners[name] if name in self.models.learners else self.models.scorers[name]
        with self._count_busy_seconds():
            return scorer.score_local(batch)

    def forward_backward(self, name: str, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        with self._count_busy_seconds():
            return self.models.learners[name].forward_backward_local(batch, loss)

    def evaluate_loss(self, name: str, batch: Batch | BatchShare, loss: LossFn) -> MicroBatchOutputs:
        with self._count_busy_seconds():
            return self.models.learners[name].evaluate_loss_local(batch, loss)

    def step(self, name: str) -> Metrics:
        with self._count_busy_seconds():
            return self.models.learners[name].step()

    def probe_memory(self, name: str, rollouts: int, length: int) -> MemoryProbe:
        """Measure a pass of a learner. A machine's CPU memory is divided among all ranks, which may all be on it."""
        probe = self._find_probed(name).probe_memory(rollouts, length)
        return replace(probe, free_bytes=probe.free_bytes // self.world) if probe.device == "cpu" else probe

    def set_train_tokens(self, name: str, tokens: int) -> dict[str, ShareRequest]:
        """Set the token budget of a learner. Return the shares that this rank reads from now on."""
        return self._find_probed(name).set_train_tokens(tokens)

    def _find_probed(self, name: str) -> ProbedLearner:
        learner = self.models.learners[name]
        assert isinstance(learner, ProbedLearner), f"{type(learner).__name__} measures no memory"
        return learner

    @contextmanager
    def _count_busy_seconds(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - started

    def get_busy_seconds(self) -> float:
        """Return the seconds that this rank has spent in scoring and training since its start."""
        return self.busy_seconds

    def columns(self, name: tuple[str, str], batch: Batch | BatchShare) -> list[ColumnShard]:
        """Compute columns for this rank's micro-batches, as the teacher's own parallelism cuts them."""
        with self._count_busy_seconds():
            return [ColumnShard(index, columns) for index, columns in self.models.columns[name].columns_local(batch)]

    # --- device memory ----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move the models of this rank to CPU memory."""
        self.models.offload.offload()

    def onload(self) -> None:
        self.models.offload.onload()

    # --- weights ----------------------------------------------------------------------------------------------------------

    def open_export(self, make: Callable[[RankWeights, int], BlockingExporter]) -> None:
        """Make the exporter of the policy's weights: ``make(weights, rank)``."""
        self._export = make(self.models.weights, self.rank)

    def _require_export(self) -> BlockingExporter:
        assert self._export is not None
        return self._export

    def prepare_export(self, content: TransferContent) -> TransferPlan:
        return self._require_export().prepare(content)

    def open_sender(self, receivers: int) -> ChannelAddress:
        return self._require_export().open(receivers)

    def send(self, read_back: bool) -> Fingerprints | TransportError:
        """Send the prepared weights. A TransportError is returned, not raised, because a lost receiver must not end the ranks."""
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
        self.models.learners[name].save(folder, optimizer)

    def stage(self, name: str, optimizer: bool) -> None:
        """Copy the state of a learner to CPU memory, for ``write_staged``."""
        self._staged[name] = self.models.learners[name].stage(optimizer=optimizer)

    def write_staged(self, name: str, folder: Path, optimizer: bool) -> None:
        """Write the staged state to ``folder``. May run concurrently with training."""
        self._staged.pop(name).save(folder, optimizer=optimizer)

    def load(self, name: str, folder: Path) -> None:
        self.models.learners[name].load(folder)
