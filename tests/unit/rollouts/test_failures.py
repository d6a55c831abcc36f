"""Why rollouts end: each fault lands in its cause, and what the policy cannot cause is left out alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.fakes import FakeGenerator, Letters, make_run, stored_rollouts
from loop.tiny import tiny_tokenizer
from strop.algorithms.policy_gradient.grpo import GRPO
from strop.base_config import validate_section
from strop.data.sources.source import DataSource
from strop.endings import Ending, RolloutFailed, Who, failing_as, find_ending
from strop.environments.base import reward
from strop.environments.handle import LocalEnvironment
from strop.environments.remote import CallResult, EnvironmentServerDied, SessionLost
from strop.environments.scoring.scoring_pool import ScoringError, UnscorableTask
from strop.generation.base import Completion
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, fail, run_group
from strop.rollouts.reward_shaping_config import RewardScalingConfig
from strop.sampling import Sampling, mix_seed
from strop.tools.base import InfrastructureError
from strop.trainer.run import TooManyDropped, TrainOptions
from strop.trainer.train import train
from strop.types import Group, Messages, Rollout, Task, user
from support.rollouts import make_rollout, sampled_turn

TOKENIZER = tiny_tokenizer()
SEED = 7
RULES = EpisodeRules(max_length=200, max_turns=2)


@dataclass(frozen=True, kw_only=True)
class Faulty(Letters):
    """Raises at a place: prompt, session, respond or reward. ``share`` of the rollouts, by their seeds."""

    place: str = ""
    error: Any = None
    part: float = 1.0

    def _visit(self, place: str, rollout: Rollout | None = None) -> None:
        fails = rollout is None or random.Random(rollout.seed).random() < self.part
        if place == self.place and fails:
            raise self.error.with_traceback(None)  # which grows with each raise of one instance

    def prompt(self, task: Task) -> Messages:
        self._visit("prompt")
        return (user("word " * 500),) if self.place == "long" else (user(task.question),)

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        self._visit("respond", rollout)
        return None

    @reward(weight=1.0, accuracy=True)
    def share(self, task: Task, rollout: Rollout) -> float:
        self._visit("reward", rollout)
        return rollout.text.count("a") / max(len(rollout.text), 1)


class FaultyGenerator(FakeGenerator):
    async def generate(self, prompt: Sequence[int], **options: Any) -> Completion:
        raise RuntimeError("CUDA error: an illegal memory access")


def run(environment: Any, *, samples: int = 4, rules: EpisodeRules = RULES, generator: Any = None, index: int = 0) -> Group:
    (task,) = environment.tasks(DataSource(size=1))
    return asyncio.run(
        run_group(
            index,
            "faulty",
            LocalEnvironment(environment),
            task,
            samples=samples,
            generator=generator or FakeGenerator(TOKENIZER),
            template=ChatTemplate(TOKENIZER),
            sampling=Sampling(max_new_tokens=8),
            rules=rules,
            seed=SEED,
        )
    )


# --- causes ---------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a program of the policy crashed": ("respond", RolloutFailed("exit status 139", Ending.CRASH), Ending.CRASH),
    "the policy's program hangs": ("respond", RolloutFailed("60 s", "time"), Ending.TIME),
    "a sandbox vanished": ("respond", RolloutFailed("lost", Ending.SANDBOX), Ending.SANDBOX),
    "a sandbox vanished while it scored": ("reward", RolloutFailed("lost", Ending.SANDBOX), Ending.SANDBOX),
    "a resource failed": ("respond", InfrastructureError("no route to host"), Ending.SERVICE),
    "a server of tools was lost": ("respond", RolloutFailed("closed", Ending.TOOL_SERVER), Ending.TOOL_SERVER),
    "the process of the environment died": ("respond", EnvironmentServerDied("killed"), Ending.ENVIRONMENT),
    "the session was lost": ("respond", SessionLost("its process died"), Ending.ENVIRONMENT),
    "the grader died": ("reward", ScoringError("its worker died twice"), Ending.GRADER),
    "a provider has a limit": ("reward", RolloutFailed("status 429", Ending.PROVIDER_LIMIT), Ending.PROVIDER_LIMIT),
    "the reference cannot be read": ("reward", UnscorableTask("no number"), Ending.BROKEN_TASK),
    "the prompt is too long": ("long", None, Ending.BROKEN_TASK),
    "a bug in the environment": ("respond", KeyError("state"), Ending.ERROR),
    "a bug in the reward": ("reward", ZeroDivisionError(), Ending.ERROR),
    "a crash before the policy wrote anything": ("prompt", RolloutFailed("139", Ending.CRASH), Ending.ERROR),
}


@pytest.mark.parametrize(("place", "error", "ending"), FAULTS.values(), ids=FAULTS)
def test_each_fault_lands_in_its_cause(place: str, error: Exception | None, ending: Ending) -> None:
    group = run(Faulty(place=place, error=error))
    assert [rollout.ending for rollout in group.rollouts] == [ending] * 4
    for rollout in group.rollouts:
        assert rollout.error and rollout.reward == 0 and rollout.counts == (ending.who == Who.POLICY)
    assert bool(group.errors) == (ending.who != Who.POLICY)


def test_an_engine_that_fails_is_no_failure_of_the_policy() -> None:
    group = run(Letters(), generator=FaultyGenerator(TOKENIZER))
    assert {rollout.ending for rollout in group.rollouts} == {Ending.ENGINE}
    assert group.errors[0] == "RuntimeError: CUDA error: an illegal memory access"


def test_an_exception_keeps_its_cause_through_others_and_another_process() -> None:
    inner = InfrastructureError("gone")
    with pytest.raises(ValueError) as raised, failing_as(Ending.CRASH):
        raise ValueError("outer") from inner
    assert find_ending(raised.value) == Ending.SERVICE
    with pytest.raises(ValueError) as raised, failing_as(Ending.CRASH):
        raise ValueError("plain")
    assert find_ending(raised.value) == Ending.CRASH
    with pytest.raises(Exception, match="plain") as sent:
        CallResult.from_exception(raised.value).unwrap()
    assert find_ending(sent.value) == Ending.CRASH
    with pytest.raises(Exception, match="bug") as sent:
        CallResult.from_exception(KeyError("bug")).unwrap()
    assert find_ending(sent.value) is None


# --- rewards --------------------------------------------------------------------------------------------------------------


def test_a_failure_of_the_policy_gets_the_reward_that_is_set_and_no_reward_of_the_environment() -> None:
    crash = Faulty(place="respond", error=RolloutFailed("139", Ending.CRASH))
    scaling = validate_section(
        RewardScalingConfig, {"enabled": True, "source_min": -1, "source_max": 1, "target_min": 0, "target_max": 10}
    )
    for rules, wanted in (
        (RULES, 0.0),
        (replace(RULES, failed_reward=-1.0), -1.0),
        (replace(RULES, failed_reward=-1.0, scaling=scaling), 0.0),
        (replace(RULES, scaling=scaling), 5.0),
    ):
        group = run(crash, rules=rules)
        assert [rollout.reward for rollout in group.rollouts] == [wanted] * 4
        assert all(not rollout.rewards and rollout.policy_turns for rollout in group.rollouts)


def test_without_a_reward_that_is_set_the_environment_scores_what_there_is() -> None:
    group = run(Faulty(place="respond", error=RolloutFailed("139", Ending.CRASH)), rules=replace(RULES, failed_reward=None))
    for rollout in group.rollouts:
        assert rollout.reward == rollout.rewards["share"] == rollout.text.count("a") / len(rollout.text)
        assert rollout.ending == Ending.CRASH and rollout.error == "RolloutFailed: 139" and rollout.counts


@dataclass(frozen=True, kw_only=True)
class Compared(Faulty):
    @reward(weight=1.0)
    def place_of(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        assert all(rollout.error is None for rollout in rollouts)
        return [float(len(rollouts))] * len(rollouts)


def test_rewards_of_a_group_compare_those_that_are_present() -> None:
    group = run(Compared(place="respond", error=InfrastructureError("lost"), part=0.4), samples=8).leave_out_failed()
    assert 2 <= len(group.rollouts) < 8 and len(group.every_rollout) == 8
    assert {rollout.rewards["place_of"] for rollout in group.rollouts} == {float(len(group.rollouts))}


# --- sampling again -------------------------------------------------------------------------------------------------------


def test_a_rollout_that_failed_is_sampled_again_with_the_seed_of_the_attempt() -> None:
    faulty = Faulty(place="respond", error=InfrastructureError("lost"), part=0.5)
    generator = FakeGenerator(TOKENIZER)
    once, again = run(faulty, samples=16), run(faulty, samples=16, rules=replace(RULES, retries=3), generator=generator)
    assert any(rollout.error for rollout in once.rollouts)
    for first, last in zip(once.rollouts, again.rollouts, strict=True):
        attempts = [mix_seed(SEED, 0, last.sample), *(mix_seed(SEED, 0, last.sample, attempt) for attempt in (1, 2, 3))]
        fits = [seed for seed in attempts if random.Random(seed).random() >= 0.5]
        assert first.seed == attempts[0] and last.seed == (fits[0] if fits else attempts[-1])
        assert first.error or torch.equal(first.tokens(), last.tokens())
    repeated = run(faulty, samples=16, rules=replace(RULES, retries=3))
    assert [each.tokens().tolist() for each in repeated.rollouts] == [each.tokens().tolist() for each in again.rollouts]


@pytest.mark.parametrize("error", [RolloutFailed("139", Ending.CRASH), RolloutFailed("no data", Ending.BROKEN_TASK), KeyError()])
def test_only_failures_of_the_infrastructure_are_sampled_again(error: Exception) -> None:
    generator = FakeGenerator(TOKENIZER)
    run(Faulty(place="respond", error=error), rules=replace(RULES, retries=3), generator=generator)
    assert len(generator.requests) == 4


# --- in the loop ----------------------------------------------------------------------------------------------------------


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(**{"max_steps": 20, "groups_per_step": 4, "max_errors_in_a_row": 8, **changes})


@pytest.mark.parametrize(("size", "rate"), [(8, 0.15), (16, 0.05)])
def test_the_share_that_is_thrown_away_is_the_share_that_failed(tmp_path: Path, size: int, rate: float) -> None:
    faulty = Faulty(place="respond", error=InfrastructureError("lost"), part=rate)
    settings = options(max_steps=10, groups_per_step=8)
    trained, _, tracker = make_run(TOKENIZER, tmp_path, settings, environment=faulty, samples=size)
    asyncio.run(train(trained))
    sampled = 10 * 8 * size
    used = sum(batch.num_sequences for batch in trained.learners["policy"].batches)  # type: ignore[attr-defined]
    seeds = [mix_seed(SEED, index, sample) for index in range(10 * 8) for sample in range(size)]
    failed = sum(random.Random(seed).random() < rate for seed in seeds)
    assert sampled - used == failed and failed / sampled == pytest.approx(rate, abs=0.03)
    shares = [tracker.steps[step].get("train/failures/service", 0.0) for step in range(1, 11)]
    assert sum(shares) / 10 == pytest.approx(failed / sampled) and tracker.steps[10]["train/groups_dropped"] == 0
    assert 3 * failed / sampled < 1 - (1 - rate) ** size  # what dropping whole groups would throw away


def test_a_rollout_that_is_left_out_is_stored_with_its_cause(tmp_path: Path) -> None:
    faulty = Faulty(place="respond", error=InfrastructureError("lost"), part=0.3)
    trained, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=3), environment=faulty, samples=8, store="jsonl")
    asyncio.run(train(trained))
    records = [record for step in (1, 2, 3) for record in stored_rollouts(trained).read(step)]
    failed = [record for record in records if record.error is not None]
    assert len(records) == 3 * 4 * 8 and failed
    assert {(record.ending, record.kept, record.dropped_because, record.advantage) for record in failed} == {
        ("service", False, "failed", None)
    }
    assert all(record.kept and record.advantage is not None for record in records if record.error is None)


def test_a_group_with_too_few_rollouts_is_dropped_and_named(tmp_path: Path) -> None:
    faulty = Faulty(place="respond", error=InfrastructureError("the sandbox is gone"), part=0.9)
    few = options(min_rollouts=6, max_errors_in_a_row=4)
    trained, _, _ = make_run(TOKENIZER, tmp_path, few, environment=faulty, samples=8)
    with pytest.raises(TooManyDropped, match="4 groups in a row failed") as raised:
        asyncio.run(train(trained))
    assert "the sandbox is gone" in str(raised.value)


def test_a_run_whose_every_rollout_fails_ends_even_if_the_policy_can_cause_it(tmp_path: Path) -> None:
    """The agent may be broken: with equal rewards there is nothing to learn, and nothing else would say so."""
    faulty = Faulty(place="respond", error=RolloutFailed("exit code 1", Ending.CRASH))
    trained, _, _ = make_run(TOKENIZER, tmp_path, options(), environment=faulty)
    with pytest.raises(TooManyDropped, match="8 groups in a row failed") as raised:
        asyncio.run(train(trained))
    assert "RolloutFailed: exit code 1" in str(raised.value)


@pytest.mark.parametrize(("counted", "learned"), [(True, True), (False, False)])
def test_a_policy_that_may_hang_learns_not_to_only_if_hanging_counts(counted: bool, learned: bool) -> None:
    """A policy over three actions: hang, a good and a bad answer; GRPO's credit, plain ascent."""
    logits, generator = torch.tensor([1.0, 0.0, 0.0], requires_grad=True), torch.Generator().manual_seed(3)
    algorithm = GRPO()
    for _ in range(120):
        loss = torch.zeros(())
        for index in range(4):
            actions = torch.multinomial(logits.softmax(0).detach(), 8, replacement=True, generator=generator)
            rollouts = [
                replace(make_rollout([1], sampled_turn([4]), reward=float(each == 1)), sample=n) for n, each in enumerate(actions)
            ]
            error = RolloutFailed("60 s", Ending.TIME if counted else Ending.SANDBOX)
            hung = [fail(each, error, RULES) if action == 0 else each for each, action in zip(rollouts, actions, strict=True)]
            group = Group(index=index, environment="", version=0, rollouts=tuple(hung)).leave_out_failed()
            if group.errors or len(group.rollouts) < 2:
                continue
            present = actions[[rollout.sample for rollout in group.rollouts]]
            loss = loss - (algorithm.advantages(group).float() * logits.log_softmax(0)[present]).mean() / 4
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
    assert (float(logits.detach().softmax(0)[0]) < 0.05) == learned
