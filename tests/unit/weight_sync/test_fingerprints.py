"""Fingerprints add up over shards, and no change goes unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.weight_sync import fingerprints
from strop.weight_sync.fingerprints import MODULUS, combine_fingerprints, fingerprint

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of random bits: NaNs and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def by_hand(tensor: Tensor) -> int:
    """The formula, in Python's integers."""
    table = fingerprints._byte_table(tensor)
    a = fingerprints._row_coefficients(0, table.shape[0], torch.device("cpu")).tolist()
    b = fingerprints._column_coefficients(0, table.shape[1], torch.device("cpu")).tolist()
    rows = table.tolist()
    return sum(a[i] * b[k] * value for i, row in enumerate(rows) for k, value in enumerate(row)) % MODULUS


cases = st.tuples(st.integers(1, 40), st.integers(1, 60), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))


@given(cases)
@settings(max_examples=40, deadline=None)
def test_it_is_the_sum_that_it_is_said_to_be(case: tuple[int, int, torch.dtype, int]) -> None:
    rows, columns, dtype, seed = case
    tensor = bits((rows, columns), dtype, seed)
    assert fingerprint(tensor) == by_hand(tensor)


@given(cases)
@settings(max_examples=40, deadline=None)
def test_the_fast_way_and_the_plain_way_agree(case: tuple[int, int, torch.dtype, int]) -> None:
    rows, columns, dtype, seed = case
    table = fingerprints._byte_table(bits((rows, columns), dtype, seed))
    coefficients = fingerprints._row_coefficients(seed, rows, torch.device("cpu"))
    found = {
        way(table, columns, coefficients) % MODULUS for way in (fingerprints._sum_by_definition, fingerprints._sum_by_matmul)
    }
    assert len(found) == 1


@given(cases, st.data())
@settings(max_examples=60, deadline=None)
def test_shards_of_rows_and_columns_add_up(case: tuple[int, int, torch.dtype, int], data: st.DataObject) -> None:
    rows, columns, dtype, seed = case
    tensor = bits((rows, columns), dtype, seed)
    top = data.draw(st.integers(0, rows))
    left = data.draw(st.integers(0, columns))
    parts = [
        fingerprint(tensor[i:j, k:m], rows=i, columns=k)
        for i, j in ((0, top), (top, rows))
        for k, m in ((0, left), (left, columns))
    ]
    assert combine_fingerprints(parts) == fingerprint(tensor)
    copies = [fingerprint(tensor[:top].clone()), fingerprint(tensor[top:].clone(), rows=top)]
    assert combine_fingerprints(copies) == fingerprint(tensor)


@given(cases, st.data())
@settings(max_examples=80, deadline=None)
def test_a_flipped_bit_is_always_seen(case: tuple[int, int, torch.dtype, int], data: st.DataObject) -> None:
    rows, columns, dtype, seed = case
    tensor = bits((rows, columns), dtype, seed)
    before = fingerprint(tensor)
    changed = tensor.view(torch.uint8).flatten()
    place = data.draw(st.integers(0, changed.numel() - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(tensor) != before


@given(cases, st.data())
@settings(max_examples=80, deadline=None)
def test_swapped_elements_and_rows_are_seen(case: tuple[int, int, torch.dtype, int], data: st.DataObject) -> None:
    rows, columns, dtype, seed = case
    tensor = bits((rows, columns), dtype, seed)
    raw = tensor.view(torch.uint8).view(rows * columns, dtype.itemsize)
    one, other = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, len(raw) - 1))
    before, same = fingerprint(tensor), bool((raw[one] == raw[other]).all())
    raw[[one, other]] = raw[[other, one]]
    assert (fingerprint(tensor) == before) == same
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    shuffled = tensor.view(torch.uint8)[order].view(dtype)
    assert (fingerprint(shuffled) == fingerprint(tensor)) == torch.equal(shuffled.view(torch.uint8), tensor.view(torch.uint8))


def test_zeros_of_both_signs_differ_and_so_do_nans() -> None:
    assert fingerprint(torch.zeros(2, 2)) != fingerprint(-torch.zeros(2, 2))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(nans[:1]) != fingerprint(nans[1:])


def test_vectors_are_sharded_by_rows_like_the_matrix_they_belong_to() -> None:
    vector = bits((1000,), torch.bfloat16, 3)
    assert combine_fingerprints(fingerprint(vector[i : i + 300], rows=i) for i in range(0, 1000, 300)) == fingerprint(vector)


def test_a_cut_of_an_inner_dimension_adds_up_from_its_columns() -> None:
    experts = bits((4, 3, 10), torch.bfloat16, 5)
    parts = [fingerprint(experts[:, a, lo:hi], columns=a * 10 + lo) for a in range(3) for lo, hi in ((0, 4), (4, 10))]
    assert combine_fingerprints(parts) == fingerprint(experts)
    assert combine_fingerprints(fingerprint(experts[e : e + 1], rows=e) for e in range(4)) == fingerprint(experts)


def test_how_the_memory_is_laid_out_does_not_matter() -> None:
    tensor = bits((300, 200), torch.bfloat16, 1)
    turned = tensor.t().contiguous().t()
    spaced = torch.zeros(300, 512, dtype=torch.bfloat16)
    spaced[:, 7:207] = tensor.nan_to_num()
    assert fingerprint(turned) == fingerprint(tensor)
    assert fingerprint(spaced[:, 7:207]) == fingerprint(tensor.nan_to_num())
    assert fingerprint(spaced[::2, 7:207]) == fingerprint(spaced[::2, 7:207].contiguous())
    assert fingerprint(spaced[:, 5]) == fingerprint(spaced[:, 5].clone())


def test_rows_wider_than_one_product_and_more_rows_than_one_chunk() -> None:
    wide = bits((2, 150_001), torch.bfloat16, 2)
    assert fingerprint(wide) == combine_fingerprints(
        (fingerprint(wide[:, :100_000]), fingerprint(wide[:, 100_000:], columns=100_000))
    )
    tall = bits((9000, 40), torch.float32, 2)
    assert fingerprint(tall) == combine_fingerprints((fingerprint(tall[:1]), fingerprint(tall[1:], rows=1)))
    extreme = torch.full((1, fingerprints._MAX_COLUMNS), -128, dtype=torch.int8)  # the largest sums there are
    assert fingerprint(extreme) == by_hand(extreme)


@pytest.mark.parametrize(
    "value", [torch.tensor(3.0), torch.tensor([True, False]), torch.tensor([1 + 2j, 3 - 1j]), torch.ones(2, 3, 4, 5)]
)
def test_any_shape_and_dtype_has_one(value: Tensor) -> None:
    assert 0 < fingerprint(value) < MODULUS
    assert fingerprint(value) == fingerprint(value.clone())


def test_nothing_has_the_fingerprint_zero() -> None:
    assert fingerprint(torch.zeros(0, 5)) == fingerprint(torch.zeros(5, 0)) == combine_fingerprints([]) == 0


def test_numbers_stay_what_they_are_from_version_to_version() -> None:
    """Both sides of a run may be different installations."""
    assert fingerprint(torch.arange(12, dtype=torch.float32).view(3, 4)) == 1222080941586405365
