"""The devices of a run as text: which train, which generate, also on GPUs that this machine lacks (``--assume-gpus 8``)."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import PpoRunConfig
from strop.distributed.placement import DevicePlan, plan_devices
from strop.runs.learner_backend import choose_dims
from strop.runs.run_algorithm import count_steps_per_batch
from strop.weight_sync.weight_sync_config import choose_auto_transport


def format_placement(config: TrainingRunConfig, *, on_cpu: bool) -> list[str]:
    """Format the layout of a run on a cluster: ranks, parallel dimensions, engines, environment processes.

    Raises PlacementError, ValueError."""
    counts = count_devices(config)
    plan = plan_devices(counts, on_cpu=on_cpu)
    per_node = f"{_pluralize(counts.per_node, 'CPU process')} instead of GPUs" if on_cpu else _pluralize(counts.per_node, "GPU")
    world, nodes = len(plan.training), {slot.node for slot in plan.training}
    dims = choose_dims(config.policy, world)
    lines = [
        f"cluster     {_pluralize(counts.nodes, 'node')} of a Ray cluster, {per_node} on each",
        f"learner     {_pluralize(world, 'rank')} on {_pluralize(len(nodes), 'node')}: {dims}",
    ]
    if isinstance(config, PpoRunConfig) and not config.value.head_only:
        critic = choose_dims(config.value, world)
        if critic != dims:
            lines.append(f"            the critic: {critic}")
    if isinstance(config, RolloutRunConfig):
        lines += [
            f"engines     {_format_engines(plan, counts.engine_size)}",
            f"env         {_format_environment_processes(config)}",
        ]
    return lines


def _format_engines(plan: DevicePlan, size: int) -> str:
    count, nodes = len(plan.generation), sorted({part.node for slot in plan.generation for part in slot.parts})
    where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
    sharing = "colocated with the learner" if plan.colocated else "on their own devices"
    spans = max(len(slot.parts) for slot in plan.generation)
    over = f" over {_pluralize(spans, 'node')} each" if spans > 1 else ""
    return f"{_pluralize(count, 'engine')} of {_pluralize(size, 'device')}{over} on {where}, {sharing}"


def _format_environment_processes(config: RolloutRunConfig) -> str:
    count = config.cluster.environment_hosts
    if not count:
        return "environments run in the driver's process"
    nodes = min(count, config.cluster.num_nodes)
    return f"{_pluralize(count, 'process')} for each environment, spread over {_pluralize(nodes, 'node')}"


def format_device_rows(plan: DevicePlan, nodes: int) -> list[tuple[str, str, str]]:
    """Return a row (node, training devices, generation devices) for each node."""
    rows = []
    for node in range(nodes):
        trains = [slot.devices[0] for slot in plan.training if slot.node == node]
        engines = [
            f"engine {number}: {_format_range(part.devices)}"
            for number, slot in enumerate(plan.generation)
            for part in slot.parts
            if part.node == node
        ]
        rows.append((str(node), _format_range(trains) if trains else "none", ", ".join(engines) or "none"))
    return rows


def _format_range(numbers: list[int] | tuple[int, ...]) -> str:
    """Format consecutive numbers as 0-7, or 3 for a single one."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _pluralize(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def describe_assumed(config: TrainingRunConfig) -> Iterator[str]:
    """Yield where ranks and engines are, the share of each rank, how weights travel, and the engine's defaults. Raises PlacementError,
    ValueError for a layout that does not fit."""
    counts = count_devices(config)
    plan = plan_devices(counts, on_cpu=False)
    if counts.uses_ray:
        for node, trains, generates in format_device_rows(plan, counts.nodes):
            yield f"node {node:<6} trains on GPU {trains}" + (f"; generates on {generates}" if plan.generation else "")
    yield f"batch       {_format_shares(config, plan)}"
    if isinstance(config, RolloutRunConfig):
        yield f"weights     {_format_transport(config, plan)}"
        if config.policy.generation.uses_engines:
            yield f"{config.policy.generation.launched:<12}{config.policy.generation.engine_options.describe()}"


def _format_shares(config: TrainingRunConfig, plan: DevicePlan) -> str:
    """Format the number of rollouts or examples per optimizer step for each rank that reads its own micro-batches."""
    counts = count_devices(config)
    ranks = choose_dims(config.policy, len(plan.training)).data if counts.uses_ray else 1
    noun, total = "examples", config.groups_per_step
    if isinstance(config, RolloutRunConfig):
        noun, total = "rollouts", config.rollout_training.rollouts_per_step // count_steps_per_batch(config)
    if total is None:
        return f"at most {config.most_groups} {noun} an optimizer step over {_count(ranks, 'data rank')}"
    shares = f"{total // ranks} each" if total % ranks == 0 else f"{total / ranks:.1f} each on average, balanced by tokens"
    idle = f"; {ranks - total} ranks get none: raise the batch, or shard less" if total < ranks else ""
    return f"{total} {noun} an optimizer step over {_count(ranks, 'data rank')}: {shares}{idle}"


def _format_transport(config: RolloutRunConfig, plan: DevicePlan) -> str:
    sync, uses_ray = config.policy.generation.weight_sync, count_devices(config).uses_ray
    if not config.policy.generation.uses_engines and not uses_ray:
        return "none: the engine runs the learner's own module"
    if sync.transport != "auto":
        return f"{sync.transport}, as configured (policy.generation.weight_sync.transport)"
    engines = len(plan.generation) if uses_ray else config.policy.generation.engine_options.num_local_engines
    chosen = choose_auto_transport(
        "cuda",
        engines=engines,
        colocated=config.policy.generation.colocated.enabled,
        same_machine=plan.on_one_machine or not uses_ray,
    )
    return f"{chosen}, which auto stands for here (policy.generation.weight_sync.transport)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
