"""What a run keeps in the CPU memory of a node: models that left their GPUs, copies for checkpoints, weights on their way in.

Counted are tensors. Libraries of each process, rollouts and data are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strop.extensions.planning.engine_memory import EngineMemory
from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LearnerFootprint
from strop.extensions.planning.plan_inputs import NodeSetup, PlanInputs

GIB = 2.0**30
STAYS_WITHOUT = "what leaves for the engines"  # a part that policy.offload=false leaves on the devices


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """The most that a node holds in CPU memory, by what holds it (bytes)."""

    parts: Mapping[str, float]
    limit: float | None  # bytes; None: not known
    loading: bool = False  # that is when the run starts, before anything has left a device

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak <= self.limit


def plan_node(inputs: PlanInputs, limit: float) -> NodeMemory | None:
    """Return the CPU memory of the fullest node; None on a CPU, where it is a device's. ``limit``: bytes of a device."""
    node = inputs.node
    if node is None or inputs.device.on_cpu:
        return None
    learner = LearnerFootprint(inputs.model, inputs.learner)
    each = {**_of_rank(inputs, learner, limit), **_of_checkpoint(node, learner)}
    parts = {name: node.ranks * size for name, size in each.items()}
    parts |= {each.name: node.ranks * each.kept_away for each in inputs.beside}
    if node.keeps_published:
        parts["published weights"] = float(BFLOAT16 * inputs.model.weights)
    if node.engines_keep_weights and inputs.engine is not None:
        parts["engine weights"] = node.engine_devices * EngineMemory(inputs.model, inputs.engine, limit).weights
    running = {name: size for name, size in parts.items() if size > 0}
    loading = _of_loading(inputs, node)
    starts = sum(loading.values()) > sum(running.values())
    most = None if node.memory_gib is None else node.memory_gib * GIB
    return NodeMemory(parts=loading if starts else running, limit=most, loading=starts)


def _of_rank(inputs: PlanInputs, learner: LearnerFootprint, limit: float) -> dict[str, float]:
    """Return what a rank of the learner keeps there. Buffers of what leaves for the engines stay between its absences."""
    setup, node = inputs.learner, inputs.node
    assert node is not None
    reference = inputs.reference_bytes * learner.rank_weights
    found = {"reference": node.references * reference}
    if setup.offloads_weights:
        found["weights, gradients and optimizer"] = (
            learner.weights + learner.optimizer + setup.gradient_bytes * setup.trained_share * learner.rank_weights
        )
    if setup.offloads_activations:
        found["activations"] = learner.kept_activations
    own_weights = inputs.engine is not None and not inputs.engine.shares_weights
    if own_weights and inputs.leaves and inputs.shared:
        away = learner.static + inputs.references * reference + sum(each.held for each in inputs.beside)
        found[STAYS_WITHOUT] = away
    return found


def _of_checkpoint(node: NodeSetup, learner: LearnerFootprint) -> dict[str, float]:
    optimizer = learner.optimizer if node.saves_optimizer else 0.0
    return {"checkpoint": learner.weights + optimizer} if node.stages_checkpoints else {}


def _of_loading(inputs: PlanInputs, node: NodeSetup) -> dict[str, float]:
    """Return what the first rank reads before it is divided: policy, reference and critic together, or the largest teacher after them.

    Models are read in float32."""
    if not node.loads_whole:
        return {}
    together = {"policy, as it is loaded": float(FLOAT32 * inputs.model.weights)}
    together["reference, as it is copied"] = float(node.loaded_references * inputs.reference_bytes * inputs.model.weights)
    teachers: dict[str, float] = {}
    for each in inputs.beside:
        if not each.shares_weights and not each.hosts:
            into = together if each.learns else teachers
            into[f"{each.name}, as it is loaded"] = float(FLOAT32 * each.model.weights)
    largest = max(teachers, key=lambda name: teachers[name], default="")
    found = {largest: teachers[largest]} if largest and teachers[largest] > sum(together.values()) else together
    return {name: size for name, size in found.items() if size > 0}
