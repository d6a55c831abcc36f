"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from strop.planning.node_memory import NodeMemory
from strop.planning.run_plan import GIB, PhaseMemory, RunPlan

WIDTH = 24  # characters of a bar


def format_plan(plan: RunPlan) -> str:
    """Return the plan as it is printed: layout, memory by phase, seconds by phase, cost, advice."""
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
    beside = " (generation and training are beside each other)" if plan.time.overlaps else ""
    yield f"a step takes {format_seconds(plan.time.total)}{beside}"
    for name, seconds in plan.seconds.items():
        if seconds:
            yield f"  {name:<12}{format_seconds(seconds):>12}  {seconds / plan.time.total:4.0%}"
    yield ""
    yield f"run         {_format_cost(plan)}"
    yield f"first limit {plan.breaks_first}"
    if not plan.choices:
        yield from (f"set         {advice.key}={advice.value}: {advice.reason}" for advice in plan.advice)
    yield from _format_choices(plan)
    for assumption in plan.assumptions:
        yield f"assumed     {assumption}"
    if not plan.device.measured:
        yield "assumed     times of a GPU are fitted to published runs of another library (docs/planning.md)"


def _format_node(node: NodeMemory | None) -> Iterator[str]:
    """Yield the CPU memory of a node, with a warning where it does not fit or nobody said what there is."""
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
    yield "  beside it: libraries of each process, rollouts and data"


def _format_choices(plan: RunPlan) -> Iterator[str]:
    """Yield the layouts that the plan would choose beside the configured one, with what to paste for each."""
    if plan.verdict:
        yield f"choose      {plan.verdict}"
    if not plan.choices:
        return
    yield f"              {'a step':>10} {'learner':>11} {'engines':>11}"
    rows = [("as given", plan), *((str(number), choice.plan) for number, choice in enumerate(plan.choices, 1))]
    for name, each in rows:
        engine = "" if each.engine_peak is None else f"{each.engine_peak / GIB:.1f} GiB"
        misfit = "" if each.fits else "  does not fit"
        yield f"  {name:<12}{format_seconds(each.time.total):>10} {each.learner_peak / GIB:7.1f} GiB {engine:>11}{misfit}  {each.layout}"
    for number, choice in enumerate(plan.choices, 1):
        yield f"  {number}: {' '.join(choice.overrides)}"


def _shares(plan: RunPlan) -> bool:
    return all(phase.devices == "all" for phase in plan.phases if phase.phase == "generation")


def _bar(phase: PhaseMemory) -> str:
    filled = min(WIDTH, round(WIDTH * phase.peak / phase.limit)) if phase.limit else 0
    return "[" + "#" * filled + "." * (WIDTH - filled) + "]"


def _largest(phase: PhaseMemory) -> list[tuple[str, float]]:
    return sorted(phase.parts.items(), key=lambda item: -item[1])[:5]


def format_seconds(seconds: float) -> str:
    """Format a duration: ``12.3 ms``, ``4.56 s``, ``7.8 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _format_cost(plan: RunPlan) -> str:
    cost = plan.cost
    if cost.steps is None or cost.hours is None or cost.device_hours is None:
        return "its length is not known: max_num_steps is not set"
    price = "" if cost.price is None else f", {cost.price:,.2f} at the given price"
    unit = "device hours" if plan.device.measured else "GPU hours"
    return f"{cost.steps:,} steps in {cost.hours:,.2f} hours, {cost.device_hours:,.1f} {unit}{price}; without validation and checkpoints"
