"""How a run ends: finished, perhaps early by a metric, or stopped on request and resumed later."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# A run that ends after its last step, its last task or by early stopping is finished. A run stopped on request continues when
# started again.
RunEnding = Literal["finished", "stopped"]

STOPPED_EXIT_CODE = 143  # exit code for any stop request: 128 + SIGTERM


class RunStopped(BaseException):
    """The run stopped on request and resumes when it is started again. Like KeyboardInterrupt, it is not an error."""


class EndRun(RuntimeError):
    """Raised by a listener to end the run with an error once the step is stored, saved and logged. The message gives the reason
    and the fix.
    """


@dataclass
class StopRequest:
    """A request, by a signal or a time limit, to stop the run after the current step and resume it later."""

    deadline: float | None = None  # on the clock of ``time.monotonic``
    reason: str | None = None  # set to request a stop
    noted: bool = False  # the run has logged it

    def check(self) -> str | None:
        """Return the reason of the stop request, or None. A request is never withdrawn."""
        if self.reason is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "the time is up (checkpointing.checkpoint_must_save_by)"
        return self.reason


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """The watched metric and its history. Part of a checkpoint, so that a resumed run stops at the same step."""

    metric: str  # as logged, such as validation/accuracy
    higher_is_better: bool = True
    threshold: float | None = None  # stop when the metric is at least as good as this
    patience: int | None = None  # stop after this many consecutive measurements without improvement
    smallest_improvement: float = 0.0
    best: float | None = None
    without_improvement: int = 0
    reason: str | None = None

    def update(self, logged: Mapping[str, float]) -> EarlyStop:
        """Return the state after another step, which may or may not have measured the metric.

        Raises ValueError if the step reported other metrics of the same group, such as validation/, but not this one.
        """
        if self.metric not in logged:
            prefix = self.metric.partition("/")[0] + "/"
            if available := sorted(name for name in logged if name.startswith(prefix)):
                raise ValueError(f"stop_at_validation_metric: there is no metric {self.metric}; there are {', '.join(available)}")
            return self
        value = logged[self.metric]
        better = self.best is None or self._gain(value, self.best) > self.smallest_improvement
        updated = replace(
            self, best=value if better else self.best, without_improvement=0 if better else self.without_improvement + 1
        )
        return replace(updated, reason=updated._reason(value))

    def _gain(self, value: float, other: float) -> float:
        return value - other if self.higher_is_better else other - value

    def _reason(self, value: float) -> str | None:
        if self.threshold is not None and self._gain(value, self.threshold) >= 0:
            return f"{self.metric} = {value:.4g} reached {self.threshold:g}"
        if self.patience is not None and self.without_improvement >= self.patience:
            return f"{self.metric} has not been better than {self.best:.4g} for {self.without_improvement} measurements"
        return None
