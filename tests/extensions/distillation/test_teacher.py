"""Teachers: what their columns hold, who teaches whom, and which vocabularies are refused."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import CANDIDATES
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS, Distillation, TopKDistillation
from strop.extensions.distillation.teacher import (
    MixedTeachers,
    RoutedTeachers,
    SelfTeacher,
    TeacherLogprobs,
    TeacherScorer,
    TeacherTopK,
    shared_vocabulary_size,
)
from strop.learner.base import ColumnSource
from strop.learner.client import AsyncColumnSource
from strop.learner.torch.scorer import offload
from strop.learner.torch.weight_average import AveragedWeights
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch, Group, observation_turn
from support.clients import column_client
from support.models import VOCABULARY, build
from support.rollouts import (
    GroupShape,
    RolloutShape,
    make_group,
    make_groups,
    make_rollout,
    pack_for,
    sampled_turn,
    simple_groups,
)
from support.tokenizer import build_tokenizer


def teacher_of(
    family: str = "llama", *, seed: int = 1, temperature: float = 1.0, tokens: int = 13, **options: Any
) -> TeacherScorer:
    network = Network(build(family, seed=seed), chunk=3, **options)
    return TeacherScorer(network, Sampling(temperature=temperature), tokens)


def batch_of(groups: Sequence[Group]) -> Batch:
    return pack_for(groups, Distillation())


def columns(source: ColumnSource | AsyncColumnSource, groups: Sequence[Group]) -> Mapping[str, Tensor]:
    found = source.columns(batch_of(groups), groups)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def alone(teacher: TeacherScorer, groups: Sequence[Group]) -> Tensor:
    """Log-probabilities of every token at each sampled place, each rollout through the model alone: [N, V]."""
    rows = []
    model = teacher.network.model
    teacher.network.use_native_attention()
    with torch.no_grad():
        for group in groups:
            for rollout in group.rollouts:
                logs = (model(input_ids=rollout.tokens()[None]).logits[0] / (teacher.sampling.temperature or 1)).log_softmax(-1)
                place = len(rollout.prompt)
                for turn in rollout.turns:
                    rows += [logs[place + offset - 1] for offset in range(len(turn.tokens)) if turn.sampled]
                    place += len(turn.tokens)
    teacher.network.use_learner_attention()
    return torch.stack(rows)


@dataclass
class Constant:
    """A source that says one number everywhere, and remembers what it was asked."""

    value: float
    name: str = TEACHER_LOGPROBS
    seen: list[list[int]] | None = None

    def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        if self.seen is not None:
            self.seen.append([group.index for group in groups])
        assert batch.num_groups == len(groups)
        return {self.name: torch.full((len(batch.target),), self.value)}


GROUPS = [
    GroupShape(4, (RolloutShape(((3, 2), (4, 0))), RolloutShape(((5, 0),)))),
    GroupShape(6, (RolloutShape(((2, 0),)),), own_prompts=True),
]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_teacher_gives_the_sampled_tokens_what_it_would_give_them_alone(temperature: float) -> None:
    teacher, groups = teacher_of(temperature=temperature), make_groups(GROUPS, 0)
    found = columns(TeacherLogprobs(teacher), groups)[TEACHER_LOGPROBS]
    wanted = alone(teacher, groups).gather(1, batch_of(groups).target[:, None]).squeeze(1)
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("gemma2", {}), ("llama", {"packed": False})])
def test_a_teachers_most_likely_tokens_are_those_of_its_distribution(family: str, options: dict[str, Any]) -> None:
    teacher, groups = teacher_of(family, temperature=0.8, **options), make_groups(GROUPS, 0)
    found = columns(TeacherTopK(teacher, 5), groups)
    wanted = alone(teacher, groups).topk(5)
    assert torch.equal(found[CANDIDATES], wanted.indices)
    assert torch.allclose(found[TEACHER_CANDIDATES], wanted.values, atol=1e-4)
    assert found[CANDIDATES].dtype == torch.int64
    assert found[TEACHER_CANDIDATES].dtype == torch.float32


def test_most_likely_tokens_are_chosen_among_those_the_student_knows_with_the_teachers_own_probabilities() -> None:
    teacher, groups = teacher_of(), make_groups(GROUPS, 0)
    found = columns(TeacherTopK(teacher, 4, vocabulary=20), groups)
    wanted = alone(teacher, groups)[:, :20].topk(4)
    assert torch.equal(found[CANDIDATES], wanted.indices)
    assert torch.allclose(found[TEACHER_CANDIDATES], wanted.values, atol=1e-4)


def test_a_student_that_is_the_teacher_has_its_candidates() -> None:
    """The student's network and the teacher's columns mean the same tokens at the same places."""
    teacher, groups = teacher_of(), make_groups(GROUPS, 0)
    batch = pack_for(groups, TopKDistillation()).with_columns(columns(TeacherTopK(teacher, 6), groups))
    outputs = teacher.network.outputs(batch, Sampling())
    assert outputs.candidates is not None
    assert torch.allclose(outputs.candidates, batch.column(TEACHER_CANDIDATES), atol=1e-5)


@pytest.mark.parametrize("count", [0, VOCABULARY + 1])
def test_more_tokens_than_there_are_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match=f"the {count} most likely of {VOCABULARY} tokens"):
        columns(TeacherTopK(teacher_of(), count), make_groups(GROUPS, 0))


def test_weights_can_be_swapped_in_while_a_teacher_reads() -> None:
    """The moving average of the policy's own weights, in place of a copy of the model."""
    model = build("llama", seed=1)
    named = list(model.named_parameters())
    average = AveragedWeights(named, decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in named}
    with torch.no_grad():
        for _, parameter in named:
            parameter.add_(0.05)
    network = Network(model)
    teacher = TeacherScorer(network, Sampling(), 50, context=lambda: average.swap_in(named))
    groups = make_groups(GROUPS, 0)
    wanted = columns(TeacherLogprobs(teacher_of(seed=1)), groups)[TEACHER_LOGPROBS]
    assert torch.allclose(columns(TeacherLogprobs(teacher), groups)[TEACHER_LOGPROBS], wanted, atol=1e-4)
    assert not torch.allclose(columns(TeacherLogprobs(replace_during(teacher)), groups)[TEACHER_LOGPROBS], wanted, atol=1e-2)
    top = columns(TeacherTopK(teacher, 3), groups)
    assert torch.equal(top[CANDIDATES], columns(TeacherTopK(teacher_of(seed=1), 3), groups)[CANDIDATES])
    assert all(torch.allclose(parameter, before[name] + 0.05) for name, parameter in named), "they are what they were"


