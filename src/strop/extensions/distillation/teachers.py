"""Load teachers: whole, or sharded over the learner's ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from strop.algorithms.base import Algorithm
from strop.base_config import validate_section
from strop.distributed.workers.learner_worker import RankColumns
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES, TEACHER_COLUMNS, TEACHER_LOGPROBS
from strop.extensions.distillation.distillation_config import DistillationRunConfig, TeacherConfig
from strop.extensions.distillation.teacher import (
    LocalScorer,
    SelfTeacher,
    TeacherLogprobs,
    TeacherScorer,
    TeacherTopK,
    shared_vocabulary_size,
)
from strop.learner.base import ColumnSource
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.parallelism import Parallelism
from strop.learner.parallel.rank_zero_loading import RankZeroLoader
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import ScoringContext, copy_frozen, offload, without_adapters
from strop.models.adapters import lora_layers
from strop.models.loading import ModelNotFound
from strop.models.network import Network
from strop.runs.cluster.torch_rank_builders import parallelize
from strop.runs.models import HOST_LOADER, LoadedPolicy, ModelLoader, load_policy, resolve_device
from strop.sampling import Sampling
from strop.types import Group, Message


class Student(Protocol):
    """What a teacher needs to know of the policy."""

    @property
    def vocab_size(self) -> int:
        """Size of its output layer."""
        ...

    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class StudentInfo:
    """A ``Student`` for a teacher in another process."""

    vocab_size: int
    tokenizer: Any


@dataclass(frozen=True, eq=False)
class LoadedTeacher:
    """A teacher's frozen network."""

    network: Network
    vocab_size: int  # number of token ids, from 0, shared with the student


def find_teacher_columns(config: DistillationRunConfig, algorithm: Algorithm) -> frozenset[str]:
    """Return the columns that teachers fill for the algorithm. Raises ValueError if there are none."""
    columns = algorithm.requires & TEACHER_COLUMNS
    if not columns:
        raise ValueError(
            f"algorithm.name: {config.algorithm.name} does not use a teacher; run strop grpo, or choose another algorithm"
        )
    return frozenset(columns)


def describe_student(policy: Student) -> StudentInfo:
    return StudentInfo(policy.vocab_size, policy.tokenizer)


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
        student.vocab_size, teacher_policy.vocab_size, (student.tokenizer, teacher_policy.tokenizer)
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
    scorer = TeacherScorer(loaded.network, unfiltered_sampling(sampling, columns), tokens, parallelism, context)
    return {column: make_source(column, scorer, config, loaded.vocab_size) for column in columns}


def find_scorer(source: Any) -> TeacherScorer:
    """Return the scorer of a teacher's source."""
    while not isinstance(source, TeacherScorer):
        source = source.teacher
    return source


def make_self_teacher(
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


def _make_self_scorer(teacher: TeacherConfig, network: Network, sampling: Sampling, learner: TorchLearner) -> TeacherScorer:
    """Make the scorer of a self-teacher: the policy with its current, averaged or initial weights."""
    tokens = teacher.logprob_mb_tokens or learner.config.score_tokens
    match teacher.self_weights:
        case "current":
            return TeacherScorer(network, sampling, tokens)
        case "ema":
            average = learner.average
            assert average is not None  # ensured by the configuration checks
            return TeacherScorer(network, sampling, tokens, context=lambda: average.swap_in(learner.trainable_parameters))
        case "initial":
            if lora_layers(network.model):
                return TeacherScorer(network, sampling, tokens, context=without_adapters(network))
            return TeacherScorer(copy_frozen(network), sampling, tokens)


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


def load_rank_teachers(
    config: DistillationRunConfig, policy: Student, algorithm: Algorithm, sampling: Sampling, device: str, world: int
) -> dict[tuple[str, str], tuple[RankColumns, TeacherScorer]]:
    """Load the teachers that ranks hold with the torch learner, each sharded over all of them according to its ``dtensor_cfg``.

    Raises ValueError for a teacher that cannot be sharded that way.
    """
    columns: dict[tuple[str, str], tuple[RankColumns, TeacherScorer]] = {}
    for key, teacher in config.all_teachers.items():
        if teacher.hosts or not teacher.uses_torch:
            continue
        loaded = load_teacher_network(key, config, describe_student(policy), RankZeroLoader())
        try:
            sharded = parallelize(loaded.network, teacher, device, world, cpu_offload=teacher.offload)
        except ValueError as error:
            raise ValueError(f"{key}.dtensor_cfg: {error}") from error
        wanted = find_teacher_columns(config, algorithm)
        for column, source in make_teacher_sources(key, config, loaded, wanted, sampling, parallelism=sharded).items():
            columns[key, column] = source, find_scorer(source)
    return columns
