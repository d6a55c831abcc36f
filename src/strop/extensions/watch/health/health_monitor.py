"""Watch the metrics of a run: say once what is wrong, mark the steps at which it holds, stop a run that does not train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.extensions.watch.health.health_rules import RULES, HealthFinding, HealthRule, StepMetrics, skips_all_steps
from strop.extensions.watch.health.start_checks import find_at_start
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.monitors.run_listeners import RunSetup
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener
from strop.trainer.step_view import StepView


class TooManySkipped(EndRun):
    """Optimizer steps were skipped for too many steps in a row. The message says why and what to set."""


@dataclass(kw_only=True)
class HealthMonitor(RunListener):
    """Applies the rules to every step.

    Its state follows only from the metrics of the last steps, so a resumed run reads it from ``metrics.jsonl`` (``replay``).
    """

    name = "health"
    section: str = "grpo"
    max_skipped_steps: int = 10  # in a row
    setup: RunSetup | None = None
    at_start: Sequence[HealthFinding] = ()  # what is known to be wrong before the first step
    findings: list[HealthFinding] = field(default_factory=list)  # everything that was said
    streaks: dict[str, int] = field(default_factory=dict)  # for how many steps in a row each condition has held
    skipped: int = 0  # steps in a row without any optimizer step

    @property
    def warnings(self) -> Sequence[str]:  # type: ignore[override]
        return [str(finding) for finding in self.findings]

    @property
    def rules(self) -> tuple[HealthRule, ...]:
        return tuple(rule for rule in RULES if not rule.judges_rewards or self.section != "distillation")

    async def on_start(self, step: int, tracker: Tracker) -> None:
        """Say what is wrong before the first step; take in the earlier steps of a run that continues."""
        if self.setup is not None:
            self.replay(
                logged for step, logged in read_metrics(Path(self.setup.config.logger.log_dir) / METRICS_FILE) if step > 0
            )
            self.at_start = tuple(find_at_start(self.setup))
        for finding in self.at_start:
            self._say(finding, tracker)

    async def on_step(self, step: StepView) -> dict[str, float]:
        return self.check(step.metrics, step.tracker)

    async def on_log(self, step: StepView) -> dict[str, float]:
        """Raises TooManySkipped."""
        self.check_skipped()
        return {}

    def replay(self, steps: Iterable[StepMetrics]) -> None:
        """Take in the metrics of earlier steps without saying anything."""
        for step_metrics in steps:
            self._count(step_metrics)

    def check(self, step_metrics: StepMetrics, tracker: Tracker) -> dict[str, float]:
        """Take in a step and say what has become wrong. Return ``health/NAME`` = 1 for every rule that holds."""
        self._count(step_metrics)
        holding = [rule for rule in self.rules if self.streaks[rule.name] >= rule.steps]
        for rule in holding:
            self._say(rule.describe(step_metrics, self.section), tracker)
        names = [*(finding.name for finding in self.at_start if finding.logged), *(rule.name for rule in holding)]
        names += ["tracker_failed"] if getattr(tracker, "failures", ()) else []  # which its tracker has said
        return {f"health/{name}": 1.0 for name in names}

    def check_skipped(self) -> None:
        """Raise TooManySkipped if no optimizer step was taken for too long."""
        if self.skipped >= self.max_skipped_steps:
            raise TooManySkipped(
                f"every optimizer step of the last {self.skipped} steps was skipped, since its gradient was not finite, so this run does "
                f"not train any more ({self.section}.max_skipped_steps_in_a_row). Lower policy.optimizer.kwargs.lr, and continue from "
                "a checkpoint before that, whose weights are sound"
            )

    def _count(self, step_metrics: StepMetrics) -> None:
        for rule in self.rules:
            self.streaks[rule.name] = self.streaks.get(rule.name, 0) + 1 if rule.condition(step_metrics) else 0
        self.skipped = self.skipped + 1 if skips_all_steps(step_metrics) else 0

    def _say(self, finding: HealthFinding, tracker: Tracker) -> None:
        if finding.name not in {said.name for said in self.findings}:
            self.findings.append(finding)
            tracker.note(str(finding))


def make_health(setup: RunSetup) -> HealthMonitor:
    limit = setup.config.training.max_skipped_steps_in_a_row
    return HealthMonitor(section=setup.config.section, max_skipped_steps=limit, setup=setup)
