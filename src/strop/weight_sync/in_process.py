"""Weight sync within one process, where the generator runs the learner's own module, and snapshots of a policy's earlier selves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strop import metrics
from strop.metrics import Metric, Metrics
from strop.weight_sync.base import LearnerMemory, WeightSync


class TimedMemory:
    """A ``LearnerMemory`` that counts the seconds since its last ``metrics``."""

    def __init__(self, memory: LearnerMemory) -> None:
        self.memory = memory
        self._seconds = 0.0

    async def offload(self) -> None:
        with self._timed():
            await self.memory.offload()

    async def onload(self) -> None:
        with self._timed():
            await self.memory.onload()

    def metrics(self) -> Metrics:
        seconds, self._seconds = self._seconds, 0.0
        return {"timing/train/offload": metrics.total(seconds)}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started


class InProcessEngine(Protocol):
    """An engine on the learner's own module. It needs no transfer, and does not run while the learner trains."""

    async def drain(self) -> None:
        """Hold new requests and return when none is running."""
        ...

    def resume(self, version: int) -> None:
        """Serve requests again, with the weights of ``version``."""
        ...


class CountingEngine(Protocol):
    """An engine that counts its work as metrics, each time since the last request."""

    def collect_metrics(self) -> Mapping[str, float]: ...


class InProcessWeights:
    """``WeightSync`` without a transfer. A generator that keeps copies in a faster layout refreshes them when it resumes."""

    def __init__(
        self,
        generators: Sequence[InProcessEngine],
        learner_memory: TimedMemory | None = None,
        counting: CountingEngine | None = None,
    ) -> None:
        """``learner_memory``: the memory that only training needs, offloaded while generators sample; None: it stays on the
        device.

        ``counting``: an engine whose metrics are added to those of a publish."""
        self.generators = generators
        self.learner_memory = learner_memory
        self.counting = counting

    async def yield_device(self) -> None:
        for generator in self.generators:
            await generator.drain()
        if self.learner_memory is not None:
            await self.learner_memory.onload()

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        if self.learner_memory is not None:
            await self.learner_memory.offload()
        for generator in self.generators:
            generator.resume(version)
        timing = {} if self.learner_memory is None else self.learner_memory.metrics()
        return {"weights/publish_seconds": metrics.total(time.perf_counter() - started), **timing, **self._collect_counts()}

    def _collect_counts(self) -> Metrics:
        return {} if self.counting is None else {name: Metric(value) for name, value in self.counting.collect_metrics().items()}


log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The trained weights of one version."""

    version: int
    weights: Mapping[str, Tensor]  # on the CPU, by parameter name

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, parameter in _trained(model).items():
            parameter.copy_(self.weights[name])


@dataclass(frozen=True)
class SavedSnapshots:
    """Snapshots on their way to a checkpoint, perhaps in another thread."""

    snapshots: tuple[Snapshot, ...]

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        for snapshot in self.snapshots:
            save_file(dict(snapshot.weights), folder / f"{snapshot.version}.safetensors")


class SnapshotPool:
    """The newest snapshots of a model."""

    def __init__(self, model: nn.Module, *, every: int, size: int) -> None:
        """Keep the newest ``size`` snapshots of ``model``, taken at versions that are multiples of ``every``."""
        self.model, self.every, self.size = model, every, size
        self.snapshots: list[Snapshot] = []  # in ascending order of versions

    def take(self, version: int) -> None:
        """Take a snapshot if one is due. The model must hold the weights of ``version``."""
        if self.snapshots and (version % self.every or version <= self.snapshots[-1].version):
            return
        weights = {name: parameter.detach().to("cpu", copy=True) for name, parameter in _trained(self.model).items()}
        self.snapshots = [*self.snapshots, Snapshot(version, weights)][-self.size :]

    def stage(self, *, optimizer: bool = True) -> SavedSnapshots:
        return SavedSnapshots(tuple(self.snapshots))

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.stage().save(folder)

    def load(self, folder: Path) -> None:
        """Read the snapshots of a checkpoint. If it has none, the next publish takes the first one."""
        versions = sorted(int(path.stem) for path in folder.glob("*.safetensors"))
        if not versions:
            log.warning("the checkpoint has no earlier selves of the policy; they are kept from here on")
        self.snapshots = [Snapshot(version, load_file(folder / f"{version}.safetensors")) for version in versions[-self.size :]]


class SnapshottedWeights:
    """A ``WeightSync`` that takes a snapshot after each publish where one is due."""

    def __init__(self, weights: WeightSync, pool: SnapshotPool) -> None:
        self.weights, self.pool = weights, pool

    async def yield_device(self) -> None:
        await self.weights.yield_device()

    async def publish(self, version: int) -> Metrics:
        published = await self.weights.publish(version)
        self.pool.take(version)
        return {**published, "weights/snapshots": metrics.total(float(len(self.pool.snapshots)))}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