def replace_during(teacher: TeacherScorer) -> TeacherScorer:
    return TeacherScorer(teacher.network, teacher.sampling, teacher.score_tokens)


def test_a_network_is_offloaded_when_its_scorer_is_made_unless_it_is_on_the_cpu() -> None:
    network = teacher_of().network
    moves: list[str] = []
    network.model.to = lambda device: moves.append(str(device))
    with offload(network)():
        assert moves == []
    network.device = torch.device("cuda", 0)
    context = offload(network)
    assert moves == ["cpu"]
    with pytest.raises(ZeroDivisionError), context():
        assert moves == ["cpu", "cuda:0"]
        raise ZeroDivisionError
    assert moves == ["cpu", "cuda:0", "cpu"]


def test_each_group_goes_to_the_teacher_of_its_environment() -> None:
    groups = [
        replace(group, environment=name)
        for group, name in zip(simple_groups((3, (4, 2)), (2, (5,)), (3, (1,)), (2, (2,))), "abca", strict=True)
    ]
    seen: dict[str, list[list[int]]] = {"a": [], "b": [], "rest": []}
    routed = RoutedTeachers(
        {name: column_client(Constant(value, seen=seen[name])) for name, value in (("a", -1.0), ("b", -2.0))},
        column_client(Constant(-3.0, seen=seen["rest"])),
    )
    found = columns(routed, groups)[TEACHER_LOGPROBS]
    assert found.tolist() == [-1.0] * 6 + [-2.0] * 5 + [-3.0] + [-1.0] * 2
    assert seen == {"a": [[0, 3]], "b": [[1]], "rest": [[2]]}


def test_a_group_without_a_teacher_is_an_error_that_names_its_environment() -> None:
    with pytest.raises(ValueError, match="the environment 'test' has no teacher: there are teachers for math"):
        columns(RoutedTeachers({"math": column_client(Constant(0.0))}), simple_groups((3, (4,))))


def test_a_mixture_is_the_logarithm_of_the_weighted_mean_of_probabilities() -> None:
    groups = make_groups(GROUPS, 0)
    sources = [column_client(TeacherLogprobs(teacher_of(seed=seed))) for seed in (1, 2)]
    left, right = (columns(source, groups)[TEACHER_LOGPROBS].double().exp() for source in sources)
    assert torch.allclose(columns(MixedTeachers(sources), groups)[TEACHER_LOGPROBS].exp().double(), (left + right) / 2, atol=1e-6)
    weighted = columns(MixedTeachers(sources, [3.0, 1.0]), groups)[TEACHER_LOGPROBS].exp().double()
    assert torch.allclose(weighted, 0.75 * left + 0.25 * right, atol=1e-6)
    assert torch.allclose(columns(MixedTeachers(sources[:1]), groups)[TEACHER_LOGPROBS].exp().double(), left, atol=1e-6)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, 1.0, 1.0]])
