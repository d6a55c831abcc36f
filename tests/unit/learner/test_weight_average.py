"""The moving average of the weights: its formula, its start, swapping it in, and continuing exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.weight_average import AveragedWeights

Named = list[tuple[str, nn.Parameter]]


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype))) for name, shape in (("a", (3, 2)), ("b", (4,)))
    ]


def move(named: Named, step: int) -> None:
    """An optimizer step that follows from its number."""
    with torch.no_grad():
        for place, (_, parameter) in enumerate(named):
            generator = torch.Generator().manual_seed(100 * step + place)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def values(named: Named) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in named]


def averages(average: AveragedWeights) -> list[Tensor]:
    return [tensor.clone() for tensor in average.state_dict()["average"].values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@given(decay=st.floats(0, 0.9999), start_step=st.integers(0, 4), steps=st.integers(0, 8))
def test_the_average_is_the_recurrence_from_the_weights_at_the_start(decay: float, start_step: int, steps: int) -> None:
    """Float64, by plain arithmetic: the weights until start_step, then d average + (1 - d) weights."""
    named = weights(torch.float64)
    average = AveragedWeights(named, decay=decay, start_step=start_step)
    wanted = values(named)
    for step in range(steps):
        move(named, step)
        average.update()
        if step < start_step:
            wanted = values(named)
        else:
            wanted = [decay * old + (1 - decay) * new for old, new in zip(wanted, values(named), strict=True)]
    for found, one in zip(averages(average), wanted, strict=True):
        assert torch.allclose(found, one, rtol=0, atol=1e-12)


def test_the_average_of_bfloat16_weights_is_of_their_masters_in_float32() -> None:
    """1,000 steps of 1e-4 from 1 with decay 0.99: 99 steps behind 0.9, which bfloat16 could not tell from other numbers."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = MasterWeights([("a", weight)])
    average = AveragedWeights(masters.named_parameters, decay=0.99)
    for _ in range(1000):
        with torch.no_grad():
            masters.parameters[0].sub_(1e-4)
        masters.write_back()
        average.update()
    assert averages(average)[0].dtype == torch.float32
    assert torch.allclose(averages(average)[0], torch.full((3,), 0.9099), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_swapped_in_and_the_weights_come_back_exactly(dtype: torch.dtype) -> None:
    named = weights(dtype)
    masters = MasterWeights(named)
    average = AveragedWeights(masters.named_parameters, decay=0.5)
    move(masters.named_parameters, 0)
    masters.write_back()
    average.update()
    before, places = values(named), [parameter.data_ptr() for _, parameter in named]
    averaged = [tensor.clone() for tensor in averages(average)]
    with average.swap_in(named):
        assert same(values(named), [tensor.to(dtype) for tensor in averaged])
        assert not same(values(named), before)
        assert [parameter.data_ptr() for _, parameter in named] == places, "in place"
    assert same(values(named), before) and same(averages(average), averaged)


def test_the_weights_come_back_after_an_error_too() -> None:
    named = weights()
    average = AveragedWeights(named, decay=0.5)
    move(named, 0)
    before = values(named)
    with pytest.raises(KeyError), average.swap_in(named):
        raise KeyError
    with pytest.raises(KeyError), average.swap_in([*named, ("unknown", nn.Parameter(torch.ones(1)))]):
        pass
    assert same(values(named), before)


def test_a_restart_begins_at_the_weights_of_that_moment() -> None:
    named = weights()
    average = AveragedWeights(named, decay=0.9, start_step=1)
    move(named, 0)
    average.update()
    move(named, 1)
    average.reset()
    assert same(averages(average), values(named)) and average.steps == 0


def test_the_average_of_other_weights_is_refused() -> None:
    saved = AveragedWeights(weights()[:1], decay=0.9).state_dict()
    with pytest.raises(ValueError, match=r"the average of 1 weights and this run trains 2; they differ in b"):
        AveragedWeights(weights(), decay=0.9).load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "key"), [({"decay": 1.0}, "decay"), ({"decay": -0.1}, "decay"), ({"decay": 0.9, "start_step": -1}, "start_step")]
)
def test_a_decay_or_a_start_out_of_range_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"policy\.ema\.{key}"):
        AveragedWeights(weights(), **options)
