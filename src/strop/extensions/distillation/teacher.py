"""Teachers: sources of the columns that distillation learns from.

    one teacher                    TeacherLogprobs(teacher)             -> teacher_logprobs [N]
                                   TeacherTopK(teacher, count)          -> candidates, teacher_candidates [N, K]
    one of several by environment  RoutedTeachers({environment: source})
    a mixture of several           MixedTeachers([source, ...])
    the policy, after a            SelfTeacher(source, prompt)
        demonstration

A teacher scores the token ids that the student sampled, so both must share a vocabulary: ``shared_vocabulary_size`` checks it. Its
``sampling`` has the student's temperature and no filters. Several teachers may be in other processes, so their combinations are awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from strop.algorithms.base import CANDIDATES
from strop.data.packing import pack
from strop.data.shares import BatchShare, ShareRequest
from strop.data.splitting import select_rollouts
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS
from strop.extensions.distillation.top_tokens import TopTokens, compute_top_tokens
from strop.learner.base import ColumnSource, Scorer, require_token_outputs
from strop.learner.client import AsyncColumnSource
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatchOutputs
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.types import Batch, Group

LocalColumns = tuple[Tensor, Mapping[str, Tensor]]
"""Columns for some positions [n] of a batch's N, computed by one rank."""


class LocalScorer(Protocol):
    """A teacher's network; each rank reads its part of a batch."""

    @property
    def vocab_size(self) -> int: ...

    def share_requests(self) -> Mapping[str, ShareRequest]: ...

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs: ...

    def top_tokens_local(self, batch: Batch | BatchShare, count: int, vocabulary: int) -> Sequence[tuple[Tensor, TopTokens]]: ...


@dataclass(frozen=True)
class TeacherScorer(NetworkScorer):
    """A teacher's network, a ``LocalScorer``."""

    @property
    def vocab_size(self) -> int:
        """Size of the output layer."""
        assert isinstance(self.network, Network)
        return self.network.head.vocabulary

    def top_tokens_local(self, batch: Batch | BatchShare, count: int, vocabulary: int) -> LocalOutputs[TopTokens]:
        """Return the ``count`` most likely of the first ``vocabulary`` token ids at this rank's positions [n] in the batch's N."""
        network, sampling = self.network, self.sampling
        assert isinstance(network, Network)
        return self.read_local(batch, lambda part: compute_top_tokens(network, part, sampling, count, vocabulary))


@dataclass(frozen=True)
class TeacherLogprobs:
    """The log-probabilities of the sampled tokens under a teacher: ``teacher_logprobs`` [N]. The teacher may be any scorer; on ranks, one
    that has ``score_local``."""

    teacher: Scorer | LocalScorer

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return {TEACHER_LOGPROBS: require_token_outputs(cast(Scorer, self.teacher).score(batch)).logprobs}

    def share_requests(self) -> Mapping[str, ShareRequest]:
        """Return the share of a batch that this rank reads."""
        return {"columns": cast(LocalScorer, self.teacher).share_requests()["score"]}

    def columns_local(self, batch: Batch | BatchShare) -> list[LocalColumns]:
        """Return the column for this rank's micro-batches."""
        results = cast(LocalScorer, self.teacher).score_local(batch).outputs
        return [(index, {TEACHER_LOGPROBS: require_token_outputs(outputs).logprobs}) for index, outputs in results]


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's ``count`` most likely tokens at each position, as ``candidates``, and their log-probabilities, as
    ``teacher_candidates``: [N, K] each, on the CPU, int64 and float32."""

    teacher: LocalScorer
    count: int
    vocabulary: int | None = None  # number of token ids that the student shares: see shared_vocabulary_size

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Raises ValueError if ``count`` exceeds the vocabulary."""
        columns: dict[str, Tensor] = {
            CANDIDATES: torch.zeros(len(batch.target), self.count, dtype=torch.int64),
            TEACHER_CANDIDATES: torch.zeros(len(batch.target), self.count),
        }
        for index, part in self.columns_local(batch):
            for name, column in part.items():
                columns[name][index] = column
        return columns

    def share_requests(self) -> Mapping[str, ShareRequest]:
        """Return the share of a batch that this rank reads."""
        return {"columns": self.teacher.share_requests()["score"]}

    def columns_local(self, batch: Batch | BatchShare) -> list[LocalColumns]:
        """Return the columns for this rank's micro-batches. Raises ValueError if ``count`` exceeds the vocabulary."""
        size = self.teacher.vocab_size if self.vocabulary is None else self.vocabulary
        if not 1 <= self.count <= size:
            raise ValueError(f"the {self.count} most likely of {size} tokens were requested; set topk_logits_k to at most {size}")
        parts = self.teacher.top_tokens_local(batch, self.count, size)
        return [(index, {CANDIDATES: top.ids, TEACHER_CANDIDATES: top.logprobs}) for index, top in parts]


