"""Real vLLM engines whose stages hold some of the layers each: what every stage computes with is read back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from strop.sampling import Sampling
from strop.weight_sync.verification import VerificationFailed
from support.engine_contract import planted, publish
from support.vllm_engines import compute_logprobs, perturb, served_model

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=0.8, max_new_tokens=8)
LAST = "model.layers.2.self_attn.q_proj.weight"  # of the second stage


def serve_stages(room: BackgroundLoop, folder: Path, tokenizer: Any, *, tied: bool = False, **keys: Any) -> ServedModel:
    from support.vllm_engines import FAULTY, serve_vllm

    model = served_model(layers=3, tied=tied)
    perturb(model, 1)
    return serve_vllm(model, tokenizer, folder, worker_extension=FAULTY, pipeline_parallel_size=2, **keys)


@pytest.fixture(scope="module")
def staged(room: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[ServedModel]:
    served = serve_stages(room, tmp_path_factory.mktemp("staged"), tokenizer)
    room.run(served.weights.publish(0))
    yield served
    room.run(served.close())


def disagreement(room: BackgroundLoop, served: ServedModel, requests: int = 6) -> float:
    """The largest difference of log-probabilities over requests that are in the pipeline together."""
    prompts = [tuple(range(40 + number, 60 + 2 * number)) for number in range(requests)]

    async def sample() -> Any:
        return await asyncio.gather(*(served.pool.generate(each, sampling=SAMPLING, seed=1) for each in prompts))

    pairs = zip(prompts, room.run(sample()), strict=True)
    return max(
        float((done.logprobs - compute_logprobs(served.model, each, done.tokens, SAMPLING)).abs().max()) for each, done in pairs
    )


def test_every_stage_takes_a_publish_and_all_layers_are_read_back(room: BackgroundLoop, staged: ServedModel) -> None:
    assert staged.engine.receivers == 2
    perturb(staged.model, 2)
    said = publish(room, staged)
    assert said["weights/tensors_read_back"] == len(staged.model.state_dict()) and said["weights/tensors_not_read_back"] == 0
    assert disagreement(room, staged) < 2e-5
    held = room.run(staged.engine.read_back_fingerprints())
    assert all(len(shards) == 1 for shards in held.values()), "no layer is on two stages"
    assert {shard.region for shard in held[LAST]} == {(0, 64, 0, 64)}, "whole, from row 0 on"


def test_a_tensor_that_the_last_stage_did_not_update_is_caught(room: BackgroundLoop, staged: ServedModel) -> None:
    perturb(staged.model, 3)
    with planted(room, staged, f"second rank drops {LAST}"), pytest.raises(VerificationFailed, match=LAST.replace(".", r"\.")):
        publish(room, staged)
    assert disagreement(room, staged) < 2e-5


@pytest.mark.exhaustive
def test_stages_of_two_ranks_whose_head_is_tied_to_the_embedding(room: BackgroundLoop, tmp_path: Path, tokenizer: Any) -> None:
    """The embedding is on the first stage and, as the head, on the last: both are compared."""
    served = serve_stages(room, tmp_path, tokenizer, tied=True, tensor_parallel_size=2)
    try:
        for seed in range(2):
            perturb(served.model, seed)
            said = publish(room, served)
            assert said["weights/tensors_read_back"] == len(served.model.state_dict()) - 1, "all but the head, which is tied"
            assert disagreement(room, served) < 2e-5
        held = room.run(served.engine.read_back_fingerprints())
        assert len(held["model.embed_tokens.weight"]) == 4
    finally:
        room.run(served.close())
