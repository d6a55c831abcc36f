"""A draft head beside its policy: one gradient, nothing of it in the policy, and a run that continues to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.extensions.labs.draft.draft_trainer import DraftTrainer
from strop.learner.torch.learner import TorchLearner
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.drafts import DraftedModelConfig, add_head
from support.learners import make_torch_learner
from support.models import build, copy_gradients, largest_difference, to_float64
from support.rollouts import pack_for, simple_groups

SHAPES = ((5, (3, 6, 1)), (1, (4, 2)), (9, (5, 2)), (3, (7, 7)))
RATE = {"lr": 1e-2, "weight_decay": 0.01}


def make_learner(draft: bool = True, *, double: bool = False, **options: Any) -> TorchLearner:
    model = build("llama", layers=3)
    network = Network(to_float64(model) if double else model)
    if draft:
        add_head(network, sharpness=5.0)
    return make_torch_learner(network, Sampling(), optimizer_kwargs=RATE, kind=DraftedModelConfig, **options)


def trainer_of(learner: TorchLearner) -> DraftTrainer:
    assert isinstance(learner.companion, DraftTrainer)
    return learner.companion


def make_batch(seed: int = 0) -> Batch:
    return pack_for(simple_groups(*SHAPES, seed=seed), grpo())


def head_gradients(learner: TorchLearner, batch: Batch) -> dict[str, Tensor]:
    trainer = trainer_of(learner)
    learner.forward_backward(batch, grpo().loss)
    found = copy_gradients(trainer.head)
    learner.optimizer.zero_grad(set_to_none=True)
    trainer.drop_gradients()
    return found


def train(learner: TorchLearner, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(learner.forward_backward(make_batch(step), grpo().loss).metrics["draft_loss"].value)
        learner.step()
    return losses


def all_weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in (*learner.model.state_dict().items(), *trainer_of(learner).head.state_dict().items())
    }


def test_the_heads_gradient_does_not_depend_on_how_a_batch_is_cut() -> None:
    batch = make_batch()
    whole = head_gradients(make_learner(double=True), batch)
    assert min(float(gradient.abs().max()) for gradient in whole.values()) > 0
    for tokens in (12, 20, 40):
        assert largest_difference(head_gradients(make_learner(double=True, train_tokens=tokens), batch), whole) < 1e-9


def test_the_policys_gradient_and_step_are_those_without_a_head() -> None:
    found = []
    for draft in (False, True):
        learner = make_learner(draft)
        result = learner.forward_backward(make_batch(), grpo().loss)
        gradients = copy_gradients(learner.model)
        norm = learner.step()["grad_norm"].value
        found.append((gradients, norm, dict(learner.model.state_dict()), result))
    for name, gradient in found[0][0].items():
        assert torch.equal(gradient, found[1][0][name])
        assert torch.equal(found[0][2][name], found[1][2][name])
    assert found[0][1] == found[1][1]
    assert "draft_loss" not in found[0][3].metrics and found[1][3].metrics["draft_acceptance"].weight > 0


def test_recomputed_activations_change_nothing_of_the_heads_gradient() -> None:
    batch = make_batch()
    plain = head_gradients(make_learner(), batch)
    recomputed = head_gradients(make_learner(activation_checkpointing=True), batch)
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in plain.items())


def test_rollouts_without_an_advantage_train_the_head() -> None:
    learner = make_learner()
    batch = make_batch()
    batch = replace(batch, zero_gradient=torch.ones(batch.num_sequences, dtype=torch.bool))
    assert min(float(gradient.abs().max()) for gradient in head_gradients(learner, batch).values()) > 0


@pytest.mark.parametrize("staged", [False, True], ids=["saved", "staged"])
def test_a_run_continues_to_the_bit(tmp_path: Path, staged: bool) -> None:
    whole = make_learner()
    train(whole, range(3))
    if staged:
        snapshot = whole.stage()
        train(whole, range(3, 5))
        snapshot.save(tmp_path)
    else:
        whole.save(tmp_path)
        train(whole, range(3, 5))
    again = make_learner()
    again.load(tmp_path)
    train(again, range(3, 5))
    for name, tensor in all_weights(whole).items():
        assert torch.equal(tensor, all_weights(again)[name]), name


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    make_learner(draft=False).save(tmp_path)
    with pytest.raises(ValueError, match=r"has no draft head, and policy\.draft\.enabled is true"):
        make_learner().load(tmp_path)


def test_a_policy_that_reads_padded_rows_is_refused() -> None:
    network = Network(build("llama"), packed=False)
    add_head(network)
    with pytest.raises(ValueError, match="reads padded ones"):
        make_torch_learner(network, Sampling(), kind=DraftedModelConfig)
