"""Small floats against their bit patterns, read by the published definitions in float64."""

import itertools
import math

import numpy
import pytest
import torch

from strop.models.quantization.number_format import E2M1, E2M1_VALUES, E4M3, E5M2, Element, encode_e8m0, power_of_two
from support.small_floats import E2M1_BY_BITS, TABLES, nearest

ELEMENTS = [E4M3, E5M2, E2M1]


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda each: each.name)
def test_every_value_of_the_format_stays_as_it_is(element: Element) -> None:
    values = torch.tensor([sign * value for value in TABLES[element.name] for sign in (1.0, -1.0)])
    assert torch.equal(element.round(values), values)
    assert max(TABLES[element.name]) == element.largest
    assert element.largest_exponent == math.floor(math.log2(element.largest))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda each: each.name)
def test_rounds_to_the_nearest_value_and_ties_to_even(element: Element) -> None:
    table = TABLES[element.name]
    middles = numpy.array([(low + high) / 2 for low, high in itertools.pairwise(table)], dtype=numpy.float32)
    around = numpy.concatenate(
        [middles, numpy.nextafter(middles, numpy.float32(numpy.inf)), numpy.nextafter(middles, numpy.float32(0))]
    )
    spread = torch.randn(400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 5, 400)
    values = torch.cat([torch.from_numpy(around), torch.from_numpy(-around), spread, torch.tensor([0.0, -0.0, 1e30, -1e30])])
    expected = torch.tensor([nearest(float(value), table) for value in values])
    assert torch.equal(element.round(values), expected)
    assert torch.equal(element.round(values).signbit(), expected.signbit())


def test_e2m1_has_the_eight_values_of_the_specification() -> None:
    assert tuple(E2M1_BY_BITS) == E2M1_VALUES == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    codes = E2M1.encode(torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)]))
    assert codes.tolist() == list(range(16))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda each: each.name)
def test_a_nan_stays_a_nan_and_an_infinity_saturates(element: Element) -> None:
    rounded = element.round(torch.tensor([math.nan, math.inf, -math.inf]))
    assert rounded[0].isnan() and rounded[1:].tolist() == [element.largest, -element.largest]


def test_powers_of_two_have_the_bytes_of_e8m0() -> None:
    exponents = torch.arange(-200, 200)
    scales = power_of_two(exponents)
    clamped = exponents.clamp(-127, 127)
    assert scales.tolist() == [2.0 ** int(each) for each in clamped]
    assert encode_e8m0(scales).tolist() == (clamped + 127).tolist()
    assert encode_e8m0(torch.tensor([math.nan])).tolist() == [255]
    assert torch.equal(encode_e8m0(scales).view(torch.float8_e8m0fnu).float(), scales)
