"""Snapshots of a policy's weights, taken when they are published: its earlier selves. They are in CPU memory and in each checkpoint."""

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
    weights: Mapping[str, Tensor]  # on the CPU, by their names in the module

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, parameter in _trained(model).items():
            parameter.copy_(self.weights[name])


@dataclass(frozen=True)
class SavedSnapshots:
    """Snapshots as they are written to a checkpoint, perhaps in another thread."""

    snapshots: tuple[Snapshot, ...]

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        for snapshot in self.snapshots:
            save_file(dict(snapshot.weights), folder / f"{snapshot.version}.safetensors")


class SnapshotPool:
    """The newest snapshots of a model."""

    def __init__(self, model: nn.Module, *, every: int, size: int) -> None:
        """Keep ``size`` snapshots of ``model``, one of each version that is a multiple of ``every``."""
        self.model, self.every, self.size = model, every, size
        self.snapshots: list[Snapshot] = []  # in ascending order of versions

    def take(self, version: int) -> None:
        """Take a snapshot, if one is due: the model has the weights of ``version``."""
        if self.snapshots and (version % self.every or version <= self.snapshots[-1].version):
            return
        weights = {name: parameter.detach().to("cpu", copy=True) for name, parameter in _trained(self.model).items()}
        self.snapshots = [*self.snapshots, Snapshot(version, weights)][-self.size :]

    def stage(self, *, optimizer: bool = True) -> SavedSnapshots:
        return SavedSnapshots(tuple(self.snapshots))

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.stage().save(folder)

    def load(self, folder: Path) -> None:
        """Read the snapshots of a checkpoint. Where it has none, the first is that of the next publish."""
        versions = sorted(int(path.stem) for path in folder.glob("*.safetensors"))
        if not versions:
            log.warning("the checkpoint has no earlier selves of the policy; they are kept from here on")
        self.snapshots = [Snapshot(version, load_file(folder / f"{version}.safetensors")) for version in versions[-self.size :]]


class SnapshottedWeights:
    """A ``WeightSync`` that takes a snapshot of what it has published, where one is due."""

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
