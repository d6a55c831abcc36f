"""Validation by the loss on held-out recorded data, for supervised and preference training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from strop import metrics
from strop.algorithms.base import Algorithm
from strop.data.packing import pack
from strop.learner.base import require_token_outputs
from strop.learner.client import ColumnSources, LearnerClient
from strop.monitoring.trackers.base import Tracker
from strop.types import Batch, Group


@dataclass(kw_only=True)
class LossValidator:
    """Computes the algorithm's loss and metrics on fixed groups, as means over all of them, independent of the micro-batches.

    The groups are packed once and the required columns are computed once, so the models that compute them must be frozen, such as a
    reference policy. Groups with errors are left out and counted. Raises ValueError if no group is left.
    """

    groups: Sequence[Group]
    algorithm: Algorithm
    learner: LearnerClient
    columns: ColumnSources
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        self.usable_groups = [group for group in self.groups if not group.errors]
        self._batch: Batch | None = None
        if not self.usable_groups:
            reasons = [error for group in self.groups for error in group.errors]
            raise ValueError(
                f"none of the {len(self.groups)} validation examples can be used{': ' + reasons[0] if reasons else ''}; set "
                "data.validation to other data, or to null"
            )

    async def evaluate(self, step: int, tracker: Tracker | None = None) -> dict[str, float]:
        """Return metrics under ``validation/``: those of the loss, and the number of examples used and left out."""
        started = time.perf_counter()
        if tracker is not None:
            tracker.progress(f"validating on {len(self.usable_groups)} examples")
        batch = await self._prepare_step(await self._prepare_batch())
        result = await self.learner.evaluate_loss(batch, self.algorithm.losses(step)["policy"])
        logged = {
            **metrics.to_floats(result.metrics),
            "examples": float(len(self.usable_groups)),
            "examples_left_out": float(len(self.groups) - len(self.usable_groups)),
            "seconds": time.perf_counter() - started,
        }
        return {f"validation/{name}": value for name, value in logged.items()}

    async def _prepare_batch(self) -> Batch:
        """Pack the groups, with columns and credit; done once, at the first call."""
        if self._batch is None:
            batch = pack(self.usable_groups, self.algorithm.group_credit(self.usable_groups), share_prefixes=self.share_prefixes)
            self._batch = self.algorithm.token_credit(await self.columns.fill(batch, self.usable_groups))
        return self._batch

    async def _prepare_step(self, batch: Batch) -> Batch:
        """Add the columns that depend on the current weights."""
        outputs = require_token_outputs(await self.learner.score(batch)) if self.algorithm.needs_step_outputs else None
        return self.algorithm.prepare_step(batch, outputs)
