"""What a run keeps in the CPU memory of a node: models that left their GPUs, copies for checkpoints, weights on their way in.

Counted are tensors. Libraries of each process, rollouts and data are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from strop.extensions.planning.learner_memory import BFLOAT16, FLOAT32, LearnerFootprint, LearnerSetup, Sharding
from strop.extensions.planning.plan_inputs import EngineMemory, NodeSetup, PlanInputs, PlannedDevice

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


USABLE = 0.92  # of a device: the rest is the context of its driver, fragments and libraries
TRANSFER_BUFFER = 1.0 * 2**30  # bytes of weights on their way
LEAST_SEQUENCES = 8  # of the greatest length that an engine should hold


def make_plan(inputs: PlanInputs) -> RunPlan:
    """Return the plan of a run."""
    phases = tuple(plan_memory(inputs))
    node = plan_node(inputs, limit_of(inputs))
    return RunPlan(
        model=inputs.model.name,
        device=inputs.device,
        training_devices=inputs.training_devices,
        generation_devices=inputs.generation_devices,
        layout=inputs.layout_text,
        phases=phases,
        node=node,
        checkpoint_bytes=measure_checkpoint(inputs),
        checkpoints=None if inputs.checkpoints is None else inputs.checkpoints.count,
        advice=(*_advise_node(inputs, node), *_advise(inputs)),
        breaks_first=find_weakest(inputs, phases, node),
        assumptions=inputs.assumptions,
    )


def measure_checkpoint(inputs: PlanInputs) -> float:
    """Return the bytes of a checkpoint: the trained weights of policy and critic, and with their optimizers what these keep."""
    if inputs.checkpoints is None:
        return 0.0
    learning = [(inputs.model, inputs.learner), *((each.model, each.setup) for each in inputs.beside if each.learns)]
    total = 0.0
    for model, setup in learning:
        whole = LearnerFootprint(model, replace(setup, sharding=Sharding()))
        masters = whole.weights - setup.weight_bytes * whole.rank_weights
        total += setup.trained_share * setup.weight_bytes * model.weights
        total += masters + whole.optimizer if inputs.checkpoints.saves_optimizer else 0.0
    return total


def plan_memory(inputs: PlanInputs) -> Iterator[PhaseMemory]:
    """Yield the memory of each phase. Learner and engines that take turns on a device leave it to each other (weights and optimizer of the
    learner go to CPU memory); in one process on a CPU nothing leaves."""
    learner = LearnerFootprint(inputs.model, inputs.learner)
    beside = count_beside(inputs, learner, inputs.references)
    static = {} if inputs.learner.offloads_weights else {"weights": learner.weights, "optimizer": learner.optimizer}
    held = {**static, **beside}
    engine = None if inputs.engine is None else EngineMemory(inputs.model, inputs.engine, limit_of(inputs))
    shared, own_weights = inputs.shared, engine is not None and not engine.setup.shares_weights
    together = shared and (inputs.device.on_cpu or not own_weights or not inputs.leaves)  # neither leaves the device to the other
    stays = engine.parts if engine is not None and together else {}
    devices = "all" if shared else "learner"
    if engine is not None:
        yield _phase(inputs, "generation", "all" if shared else "engines", {**(held if together else {}), **engine.parts})
    largest = max([learner.scoring_peak - learner.static, *(each.scoring for each in inputs.beside if not each.hosts)])
    yield _phase(inputs, "logprobs", devices, {**held, **stays, "pass": largest})
    for each in inputs.beside:
        if each.hosts:
            yield _phase(inputs, each.name, "hosts", {"weights": each.weights, "pass": each.scoring})
    activations = {"gradients": learner.gradients, "activations": learner.activations, "weight copies": learner.weight_copies}
    activations["gathered weights"] = learner.gathered
    activations["output layer"] = learner.training_peak - learner.static - sum(activations.values())
    yield _phase(inputs, "training", devices, {**held, **stays, **activations})
    for each in inputs.beside:
        if each.learns:  # after the policy, whose gradients are gone by then
            yield _phase(inputs, f"{each.name} training", devices, {**held, **stays, **each.training})
    if engine is not None and own_weights:
        stays_here = held if together or not shared else {}  # weights are sent from CPU memory where the learner has left
        sent = {**stays_here, **(engine.parts if shared else {}), "weights on their way": TRANSFER_BUFFER}
        yield _phase(inputs, "weight sync", devices, sent)


def _phase(inputs: PlanInputs, name: str, devices: str, parts: Mapping[str, float]) -> PhaseMemory:
    return PhaseMemory(
        phase=name, devices=devices, parts={key: size for key, size in parts.items() if size > 0}, limit=limit_of(inputs)
    )


def count_beside(inputs: PlanInputs, learner: LearnerFootprint, references: int) -> dict[str, float]:
    """Return the models alongside the policy on a learner's device."""
    found = {"reference": references * inputs.reference_bytes * learner.rank_weights}
    found |= {each.name: each.held for each in inputs.beside}
    return {name: size for name, size in found.items() if size}


