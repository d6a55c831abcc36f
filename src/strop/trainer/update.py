"""Update the learners with a batch: epochs of mini-batches, one optimizer step each."""

from __future__ import annotations

from dataclasses import replace

from strop import metrics
from strop.algorithms.base import Outputs, TokenOutputs
from strop.data.packing import split_mini_batches
from strop.learner.base import require_token_outputs
from strop.trainer.mismatch import measure_mismatch
from strop.trainer.run import Run
from strop.trainer.step_metrics import batch_metrics
from strop.types import Batch


async def update(run: Run, batch: Batch) -> tuple[Outputs, dict[str, float]]:
    """Run ``update_epochs`` passes of mini-batches, one optimizer step each.

    Returns the policy's outputs for the batch from before the first optimizer step, and metrics.
    """
    options, losses = run.options, run.algorithm.losses(run.step)
    several = options.steps_per_batch * options.update_epochs > 1
    before = await run.learners["policy"].score(batch) if several or "policy" not in losses else None
    if isinstance(before, TokenOutputs):
        batch = batch.with_column("policy_logprobs", before.logprobs)
    logged: list[metrics.Metrics] = []
    steps = 0
    for _ in range(options.update_epochs):
        for part in split_mini_batches(batch, options.steps_per_batch):
            steps += 1
            run.tracker.progress(f"training: optimizer step {steps} of {options.steps_per_batch * options.update_epochs}")
            surveyed = await prepare_step(run, part.batch)
            for name, loss in losses.items():
                seen = replace(surveyed, zero_gradient=run.algorithm.zero_gradient(surveyed, name))
                result = await run.learners[name].forward_backward(seen, loss)
                prefix = "" if name == "policy" else f"{name}_"
                measured = {**result.metrics, **await run.learners[name].step()}
                logged.append({prefix + key: metrics.to_step_mean(metric) for key, metric in measured.items()})
                if name == "policy" and before is None:
                    before = result.outputs
    assert before is not None
    trained = {f"train/{name}": value for name, value in metrics.to_floats(metrics.merge(*logged)).items()}
    recorded = bool(run.algorithm.recorded_data)
    described = {**batch_metrics(batch, before, recorded=recorded), **check_mismatch(run, batch, before)}
    return before, {**trained, **run.algorithm.report(batch), **described}


def check_mismatch(run: Run, batch: Batch, old_outputs: Outputs) -> dict[str, float]:
    """Compare the log-probabilities of sampler and learner; warn if they differ too much. Raises MismatchTooLarge."""
    if run.algorithm.recorded_data or not isinstance(old_outputs, TokenOutputs):
        return {}
    report = measure_mismatch(batch, old_outputs.logprobs, run.step)
    if (warning := run.mismatch.check(run.step + 1, report)) is not None:
        run.tracker.note(f"warning: {warning}")
    return report.metrics()


async def prepare_step(run: Run, batch: Batch) -> Batch:
    """Add the columns that depend on the whole optimizer step, before it is split into micro-batches."""
    outputs = await run.learners["policy"].score(batch) if run.algorithm.needs_step_outputs else None
    return run.algorithm.prepare_step(batch, None if outputs is None else require_token_outputs(outputs))
