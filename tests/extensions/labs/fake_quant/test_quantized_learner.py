"""A learner with fake quantisation: one gradient however a batch is cut, and an engine that samples from what it trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant, iter_static_inputs
from strop.extensions.labs.fake_quant.calibration import set_input_scales
from strop.extensions.labs.fake_quant.modelopt_config import read_quant_config
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.algorithms import grpo
from support.learners import make_torch_learner
from support.lora import with_random_adapters
from support.models import build, copy_gradients, largest_difference, to_float64
from support.rollouts import pack_for, simple_groups, with_columns
from support.torch_engine import Request, make_engine, make_runner, run_requests

CONFIGS = ("W4A16_NVFP4_CFG", "MXFP8_DEFAULT_CFG", "FP8_DEFAULT_CFG")
EXACT = 1e-9  # of float64, as in test_one_gradient


def make_network(
    source: str, family: str = "llama", *, exact: bool = True, packed: bool | None = True, lora: bool = False
) -> Network:
    model = to_float64(build(family)) if exact else build(family)
    if lora:
        model = with_random_adapters(model, dim=2, alpha=4, target_modules=("q_proj", "down_proj"))
    network = Network(model, precision=torch.float64 if exact else torch.float32, chunk=5, packed=packed)
    apply_fake_quant(model, read_quant_config(source))
    set_input_scales(model, {name: 4.0 for name, _ in iter_static_inputs(model)})
    return network


@cache
def groups() -> Any:
    return simple_groups((5, (3, 6, 1)), (2, (6, 2)), (9, (4, 4, 4)))


def gradient(network: Network, budget: int, *, share_prefixes: bool = True) -> dict[str, Tensor]:
    network.model.zero_grad(set_to_none=True)
    algorithm = grpo(kl_penalty=0.3)
    batch = pack_for(groups(), algorithm, share_prefixes=share_prefixes)
    learner = make_torch_learner(
        network, Sampling(), optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.0}, train_tokens=budget
    )
    learner.forward_backward(score_columns(batch), algorithm.loss)
    return copy_gradients(network.model)


def score_columns(batch: Batch) -> Batch:
    noise = torch.Generator().manual_seed(7)
    logprobs = -3 + 0.2 * torch.randn(len(batch.target), generator=noise, dtype=torch.float64)
    return with_columns(batch, logprobs)


@pytest.mark.parametrize("source", CONFIGS)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(source: str) -> None:
    network = make_network(source)
    whole = gradient(network, 10**9)
    assert max(float(each.abs().max()) for each in whole.values()) > 0
    for cut in (gradient(network, 12), gradient(network, 10**9, share_prefixes=False)):
        assert largest_difference(cut, whole) < EXACT
    assert largest_difference(gradient(make_network(source, packed=False), 20), whole) < EXACT


def test_gradients_reach_the_adapters_through_a_rounded_base() -> None:
    network = make_network("NVFP4_DEFAULT_CFG", lora=True)
    found = gradient(network, 10**9)
    assert any(float(each.abs().max()) > 0 for name, each in found.items() if ".lora_" in name)
    assert largest_difference(gradient(network, 12), found) < EXACT


@pytest.mark.parametrize("source", CONFIGS)
@pytest.mark.parametrize(
    ("lora", "prepack"),
    [(False, None), (True, None), *(pytest.param(lora, False, marks=pytest.mark.exhaustive) for lora in (False, True))],
)
def test_the_engine_reports_the_log_probabilities_that_the_learner_computes(
    source: str, lora: bool, prepack: bool | None
) -> None:
    network = make_network(source, exact=False, packed=None, lora=lora)
    engine = make_engine(make_runner(network, prepack=prepack))
    (completion,) = run_requests(engine, [Request(range(3, 12), Sampling(max_new_tokens=8))])
    network.use_learner_attention()
    (group,) = simple_groups((9, (len(completion.tokens),)))
    batch, tokens = pack_for([group], grpo()), torch.cat([torch.arange(3, 12), completion.tokens])
    batch = replace(batch, tokens=tokens[: len(batch.tokens)], target=tokens[-len(batch.target) :])
    with torch.no_grad():
        learned = network.outputs(batch, Sampling()).logprobs
    assert float((learned - completion.logprobs).abs().max()) < 1e-5


def test_a_learner_that_is_restored_goes_on_to_the_bit(tmp_path: Path) -> None:
    def steps(learner: Any, count: int) -> None:
        algorithm = grpo()
        for _ in range(count):
            learner.forward_backward(score_columns(pack_for(groups(), algorithm)), algorithm.loss)
            learner.step()

    learners = [make_torch_learner(make_network("FP8_DEFAULT_CFG", exact=False), Sampling()) for _ in range(2)]
    steps(learners[0], 2)
    learners[0].save(tmp_path)
    steps(learners[0], 2)
    learners[1].load(tmp_path)
    steps(learners[1], 2)
    states = [learner.network.model.state_dict() for learner in learners]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
