"""Create the sources of the columns required by an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from strop.algorithms.base import Algorithm
from strop.algorithms.critic import VALUES
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, REFERENCE_LOGPROBS
from strop.algorithms.policy_gradient.composition import Composition
from strop.base_config import to_json
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, DpoRunConfig
from strop.learner.client import (
    AsyncColumnSource,
    ColumnClient,
    InlineCaller,
    LearnerClient,
    LogprobColumn,
    NoColumns,
    PolicyColumns,
    ScorerClient,
    ValueColumn,
)
from strop.learner.torch.reference_store import load_or_compute_reference
from strop.monitoring.trackers.base import Tracker
from strop.runs.algorithm.run_algorithm import count_steps_per_batch
from strop.runs.teachers import combine_teachers, find_teacher_columns
from strop.trainer.column_sources import AdaptedKlWeight, ColumnSources
from strop.types import Group


class ScoringModels(Protocol):
    """The models of a run that fill columns, local or remote. They are copied from the policy before training."""

    packed: bool  # whether the policy supports packed rows

    def make_reference(self) -> ScorerClient:
        """Return the policy as it is before training."""
        ...

    def make_untrained_policy(self) -> tuple[ScorerClient, str]:
        """Return the policy itself, which scores like the reference until training starts, and a fingerprint of its weights."""
        ...

    async def make_teachers(
        self, config: DistillationRunConfig, columns: Collection[str]
    ) -> Mapping[str, Mapping[str, AsyncColumnSource]]:
        """Return the sources of the teachers' columns, by teacher key and column. Raises ValueError."""
        ...


async def make_columns(
    config: TrainingRunConfig,
    models: ScoringModels,
    algorithm: Algorithm,
    learners: Mapping[str, LearnerClient],
    tracker: Tracker,
    groups: Callable[[], Sequence[Group]] = list,
    last_metrics: Callable[[], Mapping[str, float]] = dict,
) -> ColumnSources:
    """Create the sources of the columns required by the algorithm. Call it before a checkpoint is loaded.

    ``groups()`` returns every group that a run on recorded data will read, for reference log-probabilities computed once before
    training. ``last_metrics()`` returns the last step's metrics. Raises ValueError for a column without a source.
    """
    scorers: dict[str, AsyncColumnSource] = {}
    if REFERENCE_LOGPROBS in algorithm.requires:
        tracker.progress("making the reference")
        scorers[REFERENCE_LOGPROBS] = (
            await make_stored_reference(config, models, algorithm, groups, tracker)
            if isinstance(config, DpoRunConfig) and config.dpo.precompute_reference
            else LogprobColumn(REFERENCE_LOGPROBS, models.make_reference())
        )
    if POLICY_SQUARES in algorithm.requires:  # one forward pass for both
        scorers |= {POLICY_SQUARES: PolicyColumns(learners["policy"], squares=True), POLICY_LOGPROBS: NoColumns()}
    elif POLICY_LOGPROBS in algorithm.requires:
        scorers[POLICY_LOGPROBS] = PolicyColumns(learners["policy"]) if moves_away_from_sampler(config) else NoColumns()
    if KL_WEIGHT in algorithm.requires and isinstance(algorithm, Composition) and algorithm.kl is not None:
        scorers[KL_WEIGHT] = AdaptedKlWeight(algorithm.kl.weight, last_metrics)
    if VALUES in algorithm.requires and "value" in learners:
        scorers[VALUES] = ValueColumn(VALUES, learners["value"])
    if isinstance(config, DistillationRunConfig):
        columns = find_teacher_columns(config, algorithm)
        tracker.progress(f"loading the teachers: {', '.join(teacher.model_name for teacher in config.all_teachers.values())}")
        teachers = await models.make_teachers(config, columns)
        for column in columns:
            scorers[column] = combine_teachers({key: sources[column] for key, sources in teachers.items()}, config)
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


async def make_stored_reference(
    config: DpoRunConfig,
    models: ScoringModels,
    algorithm: Algorithm,
    groups: Callable[[], Sequence[Group]],
    tracker: Tracker,
) -> AsyncColumnSource:
    """Compute the reference log-probabilities of all groups with the policy's current weights, or load them from an earlier computation."""
    path = Path(config.logger.log_dir) / "reference_logprobs.safetensors"
    tracker.note(f"reference log-probabilities: {'loaded from' if path.exists() else 'computed once and stored in'} {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    policy, fingerprint = models.make_untrained_policy()
    store = await load_or_compute_reference(
        path,
        (group for make in (groups,) for group in make()),  # lazy: groups are read only if there is no file yet
        policy,
        algorithm,
        weights=fingerprint,
        data=f"{to_json(config.data)}{to_json(config.policy.tokenizer)}"
        f"{config.policy.max_total_sequence_length}",  # decides which examples fit
        share_prefixes=config.policy.sequence_packing.prefix_sharing and models.packed,
    )
    return ColumnClient(InlineCaller(store))
