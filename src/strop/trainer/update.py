"""Update the learners with a batch: epochs of mini-batches, one optimizer step each."""

from __future__ import annotations

from dataclasses import replace

from strop import metrics
from strop.algorithms.base import TokenOutputs
from strop.algorithms.functional import POLICY_LOGPROBS
from strop.data.splitting import split_mini_batches
from strop.learner.base import require_token_outputs
from strop.learner.client import PolicyColumns
from strop.trainer.loss_check import check_loss
from strop.trainer.run import TrainingRun
from strop.trainer.step_metrics import batch_metrics
from strop.trainer.step_view import OptimizerPass, UpdateResult
from strop.types import Batch


async def update(run: TrainingRun, batch: Batch) -> UpdateResult:
    """Run ``update_epochs`` passes of ``steps_per_batch`` mini-batches, one optimizer step each, for every learner with a loss."""
    with run.timer.span("policy_training"):
        losses = run.algorithm.losses(run.step)
        steps = run.options.steps_per_batch * run.options.update_epochs
        old_outputs = await PolicyColumns(run.learners["policy"]).outputs(batch) if steps > 1 or "policy" not in losses else None
        if isinstance(old_outputs, TokenOutputs):
            batch = batch.with_column(POLICY_LOGPROBS, old_outputs.logprobs)
        logged: list[metrics.Metrics] = []
        passes: list[OptimizerPass] = []
        mini_batches = split_mini_batches(batch, run.options.steps_per_batch)
        for step, mini_batch in enumerate(mini_batches * run.options.update_epochs, 1):
            run.tracker.progress(f"training: optimizer step {step} of {steps}")
            prepared = await prepare_step(run, mini_batch.batch)
            for name, loss in losses.items():
                inputs = replace(prepared, zero_gradient=run.algorithm.zero_gradient(prepared, name))
                result = await run.learners[name].forward_backward(inputs, loss)
                check_loss(run.algorithm, loss, inputs, result.outputs)
                passes.append(
                    OptimizerPass(learner=name, index=mini_batch.index, batch=inputs, outputs=result.outputs, loss=loss)
                )
                prefix = "" if name == "policy" else f"{name}_"
                step_metrics = {**result.metrics, **await run.learners[name].step()}
                logged.append({prefix + key: metrics.to_step_mean(metric) for key, metric in step_metrics.items()})
                if name == "policy" and old_outputs is None:
                    old_outputs = result.outputs
        assert old_outputs is not None
        trained = {f"train/{name}": value for name, value in metrics.to_floats(metrics.merge(*logged)).items()}
        measured = batch_metrics(batch, old_outputs, recorded=bool(run.algorithm.recorded_data))
        found = {**trained, **run.algorithm.report(batch), **measured}
        return UpdateResult(old_outputs=old_outputs, metrics=found, passes=passes)


async def prepare_step(run: TrainingRun, batch: Batch) -> Batch:
    """Add the columns that depend on the whole optimizer step, before it is split into micro-batches."""
    outputs = await run.learners["policy"].score(batch) if run.algorithm.needs_step_outputs else None
    return run.algorithm.prepare_step(batch, None if outputs is None else require_token_outputs(outputs))
