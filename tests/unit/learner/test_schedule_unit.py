"""What a step of a learning-rate schedule is: a pass over a batch, or an optimizer step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.config import GrpoRunConfig, load_config
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.optimizer import ScheduleUnit
from strop.models.network import Network
from strop.sampling import Sampling
from support.learners import make_model_config, make_scheduler_config
from support.models import build

WARMUP = make_scheduler_config({"name": "constant", "kwargs": {"warmup_steps": 10}})
LINEAR = make_scheduler_config({"name": "linear", "kwargs": {}})


def make_learner(unit: str, steps_per_batch: int, schedule=WARMUP, total_steps: int | None = None) -> TorchLearner:
    config = replace(make_model_config(optimizer_kwargs={"lr": 1.0}, schedule=schedule), scheduler_unit=unit)
    network = Network(build("llama"), precision=torch.float32)
    return TorchLearner(network, config, Sampling(), total_steps=total_steps, steps_per_batch=steps_per_batch)


def rates(learner: TorchLearner, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        for parameter in learner.parameters:
            parameter.grad = torch.zeros_like(parameter)
        found.append(learner.step()["lr"].value)
    return found


def test_a_configuration_counts_batches_unless_it_says_optimizer_steps() -> None:
    assert load_config(None, ["policy.model_name=m"], root=GrpoRunConfig, check=False).config.policy.scheduler_unit == "batch"


def test_a_warm_up_of_ten_lasts_ten_batches_of_four_optimizer_steps() -> None:
    wanted = [batch / 10 for batch in range(1, 11) for _ in range(4)] + [1.0] * 4
    assert rates(make_learner("batch", 4), 44) == pytest.approx(wanted)


def test_in_optimizer_steps_the_same_warm_up_is_over_in_the_third_batch() -> None:
    wanted = [step / 10 for step in range(1, 11)] + [1.0] * 2
    assert rates(make_learner("optimizer_step", 4), 12) == pytest.approx(wanted)


@pytest.mark.parametrize("unit, wanted", [("batch", [1, 1, 0.5, 0.5]), ("optimizer_step", [1, 0.75, 0.5, 0.25])])
def test_a_schedule_without_a_length_ends_with_the_run_in_either_unit(unit: str, wanted: list[float]) -> None:
    assert rates(make_learner(unit, 2, LINEAR, total_steps=4), 4) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "saved, resumed, first_rate",
    [
        (("batch", 4), ("batch", 4), 0.4),  # three batches were trained on
        (("batch", 4), ("batch", 2), 0.4),  # a batch is a batch, whatever its optimizer steps
        (("batch", 2), ("optimizer_step", 2), 0.7),
        (("optimizer_step", 2), ("batch", 2), 0.4),
    ],
)
def test_a_resumed_run_is_where_its_schedule_was_in_its_own_unit(
    saved: tuple[str, int], resumed: tuple[str, int], first_rate: float, tmp_path: Path
) -> None:
    first = make_learner(*saved)
    rates(first, 3 * saved[1])
    first.save(tmp_path)
    second = make_learner(*resumed)
    rates(second, 1)  # as after a failed attempt
    second.load(tmp_path)
    assert rates(second, 1)[0] == pytest.approx(first_rate)
    if resumed[0] == "batch":
        assert rates(second, resumed[1])[-1] == pytest.approx(first_rate + 0.1)


def test_a_state_without_a_unit_counted_optimizer_steps() -> None:
    assert ScheduleUnit("batch", 4).convert(12, None) == 3
    assert ScheduleUnit("optimizer_step", 4).convert(12, None) == 12
