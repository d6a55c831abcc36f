"""The backend that holds the models of a run: this process, or the ranks of a cluster (``strop.runs.cluster.ray_backend``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from strop.algorithms.base import Algorithm
from strop.algorithms.critic import VALUES
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, REFERENCE_LOGPROBS
from strop.algorithms.policy_gradient.composition import Composition
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.base import Cluster
from strop.environments.policy_client import BASE, PastSelvesRule
from strop.generation.pool import SyncedGenerator
from strop.generation.torch.torch_past_selves import TorchPastSelves, copy_network
from strop.learner.client import (
    AdaptedKlWeight,
    AsyncColumnSource,
    Caller,
    ColumnSources,
    InlineCaller,
    LearnerClient,
    LearnerThread,
    LogprobColumn,
    MemoryClient,
    NoColumns,
    PolicyColumns,
    PolicyScorer,
    ScorerClient,
    ThreadCaller,
    ValueColumn,
)
from strop.learner.torch.scorer import NetworkScorer, TrainableNetwork
from strop.monitoring.trackers.base import Tracker
from strop.runs.engines import GeneratorSpec, make_generator, make_past_selves, offloads_learner
from strop.runs.model_check import check_model
from strop.runs.models import (
    LoadedPolicy,
    TokenizerBundle,
    load_training_policy,
    make_learners,
    make_offload,
    make_reference,
    make_trained_networks,
)
from strop.runs.run_algorithm import count_steps_per_batch
from strop.sampling import Sampling


class Backend(Protocol):
    """Builds the models of a run.

    Call ``build_learners`` first, then make the models that score, which are copied from the policy, before a checkpoint is loaded.
    Call ``build_generator`` last, after the checkpoint is loaded."""

    bundle: TokenizerBundle
    packed: bool  # whether the policy supports packed rows

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        """Build the learners by name. ``total_steps``: optimizer steps of the run; None: no limit. Raises ValueError."""
        ...

    def make_reference(self) -> ScorerClient:
        """Return the policy as it is before training."""
        ...

    def make_untrained_policy(self) -> tuple[ScorerClient, str]:
        """Return the policy itself, which scores like the reference until training starts, and a fingerprint of its weights."""
        ...

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        """Build the generator and its weight sync. Raises ValueError."""
        ...


class LocalBackend:
    """Builds models in this process. They compute in a thread if training overlaps with generation in other processes."""

    def __init__(self, config: TrainingRunConfig, policy: LoadedPolicy) -> None:
        self.config = config
        self.policy = policy
        self.bundle: TokenizerBundle = policy
        self.packed = policy.network.packed
        self.scoring: list[TrainableNetwork] = []  # networks in addition to the learners, which may share theirs
        self.role_policies: tuple[str, ...] = ()  # further policies, by name; BASE is not trained
        self.make_caller: Callable[[Any], Caller] = InlineCaller
        if generates_meanwhile(config):
            self.make_caller = partial(ThreadCaller, thread=LearnerThread())

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        self.sampling = sampling
        self.role_networks = {name: copy_network(self.policy.network) for name in self.role_policies}
        trained = {name: network for name, network in self.role_networks.items() if name != BASE}
        networks = {**make_trained_networks(self.config, self.policy), **trained}
        self.learners = make_learners(self.config, networks, algorithm, sampling, total_steps)
        return {name: LearnerClient(self.make_caller(learner)) for name, learner in self.learners.items()}

    def make_reference(self) -> ScorerClient:
        reference = make_reference(self.policy, self.config.policy, self.sampling)
        self.scoring.append(reference.network)
        return ScorerClient(self.make_caller(reference))

    def make_untrained_policy(self) -> tuple[ScorerClient, str]:
        scorer = NetworkScorer(self.policy.network, self.sampling, self.config.policy.score_tokens)
        return ScorerClient(self.make_caller(scorer)), self.policy.fingerprint()

    def build_past_selves(self, rule: PastSelvesRule) -> TorchPastSelves:
        return make_past_selves(self.policy, self.config.policy, rule)

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        assert isinstance(self.config, RolloutRunConfig)
        on_cpu, shares_module = self.policy.network.device.type == "cpu", not self.config.policy.generation.uses_engines
        memory: MemoryClient | None = None
        if offloads_learner(self.config, on_cpu=on_cpu, shares_module=shares_module):
            offload = make_offload(
                self.learners, self.scoring, keep_weights=("policy", *self.role_policies) if shares_module else ()
            )
            memory = MemoryClient(self.make_caller(offload))
        return make_generator(self.policy, self.config.policy, spec, memory, self.role_networks)


def generates_meanwhile(config: TrainingRunConfig) -> bool:
    """Return whether engines in other processes generate while the learner trains. The torch engine alternates with it instead."""
    return (
        isinstance(config, RolloutRunConfig)
        and config.rollout_training.max_staleness > 0
        and config.policy.generation.uses_engines
    )


def describe_origin(model_name: str) -> str:
    """Describe where a model is loaded from."""
    return "from this folder" if Path(model_name).is_dir() else "from the hub or its local cache"


async def make_backend(config: TrainingRunConfig, cluster: Cluster | None, tracker: Tracker) -> Backend:
    """Create the backend of a run and load the policy. Raises ModelNotFound, ValueError."""
    tracker.progress(f"loading the model: {config.policy.model_name} {describe_origin(config.policy.model_name)}")
    backend: Backend
    if cluster is None:
        backend = LocalBackend(config, load_training_policy(config))
    else:
        from strop.runs.cluster.ray_backend import make_ray_backend

        backend = await make_ray_backend(config, cluster, tracker)
    check_model(config, backend.bundle, tracker.note)
    return backend


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
