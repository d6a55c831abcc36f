"""A draft head beside a policy that Megatron Core trains on two data-parallel ranks: the gradient and the steps of one device."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks

from strop.extensions.labs.draft.draft_trainer import DraftTrainer
from strop.types import Batch
from support.drafts import add_head
from support.megatron_parity import MegatronCase, case, make_megatron_learner
from support.needs import needs_megatron
from support.parity import SAMPLING, build_network, get_loss, make_batch

needs_megatron()
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

CASE = MegatronCase(case=case(layers=3), world=2)


def weights_of(trainer: DraftTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.head.named_parameters()}


def train_with_head(rank: int, batch: Batch, folder: str) -> dict[str, Any]:
    from strop.extensions.megatron.megatron_draft import make_megatron_draft_options

    plain = build_network(CASE.case)
    head = add_head(plain, sharpness=5.0)
    learner = make_megatron_learner(CASE, draft=copy.deepcopy(head))
    alone = DraftTrainer(plain, head, make_megatron_draft_options(CASE.config(), None), SAMPLING)
    loss, found = get_loss(CASE.case), {}
    for step in range(2):  # of the heads: the policies stay
        result = learner.forward_backward_local(batch, loss)
        norm = learner.draft.step()["draft_grad_norm"].value
        with alone.capturing(), torch.no_grad():
            plain.outputs(batch, SAMPLING)
        whole = alone.accumulate(batch)
        found[step] = (norm, alone.step()["draft_grad_norm"].value, result.metrics, whole)
    found["weights"] = (weights_of(learner.draft), weights_of(alone))
    learner.step()
    learner.save(Path(folder))
    torch.distributed.barrier()
    again = make_megatron_learner(CASE, draft=copy.deepcopy(head))
    again.load(Path(folder))
    for each in (learner, again):
        each.forward_backward_local(batch, loss)
        each.step()
    found["continued"] = (weights_of(learner.draft), weights_of(again.draft))
    found["files"] = sorted(path.name for path in (Path(folder) / "draft").iterdir())
    return found


@cache
def results(folder: str) -> list[dict[str, Any]]:
    return run_on_ranks(2, train_with_head, make_batch(CASE.case), folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(str(tmp_path_factory.mktemp("draft")))


def test_the_heads_gradient_and_steps_are_those_of_one_device(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for step in range(2):
            assert found[step][0] == pytest.approx(found[step][1], rel=1e-7)
        own, alone = found["weights"]
        for name, tensor in alone.items():
            assert torch.allclose(own[name], tensor, rtol=1e-6, atol=1e-9), name
    for name, tensor in ranks[0]["weights"][0].items():
        assert torch.equal(tensor, ranks[1]["weights"][0][name])


def test_the_metrics_of_the_ranks_together_are_those_of_one_device(ranks: list[dict[str, Any]]) -> None:
    for name in ("draft_loss", "draft_acceptance"):
        together = ranks[0][0][2][name].merge(ranks[1][0][2][name])
        whole = ranks[0][0][3][name]
        assert together.weight == whole.weight and together.value == pytest.approx(whole.value, rel=1e-6)


def test_a_run_continues_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["files"] == ["config.json", "model.safetensors", "training.pt"]
        own, again = found["continued"]
        assert all(torch.equal(tensor, again[name]) for name, tensor in own.items())
