"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from strop.extensions.planning.node_memory import NodeMemory
from strop.extensions.planning.run_plan import GIB, PhaseMemory, RunPlan

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
