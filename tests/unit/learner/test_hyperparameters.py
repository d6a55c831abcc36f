"""A run that continues follows its own hyperparameters: the rates, the decay, the schedule; one with the same ones changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from strop.learner.torch.learner import CONSTANT
from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import Hyperparameters, count_schedule_steps, load_optimizer, make_scheduler
from strop.learner.torch.optimizer_config import OptimizerGroupConfig
from strop.learner.torch.weight_average import AveragedWeights
from strop.learner.training_state import TrainingState
from support.learners import make_named_optimizer, make_scheduler_config

SCHEDULES: dict[str, Any] = {
    "none": None,
    "cosine": [{"name": "cosine", "kwargs": {"warmup_steps": 2, "total_steps": 20, "min_ratio": 0.1}}],
    "linear": [{"name": "linear", "kwargs": {"total_steps": 12}}],
    "torch's own, recursive": [{"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 9}}],
    "torch's own, in steps": [{"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 2, "gamma": 0.5}}],
    "two stages": [
        {"name": "linear", "kwargs": {"warmup_steps": 1}},
        {"name": "constant", "kwargs": {}},
        {"milestones": [4]},
    ],
}


def make_state(lr: float = 0.1, schedule: str = "none", name: str = "torch.optim.AdamW", **changes: Any) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    masters = MasterWeights(list(model.named_parameters()))
    groups = changes.pop("groups", ())
    kwargs = {"lr": lr, **({"weight_decay": 0.01, "betas": [0.9, 0.99]} if name.endswith("AdamW") else {}), **changes}
    optimizer = make_named_optimizer(name, masters.named_parameters, kwargs, groups=groups)
    found = SCHEDULES[schedule]
    section = CONSTANT if found is None else make_scheduler_config(*found)
    scheduler = make_scheduler(section, optimizer, total_steps=20)
    return TrainingState(
        trainable_parameters=list(model.named_parameters()),
        masters=masters,
        optimizer=optimizer,
        scheduler=scheduler,
        average=AveragedWeights(masters.named_parameters, decay=0.5),
        configured=Hyperparameters.of(optimizer, scheduler),
    )


def take_steps(state: TrainingState, steps: int) -> list[float]:
    """The rate of each of the steps, on fixed gradients."""
    rates = []
    for step in range(steps):
        rates.append(float(state.optimizer.param_groups[0]["lr"]))
        for parameter in state.masters.parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        state.optimizer.step()
        assert isinstance(state.scheduler, LRScheduler)
        state.scheduler.step()
    return rates


def saved(state: TrainingState, path: Path) -> dict[str, Any]:
    torch.save(state.state_dict(), path / "optimizer.pt")
    return torch.load(path / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_unchanged_schedule_goes_on_bit_for_bit(schedule: str, tmp_path: Path) -> None:
    whole = make_state(schedule=schedule)
    rates = take_steps(whole, 5)
    state = saved(whole, tmp_path)
    rates += take_steps(whole, 6)
    parts = make_state(schedule=schedule)
    parts.load_state_dict(state, tmp_path)
    assert rates[5:] == take_steps(parts, 6)
    for own, other in zip(
        parts.optimizer.state_dict()["param_groups"], whole.optimizer.state_dict()["param_groups"], strict=True
    ):
        assert own == other


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_changed_rate_and_schedule_hold_from_the_next_step_on_as_if_followed_from_the_first(
    schedule: str, tmp_path: Path
) -> None:
    for before in ("none", "cosine", "two stages"):
        old = make_state(schedule=before)
        take_steps(old, 5)
        state = saved(old, tmp_path)
        wanted = take_steps(make_state(lr=0.3, schedule=schedule), 9)[5:]
        new = make_state(lr=0.3, schedule=schedule)
        take_steps(new, 3)  # what a learner did before it loads is gone
        new.load_state_dict(state, tmp_path)
        assert take_steps(new, 4) == wanted


def test_every_option_of_a_group_is_the_configured_one_and_the_moments_are_kept(tmp_path: Path) -> None:
    special = (OptimizerGroupConfig(match=("0.",), lr=0.5), OptimizerGroupConfig(match=("1.",), lr=0.6, weight_decay=0.7))
    others = (OptimizerGroupConfig(match=("0.",), lr=0.05), OptimizerGroupConfig(match=("1.",), weight_decay=0.2))
    old = make_state(groups=special)
    take_steps(old, 4)
    state = saved(old, tmp_path)
    new = make_state(lr=0.2, groups=others, betas=[0.5, 0.6], eps=1e-3, weight_decay=0.3)
    new.load_state_dict(state, tmp_path)
    found = [(group["lr"], group["weight_decay"], group["betas"], group["eps"]) for group in new.optimizer.param_groups]
    assert found == [(0.05, 0.3, (0.5, 0.6), 1e-3), (0.2, 0.2, (0.5, 0.6), 1e-3)]
    moments = zip(new.optimizer.state.values(), old.optimizer.state.values(), strict=True)
    assert all(torch.equal(own[key], other[key]) for own, other in moments for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_decay_of_the_average_is_the_configured_one(tmp_path: Path) -> None:
    old = make_state()
    assert old.average is not None
    old.average.update()
    new = make_state()
    assert new.average is not None
    new.average.decay = 0.25
    new.load_state_dict(saved(old, tmp_path), tmp_path)
    assert (new.average.steps, new.average.decay) == (1, 0.25)


def test_state_that_an_optimizer_keeps_in_its_groups_is_restored() -> None:
    """As schedule-free optimizers do: only arguments of the class are hyperparameters."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["counted"] = group.get("counted", 0) + 1
            return super().step(closure)

    def make(lr: float) -> Counting:
        return Counting([nn.Parameter(torch.zeros(2))], lr=lr)

    old = make(0.1)
    old.step()
    new = make(0.2)
    load_optimizer(new, {**old.state_dict()}, Hyperparameters.of(new, None))
    assert (new.param_groups[0]["counted"], new.param_groups[0]["lr"]) == (1, 0.2)


def test_a_schedule_set_on_an_old_checkpoint_without_one_begins_at_the_optimizers_count() -> None:
    old = make_state()
    take_steps(old, 3)
    assert count_schedule_steps(None, old.optimizer.state_dict()) == 3
    assert count_schedule_steps(None, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0).state_dict()) == 0
