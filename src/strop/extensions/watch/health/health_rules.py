"""What can be seen to be wrong with a run in the metrics of its steps, although nothing fails.

A rule holds after ``steps`` steps in a row in which its condition holds. The rules that judge rewards are for runs that learn from them:
in distillation equal rewards, short completions and a low entropy are as they should be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strop.endings import Ending, Who

StepMetrics = Mapping[str, float]

LOW_ENTROPY = 0.01  # nats per token
LARGE_KL = 1.0  # nats per token
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
        condition=lambda step: sum_failures(step, Who.INFRASTRUCTURE) > 0.1,
        message="more than 10 % of the rollouts of {steps} steps failed by no fault of the policy, and were left out "
        "(train/failures/ENDING has the causes). Mend what fails, or run fewer episodes at a time",
    ),
    HealthRule(
        name="policy_fails",
        steps=5,
        condition=lambda step: sum_failures(step, Who.POLICY) > 0.5,
        message="more than half of the rollouts of {steps} steps crashed or ran out of time, which counts as the policy's failure "
        "(train/failures/crash, train/failures/time). If the agent or its machine is at fault, mend that, or raise its time limit",
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
