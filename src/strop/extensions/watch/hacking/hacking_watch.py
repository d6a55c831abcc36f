"""The monitor of reward hacking as a listener of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config import RolloutRunConfig
from strop.extensions.watch.hacking.hacking_monitor import DETECTORS, HackingMonitor
from strop.extensions.watch.hacking.held_out_grader import VerifierGrader, make_grader
from strop.extensions.watch.hacking.monitor_config import MonitorConfig
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.runs.monitors.run_listeners import RunSetup
from strop.trainer.listeners import RunListener
from strop.trainer.step_view import StepView


@dataclass(kw_only=True)
class HackingWatch(RunListener):
    """Applies the reward hacking detectors, and stores which rollouts they flag."""

    name = "hacking"
    monitor: HackingMonitor
    store: RolloutStore

    async def on_start(self, step: int, tracker: Tracker) -> None:
        """Raises RewardHacked, because a run that was stopped for an alarm is not continued."""
        self.monitor.check_stop()

    async def on_step(self, step: StepView) -> dict[str, float]:
        logged = await self.monitor.after_step(step.step, step.groups, step.tracker)
        self.store.flag(self.monitor.flags)
        return logged

    async def on_log(self, step: StepView) -> dict[str, float]:
        """Raises RewardHacked."""
        self.monitor.check_stop()
        return {}

    async def state_dict(self) -> dict[str, Any]:
        await self.monitor.settle()  # the state has the grades of this step
        return self.monitor.state()

    def load_state_dict(self, state: Any) -> None:
        self.monitor.restore(state)


def make_hacking_watch(setup: RunSetup) -> HackingWatch | None:
    """Make the watch as the section ``monitor`` says. Raises EnvironmentConfigError for a grader that cannot be made."""
    config = setup.config
    if not isinstance(config, RolloutRunConfig) or not (section := MonitorConfig.of(config)).active:
        return None
    judges = [make_grader(each, "monitor.judges") for each in section.judges]
    second = None if section.second_grader is None else make_grader(section.second_grader, "monitor.second_grader")
    for grader in (second, *judges):
        if isinstance(grader, VerifierGrader):
            grader.verifier.prepare()
    monitor = HackingMonitor(
        detectors=[DETECTORS[name]() for name in section.active],
        false_alarm_rate=section.false_alarm_rate,
        stop_on=section.stop_on,
        second_grader=second,
        judges=(judges[0], judges[-1]) if judges else None,
        graded_samples=section.graded_samples,
        log_dir=config.logger.log_dir,
    )
    return HackingWatch(monitor=monitor, store=setup.store)
