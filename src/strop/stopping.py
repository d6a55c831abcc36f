"""When a run stops before its last step: a metric reached a value, or has not improved; or somebody asked it to, for now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

ENDED_EARLY = 143  # exit code, whoever told it to: 128 + SIGTERM


class EndedEarly(BaseException):
    """A run that was told to end, and will go on when it is started again. No error: like KeyboardInterrupt."""


@dataclass
class Stopper:
    """Whether a run is to end after the step in progress, to go on later: it was told to, or its time is up."""

    deadline: float | None = None  # on ``time.monotonic``
    reason: str | None = None  # set by whoever wants it to end

    def asked(self) -> str | None:
        """Why it is to end, if it is. Once it is, that stays so."""
        if self.reason is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "the time is up (checkpointing.checkpoint_must_save_by)"
        return self.reason


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """What is watched and what was seen of it. Part of a checkpoint, so that a run that continues stops where it would have."""

    metric: str  # as logged, such as validation/accuracy
    higher_is_better: bool = True
    threshold: float | None = None  # stop when the metric is at least as good as this
    patience: int | None = None  # stop when this many measurements in a row were no improvement
    smallest_improvement: float = 0.0
    best: float | None = None
    without_improvement: int = 0
    reason: str | None = None

    def seen(self, logged: Mapping[str, float]) -> EarlyStop:
        """After another step, which may have measured the metric or not. Raises ValueError for one that is never reported."""
        if self.metric not in logged:
            kind = self.metric.partition("/")[0] + "/"
            if there_are := sorted(name for name in logged if name.startswith(kind)):
                raise ValueError(f"stop_at_validation_metric: there is no metric {self.metric}; there are {', '.join(there_are)}")
            return self
        value = logged[self.metric]
        better = self.best is None or self._gain(value, self.best) > self.smallest_improvement
        after = replace(
            self, best=value if better else self.best, without_improvement=0 if better else self.without_improvement + 1
        )
        return replace(after, reason=after._reason(value))

    def _gain(self, value: float, other: float) -> float:
        return value - other if self.higher_is_better else other - value

    def _reason(self, value: float) -> str | None:
        if self.threshold is not None and self._gain(value, self.threshold) >= 0:
            return f"{self.metric} = {value:.4g} reached {self.threshold:g}"
        if self.patience is not None and self.without_improvement >= self.patience:
            return f"{self.metric} has not been better than {self.best:.4g} for {self.without_improvement} measurements"
        return None
