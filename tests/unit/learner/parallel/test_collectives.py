"""Collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop.learner.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to_ranks,
    join_rows,
    reduce_scatter,
    split_rows,
)


def gradient_of(collective: Callable[..., Tensor], tensor: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    tensor = tensor.clone().requires_grad_(True)
    result = collective(tensor, torch.distributed.group.WORLD)
    (result * weight).sum().backward()
    assert tensor.grad is not None
    return result.detach(), tensor.grad


def all_of_them(rank: int) -> dict[str, Any]:
    own, whole = torch.arange(4.0).view(2, 2) + 10 * rank, torch.arange(8.0).view(4, 2)
    mine = torch.full((4, 2), 1.0 + rank)  # each rank goes on in its own way
    same = torch.arange(8.0).view(4, 2) + 1  # all ranks go on alike
    return {
        "copy": gradient_of(copy_to_ranks, whole, mine),
        "reduce_sum": gradient_of(all_reduce, own, same[:2]),
        "gather": gradient_of(all_gather, own, mine),
        "scatter_sum": gradient_of(reduce_scatter, whole + rank, mine[:2]),
        "split": gradient_of(split_rows, whole, mine[:2]),
        "join": gradient_of(join_rows, own, same),
        "exchange": gradient_of(all_to_all, own, mine[:2]),
    }


def test_each_collective_moves_what_it_says_and_its_gradient_goes_the_other_way() -> None:
    first, second = run_on_ranks(2, all_of_them)
    own, whole = torch.arange(4.0).view(2, 2), torch.arange(8.0).view(4, 2)
    same = whole + 1
    assert torch.equal(first["copy"][0], whole) and torch.equal(first["copy"][1], torch.full((4, 2), 3.0))
    assert torch.equal(second["reduce_sum"][0], 2 * own + 10) and torch.equal(second["reduce_sum"][1], same[:2])
    both = torch.cat([own, own + 10])
    assert torch.equal(first["gather"][0], both) and torch.equal(second["gather"][1], torch.full((2, 2), 3.0))
    assert torch.equal(second["scatter_sum"][0], (2 * whole + 1)[2:])
    assert torch.equal(first["scatter_sum"][1], torch.tensor([1.0, 1, 2, 2]).view(4, 1).expand(4, 2))
    assert torch.equal(second["split"][0], whole[2:])
    assert torch.equal(first["split"][1], torch.tensor([1.0, 1, 2, 2]).view(4, 1).expand(4, 2))
    assert torch.equal(first["join"][0], both) and torch.equal(second["join"][1], same[2:])
    assert torch.equal(second["exchange"][0], torch.stack([own[1], own[1] + 10]))
    assert torch.equal(first["exchange"][1], torch.tensor([[1.0, 1], [2, 2]]))


def unequal_pieces(rank: int) -> tuple[Tensor, Tensor]:
    sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    tensor = (torch.arange(float(sum(sent)))[:, None] + 10 * rank).requires_grad_(True)
    result = all_to_all(tensor, torch.distributed.group.WORLD, received, sent)
    (result * (1.0 + rank)).sum().backward()
    assert tensor.grad is not None
    return result.detach(), tensor.grad


def test_unequal_pieces_are_exchanged_and_their_gradients_come_back() -> None:
    (first, back), (second, _) = run_on_ranks(2, unequal_pieces)
    assert first.flatten().tolist() == [0, 10, 11, 12] and second.flatten().tolist() == [1, 2, 13]
    assert back.flatten().tolist() == [1, 2, 2]


def uneven(rank: int) -> None:
    split_rows(torch.zeros(3, 2), torch.distributed.group.WORLD)


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 rows cannot be split evenly among 2 ranks"):
        run_on_ranks(2, uneven)
