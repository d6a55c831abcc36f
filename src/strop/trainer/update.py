"""Update the learners with a batch: epochs of mini-batches, one optimizer step each."""

from __future__ import annotations

from dataclasses import replace

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.data.rollout_selector import SubBatch, split_policies
from strop.data.splitting import split_mini_batches
from strop.learner.base import require_token_outputs
from strop.learner.client import LearnerClient, PolicyColumns, PolicyScorer, find_policies, join_outputs
from strop.trainer.listeners import OptimizerPass, UpdateResult
from strop.trainer.loss_check import check_loss
from strop.trainer.run import TrainingRun
from strop.trainer.step_metrics import batch_metrics
from strop.types import Batch


async def update(run: TrainingRun, batch: Batch) -> UpdateResult:
    """Run ``update_epochs`` passes of ``steps_per_batch`` mini-batches, one optimizer step each, for every learner with a loss."""
    with run.timer.span("policy_training"):
        steps = run.options.steps_per_batch * run.options.update_epochs
        scores_first = steps > 1 or "policy" not in run.algorithm.losses(run.step)
        old_outputs = await PolicyColumns(PolicyScorer.of(run.learners)).outputs(batch) if scores_first else None
        if isinstance(old_outputs, TokenOutputs):
            batch = batch.with_column(POLICY_LOGPROBS, old_outputs.logprobs)
        logged: list[metrics.Metrics] = []
        passes: list[OptimizerPass] = []
        mini_batches = split_mini_batches(batch, run.options.steps_per_batch)
        for step, mini_batch in enumerate(mini_batches * run.options.update_epochs, 1):
            run.tracker.progress(f"training: optimizer step {step} of {steps}")
            for policy, part in split_policies(mini_batch):
                await train_policy(run, policy, part, logged, passes)
        if old_outputs is None:
            trained = [(each.index, each.outputs) for each in passes if each.learner == "policy"]
            old_outputs = join_outputs(trained, len(batch.target))
        trained_metrics = {f"train/{name}": value for name, value in metrics.to_floats(metrics.merge(*logged)).items()}
        measured = batch_metrics(batch, old_outputs, recorded=bool(run.algorithm.recorded_data))
        found = {**trained_metrics, **run.algorithm.report(batch), **measured}
        return UpdateResult(old_outputs=old_outputs, metrics=found, passes=passes)


async def train_policy(
    run: TrainingRun, policy: int, part: SubBatch, logged: list[metrics.Metrics], passes: list[OptimizerPass]
) -> None:
    """Take an optimizer step of a policy, and of the other learners with a loss, on its part of a mini-batch. Adds to the lists."""
    own = list(find_policies(run.learners))[policy]
    prepared = await prepare_step(run, part.batch, run.learners[own])
    for name, loss in run.algorithm.losses(run.step).items():
        key = own if name == "policy" else name
        inputs = replace(prepared, zero_gradient=run.algorithm.zero_gradient(prepared, name))
        result = await run.learners[key].forward_backward(inputs, loss)
        check_loss(run.algorithm, loss, inputs, result.outputs)
        passes.append(
            OptimizerPass(learner=name, policy=policy, index=part.index, batch=inputs, outputs=result.outputs, loss=loss)
        )
        prefix = "" if key == "policy" else f"{key}_"
        step_metrics = {**result.metrics, **await run.learners[key].step()}
        logged.append({prefix + metric: metrics.to_step_mean(value) for metric, value in step_metrics.items()})


async def prepare_step(run: TrainingRun, batch: Batch, policy: LearnerClient) -> Batch:
    """Add the columns that depend on the whole optimizer step, before it is split into micro-batches."""
    outputs = await policy.score(batch) if run.algorithm.needs_step_outputs else None
    return run.algorithm.prepare_step(batch, None if outputs is None else require_token_outputs(outputs))
