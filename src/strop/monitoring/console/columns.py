"""The metrics shown during a run, in order, and their number formats. Shared by both consoles and the plots.

A column appears once its metric has been logged, so one list serves every algorithm. ASCII only, for log files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TOTAL_TIME = "timing/train/total_step_time"
PHASE_PREFIX = "timing/train/"


@dataclass(frozen=True)
class Column:
    label: str
    tag: str
    decimals: int | None = None  # None: depends on the magnitude

    def format(self, value: float) -> str:
        if self.decimals is None or not math.isfinite(value):
            return format_number(value)
        return f"{value:.{self.decimals}f}"


COLUMNS = (
    Column("reward", "train/reward", 3),
    Column("loss", "train/loss"),
    Column("entropy", "train/entropy", 3),
    Column("KL", "train/kl_penalty"),
    Column("mismatch", "train/token_mult_prob_error", 4),
    Column("grad norm", "train/grad_norm"),
    Column("length", "train/mean_gen_tokens_per_sample", 1),
    Column("accuracy", "validation/accuracy", 3),
    Column("val loss", "validation/loss"),
    Column("tokens/s", "performance/tokens_per_sec"),
)


@dataclass(frozen=True)
class Phase:
    """The time that a step spent in one phase."""

    name: str
    seconds: float


# In the order of a step; unknown phases follow, sorted by name.
_PHASE_NAMES = {
    "generation": "generation",
    "logprobs": "log-probs",
    "policy_training": "training",
    "weight_sync": "weights",
    "validation": "validation",
    "checkpointing": "checkpoint",
}


def phase_times(metrics: Mapping[str, float]) -> tuple[Phase, ...]:
    """Split the time of a step into phases. Time outside of all phases is ``other``."""
    seconds = {
        tag.removeprefix(PHASE_PREFIX): value
        for tag, value in metrics.items()
        if tag.startswith(PHASE_PREFIX) and tag != TOTAL_TIME and math.isfinite(value) and value > 0
    }
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
