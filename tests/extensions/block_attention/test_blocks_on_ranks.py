"""Attention to blocks of tokens on ranks: training is that of one process, in float64."""

from __future__ import annotations

import pytest
from tests.unit.learner.parallel.test_mixers_on_ranks import (
    CONTEXT,
    LORA,
    RECOMPUTED,
    SHARDED,
    STAGES,
    TENSOR,
    MixerCase,
    check_on_ranks,
)

from strop.learner.parallel.parallel_dims import ParallelDims
from support.sweep import sweep

pytestmark = pytest.mark.slow

EXPERTS = ParallelDims(shard=2, expert=2)
# Which do not divide, so keys and values go around a ring.
THREE = {"num_attention_heads": 3, "num_key_value_heads": 3, "index_n_heads": 3}
CASES = {
    "blocks, shards": MixerCase("deepseek_v4", SHARDED),
    "blocks, recomputed": MixerCase("deepseek_v4", SHARDED, options=RECOMPUTED),
    "blocks, experts": MixerCase("deepseek_v4", EXPERTS),
    "blocks, context": MixerCase("deepseek_v4", CONTEXT),
    "blocks, context, replayed": MixerCase("deepseek_v4", CONTEXT, replayed=2, block=2),
    "blocks, lora": MixerCase("deepseek_v4", SHARDED, options=LORA),
    "pooled keys, recomputed": MixerCase("glm5_next", SHARDED, options=RECOMPUTED),
    "pooled keys, tensor": MixerCase("glm5_next", TENSOR),
    "pooled keys, context": MixerCase("glm5_next", CONTEXT),
    "pooled keys, experts": MixerCase("glm5_next", EXPERTS),
    "by head, recomputed": MixerCase("minimax_m3", SHARDED, options=RECOMPUTED),
    "by head, tensor": MixerCase("minimax_m3", TENSOR),
    "by head, context": MixerCase("minimax_m3", CONTEXT),
    "by head, context, replayed": MixerCase("minimax_m3", CONTEXT, {"index_topk_blocks": 1}, replayed=4, block=4),
    "by head, ring": MixerCase("minimax_m3", CONTEXT, THREE),
    "by head, stages": MixerCase("minimax_m3", STAGES),
    "by head, experts": MixerCase("minimax_m3", EXPERTS),
}


@pytest.mark.parametrize("name", sweep(CASES, "blocks, context, replayed"))
def test_training_on_ranks_is_training_in_one_process(name: str) -> None:
    check_on_ranks(CASES[name])
