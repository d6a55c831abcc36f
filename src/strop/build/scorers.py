"""Make the learners of a run and the sources of the columns that an algorithm requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.algorithms.critic.gae import VALUES
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.build.models import LoadedPolicy, make_critic, make_learner, make_reference
from strop.build.teachers import make_teachers
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, DpoRunConfig, PpoRunConfig
from strop.learner.client import (
    AsyncColumnSource,
    Caller,
    ColumnClient,
    InlineCaller,
    LogprobColumn,
    ScorerClient,
    ValueColumn,
)
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.reference_store import load_or_compute_reference, model_fingerprint
from strop.learner.torch.scorer import NetworkScorer
from strop.monitoring.trackers.base import Tracker
from strop.sampling import Sampling
from strop.trainer.run import TrainOptions
from strop.types import Group


def make_learners(
    config: TrainingRunConfig, policy: LoadedPolicy, algorithm: Algorithm, sampling: Sampling, total_steps: int | None
) -> dict[str, TorchLearner]:
    """Make the policy's learner, and the critic's if there is one. ``total_steps``: optimizer steps of the run; None: no limit."""
    learners = {
        "policy": make_learner(
            policy.network, config.policy, sampling, whole_groups=algorithm.whole_groups, total_steps=total_steps
        )
    }
    if isinstance(config, PpoRunConfig):
        critic = make_critic(config, policy)
        learners["value"] = make_learner(critic, config.value, sampling, total_steps=total_steps, section="value")
    return learners


def count_optimizer_steps(options: TrainOptions, tasks: int | None) -> int | None:
    """Return the largest number of optimizer steps of a run; None if neither its steps nor its ``tasks`` are limited."""
    limits = [options.max_steps] if options.max_steps < 1_000_000 else []
    limits += [] if tasks is None else [tasks // options.groups_per_step]
    return min(limits) * options.steps_per_batch * options.update_epochs if limits else None


def make_scorers(
    config: RolloutRunConfig,
    policy: LoadedPolicy,
    algorithm: Algorithm,
    sampling: Sampling,
    learners: Mapping[str, TorchLearner],
    make_caller: Callable[[Any], Caller] = InlineCaller,
) -> dict[str, AsyncColumnSource]:
    """Make the column sources of a run on rollouts. ``make_caller`` decides where they compute.

    Raises ValueError for a required column without a source."""
    scorers: dict[str, AsyncColumnSource] = {}
    if REFERENCE_LOGPROBS in algorithm.requires:
        reference = make_reference(policy, config.policy, sampling)
        scorers[REFERENCE_LOGPROBS] = LogprobColumn(REFERENCE_LOGPROBS, ScorerClient(make_caller(reference)))
    if VALUES in algorithm.requires and "value" in learners:
        scorers[VALUES] = ValueColumn(VALUES, ScorerClient(make_caller(learners["value"])))
    if isinstance(config, DistillationRunConfig):
        scorers.update(make_teachers(config, policy, algorithm, sampling, learners, make_caller))
    return check_columns(scorers, algorithm, config)


async def make_recorded_scorers(
    config: RecordedRunConfig,
    policy: LoadedPolicy,
    algorithm: Algorithm,
    sampling: Sampling,
    groups: Callable[[], Sequence[Group]],
    tracker: Tracker,
) -> dict[str, AsyncColumnSource]:
    """Make the column sources of a run on recorded data. ``groups()`` returns every group that the run will read, for reference
    log-probabilities that are computed once, before training."""
    scorers: dict[str, AsyncColumnSource] = {}
    if REFERENCE_LOGPROBS in algorithm.requires:
        once = isinstance(config, DpoRunConfig) and config.dpo.precompute_reference
        scorers[REFERENCE_LOGPROBS] = (
            await make_stored_reference(
                config,
                ScorerClient(
                    InlineCaller(NetworkScorer(policy.network, sampling, config.policy.sequence_packing.logprob_mb_tokens))
                ),
                algorithm,
                groups,
                tracker,
                fingerprint=model_fingerprint(policy.network.model),
                share_prefixes=config.policy.sequence_packing.prefix_sharing and policy.network.packed,
            )
            if once
            else LogprobColumn(REFERENCE_LOGPROBS, ScorerClient(InlineCaller(make_reference(policy, config.policy, sampling))))
        )
    return check_columns(scorers, algorithm, config)


async def make_stored_reference(
    config: RecordedRunConfig,
    policy: ScorerClient,
    algorithm: Algorithm,
    groups: Callable[[], Sequence[Group]],
    tracker: Tracker,
    *,
    fingerprint: str,
    share_prefixes: bool,
) -> AsyncColumnSource:
    """Compute the reference log-probabilities of all groups with the policy's current weights, or load them from an earlier computation.

    Call it before a checkpoint is loaded. ``fingerprint``: of the policy's weights."""
    path = Path(config.logger.log_dir) / "reference_logprobs.safetensors"
    tracker.note(f"reference log-probabilities: {'loaded from' if path.exists() else 'computed once and stored in'} {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    store = await load_or_compute_reference(
        path,
        (group for make in (groups,) for group in make()),  # lazy: groups are read only if there is no file yet
        policy,
        algorithm,
        weights=fingerprint,
        data=f"{config.data.model_dump_json()}{config.policy.tokenizer.model_dump_json()}"
        f"{config.policy.max_total_sequence_length}",  # decides which examples fit
        share_prefixes=share_prefixes,
    )
    return ColumnClient(InlineCaller(store))


def check_columns(
    scorers: dict[str, AsyncColumnSource], algorithm: Algorithm, config: TrainingRunConfig
) -> dict[str, AsyncColumnSource]:
    """Return ``scorers``. Raises ValueError if a column that the algorithm requires has no source."""
    if unknown := sorted(algorithm.requires - set(scorers)):
        name = config.algorithm.name
        raise ValueError(f"algorithm.name: {name} requires the columns {unknown}, which strop {config.section} does not provide")
    return scorers
