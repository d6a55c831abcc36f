"""Copies of weights for their products are used again only while the weights are what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.learner.torch.tensor_offload import TensorOffload
from strop.learner.torch.weight_average import AveragedWeights
from strop.models.layers.compiled_layers import use_learner_layers
from strop.models.layers.weight_copies import WeightCopies
from strop.models.network import Network, probe_batch
from strop.sampling import Sampling
from support.models import VOCABULARY, build

Change = Callable[[nn.ModuleList], object]


def make_linears(seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(8, outputs) for outputs in (6, 4, 4))


def step_optimizer(linears: nn.Module, kind: Any = torch.optim.AdamW, **options: bool) -> None:
    for parameter in linears.parameters():
        parameter.grad = torch.ones_like(parameter)
    kind(linears.parameters(), lr=0.05, **options).step()


def write_one_bias(linears: nn.ModuleList) -> None:
    with torch.no_grad():
        linears[2].bias[1] = 3.0  # type: ignore[index, operator]


def write_without_a_graph(linears: nn.ModuleList) -> None:
    with torch.inference_mode():
        linears[1].weight.mul_(2)  # type: ignore[operator, union-attr]


def exchange_data(linears: nn.ModuleList) -> None:
    """The memory before is freed, so that what comes next may have its address."""
    for mine, other in zip(linears.parameters(), make_linears(1).parameters(), strict=True):
        mine.data = torch.empty(0)
        mine.data = other.detach().clone()


def replace_parameter(linears: nn.ModuleList) -> None:
    linears[0].weight = nn.Parameter(torch.ones(6, 8))


def leave_and_come_back(linears: nn.ModuleList) -> None:
    offload = TensorOffload(lambda: list(linears.parameters()), torch.device("cpu"))
    offload.offload()
    write_one_bias(linears)
    offload.onload()


CHANGES: dict[str, Change] = {
    "a step of an optimizer": step_optimizer,
    "a step over all tensors at once": lambda linears: step_optimizer(linears, torch.optim.SGD, foreach=True),
    "in place, one number": write_one_bias,
    "in inference mode": write_without_a_graph,
    "other data": exchange_data,
    "another parameter": replace_parameter,
    "a checkpoint": lambda linears: linears.load_state_dict(make_linears(1).state_dict()),
    "a checkpoint whose tensors become the parameters": lambda linears: linears.load_state_dict(
        make_linears(1).state_dict(), assign=True
    ),
    "an offload and a change meanwhile": leave_and_come_back,
}


def project(copies: WeightCopies, linears: nn.ModuleList, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return list(copies.get(list(linears), dtype, keep=True).project(x.to(dtype)))  # type: ignore[arg-type]


def expect(linears: nn.ModuleList, x: Tensor, dtype: torch.dtype, found: list[Tensor]) -> None:
    with torch.no_grad():
        for linear, output in zip(linears, found, strict=True):
            torch.testing.assert_close(output.float(), linear(x), rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_weights_is_seen(change: str, dtype: torch.dtype) -> None:
    linears, copies, x = make_linears(), WeightCopies(), torch.randn(5, 8)
    before = project(copies, linears, x, dtype)
    expect(linears, x, dtype, before)
    CHANGES[change](linears)
    after = project(copies, linears, x, dtype)
    expect(linears, x, dtype, after)
    assert not all(map(torch.equal, before, after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_read_where_it_is_swapped_in_and_the_weights_after_it(dtype: torch.dtype) -> None:
    linears, copies, x = make_linears(), WeightCopies(), torch.randn(5, 8)
    average = AveragedWeights(named := list(linears.named_parameters()), decay=0.5)
    step_optimizer(linears)
    before = project(copies, linears, x, dtype)
    with average.swap_in(named):
        expect(linears, x, dtype, averaged := project(copies, linears, x, dtype))
    expect(linears, x, dtype, after := project(copies, linears, x, dtype))
    assert all(map(torch.equal, before, after)) and not any(map(torch.equal, before, averaged))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_change_a_copy_is_kept_until_it_is_cleared_and_of_one_dtype_and_group(dtype: torch.dtype) -> None:
    linears, copies = [nn.Linear(8, outputs) for outputs in (6, 4, 4)], WeightCopies()
    kept = copies.get(linears, dtype, keep=True)
    for linear in linears:
        linear(torch.randn(5, 8)).sum().backward()  # gradients are no change
    assert copies.get(linears, dtype, keep=True) is kept and copies.get(linears, dtype, keep=False) is kept
    assert copies.get(linears, torch.float16, keep=False) is not kept
    assert len(copies.get(linears[:1], dtype, keep=False).project(torch.randn(5, 8).to(dtype))) == 1
    assert copies.get(linears, dtype, keep=True) is kept
    copies.clear()
    assert copies.get(linears, dtype, keep=False) is not kept
    assert copies.get(linears, dtype, keep=True) is not copies.get(linears, torch.float16, keep=True)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["a fused step", "data in place"])
def test_what_autograd_does_not_count_is_seen_in_the_next_pass(change: str, precision: torch.dtype) -> None:
    network, batch = Network(build("llama"), precision=precision, packed=True), probe_batch(VOCABULARY)

    def score(*, fused: bool) -> Tensor:
        with torch.no_grad(), use_learner_layers(network if fused else object(), keep_copies=True):
            return network.outputs(batch, Sampling()).logprobs

    before = score(fused=True)
    if change == "a fused step":
        step_optimizer(network.model, fused=True)
    else:
        for parameter in network.model.parameters():
            parameter.data.mul_(1.1)
    after = score(fused=True)
    torch.testing.assert_close(after, score(fused=False), rtol=0, atol=1e-4 if precision == torch.float32 else 5e-2)
    assert float((after - before).abs().max()) > 0.1
