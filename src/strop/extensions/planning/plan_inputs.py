"""What a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass

from strop.extensions.planning.beside_models import BesideModel
from strop.extensions.planning.engine_memory import EngineSetup
from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LearnerSetup
from strop.extensions.planning.model_size import ModelSize


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """A device that the run is planned for."""

    name: str
    memory_gib: float  # GiB that the driver reports, or that this machine or its container has
    on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """What the CPU memory of the fullest node depends on, besides the models."""

    ranks: int = 1  # of the learner
    engine_devices: int = 0  # that generate there
    stages_checkpoints: bool = False  # a copy is written while training goes on
    saves_optimizer: bool = True
    keeps_published: bool = False  # the weights that were sent last, for engines that start again
    engines_keep_weights: bool = False  # there, while the learner has their devices
    references: int = 0  # frozen models of the policy's size that are there between uses
    loaded_references: int = 0  # frozen models that are copied as the policy is loaded
    loads_whole: bool = True  # the first rank reads whole models
    memory_gib: float | None = None  # None: unknown


@dataclass(frozen=True, kw_only=True)
class CheckpointSetup:
    """What checkpoints are on the disk at most."""

    count: int | None  # with the one that is being written; None: all of a run without a last step
    saves_optimizer: bool = True


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """A run on devices of one kind."""

    model: ModelSize
    device: PlannedDevice
    learner: LearnerSetup
    engine: EngineSetup | None  # None: the run samples nothing
    rollouts: int  # that a step trains on
    training_devices: int
    generation_devices: int
    shared: bool  # the same devices train and generate in turn
    layout_text: str
    leaves: bool = True  # the learner goes to CPU memory while engines that share its devices have them
    references: int  # frozen models of the policy's size alongside it
    beside: tuple[BesideModel, ...] = ()  # a critic, teachers
    node: NodeSetup | None = None  # the fullest; None: its CPU memory is not planned
    checkpoints: CheckpointSetup | None = None  # None: none are saved
    learner_key: str  # prefix of the learner's keys
    batch_key: str
    assumptions: tuple[str, ...]

    @property
    def reference_bytes(self) -> int:
        """Bytes of a weight of a frozen model."""
        return self.learner.compute_bytes if self.learner.weight_bytes == BFLOAT16 else FLOAT32
