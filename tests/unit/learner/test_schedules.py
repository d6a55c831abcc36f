"""Learning-rate schedules by name: their formulas, their ends, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strop.learner.torch.optimizer import make_scheduler
from strop.learner.torch.schedules import SCHEDULES, make_schedule
from support.learners import make_scheduler_config

DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "wsd")


def ratios(name: str, steps: int, total_steps: int | None = None, **kwargs: Any) -> list[float]:
    schedule = make_schedule(name, kwargs, total_steps=total_steps)
    return [schedule.ratio(step) for step in range(steps)]


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates], lr=1.0)


def follow(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """The rate of each group in each of ``steps`` optimizer steps."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def test_every_schedule_warms_up_from_a_rate_above_zero_to_the_whole_rate() -> None:
    for name in SCHEDULES:
        assert ratios(name, 5, total_steps=40, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0]), name
        assert ratios(name, 1, total_steps=40) == [1.0], name


def test_a_warm_up_ratio_is_a_share_of_all_steps() -> None:
    for name in SCHEDULES:
        assert ratios(name, 60, warmup_ratio=0.1, total_steps=60) == ratios(name, 60, warmup_steps=6, total_steps=60), name
    assert make_schedule("constant", {"warmup_ratio": 0.1}, total_steps=30).warmup == 3, (
        "0.1 x 30 is a little more in floating point"
    )


def test_linear_is_a_straight_line_to_its_smallest_ratio_and_stays_there() -> None:
    assert ratios("linear", 7, total_steps=5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert ratios("linear", 7, warmup_steps=1, total_steps=5, min_ratio=0.5) == pytest.approx(
        [1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]
    )


def test_restarts_begin_again_at_the_whole_rate_exactly() -> None:
    """21 steps in 3 cycles of 7: a quotient in floating point would miss the last step of a cycle or the first."""
    found = ratios("cosine_with_restarts", 22, total_steps=21, cycles=3)
    assert found[:21] == ratios("cosine", 7, total_steps=7) * 3
    assert found[21] == 0.0
    assert ratios("cosine_with_restarts", 30, total_steps=25) == ratios("cosine", 30, total_steps=25), "one cycle is the cosine"


def test_inverse_square_root_has_no_end_and_continues_the_warm_up() -> None:
    found = ratios("inverse_sqrt", 101, warmup_steps=4)
    assert found[4 + 12] == pytest.approx(0.5), "sqrt(4 / (4 + 12))"
    assert found[100] == pytest.approx(math.sqrt(4 / 100))
    assert ratios("inverse_sqrt", 4, timescale=1) == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])
    assert ratios("inverse_sqrt", 99, timescale=1, min_ratio=0.3)[-1] == 0.3
    assert ratios("inverse_sqrt", 30_001)[-1] == pytest.approx(0.5), "without a warm-up the timescale is 10,000 steps"


@pytest.mark.parametrize(
    ("decay", "wanted"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5]),
        ("sqrt", [1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
    ],
)
def test_wsd_is_stable_until_the_decay_begins(decay: str, wanted: list[float]) -> None:
    found = ratios("wsd", 14, warmup_steps=2, total_steps=12, decay_steps=4, decay=decay)
    assert found == pytest.approx([0.5, 1.0, *[1.0] * 6, *wanted, 0.0, 0.0])


