"""Student's t distribution, against values of published tables."""

from __future__ import annotations

import math

import pytest

from strop.extensions.evaluation.statistics import student_t_cdf, student_t_quantile

# 97.5 % and 99.5 % points, as printed in tables of the distribution.
TABLE = {
    1: (12.706205, 63.656741),
    2: (4.302653, 9.924843),
    5: (2.570582, 4.032143),
    10: (2.228139, 3.169273),
    30: (2.042272, 2.749996),
    120: (1.979930, 2.617421),
    math.inf: (1.959964, 2.575829),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom: float) -> None:
    found = student_t_quantile(0.975, freedom), student_t_quantile(0.995, freedom)
    assert found == pytest.approx(TABLE[freedom], abs=2e-6)
    assert student_t_quantile(0.025, freedom) == -found[0]
    assert student_t_quantile(0.5, freedom) == 0


def test_it_agrees_with_scipy_where_that_is_installed() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 3, 17, 400):
        for value in (-5.0, -0.3, 0.7, 3.0):
            assert student_t_cdf(value, freedom) == pytest.approx(stats.t.cdf(value, freedom), rel=1e-10)
