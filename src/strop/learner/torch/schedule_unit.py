"""How often a learning-rate schedule advances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ScheduleUnit:
    """The unit of a schedule step: a pass over a batch (``batch``), or an ``optimizer_step``, of which a pass makes several."""

    name: Literal["batch", "optimizer_step"] = "optimizer_step"
    steps_per_batch: int = 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps between two steps of the schedule."""
        return self.steps_per_batch if self.name == "batch" else 1

    def count_steps(self, optimizer_steps: int) -> int:
        """Return the number of schedule steps in this many optimizer steps."""
        return optimizer_steps // self.optimizer_steps

    def convert(self, steps: int, saved: Mapping[str, Any] | None) -> int:
        """Convert ``steps``, counted in the unit of ``saved`` (the ``state_dict`` of another one), to this unit.

        Without ``saved`` they are optimizer steps. Batches stay batches even if the number of optimizer steps per batch has
        changed.
        """
        other = ScheduleUnit(**saved) if saved is not None else ScheduleUnit()
        return steps if other.name == self.name else self.count_steps(steps * other.optimizer_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "steps_per_batch": self.steps_per_batch}
