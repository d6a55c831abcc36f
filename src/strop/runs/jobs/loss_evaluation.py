"""Evaluate a checkpoint of a run on recorded data: loss and metrics on the run's validation data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from strop.checkpointing.saved_model import SavedModel
from strop.config import RecordedRunConfig
from strop.learner.parallel.single_device import load_weights
from strop.monitoring.console import open_console
from strop.runs.algorithm.run_algorithm import make_recorded_algorithm
from strop.runs.backend import LocalBackend
from strop.runs.jobs.evaluation_report import EvaluationReport
from strop.runs.models import load_training_policy
from strop.runs.recorded_run import make_validation_groups, read_validation_examples
from strop.runs.scorers import make_columns
from strop.sampling import Sampling
from strop.trainer.loss_validation import LossValidator


async def evaluate_loss(config: RecordedRunConfig, model: SavedModel, note: Callable[[str], object]) -> EvaluationReport:
    """Compute the same as the run's validation, with the weights of a checkpoint. Raises ValueError without usable data."""
    algorithm = make_recorded_algorithm(config)
    config = replace(config, policy=replace(config.policy, ema=replace(config.policy.ema, enabled=False)))
    parts = read_validation_examples(config, algorithm)
    backend = LocalBackend(config, load_training_policy(config))
    tracker = open_console("none")
    groups = make_validation_groups(config, parts, algorithm, backend.bundle, tracker)
    learners = await backend.build_learners(algorithm, Sampling(), None)
    backend.learners["policy"].masters.release()
    columns = await make_columns(config, backend, algorithm, learners, tracker)  # of the model before training
    load_weights(backend.policy.network.model, Path(model.weights))
    validator = LossValidator(
        groups=groups,
        algorithm=algorithm,
        learner=learners["policy"],
        columns=columns,
        share_prefixes=config.policy.sequence_packing.prefix_sharing and backend.packed,
    )
    metrics = await validator.evaluate(0)
    return EvaluationReport(
        metrics={name.removeprefix("validation/"): value for name, value in metrics.items()},
        examples=len(validator.usable_groups),
        model=model.weights,
        step=model.step,
    )
