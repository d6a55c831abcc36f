"""Two runs on the same tasks: coverage of the interval, false positives, and forecasts that come true."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.extensions.comparison.paired_comparison import (
    PairedComparison,
    PairedValues,
    compare_paired,
    forecast_more_samples,
    forecast_tasks,
)
from strop.statistics import pass_at_k
from support.sweep import one_in

SHARE = (0.0, 1.0)
PAIRS = 1000


@dataclass(frozen=True)
class Regime:
    """Pairs of runs: tasks with beta distributed difficulties, B better by ``gain`` where there is room."""

    a: float
    b: float
    tasks: int
    samples: int = 1
    gain: float = 0.0
    k: int | None = None  # pass@k in place of the accuracy

    def chances(self, random: np.random.Generator, tasks: int) -> tuple[np.ndarray, np.ndarray]:
        first = random.beta(self.a, self.b, tasks)
        return first, np.clip(first + self.gain * 4 * first * (1 - first), 0, 1)

    @property
    def difference(self) -> float:
        first, second = self.chances(np.random.default_rng(0), 1_000_000)
        k = self.k or 1
        return float(np.mean((1 - first) ** k - (1 - second) ** k))

    def draw(self, random: np.random.Generator, tasks: int | None = None, samples: int | None = None) -> PairedValues:
        tasks, samples = tasks or self.tasks, samples or self.samples
        counts = [random.binomial(samples, chances) for chances in self.chances(random, tasks)]
        if self.k is not None:
            table = np.array([pass_at_k(samples, correct, self.k) for correct in range(samples + 1)])
            a, b = (table[count].tolist() for count in counts)
            return PairedValues(a=a, b=b, bounds=SHARE)
        a, b = ((count / samples).tolist() for count in counts)
        if samples == 1:
            return PairedValues(a=a, b=b, bounds=SHARE)
        noise = [[mean * (1 - mean) / (samples - 1) for mean in side] for side in (a, b)]
        return PairedValues(a=a, b=b, a_noise=noise[0], b_noise=noise[1], bounds=SHARE)


def simulate(regime: Regime, pairs: int = PAIRS, **changes: int) -> list[PairedComparison]:
    random = np.random.default_rng(17)
    return [compare_paired(regime.draw(random, **changes)) for _ in range(pairs)]


def share_decided(found: list[PairedComparison]) -> float:
    return sum(each.higher_one is not None for each in found) / len(found)


def slack(probability: float, pairs: int) -> float:
    """What a count of ``pairs`` may be off by chance, 99 times of 100."""
    return 2.6 * math.sqrt(probability * (1 - probability) / pairs)


REGIMES = {
    "one sample": Regime(2, 2, 100),
    "one sample, near the ceiling": Regime(19, 1, 100),
    "one sample, another difference": Regime(2, 2, 100, gain=0.1),
    "four samples": Regime(0.5, 0.5, 50, 4),
    "sixteen samples, better": Regime(0.5, 0.5, 50, 16, gain=0.08),
    "sixteen samples near the ceiling": Regime(9, 1, 50, 16),
    "pass@4 of eight": Regime(0.3, 0.7, 50, 8, k=4),
    "seven tasks": Regime(1, 1, 7, 8),
}


@pytest.mark.parametrize("name", one_in(3, REGIMES))
def test_the_interval_covers_and_false_positives_are_few_in_a_thousand_pairs(name: str) -> None:
    regime = REGIMES[name]
    found, truth = simulate(regime), regime.difference
    covered = sum(truth in each.interval for each in found) / PAIRS
    assert covered >= 0.95 - slack(0.95, PAIRS), covered
    if regime.gain == 0:
        assert share_decided(found) <= 0.05 + slack(0.05, PAIRS)


# The power at the forecast number of tasks. The exact test of single samples is conservative.
FORECASTS = {
    "one sample": (Regime(2, 2, 0, gain=0.2), 0.03, 0.06),
    "four samples": (Regime(0.5, 0.5, 0, 4, gain=0.1), 0.04, 0.04),
    "sixteen samples near the ceiling": (Regime(9, 1, 0, 16, gain=0.1), 0.04, 0.05),
}


def power_at_forecast(regime: Regime, pairs: int) -> float:
    """Forecast from a large pilot, and try it."""
    pilot = compare_paired(regime.draw(np.random.default_rng(5), tasks=40_000))
    tasks = math.ceil(forecast_tasks(regime.difference, pilot.variance))
    return share_decided(simulate(regime, pairs, tasks=tasks))


@pytest.mark.parametrize("name", one_in(2, FORECASTS))
def test_the_forecast_number_of_tasks_decides_four_times_of_five(name: str) -> None:
    regime, above, below = FORECASTS[name]
    power = power_at_forecast(regime, 300)
    assert 0.8 - below - slack(0.8, 300) <= power <= 0.8 + above + slack(0.8, 300), power


def test_the_forecast_number_of_samples_decides_four_times_of_five() -> None:
    regime = Regime(2, 2, 150, 2, gain=0.06)
    pilot = compare_paired(regime.draw(np.random.default_rng(5), tasks=40_000))
    times = forecast_more_samples(regime.difference, pilot.variance, pilot.sampling_variance, regime.tasks)
    assert times is not None and 2 < times < 20
    power = share_decided(simulate(regime, 300, samples=round(2 * times)))
    assert abs(power - 0.8) < 0.04 + slack(0.8, 300), power


def test_the_variance_of_samples_is_told_from_that_of_tasks() -> None:
    regime = Regime(2, 2, 20_000, 4)  # B is A: all differences are of the samples
    found = compare_paired(regime.draw(np.random.default_rng(1)))
    assert found.sampling_variance == pytest.approx(found.variance, rel=0.03)
    differing = Regime(2, 2, 20_000, 4, gain=0.5)
    found = compare_paired(differing.draw(np.random.default_rng(1)))
    first, second = differing.chances(np.random.default_rng(2), 500_000)
    assert found.sampling_variance is not None
    assert found.variance - found.sampling_variance == pytest.approx(np.var(second - first), rel=0.1)


def test_runs_that_are_equal_do_not_differ_and_the_interval_says_how_little_is_known() -> None:
    for count in (1, 2, 30, 400):
        found = compare_paired(PairedValues(a=[1.0] * count, b=[1.0] * count, bounds=SHARE))
        assert found.higher_one is None and found.p_value == 1 and found.more_tasks is None
        assert found.interval.low == -found.interval.high < 0
    assert found.interval.high < 0.01
    found = compare_paired(PairedValues(a=[1.0] * 100, b=[1.0] * 100, bounds=SHARE))
    assert found.interval.high > 1 - 0.05 ** (1 / 100) - 0.005  # a share of tasks that B loses and 100 do not show
    assert not found.is_equivalent(0.01) and found.is_equivalent(0.1) and 0.03 < found.detectable < 0.05


def test_a_few_wins_are_not_enough() -> None:
    for wins, decided in ((5, False), (6, True)):  # 2 ** -4 and 2 ** -5
        found = compare_paired(PairedValues(a=[0.0] * wins, b=[1.0] * wins, bounds=SHARE))
        assert (found.higher_one == "b") is decided
    found = compare_paired(PairedValues(a=[0.0] * 3, b=[1.0] * 3, bounds=SHARE))
    assert found.more_tasks == 3


def test_lengths_have_no_bounds() -> None:
    random = np.random.default_rng(3)
    a = random.normal(300, 100, 60)
    found = compare_paired(PairedValues(a=a.tolist(), b=(a + random.normal(20, 10, 60)).tolist()))
    assert found.higher_one == "b" and 15 < found.interval.low < 20 < found.interval.high < 25
    assert compare_paired(PairedValues(a=[5.0], b=[9.0])).higher_one is None


def test_tasks_of_a_cluster_count_together() -> None:
    a, b = [0.0] * 24, [1.0, 1.0, 1.0, 1.0] * 3 + [0.0] * 12
    apart = compare_paired(PairedValues(a=a, b=b, bounds=SHARE))
    together = compare_paired(PairedValues(a=a, b=b, bounds=SHARE, clusters=[index // 4 for index in range(24)]))
    assert apart.higher_one == "b" and together.higher_one is None
    assert together.p_value == 0.25 and together.difference == apart.difference
    each = compare_paired(PairedValues(a=a, b=b, bounds=SHARE, clusters=list(range(24))))
    assert each.interval.high == pytest.approx(apart.interval.high) and each.p_value == apart.p_value


quarters = st.integers(0, 4).map(lambda value: value / 4)


@given(st.lists(st.tuples(quarters, quarters), min_size=1, max_size=30))
def test_the_other_way_round_is_the_mirror_image(pairs: list[tuple[float, float]]) -> None:
    a, b = [first for first, _ in pairs], [second for _, second in pairs]
    found, mirrored = compare_paired(PairedValues(a=a, b=b, bounds=SHARE)), compare_paired(PairedValues(a=b, b=a, bounds=SHARE))
    assert mirrored.difference == -found.difference and mirrored.p_value == pytest.approx(found.p_value)
    assert (mirrored.interval.low, mirrored.interval.high) == pytest.approx((-found.interval.high, -found.interval.low))
    assert -1 <= found.interval.low <= found.difference <= found.interval.high <= 1
    assert (mirrored.higher, mirrored.lower) == (found.lower, found.higher)


def test_a_comparison_needs_tasks() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        compare_paired(PairedValues(a=[], b=[]))
