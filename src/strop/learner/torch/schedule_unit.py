"""How often a learning-rate schedule advances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ScheduleUnit:
    """What a step of a schedule is: a pass over a batch (``batch``), or an ``optimizer_step``, of which a pass makes several."""

    name: Literal["batch", "optimizer_step"] = "optimizer_step"
    steps_per_batch: int = 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps between two steps of the schedule."""
        return self.steps_per_batch if self.name == "batch" else 1

    def count_steps(self, optimizer_steps: int) -> int:
        """Return the number of steps of the schedule in so many optimizer steps."""
        return optimizer_steps // self.optimizer_steps

    def convert(self, steps: int, saved: Mapping[str, Any] | None) -> int:
        """Return how many steps of this unit ``steps`` are that were counted in ``saved``, the ``state_dict`` of another one.

        Without one they are optimizer steps. Batches stay batches where the number of optimizer steps of each is another now.
        """
        other = ScheduleUnit(**saved) if saved is not None else ScheduleUnit()
        return steps if other.name == self.name else self.count_steps(steps * other.optimizer_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "steps_per_batch": self.steps_per_batch}
