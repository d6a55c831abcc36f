"""What ranks send each other in an optimizer step: how often, in which dtype, and how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.sharded import count_whole_bytes
from strop.runs.cluster.torch_rank_builders import choose_gather_dtype
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.parity import SAMPLING, Case, build_trained_network, make_batch

BASE = Case(sizes=ParallelDims(shard=2), dtype=torch.float32, precision=torch.bfloat16)
CASES = {
    "float32": BASE,
    "bfloat16": replace(BASE, gather_dtype=torch.bfloat16),
    "whole": replace(BASE, gather_dtype=torch.bfloat16, reshard=False),
}
BUDGETS = (10**6, 16)  # one micro-batch, and several
LAYERS = 2
Sent = Counter[tuple[str, torch.dtype]]


@contextmanager
def recorded(calls: Sent, sizes: Sent) -> Iterator[None]:
    """Count FSDP's collectives, and the bytes of the whole tensors."""

    def record(original: Any, kind: str, whole: str) -> Any:
        def call(self: Any, **arguments: Any) -> Any:
            tensor = arguments[whole]
            calls[kind, tensor.dtype] += 1
            sizes[kind, tensor.dtype] += tensor.nbytes
            return original(self, **arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, kind, whole in (
            (_fsdp_collectives.DefaultAllGather, "gathers", "output_tensor"),
            (_fsdp_collectives.DefaultReduceScatter, "reductions", "input_tensor"),
        ):
            patch.setattr(owner, "__call__", record(owner.__call__, kind, whole))
        yield


def count_on_rank(rank: int, batch: Any) -> dict[tuple[str, int], Any]:
    found: dict[tuple[str, int], Any] = {}
    for name, case in CASES.items():
        for budget in BUDGETS:
            network, placement = build_trained_network(case, DeviceMeshes(case.sizes, "cpu"))
            learner = make_torch_learner(network, SAMPLING, placement, train_tokens=budget)
            micro_batches = len(learner.parallelism.split_batch(batch, budget)[0])
            calls, sizes = Counter[Any](), Counter[Any]()
            with recorded(calls, sizes):
                learner.forward_backward_local(batch, grpo().loss)
            learner.step()
            assert {parameter.dtype for parameter in learner.parameters} == {torch.float32}, "masters"
            assert all(weight.dtype == torch.float32 for weight in network.model.parameters()), "shards"
            found[name, budget] = micro_batches, calls, sizes
    return found


@cache
def counted() -> dict[tuple[str, int], Any]:
    batch = replace(make_batch(BASE), zero_gradient=None)
    return dict(run_on_ranks(2, count_on_rank, batch)[0])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_gathered_in_the_dtype_of_the_computation_and_gradients_reduced_in_float32(name: str, budget: int) -> None:
    micro_batches, calls, sizes = counted()[name, budget]
    assert (micro_batches > 2) == (budget == 16)
    gathered = torch.float32 if name == "float32" else torch.bfloat16
    assert set(calls) == {("gathers", gathered), ("reductions", torch.float32)}
    times = 1 if name == "whole" else micro_batches
    assert calls["reductions", torch.float32] == times * (LAYERS + 1)
    # Freed layers are gathered once more for the backward pass; embedding, last norm and output layer stay.
    assert calls["gathers", gathered] == (LAYERS + 1 if name == "whole" else times * (2 * LAYERS + 1))
    one = counted()[name, BUDGETS[0]]
    assert sizes["reductions", torch.float32] == times * one[2]["reductions", torch.float32] / (1 if name == "whole" else one[0])


def test_bfloat16_halves_the_bytes_of_the_gathers() -> None:
    for budget in BUDGETS:
        sizes = {name: counted()[name, budget][2] for name in CASES}
        assert 2 * sizes["bfloat16"]["gathers", torch.bfloat16] == sizes["float32"]["gathers", torch.float32]
        assert sizes["whole"]["gathers", torch.bfloat16] < sizes["bfloat16"]["gathers", torch.bfloat16]


def test_only_gpus_gather_in_another_dtype_than_that_of_the_shards() -> None:
    assert choose_gather_dtype("bfloat16", "cuda") == torch.bfloat16
    assert choose_gather_dtype("float32", "cuda") is None
    assert choose_gather_dtype("bfloat16", "cpu") is None


def test_whole_weights_take_their_gathered_bytes_and_those_of_trained_gradients() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 2, bias=False))
    model[1].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert count_whole_bytes(model, policy) == 2 * (32 + 16) + 4 * 32
    assert count_whole_bytes(model, MixedPrecisionPolicy()) == 4 * (32 + 16) + 4 * 32
