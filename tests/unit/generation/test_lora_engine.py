"""The engine with adapters: what it samples from is what the learner scores, at every step, and the base never moves.

Bounds are those without adapters. In float32 the copies are merged, and what is left is the order of additions; in bfloat16 the engine
does what the learner's layers do, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.generation.torch.fast_linears import FastLinears
from strop.generation.torch.model_runner import CachedRunner
from strop.learner.torch.scorer import NetworkScorer, without_adapters
from strop.models.adapters import lora_layers
from strop.models.lora import add_adapters
from strop.models.lora_config import LoraConfig
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.lora import build_with_adapters, copy_base_weights, with_random_adapters
from support.models import FAMILIES, build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.sweep import sweep, sweep_rows
from support.torch_engine import Request, cache_config, make_engine, make_runner, run_requests

FLOAT32 = 2e-5
BFLOAT16 = 0.02
PROMPTS = [[5, 40, 200, 31, 7, 7, 90, 301, 12, 66, 45], [17, 300]]
SAMPLING = Sampling(max_new_tokens=14, temperature=0.8)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the experts' weights:UserWarning")]


def sample(runner: Any) -> Batch:
    """Two groups of three rollouts as a packed batch."""
    requests = [Request(prompt, SAMPLING, seed=10 * place + copy) for place, prompt in enumerate(PROMPTS) for copy in range(3)]
    completions = run_requests(make_engine(runner, stop_ids=(2,)), requests)
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    return pack_grpo([make_group(*rollouts[:3], index=0), make_group(*rollouts[3:], index=1)])


def disagreement(batch: Batch, scorer: Any) -> float:
    scores = scorer.score(batch)
    return float((scores.logprobs - batch.rollout_logprobs).abs().max())


@pytest.mark.parametrize("family", sweep(FAMILIES, "gemma3", "gpt2", "gpt_oss"))
def test_sampler_and_learner_agree_in_float32(family: str) -> None:
    network = Network(build_with_adapters(family, spread=0.1))
    base = Network(build(family))
    for prepack in (False, True):
        batch = sample(make_runner(network, prepack=prepack))
        assert len(batch.target) > 20
        assert disagreement(batch, NetworkScorer(network, SAMPLING, score_tokens=30)) < FLOAT32, prepack
        assert disagreement(batch, NetworkScorer(base, SAMPLING, score_tokens=30)) > 0.1, "the adapters are what sampled"


@pytest.mark.parametrize(
    "family",
    sweep([family for family in FAMILIES if family not in ("mixtral", "qwen3_moe", "gpt_oss")], "gemma3"),
)
def test_sampler_and_learner_agree_in_bfloat16(family: str) -> None:
    network = Network(build_with_adapters(family, spread=0.1), precision=torch.bfloat16)
    for prepack in (False, True):
        batch = sample(make_runner(network, prepack=prepack))
        assert disagreement(batch, NetworkScorer(network, SAMPLING, score_tokens=30)) < BFLOAT16, prepack


@pytest.mark.parametrize(
    ("prepack", "precision"),
    sweep_rows(product([False, True], [torch.float32, torch.bfloat16]), (False, torch.bfloat16)),
)
def test_the_engine_follows_every_optimizer_step_and_the_base_does_not_move(precision: torch.dtype, prepack: bool) -> None:
    model = build("llama")
    add_adapters(model, LoraConfig(), base="base")
    before = copy_base_weights(model)
    network = Network(model, precision=precision)
    learner = make_torch_learner(
        network, SAMPLING, optimizer="torch.optim.SGD", optimizer_kwargs={"lr": 0.2}, max_grad_norm=None, train_tokens=40
    )
    reference = NetworkScorer(network, SAMPLING, 40, context=without_adapters(network))
    runner = make_runner(network, prepack=prepack)
    found, scored = [], []
    for _ in range(4):
        batch = sample(runner)
        assert disagreement(batch, learner) < (FLOAT32 if precision == torch.float32 else BFLOAT16)
        found.append(batch.target.tolist())
        scored.append(reference.score(batch).logprobs)
        frozen = Network(build("llama"), precision=precision)
        assert torch.equal(scored[-1], NetworkScorer(frozen, SAMPLING, score_tokens=40).score(batch).logprobs)
        learner.forward_backward(batch, lambda outputs, part: (-outputs.logprobs.sum() / part.totals.tokens, {}))
        learner.step()
    assert found[0] != found[1] != found[2] != found[3], "the steps changed the adapters"
    after = copy_base_weights(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_small_update_of_bfloat16_weights_arrives_in_the_engine_as_it_does_in_the_learner() -> None:
    """Merged into bfloat16 copies it would be rounded away: the sampler would lag behind the learner without a word."""
    model = with_random_adapters(build("llama", dtype=torch.bfloat16), spread=3e-5)
    network = Network(model, precision=torch.bfloat16)
    kept: dict[bool, list[float]] = {True: [], False: []}
    for layer in lora_layers(model):
        x = torch.randn(400, layer.base.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
        wanted = layer.scale * (x.float() @ layer.down.detach().t() @ layer.up.detach().t())
        merged = layer.merged_weight().bfloat16() - layer.base.weight.detach()
        through_merged = x.float() @ merged.float().t()
        beside = (x @ layer.down.detach().bfloat16().t()) @ layer.up.detach().bfloat16().t() * layer.scale
        kept[True].append(float((through_merged * wanted).sum() / wanted.square().sum()))
        kept[False].append(float((beside * wanted).sum() / wanted.square().sum()))
    assert max(kept[True]) < 0.5, "this update is one that merging loses"
    assert min(kept[False]) > 0.95
    learner = NetworkScorer(network, SAMPLING, score_tokens=30)
    for prepack in (False, True):
        beside, merging = make_runner(network, prepack=prepack), make_runner(network, prepack=prepack)
        if not beside.linears.uses_module_weights:
            assert not beside.linears.merge
            merging.linears.merge = True
        assert disagreement(sample(beside), learner) <= disagreement(sample(merging), learner) + 1e-3


def routed(model: nn.Module, linears: FastLinears, call: Callable[[], Tensor]) -> Tensor:
    linears.enable()
    try:
        return call()
    finally:
        linears.disable()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_copies_hold_base_and_adapter_of_a_layer_with_a_bias(precision: torch.dtype) -> None:
    """Qwen2's attention has biases."""
    model = build_with_adapters("qwen2", alpha=12)  # the scale is no power of two
    layer = lora_layers(model)[0]
    assert layer.base.bias is not None and layer.scale == 1.5
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    wanted = layer.module(x).detach()
    linears = FastLinears(model, precision, prepack=True)
    assert linears.prepack and not linears.uses_module_weights
    found = routed(model, linears, lambda: layer.module(x))
    assert found.dtype == precision
    assert torch.allclose(found.float(), wanted, atol=1e-5 if precision == torch.float32 else 0.15)
    assert torch.equal(layer.module(x).detach(), wanted), "switched off, the module is its own again"


