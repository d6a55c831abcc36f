"""Create the sources of the columns required by an algorithm: references, critics, teachers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from strop.algorithms.base import Algorithm
from strop.algorithms.critic import VALUES
from strop.algorithms.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS
from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES
from strop.algorithms.kl import KL_WEIGHT, REFERENCE_LOGPROBS
from strop.algorithms.policy_gradient.composition import Composition
from strop.base_config import to_json, validate_section
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import DistillationRunConfig, DpoRunConfig
from strop.learner.base import ColumnSource
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
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.reference_store import load_or_compute_reference
from strop.learner.torch.scorer import NetworkScorer, ScoringContext, copy_frozen, offload, without_adapters
from strop.learner.torch.teacher import (
    LocalScorer,
    MixedTeachers,
    RoutedTeachers,
    SelfTeacher,
    TeacherLogprobs,
    TeacherTopK,
    shared_vocabulary_size,
)
from strop.models.adapters import lora_layers
from strop.models.loading import ModelNotFound
from strop.models.network import Network
from strop.monitoring.trackers.base import Tracker
from strop.runs.models import HOST_LOADER, LoadedPolicy, ModelLoader, load_policy, resolve_device
from strop.runs.run_algorithm import count_steps_per_batch
from strop.sampling import Sampling
from strop.trainer.column_sources import AdaptedKlWeight, ColumnSources
from strop.types import Group, Message


@dataclass(frozen=True)
class StudentInfo:
    """The information about the policy needed by a teacher in another process."""

    vocab_size: int  # size of its output layer
    tokenizer: Any


@dataclass(frozen=True, eq=False)
class LoadedTeacher:
    """A teacher's frozen network."""

    network: Network
    vocab_size: int  # number of token ids, from 0, shared with the student


def make_teachers(
    config: DistillationRunConfig,
    policy: LoadedPolicy,
    columns: Collection[str],
    sampling: Sampling,
    learners: Mapping[str, TorchLearner],
) -> dict[str, dict[str, ColumnSource]]:
    """Make the sources of the teachers' columns, by teacher key and column. Call it before a checkpoint is loaded. Raises ValueError."""
    student = get_student_info(policy)
    return {
        key: _make_self_teacher(teacher, config, policy, columns, sampling, learners["policy"])
        if teacher.model_name == "self"
        else load_teacher(key, config, student, columns, sampling)
        for key, teacher in config.all_teachers.items()
    }


def find_teacher_columns(config: DistillationRunConfig, algorithm: Algorithm) -> frozenset[str]:
    """Return the columns that teachers fill for the algorithm. Raises ValueError if there are none."""
    columns = algorithm.requires & {TEACHER_LOGPROBS, TEACHER_CANDIDATES}
    if not columns:
        raise ValueError(
            f"algorithm.name: {config.algorithm.name} does not use a teacher; run strop grpo, or choose another algorithm"
        )
    return frozenset(columns)


def get_student_info(policy: LoadedPolicy) -> StudentInfo:
    return StudentInfo(policy.network.head.vocabulary, policy.tokenizer)


def combine_teachers(by_teacher: Mapping[str, AsyncColumnSource], config: DistillationRunConfig) -> AsyncColumnSource:
    """Combine the sources of teachers, by key, into one: route by environment, and mix teachers without environments."""
    sources = {key: (teacher, by_teacher[key]) for key, teacher in config.all_teachers.items()}
    routed = {name: source for teacher, source in sources.values() for name in teacher.environments or ()}
    general = [(teacher.weight, source) for teacher, source in sources.values() if teacher.environments is None]
    fallback: AsyncColumnSource | None = None
    if general:
        weights = [weight for weight, _ in general]
        fallback = general[0][1] if len(general) == 1 else MixedTeachers([source for _, source in general], weights)
    if not routed:
        assert fallback is not None
        return fallback
    return RoutedTeachers(routed, fallback)


def load_teacher(
    key: str, config: DistillationRunConfig, student: StudentInfo, columns: Collection[str], sampling: Sampling
) -> dict[str, ColumnSource]:
    """Load a whole teacher model. Return its sources by column. Raises ModelNotFound, and ValueError if its vocabulary is not the
    student's."""
    teacher = config.all_teachers[key]
    loaded = load_teacher_network(key, config, student)
    context = offload(loaded.network) if teacher.offload or teacher.dtensor_cfg.cpu_offload else nullcontext
    return dict(make_teacher_sources(key, config, loaded, columns, sampling, context=context))


