"""Confidence intervals of one evaluation: known values, honest ends, and coverage in simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strop
from strop.extensions.evaluation.statistics import confidence_interval, standard_error
from support.reported_runs import STEPS, write_run

Draw = Callable[[np.random.Generator, int], np.ndarray]
SHARE = (0.0, 1.0)


def bernoulli(share: float) -> Draw:
    return lambda random, tasks: random.binomial(1, share, tasks).astype(float)


def repeated(a: float, b: float, samples: int) -> Draw:
    """Means of samples of tasks whose difficulty is beta distributed."""
    return lambda random, tasks: random.binomial(samples, random.beta(a, b, tasks)) / samples


def coverage(draw: Draw, tasks: int, truth: float, *, bounds: tuple[float, float] | None, times: int) -> float:
    random = np.random.default_rng(17)
    return sum(truth in confidence_interval(draw(random, tasks).tolist(), bounds=bounds) for _ in range(times)) / times


# Wilson's intervals as Newcombe (Statistics in Medicine 17, 1998) prints them.
WILSON = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}


@pytest.mark.parametrize("correct, tasks", WILSON)
def test_of_binary_outcomes_it_is_wilsons(correct: int, tasks: int) -> None:
    found = confidence_interval([1.0] * correct + [0.0] * (tasks - correct), bounds=SHARE)
    assert (found.low, found.high) == pytest.approx(WILSON[correct, tasks], abs=5e-5)


def test_without_bounds_it_is_the_t_interval() -> None:
    values = [120.0, 80.0, 95.0, 143.0, 61.0]
    found = confidence_interval(values)
    reach = 2.7764451 * standard_error(values)
    assert (found.low, found.high) == pytest.approx((99.8 - reach, 99.8 + reach))


def test_none_and_all_correct_have_intervals_of_some_width() -> None:
    none, every = confidence_interval([0.0] * 30, bounds=SHARE), confidence_interval([1.0] * 30, bounds=SHARE)
    assert none.low == 0 and none.high == pytest.approx(0.113513, abs=1e-5)
    assert every.high == 1 and every.low == pytest.approx(1 - none.high)


def test_shares_have_wilsons_interval_of_as_many_outcomes_as_would_vary_as_much() -> None:
    """Four tasks, so that each count - 1 matters. The effect of a design is the variance of its means over that of outcomes of 0 or 1,
    with one task's worth of evidence that they vary as those do."""
    values = [0.25, 0.5, 0.75, 0.9]
    share = sum(values) / 4
    variance = sum((value - share) ** 2 for value in values) / 4
    effect = (3 * variance / (share * (1 - share)) + 1) / 4
    z, t = 1.959963984540054, 3.182446305284263  # 0.975 quantiles, of Student's t with 3 degrees of freedom
    size = 4 / effect * (z / t) ** 2
    center = (share + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    found = confidence_interval(values, bounds=SHARE)
    assert (found.low, found.high) == pytest.approx((center - reach, center + reach), rel=1e-9)


def test_one_task_says_little_and_one_length_nothing() -> None:
    assert confidence_interval([1.0], bounds=SHARE).low < 0.21
    several = confidence_interval([0.75], bounds=SHARE)  # of many samples, and yet one task
    assert several.low < 0.2 and several.high > 0.95
    assert not confidence_interval([300.0]).is_bounded


def test_values_out_of_bounds_and_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="outside of the bounds"):
        confidence_interval([0.5, 1.5], bounds=SHARE)
    with pytest.raises(ValueError, match="at least one"):
        confidence_interval([])


def test_tasks_of_a_cluster_count_together() -> None:
    values = [1.0] * 4 + [0.0] * 4 + [1.0] * 4 + [1.0, 0.0, 1.0, 1.0]
    passages = [index // 4 for index in range(16)]
    means = [1.0, 0.0, 1.0, 0.75]
    assert standard_error(values, passages) == pytest.approx(standard_error(means))
    apart, together = confidence_interval(values, bounds=SHARE), confidence_interval(values, bounds=SHARE, clusters=passages)
    assert together.low < apart.low - 0.15
    assert standard_error(values, list(range(16))) == pytest.approx(standard_error(values))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.5, 0.99))
def test_an_interval_holds_its_mean_and_stays_in_bounds(values: list[float], level: float) -> None:
    found = confidence_interval(values, bounds=SHARE, level=level)
    mean = math.fsum(values) / len(values)
    assert 0 <= found.low <= mean + 1e-9 and mean - 1e-9 <= found.high <= 1 and found.low < found.high


# What each draws, the number of tasks, the true mean. Near the bounds and for few tasks the interval may be wider than it need be.
REGIMES = {
    "one sample": (bernoulli(0.5), 100, 0.5),
    "four samples, bimodal": (repeated(0.5, 0.5, 4), 30, 0.5),
    "sixteen samples near the ceiling": (repeated(9, 1, 16), 30, 0.9),
    "five tasks": (repeated(2, 2, 8), 5, 0.5),
}


@pytest.mark.parametrize("name", REGIMES)
def test_it_covers_the_truth(name: str) -> None:
    draw, tasks, truth = REGIMES[name]
    assert coverage(draw, tasks, truth, bounds=SHARE, times=1000) >= 0.95 - 2.6 * math.sqrt(0.95 * 0.05 / 1000)


def test_validations_have_their_intervals_and_samples_their_texts(tmp_path: Path) -> None:
    run = strop.Run(write_run(tmp_path / "mine"))
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text('{"step": 0, "validation/accuracy": 0.2}\n' + metrics.read_text())
    table = strop.Run(run.folder).validations
    assert list(table.columns) == ["accuracy", "low", "high", "tasks"] and list(table.index) == [0]
    assert table["low"][0] < 0.2 < table["high"][0] and table["tasks"][0] == 20
    samples = run.samples
    assert (
        len(samples) == 40 and set(samples["step"]) == {0, STEPS} and not {"tokens", "entropy", "clipped"} & set(samples.columns)
    )
    assert samples.query("step == 0")["accuracy"].mean() == 0.2 and samples["turns"][0][0]["text"] == "an answer 0"


def test_a_validation_without_stored_samples_has_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "validation/accuracy": 0.5}\n')
    table = strop.Run(folder).validations
    assert table["accuracy"][3] == 0.5 and math.isnan(table["low"][3])
