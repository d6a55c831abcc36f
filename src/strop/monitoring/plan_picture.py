"""A plan as a picture: the memory of a device by phase against its limit, where the time of a step goes, and the chosen layouts' steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strop.planning.plan_text import format_seconds
from strop.planning.run_plan import GIB, RunPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f", "#332288", "#999933", "#882255", "#44aa99",
)  # fmt: skip
LEAST_LABELLED = 0.06  # of a bar: narrower parts have no label


def draw_plan(plan: RunPlan, target: Path) -> Path:
    """Draw a plan as a PNG file, and return it."""
    from matplotlib.figure import Figure

    phases = list(reversed(plan.phases))
    rows = 1 + len(plan.choices) if plan.choices else 0
    figure = Figure(figsize=(10, 2.2 + 0.6 * len(phases) + 0.5 * rows), layout="constrained")
    heights = [len(phases) + 0.5, 1.2, *([0.8 * rows] if rows else [])]
    memory, time, *compared = figure.subplots(len(heights), 1, height_ratios=heights)
    names = list(dict.fromkeys(name for phase in plan.phases for name in phase.parts))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    for row, phase in enumerate(phases):
        left = 0.0
        for name, size in phase.parts.items():
            memory.barh(row, size / GIB, left=left, color=colours[name], edgecolor="white", linewidth=0.5)
            left += size / GIB
        memory.text(left, row, f"  {left:.1f}", va="center")
    limit = plan.phases[0].limit / GIB
    memory.axvline(limit, color="black", linestyle="--", linewidth=1)
    memory.set_yticks(range(len(phases)), [phase.phase for phase in phases])
    memory.set_xlim(0, 1.12 * max(limit, *(phase.peak / GIB for phase in phases)))
    memory.set_xlabel(f"GiB on {plan.device.name}; dashed: what can be used")
    memory.set_title(f"{plan.model} on {plan.training_devices} x {plan.device.name}", loc="left")
    memory.legend(
        [memory.barh(0, 0, color=colours[name]) for name in names],
        names,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )
    _draw_time(plan, time)
    for axes in compared:
        _draw_choices(plan, axes)
    figure.savefig(target, dpi=120)
    return target


def _draw_time(plan: RunPlan, axes: Axes) -> None:
    """Draw the phases of a step one after another; in an asynchronous run generation above training."""
    left = 0.0
    for index, (name, seconds) in enumerate((name, seconds) for name, seconds in plan.seconds.items() if seconds):
        beside = plan.time.overlaps and name == "generation"
        start = 0.0 if beside else left
        axes.barh(1 if beside else 0, seconds, left=start, color=COLOURS[index], edgecolor="white", linewidth=0.5)
        if seconds > LEAST_LABELLED * plan.time.total:
            axes.text(start + seconds / 2, 1 if beside else 0, name, ha="center", va="center", fontsize=8)
        left += 0.0 if beside else seconds
    axes.set_yticks([])
    axes.set_xlabel(f"seconds of a step: {format_seconds(plan.time.total)}")


def _draw_choices(plan: RunPlan, axes: Axes) -> None:
    """Draw the step of the configuration and of each choice."""
    plans = [plan, *(choice.plan for choice in plan.choices)]
    names = ["as given", *(str(number) for number in range(1, len(plans)))]
    for row, each in enumerate(plans):
        axes.barh(row, each.time.total, color=COLOURS[0] if each.fits else COLOURS[7], edgecolor="white", linewidth=0.5)
        misfit = "" if each.fits else ", does not fit"
        axes.text(each.time.total, row, f"  {format_seconds(each.time.total)}{misfit}", va="center", fontsize=8)
    axes.set_yticks(range(len(plans)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(each.time.total for each in plans))
    axes.set_xlabel("seconds of a step with each layout that the plan would choose")
