"""Snapshots of a policy's weights, its earlier selves, taken at publishes. Kept in CPU memory and in each checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strop import metrics
from strop.metrics import Metrics
from strop.weight_sync.base import WeightSync

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