def test_wsd_decays_over_a_tenth_of_the_run_unless_told_otherwise() -> None:
    assert ratios("wsd", 100, total_steps=100) == ratios("wsd", 100, total_steps=100, decay_steps=10)
    assert ratios("wsd", 100, total_steps=100, decay_ratio=0.3) == ratios("wsd", 100, total_steps=100, decay_steps=30)
    assert ratios("wsd", 3, total_steps=3)[-1] == 1.0, "at least one step"


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    total=st.integers(2, 200),
    share=st.floats(0, 0.8),
    low=st.floats(0, 1),
)
def test_ratios_are_above_zero_during_the_run_and_between_the_smallest_and_one(
    name: str, total: int, share: float, low: float
) -> None:
    kwargs = {"warmup_steps": int(share * (total - 1)), "total_steps": total}
    kwargs |= {} if name == "constant" else {"min_ratio": low}
    found = ratios(name, total + 20, **kwargs)
    after = found[kwargs["warmup_steps"] :]
    assert all(0 < ratio <= 1 for ratio in found[:total]), "no step of the run is wasted"
    assert name == "constant" or all(low <= ratio or math.isclose(low, ratio) for ratio in after)
    assert name == "cosine_with_restarts" or all(later <= earlier for earlier, later in itertools.pairwise(after))
    if name in DECAYING:
        assert found[total:] == pytest.approx([low] * 20)


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"]),
    warmup=st.integers(0, 30),
    length=st.integers(2, 200),
    low=st.floats(0, 0.9),
    cycles=st.integers(1, 4),
    power=st.floats(0.5, 3),
)
def test_after_the_warm_up_the_factors_are_those_of_transformers(
    name: str, warmup: int, length: int, low: float, cycles: int, power: float
) -> None:
    from transformers.optimization import get_scheduler

    total, ours, theirs = warmup + length, {}, {}
    if name == "cosine":  # transformers has a smallest ratio for this one and wsd only
        ours, theirs = {"min_ratio": low}, {"min_lr_rate": low}
    elif name == "cosine_with_restarts":
        ours, theirs = {"cycles": cycles}, {"num_cycles": cycles}
    elif name == "polynomial":
        ours, theirs = {"power": power}, {"power": power, "lr_end": 0.0}
    elif name == "wsd":
        decay = length - 1
        ours = {"min_ratio": low, "decay_steps": decay}
        theirs = {"num_decay_steps": decay, "min_lr_ratio": low, "decay_type": "linear"}
    kind = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay"}.get(name, name)
    wanted: Any = get_scheduler(kind, optimizer_of(1.0), warmup, total, theirs)
    found = ratios(name, total, warmup_steps=warmup, total_steps=total, **ours)
    restarts = {length * cycle // cycles for cycle in range(1, cycles)} if name == "cosine_with_restarts" else set()
    for step in set(range(length)) - restarts:  # there transformers' quotient is rounded
        assert found[warmup + step] == pytest.approx(wanted.lr_lambdas[0](warmup + step), abs=1e-12), step


def test_the_runs_steps_are_taken_unless_the_schedule_has_its_own() -> None:
    assert ratios("linear", 10, total_steps=10) == [
        make_schedule("linear", {"total_steps": 10}, total_steps=99).ratio(s) for s in range(10)
    ]
    assert make_schedule("linear", {"total_steps": None}, total_steps=10).total_steps == 10


@pytest.mark.parametrize("name", DECAYING)
def test_a_decay_without_an_end_says_what_to_set(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.scheduler\.kwargs\.total_steps: found null.*set total_steps"):
        make_schedule(name, {})


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_a_schedule_without_an_end_needs_no_total_but_for_a_warm_up_ratio(name: str) -> None:
    make_schedule(name, {"warmup_steps": 5})
    with pytest.raises(ValueError, match=r"total_steps: found null.*warmup_ratio is a fraction of it"):
        make_schedule(name, {"warmup_ratio": 0.1})


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("cosin", {}, r"policy\.scheduler\.name: there is no schedule 'cosin'; did you mean 'cosine'\?"),
        ("LinearLR", {}, r"policy\.scheduler\.name: there is no schedule 'LinearLR'.*torch\.optim\.lr_scheduler\.LinearLR"),
        ("cosine", {"warm_up_steps": 5}, r"kwargs\.warm_up_steps: cosine has no such argument; did you mean 'warmup_steps'\?"),
        ("constant", {"min_ratio": 0.1}, r"kwargs\.min_ratio: constant has no such argument"),
        ("cosine", {"warmup_steps": -1}, r"kwargs\.warmup_steps: found -1; it must be a whole number of at least 0, or null"),
        ("cosine", {"warmup_steps": 5.0}, r"kwargs\.warmup_steps: found 5\.0; it must be a whole number"),
        ("cosine", {"warmup_steps": True}, r"kwargs\.warmup_steps: found True"),
        ("cosine", {"warmup_ratio": 3}, r"kwargs\.warmup_ratio: found 3; it must be a number from 0 to 1"),
        ("cosine", {"min_ratio": None}, r"kwargs\.min_ratio: found None; it must be a number from 0 to 1$"),
        ("cosine", {"min_ratio": float("nan")}, r"kwargs\.min_ratio: found nan"),
        ("cosine", {"warmup_steps": 5, "warmup_ratio": 0.1}, r"warmup_ratio: found 0\.1, but warmup_steps=5 is set too"),
        ("linear", {"warmup_steps": 20}, r"warmup_steps: found a warm-up of 20 steps, but total_steps is 20"),
        ("cosine_with_restarts", {"cycles": 0}, r"kwargs\.cycles: found 0"),
        ("wsd", {"warmup_steps": 10, "decay_steps": 11}, r"decay_steps: a warm-up of 10 steps and a decay of 11 steps exceed"),
        ("wsd", {"decay_steps": 5, "decay_ratio": 0.1}, r"decay_ratio: found 0\.1, but decay_steps=5 is set too"),
        ("wsd", {"decay": "exp"}, r"kwargs\.decay: found 'exp'.*linear, sqrt"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_key(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, kwargs, total_steps=20)


def test_another_learners_section_is_named_where_it_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"^value\.scheduler\.kwargs\.warmup_steps"):
        make_schedule("constant", {"warmup_steps": "many"}, section="value")


def test_each_group_keeps_its_own_rate_under_the_schedule() -> None:
    optimizer = optimizer_of(0.4, 0.02)
    schedule = [{"name": "linear", "kwargs": {"warmup_steps": 2}}]
    found = follow(make_scheduler(make_scheduler_config(*schedule), optimizer, total_steps=6), optimizer, 6)
    assert [rates[0] for rates in found] == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1])
    assert [rates[1] for rates in found] == pytest.approx([rates[0] / 20 for rates in found])


