"""What a plan says: memory by phase and device, seconds by phase, cost, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.extensions.planning.node_memory import NodeMemory
from strop.extensions.planning.plan_inputs import PlannedDevice

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The most memory that a device holds in a phase, by what holds it (bytes)."""

    phase: str  # generation, logprobs, training, weight sync, checkpoint
    devices: str  # which: "learner", "engines", or "all" where both take turns
    parts: Mapping[str, float]
    limit: float  # bytes of a device

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A setting that the plan would choose, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before it starts."""

    model: str
    device: PlannedDevice
    training_devices: int
    generation_devices: int
    layout: str
    phases: Sequence[PhaseMemory]
    advice: Sequence[Advice]
    breaks_first: str  # what would not fit any more if the run grew
    assumptions: Sequence[str]
    node: NodeMemory | None = None  # CPU memory of the fullest node; None on a CPU, where it is a device's
    checkpoint_bytes: float = 0.0  # of one on the disk
    checkpoints: int | None = None  # that are on the disk at most; None: all are kept

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases) and (self.node is None or self.node.fits)

    def to_dict(self) -> dict[str, object]:
        """Return the plan for JSON."""
        return {
            "model": self.model,
            "device": self.device.name,
            "training_devices": self.training_devices,
            "generation_devices": self.generation_devices,
            "layout": self.layout,
            "fits": self.fits,
            "memory": [
                {
                    "phase": phase.phase,
                    "devices": phase.devices,
                    "parts_bytes": {name: round(size) for name, size in phase.parts.items()},
                    "peak_bytes": round(phase.peak),
                    "limit_bytes": round(phase.limit),
                    "fits": phase.fits,
                }
                for phase in self.phases
            ],
            "node_memory": None if self.node is None else _describe_node(self.node),
            "disk": {"checkpoint_bytes": round(self.checkpoint_bytes), "checkpoints": self.checkpoints},
            "advice": [{"key": each.key, "value": each.value, "reason": each.reason} for each in self.advice],
            "breaks_first": self.breaks_first,
            "assumptions": list(self.assumptions),
        }


def _describe_node(node: NodeMemory) -> dict[str, object]:
    return {
        "parts_bytes": {name: round(size) for name, size in node.parts.items()},
        "peak_bytes": round(node.peak),
        "limit_bytes": None if node.limit is None else round(node.limit),
        "fits": node.fits,
        "loading": node.loading,
    }
