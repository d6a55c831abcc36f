"""``strop plot RUN``: plot the curves of a run, or of several in one picture, from metrics.jsonl, as small multiples in one PNG.

Panels without data are omitted. The number in a panel is the last step's value. Light points are raw values, and the line is a
moving average, as stated in the picture; short series such as validations are plotted without smoothing. The last panel stacks
the phases of each step's time; for several runs, it is the time of a step. Runs that differ only in their seed are one line,
their mean, in a band from the lowest to the highest.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from strop.monitoring.console_columns import PHASE_PREFIX, TOTAL_TIME, format_number, phase_times
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.user_code import suggest_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Steps = Sequence[tuple[int, Mapping[str, float]]]

LONGEST_LABEL = 48  # characters; longer differences are not used as labels
_NOT_COMPARED = ("logger.", "checkpointing.", "run_name", "watchdog.", "cluster.")  # where a run writes and runs, not what it is
SMOOTH_ABOVE = 12  # series with more points are smoothed


@dataclass(frozen=True)
class LoggedRun:
    """A run's metrics, and its configuration by dotted keys (empty if it has none)."""

    name: str
    steps: Steps
    settings: Mapping[str, Any]

    def series(self, tag: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric where it is a finite number."""
        return [(float(step), values[tag]) for step, values in self.steps if math.isfinite(values.get(tag, math.nan))]

    @property
    def tags(self) -> set[str]:
        return {tag for _, values in self.steps for tag in values}


@dataclass(frozen=True)
class BandPoint:
    """A step of a line: mean and range over its runs."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RunLine:
    label: str
    runs: tuple[LoggedRun, ...]

    def band(self, tag: str) -> list[BandPoint]:
        """Return a metric over the runs that logged it at each step, each run smoothed first if it is long."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            points = run.series(tag)
            ys = [y for _, y in points]
            for (x, _), y in zip(points, smooth(ys) if len(ys) > SMOOTH_ABOVE else ys, strict=True):
                values.setdefault(x, []).append(y)
        return [BandPoint(x, sum(ys) / len(ys), min(ys), max(ys)) for x, ys in sorted(values.items())]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average over about a tenth of the curve. The window is truncated at both ends."""
    radius = max(1, len(values) // 20)
    windows = [values[max(i - radius, 0) : i + radius + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def make_lines(runs: Sequence[LoggedRun], *, group_by_seed: bool = True) -> list[RunLine]:
    """Return one line for each configuration, or for each run, in the order of the runs."""
    groups: dict[object, list[LoggedRun]] = {}
    for index, run in enumerate(runs):
        compared = tuple(sorted((key, repr(value)) for key, value in run.settings.items() if _is_compared(key)))
        groups.setdefault(compared if group_by_seed and compared else index, []).append(run)
    return [
        RunLine(label, tuple(group)) for label, group in zip(_make_labels(list(groups.values())), groups.values(), strict=True)
    ]


def _is_compared(key: str) -> bool:
    return not key.startswith(_NOT_COMPARED) and not _is_seed(key)


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def _make_labels(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    """Name each group by the differing settings, or by its runs if that is too long or ambiguous."""
    firsts = [group[0].settings for group in groups]
    known = {key for settings in firsts for key in settings if not key.startswith(_NOT_COMPARED)}
    keys = sorted(known, key=lambda key: (_is_seed(key), key))
    several = any(len(group) > 1 for group in groups)
    differing = [
        key for key in keys if len({repr(settings.get(key)) for settings in firsts}) > 1 and not (several and _is_seed(key))
    ]
    shortened = _shorten_keys(differing)
    labels = [", ".join(f"{shortened[key]}={settings.get(key)}" for key in differing) for settings in firsts]
    usable = all(firsts) and len(set(labels)) == len(labels) and all(0 < len(label) <= LONGEST_LABEL for label in labels)
    if not usable:
        labels = [", ".join(run.name for run in group[:3]) + (", ..." if len(group) > 3 else "") for group in groups]
    return [f"{label} ({len(group)} seeds)" if len(group) > 1 else label for label, group in zip(labels, groups, strict=True)]


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ends of the keys that tell them apart."""
    endings = Counter(ending for key in keys for ending in _list_endings(key))
    return {key: next((ending for ending in _list_endings(key) if endings[ending] == 1), key) for key in keys}


def _list_endings(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


# The palette of Okabe and Ito: distinguishable for colour-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442"
PHASE_COLOURS = {
    "generation": BLUE, "log-probs": SKY, "training": ORANGE, "weights": GREEN, "validation": PINK, "checkpoint": RED,
    "other": "#BBBBBB",
}  # fmt: skip
LINE_COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, SKY, YELLOW, "#000000")
LINE_STYLES = ("-", "--", ":", "-.")  # after the colours are used up
SPARE_COLOURS = (YELLOW, "#777777", "#000000")
SMOOTHED = "lines: moving averages over a tenth of the steps"
INK, PALE = "#333333", "#DDDDDD"
MAX_BARS = 200  # longer runs average several steps per bar


@dataclass(frozen=True)
class Curve:
    title: str
    tag: str
    colour: str = BLUE
    reference: float | None = None  # draw a horizontal line at this value
    span: float = 0.0  # minimum range of the axis, so that noise does not look like a trend
    share: bool = False  # a share of a whole: the axis is 0 to 1
    from_zero: bool = False


CURVES = (
    Curve("Reward", "train/reward", span=0.1),
    Curve("Reward spread within groups", "train/reward_std_in_group", span=0.1),
    Curve("Groups without signal, share", "train/groups_without_signal", RED, share=True),
    Curve("Accuracy of the pairs", "train/accuracy", share=True),
    Curve("Margin, chosen - rejected", "train/margin", span=0.1),
    Curve("Validation accuracy", "validation/accuracy", GREEN, span=0.1),
    Curve("Validation margin", "validation/margin", GREEN, span=0.1),
    Curve("Loss", "train/loss", span=0.1),
    Curve("Validation loss", "validation/loss", GREEN, span=0.1),
    Curve("Entropy (nats per token)", "train/entropy", span=0.1),
    Curve("KL to the reference", "train/kl_penalty", span=0.01),
    Curve("Sampler / learner mismatch, 1 is none", "train/token_mult_prob_error", RED, reference=1.0, span=0.01),
    Curve("Gradient norm", "train/grad_norm", span=0.1),
    Curve("Sampled tokens per rollout", "train/mean_gen_tokens_per_sample", span=4),
    Curve("Truncated rollouts, share", "train/truncated", RED, share=True),
)
STEP_TIME = Curve("Seconds per step", TOTAL_TIME, from_zero=True)


class NothingToPlot(ValueError):
    """There is nothing to plot. The message says what was found and where to look."""


def plot_run(run: Path, output: Path | None = None) -> Path:
    """Plot a run and return the path of the PNG. ``run`` is a metrics.jsonl, its folder, or the folder above. Raises NothingToPlot."""
    source = find_metrics(Path(run))
    figure = make_run_figure(source)
    target = Path(output) if output is not None else source.parent / "curves.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def make_run_figure(run: Path, metrics: Sequence[str] = ()) -> Figure:
    """Return the figure of a run: the usual curves and the time of the steps, or only these metrics. Raises NothingToPlot."""
    source = find_metrics(run)
    steps = read_metrics(source)
    if not steps:
        raise NothingToPlot(f"{source} is empty: the run has not finished its first step")
    curves = [_find_curve(tag, [LoggedRun("", steps, {})]) for tag in metrics] or choose_curves(steps)
    timed = [] if metrics else [(step, values) for step, values in steps if phase_times(values)]
    if not curves and not timed:
        raise NothingToPlot(_describe_missing(source, steps))
    return _plot(curves, timed, steps, title=f"{source.resolve().parent.name}, {steps[-1][0]} steps")


def choose_curves(steps: Steps) -> list[Curve]:
    """Return the usual curves that have values."""
    return [curve for curve in CURVES if any(math.isfinite(values.get(curve.tag, math.nan)) for _, values in steps)]


def plot_runs(
    runs: Sequence[Path],
    settings: Sequence[Mapping[str, Any]],
    output: Path,
    *,
    metrics: Sequence[str] = (),
    group_by_seed: bool = True,
) -> Path:
    """Plot runs in one picture and return its path. Raises NothingToPlot.

    ``settings`` are their configurations by dotted keys, ``metrics`` the names to plot instead of the usual ones.
    """
    sources = [find_metrics(Path(run)) for run in runs]
    names = _name_runs(sources)
    logged = [LoggedRun(name, read_metrics(source), own) for name, source, own in zip(names, sources, settings, strict=True)]
    for source, run in zip(sources, logged, strict=True):
        if not run.steps:
            raise NothingToPlot(f"{source} is empty: the run has not finished its first step; leave it out")
    curves = [_find_curve(tag, logged) for tag in metrics] or [
        curve for curve in (*CURVES, STEP_TIME) if any(run.series(curve.tag) for run in logged)
    ]
    if not curves:
        raise NothingToPlot(_describe_missing(sources[0], logged[0].steps))
    lines = make_lines(logged, group_by_seed=group_by_seed)
    figure = _plot_lines(curves, lines, [step for run in logged for step in run.steps])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    return output


def _describe_missing(source: Path, steps: Steps) -> str:
    return f"{source} has {len(steps)} steps, but none of {', '.join(curve.tag for curve in CURVES)}"


def _find_curve(tag: str, runs: Sequence[LoggedRun]) -> Curve:
    """Return the curve of a metric. Raises NothingToPlot unless a run has values of it."""
    if not any(run.series(tag) for run in runs):
        raise NothingToPlot(f"no run has values of {tag!r}{suggest_names(tag, set().union(*(run.tags for run in runs)))}")
    return next((curve for curve in CURVES if curve.tag == tag), Curve(tag, tag))


def _name_runs(sources: Sequence[Path]) -> list[str]:
    """Name runs by their folders, adding parent folders where two have the same name."""
    folders = [source.resolve().parent for source in sources]
    for depth in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return names


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
        raise NothingToPlot(
            f"{run} contains {len(files)} runs ({folders}); name one of them, such as {files[-1].parent}, or several"
        )
    if (run / "status.json").exists():
        raise NothingToPlot(f"{run} has no metrics yet: the run has not finished its first step; see strop doctor {run}")
    raise NothingToPlot(
        f"there is no {METRICS_FILE} in {run} or one folder below it; give the log folder of a run (logger.log_dir), "
        "not its checkpoint folder"
    )


def _plot(curves: Sequence[Curve], timed: Steps, steps: Steps, *, title: str) -> Figure:
    panels = len(curves) + bool(timed)
    figure, axes = _make_panels(panels, title)
    limits = _step_limits(steps)
    for axis, curve in zip(axes, curves, strict=False):
        _style_axis(axis, curve.title, limits)
        _plot_curve(axis, curve, steps)
        _widen_axis(axis, curve)
    if timed:
        _style_axis(axes[panels - 1], "Seconds per step", limits)
        _plot_phases(axes[panels - 1], timed)
    if any(len(axis.collections) for axis in axes[: len(curves)]):  # the points of a smoothed curve
        _add_note(figure, f"{SMOOTHED}; points: each step; numbers: the last step")
    return figure


def _add_note(figure: Figure, note: str) -> None:
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=INK)


def _plot_lines(curves: Sequence[Curve], lines: Sequence[RunLine], steps: Steps) -> Figure:
    """Plot a panel for each metric with every line in it, and the names of the lines below."""
    figure, axes = _make_panels(len(curves), "")
    limits = _step_limits(sorted(steps, key=lambda step: step[0]))
    for axis, curve in zip(axes, curves, strict=True):
        _style_axis(axis, curve.title, limits)
        if curve.reference is not None:
            axis.axhline(curve.reference, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for index, line in enumerate(lines):
            points = line.band(curve.tag)
            colour = LINE_COLOURS[index % len(LINE_COLOURS)]
            style = LINE_STYLES[index // len(LINE_COLOURS) % len(LINE_STYLES)]
            xs = [point.step for point in points]
            marker = "o" if len(points) <= SMOOTH_ABOVE else ""
            axis.plot(
                xs, [point.mean for point in points], color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=4,
                label=line.label,
            )  # fmt: skip
            if len(line.runs) > 1:
                lows, highs = [point.low for point in points], [point.high for point in points]
                axis.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0)
        _widen_axis(axis, curve)
    if any(len(run.series(curve.tag)) > SMOOTH_ABOVE for curve in curves for line in lines for run in line.runs):
        _add_note(figure, SMOOTHED)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=1 if max(map(len, labels)) > 30 else 3, fontsize=9, frameon=False,
        labelcolor=INK,
    )  # fmt: skip
    return figure


class NotebookFigure(Figure):  # type: ignore[misc]
    """A figure that any notebook backend displays as a cell's last value, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"image/png": self._repr_png_(), "text/plain": repr(self)}


def _make_panels(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, in rows of at most three."""
    num_columns = min(panels, 3)
    num_rows = -(-panels // num_columns)
    figure = NotebookFigure(figsize=(max(4.4 * num_columns, 6.0), 2.9 * num_rows + 0.5))
    FigureCanvasAgg(figure)  # needs no display and none of pyplot's global state
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[max(panels - num_columns, 0) : panels]:
        axis.set_xlabel("step", fontsize=9, color=INK)
    return figure, axes[:panels]


def _widen_axis(axis: Axes, curve: Curve) -> None:
    """Set the range of the axis: 0 to 1 for a share, otherwise at least ``curve.span``, on one side of 0 if all values are."""
    if curve.share:
        axis.set_ylim(-0.03, 1.03)
        return
    lowest, _ = axis.dataLim.intervaly  # of what is drawn
    low, high = axis.get_ylim()
    missing = max(curve.span - (high - low), 0.0) / 2
    low, high = low - missing, high + missing
    if lowest >= 0 and (low < 0 or curve.from_zero):
        low, high = -0.03 * high, max(high, curve.span)
    axis.set_ylim(low, high)


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
    else:
        axis.scatter(xs, ys, s=6, color=curve.colour, alpha=0.25, linewidths=0)
        axis.plot(xs, smooth(ys), color=curve.colour, linewidth=1.8)
    axis.annotate(
        format_number(ys[-1]), (1.0, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
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
