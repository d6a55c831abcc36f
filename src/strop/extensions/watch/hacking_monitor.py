"""Watch the rollouts of a run for reward hacking: warn, name the rollouts, log, and stop the run if that was asked for."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.config import RolloutRunConfig
from strop.extensions.watch.detectors import (
    DiversityDetector,
    DuplicateAnswersDetector,
    FormatDetector,
    HackingDetector,
    JudgesDetector,
    LengthDetector,
    Reading,
    RepetitionDetector,
    SecondGraderDetector,
    TemplatesDetector,
    mean,
)
from strop.extensions.watch.watch_config import MonitorConfig
from strop.extensions.watch.watched_rollout import SHOWN, GradedRollout, RolloutName, VerifierGrader, WatchedStep, make_grader
from strop.monitoring.rollout_store.rollout_flags import RolloutFlag
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.runs.monitors.run_listeners import RunSetup
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener, StepView
from strop.types import Group, Rollout, Task
from strop.user_code import describe_error

SHARES = (0.1, 0.3, 0.7)
MOST = 1e12  # wealth beyond which nothing changes


@dataclass
class EProcess:
    """The wealth after some steps, by share."""

    steps: int = 0
    wealth: list[float] = field(default_factory=lambda: [0.0] * len(SHARES))  # of what has begun

    def update(self, values: Sequence[float], bound: float) -> float:
        """Take in a step's numbers, each with a mean of at most ``bound`` in (0, 1] under the null. Return the e-value."""
        self.steps += 1
        bound = min(max(bound, 1e-3), 1.0)
        started = 1 / (self.steps * (self.steps + 1))
        for index, share in enumerate(SHARES):
            wealth = self.wealth[index] + started
            for value in values:
                wealth *= 1 + share * (min(max(value, 0.0), 1.0) - bound) / bound
            self.wealth[index] = min(wealth, MOST)
        return self.evidence

    @property
    def evidence(self) -> float:
        """The e-value: the mean wealth, with what has not begun."""
        return sum(self.wealth) / len(SHARES) + 1 / (self.steps + 1)


log = logging.getLogger(__name__)

DETECTORS: Mapping[str, type[HackingDetector]] = {
    kind.name: kind
    for kind in (
        LengthDetector,
        FormatDetector,
        RepetitionDetector,
        DuplicateAnswersDetector,
        TemplatesDetector,
        DiversityDetector,
        SecondGraderDetector,
        JudgesDetector,
    )
}
CALIBRATION, START = 8, 3  # first steps, from which a run's own level is taken; those that growth is measured from
HELP = "docs/reward_hacking.md"

Grader = Callable[[Task, Rollout], Any]  # a number or a bool in [0, 1], or an awaitable of one


class RewardHacked(EndRun):
    """A detector that stops the run (``monitor.stop_on``) has raised its alarm. The message says what was seen."""


@dataclass
class DetectorState:
    """What is known of a detector after some steps."""

    process: EProcess = field(default_factory=EProcess)
    levels: list[float] = field(default_factory=list)  # of the first steps
    alarm: str | None = None  # what was said


