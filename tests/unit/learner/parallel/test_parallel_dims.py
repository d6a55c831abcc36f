"""The parallel dimensions that a configuration gives a number of ranks."""

from __future__ import annotations

import pytest

from strop.learner.parallel.dtensor_config import DtensorConfig, find_stage_problems
from strop.learner.parallel.parallel_dims import ParallelDims


def test_the_ranks_that_no_dimension_takes_shard_the_model() -> None:
    config = DtensorConfig(tensor_parallel_size=2, context_parallel_size=2, dp_replicate_size=3, sequence_parallel=True)
    dims = ParallelDims.from_config(config, 48)
    assert dims == ParallelDims(replicate=3, shard=4, context=2, tensor=2, sequence=True)
    assert dims.world_size == 48


def test_pipeline_stages_take_their_part_of_the_ranks() -> None:
    config = DtensorConfig(pipeline_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_schedule="Interleaved1F1B")
    dims = ParallelDims.from_config(config, 12)
    assert dims == ParallelDims(pipeline=2, shard=3, tensor=2, interleaved=True)
    assert (dims.world_size, dims.stage_size, dims.data) == (12, 6, 3)
    assert str(dims) == "2 pipeline (interleaved) x 1 copy x 3 shards x 1 context x 2 tensor"
    with pytest.raises(ValueError, match="pipeline_parallel_size: found 4, with tensor_parallel_size = 1 and"):
        ParallelDims.from_config(DtensorConfig(pipeline_parallel_size=4), 6)


def test_layers_that_stages_cannot_share_are_a_problem() -> None:
    def found(layers: int, ranks: int, interleaved: bool = False, each: int | None = None) -> str:
        problems = find_stage_problems("K", "M", layers, ranks=ranks, interleaved=interleaved, layers_per_stage=each)
        return " ".join(str(problem) for problem in problems)

    assert not found(2, 2) and not found(5, 2, True) and not found(8, 2, True, 2) and not found(1, 1, True)
    assert "found 4, which needs 4 stages (1F1B), and M has 3 layers" in found(3, 4) and "at most 3" in found(3, 4)
    assert "found 2, which needs 4 stages (Interleaved1F1B)" in found(3, 2, True)
    assert "K.pipeline_parallel_layers_per_stage: found 3" in found(8, 2, True, 3) and "a divisor of 4" in found(8, 2, True, 3)


def test_sizes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="these 2 ranks do not divide 3 devices that train"):
        ParallelDims.from_config(DtensorConfig(tensor_parallel_size=2), 3)


def test_dimensions_are_written_from_copies_to_tensor_ranks() -> None:
    assert str(ParallelDims(shard=8)) == "1 copy x 8 shards x 1 context x 1 tensor"
    assert str(ParallelDims(replicate=2, shard=4, tensor=2, expert=8)) == (
        "2 copies x 4 shards x 1 context x 2 tensor, experts 8 ways"
    )
