"""Create the sources of the columns required by an algorithm: a reference, a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strop.algorithms.base import Algorithm
from strop.algorithms.critic import VALUES
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, REFERENCE_LOGPROBS
from strop.algorithms.policy_gradient.composition import Composition
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.learner.client import (
    AsyncColumnSource,
    LearnerClient,
    LogprobColumn,
    NoColumns,
    PolicyColumns,
    PolicyScorer,
    ValueColumn,
)
from strop.monitoring.trackers.base import Tracker
from strop.runs.backend import Backend
from strop.runs.run_algorithm import count_steps_per_batch
from strop.trainer.column_sources import AdaptedKlWeight, ColumnSources


async def make_columns(
    config: TrainingRunConfig,
    backend: Backend,
    algorithm: Algorithm,
    learners: Mapping[str, LearnerClient],
    tracker: Tracker,
    filled: Mapping[str, AsyncColumnSource],
    last_metrics: Callable[[], Mapping[str, float]] = dict,
) -> ColumnSources:
    """Create the sources of the columns required by the algorithm. Call it before a checkpoint is loaded.

    ``filled``: the sources that the run's data brings (``RunSource.make_columns``). ``last_metrics()`` returns the last step's metrics.
    Raises ValueError for a column without a source.
    """
    scorers: dict[str, AsyncColumnSource] = dict(filled)
    policies = PolicyScorer.of(learners)
    if keeps_reference(config, algorithm):
        tracker.progress("making the reference")
        scorers[REFERENCE_LOGPROBS] = LogprobColumn(REFERENCE_LOGPROBS, backend.make_reference())
    if POLICY_SQUARES in algorithm.requires:  # one forward pass for both
        scorers |= {POLICY_SQUARES: PolicyColumns(policies, squares=True), POLICY_LOGPROBS: NoColumns()}
    elif POLICY_LOGPROBS in algorithm.requires:
        scorers[POLICY_LOGPROBS] = PolicyColumns(policies) if moves_away_from_sampler(config) else NoColumns()
    if KL_WEIGHT in algorithm.requires and isinstance(algorithm, Composition) and algorithm.kl is not None:
        scorers[KL_WEIGHT] = AdaptedKlWeight(algorithm.kl.weight, last_metrics)
    if VALUES in algorithm.requires and "value" in learners:
        scorers[VALUES] = ValueColumn(VALUES, learners["value"])
    if unknown := sorted(algorithm.requires - set(scorers)):
        name = config.algorithm.name
        raise ValueError(f"algorithm.name: {name} requires the columns {unknown}, which strop {config.section} does not provide")
    return ColumnSources(algorithm.requires, scorers)


def moves_away_from_sampler(config: TrainingRunConfig) -> bool:
    """Return whether a batch may come from an older policy than the updated one, or has several optimizer steps."""
    if not isinstance(config, RolloutRunConfig):
        return False
    training = config.rollout_training
    return training.max_staleness > 0 or count_steps_per_batch(config) * training.epochs_per_batch > 1


def keeps_reference(config: TrainingRunConfig, algorithm: Algorithm) -> bool:
    """Return whether a frozen copy of the policy scores during training."""
    return REFERENCE_LOGPROBS in algorithm.requires - config.filled_columns
