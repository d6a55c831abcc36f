"""Create the teachers of a distillation and the sources of their columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from strop.algorithms.base import Algorithm
from strop.algorithms.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS
from strop.base_config import validate_section
from strop.config.schema.distillation_config import TeacherConfig
from strop.config.schema.run_config import DistillationRunConfig
from strop.learner.base import ColumnSource
from strop.learner.client import AsyncColumnSource
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.torch.learner import TorchLearner
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
from strop.runs.models import HOST_LOADER, LoadedPolicy, ModelLoader, load_policy, resolve_device
from strop.sampling import Sampling
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
    return StudentInfo(int(policy.network.head.weight.shape[0]), policy.tokenizer)


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
    tokens = config.all_teachers[key].logprob_mb_tokens
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
    tokens = teacher.logprob_mb_tokens
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
