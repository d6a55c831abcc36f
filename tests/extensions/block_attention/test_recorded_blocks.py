"""Blocks that an engine's indexers chose are recorded, and replayed by a learner that would choose otherwise."""

from __future__ import annotations

import pytest
from tests.unit.models.test_indexers import make_network, sample, score

from strop.generation.torch.model_runner import RecomputeRunner
from strop.generation.torch.torch_engine import find_cache_obstacle
from strop.models.routing.recorded_experts import measure_disagreement, take_replay_counts
from support.sweep import sweep_rows

CASES = [("deepseek_v4", 2), ("glm5_next", 2), ("minimax_m3", 4)]


@pytest.mark.parametrize(("family", "choices"), sweep_rows(CASES, *CASES[1:]))
def test_a_learner_attends_to_the_blocks_that_the_engine_chose(family: str, choices: int) -> None:
    sampler, learner = make_network(7, family), make_network(None, family)
    assert "blocks of" in str(find_cache_obstacle(sampler))
    batch = sample(sampler, lambda network, length, slots: RecomputeRunner(network, max_slots=slots, length=length), choices)
    assert float((score(learner, batch) - batch.rollout_logprobs).abs().max()) < 1e-5
    disagreement = measure_disagreement(take_replay_counts(learner)["indexer_disagreement"], "indexer_disagreement")
    assert disagreement["indexer_disagreement"].value > 0.5
    learner.indexed = None
    assert float((score(learner, batch) - batch.rollout_logprobs).abs().max()) > 1e-3
