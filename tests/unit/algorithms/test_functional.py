"""Advantages and losses against the definitions written as slow loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.algorithms.functional import aggregate, varies
from strop.algorithms.group_advantages import group_advantages
from support.rollouts import pack_grpo, simple_groups


def rewards_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_float32_residue_is_not_signal() -> None:
    """Sums of the same rewards in another order differ in the last bit; NeMo-RL#4158 blew that up 4,000 times."""
    left = float(torch.tensor(0.6))
    right = float(torch.nextafter(torch.tensor(0.6), torch.tensor(1.0)))
    assert left != right
    assert torch.equal(group_advantages(rewards_of(left, right, left, left)), torch.zeros(4, dtype=torch.float64))


def test_small_but_real_differences_are_signal() -> None:
    assert group_advantages(rewards_of(0.0, 1e-3)).tolist() == pytest.approx([-1.0, 1.0], rel=1e-2)
    assert group_advantages(rewards_of(1.0, 1.0001)).tolist() == pytest.approx([-1.0, 1.0], rel=0.05)


def test_a_leave_one_out_baseline_of_one_rollout_is_refused_or_zero() -> None:
    assert group_advantages(rewards_of(2.0), leave_one_out=True).tolist() == [0.0], "a group of one does not vary"


def test_a_constant_length_must_be_given() -> None:
    batch = pack_grpo(simple_groups((3, (2,))))
    with pytest.raises(ValueError, match="positive constant_length"):
        aggregate(torch.ones(2), batch, "constant_length")


@pytest.mark.parametrize(
    ("rewards", "dtype", "vary"),
    [
        ([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3], torch.float64, True),
        ([1000.0, 1000.0001, 1000.0002], torch.float64, True),
        ([1e-9, 2e-9], torch.float64, True),
        ([0.1 + 0.2, 0.3], torch.float64, False),
        ([1e7, 1e7 + 1], torch.float64, True),
        ([0.1 * 3, 0.3, 0.1 + 0.1 + 0.1], torch.float64, False),
        ([1000.0, 1000.0001], torch.float32, False),
    ],
)
def test_rewards_that_differ_little_vary_as_far_as_their_data_type_tells(
    rewards: list[float], dtype: torch.dtype, vary: bool
) -> None:
    assert varies(torch.tensor(rewards, dtype=dtype)) is vary
