"""The metrics that a console shows: columns, number formats, the rows of a table, and the progress of a run.

A column appears once its metric has been logged. ASCII only, for log files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOTAL_TIME = "timing/train/total_step_time"
PHASE_PREFIX = "timing/train/"


@dataclass(frozen=True)
class Column:
    label: str
    tag: str
    decimals: int | None = None  # None: depends on the magnitude
    scientific: bool = False
    unless: str = ""  # a better metric for the same quantity: if it was logged, this column is hidden

    def format(self, value: float) -> str:
        if self.scientific and math.isfinite(value):
            return f"{value:.1e}"
        return format_number(value) if self.decimals is None else format_fixed(value, self.decimals)


REWARD = Column("reward", "train/reward", 3)
LOSS = Column("loss", "train/loss", 4)
ENTROPY = Column("entropy", "train/entropy", 3)
KL = Column("KL", "train/kl_penalty", 4)
MISMATCH = Column("mismatch", "train/token_mult_prob_error", 4)
GRAD_NORM = Column("grad norm", "train/grad_norm", 3)
LEARNING_RATE = Column("lr", "train/lr", scientific=True)
NO_SIGNAL = Column("no signal", "train/groups_without_signal", 2)
TRUNCATED = Column("truncated", "train/truncated", 2)
LENGTH = Column("length", "train/mean_gen_tokens_per_sample", 1)
ACCURACY = Column("accuracy", "validation/accuracy", 3, unless="validation/score")
SCORE = Column("val reward", "validation/score", 3)
VALIDATION_LOSS = Column("val loss", "validation/loss", 4)
SPEED = Column("tokens/s", "performance/tokens_per_sec", 0)

# The most important first, since a narrow terminal shows only those.
ROLLOUT_COLUMNS = (REWARD, ACCURACY, SCORE, NO_SIGNAL, TRUNCATED, LENGTH, ENTROPY, KL, GRAD_NORM, LEARNING_RATE, MISMATCH, SPEED)
VALUE_COLUMNS = (Column("value loss", "train/value_loss", 4), Column("explained", "train/explained_variance", 3))  # of a critic
COLUMNS = (
    REWARD,
    LOSS,
    ENTROPY,
    KL,
    MISMATCH,
    GRAD_NORM,
    LENGTH,
    ACCURACY,
    SCORE,
    VALIDATION_LOSS,
    SPEED,
)  # of any other metrics


def choose_columns(columns: Sequence[Column], seen: frozenset[str]) -> list[Column]:
    """Return the columns whose metrics have been logged."""
    return [column for column in columns if column.tag in seen and column.unless not in seen]


@dataclass(frozen=True)
class Phase:
    """The time that a step spent in one phase."""

    name: str
    seconds: float


# In the order of a step; unknown phases follow, sorted by name.
_PHASE_NAMES = {
    "generation": "generation",
    "reading_data": "reading data",
    "logprobs": "log-probs",
    "policy_training": "training",
    "weight_sync": "weights",
    "validation": "validation",
    "checkpointing": "checkpoint",
}


def phase_times(metrics: Mapping[str, float]) -> tuple[Phase, ...]:
    """Split the time of a step into phases. Time outside of all phases is ``other``.

    A step on recorded data does not generate; reading its examples takes that place.
    """
    seconds = {
        tag.removeprefix(PHASE_PREFIX): value
        for tag, value in metrics.items()
        if tag.startswith(PHASE_PREFIX) and tag != TOTAL_TIME and math.isfinite(value) and value > 0
    }
    if "train/examples" in metrics and "generation" in seconds:
        seconds["reading_data"] = seconds.pop("generation")
    order = [name for name in _PHASE_NAMES if name in seconds] + sorted(seconds.keys() - _PHASE_NAMES.keys())
    phases = [Phase(_PHASE_NAMES.get(name, name.replace("_", " ")), seconds[name]) for name in order]
    rest = metrics.get(TOTAL_TIME, 0.0) - sum(phase.seconds for phase in phases)
    if rest > 0.01 * metrics.get(TOTAL_TIME, 0.0):
        phases.append(Phase("other", rest))
    return tuple(phases)


def format_number(value: float) -> str:
    """Format a number with about four significant digits, in at most eight characters."""
    size = abs(value)
    if not math.isfinite(value):
        return str(float(value))
    if size >= 1e6:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3 or value == 0:
        return f"{value:.4f}" if size < 10 else f"{value:.2f}"
    return f"{value:.1e}"


def format_fixed(value: float, decimals: int) -> str:
    """Format a number with a fixed number of decimals, fewer only where it is large; never as -0.000."""
    size = abs(value)
    if not math.isfinite(value) or size >= 1e6:
        return format_number(value)
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.{min(decimals, 2) if size >= 100 else decimals}f}"
    return text if any(digit in "123456789" for digit in text) else text.removeprefix("-")


def format_duration(seconds: float) -> str:
    """Format seconds as 1:02, 1:02:03 or 2d 3:04:05; `?` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_seconds(seconds: float) -> str:
    """Format the time of a step: 0.42 s, 4.2 s, 42 s, 3:20."""
    if seconds >= 100:
        return format_duration(seconds)
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


