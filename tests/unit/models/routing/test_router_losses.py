"""The losses of routers: those of their formulas, with one gradient however a batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.learner.torch.learner import TorchLearner
from strop.metrics import to_floats
from strop.models.network import Network, freeze_routers
from strop.models.routing.router_config import RouterLossConfig
from strop.models.routing.router_replay import find_routers
from strop.sampling import Sampling
from strop.types import Batch
from support.learners import make_torch_learner
from support.rollouts import pack_grpo, simple_groups
from support.sharded import build_float64_model, modeling_code

SHAPES = ((6, (5, 3, 4)), (3, (7, 2)))
BOTH = RouterLossConfig(aux_loss_coeff=0.3, z_loss_coeff=0.2)
FAMILIES = ("qwen3_moe", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mixtral", "gpt_oss", "deepseek_v3")))


@pytest.fixture(autouse=True)
def keep_modeling_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in float64 change the module they are made of; afterwards it is as before."""
    for family in ("llama", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"):
        monkeypatch.setattr(modeling_code(family), "torch", torch)


def nothing(outputs: Any, batch: Batch) -> tuple[Tensor, Mapping[str, Any]]:
    """A loss without gradient, so that what comes is the routers' own."""
    return (outputs.logprobs * 0).sum(), {}


def make_learner(
    family: str = "qwen3_moe", losses: RouterLossConfig = BOTH, *, packed: bool = True, **options: Any
) -> TorchLearner:
    torch.manual_seed(0)
    network = Network(build_float64_model(family), chunk=5, packed=packed, precision=torch.float64)
    return make_torch_learner(network, Sampling(), router_losses=losses, **options)


def make_batch(**options: Any) -> Batch:
    batch = pack_grpo(simple_groups(*SHAPES), **options)
    mask = batch.mask.clone()
    mask[batch.sequence == 1] = 0  # a rollout that does not count
    return replace(batch, mask=mask, totals=replace(batch.totals, tokens=int(mask.sum())))


def gradients(learner: TorchLearner, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics = learner.forward_backward(batch, nothing).metrics
    found = {name: each.grad.clone() for name, each in learner.model.named_parameters() if each.grad is not None}
    return found, to_floats(metrics)


def bound_of(family: str) -> float:
    """Mixtral's router rounds to float32, in a way that a test cannot switch off."""
    return 1e-6 if family == "mixtral" else 1e-11


def assert_equal_gradients(one: Mapping[str, Tensor], other: Mapping[str, Tensor], bound: float = 1e-11) -> None:
    assert one.keys() == other.keys()
    scale = max(float(each.abs().max()) for each in one.values())
    assert scale > 1e-4
    for name in one:
        assert float((one[name] - other[name]).abs().max()) <= bound * scale, name


def write_out(learner: TorchLearner, batch: Batch) -> tuple[Tensor, Tensor]:
    """Both losses by their formulas, one rollout at a time, with no packing: summed over layers."""
    total, balance, large = batch.totals.tokens, torch.zeros(()).double(), torch.zeros(()).double()
    segments = batch.tokens.split(batch.segment_length.tolist())
    network = learner.network
    assert isinstance(network, Network)
    network.use_native_attention()
    for rollout, paths in enumerate(batch.rollout_paths()):
        row = torch.cat([segments[segment] for segment in paths[0]])
        mine = (batch.sequence == rollout) & (batch.mask > 0)
        if not mine.any():
            continue
        places = batch.positions[batch.source[mine]]
        for logits in router_logits(network, row):
            chosen, scores = logits[places].topk(2).indices, logits[places].softmax(-1)
            count = torch.zeros(4).double()
            for each in chosen.flatten().tolist():
                count[each] += 1
            length = len(places)
            balance = balance + length / total * (4 * count / (2 * length) * scores.mean(0)).sum()
            large = large + logits[places].logsumexp(-1).square().sum() / total
    network.use_learner_attention()
    return balance, large


def router_logits(network: Network, row: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    hooks = []
    for layer in network.decoder.layers:  # type: ignore[union-attr]
        (router,) = find_routers(layer)

        def read(router: Any, inputs: tuple[Any, ...]) -> None:
            found.append(inputs[0].reshape(-1, inputs[0].shape[-1]) @ router.weight.t())

        hooks.append(router.register_forward_pre_hook(read))
    network.decoder(input_ids=row[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.exhaustive)])
def test_the_gradient_is_that_of_the_formulas(family: str) -> None:
    learner = make_learner(family)
    found, logged = gradients(learner, make_batch())
    learner.optimizer.zero_grad()
    balance, large = write_out(learner, make_batch())
    (0.3 * balance + 0.2 * large).backward()
    wanted = {name: each.grad.clone() for name, each in learner.model.named_parameters() if each.grad is not None}
    assert_equal_gradients({name: found[name] for name in wanted}, wanted, bound_of(family))
    assert logged["moe/load_balancing_loss"] == pytest.approx(
        float(balance) / 2, rel=bound_of(family)
    )  # a mean over the two layers
    assert logged["moe/z_loss"] == pytest.approx(float(large) / 2, rel=bound_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_one_gradient_however_a_batch_is_cut(family: str) -> None:
    whole, logged = gradients(make_learner(family), make_batch())
    for batch, options in (
        (make_batch(), {"train_tokens": 14}),
        (make_batch(share_prefixes=False), {}),
        (make_batch(share_prefixes=False), {"train_tokens": 10}),
        (make_batch(), {"activation_checkpointing": True}),
        (make_batch(), {"packed": False}),
    ):
        other, also = gradients(make_learner(family, **options), batch)
        assert_equal_gradients(whole, other, bound_of(family))
        assert also == pytest.approx(logged, rel=bound_of(family))


def test_rollouts_without_advantage_are_balanced_too() -> None:
    batch = make_batch()
    idle = replace(batch, zero_gradient=torch.ones(batch.num_sequences, dtype=torch.bool))
    one, _ = gradients(make_learner(), batch)
    other, _ = gradients(make_learner(), idle)
    assert_equal_gradients(one, other)


def test_the_load_of_experts_is_logged_and_changes_nothing() -> None:
    learner = make_learner(losses=RouterLossConfig(log_expert_load=True))
    found, logged = gradients(learner, make_batch())
    assert all(not each.any() for each in found.values())
    assert 1 <= logged["moe/expert_load_max_over_mean"] <= 2, "of 4 experts, 2 are chosen: none has more than twice the mean"
    assert "moe/z_loss" not in logged
    assert not any(name.startswith("moe/") for name in gradients(make_learner(losses=RouterLossConfig()), make_batch())[1])
    assert not any(name.startswith("moe/") for name in to_floats(learner.evaluate_loss(make_batch(), nothing).metrics))


def test_a_frozen_router_is_not_trained_and_its_loss_reaches_the_layers_before() -> None:
    learner = make_learner()
    frozen = freeze_routers(learner.model)
    found, _ = gradients(learner, make_batch())
    assert frozen and not found.keys() & set(frozen)
    assert float(found["model.embed_tokens.weight"].abs().max()) > 0


def test_a_dense_model_has_no_routers_to_balance() -> None:
    with pytest.raises(ValueError, match=r"policy.router_losses: LlamaForCausalLM has no routers .* set its coefficients to 0"):
        make_learner("llama")


@pytest.mark.parametrize("name", ["tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"])
def test_ranks_that_share_a_rollout_are_refused(name: str) -> None:
    config = make_learner().config
    config = replace(config, dtensor_cfg=replace(config.dtensor_cfg, **{name: 2}))
    (problem,) = [each for each in config.errors("policy") if each.key.startswith("policy.dtensor_cfg")]
    assert problem.key == f"policy.dtensor_cfg.{name}" and "compares the experts of a whole rollout" in problem.message
