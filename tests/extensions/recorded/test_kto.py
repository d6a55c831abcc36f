"""KTO: the reference point is that of the whole optimizer step, and the unrelated completions count in nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.base import TokenOutputs
from strop.extensions.recorded.preference.unpaired import KTO, REFERENCE_POINT
from strop.types import Batch
from support.recorded import recorded_group
from support.rollouts import pack_for

# Judged: desirable [6, 7], undesirable [10], desirable [14]; the rest are unrelated completions.
GROUPS = [
    recorded_group([4, 5], [6, 7], [8], rewards=(1.0, 0.0)),
    recorded_group([9], [10], [11, 12, 13], rewards=(0.0, 0.0), index=1),
    recorded_group([3], [14], [15], rewards=(1.0, 0.0), index=2),
]
#            judged 0      other  judged other            judged other
LOGPROBS = [-1.0, -0.5, -2.0, -0.25, -1.0, -2.0, -3.0, -2.0, -1.0]
REFERENCE = [-1.5, -1.0, -3.0, -0.5, -1.0, -2.0, -2.0, -1.0, -2.0]
H = (1.0, 0.25, -1.0)  # of the judged ones
OTHERS = (1.0, -1.0, 1.0)
POINT = sum(OTHERS) / 3


def outputs(values: list[float]) -> TokenOutputs:
    logprobs = torch.tensor(values, dtype=torch.float64)
    return TokenOutputs(logprobs, torch.zeros_like(logprobs))


def batch_of(algorithm: KTO, logprobs: list[float] = LOGPROBS) -> Batch:
    batch = pack_for(GROUPS, algorithm).with_column("reference_logprobs", torch.tensor(REFERENCE))
    return algorithm.prepare_step(batch, outputs(logprobs))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def wanted(algorithm: KTO, point: float) -> float:
    beta, good, bad = algorithm.beta, algorithm.desirable_weight, algorithm.undesirable_weight
    losses = (
        good * (1 - sigmoid(beta * (H[0] - point))),
        bad * (1 - sigmoid(beta * (point - H[1]))),
        good * (1 - sigmoid(beta * (H[2] - point))),
    )
    return sum(losses) / 3


def test_the_loss_is_the_formula() -> None:
    algorithm = KTO(beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    batch = batch_of(algorithm)
    assert (batch.totals.tokens, batch.totals.sequences, batch.totals.groups) == (4, 3, 3)
    assert batch.column(REFERENCE_POINT).tolist() == pytest.approx([POINT] * 9)
    value, logged = algorithm.loss(outputs(LOGPROBS), batch)
    assert float(value) == pytest.approx(wanted(algorithm, POINT), rel=1e-12)
    assert {name: metric.value for name, metric in logged.items()} == pytest.approx(
        {
            "loss": float(value),
            "reference_point": POINT,
            "rewards_desirable": 0.5 * (H[0] + H[2]) / 2,
            "rewards_undesirable": 0.5 * H[1],
        }
    )


def test_unrelated_completions_are_idle() -> None:
    assert KTO().zero_gradient(batch_of(KTO())).tolist() == [False, True] * 3


def test_an_empty_completion_is_harmless() -> None:
    algorithm = KTO()
    groups = [recorded_group([4], [], [5], rewards=(1.0, 0.0)), recorded_group([6], [7], [], rewards=(0.0, 0.0), index=1)]
    batch = pack_for(groups, algorithm).with_column("reference_logprobs", torch.tensor([-1.0, -1.0]))
    batch = algorithm.prepare_step(batch, outputs([-0.5, -2.0]))
    assert batch.totals.sequences == 1
    assert batch.column(REFERENCE_POINT).tolist() == [0.25, 0.25]
    value, logged = algorithm.loss(outputs([-0.5, -2.0]), batch)
    assert float(value) == pytest.approx(1 - sigmoid(0.1 * (0.25 + 1.0)))
    assert "rewards_desirable" not in logged


def test_what_it_cannot_do_without_is_named() -> None:
    with pytest.raises(ValueError, match="needs the log-probabilities of the whole optimizer step"):
        KTO().prepare_step(pack_for(GROUPS, KTO()), None)
    with pytest.raises(ValueError, match="a group of 1 rollouts"):
        pack_for([recorded_group([4], [5])], KTO())
    with pytest.raises(ValueError, match="undesirable_weight is 0"):
        KTO(undesirable_weight=0)
    assert KTO().requires == {"reference_logprobs"}
    assert KTO().needs_step_outputs