def limit_of(inputs: PlanInputs) -> float:
    """Return the bytes of a device that a run can use."""
    return USABLE * inputs.device.memory_gib * GIB


def _advise(inputs: PlanInputs) -> Iterator[Advice]:
    """Yield settings under which the run fits, the cheapest first: the micro-batch, checkpointing, shards, the size of an engine."""
    yield from _advise_learner(inputs)
    if inputs.engine is None or inputs.device.on_cpu:
        return
    engine = EngineMemory(inputs.model, inputs.engine, limit_of(inputs))
    if engine.sequences >= LEAST_SEQUENCES:
        return
    size = inputs.engine.size
    while (
        size < 64 and EngineMemory(inputs.model, replace(inputs.engine, size=size), limit_of(inputs)).sequences < LEAST_SEQUENCES
    ):
        size *= 2
    yield Advice(
        key=inputs.engine.size_key,
        value=str(size),
        reason=f"an engine of {inputs.engine.size} has room for {engine.sequences:.1f} conversations of the greatest length",
    )


def _advise_node(inputs: PlanInputs, node: NodeMemory | None) -> Iterator[Advice]:
    """Yield what needs less of a node's CPU memory, where it does not fit."""
    if node is None or node.fits or node.loading:
        return
    biggest = max(node.parts, key=lambda name: node.parts[name])
    settings = {
        "checkpoint": ("checkpointing.async_save", "false"),
        "engine weights": ("policy.generation.vllm_cfg.sleep_level", "2"),
        "reference": ("policy.reference.offload", "false"),
        "activations": ("policy.dtensor_cfg.activation_offload", "false"),
    }
    if biggest == STAYS_WITHOUT and all(phase.fits for phase in plan_memory(replace(inputs, leaves=False))):
        settings[biggest] = ("policy.offload", "false")  # the devices have room for both
    key, value = settings.get(biggest, ("--devices", str(2 * inputs.training_devices)))
    yield Advice(key=key, value=value, reason=f"a node's CPU memory does not fit, and most of it is {biggest}")