WINDOW = 20  # steps to average over; enough to include occasional validations and checkpoints


class Progress:
    """Measures the wall-clock time between steps, including validation and checkpoints."""

    def __init__(self, max_steps: int | None, clock: Callable[[], float]) -> None:
        self.max_steps = max_steps
        self.step = 0
        self._clock = clock
        self._started = clock()
        self._step_times: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._reported_seconds = math.nan
        self._resumed_step = -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self._reported_seconds = metrics.get(TOTAL_TIME, self._reported_seconds)
        if not self._step_times or step > self._step_times[-1][0]:
            self._step_times.append((step, self._clock()))

    def resume(self, step: int) -> None:
        self.step = self._resumed_step = step

    def is_known(self, step: int) -> bool:
        """Return whether a step precedes the resumption of the run, and so was already shown."""
        return step <= self._resumed_step

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    @property
    def seconds_per_step(self) -> float:
        """Mean wall-clock time per step. With fewer than two steps, the last logged step time; NaN before that."""
        if len(self._step_times) < 2:
            return self._reported_seconds
        (first, began), (last, ended) = self._step_times[0], self._step_times[-1]
        return (ended - began) / (last - first)

    @property
    def eta_seconds(self) -> float:
        """Estimated seconds until the end, counting down between steps. NaN if unknown."""
        if self.max_steps is None:
            return math.nan
        if self.step >= self.max_steps:
            return 0.0
        since = self._clock() - self._step_times[-1][1] if self._step_times else 0.0
        return max((self.max_steps - self.step) * self.seconds_per_step - since, 0.0)


HEADER_PERIOD = 20  # rows between two headers
SMALLEST_WIDTH = 7  # of a column
OPEN_WIDTH = 4  # width of a step number if the last one is unknown


class StepTable:
    """Formats one row per step. Columns appear once their metric has been logged, and stay; ``-`` means the step lacks the
    metric.
    """

    def __init__(self, columns: Sequence[Column], max_steps: int | None) -> None:
        self._columns = columns
        self._max_steps = max_steps
        self._seen: frozenset[str] = frozenset()
        self._header = ""
        self._rows_since_header = 0

    def see(self, metrics: Mapping[str, float]) -> None:
        """Register metrics that are not shown as a row, such as those of the step from which a run continues."""
        self._seen |= metrics.keys()

    def format_rows(self, step: int, metrics: Mapping[str, float], width: int | None = None) -> list[str]:
        """Return the row of a step, preceded by a header where one is due. ``width``: leave out the columns that do not fit."""
        self.see(metrics)
        steps = self._max_steps
        row = header = f"step {step:>{OPEN_WIDTH}}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"
        header = " " * len(row)
        for column in choose_columns(self._columns, self._seen):
            value = column.format(metrics[column.tag]) if column.tag in metrics else "-"
            size = max(len(column.label), SMALLEST_WIDTH)
            if width is not None and len(row) + 2 + size > width:
                break
            row, header = f"{row}  {value:>{size}}", f"{header}  {column.label:>{size}}"
        if TOTAL_TIME in metrics and (width is None or len(row) + 8 <= width):
            row, header = f"{row}  {format_seconds(metrics[TOTAL_TIME]):>6}", f"{header}  {'a step':>6}"
        due = header.split() != self._header.split() or self._rows_since_header >= HEADER_PERIOD
        self._rows_since_header = 1 if due else self._rows_since_header + 1
        self._header = header
        return [header, row] if due else [row]
