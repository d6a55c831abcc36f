"""The same step through Strop and through a formula: a loss, and its gradient with respect to what a network puts out.

Strop's side goes the way of a run: ``pack``, columns, ``credit``, ``survey``, ``loss``. The formula's side gets the same numbers as lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conformance.cases import Sample, Step
from conformance.formulas_common import Row, Scalar, constant
from strop.algorithms.base import CANDIDATES, Algorithm, TokenOutputs, ValueOutputs
from strop.types import Batch, Ending, Group, Rollout, Task, Turn
from support.rollouts import pack_for

EXACT = 1e-9  # relative, in float64
SINGLE = 1e-6  # where a column is float32 by design


@dataclass(frozen=True)
class Outcome:
    value: float
    gradients: dict[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidates:
    """The teacher's k most likely tokens at each of the N places, by teacher and by student."""

    ids: Tensor  # [N, K]
    teacher: Tensor  # [N, K] log-probabilities
    student: Tensor  # [N, K] log-probabilities


class Leaves:
    """What a network puts out for the N tokens of a step, to be differentiated. Its type is torch's default one."""

    def __init__(self, step: Step, candidates: Candidates | None = None) -> None:
        self.step = step
        self.now = column(step, "now").requires_grad_()
        self.entropy = column(step, "entropy").requires_grad_()
        self.new_value = column(step, "new_value").requires_grad_()
        self.candidates = None if candidates is None else candidates.student.detach().clone().requires_grad_()

    def rows(self, *, filtered: bool = True) -> list[Row]:
        """``filtered``: truncated rollouts do not count."""
        rows, start = [], 0
        for place, group in enumerate(self.step.groups):
            for sample in group:
                tokens = slice(start, start := start + sample.length)
                rows.append(self._row(place, sample, tokens, filtered))
        return rows

    def _row(self, group: int, sample: Sample, tokens: slice, filtered: bool) -> Row:
        return Row(
            group=group,
            reward=sample.reward,
            now=list(self.now[tokens].unbind()),
            before=sample.before,
            sampler=sample.sampler,
            reference=sample.reference,
            teacher=sample.teacher,
            entropy=list(self.entropy[tokens].unbind()),
            value=sample.value,
            new_value=list(self.new_value[tokens].unbind()),
            advantage=[sample.advantage] * sample.length,
            counts=not (filtered and sample.truncated),
            parts=sample.parts,
        )

    def gradients(self, value: Scalar) -> dict[str, Tensor]:
        named = {"logprobs": self.now, "entropy": self.entropy, "values": self.new_value}
        if self.candidates is not None:
            named["candidates"] = self.candidates
        if not isinstance(value, Tensor) or not value.requires_grad:
            return {name: torch.zeros_like(tensor) for name, tensor in named.items()}
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(named.items(), found, strict=True)
        }


@contextmanager
def single_precision() -> Iterator[None]:
    """float32 columns and outputs, as in a run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def leaf(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def groups_of(step: Step) -> list[Group]:
    """Strop's groups: two prompt tokens each, completions of arbitrary ids, the sampler's log-probabilities in float64."""
    groups = []
    for place, members in enumerate(step.groups):
        rollouts = tuple(_rollout(place, number, sample) for number, sample in enumerate(members))
        greedy = _rollout(place, 99, replace(members[0], reward=step.greedy[place])) if step.greedy else None
        groups.append(Group(index=place, environment="test", version=0, rollouts=rollouts, baseline=greedy))
    return groups


def _rollout(group: int, number: int, sample: Sample) -> Rollout:
    turn = Turn(
        author="policy",
        tokens=torch.arange(5, 5 + sample.length),
        text="",
        logprobs=torch.tensor(sample.sampler),
        versions=torch.zeros(sample.length, dtype=torch.int32),
    )
    return Rollout(
        task=Task(id=f"task {group}"),
        sample=number,
        seed=number,
        messages=(),
        prompt=torch.tensor([1, 2 + group]),
        turns=(turn,),
        ending=Ending.LENGTH if sample.truncated else Ending.STOP,
        reward=sample.reward,
        rewards=sample.parts,
    )


def column(step: Step, name: str) -> Tensor:  # [N]
    return torch.tensor([number for sample in step.samples for number in getattr(sample, name)])


def per_token(step: Step, numbers: Sequence[float]) -> Tensor:
    """One number for each rollout -> [N]."""
    return torch.tensor([number for sample, number in zip(step.samples, numbers, strict=True) for _ in range(sample.length)])


def packed(step: Step, algorithm: Algorithm, candidates: Candidates | None = None) -> Batch:
    batch = pack_for(groups_of(step), algorithm)
    extras = {
        "policy_logprobs": column(step, "before"),
        "reference_logprobs": column(step, "reference"),
        "teacher_logprobs": column(step, "teacher"),
        "values": column(step, "value"),
    }
    if candidates is not None:
        extras |= {CANDIDATES: candidates.ids, "teacher_candidates": candidates.teacher}
    return batch.with_columns(extras)


def given_advantages(step: Step, batch: Batch) -> Batch:
    """The samples' own advantages, in float64, instead of those that come from rewards."""
    return replace(batch, advantages=per_token(step, [sample.advantage for sample in step.samples]))


def through_strop(
    algorithm: Algorithm,
    step: Step,
    *,
    given: bool = False,
    learner: str = "policy",
    candidates: Candidates | None = None,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> Outcome:
    """Strop's loss and gradients. ``given``: with the samples' own advantages, past ``credit``."""
    leaves = Leaves(step, candidates)
    batch = packed(step, algorithm, candidates)
    batch = prepare(given_advantages(step, batch) if given else algorithm.token_credit(batch))
    outputs = TokenOutputs(leaves.now, leaves.entropy, leaves.candidates)
    batch = algorithm.prepare_step(batch, detached(outputs) if algorithm.needs_step_outputs else None)
    loss = algorithm.losses(10**9)[learner]
    value, metrics = loss(outputs if learner == "policy" else ValueOutputs(leaves.new_value), batch)
    return Outcome(constant(value), leaves.gradients(value), {name: metric.value for name, metric in metrics.items()})


def detached(outputs: TokenOutputs) -> TokenOutputs:
    candidates = None if outputs.candidates is None else outputs.candidates.detach()
    return TokenOutputs(outputs.logprobs.detach(), outputs.entropy.detach(), candidates)


def through_formula(
    formula: Callable[[list[Row]], Scalar], step: Step, *, filtered: bool = True, credit: Sequence[Sequence[float]] | None = None
) -> Outcome:
    """A formula's loss and gradients. ``credit``: advantages per rollout and token, instead of the samples' own."""
    leaves = Leaves(step)
    rows = leaves.rows(filtered=filtered)
    if credit is not None:
        rows = [replace(row, advantage=list(values)) for row, values in zip(rows, credit, strict=True)]
    value = formula(rows)
    return Outcome(constant(value), leaves.gradients(value))


def assert_same(found: Outcome, wanted: Outcome, *, rtol: float = EXACT, atol: float = 1e-12) -> None:
    """Values and gradients, number by number."""
    assert math.isfinite(found.value), f"the loss is {found.value}, not {wanted.value}"
    assert abs(found.value - wanted.value) <= atol + rtol * abs(wanted.value), f"loss {found.value!r}, formula {wanted.value!r}"
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=rtol, atol=atol, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )
