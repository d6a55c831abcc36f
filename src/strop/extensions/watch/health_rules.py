"""Rules of health: what can be seen to be wrong with a run in the metrics of its steps, although nothing fails.

A rule holds after ``steps`` steps in a row in which its condition holds. The rules that judge rewards are for runs that learn from them:
in distillation equal rewards, short completions and a low entropy are as they should be. Neither torch nor a run is needed, so the rules
also judge stored metrics.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from strop.endings import Ending, Who

StepMetrics = Mapping[str, float]

Severity = Literal["wrong", "look"]  # nothing is learnt, or it should be looked at

LOW_ENTROPY = 0.01  # nats per token
LARGE_KL = 1.0  # nats per token
# What ``HealthState`` adds to the metrics that rules see: the share of failures in earlier steps, and 1 if one reward is earned alone.
USUAL_FAILURES, LONE_REWARD = "usual_failures", "lone_reward"
SAME, SAME_EXPECTED, RIGHT_UNREWARDED = "answers/same", "answers/same_expected", "answers/right_unrewarded"
REWARDS = "train/rewards/"
MOST_HELD = 200  # times that a finding begins to hold, the last ones
EARLY, RECENT = 5, 10  # steps whose rewards by name are compared
MOST_METRICS = 1000  # names of environments, in one step
TROUBLESHOOTING = "docs/troubleshooting.md"


@dataclass(frozen=True)
class HealthFinding:
    """Something that is wrong with a run. ``name`` is a heading of the page on troubleshooting."""

    name: str
    message: str
    severity: Severity = "look"
    logged: bool = True  # as a metric of the steps; False: it is about how the run will end, not about its steps

    def __str__(self) -> str:
        return f"warning: {self.message} ({TROUBLESHOOTING}#{self.name})"


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """A condition on the metrics of a step, and what to say once it has held for ``steps`` steps in a row.

    In ``message``, {steps} is that number, {section} the training section, {parts} what is said of single rewards and {m[train/reward]} a
    metric of the last step.
    """

    name: str  # logged as health/NAME
    steps: int
    condition: Callable[[StepMetrics], bool]
    message: str
    judges_rewards: bool = False  # not for runs that learn from something else
    severity: Severity = "wrong"
    unless: str = ""  # a rule that says more; where it holds this one does not


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


def answers_are_equal(step_metrics: StepMetrics) -> bool:
    """Whether nearly all rollouts give one answer, which their references do not."""
    return step_metrics.get(SAME, 0.0) >= 0.9 and step_metrics.get(SAME_EXPECTED, 1.0) < 0.6


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
        name="one_answer",
        steps=5,
        condition=answers_are_equal,
        message="{m[answers/same]:.0%} of the rollouts of {steps} steps gave the same final answer, although the questions have different "
        "ones: the policy no longer reads the question. Start again from an earlier checkpoint with a lower policy.optimizer.kwargs.lr, "
        "and look at how often that answer is rewarded",
        judges_rewards=True,
    ),
    HealthRule(
        name="right_unrewarded",
        steps=3,
        condition=lambda step: step.get(RIGHT_UNREWARDED, 0.0) >= 0.9,
        message="{m[answers/right_unrewarded]:.0%} of the answers that equal the reference got the lowest reward for {steps} steps: the "
        "grader is broken, or wants a form (a box, tags) that the prompt does not ask for. Read one of them, and check the reward with "
        "strop env check",
        judges_rewards=True,
    ),
    HealthRule(
        name="one_reward",
        steps=5,
        condition=lambda step: step.get(LONE_REWARD) == 1,
        message="the reward comes from one part alone: {parts}. The policy learns what is easiest to earn. Lower that weight, or gate it "
        "(rewards.NAME.gate), unless the others are penalties that should stay where they are",
        judges_rewards=True,
        severity="look",
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
        condition=lambda step: _value(step, "truncated") > 0.5,
        unless="all_truncated",
        message="more than half of the rollouts have been cut off by a length limit for {steps} steps, now {m[train/truncated]:.0%}. Raise "
        "policy.generation.max_new_tokens, or set {section}.overlong_filtering=true, which leaves them out of the loss",
        judges_rewards=True,
        severity="look",
    ),
    HealthRule(
        name="infrastructure_fails",
        steps=3,
        condition=infrastructure_fails,
        message="more than 10 % of the rollouts of {steps} steps failed by no fault of the policy, and were left out "
        "(train/failures/ENDING has the causes). Mend what fails, or run fewer episodes at a time",
        severity="look",
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
        severity="look",
    ),
    HealthRule(
        name="many_metrics",
        steps=1,
        condition=has_many_metrics,
        message=f"environments set more than {MOST_METRICS} metrics of different names in one step. Each name is a separate curve in "
        "every tracker, and services limit how many there are: keep what differs for each task, such as its id, out of the names of "
        "rollout.metrics",
        severity="look",
    ),
)


@dataclass(kw_only=True)
class HealthState:
    """For how long each condition has held. Follows only from the metrics of the steps so far."""

    section: str = "grpo"
    streaks: dict[str, int] = field(default_factory=dict)  # steps in a row
    usual_failures: float | None = None  # share of rollouts, averaged over about 20 steps
    early: list[Mapping[str, float]] = field(default_factory=list)  # rewards by name of the first steps
    recent: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    last: StepMetrics = field(default_factory=dict)  # of the last step, as rules see it
    parts: str = ""  # which reward alone is earned

    @property
    def rules(self) -> tuple[HealthRule, ...]:
        return tuple(rule for rule in RULES if not rule.judges_rewards or self.section != "distillation")

    def count(self, step_metrics: StepMetrics) -> None:
        """Take in a step."""
        share = share_of_failures(step_metrics)
        usual = share if self.usual_failures is None else self.usual_failures
        self.usual_failures = usual + 0.05 * (share - usual)
        rewards = {name[len(REWARDS) :]: value for name, value in step_metrics.items() if name.startswith(REWARDS)}
        self.recent.append(rewards)
        if len(self.early) < EARLY:
            self.early.append(rewards)
        else:
            self.parts = describe_lone_reward(self.early, self.recent) if len(self.recent) == RECENT else ""
        self.last = _Metrics({**step_metrics, USUAL_FAILURES: usual, LONE_REWARD: float(bool(self.parts))})
        for rule in self.rules:
            self.streaks[rule.name] = self.streaks.get(rule.name, 0) + 1 if rule.condition(self.last) else 0

    def find(self, at_least: int | None = None) -> list[HealthFinding]:
        """Return what is wrong now. ``at_least``: steps in a row from which on a rule holds, in place of its own number."""
        holding = {rule.name: rule for rule in self.rules if self.streaks.get(rule.name, 0) >= (at_least or rule.steps)}
        return [self._describe(rule, at_least or rule.steps) for rule in holding.values() if rule.unless not in holding]

    def _describe(self, rule: HealthRule, steps: int) -> HealthFinding:
        message = rule.message.format(steps=steps, section=self.section, parts=self.parts, m=self.last)
        return HealthFinding(rule.name, message, rule.severity)


class _Metrics(dict[str, float]):
    """Metrics of a step; one that an earlier version did not log is NaN in a message."""

    def __missing__(self, name: str) -> float:
        return math.nan


def describe_lone_reward(early: Iterable[Mapping[str, float]], recent: Iterable[Mapping[str, float]]) -> str:
    """Return which reward is earned while no other is, in words; empty if several are, or one that rises leaves no other low."""
    first, now = _mean_by_name(early), _mean_by_name(recent)
    idle = {name for name, value in now.items() if 0 <= value < 0.5 and value - first.get(name, value) < 0.05}
    earning = [name for name in now if name not in idle]
    if len(earning) != 1 or not idle:
        return ""
    (name,) = earning
    if now[name] - first.get(name, 0.0) < 0.2 and any(now[other] >= 0.05 for other in idle):
        return ""
    others = ", ".join(f"{other} ({now[other]:.2g})" for other in sorted(idle))
    return f"{name}, from {first.get(name, 0.0):.2g} in the first steps to {now[name]:.2g}, while nothing is gained by {others}"


def _mean_by_name(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


@dataclass(frozen=True, kw_only=True)
class HeldFinding:
    """A finding of a whole run, and the steps in which it held: first and last of each time."""

    finding: HealthFinding
    held: Sequence[tuple[int, int]]
    now: bool  # in the last step


@dataclass(kw_only=True)
class StepJudge:
    """Applies the rules to the stored metrics of a run, step after step."""

    state: HealthState
    found: dict[str, HeldFinding] = field(default_factory=dict)
    count: int = 0
    step: int = 0  # the last one

    def take(self, step: int, step_metrics: StepMetrics) -> None:
        self.state.count(step_metrics)
        self.count, self.step = self.count + 1, step
        findings = {finding.name: finding for finding in self.state.find()}
        for name, old in self.found.items():
            if old.now and name not in findings:
                self.found[name] = replace(old, now=False)
        for name, finding in findings.items():
            before = self.found.get(name)
            held = [] if before is None else before.held
            held = [*held[:-1], (held[-1][0], step)] if before is not None and before.now else [*held, (step, step)]
            self.found[name] = HeldFinding(finding=finding, held=held[-MOST_HELD:], now=True)

    def findings(self) -> list[HeldFinding]:
        """Return what was wrong. A run of fewer steps than a rule waits for is judged by all its steps, from two on, and is then only to be
        looked at.
        """
        names = {rule.name for rule in self.state.rules if 2 <= self.count < rule.steps}
        early = [finding for finding in (self.state.find(self.count) if names else ()) if finding.name in names]
        return [
            *self.found.values(),
            *(HeldFinding(finding=replace(each, severity="look"), held=[(self.step, self.step)], now=True) for each in early),
        ]
