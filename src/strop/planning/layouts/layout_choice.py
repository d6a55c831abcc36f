"""What a plan may choose: the devices that generate, the learner's parallel sizes and memory, the size and memory of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter

from strop.planning.learner_memory import LearnerSetup
from strop.planning.plan_inputs import PlanInputs
from strop.planning.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class DeviceSplit:
    """Which devices generate: all (``shared``), whole nodes, or so many of each node."""

    shared: bool = True
    nodes: int | None = None
    per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class LearnerChoice:
    """The learner's parallel sizes, its micro-batches, and what it recomputes or keeps in CPU memory."""

    tensor: int = 1
    context: int = 1
    stages: int = 1
    expert: int = 1
    expert_tensor: int = 1  # Megatron Core alone
    replicate: int = 1  # the torch learner alone
    sequence: bool = False
    tokens: int = 8192
    checkpointed: float = 0.0
    offloads_weights: bool = False
    offloads_activations: bool = False
    offloads_reference: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parallel sizes alone."""
        return (self.tensor, self.context, self.stages, self.expert, self.replicate)

    @property
    def saves_nothing(self) -> bool:
        """Whether it recomputes nothing, and keeps nothing in CPU memory."""
        return not (self.checkpointed or self.offloads_weights or self.offloads_activations or self.offloads_reference)

    def count_changes(self, given: LearnerChoice) -> int:
        """Return how many settings differ."""
        return sum(mine != theirs for mine, theirs in zip(_values(self), _values(given), strict=True))

    def shard(self, devices: int, *, megatron: bool) -> Sharding:
        """Return how this divides the learner over ``devices``."""
        stage = devices // self.stages
        data = stage // (self.tensor * self.context * self.replicate)
        if megatron:
            expert = self.expert * self.expert_tensor
            return Sharding(
                optimizer_shards=data * self.context,
                tensor=self.tensor,
                context=self.context,
                stages=self.stages,
                expert=expert,
                expert_optimizer_shards=max(1, stage // expert),
                sequence=self.sequence,
            )
        expert = max(self.expert, self.tensor)
        return Sharding(
            shards=data * self.context,
            replicate=self.replicate,
            tensor=self.tensor,
            context=self.context,
            stages=self.stages,
            expert=expert,
            expert_shards=data * self.context * self.tensor // expert,
            sequence=self.sequence,
        )


_values = attrgetter(*(each.name for each in fields(LearnerChoice)))


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The devices of an engine, and the share of their memory that it reserves."""

    size: int = 1
    memory_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """A layout of a run."""

    split: DeviceSplit
    learner: LearnerChoice
    engine: EngineChoice | None  # None: nothing of the engine is chosen

    def count_changes(self, given: LayoutChoice) -> int:
        """Return how many settings differ."""
        engine = self.engine is not None and given.engine is not None and self.engine != given.engine
        return (self.split != given.split) + self.learner.count_changes(given.learner) + engine


@dataclass(frozen=True, kw_only=True)
class ChoiceSpace:
    """What can be chosen for a run."""

    nodes: int
    per_node: int
    megatron: bool
    given: LayoutChoice  # what the configuration says
    ranks: bool  # the learner is on ranks of a cluster; False: in one process, whose sizes are all 1
    spans_nodes: bool = False  # an engine may be larger than a node
    references: int = 0  # frozen models beside the policy, wherever they are kept
    budget_is_measured: bool = False  # train_mb_tokens: auto, which the run chooses itself
    critic_alike: bool = False  # a critic beside the policy is divided as the policy is

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def count_training(self, split: DeviceSplit) -> int:
        """Return the devices that train."""
        if split.shared:
            return self.devices
        if split.nodes is not None:
            return (self.nodes - split.nodes) * self.per_node
        return self.nodes * (self.per_node - (split.per_node or 0))

    def count_generating(self, split: DeviceSplit, size: int) -> int:
        """Return the devices of the engines of ``size`` devices that fit."""
        nodes = self.nodes if split.shared or split.nodes is None else split.nodes
        per_node = self.per_node if split.shared or split.nodes is not None else split.per_node or 0
        if size <= per_node:
            return nodes * (per_node // size) * size
        return nodes // (size // per_node) * size if per_node and size % per_node == 0 else 0


def apply_learner(setup: LearnerSetup, choice: LearnerChoice, space: ChoiceSpace, devices: int) -> LearnerSetup:
    """Return the learner of a choice on ``devices`` devices."""
    return replace(
        setup,
        tokens=choice.tokens,
        checkpointed_share=choice.checkpointed,
        offloads_weights=choice.offloads_weights,
        offloads_activations=choice.offloads_activations,
        sharding=choice.shard(devices, megatron=space.megatron) if space.ranks else Sharding(),
    )


def apply_critic(inputs: PlanInputs, choice: LearnerChoice, space: ChoiceSpace, devices: int) -> PlanInputs:
    """Return the inputs of a plan with a critic that has the choice of the policy; where it has not, the inputs as they are."""
    if not space.critic_alike:
        return inputs
    models = (
        replace(each, setup=apply_learner(each.setup, choice, space, devices)) if each.learns else each for each in inputs.beside
    )
    return replace(inputs, beside=tuple(models))


def apply_choice(inputs: PlanInputs, choice: LayoutChoice, space: ChoiceSpace) -> PlanInputs:
    """Return the inputs of a plan of a run with another layout."""
    kept = 0 if choice.learner.offloads_reference else space.references
    devices = space.count_training(choice.split)
    changed = replace(
        apply_critic(inputs, choice.learner, space, devices),
        learner=apply_learner(inputs.learner, choice.learner, space, devices),
        references=kept,
        work=replace(inputs.work, moved_bytes=(space.references - kept) * inputs.reference_bytes),
    )
    return apply_engine(changed, choice.split, choice.engine, space)


def apply_engine(inputs: PlanInputs, split: DeviceSplit, choice: EngineChoice | None, space: ChoiceSpace) -> PlanInputs:
    """Return the inputs of a plan with the engines, and the devices that train and generate, of a choice."""
    layout, engine = replace(inputs.layout, training_devices=space.count_training(split), shared=split.shared), inputs.engine
    if engine is not None and choice is not None:
        engine = replace(engine, size=choice.size, memory_share=choice.memory_share)
        layout = replace(layout, engine_size=choice.size, generation_devices=space.count_generating(split, choice.size))
    return replace(inputs, engine=engine, layout=layout)
