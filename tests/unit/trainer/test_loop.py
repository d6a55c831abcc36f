"""The one loop, with fakes for everything that computes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch

from loop.fakes import FakeCheckpoints, FakeLearner, Letters, make_run, run_virtually, stored_rollouts
from loop.tiny import tiny_tokenizer
from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.grpo import GRPO, Reinforce
from strop.environments.base import reward
from strop.learner.client import LogprobColumn, PolicyColumns
from strop.stopping import EarlyStop
from strop.trainer.cadence import check_ending
from strop.trainer.run import TooFewTasks, TooManyDropped, TrainOptions
from strop.trainer.train import collect, train
from strop.trainer.update import update
from support.algorithms import grpo

TOKENIZER = tiny_tokenizer()


def options(**changes):
    return TrainOptions(**{"max_steps": 4, "groups_per_step": 3, **changes})


def trained(run):
    asyncio.run(train(run))
    return run


# --- a step ---------------------------------------------------------------------------------------------------------------


def test_a_run_trains_its_steps_and_publishes_each(tmp_path):
    run, generator, tracker = make_run(TOKENIZER, tmp_path, options())
    trained(run)
    assert run.step == 4 and run.learners["policy"].steps == 4
    assert tracker.order == [1, 2, 3, 4]
    assert generator.events == ["resume 0", *(event for step in range(1, 5) for event in ("drain", f"resume {step}"))]
    assert len(generator.requests) == 4 * 3 * 4


def test_the_learner_sees_the_groups_in_order_and_the_weights_that_sampled_them(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=3))
    trained(run)
    for step, batch in enumerate(run.learners["policy"].batches):
        assert batch.versions.unique().tolist() == [step]
        assert batch.num_groups == 3 and batch.num_sequences == 12


@pytest.mark.parametrize("k", [0, 1, 3])
def test_staleness_is_reported_and_bounded(tmp_path, k):
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=12, max_staleness=k), latency=lambda seed: (seed % 13) / 10)
    run_virtually(train(run))
    found = [tracker.steps[step]["train/staleness_max"] for step in range(1, 13)]
    assert max(found) == k and found[0] == 0


def test_a_stream_that_broke_its_promise_stops_the_run(tmp_path):
    run, generator, _ = make_run(TOKENIZER, tmp_path, options())
    run.step = 2  # the generator still holds version 0

    async def one():
        generator.resume(0)
        await collect(run)

    with pytest.raises(AssertionError, match="2 steps old; the stream allows 0"):
        asyncio.run(one())


def test_the_columns_an_algorithm_requires_are_scored_before_its_credit(tmp_path):
    class Reference:
        async def columns(self, batch, groups):
            assert len(groups) == batch.num_groups
            return {"reference_logprobs": batch.rollout_logprobs - 0.5}

    algorithm = grpo(kl_penalty=0.1, kl_estimator="k1")
    run, _, tracker = make_run(
        TOKENIZER, tmp_path, options(max_steps=1), algorithm=algorithm, scorers={"reference_logprobs": Reference()}
    )
    trained(run)
    assert tracker.steps[1]["train/kl_penalty"] == pytest.approx(0.5, abs=1e-6)


# --- rollouts without a reward ---


@dataclass(frozen=True, kw_only=True)
class Unscored(Letters):
    first_scored: int = 1  # samples before it have no reward

    @reward(weight=1.0, accuracy=True)
    def share(self, task, rollout):
        return None if rollout.sample < self.first_scored else super().share(task, rollout)


@pytest.mark.parametrize("algorithm", [grpo(), grpo(leave_one_out=True, normalize=False), GRPO(objective=Reinforce())])
@pytest.mark.parametrize("first_scored", [1, 2, 3])
def test_a_rollout_that_cannot_be_scored_is_left_out_alone(tmp_path, first_scored, algorithm):
    environment = Unscored(first_scored=first_scored)
    run, _, tracker = make_run(
        TOKENIZER, tmp_path, options(max_steps=1), environment=environment, algorithm=algorithm, store="jsonl"
    )
    trained(run)
    (batch,) = run.learners["policy"].batches
    assert batch.num_groups == 3 and batch.num_sequences == 3 * (4 - first_scored)
    assert tracker.steps[1]["train/unscored"] == 3 * first_scored
    records = stored_rollouts(run).read(1)
    assert {record.sample for record in records if record.dropped_because == "unscored"} == set(range(first_scored))


def test_groups_in_which_nothing_can_be_scored_are_dropped_until_the_run_ends(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=1, max_errors_in_a_row=4), environment=Unscored(first_scored=4))
    with pytest.raises(TooManyDropped, match="a reward returned None for every rollout"):
        trained(run)


# --- filtering --------------------------------------------------------------------------------------------------------------


def test_groups_that_fail_or_do_not_vary_are_replaced_and_counted(tmp_path):
    environment = Letters(broken=(1, 5), constant=(0, 6))
    run, _, tracker = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=2),
        environment=environment,
        algorithm=grpo(drop_constant_groups=True),
        store="jsonl",
        samples=8,
    )
    trained(run)
    first, second = tracker.steps[1], tracker.steps[2]
    assert (first["train/groups_dropped_for_errors"], first["train/groups_dropped_by_filter"]) == (1, 1)
    assert first["train/groups_dropped"] == 2
    records = stored_rollouts(run).read(1)
    assert {record.group for record in records if record.kept} == {2, 3, 4}
    reasons = {record.group: record.dropped_because for record in records if not record.kept}
    assert reasons == {0: "filtered", 1: "error"}
    assert all("the verifier of task 1 is broken" in str(record.error) for record in records if record.group == 1)
    assert all(record.learner_logprobs is None and record.advantage is None for record in records if not record.kept)
    assert second["train/groups_dropped"] == 2
    assert {record.group for record in stored_rollouts(run).read(2) if record.kept} == {7, 8, 9}


def test_a_run_without_filter_trains_on_groups_that_do_not_vary(tmp_path):
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=1), environment=Letters(constant=(0, 1)))
    trained(run)
    assert tracker.steps[1]["train/groups_dropped"] == 0
    assert tracker.steps[1]["train/groups_without_signal"] == pytest.approx(2 / 3)


def test_too_many_errors_in_a_row_stop_the_run_with_the_environments_own_words(tmp_path):
    environment = Letters(broken=tuple(range(2, 100)))
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_errors_in_a_row=5), environment=environment)
    with pytest.raises(TooManyDropped) as caught:
        trained(run)
    message = str(caught.value)
    assert "5 groups in a row failed (grpo.max_errors_in_a_row)" in message
    assert "Letters.share raised ZeroDivisionError on task '6': the verifier of task 6 is broken" in message


def test_errors_that_are_not_in_a_row_do_not_stop_the_run(tmp_path):
    environment = Letters(broken=tuple(range(0, 100, 2)))
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_errors_in_a_row=2), environment=environment)
    trained(run)
    assert run.step == 4 and sum(tracker.steps[step]["train/groups_dropped_for_errors"] for step in range(1, 5)) == 12


def test_too_many_filtered_groups_stop_the_run_and_say_on_which_side_they_are(tmp_path):
    run, _, _ = make_run(
        TOKENIZER,
        tmp_path,
        options(max_groups_per_step=6),
        environment=Letters(constant=tuple(range(100))),
        algorithm=grpo(drop_constant_groups=True),
    )
    with pytest.raises(TooManyDropped) as caught:
        trained(run)
    assert "6 groups were generated and only 0 of the 3 wanted passed the filter" in str(caught.value)
    assert "the mean reward of the dropped ones is 1" in str(caught.value)


def test_as_many_groups_as_allowed_are_enough_if_the_last_one_completes_the_batch(tmp_path):
    run, _, _ = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=1, max_groups_per_step=5),
        environment=Letters(constant=(0, 1)),
        algorithm=grpo(drop_constant_groups=True),
        samples=8,
    )
    assert trained(run).step == 1


# --- the end of the tasks -----------------------------------------------------------------------------------------------------


def test_the_run_ends_with_its_tasks_and_does_then_what_is_due_at_the_end(tmp_path):
    checkpoints = FakeCheckpoints()
    run, _, tracker = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=100, val_at_end=True, save_period=2),
        tasks=10,
        validation=2,
        checkpoints=checkpoints,
    )
    trained(run)
    assert run.step == 3 and "max_num_epochs ended the run after step 3" in tracker.notes[-2]
    assert "the 1 left over are too few" in tracker.notes[-2]
    assert [state.step for state in checkpoints.saved] == [2, 3]
    assert "validation/accuracy" in tracker.steps[3] and "validation/accuracy" in checkpoints.saved[-1].logged
    assert checkpoints.saved[-1].stream.next_index == 9, "a run with more epochs goes on with the task that was left over"


def test_nothing_is_saved_or_validated_twice_at_the_end_of_the_tasks(tmp_path):
    checkpoints = FakeCheckpoints()
    run, generator, tracker = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=100, val_at_end=True, val_period=3, save_period=3),
        tasks=9,
        validation=2,
        checkpoints=checkpoints,
    )
    trained(run)
    assert run.step == 3 and [state.step for state in checkpoints.saved] == [3]
    assert not any("left over" in note for note in tracker.notes)
    assert len(generator.requests) == 9 * 4 + 2 * 2 and tracker.order == [1, 2, 3]


def test_tasks_too_few_for_a_single_step_are_an_error(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(), tasks=2)
    with pytest.raises(TooFewTasks, match=r"2 groups are left, and one step needs 3 .*max_num_epochs"):
        trained(run)


def test_tasks_that_were_all_dropped_are_an_error_that_says_why(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(), tasks=4, environment=Letters(broken=tuple(range(4))))
    with pytest.raises(TooFewTasks, match=r"4 groups were dropped:\n.*the verifier of task"):
        trained(run)


# --- the update -----------------------------------------------------------------------------------------------------------------


def test_the_ratio_is_to_the_policy_before_the_first_step_in_every_epoch_and_mini_batch(tmp_path):
    learner = FakeLearner(shift=0.25)
    run, _, tracker = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=1, groups_per_step=4, steps_per_batch=2, update_epochs=3),
        learners={"policy": learner},
    )
    trained(run)
    assert learner.steps == 6 and learner.scored == 1
    for batch in learner.batches:
        assert torch.equal(batch.column("policy_logprobs"), batch.rollout_logprobs + 0.25)
        assert batch.num_groups == 2 and batch.totals.sequences == 8
    for place, outputs in enumerate(learner.outputs):
        moved = (outputs - learner.batches[place].column("policy_logprobs")).mean()
        assert moved == pytest.approx(0.1 * place, abs=1e-5)
    first, second = learner.batches[0], learner.batches[1]
    assert torch.equal(first.target, learner.batches[2].target) and len(first.rewards) == len(second.rewards)
    assert tracker.steps[1]["train/probs_ratio_max"] == pytest.approx(torch.exp(torch.tensor(0.5)).item(), rel=1e-4)
    assert tracker.steps[1]["train/token_mult_prob_error"] == pytest.approx(torch.exp(torch.tensor(0.25)).item(), rel=1e-5)


def test_one_optimizer_step_needs_no_scoring_pass(tmp_path):
    learner = FakeLearner(shift=0.5)
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=1), learners={"policy": learner})
    trained(run)
    assert learner.scored == 0 and "policy_logprobs" not in learner.batches[0].columns
    assert tracker.steps[1]["train/probs_ratio"] == pytest.approx(1.0)
    assert tracker.steps[1]["train/token_mult_prob_error"] == pytest.approx(torch.exp(torch.tensor(0.5)).item(), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_credit_that_needs_the_policy_before_the_update_shares_its_scoring_pass(tmp_path, steps):
    """A KL term in the reward, measured with that policy: it is 0 where that policy is the reference, whoever sampled."""
    REINFORCE = pytest.importorskip("strop.extensions.policy_gradients.baselines").REINFORCE
    learner = FakeLearner(shift=0.25)
    reference = FakeLearner(shift=0.25)
    run, _, _ = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=1, groups_per_step=4, steps_per_batch=steps),
        algorithm=REINFORCE(kl=Kl(weight=1.0, estimator="k1", place="token_reward")),
        learners={"policy": learner},
        scorers={"policy_logprobs": PolicyColumns(learner), "reference_logprobs": LogprobColumn("reference_logprobs", reference)},
    )
    trained(run)
    assert learner.scored == 1 and learner.steps == steps
    for batch in learner.batches:
        assert torch.equal(batch.advantages, batch.rewards[batch.sequence].float())
        assert torch.equal(batch.column("policy_logprobs"), batch.rollout_logprobs + 0.25)


def test_metrics_of_several_optimizer_steps_are_averaged(tmp_path):
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=1, update_epochs=3))
    trained(run)
    assert tracker.steps[1]["train/grad_norm"] == pytest.approx((1 + 2 + 3) / 3)


@dataclass(frozen=True, kw_only=True)
class ActorCritic(GRPO):
    def losses(self, step):
        return {"policy": self.loss, "value": self.value_loss}

    def value_loss(self, outputs: TokenOutputs, batch):
        value = (outputs.logprobs.sum()) / batch.totals.tokens
        return value, {"loss": metrics.total(value.item())}


def test_several_learners_each_get_their_loss_and_a_step_of_their_own(tmp_path):
    learners = {"policy": FakeLearner(), "value": FakeLearner(shift=3.0)}
    run, _, tracker = make_run(
        TOKENIZER, tmp_path, options(max_steps=2, update_epochs=2), algorithm=ActorCritic(), learners=learners
    )
    trained(run)
    assert learners["policy"].steps == learners["value"].steps == 4
    logged = tracker.steps[2]
    assert logged["train/value_loss"] != logged["train/loss"] and logged["train/value_grad_norm"] == 3.5
    assert logged["train/token_mult_prob_error"] < 2, "the mismatch is the policy's, not the value model's"


def test_the_log_probabilities_of_the_learner_are_those_before_the_update(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(update_epochs=2), learners={"policy": FakeLearner(shift=0.5)})

    async def one():
        from support.rollouts import pack_for

        groups = await collect(run)
        batch = pack_for(groups, run.algorithm)
        return batch, (await update(run, batch)).old_outputs

    batch, logprobs = asyncio.run(one())
    assert torch.equal(logprobs.logprobs, batch.rollout_logprobs + 0.5)


# --- when things happen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, []),
        ({"val_period": 2}, [2, 4]),
        ({"val_period": 3}, [3]),
        ({"val_period": 2, "val_start_at": 3}, [4]),
        ({"val_at_start": True}, [0]),
        ({"val_at_end": True}, [4]),
        ({"val_at_start": True, "val_at_end": True, "val_period": 4}, [0, 4]),
        ({"val_period": 3, "val_at_end": True, "max_steps": 5}, [3, 5]),
    ],
)
def test_validation_happens_when_it_is_due(tmp_path, changes, steps):
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(**changes), validation=2)
    trained(run)
    assert [step for step, logged in tracker.steps.items() if "validation/accuracy" in logged] == steps


def test_validation_without_tasks_is_left_out(tmp_path):
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(val_period=1, val_at_start=True))
    trained(run)
    assert not any(name.startswith("validation/") for logged in tracker.steps.values() for name in logged)


@pytest.mark.parametrize(("period", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4]), (100, [4])])
def test_checkpoints_are_saved_when_due_and_after_the_last_step(tmp_path, period, steps):
    checkpoints = FakeCheckpoints()
    run, _, tracker = make_run(TOKENIZER, tmp_path, options(save_period=period), checkpoints=checkpoints)
    trained(run)
    assert [state.step for state in checkpoints.saved] == steps
    for state in checkpoints.saved:
        assert state.stream.next_index == 3 * state.step and not state.stream.unfinished
        assert state.logged.items() <= tracker.steps[state.step].items()
        assert not any(name.startswith("timing/") for name in state.logged)


def test_a_run_stops_at_the_metric_that_was_to_be_reached(tmp_path):
    early_stop = EarlyStop(metric="train/grad_norm", threshold=3.0)
    checkpoints = FakeCheckpoints()
    run, _, tracker = make_run(
        TOKENIZER,
        tmp_path,
        options(max_steps=100, save_period=50, val_at_end=True),
        early_stop=early_stop,
        checkpoints=checkpoints,
        validation=1,
    )
    trained(run)
    assert run.step == 3 and "train/grad_norm = 3 reached 3: training ends" in tracker.notes
    assert [state.step for state in checkpoints.saved] == [3] and "validation/accuracy" in tracker.steps[3]


def test_a_run_stops_at_a_validation_metric(tmp_path):
    early_stop = EarlyStop(metric="validation/accuracy", threshold=0.0)
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=100, val_period=2), validation=2, early_stop=early_stop)
    assert trained(run).step == 2


def test_a_metric_to_stop_at_that_no_validation_reports_is_an_error(tmp_path):
    early_stop = EarlyStop(metric="validation/acuracy", threshold=0.5)
    run, _, _ = make_run(TOKENIZER, tmp_path, options(val_period=1), validation=2, early_stop=early_stop)
    with pytest.raises(ValueError, match=r"no metric validation/acuracy; there are validation/accuracy"):
        trained(run)
    check_ending(run, {"train/loss": 1.0})
    assert run.ending is None, "before the first validation nothing is known"


def test_no_step_is_trained_where_none_is_wanted(tmp_path):
    run, generator, tracker = make_run(TOKENIZER, tmp_path, options(max_steps=0))
    trained(run)
    assert run.step == 0 and not tracker.steps and not generator.requests


# --- what is logged -----------------------------------------------------------------------------------------------------------------


def test_the_phases_of_a_step_add_up_to_its_time(tmp_path):
    learner = FakeLearner(on_step=lambda: torch.randn(300, 300) @ torch.randn(300, 300))
    run, _, tracker = make_run(
        TOKENIZER, tmp_path, options(val_period=1, save_period=1), learners={"policy": learner}, validation=2,
        checkpoints=FakeCheckpoints(), store="jsonl", latency=lambda seed: 0.005,
    )  # fmt: skip
    trained(run)
    for logged in tracker.steps.values():
        total = logged["timing/train/total_step_time"]
        phases = {name: value for name, value in logged.items() if name.startswith("timing/train/") and "total" not in name}
        assert set(phases) >= {
            f"timing/train/{name}" for name in ("generation", "policy_training", "validation", "checkpointing")
        }
        assert 0.7 * total <= sum(phases.values()) <= total
        assert logged["performance/tokens_per_sec"] > 0


def test_stored_rollouts_have_what_sampler_and_learner_thought(tmp_path):
    run, _, _ = make_run(TOKENIZER, tmp_path, options(max_steps=1), learners={"policy": FakeLearner(shift=0.25)}, store="jsonl")
    trained(run)
    records = stored_rollouts(run).read(1)
    assert len(records) == 12 and {record.group for record in records} == {0, 1, 2}
    for record in records:
        assert record.learner_logprobs == pytest.approx([value + 0.25 for value in record.sampler_logprobs])
        assert record.advantage is not None and record.kept and record.ending == "stop"
    for group in range(3):
        advantages = [record.advantage for record in records if record.group == group]
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
