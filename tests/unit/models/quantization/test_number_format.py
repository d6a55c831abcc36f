"""Whole tensors against the published formulas, block by block in numpy."""

import math

import numpy
import pytest
import torch
from torch import Tensor

from strop.models.quantization.number_format import (
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_FLOOR,
    NUMBER_FORMATS,
    NVFP4,
    NumberFormat,
    quantize,
    round_trip,
)
from support.small_floats import TABLES, nearest

FORMATS = list(NUMBER_FORMATS.values())
name = pytest.mark.parametrize("number_format", FORMATS, ids=lambda each: each.name)
f32 = numpy.float32


def block_scale(amax: float, number_format: NumberFormat, whole: float) -> tuple[float, float]:
    """The scale of a block and of its tensor, by the formulas that the formats are published with."""
    largest = number_format.element.largest
    if number_format.scale == "float32":
        return (float(f32(amax) / f32(largest)) if amax else 1.0), 1.0
    if number_format.scale == "e4m3":
        tensor_scale = f32(whole) / f32(largest * 448) if whole else f32(1)
        ratio = f32(f32(amax) / f32(largest)) / tensor_scale
        return nearest(max(float(ratio), 2.0**-9), TABLES["e4m3"]), float(tensor_scale)
    if not amax:
        return 2.0**-126, 1.0
    if number_format.scale == "power_of_two_floor":
        return 2.0 ** (math.floor(math.log2(amax)) - math.floor(math.log2(largest))), 1.0
    exponent = math.floor(math.log2(amax / largest)) - 1
    while amax > largest * 2.0**exponent:
        exponent += 1
    return 2.0**exponent, 1.0


def by_formula(matrix: Tensor, number_format: NumberFormat) -> Tensor:
    table, values = TABLES[number_format.element.name], matrix.double().numpy()
    rows, columns = number_format.rows or values.shape[0], number_format.columns or values.shape[1]
    result, whole = numpy.zeros_like(values, dtype=f32), float(numpy.abs(values).max())
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], columns):
            block = values[top : top + rows, left : left + columns]
            scale, tensor_scale = block_scale(float(numpy.abs(block).max()), number_format, whole)
            factor = f32(scale) * f32(tensor_scale)
            for (row, column), value in numpy.ndenumerate(block):
                result[top + row, left + column] = f32(nearest(float(f32(value) / factor), table)) * factor
    return torch.from_numpy(result)


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(6, 161, generator=generator) * torch.logspace(-4, 3, 161)
    tall = torch.randn(131, 9, generator=generator)
    tall[5:9] = 0
    return [wide, tall, torch.randn(3, 130, generator=generator) * 1e-30, torch.randn(2, 32, generator=generator) * 1e30]


@name
def test_equals_the_published_formula_in_numpy(number_format: NumberFormat) -> None:
    for matrix in matrices():
        assert torch.equal(round_trip(matrix, number_format), by_formula(matrix, number_format))


@name
def test_shape_and_data_type_stay_for_vectors_scalars_and_empty_tensors(number_format: NumberFormat) -> None:
    for shape in ((7,), (), (0, 5), (4, 0), (2, 3, 33), (1, 1)):
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        rounded = round_trip(tensor, number_format)
        assert rounded.shape == tensor.shape and rounded.dtype == torch.bfloat16
        assert torch.allclose(rounded.float(), tensor.float(), rtol=0.01)


@name
def test_experts_are_quantised_each_for_itself(number_format: NumberFormat) -> None:
    experts = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(3)) * torch.tensor([0.01, 1.0, 50.0])[:, None, None]
    together = round_trip(experts, number_format)
    assert torch.equal(together, torch.stack([round_trip(each, number_format) for each in experts]))


@name
def test_an_infinity_or_nan_is_not_hidden_by_the_rounding(number_format: NumberFormat) -> None:
    for broken in (math.inf, -math.inf, math.nan):
        matrix = torch.ones(4, 200)
        matrix[2, 3] = broken
        rounded = round_trip(matrix, number_format)
        assert rounded[2, :16].isnan().all()
        if number_format.columns is not None:
            assert rounded[2, 128:].eq(1).logical_or(rounded[2, 128:].sub(1).abs() < 0.01).all()


@pytest.mark.parametrize("number_format", [FP8_BLOCK_POW2, MXFP8], ids=lambda each: each.name)
def test_rounding_twice_is_rounding_once_where_scales_are_powers_of_two(number_format: NumberFormat) -> None:
    for matrix in matrices():
        once = round_trip(matrix, number_format)
        assert torch.equal(round_trip(once, number_format), once)


@name
def test_a_stored_tensor_says_its_scales_and_values(number_format: NumberFormat) -> None:
    matrix = torch.randn(140, 150, generator=torch.Generator().manual_seed(4)).bfloat16()
    stored = quantize(matrix, number_format)
    rows, columns = number_format.rows or 140, number_format.columns or 150
    assert stored.shape == matrix.shape
    assert stored.scales.shape == (math.ceil(140 / rows), math.ceil(150 / columns))
    assert stored.values.dtype == (number_format.element.dtype or torch.uint8)
    assert torch.equal(stored.dequantize(torch.bfloat16), round_trip(matrix, number_format))
    if number_format.scale.startswith("power_of_two"):
        assert torch.equal(torch.frexp(stored.scales).mantissa, torch.full_like(stored.scales, 0.5))


def test_only_the_floor_of_the_mx_specification_saturates() -> None:
    matrix = torch.full((1, 32), 0.5)
    matrix[0, 0] = 1.96875  # 1.96875 / 2^-8 = 504 > 448
    assert round_trip(matrix, MXFP8_FLOOR)[0, 0] == 1.75
    assert round_trip(matrix, MXFP8)[0, 0] == 2.0
    assert round_trip(torch.full((1, 32), 7.0), MXFP4)[0, 0] == 6.0


@pytest.mark.parametrize("number_format", [FP8_TENSOR, NVFP4], ids=lambda each: each.name)
def test_a_calibrated_amax_makes_the_scale_static(number_format: NumberFormat) -> None:
    matrix = torch.tensor([[1.0] * 15 + [8.0]])
    stored = quantize(matrix, number_format, amax=torch.tensor(4.0))
    level = stored.tensor_scale if number_format is NVFP4 else stored.scales
    assert float(level) == pytest.approx(4 / 448 / (6 if number_format is NVFP4 else 1))
    assert stored.dequantize()[0, -1] == pytest.approx(4.0)


def test_a_static_scale_does_not_hide_an_infinity() -> None:
    assert round_trip(torch.tensor([[1.0, math.inf]]), FP8_TENSOR, amax=torch.tensor(2.0)).isnan().all()


def test_the_bits_of_a_value_count_its_share_of_the_scales() -> None:
    assert (FP8_BLOCK.bits, MXFP8.bits, NVFP4.bits) == (8 + 32 / 128 / 128, 8.25, 4.5)
