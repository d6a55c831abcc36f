"""Optimizers and schedules by name are torch's own, and a mistake in either names its key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.training.torch.optimizers import make_optimizer, make_scheduler


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (5,))]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("torch.optim.AdamW", {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1}),
        ("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
        ("torch.optim.Adafactor", {"lr": 1e-2}),
        ("torch.optim.RMSprop", {"lr": 1e-2}),
        ("torch.optim.AdamW", {"lr": 1e-2, "foreach": True}),
    ],
)
def test_an_optimizer_by_name_takes_the_same_steps_as_torchs_own(name: str, kwargs: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    factory: Any = getattr(torch.optim, name.rsplit(".", 1)[1])
    made, own = make_optimizer(name, ours, kwargs), factory(theirs, **kwargs)
    assert type(made) is factory
    for step in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.full_like(left, 0.1 * (step + 1))
            right.grad = left.grad.clone()
        made.step()
        own.step()
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right, atol=1e-6)


def test_the_fused_form_is_used_unless_the_configuration_chooses() -> None:
    assert make_optimizer("torch.optim.AdamW", parameters(), {"lr": 1e-3}).defaults["fused"] is True
    assert make_optimizer("torch.optim.AdamW", parameters(), {"lr": 1e-3, "fused": False}).defaults["fused"] is False
    assert not make_optimizer("torch.optim.AdamW", parameters(), {"lr": 1e-3, "foreach": True}).defaults["fused"]


@pytest.mark.parametrize(
    "name", ["torch.optim.AdamWW", "torch.optimm.AdamW", "AdamW", "", "torch.optim.lr_scheduler.LinearLR", "torch.zeros"]
)
def test_a_name_that_is_no_optimizer_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.optimizer\.name"):
        make_optimizer(name, parameters(), {"lr": 1e-3})


def test_an_argument_the_optimizer_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(ValueError, match=r"policy\.optimizer\.kwargs\.learning_rate: torch\.optim\.AdamW takes .*'lr'"):
        make_optimizer("torch.optim.AdamW", parameters(), {"learning_rate": 1e-3})


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def test_stages_with_milestones_give_the_rates_of_torchs_sequential_schedule() -> None:
    from torch.optim import lr_scheduler as torchs

    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 5}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}},
        {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 6}},
        {"milestones": [5, 9]},
    ]
    ours = torch.optim.SGD(parameters(), lr=0.3)
    theirs = torch.optim.SGD(parameters(), lr=0.3)
    stages = [
        torchs.LinearLR(theirs, start_factor=0.1, end_factor=1.0, total_iters=5),
        torchs.ConstantLR(theirs, factor=1.0, total_iters=100),
        torchs.CosineAnnealingLR(theirs, T_max=6),
    ]
    wanted = rates(torchs.SequentialLR(theirs, stages, milestones=[5, 9]), theirs, 15)
    found = rates(make_scheduler(schedule, ours), ours, 15)
    assert found == wanted
    assert found[:6] == pytest.approx([0.03, 0.084, 0.138, 0.192, 0.246, 0.3])


def test_one_stage_needs_no_milestone_and_none_leaves_the_rate_alone() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.3)
    assert make_scheduler([], optimizer) is None
    stage = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    assert rates(make_scheduler([stage], optimizer), optimizer, 3) == pytest.approx([0.3, 0.15, 0.075])


def test_stages_and_milestones_must_fit_together() -> None:
    stage = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {}}
    with pytest.raises(ValueError, match=r"policy\.scheduler: 2 stages need 1 milestones between them; found \[\]"):
        make_scheduler([stage, stage], torch.optim.SGD(parameters(), lr=0.3))


@pytest.mark.parametrize("name", ["torch.optim.lr_scheduler.LinearRL", "torch.optim.SGD", "LinearLR"])
def test_a_name_that_is_no_schedule_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.scheduler\.name"):
        make_scheduler([{"name": name, "kwargs": {}}], torch.optim.SGD(parameters(), lr=0.3))


def test_an_argument_the_schedule_does_not_take_is_refused_with_its_key() -> None:
    stage = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_facto": 0.1}}
    with pytest.raises(ValueError, match=r"policy\.scheduler.*start_facto"):
        make_scheduler([stage], torch.optim.SGD(parameters(), lr=0.3))