def _advise_learner(inputs: PlanInputs) -> Iterator[Advice]:
    """Yield what makes training fit, or a larger micro-batch where there is room."""
    setup, longest = inputs.learner, inputs.learner.longest
    room = limit_of(inputs) - sum(count_beside(inputs, LearnerFootprint(inputs.model, setup), inputs.references).values())
    if inputs.device.on_cpu and inputs.engine is not None:
        room -= EngineMemory(inputs.model, inputs.engine, limit_of(inputs)).weights
    if _fits(inputs, setup, room):
        best = setup.tokens
        while best < 1 << 17 and _fits(inputs, replace(setup, tokens=2 * best), room * 0.8):
            best *= 2
        if best > setup.tokens and best <= inputs.rollouts * longest:
            yield Advice(
                key=inputs.batch_key, value=str(best), reason="a larger micro-batch fits with a fifth of the memory to spare"
            )
        return
    if setup.tokens > longest and _fits(inputs, replace(setup, tokens=longest), room):
        yield Advice(key=inputs.batch_key, value=str(longest), reason="one conversation at a time fits")
        return
    recomputing = replace(setup, tokens=longest, checkpointed_share=1.0)
    if setup.checkpointed_share < 1 and _fits(inputs, recomputing, room):
        yield Advice(
            key=f"{inputs.learner_key}.activation_checkpointing",
            value="true",
            reason="layers that compute their activations again fit",
        )
        return
    sharding = recomputing.sharding
    devices = inputs.training_devices
    while devices < 1 << 14:
        devices *= 2
        wider = replace(recomputing, sharding=replace(sharding, shards=sharding.shards * devices // inputs.training_devices))
        if _fits(inputs, wider, room):
            yield Advice(
                key="--devices", value=str(devices), reason="number of devices that share the weights and the optimizer fit"
            )
            return
    yield Advice(
        key=f"{inputs.learner_key}.context_parallel_size",
        value="2 or more",
        reason="a single conversation does not fit: divide its tokens",
    )


def _fits(inputs: PlanInputs, setup: LearnerSetup, room: float) -> bool:
    return LearnerFootprint(inputs.model, setup).training_peak <= room


def find_weakest(inputs: PlanInputs, phases: tuple[PhaseMemory, ...], node: NodeMemory | None = None) -> str:
    """Say which phase has the least room, and how far what fills it may grow; or that a node's CPU memory does not fit."""
    fullest = max(phases, key=lambda phase: phase.peak / phase.limit)
    if not fullest.fits:
        biggest = max(fullest.parts, key=lambda name: fullest.parts[name])
        return f"{fullest.phase} does not fit: it takes {fullest.peak / fullest.limit:.0%} of a device's memory, most of it {biggest}"
    if node is not None and node.limit is not None and not node.fits:
        biggest = max(node.parts, key=lambda name: node.parts[name])
        return f"the CPU memory of a node does not fit: it takes {node.peak / node.limit:.0%}, most of it {biggest}"
    tightest = max((phase for phase in phases if phase.phase == "training"), key=lambda phase: phase.peak)
    share = tightest.peak / tightest.limit
    tokens = inputs.learner.tokens
    room = tightest.limit - tightest.peak
    learner = LearnerFootprint(inputs.model, inputs.learner)
    per_token = (learner.activations + learner.output_layer) / tokens
    most = tokens + room / per_token if per_token else tokens
    return (
        f"{tightest.phase}, at {share:.0%} of a device's memory: micro-batches of more than about {most:,.0f} tokens would not fit "
        f"(now {tokens:,})"
    )


WIDTH = 24  # characters of a bar


def format_plan(plan: RunPlan) -> str:
    """Return the plan as it is printed: layout, memory by phase, CPU memory and disk, advice."""
    return "\n".join(_lines(plan))


def _lines(plan: RunPlan) -> Iterator[str]:
    devices = plan.training_devices + (0 if _shares(plan) else plan.generation_devices)
    yield f"model       {plan.model}"
    yield f"devices     {devices} x {plan.device.name}, {plan.layout}"
    yield ""
    yield f"memory of a device ({plan.phases[0].limit / GIB:.1f} GiB can be used)"
    width = max(12, *(len(phase.phase) + 2 for phase in plan.phases))
    for phase in plan.phases:
        yield f"  {phase.phase:<{width}}{_bar(phase)} {phase.peak / GIB:8.2f} GiB{'' if phase.fits else '  DOES NOT FIT'}"
        yield f"  {'':<{width}}{', '.join(f'{name} {size / GIB:.2f}' for name, size in _largest(phase))}"
    yield from _format_node(plan.node)
    if size := plan.checkpoint_bytes / GIB:
        count = plan.checkpoints
        yield ""
        kept = "all are kept" if count is None else f"at most {count} at a time: {count * size:,.1f} GiB"
        yield f"disk for checkpoints: {size:,.1f} GiB each, {kept}"
    yield ""
    yield f"first limit {plan.breaks_first}"
    yield from (f"set         {advice.key}={advice.value}: {advice.reason}" for advice in plan.advice)
    for assumption in plan.assumptions:
        yield f"assumed     {assumption}"


def _format_node(node: NodeMemory | None) -> Iterator[str]:
    """Yield the CPU memory of a node, with a warning where it does not fit or the available memory is unknown."""
    if node is None or not node.parts:
        return
    when = ", when the run starts" if node.loading else ""
    yield ""
    if node.limit is None:
        yield f"CPU memory of a node: {node.peak / GIB:.1f} GiB{when} (--node-memory GIB says whether that fits)"
    else:
        verdict = "" if node.fits else "  DOES NOT FIT"
        yield f"CPU memory of a node: {node.peak / GIB:.1f} GiB of {node.limit / GIB:,.0f}{when}{verdict}"
    yield f"  {', '.join(f'{name} {size / GIB:.2f}' for name, size in sorted(node.parts.items(), key=lambda item: -item[1]))}"
    yield "  alongside it: libraries of each process, rollouts and data"


def _shares(plan: RunPlan) -> bool:
    return all(phase.devices == "all" for phase in plan.phases if phase.phase == "generation")


def _bar(phase: PhaseMemory) -> str:
    filled = min(WIDTH, round(WIDTH * phase.peak / phase.limit)) if phase.limit else 0
    return "[" + "#" * filled + "." * (WIDTH - filled) + "]"


def _largest(phase: PhaseMemory) -> list[tuple[str, float]]:
    return sorted(phase.parts.items(), key=lambda item: -item[1])[:5]
