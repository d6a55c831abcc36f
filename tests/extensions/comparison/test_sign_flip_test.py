"""The paired permutation test, against enumeration and known values."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.extensions.comparison import paired_comparison
from strop.extensions.comparison.paired_comparison import adjust_p_values, sign_flip_p_value


def enumerate_p_value(differences: list[float]) -> float:
    observed = abs(math.fsum(differences))
    sums = [math.fsum(sign * each for sign, each in zip(signs, differences, strict=True)) for signs in
            itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
    return sum(abs(each) >= observed - 1e-9 for each in sums) / len(sums)


@given(st.lists(st.sampled_from([-1.0, -0.75, -1 / 3, 0.0, 0.25, 0.5, 2 / 3, 1.0]), min_size=1, max_size=10))
def test_it_is_the_share_of_all_choices_of_signs(differences: list[float]) -> None:
    assert sign_flip_p_value(differences) == pytest.approx(enumerate_p_value(differences))


@pytest.mark.parametrize("won, lost", [(9, 1), (6, 0), (5, 0), (30, 14), (4, 4)])
def test_of_binary_outcomes_it_is_mcnemars_exact_test(won: int, lost: int) -> None:
    tail = sum(math.comb(won + lost, each) for each in range(max(won, lost), won + lost + 1)) / 2 ** (won + lost)
    found = sign_flip_p_value([1.0] * won + [-1.0] * lost + [0.0] * 50)
    assert found == pytest.approx(min(2 * tail, 1.0))


def test_no_difference_has_the_p_value_one() -> None:
    assert sign_flip_p_value([0.0] * 5) == 1.0 and sign_flip_p_value([0.5, -0.5]) == 1.0


def test_real_numbers_are_flipped_at_random_and_repeatably() -> None:
    drawn = random.Random(3)
    differences = [drawn.gauss(0.4, 1.0) for _ in range(12)]
    exact, found = enumerate_p_value(differences), sign_flip_p_value(differences)
    assert found == sign_flip_p_value(differences)
    assert abs(found - exact) < 4 * math.sqrt(exact * (1 - exact) / paired_comparison.FLIPS)


def test_very_many_real_numbers_have_the_normal_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(4)
    differences = [drawn.gauss(0.03, 1.0) for _ in range(5000)]
    found = sign_flip_p_value(differences)
    monkeypatch.setattr(paired_comparison, "MANY", 1e9)
    monkeypatch.setattr(paired_comparison, "FLIPS", 5000)
    assert found == pytest.approx(sign_flip_p_value(differences), abs=0.03)


def test_holms_correction() -> None:
    assert adjust_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_p_values([0.6, 0.9]) == [1.0, 1.0] and adjust_p_values([]) == []
