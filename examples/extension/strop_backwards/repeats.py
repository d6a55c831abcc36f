"""A listener: the share of a step's answers that another rollout of the step gave too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from strop.config import RolloutRunConfig
from strop.runs.monitors.run_listeners import RunSetup
from strop.trainer.listeners import RunListener, StepView
from strop_backwards.repeats_config import RepeatsConfig


class Repeats(RunListener):
    name = "repeats"

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        counts = Counter(rollout.content for group in step.groups for rollout in group.rollouts)
        return {"train/repeated_answers": sum(count for count in counts.values() if count > 1) / counts.total()}


def make_repeats(setup: RunSetup) -> Repeats | None:
    config = setup.config
    return Repeats() if isinstance(config, RolloutRunConfig) and RepeatsConfig.of(config).enabled else None
