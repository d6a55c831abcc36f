"""Manifests and the buckets they are cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.weight_sync.base import Manifest, TensorEntry
from strop.weight_sync.transports.manifest import (
    ALIGNMENT,
    Bucket,
    build_manifest,
    manifest_digest,
    match_tensors,
    place_buckets,
    split_into_buckets,
    view_in_bucket,
)


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    tensors = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.int32)), ("c", torch.zeros((), dtype=torch.float16))]
    manifest = build_manifest(tensors, torch.bfloat16)
    assert [(entry.dtype, entry.shape) for entry in manifest.entries] == [
        (torch.bfloat16, (2, 3)),
        (torch.int32, (4,)),
        (torch.bfloat16, ()),
    ]
    assert manifest.nbytes == 12 + 16 + 2
    assert [entry.dtype for entry in build_manifest(tensors, None).entries] == [torch.float32, torch.int32, torch.float16]


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="two tensors are called a"):
        build_manifest([("a", torch.zeros(1)), ("a", torch.zeros(1))], None)


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 4000))
@settings(deadline=None)
def test_buckets_hold_everything_once_in_order_without_overlap(counts: list[int], size: int) -> None:
    manifest = Manifest(tuple(TensorEntry(f"t{i}", torch.bfloat16, (count,)) for i, count in enumerate(counts)))
    found = split_into_buckets(manifest, size)
    assert tuple(placed.entry for bucket in found for placed in bucket.tensors) == manifest.entries
    for bucket in found:
        end = 0
        for placed in bucket.tensors:
            assert placed.offset % ALIGNMENT == 0
            assert placed.offset >= end
            end = placed.offset + placed.entry.nbytes
        assert end <= bucket.nbytes
        last = bucket.tensors[-1]
        assert len(bucket.tensors) == 1 or last.offset + last.entry.nbytes <= size


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        split_into_buckets(Manifest(()), 0)


@given(st.lists(st.integers(0, 50), max_size=60))
@settings(deadline=None)
def test_a_bucket_never_overlaps_with_one_that_may_still_be_read(sizes: list[int]) -> None:
    placed = place_buckets([Bucket((), size) for size in sizes], 100)
    assert [place.bucket.nbytes for place in placed] == sizes
    for count, place in enumerate(placed):
        assert place.end <= 100
        assert place.reads <= count, "a bucket waits only for those before it"
        assert all(other.end <= place.start or place.end <= other.start for other in placed[place.reads : count])


def test_a_bucket_is_filled_while_the_others_that_fit_are_read() -> None:
    assert [place.reads for place in place_buckets([Bucket((), 25)] * 8, 100)] == [0, 0, 0, 0, 1, 2, 3, 4]
    assert [place.start for place in place_buckets([Bucket((), 40)] * 4, 100)] == [0, 40, 0, 40]


def test_a_view_is_the_tensor_at_its_place() -> None:
    manifest = build_manifest([("a", torch.zeros(3)), ("b", torch.zeros(2, 2, dtype=torch.int64))], None)
    (bucket,) = split_into_buckets(manifest, 10_000)
    memory = torch.zeros(bucket.nbytes + 512, dtype=torch.uint8)
    view_in_bucket(memory, bucket.tensors[1], 512).copy_(torch.tensor([[1, 2], [3, 4]]))
    assert view_in_bucket(memory, bucket.tensors[1], 512).tolist() == [[1, 2], [3, 4]]
    assert memory[512 + ALIGNMENT :].view(torch.int64)[:4].tolist() == [1, 2, 3, 4]


def test_digests_tell_manifests_apart() -> None:
    manifests = [build_manifest([(name, torch.zeros(shape, dtype=dtype))], None) for name, shape, dtype in (
        ("a", (2, 3), torch.float32), ("b", (2, 3), torch.float32), ("a", (3, 2), torch.float32), ("a", (2, 3), torch.int32)
    )]  # fmt: skip
    assert len({manifest_digest(manifest) for manifest in manifests}) == 4
    assert manifest_digest(manifests[0]) == manifest_digest(Manifest(manifests[0].entries))


def test_tensors_that_are_not_those_of_the_manifest_are_refused() -> None:
    tensors = [("a", torch.zeros(2)), ("b", torch.zeros(3))]
    manifest = build_manifest(tensors, None)
    assert [entry.name for entry, _ in match_tensors(manifest, tensors)] == ["a", "b"]
    for wrong, message in (
        (tensors[::-1], r"a \(2,\) comes next, but b \(3,\) arrived"),
        (tensors[:1], "but nothing arrived"),
        ([*tensors, ("c", torch.zeros(1))], "c came after"),
        ([("a", torch.zeros(4)), tensors[1]], r"but a \(4,\) arrived"),
    ):
        with pytest.raises(ValueError, match=message):
            list(match_tensors(manifest, wrong))