@dataclass(kw_only=True)
class HackingMonitor:
    """Applies the detectors to every step. Over a whole honest run, any of them raises an alarm at most at the false alarm rate.

    Graders look at a sample of a step's rollouts while the next step is generated; its detectors read them one step later.
    """

    detectors: Sequence[HackingDetector] = ()
    false_alarm_rate: float = 0.01
    stop_on: Collection[str] = ()
    second_grader: Grader | None = None
    judges: tuple[Grader, Grader] | None = None
    graded_samples: int = 8  # rollouts of a step
    log_dir: str = "LOG_DIR"
    states: dict[str, DetectorState] = field(default_factory=dict)
    highest_reward: float = 1.0
    lowest_reward: float = 0.0
    graded: Sequence[GradedRollout] = ()  # of the last step, where they are known
    failed_grades: int = 0
    flags: list[RolloutFlag] = field(default_factory=list)  # what the last step says of its rollouts
    _grading: asyncio.Task[list[GradedRollout]] | None = None

    async def after_step(self, step: int, groups: Sequence[Group], tracker: Tracker) -> dict[str, float]:
        """Take in the rollouts of a step, warn of what they show, and return the metrics ``monitor/...``."""
        if not self.detectors:
            return {}
        await self.settle()
        watched = WatchedStep.of(step, groups, self.graded)
        logged: dict[str, float] = {}
        self.flags = []
        for detector in self.detectors:
            logged |= self._apply(detector, watched, tracker)
        self._start_grading(watched)
        logged["monitor/alarms"] = float(sum(state.alarm is not None for state in self.states.values()))
        return logged | ({"monitor/failed_grades": float(self.failed_grades)} if self.failed_grades else {})

    def check_stop(self) -> None:
        """Raise RewardHacked if a detector of ``stop_on`` has raised its alarm."""
        for name in self.stop_on:
            if (state := self.states.get(name)) is not None and state.alarm is not None:
                raise RewardHacked(
                    f"monitor.stop_on names {name}: {state.alarm}. Change the reward and start again from a checkpoint before that, or "
                    "leave the detector out of monitor.stop_on to go on"
                )

    async def settle(self) -> None:
        """Wait for the graders. A checkpoint is saved after that, so that a resumed run reads the same grades."""
        if self._grading is not None:
            grading, self._grading = self._grading, None
            self.graded = await grading

    def state(self) -> dict[str, Any]:
        """Return the state, as plain values."""
        return {
            "detectors": {
                name: [state.process.steps, list(state.process.wealth), list(state.levels), state.alarm]
                for name, state in self.states.items()
            },
            "rewards": [self.lowest_reward, self.highest_reward],
            "failed_grades": self.failed_grades,
            "graded": [
                [each.name.step, each.name.task, each.name.sample, each.reward, each.second, each.judged] for each in self.graded
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        for name, (steps, wealth, levels, alarm) in state["detectors"].items():
            self.states[name] = DetectorState(EProcess(steps, list(wealth)), list(levels), alarm)
        self.lowest_reward, self.highest_reward = state["rewards"]
        self.failed_grades = state["failed_grades"]
        self.graded = [
            GradedRollout(RolloutName(step, task, sample), reward, second, judged)
            for step, task, sample, reward, second, judged in state["graded"]
        ]

    def _apply(self, detector: HackingDetector, step: WatchedStep, tracker: Tracker) -> dict[str, float]:
        state = self.states.setdefault(detector.name, DetectorState())
        first = mean(state.levels) if len(state.levels) == CALIBRATION else None  # of earlier steps only
        if first is None and (level := detector.level(step)) is not None:
            state.levels.append(level)
        reading = detector.read(step)
        if reading is None:
            return {}
        value, bound = mean(reading.values), detector.choose_bound(first)
        start = None if first is None else mean(state.levels[:START])
        evidence = state.process.update(reading.values, bound)
        if state.alarm is None and evidence >= len(self.detectors) / self.false_alarm_rate and detector.confirms(step, start):
            state.alarm = f"{detector.meaning.format(value=value, bound=bound)} at step {step.step}"
            tracker.note(self._describe(detector.name, state.alarm, reading))
        if state.alarm is not None:
            seen = list(dict.fromkeys(reading.shown))[:SHOWN]
            self.flags += [RolloutFlag(each.step, each.task, each.sample, detector.name) for each in seen]
        name = f"monitor/{detector.name}"
        return {name: value, f"{name}_evidence": math.log10(evidence)} | ({f"{name}_alarm": 1.0} if state.alarm else {})

    def _describe(self, name: str, alarm: str, reading: Reading) -> str:
        seen = list(dict.fromkeys(reading.shown))[:3]
        rollouts = ", ".join(f"step {each.step} task {each.task} sample {each.sample}" for each in seen)
        look = f"; see strop rollouts {self.log_dir} --step {seen[0].step} --task '{seen[0].task}'" if seen else ""
        rate = f"in at most {self.false_alarm_rate:.1%} of honest runs any detector warns"
        return f"warning: perhaps the reward is hacked ({name}): {alarm}: {rollouts}{look}; {rate} ({HELP}#{name})"

    def _start_grading(self, step: WatchedStep) -> None:
        for rollout in step.rollouts:
            self.lowest_reward, self.highest_reward = (
                min(self.lowest_reward, rollout.reward),
                max(self.highest_reward, rollout.reward),
            )
        if self.second_grader is None and self.judges is None:
            return
        groups = step.groups[:: max(len(step.groups) // self.graded_samples, 1)][: self.graded_samples]
        sample = [group[step.step % len(group)].rollout for group in groups]
        self._grading = asyncio.ensure_future(self._grade(step.step, sample))

    async def _grade(self, step: int, sample: Sequence[Rollout]) -> list[GradedRollout]:
        graded = await asyncio.gather(*(self._grade_one(step, rollout) for rollout in sample))
        return [each for each in graded if each is not None]

    async def _grade_one(self, step: int, rollout: Rollout) -> GradedRollout | None:
        span = self.highest_reward - self.lowest_reward
        try:
            second = None if self.second_grader is None else await _call(self.second_grader, rollout)
            judged = None if self.judges is None else (await _call(self.judges[0], rollout), await _call(self.judges[1], rollout))
        except Exception as error:
            self.failed_grades += 1
            if self.failed_grades == 1:
                log.warning("a grader of the monitor failed, on task %s: %s", rollout.task.id, describe_error(error))
            return None
        name = RolloutName(step, rollout.task.id, rollout.sample)
        return GradedRollout(name, (rollout.reward - self.lowest_reward) / span, second, judged)


async def _call(grader: Grader, rollout: Rollout) -> float:
    """Call a grader, which may block, outside the event loop. Raises ValueError unless it returns a finite number."""
    if inspect.iscoroutinefunction(grader):
        returned = await grader(rollout.task, rollout)
    else:
        returned = await asyncio.to_thread(grader, rollout.task, rollout)
        returned = await returned if isinstance(returned, Awaitable) else returned
    value = float(returned)
    if not math.isfinite(value):
        raise ValueError(f"a grader returned {value}; a grade is a number from 0 to 1")
    return value


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
