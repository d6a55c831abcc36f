"""The learner: steps, schedules, skipped steps, and saving and continuing bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.data.packing_config import DynamicBatchingConfig
from strop.learner.torch.learner import TorchLearner
from strop.learner.torch.scorer import NetworkScorer, copy_frozen
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.learners import make_model_config, make_scheduler_config, make_torch_learner
from support.models import build, copy_gradients, largest_difference, to_float64, with_exact_rotary
from support.rollouts import pack_for, simple_groups

SCHEDULE = make_scheduler_config(
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}},
    {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.7}},
    {"milestones": [3]},
)


def make_learner(family: str = "llama", *, seed: int = 0, **options: Any) -> TorchLearner:
    chosen = {"optimizer_kwargs": {"lr": 1e-2, "weight_decay": 0.01}, "train_tokens": 20, **options}
    return make_torch_learner(Network(build(family, seed=seed)), Sampling(), **chosen)


def batch_of(seed: int) -> Batch:
    return pack_for(simple_groups((4, (3, 5)), (6, (2, 7)), seed=seed), grpo())


def train(learner: TorchLearner, batch: Batch, scale: float = 1.0) -> dict[str, float]:
    """One optimizer step; the metrics of both halves."""

    def loss(outputs: Any, part: Batch) -> Any:
        value, logged = grpo().loss(outputs, part)
        return value * scale, logged

    result = learner.forward_backward(batch, loss)
    return {name: metric.value for name, metric in {**result.metrics, **learner.step()}.items()}


def weights_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_saved_learner_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = make_learner()
    train(learner, batch_of(0))
    learner.save(tmp_path, optimizer=False)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict(), weights_of(learner))
    assert not (tmp_path / "optimizer.pt").exists()
    with pytest.raises(FileNotFoundError, match="save_optimizer=false and cannot resume"):
        make_learner().load(tmp_path)


def test_loading_is_in_place_so_that_an_engine_on_the_module_sees_it(tmp_path: Path) -> None:
    source, target = make_learner(seed=1), make_learner(seed=2)
    source.save(tmp_path)
    places = {name: tensor.data_ptr() for name, tensor in target.model.state_dict().items()}
    target.load(tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in target.model.state_dict().items()} == places
    assert same(weights_of(source), weights_of(target))


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(scale: float) -> None:
    learner = make_learner(schedule=SCHEDULE)
    train(learner, batch_of(0))
    before = weights_of(learner)
    logged = train(learner, batch_of(1), scale)
    assert logged["steps_skipped_for_nonfinite_gradient"] == 1.0
    assert same(weights_of(learner), before)
    logged = train(learner, batch_of(1))
    assert logged["steps_skipped_for_nonfinite_gradient"] == 0.0
    assert not same(weights_of(learner), before), "the next step is an ordinary one"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(learner).values())


def test_the_gradient_is_clipped_to_its_limit_and_reported_unclipped() -> None:
    start = weights_of(make_learner())
    moved = {}
    for limit in (None, 1e-3):
        learner = make_learner(optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 1.0}, max_grad_norm=limit)
        norm = train(learner, batch_of(0))["grad_norm"]
        change = sum(float((tensor - start[name]).double().square().sum()) for name, tensor in weights_of(learner).items()) ** 0.5
        moved[limit] = (norm, change)
    assert moved[None][0] == pytest.approx(moved[1e-3][0], rel=1e-6)
    assert moved[None][1] == pytest.approx(moved[None][0], rel=1e-2)
    assert moved[1e-3][1] == pytest.approx(1e-3, rel=1e-2)


def test_gradients_accumulate_until_a_step_and_not_beyond() -> None:
    learner = make_learner()
    learner.forward_backward(batch_of(0), grpo().loss)
    once = copy_gradients(learner.model)
    learner.forward_backward(batch_of(0), grpo().loss)
    twice = copy_gradients(learner.model)
    assert largest_difference({name: 2 * tensor for name, tensor in once.items()}, twice) < 1e-5
    learner.step()
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_a_frozen_scorer_says_what_the_learner_says_and_takes_no_gradient() -> None:
    learner, batch = make_learner(), batch_of(0)
    scorer = NetworkScorer(copy_frozen(learner.network), Sampling(), score_tokens=13)  # type: ignore[arg-type]
    ours, theirs = learner.score(batch), scorer.score(batch)
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-6)
    assert torch.allclose(ours.entropy, theirs.entropy, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in scorer.network.model.parameters())
    before = scorer.score(batch)
    train(learner, batch)
    assert torch.equal(scorer.score(batch).logprobs, before.logprobs), "training the policy leaves the reference alone"


def test_the_budgets_of_padded_micro_batches_apply_where_packing_is_off() -> None:
    padded = DynamicBatchingConfig(train_mb_tokens=30, logprob_mb_tokens=40)
    config = replace(make_model_config(train_tokens=10, score_tokens=20), dynamic_batching=padded)
    assert (config.batching.train_mb_tokens, config.batching.logprob_mb_tokens) == (10, 20)
    config = replace(config, sequence_packing=replace(config.sequence_packing, enabled=False))
    assert config.batching == padded


class _Narrow(TorchDispatchMode):
    """Lists the operators that return numbers of fewer digits than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(each, torch.Tensor) and each.dtype in (torch.float32, torch.bfloat16) for each in tree_leaves(result)):
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("packed", [True, False])
def test_a_pass_in_float64_lowers_nothing_but_the_rotary_factors_of_transformers(packed: bool) -> None:
    algorithm, found = grpo(kl_penalty=0.2), {}
    batch = batch_of(0).with_column("reference_logprobs", batch_of(0).rollout_logprobs - 0.2)
    for exact in (True, False):
        model = to_float64(build("llama"))
        network = Network(with_exact_rotary(model) if exact else model, precision=torch.float64, packed=packed, chunk=13)
        with _Narrow() as narrow:
            loss, _ = algorithm.loss(network.outputs(batch, Sampling(temperature=0.9)), batch)
            loss.backward()
        found[exact] = narrow.found
    assert found[True] == []
    assert {"aten.cos.default", "aten.sin.default"} < set(found[False])