def test_each_teacher_of_a_mixture_has_a_weight_above_zero(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="2 teachers have the weights"):
        MixedTeachers([column_client(Constant(0.0))] * 2, weights)


def test_most_likely_tokens_cannot_be_mixed() -> None:
    with pytest.raises(ValueError, match="on sampled tokens"):
        columns(MixedTeachers([column_client(TeacherTopK(teacher_of(), 2))]), make_groups(GROUPS, 0))


def test_a_teacher_that_is_shown_how_reads_the_same_tokens_after_another_prompt() -> None:
    teacher = teacher_of()
    groups = make_groups(GROUPS, 0)
    shown = SelfTeacher(TeacherLogprobs(teacher), lambda group: [9, 8, *group.rollouts[0].prompt.tolist(), 7])
    found = columns(shown, groups)[TEACHER_LOGPROBS]
    others = [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, prompt=torch.tensor([9, 8, *group.rollouts[0].prompt.tolist(), 7])) for rollout in group.rollouts
            ),
        )
        for group in groups
    ]
    wanted = alone(teacher, others).gather(1, batch_of(groups).target[:, None]).squeeze(1)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert not torch.allclose(found, columns(TeacherLogprobs(teacher), groups)[TEACHER_LOGPROBS], atol=1e-2)


def test_what_the_environment_said_is_read_and_empty_rollouts_are_harmless() -> None:
    group = make_group(
        make_rollout([5, 6], sampled_turn([7]), observation_turn([8, 9], ""), sampled_turn([10, 11])), make_rollout([5, 6])
    )
    teacher = teacher_of()
    found = columns(SelfTeacher(TeacherLogprobs(teacher), lambda _: [5, 6]), [group])[TEACHER_LOGPROBS]
    assert torch.allclose(found, columns(TeacherLogprobs(teacher), [group])[TEACHER_LOGPROBS], atol=1e-6)


def test_groups_that_are_not_the_batchs_and_empty_prompts_are_errors() -> None:
    groups = simple_groups((4, (3, 5)), (2, (6,)))
    shown = SelfTeacher(Constant(0.0), lambda group: [5])
    with pytest.raises(ValueError, match="the batch was not packed from these groups"):
        shown.columns(batch_of(groups), groups[::-1])
    with pytest.raises(ValueError, match="demonstration prompt of task 'task' is empty"):
        columns(SelfTeacher(Constant(0.0), lambda group: []), groups)


def test_one_tokenizer_is_one_vocabulary_whatever_the_padding_of_output_layers() -> None:
    pair = (build_tokenizer(), build_tokenizer())
    assert shared_vocabulary_size(VOCABULARY, VOCABULARY) == VOCABULARY
    assert shared_vocabulary_size(320, 384, pair) == VOCABULARY


def test_other_sizes_without_tokenizers_are_refused_and_so_is_a_student_that_says_what_the_teacher_cannot_read() -> None:
    with pytest.raises(ValueError, match="300 token ids and the teacher 310"):
        shared_vocabulary_size(300, 310)
    with pytest.raises(ValueError, match="does not know the ids from 307 on"):
        shared_vocabulary_size(320, 307, (build_tokenizer(), build_tokenizer()))


def test_tokenizers_that_number_their_tokens_otherwise_are_refused() -> None:
    student, teacher = build_tokenizer(), build_tokenizer()
    teacher.add_tokens(["<more>"])
    assert shared_vocabulary_size(VOCABULARY, 320, (student, teacher)) == VOCABULARY, "the teacher may know more tokens"
    student.add_tokens(["<other>"])
    with pytest.raises(ValueError, match="differ in 1 tokens; the first is '<other>': 307 for the student and unknown"):
        shared_vocabulary_size(320, 320, (student, teacher))


def test_tokenizers_that_cut_text_otherwise_are_refused() -> None:
    @dataclass
    class Characters:
        """The same tokens without merges."""

        tokenizer: Any

        def get_vocab(self) -> dict[str, int]:
            return dict(self.tokenizer.get_vocab())

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [token for letter in text for token in self.tokenizer(letter)["input_ids"]]}

    tokenizer = build_tokenizer()
    with pytest.raises(ValueError, match="split text differently"):
        shared_vocabulary_size(VOCABULARY, VOCABULARY, (tokenizer, Characters(tokenizer)))
