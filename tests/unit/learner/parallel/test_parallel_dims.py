"""The parallel dimensions that a configuration gives a number of ranks."""

from __future__ import annotations

import pytest

from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.learner.parallel.parallel_dims import ParallelDims


def test_the_ranks_that_no_dimension_takes_shard_the_model() -> None:
    config = DtensorConfig(tensor_parallel_size=2, context_parallel_size=2, dp_replicate_size=3, sequence_parallel=True)
    dims = ParallelDims.from_config(config, 48)
    assert dims == ParallelDims(replicate=3, shard=4, context=2, tensor=2, sequence=True)
    assert dims.world_size == 48


def test_sizes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="these 2 ranks do not divide 3 devices that train"):
        ParallelDims.from_config(DtensorConfig(tensor_parallel_size=2), 3)


def test_dimensions_are_written_from_copies_to_tensor_ranks() -> None:
    assert str(ParallelDims(shard=8)) == "1 copy x 8 shards x 1 context x 1 tensor"
    assert str(ParallelDims(replicate=2, shard=4, tensor=2, expert=8)) == (
        "2 copies x 4 shards x 1 context x 2 tensor, experts 8 ways"
    )