def load_teacher_network(
    key: str, config: DistillationRunConfig, student: StudentInfo, loader: ModelLoader = HOST_LOADER
) -> LoadedTeacher:
    """Load a teacher's frozen network, keeping only weights in its ``weights_dtype`` on its device. Raises ModelNotFound, and
    ValueError if its vocabulary is not the student's.
    """
    teacher = config.all_teachers[key]
    model = {name: getattr(teacher, name) for name in ("model_name", "tokenizer", "device", "precision", "weights_dtype")}
    model["dequantize_base_checkpoint"] = True  # loses nothing for a frozen model
    model["max_total_sequence_length"] = config.policy.max_total_sequence_length
    try:
        teacher_policy = load_policy(validate_section(ModelConfig, model), loader=loader)
    except ModelNotFound as error:
        raise error.with_key(f"{key}.model_name") from error
    network = teacher_policy.network
    vocab_size = shared_vocabulary_size(
        student.vocab_size, get_student_info(teacher_policy).vocab_size, (student.tokenizer, teacher_policy.tokenizer)
    )
    network.model.requires_grad_(False)
    if loader is HOST_LOADER:
        network.device = resolve_device(teacher.device)
        network.model.to(network.device)
    return LoadedTeacher(network, vocab_size)


def make_teacher_sources(
    key: str,
    config: DistillationRunConfig,
    loaded: LoadedTeacher,
    columns: Collection[str],
    sampling: Sampling,
    *,
    parallelism: Parallelism | None = None,
    context: ScoringContext = nullcontext,
) -> dict[str, TeacherLogprobs | TeacherTopK]:
    """Create the sources of a loaded teacher by column. ``parallelism``: how it is sharded; None means a single device."""
    tokens = config.all_teachers[key].logprob_mb_tokens or config.policy.score_tokens
    scorer = NetworkScorer(loaded.network, unfiltered_sampling(sampling, columns), tokens, parallelism, context)
    return {column: make_source(column, scorer, config, loaded.vocab_size) for column in columns}


def find_scorer(source: Any) -> NetworkScorer:
    """Return the scorer of a teacher's source."""
    while not isinstance(source, NetworkScorer):
        source = source.teacher
    return source


def _make_self_teacher(
    teacher: TeacherConfig,
    config: DistillationRunConfig,
    policy: LoadedPolicy,
    columns: Collection[str],
    sampling: Sampling,
    learner: TorchLearner,
) -> dict[str, ColumnSource]:
    """Make the policy its own teacher: it scores rollouts with a demonstration in the prompt."""
    scorer = _make_self_scorer(teacher, policy.network, unfiltered_sampling(sampling, columns), learner)
    assert teacher.demonstration is not None  # ensured by the configuration checks
    prompt = _make_demonstration_prompt(teacher.demonstration, policy)
    return {column: SelfTeacher(make_source(column, scorer, config, None), prompt) for column in columns}


def unfiltered_sampling(sampling: Sampling, columns: Collection[str]) -> Sampling:
    """Return the student's sampling without its filters. Raises ValueError if top-k distillation needs the filtered tokens."""
    if sampling.filtered and TEACHER_CANDIDATES in columns:
        raise ValueError(
            "policy.generation: top_k, top_p or min_p removes tokens from the student's distribution, and the loss is not defined on "
            "removed tokens; set them to keep every token, or algorithm.name=distillation"
        )
    return Sampling(temperature=sampling.temperature)


def make_source(
    column: str, scorer: LocalScorer, config: DistillationRunConfig, vocab_size: int | None
) -> TeacherLogprobs | TeacherTopK:
    """Create the source of a column from a teacher's scorer. ``vocab_size``: number of token ids, from 0, shared with the
    student.
    """
    if column == TEACHER_LOGPROBS:
        return TeacherLogprobs(scorer)
    return TeacherTopK(scorer, config.distillation.topk_logits_k, vocab_size)


def _make_self_scorer(teacher: TeacherConfig, network: Network, sampling: Sampling, learner: TorchLearner) -> NetworkScorer:
    """Make the scorer of a self-teacher: the policy with its current, averaged or initial weights."""
    tokens = teacher.logprob_mb_tokens or learner.config.score_tokens
    match teacher.self_weights:
        case "current":
            return NetworkScorer(network, sampling, tokens)
        case "ema":
            average = learner.average
            assert average is not None  # ensured by the configuration checks
            return NetworkScorer(network, sampling, tokens, context=lambda: average.swap_in(learner.trainable_parameters))
        case "initial":
            if lora_layers(network.model):
                return NetworkScorer(network, sampling, tokens, context=without_adapters(network))
            return NetworkScorer(copy_frozen(network), sampling, tokens)


def _make_demonstration_prompt(demonstration: str, policy: LoadedPolicy) -> Callable[[Group], list[int]]:
    """Return a function that gives a group's prompt tokens, with the demonstration after its last message."""

    def prompt(group: Group) -> list[int]:
        messages = group.rollouts[0].messages
        first_turn = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
        question = list(messages[:first_turn])
        hint = demonstration.replace("{answer}", group.task.answer)
        question[-1] = Message(question[-1].role, f"{question[-1].content}\n\n{hint}")
        return policy.template.encode_prompt(question)

    return prompt


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
