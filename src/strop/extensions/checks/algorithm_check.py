"""Check an algorithm on made-up rollouts, without a model: what it returns, that its loss keeps law 1, and its formula.

The batches are made by packing as in a run, in float64; the network's outputs are random numbers. So every check takes milliseconds and
holds for any model. Of each kind of rollouts that can occur (several turns, step rewards, equal rewards, a cut one) there is one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from strop.algorithm_factory import format_algorithm
from strop.algorithms.base import CANDIDATES, Algorithm, Outputs, Plan, TokenOutputs, ValueOutputs
from strop.algorithms.policy_gradient.turns import make_step_columns, make_turn_advantages, make_turn_columns
from strop.data.packing import pack
from strop.endings import Ending
from strop.extensions.checks.algorithm_report import REWARD_NAMES, AlgorithmReport, Formula, Point
from strop.extensions.distillation.distillation import TEACHER_CANDIDATES
from strop.metrics import to_floats
from strop.trainer.loss_check import differentiate, differentiate_parts, find_cut_fault, find_zero_fault
from strop.types import Batch, Group, Rollout, StepReward, Task, Turn, observation_turn
from strop.user_code import describe_error

VOCABULARY = 64
CANDIDATE_COUNT = 4


@dataclass(frozen=True)
class GroupShape:
    """A group to make up: the turns of each rollout as numbers of sampled tokens, and the rewards."""

    turns: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


# Two groups of several rollouts with several turns, one without signal, one with a long rollout among short ones.
SHAPES = (
    GroupShape(((3,), (5, 2), (1,), (4,)), (1.0, 0.0, 0.5, 0.25)),
    GroupShape(((2, 3), (6,)), (0.0, 1.0)),
    GroupShape(((3,), (2,), (2, 2)), (1.0, 1.0, 1.0)),
    GroupShape(((1,), (17,), (2,)), (1.0, 0.75, 0.0)),
)
PAIRS = tuple(GroupShape(((3 + index,), (5 - index,)), (1.0, 0.0)) for index in range(4))
JUDGEMENTS = tuple(GroupShape(((2 + index,), (3,)), (float(index % 2), 0.0)) for index in range(5))  # each with an unrelated one
CONVERSATIONS = tuple(GroupShape(((2 + index,),), (1.0,)) for index in range(5))


def make_groups(algorithm: Algorithm) -> list[Group]:
    """Make groups of the kind that the algorithm trains on: sampled ones, or recorded conversations, pairs or judgements."""
    recorded = {"preferences": PAIRS, "judgements": JUDGEMENTS, "conversations": CONVERSATIONS}
    shapes = recorded.get(algorithm.recorded_data, SHAPES)
    return [make_group(index, shape, algorithm) for index, shape in enumerate(shapes)]


def make_group(index: int, shape: GroupShape, algorithm: Algorithm) -> Group:
    noise = torch.Generator().manual_seed(index)
    prompt = torch.randint(VOCABULARY, (4,), generator=noise)
    rollouts = [
        _make_rollout(index, sample, prompt, turns, reward, noise, recorded=bool(algorithm.recorded_data))
        for sample, (turns, reward) in enumerate(zip(shape.turns, shape.rewards, strict=True))
    ]
    return Group(
        index=index,
        environment="check",
        version=0,
        rollouts=tuple(rollouts),
        baseline=replace(rollouts[0], reward=0.4) if algorithm.greedy_baseline else None,
    )


def _make_rollout(
    index: int, sample: int, prompt: Tensor, lengths: Sequence[int], reward: float, noise: torch.Generator, *, recorded: bool
) -> Rollout:
    turns: list[Turn] = []
    for place, length in enumerate(lengths):
        turns += [observation_turn([1, 2], "")] if place else []
        turns.append(
            Turn(
                author="policy",
                tokens=torch.randint(VOCABULARY, (length,), generator=noise),
                text="",
                logprobs=-0.1 - 3 * torch.rand(length, generator=noise),
                versions=torch.zeros(length, dtype=torch.int32),
            )
        )
    ends = [sum(lengths[: place + 1]) - 1 for place in range(len(lengths))]
    return Rollout(
        task=Task(id=f"check-{index}"),
        sample=sample,
        seed=sample,
        messages=(),
        prompt=prompt,
        turns=tuple(turns),
        ending=Ending.LENGTH if sample == 1 else Ending.STOP,
        reward=reward,
        rewards=dict(zip(REWARD_NAMES, (reward, 0.5 * sample), strict=True)),
        step_rewards=() if recorded else tuple(StepReward(end, reward / (2 * len(ends))) for end in ends),
        turn_states=tuple("start" if place == 0 else f"state-{sample % 2}" for place in range(len(lengths))),
    )


@dataclass(frozen=True)
class Step:
    """One optimizer step of a learner: its batch, prepared, and the outputs of its network."""

    batch: Batch
    outputs: Outputs


def make_step(algorithm: Algorithm, groups: Sequence[Group], learner: str, *, spread: float = 0.2) -> Step:
    """Pack groups and prepare the step as a run does. ``spread``: how far the policy is from what sampled, in nats.

    Everything is float64, so that two ways to compute one number agree far below the rounding of float32.
    """
    noise = torch.Generator().manual_seed(17)
    packed = pack(groups, algorithm.group_credit(groups))
    batch = replace(packed, advantages=packed.advantages.double(), mask=packed.mask.double())
    for make_columns in (make_step_columns, make_turn_columns, make_turn_advantages):
        batch = batch.with_columns(make_columns(batch, groups))
    logprobs = -0.1 - 3 * torch.rand(len(batch.target), generator=noise, dtype=torch.float64)

    def near(width: float) -> Tensor:
        return (logprobs + width * torch.randn(len(logprobs), generator=noise, dtype=torch.float64)).clamp(max=-1e-3)

    batch = replace(batch, rollout_logprobs=near(spread)).with_column("policy_logprobs", near(spread))
    for name in sorted(algorithm.requires - set(batch.columns)):
        batch = batch.with_columns(_make_candidates(noise, len(logprobs)) if name == TEACHER_CANDIDATES else {name: near(0.5)})
    outputs = TokenOutputs(
        logprobs=logprobs,
        entropy=0.5 + torch.rand(len(logprobs), generator=noise, dtype=torch.float64),
        candidates=_logprobs_of_some(noise, len(logprobs)) if CANDIDATES in batch.columns else None,
        log_sum_sq_probs=2 * logprobs - 0.5,
    )
    batch = algorithm.token_credit(batch)
    batch = algorithm.prepare_step(batch, outputs if algorithm.needs_step_outputs else None)
    batch = replace(batch, zero_gradient=algorithm.zero_gradient(batch, learner))
    return Step(batch, ValueOutputs(near(0.5)) if learner == "value" or algorithm.predict == "last_token" else outputs)


def _logprobs_of_some(noise: torch.Generator, count: int) -> Tensor:  # [N, K]: log-probabilities of K tokens, below 1 in sum
    scores = torch.randn(count, CANDIDATE_COUNT + 1, generator=noise, dtype=torch.float64)
    return scores.log_softmax(-1)[:, :CANDIDATE_COUNT]


def _make_candidates(noise: torch.Generator, count: int) -> dict[str, Any]:
    ids = torch.rand(count, VOCABULARY, generator=noise).topk(CANDIDATE_COUNT).indices
    return {CANDIDATES: ids, TEACHER_CANDIDATES: _logprobs_of_some(noise, count)}


def make_unit(algorithm: Algorithm, log_ratio: float, advantage: float) -> Step:
    """Make the smallest batch in which a policy has moved: one token whose log-probability differs by ``log_ratio`` from that of the
    policy before; for pairs of recorded data, the difference is half in the chosen and half in the rejected answer.
    """
    pair = algorithm.recorded_data == "preferences"
    shape = GroupShape(((1,), (1,)), (1.0, 0.0)) if pair else GroupShape(((1,),), (1.0,))
    step = make_step(algorithm, [make_group(0, shape, algorithm)], "policy", spread=0.0)
    before = torch.full((len(step.batch.target),), -1.0, dtype=torch.float64)
    columns = dict.fromkeys(algorithm.requires | {"policy_logprobs"}, before)
    batch = replace(step.batch, rollout_logprobs=before, columns={**step.batch.columns, **columns})
    if not pair:
        batch = replace(batch, advantages=torch.full_like(before, advantage))
    moved = before + log_ratio * (torch.tensor([0.5, -0.5]) if pair else torch.tensor([1.0]))
    outputs = TokenOutputs(moved, torch.ones_like(moved), None, 2 * moved - 0.5)
    return Step(algorithm.prepare_step(batch, outputs if algorithm.needs_step_outputs else None), outputs)


LATE = 10**6  # a step in which every learner trains
FAR = 8.0  # nats between the policy and what sampled, per token, in the check of extremes
TOLERANCE = 1e-6  # relative: the sums are float64, options and columns may be float32
RATIOS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)  # in the printed table
MARGINS = (-16.0, -8.0, -4.0, 0.0, 4.0, 8.0, 16.0)  # of pairs, in nats
LearnerCheck = Callable[[AlgorithmReport, Algorithm, str, Step], None]
PLAN = Plan(group_size=4, optimizer_steps=2, environment_rewards=REWARD_NAMES)


def check_algorithm(name: str, algorithm: Algorithm) -> AlgorithmReport:
    """Return everything that is wrong with an algorithm, and its formula. Checks that need what an earlier one found wrong are left out."""
    report = AlgorithmReport(name, format_algorithm(name, algorithm))
    groups = make_groups(algorithm)
    with _reported(report, "options"):
        _check_options(report, algorithm)
    with _reported(report, "credit"):
        _check_credit(report, algorithm, groups)
    if not report.faults:
        with _reported(report, "loss"):
            for learner in algorithm.losses(LATE):
                _check_learner(report, algorithm, learner, groups)
    if not report.faults:
        with _reported(report, "loss"):
            report.formula = trace_formula(algorithm)
    return report


def _check_learner(report: AlgorithmReport, algorithm: Algorithm, learner: str, groups: Sequence[Group]) -> None:
    """Check the loss of one learner on the groups that are trained on, on all of them, and far from the sampling policy."""
    kept = [group for group in groups if algorithm.keep(group)] or list(groups)
    trained, every = make_step(algorithm, kept, learner), make_step(algorithm, groups, learner)
    checks: list[tuple[str, LearnerCheck, tuple[Step, ...]]] = [
        ("inputs", _check_inputs, (trained,)),
        ("loss", _check_loss, (trained, every, make_step(algorithm, groups, learner, spread=FAR))),
        ("cuts", _check_cuts, (trained, every)),
        ("zero_gradient", _check_zero_gradient, (trained, every)),
        ("metrics", _check_metrics, (trained,)),
        ("terms", _check_terms, (trained,)),
    ]
    for name, check, steps in checks:
        with _reported(report, name):
            for step in steps:
                check(report, algorithm, learner, step)
        if any(fault.check in ("inputs", "loss") for fault in report.faults):
            return  # what follows would repeat it


@contextmanager
def _reported(report: AlgorithmReport, check: str) -> Iterator[None]:
    """Note that a check was made, and turn an exception of the algorithm into a fault that names its line."""
    report.made.add(check)
    try:
        yield
    except Exception as error:  # user code may raise anything
        report.fault(check, describe_error(error))


def _check_options(report: AlgorithmReport, algorithm: Algorithm) -> None:
    for item in fields(algorithm):
        value = getattr(algorithm, item.name)
        if isinstance(value, float) and math.isnan(value):
            report.fault("options", f"{item.name} is NaN")
        if isinstance(value, list | dict | set | Tensor):
            report.fault(
                "options",
                f"{item.name} is a {type(value).__name__}, which can change between two calls; options are numbers, texts, tuples or parts",
            )
    if copy.deepcopy(algorithm) != algorithm:
        report.fault("options", "a copy of it differs: other processes and resumed runs would have another algorithm")
    for problem in algorithm.validate(PLAN):
        report.fault("options", f"a run with groups of {PLAN.group_size} is refused: {problem}")


def _check_credit(report: AlgorithmReport, algorithm: Algorithm, groups: Sequence[Group]) -> None:
    for group in [*groups, *_unusual_groups(algorithm)]:
        for method, dtype in (("rewards", None), ("advantages", None), ("rollout_mask", torch.bool)):
            _check_one_per_rollout(report, method, getattr(algorithm, method)(group), group, dtype)
        if not isinstance(kept := algorithm.keep(group), bool):
            report.fault("credit", f"keep returned {kept!r} of type {type(kept).__name__}, not a bool")


def _unusual_groups(algorithm: Algorithm) -> list[Group]:
    """Groups that occur in every run: all rewards 0, all equal, equal but for rounding."""
    if algorithm.recorded_data:
        return []
    lengths = ((3,), (1, 2), (4,))
    rewards = ((0.0, 0.0, 0.0), (0.7, 0.7, 0.7), (0.1 + 0.2, 0.3, 0.3))
    return [make_group(index, GroupShape(lengths, each), algorithm) for index, each in enumerate(rewards)]


def _check_one_per_rollout(
    report: AlgorithmReport, method: str, returned: object, group: Group, dtype: torch.dtype | None
) -> None:
    count = len(group.rollouts)
    if not isinstance(returned, Tensor) or returned.shape != (count,):
        found = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else f"a {type(returned).__name__}"
        report.fault("credit", f"{method} returned {found} for a group of {count} rollouts; return one value for each, [{count}]")
    elif dtype is not None and returned.dtype != dtype:
        report.fault("credit", f"{method} returned {returned.dtype}, not {dtype}")
    elif not bool(returned.isfinite().all()):
        rewards = [round(reward, 3) for reward in group.rewards.tolist()]
        report.fault(
            "credit",
            f"{method} returned {returned.tolist()} for rewards {rewards}: bound a divisor that can be 0, for example by clamp(min=...)",
        )


def _check_inputs(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    before, state = copy.deepcopy((step.batch, step.outputs)), copy.deepcopy(vars(algorithm))
    loss = algorithm.losses(LATE)[learner]
    first, _ = loss(step.outputs, step.batch)
    second, _ = loss(step.outputs, step.batch)
    if not torch.equal(torch.as_tensor(first), torch.as_tensor(second)):
        report.fault("inputs", f"the loss of one batch is {float(first):.6g}, and called again {float(second):.6g}")
    if changed := [*_list_changed(before[0], step.batch), *_list_changed(before[1], step.outputs)]:
        report.fault(
            "inputs", f"the loss changed {', '.join(changed)} in place; work on a copy: later calls read the same tensors"
        )
    if state != vars(algorithm):
        report.fault("inputs", "the loss changed the algorithm itself, which no checkpoint holds; keep no state between steps")


def _list_changed(before: object, after: object) -> Iterator[str]:
    for name, value in vars(before).items():
        now = getattr(after, name)
        if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), now.nan_to_num()):
            yield name
        elif isinstance(value, dict):
            yield from (f"{name}[{key!r}]" for key in value if not torch.equal(value[key], now[key]))


def _check_loss(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    loss = algorithm.losses(LATE)[learner]
    returned: Any = loss(step.outputs, step.batch)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        return report.fault("loss", f"the loss of {learner} returned a {type(returned).__name__}; return (loss, metrics)")
    value = returned[0]
    if not isinstance(value, Tensor) or value.dim():
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        return report.fault("loss", f"the loss of {learner} is {shape}; return one number: aggregate(values, batch)")
    gradient, _ = differentiate(loss, step.batch, step.outputs)
    if not bool(value.isfinite()) or not bool(gradient.isfinite().all()):
        report.fault(
            "loss",
            f"the loss of {learner} is {float(value):.4g} and {int((~gradient.isfinite()).sum())} of its gradients are not finite, up to "
            f"{FAR * 4:g} nats from the sampling policy: bound exponents (strop.algorithms.functional.bounded_exp) and divisors",
        )
    elif not gradient.any() and step.batch.advantages.any():
        report.fault("loss", f"the loss of {learner} has no gradient: nothing would be learned; is something detached?")


def _check_cuts(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    loss = algorithm.losses(LATE)[learner]
    whole, _ = differentiate(loss, step.batch, step.outputs)
    for how, parts in _list_cuts(algorithm, step):
        if fault := find_cut_fault(report.name, whole, differentiate_parts(loss, step.batch, step.outputs, parts), how):
            return report.fault("cuts", fault)


def _check_zero_gradient(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    whole, _ = differentiate(algorithm.losses(LATE)[learner], step.batch, step.outputs)
    if fault := find_zero_fault(report.name, whole, step.batch):
        report.fault("zero_gradient", fault)


def _list_cuts(algorithm: Algorithm, step: Step) -> Iterator[tuple[str, list[list[int]]]]:
    groups = step.batch.group.tolist()
    unit = groups if algorithm.whole_groups else range(len(groups))
    yield "in two halves", [[index for index, each in enumerate(unit) if each % 2 == side] for side in (0, 1)]
    each_alone = [[index for index, each in enumerate(unit) if each == one] for one in sorted(set(unit))]
    yield f"with each {'group' if algorithm.whole_groups else 'rollout'} alone", each_alone


def _check_metrics(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    loss = algorithm.losses(LATE)[learner]
    whole = to_floats(differentiate(loss, step.batch, step.outputs)[1])
    for name, value in whole.items():
        if not math.isfinite(value):
            report.fault("metrics", f"{name} is {value}")
    for how, parts in _list_cuts(algorithm, step):
        cut = differentiate_parts(loss, step.batch, step.outputs, parts)
        merged = {} if cut is None else to_floats(cut[1])
        for name in sorted(whole.keys() & merged.keys()):
            if not math.isclose(whole[name], merged[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                return report.fault(
                    "metrics",
                    f"{name} is {whole[name]:.5g}, but {merged[name]:.5g} {how}: log metrics.total(aggregate(values, batch).item()), or "
                    "metrics.mean(value, weight) with the count behind the mean",
                )


def _check_terms(report: AlgorithmReport, algorithm: Algorithm, learner: str, step: Step) -> None:
    terms = algorithm.loss_terms(step.outputs, step.batch, learner)
    if terms is None:
        return
    loss, _ = algorithm.losses(LATE)[learner](step.outputs, step.batch)
    added = float(sum(term.weight * term.reduce(term.values, step.batch) for term in terms.terms))
    if not math.isclose(added, float(loss), rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        report.fault("terms", f"the terms of {learner} add up to {added:.6g}, and its loss is {float(loss):.6g}")


def trace_formula(algorithm: Algorithm) -> Formula:
    """Trace objective and gradient of one token, for credit of either sign, against the ratio to the policy before; of a pair, against
    the margin. There are no curves for losses of other outputs, which no ratio moves.
    """
    if algorithm.recorded_data == "preferences" and algorithm.predict == "tokens":
        margins = sorted({*MARGINS, *(each / 2 for each in range(-40, 41))})
        return Formula("margin, nats", MARGINS, {"a pair": [_trace(algorithm, each, each, 1.0) for each in margins]})
    if algorithm.recorded_data or TEACHER_CANDIDATES in algorithm.requires:
        return Formula("", (), {})
    ratios = sorted({*RATIOS, *(each / 25 for each in range(5, 76))})
    curves = {f"A = {sign:+d}": [_trace(algorithm, each, math.log(each), float(sign)) for each in ratios] for sign in (1, -1)}
    return Formula("ratio", RATIOS, curves)


def _trace(algorithm: Algorithm, at: float, log_ratio: float, advantage: float) -> Point:
    step, loss = make_unit(algorithm, log_ratio, advantage), algorithm.losses(LATE)["policy"]
    value, _ = loss(step.outputs, step.batch)
    gradient, _ = differentiate(loss, step.batch, step.outputs)
    by_logprob = gradient[:, 0] * (torch.tensor([0.5, -0.5]) if len(gradient) == 2 else 1)
    return Point(at, 0.0 - float(value), 0.0 - float(by_logprob.sum()))
