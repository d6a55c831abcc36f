"""The memory of an inference engine on one of its devices: weights and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LearnerFootprint, LearnerSetup, ModelSize

WORKSPACE = 1.5 * 2**30  # of CUDA graphs, activations and buffers of an engine on a GPU


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What the memory of an engine depends on, besides the model."""

    name: str  # torch, vllm, sglang
    size: int = 1  # devices of an engine
    on_cpu: bool = False
    weight_bytes: float = 2.0  # of a number
    cache_bytes: float = 2.0
    shares_weights: bool = False  # it runs the learner's own module
    memory_share: float | None = None  # of a device that it reserves; None: it takes ``cache_limit``
    cache_limit: float = 2.0 * 2**30  # bytes for the cache
    most_sequences: int = 256  # decoded together
    longest: int = 2048  # tokens of a conversation
    size_key: str = "policy.generation.vllm_cfg.tensor_parallel_size"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one of its devices of ``limit`` bytes."""

    model: ModelSize
    setup: EngineSetup
    limit: float

    @property
    def weights(self) -> float:
        """Bytes of its own weights; of the embedded engine on a CPU the copy in the layout of the products."""
        copied = self.model.layer_weights if self.setup.shares_weights else self.model.weights
        if self.setup.shares_weights and not self.setup.on_cpu:
            return 0.0
        return self.setup.weight_bytes * copied / self.setup.size

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache for a token, on one device."""
        return self.setup.cache_bytes * self.model.cache_width / self.setup.size

    @property
    def cache(self) -> float:
        """Bytes that the cache may take."""
        if self.setup.memory_share is None:
            needed = self.bytes_per_token * self.setup.longest * self.setup.most_sequences
            return min(self.setup.cache_limit, needed)
        return max(0.0, self.setup.memory_share * self.limit - self.weights - self.workspace)

    @property
    def workspace(self) -> float:
        return 0.0 if self.setup.on_cpu else WORKSPACE

    @property
    def sequences(self) -> float:
        """Sequences of the greatest length that the cache holds at a time."""
        return self.cache / (self.bytes_per_token * self.setup.longest)

    @property
    def parts(self) -> dict[str, float]:
        found = {"engine weights": self.weights, "cache": self.cache, "engine workspace": self.workspace}
        return {name: size for name, size in found.items() if size}


@dataclass(frozen=True, kw_only=True)
class BesideModel:
    """A model on the learner's devices, or of ``hosts`` processes with their own devices."""

    name: str  # critic, teacher, teachers.NAME
    model: ModelSize
    setup: LearnerSetup
    learns: bool = False
    offloaded: bool = False  # it is in CPU memory between uses
    shares_weights: bool = False  # with the policy
    hosts: int = 0  # processes that each have the whole model; 0: the learner's ranks share it

    @cached_property
    def footprint(self) -> LearnerFootprint:
        return LearnerFootprint(self.model, self.setup)

    @property
    def weights(self) -> float:
        """Bytes of its weights on a rank, with what its optimizer keeps if it learns."""
        if self.shares_weights:
            return 0.0
        if self.learns:
            return self.footprint.weights + self.footprint.optimizer
        return self.setup.weight_bytes * self.footprint.rank_weights

    @property
    def held(self) -> float:
        """Bytes that stay on a learner's device between its uses."""
        return 0.0 if self.offloaded or self.hosts or self.setup.offloads_weights else self.weights

    @property
    def kept_away(self) -> float:
        """Bytes in a node's CPU memory between its uses, for a rank."""
        return self.weights if (self.offloaded or self.setup.offloads_weights) and not self.hosts else 0.0

    @property
    def scoring(self) -> float:
        """Bytes of a pass without gradients, besides what is held."""
        arrives = self.weights if self.offloaded and not self.hosts else 0.0
        frozen = (
            not self.learns and self.setup.weight_bytes == self.setup.compute_bytes
        )  # its weights are multiplied with as they are
        copies = self.footprint.weight_copies if frozen else 0.0
        return arrives + self.footprint.scoring_peak - self.footprint.static - copies

    @property
    def training(self) -> Mapping[str, float]:
        """Bytes of its training, besides weights and optimizer. A critic has one number for a token, and no output layer."""
        found = self.footprint
        return {
            f"gradients of the {self.name}": found.gradients,
            f"activations of the {self.name}": found.activations + found.layer_backward,
            f"weight copies of the {self.name}": found.weight_copies + found.gathered,
        }


def without_output(model: ModelSize) -> ModelSize:
    """Return a model whose output is a number: it has no separate output layer."""
    return replace(model, dimensions=replace(model.dimensions, tied=True))


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