@dataclass(frozen=True)
class RoutedTeachers:
    """Routes each group to the teacher of its environment. All teachers must return the same columns with the same shapes."""

    teachers: Mapping[str, AsyncColumnSource]  # by environment name
    default: AsyncColumnSource | None = None  # for all other environments

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Raises ValueError for a group without a teacher."""
        owners = [self.teacher_for(group.environment) for group in groups]
        calls = []
        for teacher in {id(owner): owner for owner in owners}.values():
            indices = [index for index, owner in enumerate(owners) if owner is teacher]
            part = select_rollouts(batch, torch.isin(batch.group, torch.tensor(indices)).nonzero().flatten().tolist())
            calls.append((part, teacher.columns(part.batch, [groups[index] for index in indices])))
        columns: dict[str, Tensor] = {}
        results = await asyncio.gather(*(call for _, call in calls))  # concurrent if the teachers are in other processes
        for (part, _), result in zip(calls, results, strict=True):
            for name, column in result.items():
                if name not in columns:
                    columns[name] = torch.zeros(len(batch.target), *column.shape[1:], dtype=column.dtype)
                columns[name][part.index] = column
        return columns

    def teacher_for(self, environment: str) -> AsyncColumnSource:
        teacher = self.teachers.get(environment, self.default)
        if teacher is None:
            raise ValueError(
                f"the environment {environment!r} has no teacher: there are teachers for {', '.join(sorted(self.teachers))}; "
                "add it to teacher.environments, or configure one teacher for all environments"
            )
        return teacher


@dataclass(frozen=True)
class MixedTeachers:
    """The mixture of several teachers, log sum_i w_i p_i(token), with weights normalized to sum to 1: ``teacher_logprobs`` [N].

    Supports sampled tokens only: the most likely tokens of a mixture do not follow from those of its teachers.
    """

    teachers: Sequence[AsyncColumnSource]
    weights: Sequence[float] | None = None  # None: equal weights

    def __post_init__(self) -> None:
        weights = self.weights
        if not self.teachers or (weights is not None and (len(weights) != len(self.teachers) or min(weights) <= 0)):
            raise ValueError(f"{len(self.teachers)} teachers have the weights {weights}; set one weight above 0 for each teacher")

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Raises ValueError for a teacher that returns other columns."""
        results = await asyncio.gather(*(teacher.columns(batch, groups) for teacher in self.teachers))
        if any(set(columns) != {TEACHER_LOGPROBS} for columns in results):
            raise ValueError("teachers can be mixed only for distillation on sampled tokens; otherwise route them by environment")
        weights = torch.tensor(self.weights or [1.0] * len(results), dtype=torch.float64)
        logs = torch.stack([columns[TEACHER_LOGPROBS].double() for columns in results]) + (weights / weights.sum()).log()[:, None]
        return {TEACHER_LOGPROBS: logs.logsumexp(0).float()}


@dataclass(frozen=True)
class SelfTeacher:
    """Self-distillation (arXiv 2601.19897): the teacher scores the same rollouts after a prompt that contains a demonstration.

    ``teacher`` may be a frozen copy of the policy, its moving average (the paper's choice), the policy with its adapters disabled, or the
    learner itself. ``prompt`` returns the token ids of a group's prompt with the demonstration; it must leave room for the rollouts.
    """

    teacher: ColumnSource
    prompt: Callable[[Group], Sequence[int]]

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Raises ValueError if the batch was not packed from ``groups``."""
        teacher_groups = [self._with_demonstration(group) for group in groups]
        teacher_batch = pack(teacher_groups)
        if not torch.equal(teacher_batch.target, batch.target):
            raise ValueError("the batch was not packed from these groups: their sampled tokens differ")
        return self.teacher.columns(teacher_batch, teacher_groups)

    def _with_demonstration(self, group: Group) -> Group:
        prompt = torch.tensor(list(self.prompt(group)), dtype=torch.int64)
        if not len(prompt):
            raise ValueError(
                f"the demonstration prompt of task {group.task.id!r} is empty: the first token is predicted from its last token"
            )
        return replace(group, rollouts=tuple(replace(rollout, prompt=prompt) for rollout in group.rollouts))


_PROBE_TEXT = 'Déjà vu: 12 + 7 = 19, a naïve "test" -- 你好, мир!\n\tdef f(x):  return x**2  # and so on...'


def shared_vocabulary_size(student: int, teacher: int, tokenizers: tuple[Any, Any] | None = None) -> int:
    """Return the number of token ids, from 0, that student and teacher share; for ``TeacherTopK.vocabulary``.

    ``student`` and ``teacher`` are the sizes of the output layers, ``tokenizers`` the tokenizers of student and teacher. Output layers are
    padded, so models of one family with one tokenizer differ in size: sizes are compared only without tokenizers. Raises
    ValueError if the teacher would read different text from what the student wrote.
    """
    if student > teacher:
        raise ValueError(
            f"the student can sample {student} token ids and the teacher reads {teacher}: it does not know the ids from {teacher} "
            "on; choose a teacher of the student's family"
        )
    if tokenizers is None:
        if student != teacher:
            raise ValueError(
                f"the student has {student} token ids and the teacher {teacher}: without their tokenizers their vocabularies cannot "
                "be compared; choose a teacher of the student's family"
            )
        return student
    student_ids, teacher_ids = (tokenizer.get_vocab() for tokenizer in tokenizers)
    if differing := sorted((index, token) for token, index in student_ids.items() if teacher_ids.get(token) != index):
        index, token = differing[0]
        raise ValueError(
            f"the tokenizers of student and teacher differ in {len(differing)} tokens; the first is {token!r}: {index} for the "
            f"student and {teacher_ids.get(token, 'unknown')} for the teacher; choose a teacher of the student's family"
        )
    student_tokens, teacher_tokens = (tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers)
    if student_tokens != teacher_tokens:
        raise ValueError(
            f"the tokenizers of student and teacher have the same tokens but split text differently: {_PROBE_TEXT[:20]!r}... is "
            f"{len(student_tokens)} tokens for the student and {len(teacher_tokens)} for the teacher; choose a teacher of the student's "
            "family"
        )
    return min(student, int(max(student_ids.values())) + 1)
