"""What is said to be wrong with a run, and what is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from strop.extensions.watch.health_monitor import HealthMonitor, TooManySkipped, read_answers
from strop.extensions.watch.health_rules import RULES, HealthState, HeldFinding, StepJudge, StepMetrics
from strop.extensions.watch.watched_rollout import WatchedStep
from strop.monitoring.trackers.base import CompositeTracker, NullTracker
from strop.types import Task
from support.rollouts import make_group, make_rollout, sampled_turn

PAGE = Path(__file__).parents[4] / "docs" / "troubleshooting.md"

# A step with which nothing is wrong.
SOUND = {
    "train/reward": 0.5,
    "train/reward_min": 0.0,
    "train/reward_max": 1.0,
    "train/groups_without_signal": 0.5,
    "train/advantages_abs": 0.4,
    "train/grad_norm": 0.3,
    "train/steps_skipped_for_nonfinite_gradient": 0.0,
    "train/entropy": 0.8,
    "train/kl_penalty": 0.01,
    "train/truncated": 0.1,
    "train/failures/aborted": 0.3,
    "train/failures/sandbox": 0.02,
}
CONSTANT = {
    "train/reward": 0.0,
    "train/reward_max": 0.0,
    "train/groups_without_signal": 1.0,
    "train/advantages_abs": 0.0,
    "train/grad_norm": 0.0,
}
WRONG: dict[str, StepMetrics] = {
    "constant_rewards": CONSTANT,
    "no_signal": {"train/groups_without_signal": 1.0, "train/advantages_abs": 0.0, "train/grad_norm": 0.0},
    "zero_gradient": {"train/grad_norm": 0.0},
    "skipped_steps": {"train/steps_skipped_for_nonfinite_gradient": 1.0, "train/grad_norm": float("nan")},
    "entropy_collapsed": {"train/entropy": 0.001},
    "kl_exploded": {"train/kl_penalty": 4.0},
    "all_truncated": {"train/truncated": 1.0},
    "mostly_truncated": {"train/truncated": 0.9},
    "infrastructure_fails": {"train/failures/sandbox": 0.06, "train/failures/engine": 0.06, "train/failures/crash": 0.2},
    "policy_fails": {"train/failures/crash": 0.3, "train/failures/time": 0.3, "train/failures/sandbox": 0.05},
    "failures_rise": {"train/failures/crash": 0.08, "train/failures/error": 0.04},
    "one_answer": {"answers/same": 0.95, "answers/same_expected": 0.3},
    "right_unrewarded": {"answers/right_unrewarded": 1.0},
    "many_metrics": {f"train/environments/mine/task_{number}": 1.0 for number in range(1001)},
}


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def watch(*steps: StepMetrics, section: str = "grpo") -> tuple[list[dict[str, float]], list[str]]:
    """Return what each step logs, and what was said."""
    monitor, tracker = HealthMonitor(section=section, max_skipped_steps=100), Notes()
    return [monitor.check(step, tracker) for step in steps], tracker.notes  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_some_steps_is_said_once_and_logged_while_it_is_wrong(name: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    wrong = {**SOUND, **WRONG[name]}
    logged, said = watch(SOUND, *[wrong] * (rule.steps + 2), SOUND)
    assert logged == [{}] * rule.steps + [{f"health/{name}": 1.0}] * 3 + [{}]
    assert len(said) == 1 and said[0].startswith("warning: ") and f"(docs/troubleshooting.md#{name})" in said[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_sound_step_in_between_starts_the_count_again(name: str) -> None:
    wrong = {**SOUND, **WRONG[name]}
    (steps,) = [rule.steps for rule in RULES if rule.name == name]
    logged, said = watch(*([wrong] * (steps - 1) + [SOUND]) * 3)
    assert not any(logged) and not said


@pytest.mark.parametrize(
    ("what", "rewards", "lone"),
    [
        ("one rises, the other stays", {"brief": (0.1, 0.9), "correct": (0.2, 0.2)}, "brief"),
        ("one was never earned", {"brief": (0.9, 0.9), "correct": (0.0, 0.0)}, "brief"),
        ("both rise", {"brief": (0.1, 0.9), "correct": (0.2, 0.5)}, None),
        ("one is earned always, the other rises", {"format": (1.0, 1.0), "correct": (0.1, 0.6)}, None),
        ("slowly at first", {"format": (0.9, 1.0), "correct": (0.2, 0.22)}, None),
        ("a penalty", {"correct": (0.1, 0.9), "length": (-0.2, -0.2)}, None),
        ("a single reward", {"correct": (0.1, 0.9)}, None),
    ],
)
def test_a_reward_that_is_earned_alone_is_named(what: str, rewards: dict[str, tuple[float, float]], lone: str | None) -> None:
    steps = [
        {**SOUND, **{f"train/rewards/{name}": low + (high - low) * step / 29 for name, (low, high) in rewards.items()}}
        for step in range(30)
    ]
    logged, said = watch(*steps)
    assert logged[-1] == ({} if lone is None else {"health/one_reward": 1.0}), what
    assert len(said) == (lone is not None) and all(f"alone: {lone}, from" in text and "correct (" in text for text in said)


def judge(steps: list[StepMetrics], section: str = "grpo") -> list[HeldFinding]:
    judge = StepJudge(state=HealthState(section=section))
    for step, metrics in enumerate(steps, 1):
        judge.take(step, metrics)
    return judge.findings()


def test_stored_steps_are_judged_as_the_run_was_and_a_short_run_by_all_its_steps() -> None:
    wrong = {**SOUND, "train/truncated": 1.0}
    steps = [SOUND, *[wrong] * 4, SOUND, *[wrong] * 3]
    (truncated,) = judge(steps)
    assert truncated.held == [(4, 5), (9, 9)] and truncated.now and truncated.finding.severity == "wrong"
    assert truncated.finding.name == "all_truncated" and "of 3 steps was cut off" in truncated.finding.message
    assert not judge([*steps, SOUND])[0].now
    (short,) = judge([wrong] * 2)
    assert short.held == [(2, 2)] and short.now and short.finding.severity == "look" and "of 2 steps" in short.finding.message
    assert not judge(steps, "distillation") and not judge([wrong])


def answered(*samples: tuple[str, str, float]) -> dict[str, float]:
    """Read the answers of samples (reference, text, reward), four to a task."""
    groups = []
    for first in range(0, len(samples), 4):
        task = Task(id=f"t{first}", question="", answer=samples[first][0])
        rollouts = [
            replace(make_rollout([1], replace(sampled_turn([2]), text=text), reward=reward), task=task)
            for _, text, reward in samples[first : first + 4]
        ]
        groups.append(make_group(*rollouts))
    return read_answers(WatchedStep.of(1, groups))


def test_answers_are_compared_with_each_other_and_with_their_references() -> None:
    same = [("a", "The answer is B.", 0.0)] * 4 + [("b", "<answer>b</answer>", 1.0)] * 4
    assert answered(*same) == {"answers/same": 1.0, "answers/same_expected": 0.5, "answers/right_unrewarded": 0.0}
    broken = [("a", "well\nA", -1.0)] * 4 + [("b", "c", -1.0)] * 4
    assert answered(*broken) == {"answers/same": 0.5, "answers/same_expected": 0.5, "answers/right_unrewarded": 1.0}
    texts = [("", f"one {index}\nDone.", 0.0) for index in range(8)]  # without references last lines may be equal
    assert answered(*texts) == {"answers/same": 0.125, "answers/same_expected": 0.5}
    assert answered(*texts[:4]) == {}


def test_nearly_all_truncated_is_not_less_than_most() -> None:
    logged, said = watch(*[{**SOUND, "train/truncated": 1.0 - 0.03 * (step % 2)} for step in range(6)])
    assert logged[4:] == [{"health/mostly_truncated": 1.0}] * 2 and len(said) == 1


def test_failures_that_rise_are_told_from_failures_that_are_usual() -> None:
    usual = {**SOUND, "train/failures/crash": 0.2}
    logged, said = watch(*[usual] * 30, *[{**SOUND, "train/failures/crash": 0.3}] * 10)
    assert not any(logged) and not said
    logged, said = watch(*[SOUND] * 5, *[usual] * 60)
    assert logged[7] == {"health/failures_rise": 1.0} and not any(logged[30:]) and len(said) == 1, "until it is usual"
    assert "4.0% did" in said[0]


def test_every_rule_has_a_section_in_the_troubleshooting_page_and_a_test() -> None:
    headings = set(re.findall(r"^### (\w+)$", PAGE.read_text(encoding="utf-8"), re.M))
    others = {"single_turn", "ignored_weights", "never_validated", "epochs_end_first", "tracker_failed", "listener_failed"}
    names = {rule.name for rule in RULES}
    assert headings == names | others and names == WRONG.keys() | {"one_reward"}


@pytest.mark.parametrize(
    ("what", "section", "step"),
    [
        ("a run on recorded data", "dpo", {"train/loss": 0.69, "train/grad_norm": 0.1, "train/accuracy": 0.0, "train/margin": 0.0}),
        ("KTO", "dpo", {"train/loss": 0.5, "train/grad_norm": 0.1, "train/reference_point": 0.0}),
        ("distillation with rewards that are all 0", "distillation",
         {**SOUND, **CONSTANT, "train/grad_norm": 0.2, "train/advantages_abs": 0.1, "train/truncated": 1.0, "train/entropy": 0.001}),
        ("a critic that trains alone", "ppo",
         {key: value for key, value in SOUND.items() if key not in ("train/grad_norm", "train/loss")} | {"train/value_grad_norm": 1.0}),
        ("groups of one rollout with a critic", "ppo", {**SOUND, "train/groups_without_signal": 1.0}),
        ("dynamic sampling", "grpo", {**SOUND, "train/groups_without_signal": 0.0, "train/groups_dropped_by_filter": 50.0}),
        ("a solved task with a little entropy left", "grpo", {**SOUND, "train/entropy": 0.05, "train/groups_without_signal": 0.9}),
        ("metrics that are not numbers", "grpo", dict.fromkeys(SOUND, float("nan"))),
    ],
)  # fmt: skip
def test_nothing_is_said_where_nothing_is_wrong(what: str, section: str, step: StepMetrics) -> None:
    logged, said = watch(*[step] * 30, section=section)
    assert not any(logged) and not said, what


def test_a_tracker_that_failed_is_in_the_metrics_of_those_that_did_not() -> None:
    class Broken(NullTracker):
        def log(self, step: int, metrics: StepMetrics) -> None:
            raise OSError("no network")

    tracker = CompositeTracker([CompositeTracker([Broken(), NullTracker()])])
    monitor = HealthMonitor()
    assert monitor.check(SOUND, tracker) == {}
    tracker.log(1, SOUND)
    assert tracker.failures == ["Broken failed and was off for the rest of this run: OSError: no network"]
    assert monitor.check(SOUND, tracker) == {"health/tracker_failed": 1.0}


def test_one_cause_is_said_once() -> None:
    _, said = watch(*[{**SOUND, **CONSTANT, "train/entropy": 0.0}] * 20)
    assert len(said) == 1


def test_a_resumed_run_counts_on_from_the_steps_before() -> None:
    wrong = {**SOUND, **CONSTANT}
    whole, _ = watch(*[wrong] * 8)
    monitor, tracker = HealthMonitor(), Notes()
    monitor.replay([wrong] * 3)
    assert [monitor.check(wrong, tracker) for _ in range(5)] == whole[3:]  # type: ignore[arg-type]


@pytest.mark.parametrize("learner", ["", "value_"])
def test_a_run_that_skips_every_step_is_stopped_with_the_keys_to_set(learner: str) -> None:
    skipped = {**SOUND, f"train/{learner}steps_skipped_for_nonfinite_gradient": 1.0}
    monitor, tracker = HealthMonitor(section="sft", max_skipped_steps=3), Notes()
    for step in (skipped, skipped, SOUND, skipped, skipped, skipped):
        monitor.check_skipped()
        monitor.check(step, tracker)  # type: ignore[arg-type]
    with pytest.raises(
        TooManySkipped, match=r"last 3 steps was skipped.*sft\.max_skipped_steps_in_a_row.*policy\.optimizer\.kwargs\.lr"
    ):
        monitor.check_skipped()
