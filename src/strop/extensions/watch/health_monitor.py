"""Applies the rules of health to a run, and looks for what is wrong before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.config import RolloutRunConfig
from strop.environments.rewards import RewardMark
from strop.extensions.policy_gradients.group_credit import DecoupledRewards
from strop.extensions.watch.final_answers import normalize_answer
from strop.extensions.watch.health_rules import (
    RIGHT_UNREWARDED,
    SAME,
    SAME_EXPECTED,
    HealthFinding,
    HealthState,
    StepMetrics,
    skips_all_steps,
)
from strop.extensions.watch.watched_rollout import WatchedStep
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.dry_run.examine import find_single_turns
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.runs.tasks import list_reward_marks
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener, StepView
from strop.trainer.run import TrainOptions

UNLIMITED_STEPS = 1_000_000  # from here on, a number of steps is no limit that somebody chose


def find_at_start(setup: RunSetup) -> Iterator[HealthFinding]:
    """Yield what is wrong with a run whose options are known."""
    config, source = setup.config, setup.source
    if isinstance(config, RolloutRunConfig) and isinstance(source, SampledSource):
        environments = {component.name: component.environment for component in source.train.components}
        for message in find_single_turns(environments, config.rollout_training.max_rollout_turns, config.section):
            yield HealthFinding("single_turn", message)
        advantage = getattr(setup.algorithm, "advantage", None)
        if isinstance(advantage, DecoupledRewards):
            weights = advantage.weights if isinstance(advantage.weights, Mapping) else {}
            yield from check_reward_weights(list_reward_marks(config), weights, "algorithm.kwargs.advantage.weights")
    yield from check_validation(source.options, source.size, held_out=bool(config.data.validation_entries))
    yield from check_epochs(source.options, source.size, config.training.max_num_epochs)


def check_reward_weights(
    marks: Mapping[str, Mapping[str, RewardMark]], weights: Mapping[str, float], named: str
) -> Iterator[HealthFinding]:
    """Check that no environment weighs its rewards for an algorithm with its own ``weights``, which are set at the key ``named``."""
    for alias, rewards in marks.items():
        ignored = [described for name, mark in rewards.items() if (described := _describe_ignored(name, mark, weights))]
        if ignored:
            yield HealthFinding(
                "ignored_weights",
                f"env.{alias} has {'; '.join(ignored)}, but this algorithm normalizes each reward by itself and weighs it by {named}, so "
                f"that has no effect; set {named}, or choose an algorithm that learns from the sum, such as grpo",
            )


def _describe_ignored(name: str, mark: RewardMark, weights: Mapping[str, float]) -> str:
    """Return what does not reach the algorithm of a reward, empty if nothing is lost."""
    if mark.schedule is not None:
        return f"a schedule for the weight of {name}"
    if mark.weight not in (0.0, 1.0, weights.get(name)):
        return f"the weight {mark.weight:g} for {name}"
    left_out = next((gate.reward for gate in mark.gates if gate.otherwise is None), None)
    return "" if left_out is None else f"a gate that leaves {name} out where {left_out} is low, which counts as 0"


def check_validation(options: TrainOptions, groups: int | None, *, held_out: bool) -> Iterator[HealthFinding]:
    """Check that held-out data is used. ``groups``: all that the run may read, None if unbounded."""
    steps = _count_steps(options, groups)
    first = max(options.val_period, options.val_start_at)
    periodic = options.val_period > 0 and (steps is None or -(-first // options.val_period) * options.val_period <= steps)
    if held_out and not (periodic or options.val_at_start or options.val_at_end):
        why = f"this run has at most {steps} steps" if options.val_period else "val_at_start and val_at_end are false"
        yield HealthFinding(
            "never_validated",
            f"validation data is held out, but never used: {options.section}.val_period is {options.val_period}, and {why}; set "
            f"{options.section}.val_at_end=true or a smaller val_period, or train on these rows too "
            "(data.train.split_validation_size=0, data.validation=null)",
        )


def check_epochs(options: TrainOptions, groups: int | None, max_epochs: int | None) -> Iterator[HealthFinding]:
    steps = None if groups is None else groups // options.groups_per_step
    if steps and max_epochs is not None and steps < options.max_steps < UNLIMITED_STEPS:
        needed = -(-options.max_steps * options.groups_per_step * max_epochs // max(groups or 1, 1))
        yield HealthFinding(
            "epochs_end_first",
            f"{options.section}.max_num_epochs={max_epochs} ends this run after {steps} of {options.section}.max_num_steps="
            f"{options.max_steps} steps, when the data is used up; set {options.section}.max_num_epochs={needed} (or null) for all steps",
            logged=False,
        )


def _count_steps(options: TrainOptions, groups: int | None) -> int | None:
    """Return the largest number of steps of a run; None if it is not limited."""
    limits = [options.max_steps] if options.max_steps < UNLIMITED_STEPS else []
    limits += [] if groups is None else [groups // options.groups_per_step]
    return min(limits, default=None)


FEWEST = 8  # answers from which on their frequency says something


def read_answers(step: WatchedStep) -> dict[str, float]:
    """Return ``answers/...``: the share of the most frequent final answer, that of the most frequent reference, and of answers that equal
    their reference the share that got the lowest reward. Without a reference the answer is the whole text, and each task expects its own.
    """
    some = [rollout for group in step.some_by_task for rollout in group]
    if len(some) < FEWEST:
        return {}
    pairs = [(each, normalize_answer(each.rollout.task.answer)) for each in some]
    said = [each.answer if reference else each.text.strip()[-2000:] for each, reference in pairs]
    expected = [reference or each.rollout.task.id for each, reference in pairs]
    most = {name: Counter(texts).most_common(1)[0] for name, texts in ((SAME, said), (SAME_EXPECTED, expected))}
    metrics = {name: count / len(some) if text else 0.0 for name, (text, count) in most.items()}
    right = [each.reward for each, reference in pairs if reference and each.answer == reference]
    if len(right) >= FEWEST // 2:
        lowest = min(0.0, *(each.reward for each in some))
        metrics[RIGHT_UNREWARDED] = sum(reward <= lowest for reward in right) / len(right)
    return metrics


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
    skipped: int = 0  # steps in a row without any optimizer step

    def __post_init__(self) -> None:
        self.state = HealthState(section=self.section)

    @property
    def warnings(self) -> Sequence[str]:  # type: ignore[override]
        return [str(finding) for finding in self.findings]

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
        samples = self.setup is not None and isinstance(self.setup.config, RolloutRunConfig)
        answers = read_answers(WatchedStep.of(step.step, step.groups)) if samples else {}
        return {**answers, **self.check({**step.metrics, **answers}, step.tracker)}

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
        holding = self.state.find()
        for finding in holding:
            self._say(finding, tracker)
        names = [finding.name for finding in (*self.at_start, *holding) if finding.logged]
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
        self.state.count(step_metrics)
        self.skipped = self.skipped + 1 if skips_all_steps(step_metrics) else 0

    def _say(self, finding: HealthFinding, tracker: Tracker) -> None:
        if finding.name not in {said.name for said in self.findings}:
            self.findings.append(finding)
            tracker.note(str(finding))


def make_health(setup: RunSetup) -> HealthMonitor:
    limit = setup.config.training.max_skipped_steps_in_a_row
    return HealthMonitor(section=setup.config.section, max_skipped_steps=limit, setup=setup)
