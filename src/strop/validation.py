"""The loss on held-out recorded data: what supervised and preference training are validated by."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop import metrics
from strop.algorithms.base import Algorithm
from strop.data.packing import pack
from strop.tracking.base import Tracker
from strop.training.base import ColumnSource, Learner, token_outputs
from strop.types import Batch, Group


@dataclass(kw_only=True)
class LossValidation:
    """The algorithm's own loss and metrics on fixed groups: means over all of them, whatever the micro-batches.

    The groups are packed once, and required columns are asked for once: who fills them must be frozen, as a reference is. Groups with
    errors are left out and counted. Raises ValueError where no group is left.
    """

    groups: Sequence[Group]
    algorithm: Algorithm
    learner: Learner
    scorers: Mapping[str, ColumnSource] = field(default_factory=dict)  # what the algorithm requires -> who fills it
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        self.usable = [group for group in self.groups if not group.errors]
        self._batch: Batch | None = None
        if not self.usable:
            reasons = [error for group in self.groups for error in group.errors]
            raise ValueError(
                f"none of the {len(self.groups)} validation examples can be used{': ' + reasons[0] if reasons else ''}; give other data, "
                "or none (data.validation)"
            )

    async def evaluate(self, step: int, tracker: Tracker | None = None) -> dict[str, float]:
        """Metrics under ``validation/``: those of the loss, and how many examples were used and left out."""
        started = time.perf_counter()
        if tracker is not None:
            tracker.progress(f"validating on {len(self.usable)} examples")
        batch = await self._surveyed(await self._prepared())
        result = await self.learner.measure(batch, self.algorithm.losses(step)["policy"])
        found = {
            **metrics.values(result.metrics),
            "examples": float(len(self.usable)),
            "examples_left_out": float(len(self.groups) - len(self.usable)),
            "seconds": time.perf_counter() - started,
        }
        return {f"validation/{name}": value for name, value in found.items()}

    async def _prepared(self) -> Batch:
        """The batch with its columns and credit, made at the first call."""
        if self._batch is None:
            batch = pack(self.usable, self.algorithm, share_prefixes=self.share_prefixes)
            for required in sorted(self.algorithm.requires):
                batch = batch.with_extras(await self.scorers[required].columns(batch, self.usable))
            self._batch = self.algorithm.credit(batch)
        return self._batch

    async def _surveyed(self, batch: Batch) -> Batch:
        """What depends on the weights as they are now is asked for each time."""
        outputs = token_outputs(await self.learner.score(batch)) if self.algorithm.surveys else None
        return self.algorithm.survey(batch, outputs)
