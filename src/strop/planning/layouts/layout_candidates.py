"""The layouts that a plan considers: those that the devices and the model's heads, experts and layers can be divided by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from strop.planning.layouts.layout_choice import ChoiceSpace, DeviceSplit, EngineChoice, LearnerChoice
from strop.planning.model_size import ModelSize
from strop.planning.plan_inputs import PlanInputs

MOST_STAGES, MOST_TORCH_STAGES, MOST_CONTEXT, MOST_EXPERT, MOST_ENGINE = 32, 4, 16, 64, 64
NODES_OF_A_COPY = (1, 4, 16)  # of FSDP's shards, with several copies
LEAST_CONTEXT_TOKENS = 4096  # of a rollout that a context-parallel rank should have
MOST_TOKENS = 1 << 17  # of a micro-batch
SHARES_OF_NODES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # that generate
MEMORY_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
MOST_SHARED = 0.8  # of a device's memory for an engine beside a learner that waits


def list_splits(inputs: PlanInputs, space: ChoiceSpace) -> list[DeviceSplit]:
    """Return the ways to divide the devices. Synchronous steps take turns on all of them; steps ahead need devices of their own."""
    given = space.given.split
    if space.given.engine is None or not space.ranks or (inputs.work.steps_ahead == 0 and given.shared):
        return [given]
    if inputs.work.steps_ahead == 0:
        return [given, DeviceSplit(shared=True)]
    if space.nodes > 1:
        counts = sorted({round(share * space.nodes) for share in SHARES_OF_NODES} - {0, space.nodes})
        others = [DeviceSplit(shared=False, nodes=count) for count in counts]
    else:
        others = [DeviceSplit(shared=False, per_node=count) for count in range(1, space.per_node)]
    return [given, *(split for split in others if split != given)]


def list_sizes(inputs: PlanInputs, space: ChoiceSpace, devices: int) -> Iterator[LearnerChoice]:
    """Yield parallel sizes of a learner on ``devices`` devices, with the memory settings of the configuration."""
    given, model = space.given.learner, inputs.model
    if not space.ranks:
        yield given
        return
    found = {(given.sizes, given.sequence): given} if _divides(given, devices) else {}
    for tensor in _powers(space.per_node):
        if not _divides_heads(model, tensor, megatron=space.megatron):
            continue
        for context in _powers(min(MOST_CONTEXT, max(1, inputs.learner.longest // LEAST_CONTEXT_TOKENS))):
            for stages in _powers(min(MOST_STAGES if space.megatron else MOST_TORCH_STAGES, model.num_layers // 2)):
                if devices % (tensor * context * stages):
                    continue
                choice = replace(
                    given, tensor=tensor, context=context, stages=stages, expert=1, expert_tensor=1, replicate=1,
                    sequence=tensor > 1,
                )  # fmt: skip
                for sizes in _divide_further(choice, model, space, devices):
                    found.setdefault((sizes.sizes, sizes.sequence), sizes)
    yield from found.values()


def _divide_further(choice: LearnerChoice, model: ModelSize, space: ChoiceSpace, devices: int) -> Iterator[LearnerChoice]:
    """Yield the sizes with each number of expert ranks, and of copies of the torch learner's shards."""
    stage = devices // choice.stages
    for expert in _list_expert_sizes(choice.tensor, model, stage, megatron=space.megatron):
        yield replace(choice, expert=expert)
        if space.megatron or space.nodes == 1 or choice.stages > 1:
            continue
        for nodes in NODES_OF_A_COPY:
            ranks = nodes * space.per_node
            whole = ranks % max(expert, choice.tensor) == 0 and ranks % (choice.tensor * choice.context) == 0
            if whole and ranks < stage and stage % ranks == 0:
                yield replace(choice, expert=expert, replicate=stage // ranks)


def _list_expert_sizes(tensor: int, model: ModelSize, stage: int, *, megatron: bool) -> list[int]:
    if not model.experts:
        return [1]
    sizes = [size for size in _powers(min(MOST_EXPERT, stage)) if model.experts % size == 0 and stage % size == 0]
    if megatron:
        return [size for size in sizes if size > 1 or tensor == 1]  # experts that all tensor ranks have whole are not added up
    return [size for size in sizes if size == 1 or size % tensor == 0]


def _divides(choice: LearnerChoice, devices: int) -> bool:
    one = choice.tensor * choice.context * choice.stages * choice.replicate
    return devices % one == 0 and (devices // choice.stages) % (choice.expert * choice.expert_tensor) == 0


def _divides_heads(model: ModelSize, ranks: int, *, megatron: bool) -> bool:
    pairs = model.key_value_heads or model.heads
    return model.heads % ranks == 0 and (pairs % ranks == 0 or (megatron and ranks % pairs == 0))


def list_memory_settings(choice: LearnerChoice, inputs: PlanInputs, space: ChoiceSpace) -> list[LearnerChoice]:
    """Return a layout with each way to save memory, the fastest first."""
    plain = replace(choice, checkpointed=0.0, offloads_weights=False, offloads_activations=False, offloads_reference=False)
    found = [plain, choice, replace(plain, checkpointed=1.0)]
    if not space.megatron and not inputs.device.measured:
        found[2:2] = [replace(plain, checkpointed=0.5), replace(plain, offloads_activations=True)]
        if space.ranks:
            found += [replace(plain, checkpointed=1.0, offloads_weights=True)]
    if space.references:
        found += [replace(each, offloads_reference=True) for each in found]
    return list(dict.fromkeys(found))


def list_budgets(choice: LearnerChoice, inputs: PlanInputs, space: ChoiceSpace, devices: int) -> list[int]:
    """Return token budgets of a micro-batch, ascending: of at most what a replica trains on in an optimizer step."""
    work, longest = inputs.work, inputs.learner.longest
    if space.budget_is_measured and choice.stages == 1:
        return [choice.tokens]
    replicas = max(1, devices // (choice.tensor * choice.context * choice.stages)) if space.ranks else 1
    most = ceil(work.rollouts / work.optimizer_steps / replicas) * longest
    doubled = [longest * size for size in _powers(max(1, min(most, MOST_TOKENS) // longest))]
    return sorted({choice.tokens, *doubled})


def list_engines(inputs: PlanInputs, space: ChoiceSpace, split: DeviceSplit) -> list[EngineChoice | None]:
    """Return sizes of an engine and shares of memory."""
    given, engine = space.given.engine, inputs.engine
    if given is None or engine is None:
        return [None]
    shares = [given.memory_share, *(share for share in MEMORY_SHARES if not split.shared or share <= MOST_SHARED)]
    if not space.ranks or given.memory_share is None:
        return [given]
    sizes = [given.size, *(size for size in _powers(MOST_ENGINE) if _engine_fits(inputs, space, split, size))]
    return [EngineChoice(size=size, memory_share=share) for size in dict.fromkeys(sizes) for share in dict.fromkeys(shares)]


def _engine_fits(inputs: PlanInputs, space: ChoiceSpace, split: DeviceSplit, size: int) -> bool:
    """Whether an engine can have ``size`` devices: its heads divide, and it is on one node or on whole ones."""
    generating = space.count_generating(split, size)
    per_node = space.per_node if split.shared or split.nodes is not None else split.per_node or 0
    return generating > 0 and _divides_heads(inputs.model, size, megatron=True) and (size <= per_node or space.spans_nodes)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
