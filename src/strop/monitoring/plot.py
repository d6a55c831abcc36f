"""``strop plot RUN``: plot the curves of a run from metrics.jsonl, as small multiples in one PNG.

Panels without data are omitted. Light points are raw values, and the line is a moving average; short series such as
validations are plotted without smoothing. The last panel stacks the phases of each step's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.monitoring.console.columns import PHASE_PREFIX, TOTAL_TIME, format_number, phase_times
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps = Sequence[tuple[int, Mapping[str, float]]]

# The palette of Okabe and Ito: distinguishable for colour-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442"
PHASE_COLOURS = {
    "generation": BLUE, "log-probs": SKY, "training": ORANGE, "weights": GREEN, "validation": PINK, "checkpoint": RED,
    "other": "#BBBBBB",
}  # fmt: skip
SPARE_COLOURS = (YELLOW, "#777777", "#000000")
INK, PALE = "#333333", "#DDDDDD"
SMOOTH_ABOVE = 12  # series with more points are smoothed
MAX_BARS = 200  # longer runs average several steps per bar


@dataclass(frozen=True)
class Curve:
    title: str
    tag: str
    colour: str = BLUE
    reference: float | None = None  # draw a horizontal line at this value


CURVES = (
    Curve("Reward", "train/reward"),
    Curve("Validation accuracy", "validation/accuracy", GREEN),
    Curve("Loss", "train/loss"),
    Curve("Validation loss", "validation/loss", GREEN),
    Curve("Entropy (nats per token)", "train/entropy"),
    Curve("KL to the reference", "train/kl_penalty"),
    Curve("Sampler / learner mismatch, 1 is none", "train/token_mult_prob_error", RED, reference=1.0),
    Curve("Gradient norm", "train/grad_norm"),
    Curve("Sampled tokens per rollout", "train/mean_gen_tokens_per_sample"),
)


class NothingToPlot(ValueError):
    """There is nothing to plot. The message says what was found and where to look."""


def plot_run(run: Path, output: Path | None = None) -> Path:
    """Plot a run and return the path of the PNG. ``run`` is a metrics.jsonl, its folder, or the folder above. Raises NothingToPlot."""
    source = find_metrics(Path(run))
    steps = read_metrics(source)
    if not steps:
        raise NothingToPlot(f"{source} is empty: the run has not finished its first step")
    curves = [curve for curve in CURVES if any(math.isfinite(values.get(curve.tag, math.nan)) for _, values in steps)]
    timed = [(step, values) for step, values in steps if phase_times(values)]
    if not curves and not timed:
        raise NothingToPlot(f"{source} has {len(steps)} steps, but none of {', '.join(curve.tag for curve in CURVES)}")
    target = Path(output) if output is not None else source.parent / "curves.png"
    figure = _plot(curves, timed, steps, title=f"{source.resolve().parent.name}, {steps[-1][0]} steps")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def find_metrics(run: Path) -> Path:
    """Return the metrics.jsonl that ``run`` refers to. Raises NothingToPlot."""
    if not run.exists():
        raise NothingToPlot(f"there is no {run}; give the log folder of a run (logger.log_dir) or its {METRICS_FILE}")
    if run.is_file():
        return run
    if (run / METRICS_FILE).exists():
        return run / METRICS_FILE
    files = sorted(run.glob(f"*/{METRICS_FILE}"))
    if len(files) == 1:
        return files[0]
    if files:
        folders = ", ".join(path.parent.name for path in files)
        raise NothingToPlot(f"{run} contains {len(files)} runs ({folders}); name one of them, such as {files[-1].parent}")
    raise NothingToPlot(
        f"there is no {METRICS_FILE} in {run} or one folder below it; give the log folder of a run (logger.log_dir), "
        "not its checkpoint folder"
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average over about a tenth of the curve. The window is truncated at both ends."""
    radius = max(1, len(values) // 20)
    windows = [values[max(i - radius, 0) : i + radius + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _plot(curves: Sequence[Curve], timed: Steps, steps: Steps, *, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = len(curves) + bool(timed)
    num_columns = min(panels, 3)
    num_rows = -(-panels // num_columns)
    figure = Figure(figsize=(4.4 * num_columns, 2.9 * num_rows + 0.5))
    FigureCanvasAgg(figure)  # needs no display and none of pyplot's global state
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    limits = _step_limits(steps)
    for axis, curve in zip(axes, curves, strict=False):
        _style_axis(axis, curve.title, limits)
        _plot_curve(axis, curve, steps)
    if timed:
        _style_axis(axes[panels - 1], "Seconds per step", limits)
        _plot_phases(axes[panels - 1], timed)
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[max(panels - num_columns, 0) : panels]:
        axis.set_xlabel("step", fontsize=9, color=INK)
    return figure


def _step_limits(steps: Steps) -> tuple[float, float]:
    first, last = steps[0][0], steps[-1][0]
    margin = max((last - first) * 0.02, 0.5)
    return first - margin, last + margin


def _style_axis(axis: Axes, title: str, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, loc="left", fontsize=10, color=INK)
    axis.set_xlim(*limits)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axis.ticklabel_format(axis="y", useOffset=False)  # label 1.0003 directly instead of as an offset
    axis.grid(axis="y", color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(PALE)
    axis.tick_params(labelsize=8, colors=INK, length=0)


def _plot_curve(axis: Axes, curve: Curve, steps: Steps) -> None:
    points = [(step, values[curve.tag]) for step, values in steps if math.isfinite(values.get(curve.tag, math.nan))]
    xs, ys = [float(step) for step, _ in points], [value for _, value in points]
    if curve.reference is not None:
        axis.axhline(curve.reference, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    if len(points) <= SMOOTH_ABOVE:
        axis.plot(xs, ys, color=curve.colour, linewidth=1.6, marker="o", markersize=4)
        end = ys[-1]
    else:
        line = smooth(ys)
        axis.scatter(xs, ys, s=6, color=curve.colour, alpha=0.25, linewidths=0)
        axis.plot(xs, line, color=curve.colour, linewidth=1.8)
        end = line[-1]
    axis.annotate(
        format_number(end), (1.0, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
        ha="right", va="bottom", fontsize=10, fontweight="bold", color=curve.colour,
    )  # fmt: skip


def _plot_phases(axis: Axes, timed: Steps) -> None:
    """Plot one stacked bar per step, or per several steps of a long run. Missing steps stay empty."""
    steps_per_bar = -(-len(timed) // MAX_BARS)
    rows = [_mean_phases(timed[start : start + steps_per_bar]) for start in range(0, len(timed), steps_per_bar)]
    xs, bottoms = [step for step, _ in rows], [0.0] * len(rows)
    spare = iter(SPARE_COLOURS * 100)
    for name in [phase.name for phase in phase_times(_longest_phases(timed))]:
        heights = [row.get(name, 0.0) for _, row in rows]
        colour = PHASE_COLOURS.get(name) or next(spare)
        axis.bar(xs, heights, bottom=bottoms, width=float(steps_per_bar), color=colour, linewidth=0, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.set_ylim(0, max(bottoms) * 1.35)  # room for the legend
    axis.legend(
        loc="upper left", ncols=3, fontsize=7.5, frameon=False, handlelength=0.8, handletextpad=0.4,
        columnspacing=1.0, borderaxespad=0.1, labelcolor=INK,
    )  # fmt: skip


def _mean_phases(timed: Steps) -> tuple[float, dict[str, float]]:
    """Return the midpoint of these steps and the mean seconds of each phase."""
    sums: dict[str, float] = {}
    for _, values in timed:
        for phase in phase_times(values):
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
    return (timed[0][0] + timed[-1][0]) / 2, {name: seconds / len(timed) for name, seconds in sums.items()}


def _longest_phases(timed: Steps) -> dict[str, float]:
    """Return the maximum time of each phase over all steps, so that the legend lists every phase in the usual order."""
    longest: dict[str, float] = {}
    for _, values in timed:
        for tag, value in values.items():
            if tag.startswith(PHASE_PREFIX) and tag != TOTAL_TIME:
                longest[tag] = max(value, longest.get(tag, 0.0))
    if any(phase.name == "other" for _, values in timed for phase in phase_times(values)):
        longest[TOTAL_TIME] = 2 * sum(longest.values()) + 1.0
    return longest
