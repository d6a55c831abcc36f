"""What a plan says: memory by phase and device, seconds by phase, cost, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.hardware.devices import Device
from strop.planning.node_memory import NodeMemory
from strop.planning.step_time import StepTime

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
class RunCost:
    """The whole run."""

    steps: int | None  # None: the configuration does not say
    hours: float | None
    device_hours: float | None
    price: float | None  # of the run, in the currency of the price of a device hour


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A layout that the plan would choose, beside the configuration's."""

    overrides: Sequence[str]  # key=value, to paste after the command
    plan: RunPlan


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before it starts."""

    model: str
    device: Device
    training_devices: int
    generation_devices: int
    layout: str
    phases: Sequence[PhaseMemory]
    time: StepTime
    cost: RunCost
    advice: Sequence[Advice]
    breaks_first: str  # what would not fit any more if the run grew
    assumptions: Sequence[str]
    choices: Sequence[PlanChoice] = ()  # the best first
    node: NodeMemory | None = None  # CPU memory of the fullest node; None on a CPU, where it is a device's
    checkpoint_bytes: float = 0.0  # of one on the disk
    checkpoints: int | None = None  # that are on the disk at most; None: all are kept
    verdict: str = ""  # on the configuration beside them; empty: nothing was searched

    @property
    def learner_peak(self) -> float:
        """The most bytes of a device while the learner computes."""
        return max(phase.peak for phase in self.phases if phase.phase == "logprobs" or phase.phase.endswith("training"))

    @property
    def engine_peak(self) -> float | None:
        """The most bytes of a device that generates; None for a run that samples nothing."""
        return next((phase.peak for phase in self.phases if phase.phase == "generation"), None)

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
            "seconds": {**self.seconds, "step": self.time.total},
            "cost": {
                "steps": self.cost.steps,
                "hours": self.cost.hours,
                "device_hours": self.cost.device_hours,
                "price": self.cost.price,
            },
            "advice": [{"key": each.key, "value": each.value, "reason": each.reason} for each in self.advice],
            "breaks_first": self.breaks_first,
            "assumptions": list(self.assumptions),
            "choices": [_describe_choice(choice) for choice in self.choices],
            "verdict": self.verdict,
        }

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by phase; in an asynchronous run generation is beside training."""
        time = self.time
        return {
            "generation": time.generation,
            "logprobs": time.logprobs,
            "training": time.training,
            "weight_sync": time.exposed_sync * time.weight_sync,
            "other": time.other,
        }


def _describe_node(node: NodeMemory) -> dict[str, object]:
    return {
        "parts_bytes": {name: round(size) for name, size in node.parts.items()},
        "peak_bytes": round(node.peak),
        "limit_bytes": None if node.limit is None else round(node.limit),
        "fits": node.fits,
        "loading": node.loading,
    }


def _describe_choice(choice: PlanChoice) -> dict[str, object]:
    plan = choice.plan
    return {
        "overrides": list(choice.overrides),
        "layout": plan.layout,
        "training_devices": plan.training_devices,
        "generation_devices": plan.generation_devices,
        "seconds": {**plan.seconds, "step": plan.time.total},
        "learner_peak_bytes": round(plan.learner_peak),
        "engine_peak_bytes": None if plan.engine_peak is None else round(plan.engine_peak),
    }