def test_copies_that_a_recorded_graph_reads_are_refreshed_in_place() -> None:
    """Weights, biases and adapters: a captured CUDA graph knows their addresses only."""
    model = build_with_adapters("qwen2")
    linears = FastLinears(model, torch.bfloat16, prepack=False)
    layer = lora_layers(model)[0]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    first = routed(model, linears, lambda: layer.module(x))
    held = [(copy, copy.weight.data_ptr(), copy.bias, copy.down, copy.up) for copy in linears.copies]
    addresses = [[None if item is None else item.data_ptr() for item in (bias, down, up)] for _, _, bias, down, up in held]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        layer.base.bias.add_(1.0)
    second = routed(model, linears, lambda: layer.module(x))
    assert [copy.weight.data_ptr() for copy in linears.copies] == [address for _, address, *_ in held]
    assert [
        [None if item is None else item.data_ptr() for item in (copy.bias, copy.down, copy.up)] for copy in linears.copies
    ] == addresses
    fresh = routed(model, FastLinears(model, torch.bfloat16, prepack=False), lambda: layer.module(x))
    assert torch.equal(second, fresh)
    assert not torch.allclose(first, second, atol=0.1)


def test_every_linear_layer_is_routed_once_and_adapters_on_others_run_as_they_are() -> None:
    llama = FastLinears(build_with_adapters("llama", target_modules=["q_proj"]), torch.bfloat16)
    assert len(llama.layers) == 2 * 7 + 1, "seven in each of two layers, and the head"
    assert sum(layer.adapter is not None for layer in llama.layers) == 2
    gpt2 = FastLinears(build_with_adapters("gpt2"), torch.bfloat16)
    assert [type(layer.module) for layer in gpt2.layers] == [nn.Linear], "the head alone: GPT-2's layers are no nn.Linear"


def test_the_adapters_cannot_be_switched_off_under_a_generating_engine() -> None:
    network = Network(build_with_adapters("llama"))
    runner = make_runner(network, prepack=True)
    runner.activate()
    with pytest.raises(RuntimeError, match="the engine is using the model"), network.disable_adapters():
        pass
    runner.deactivate()
    with network.disable_adapters():
        pass


def test_a_publish_costs_no_weights_where_the_module_itself_is_read() -> None:
    """Float32 without packing, as on a GPU: adapters run as modules."""
    network = Network(build_with_adapters("llama"))
    before = [vars(module).get("forward") for module in network.model.modules()]
    runner = CachedRunner(network, cache_config(1e6, slots=2, prepack_weights=False), length=32)
    assert runner.linears.uses_module_weights
    runner.activate()
    assert runner.linears.copies == []
    assert [vars(module).get("forward") for module in network.model.modules()] == before
    assert all("forward" not in vars(module) for module in network.model.modules() if isinstance(module, torch.nn.Linear))