def test_stages_by_name_and_by_class_follow_one_another() -> None:
    """A named stage counts from its milestone, and ends where the next one takes over, or with the run."""
    optimizer = optimizer_of(1.0)
    schedule = [
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 0.5, "total_iters": 100}},
        {"name": "linear", "kwargs": {}},
        {"name": "linear", "kwargs": {"min_ratio": 0.5}},
        {"milestones": [2, 6]},
    ]
    found = follow(make_scheduler(make_scheduler_config(*schedule), optimizer, total_steps=8), optimizer, 9)
    assert [rates[0] for rates in found] == pytest.approx([0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 1.0, 0.75, 0.5])


def test_a_stage_that_begins_after_the_run_does_no_harm_unless_it_needs_a_length() -> None:
    stages = [{"name": "constant", "kwargs": {"warmup_steps": 50}}, {"name": "constant"}, {"milestones": [50]}]
    optimizer = optimizer_of(1.0)
    assert follow(make_scheduler(make_scheduler_config(*stages), optimizer, total_steps=3), optimizer, 3) == [
        [0.02],
        [0.04],
        [0.06],
    ]
    stages[1] = {"name": "linear"}
    with pytest.raises(ValueError, match="total_steps: found null"):
        make_scheduler(make_scheduler_config(*stages), optimizer_of(1.0), total_steps=3)


def test_a_resumed_run_follows_the_number_of_steps_in_force() -> None:
    """A run that is continued for longer decays until its new end, not the one that was saved."""
    schedule = [{"name": "linear", "kwargs": {}}]
    first, second, longer = optimizer_of(1.0), optimizer_of(1.0), optimizer_of(1.0)
    scheduler: Any = make_scheduler(make_scheduler_config(*schedule), first, total_steps=10)
    follow(scheduler, first, 5)
    resumed: Any = make_scheduler(make_scheduler_config(*schedule), second, total_steps=20)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    wanted = follow(make_scheduler(make_scheduler_config(*schedule), longer, total_steps=20), longer, 20)
    assert follow(resumed, second, 15)[1:] == wanted[6:]


def test_a_warm_up_with_a_first_rate_is_a_line_from_it_to_the_whole_rate() -> None:
    for name in SCHEDULES:
        found = ratios(name, 5, total_steps=40, warmup_steps=4, warmup_init_ratio=0.2)
        assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]), name
    assert ratios("constant", 3, warmup_steps=2, warmup_init_ratio=0.0) == [0.0, 0.5, 1.0]
