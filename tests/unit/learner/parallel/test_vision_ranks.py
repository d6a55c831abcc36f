"""One gradient with images: two ranks, some of whose micro-batches have no image, train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop import metrics
from strop.data.packing import pack
from strop.learner.parallel.micro_batch import MicroBatchOutputs, assemble_outputs
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.rank_zero_loading import load_on_rank_zero, probe_on_rank_zero
from strop.learner.parallel.sharded import parallelize_network
from strop.models.network import Network
from strop.models.vision.vision_tower import freeze_tower
from strop.sampling import Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.parity import ALGORITHMS, Differences, TrainingResult, compare, send_share
from support.vision_models import FAMILIES, build_vision_model, keep_rotary_float64
from support.vision_rollouts import make_image_groups, make_vision_network, make_vision_processor

pytestmark = pytest.mark.slow

CASES = {
    **{family: (family, True, False) for family in FAMILIES},  # family, packed, frozen
    "padded rows": ("qwen3_vl", False, False),
    "frozen tower": ("qwen2_5_vl", True, True),
}
KEPT = ("qwen3_vl",)  # in `make test`


def make_batch(family: str) -> Batch:
    batch = pack(make_image_groups(family, 2))
    advantages = torch.linspace(-1.0, 1.0, len(batch.target))
    return replace(batch, advantages=advantages, rollout_logprobs=torch.full((len(batch.target),), -5.0))


def train(case: str, batch: Batch, meshes: DeviceMeshes | None = None) -> TrainingResult:
    family, packed, frozen = CASES[case]
    keep_rotary_float64(pytest.MonkeyPatch())
    network = make_vision_network(family, packed=packed)
    if frozen:
        freeze_tower(network.model)
    sharded = None if meshes is None else parallelize_network(network, meshes)
    learner = make_torch_learner(
        network,
        Sampling(),
        sharded,
        optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3},
        max_grad_norm=0.3,
        train_tokens=60,
        score_tokens=60,
    )
    loss = ALGORITHMS["sft"].losses(0)["policy"]
    steps, stepped = [], []
    for _ in range(2):
        steps.append(
            learner.forward_backward_local(batch if meshes is None else send_share(learner, "forward_backward", batch), loss)
        )
        stepped.append(metrics.to_floats(learner.step()))
    measured, scored = learner.evaluate_loss_local(batch, loss), learner.score_local(batch)
    weights = {name: tensor.detach().clone() for name, tensor in learner.weights()}
    return TrainingResult(steps, stepped, measured, scored, weights, [], {})


def train_on_rank(rank: int, cases: Sequence[str]) -> dict[str, TrainingResult]:
    meshes = DeviceMeshes(ParallelDims(shard=2), "cpu")
    found = {case: train(case, make_batch(CASES[case][0]), meshes) for case in cases}
    return found if rank == 0 else {case: replace(each, weights={}) for case, each in found.items()}


@cache
def on_ranks(kept: bool) -> list[dict[str, TrainingResult]]:
    return run_on_ranks(2, train_on_rank, [case for case in CASES if (case in KEPT) == kept])


@pytest.mark.extensions
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in KEPT else pytest.mark.exhaustive) for case in CASES])
def test_two_ranks_train_as_one_process_does(case: str) -> None:
    batch = make_batch(CASES[case][0])
    ranks = on_ranks(case in KEPT)
    found = compare([rank[case] for rank in ranks], train(case, batch), len(batch.target))
    most = 1e-6 if "moe" in case else 1e-9  # routers take their softmax in float32
    bounds = Differences(loss=most, norm=most, outputs=1e-6, weights=most, metrics=most)
    assert all(getattr(found, name) <= getattr(bounds, name) for name in vars(bounds)), found


def load_and_save(rank: int, family: str, folder: str) -> MicroBatchOutputs:
    """Load a model on the first rank alone, score on two, and save."""
    network = probe_on_rank_zero(load_on_rank_zero(lambda: build_vision_model(family)), Network)
    network.enable_vision(make_vision_processor(family))
    sharded = parallelize_network(network, DeviceMeshes(ParallelDims(shard=2), "cpu"))
    learner = make_torch_learner(network, Sampling(), sharded, train_tokens=60, score_tokens=60)
    learner.save(Path(folder))
    return learner.score_local(make_batch(family))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_the_first_rank_loaded_and_all_saved_is_the_model(family: str, tmp_path: Path) -> None:
    """Saved under the names of the hub's files, which differ from the module's own in some families."""
    batch = make_batch(family)
    ranks = run_on_ranks(2, load_and_save, family, str(tmp_path))
    network = Network(build_vision_model(family, seed=5), packed=True)
    network.enable_vision(make_vision_processor(family))
    learner = make_torch_learner(network, Sampling(), None, train_tokens=60, score_tokens=60)
    learner.load(tmp_path)
    scored = learner.score(batch).logprobs
    torch.testing.assert_close(assemble_outputs(ranks, len(batch.target)).logprobs, scored, rtol=0, atol=1e-5)
    original = build_vision_model(family)
    assert all(torch.equal(left, right) for left, right in zip(network.model.parameters(), original.parameters(), strict=True))
