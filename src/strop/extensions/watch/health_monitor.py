"""What can be seen to be wrong with a run in the metrics of its steps, although nothing fails.

A rule holds after ``steps`` steps in a row in which its condition holds. The rules that judge rewards are for runs that learn from them:
in distillation equal rewards, short completions and a low entropy are as they should be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.config import RolloutRunConfig
from strop.endings import Ending, Who
from strop.environments.rewards import RewardMark
from strop.extensions.policy_gradients.group_credit import DecoupledRewards
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.dry_run.examine import find_single_turns
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.runs.tasks import list_reward_marks
from strop.stopping import EndRun
from strop.trainer.listeners import RunListener
from strop.trainer.run import TrainOptions
from strop.trainer.step_view import StepView

StepMetrics = Mapping[str, float]

LOW_ENTROPY = 0.01  # nats per token
LARGE_KL = 1.0  # nats per token
USUAL_FAILURES = "usual_failures"  # the share of failures in earlier steps, which the monitor adds to the metrics that rules see
MOST_METRICS = 1000  # names of environments, in one step
TROUBLESHOOTING = "docs/troubleshooting.md"


@dataclass(frozen=True)
class HealthFinding:
    """Something that is wrong with a run. ``name`` is a heading of the page on troubleshooting."""

    name: str
    message: str
    logged: bool = True  # as a metric of the steps; False: it is about how the run will end, not about its steps

    def __str__(self) -> str:
        return f"warning: {self.message} ({TROUBLESHOOTING}#{self.name})"


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """A condition on the metrics of a step, and what to say once it has held for ``steps`` steps in a row.

    In ``message``, {steps} is that number, {section} the training section and {m[train/reward]} a metric of the last step.
    """

    name: str  # logged as health/NAME
    steps: int
    condition: Callable[[StepMetrics], bool]
    message: str
    judges_rewards: bool = False  # not for runs that learn from something else

    def describe(self, step_metrics: StepMetrics, section: str) -> HealthFinding:
        return HealthFinding(self.name, self.message.format(steps=self.steps, section=section, m=step_metrics))


def _value(step_metrics: StepMetrics, name: str) -> float:
    """Return a metric; NaN, for which no comparison holds, if the step does not have it."""
    return step_metrics.get(f"train/{name}", math.nan)


def rewards_are_equal(step_metrics: StepMetrics) -> bool:
    return _value(step_metrics, "reward_min") == _value(step_metrics, "reward_max")


def has_no_signal(step_metrics: StepMetrics) -> bool:
    """Whether no group has rewards that vary, and the algorithm makes no advantage of that."""
    return _value(step_metrics, "groups_without_signal") == 1 and _value(step_metrics, "advantages_abs") < 1e-6


def skips_all_steps(step_metrics: StepMetrics) -> bool:
    """Whether a learner skipped all its optimizer steps."""
    return any(_value(step_metrics, f"{learner}steps_skipped_for_nonfinite_gradient") == 1 for learner in ("", "value_"))


def sum_failures(step_metrics: StepMetrics, who: Who) -> float:
    """Return the share of the rollouts that failed, of those failures that ``who`` can cause. Cancelled ones did not fail."""
    endings = [ending for ending in Ending if ending.who == who and ending != Ending.ABORTED]
    return sum(step_metrics.get(f"train/failures/{ending}", 0.0) for ending in endings)


def infrastructure_fails(step_metrics: StepMetrics) -> bool:
    return sum_failures(step_metrics, Who.INFRASTRUCTURE) > 0.1


def policy_fails(step_metrics: StepMetrics) -> bool:
    return sum_failures(step_metrics, Who.POLICY) > 0.5


def failures_rise(step_metrics: StepMetrics) -> bool:
    """Whether more than 5 % of the rollouts failed, and more than three times as many as in earlier steps; a rate that is high in any case
    has a rule of its kind.
    """
    if infrastructure_fails(step_metrics) or policy_fails(step_metrics):
        return False
    return share_of_failures(step_metrics) > max(0.05, 3 * step_metrics[USUAL_FAILURES])


def share_of_failures(step_metrics: StepMetrics) -> float:
    return sum(sum_failures(step_metrics, who) for who in Who)


def has_many_metrics(step_metrics: StepMetrics) -> bool:
    """Whether environments set too many metrics of different names for files and services."""
    return sum(name.startswith("train/environments/") for name in step_metrics) > MOST_METRICS


RULES = (
    HealthRule(
        name="constant_rewards",
        steps=5,
        condition=rewards_are_equal,
        message="all rewards of a step have been equal for {steps} steps, now {m[train/reward]:.4g}, so no rollout is better than another "
        "and nothing is learnt. At the lowest reward, the checker misses right answers or the task is too hard; at the highest, it is "
        "solved. Read some rollouts, then change the reward, the prompt or the data",
        judges_rewards=True,
    ),
    HealthRule(
        name="no_signal",
        steps=5,
        condition=lambda step: has_no_signal(step) and not rewards_are_equal(step),
        message="no group has had rewards that vary for {steps} steps: each prompt is solved always or never, so all advantages are 0. Set "
        "{section}.use_dynamic_sampling=true, raise {section}.num_generations_per_prompt or policy.generation.temperature, or change the "
        "data",
        judges_rewards=True,
    ),
    HealthRule(
        name="zero_gradient",
        steps=5,
        condition=lambda step: _value(step, "grad_norm") == 0 and not has_no_signal(step) and not rewards_are_equal(step),
        message="the gradient norm has been exactly 0 for {steps} steps, so the weights do not change. Either the loss counts no token "
        "(masks, filters, data without loss tokens) or it is saturated (a hinge loss whose margin is reached, clipping)",
    ),
    HealthRule(
        name="skipped_steps",
        steps=3,
        condition=skips_all_steps,
        message="all optimizer steps of {steps} steps were skipped, since the gradient is not finite, so the weights do not change. Lower "
        "policy.optimizer.kwargs.lr and policy.max_grad_norm, and start again from a checkpoint before that",
    ),
    HealthRule(
        name="entropy_collapsed",
        steps=5,
        condition=lambda step: _value(step, "entropy") < LOW_ENTROPY and not rewards_are_equal(step),
        message="the entropy has been below 0.01 nats per token for {steps} steps, now {m[train/entropy]:.2g}: the policy samples the same "
        "answers again and finds no better ones. Lower policy.optimizer.kwargs.lr, raise loss_fn.ratio_clip_max or "
        "loss_fn.entropy_bonus, or start again from an earlier checkpoint",
        judges_rewards=True,
    ),
    HealthRule(
        name="kl_exploded",
        steps=3,
        condition=lambda step: _value(step, "kl_penalty") > LARGE_KL,
        message="the policy has been more than 1 nat per token away from the reference for {steps} steps, now {m[train/kl_penalty]:.3g} "
        "(train/kl_penalty): it no longer writes what the model wrote. Lower policy.optimizer.kwargs.lr, or raise "
        "loss_fn.reference_policy_kl_penalty",
    ),
    HealthRule(
        name="all_truncated",
        steps=3,
        condition=lambda step: _value(step, "truncated") == 1,
        message="every rollout of {steps} steps was cut off by a length limit: no answer was ever finished. Raise "
        "policy.generation.max_new_tokens and policy.max_total_sequence_length, or check that the model's end-of-turn token is a stop "
        "token (policy.generation.stop_token_ids)",
        judges_rewards=True,
    ),
    HealthRule(
        name="mostly_truncated",
        steps=5,
        condition=lambda step: 0.5 < _value(step, "truncated") < 1,
        message="more than half of the rollouts have been cut off by a length limit for {steps} steps, now {m[train/truncated]:.0%}. Raise "
        "policy.generation.max_new_tokens, or set {section}.overlong_filtering=true, which leaves them out of the loss",
        judges_rewards=True,
    ),
    HealthRule(
        name="infrastructure_fails",
        steps=3,
        condition=infrastructure_fails,
        message="more than 10 % of the rollouts of {steps} steps failed by no fault of the policy, and were left out "
        "(train/failures/ENDING has the causes). Mend what fails, or run fewer episodes at a time",
    ),
    HealthRule(
        name="policy_fails",
        steps=5,
        condition=policy_fails,
        message="more than half of the rollouts of {steps} steps crashed or ran out of time, which counts as the policy's failure "
        "(train/failures/crash, train/failures/time). If the agent or its machine is at fault, mend that, or raise its time limit",
    ),
    HealthRule(
        name="failures_rise",
        steps=3,
        condition=failures_rise,
        message="for {steps} steps more than three times as many rollouts failed as before, where {m[usual_failures]:.1%} did. "
        "train/failures/ENDING has the causes, and strop view the tasks",
    ),
    HealthRule(
        name="many_metrics",
        steps=1,
        condition=has_many_metrics,
        message=f"environments set more than {MOST_METRICS} metrics of different names in one step. Each name is a separate curve in "
        "every tracker, and services limit how many there are: keep what differs for each task, such as its id, out of the names of "
        "rollout.metrics",
    ),
)


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
    usual_failures: float | None = None  # share of rollouts, averaged over about 20 steps

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
        step_metrics = self._count(step_metrics)
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

    def _count(self, step_metrics: StepMetrics) -> StepMetrics:
        """Count for how long conditions have held. Return the metrics that they are about."""
        share = share_of_failures(step_metrics)
        usual = share if self.usual_failures is None else self.usual_failures
        self.usual_failures = usual + 0.05 * (share - usual)
        step_metrics = {**step_metrics, USUAL_FAILURES: usual}
        for rule in self.rules:
            self.streaks[rule.name] = self.streaks.get(rule.name, 0) + 1 if rule.condition(step_metrics) else 0
        self.skipped = self.skipped + 1 if skips_all_steps(step_metrics) else 0
        return step_metrics

    def _say(self, finding: HealthFinding, tracker: Tracker) -> None:
        if finding.name not in {said.name for said in self.findings}:
            self.findings.append(finding)
            tracker.note(str(finding))


def make_health(setup: RunSetup) -> HealthMonitor:
    limit = setup.config.training.max_skipped_steps_in_a_row
    return HealthMonitor(section=setup.config.section, max_skipped_steps=limit, setup=setup)
