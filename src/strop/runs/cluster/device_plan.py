"""How ranks shard a model, and a text that describes which devices train and which generate."""

from __future__ import annotations

from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import PpoRunConfig
from strop.distributed.placement import DevicePlan, plan_devices
from strop.runs.learner_backend import choose_dims


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
