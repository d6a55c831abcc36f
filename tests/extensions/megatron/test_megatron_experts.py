"""Options of experts: losses of routers and expert biases against the same computed with the torch model, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.support.ranks import run_on_ranks
from torch import Tensor

from strop import metrics
from strop.types import Batch
from support.megatron_parity import MegatronCase, case, make_megatron_learner
from support.needs import needs_megatron
from support.parity import SAMPLING, build_network, get_loss, make_batch
from support.sweep import sweep

needs_megatron()
pytestmark = pytest.mark.slow

ROUTED = case(family="qwen3_moe", shapes=((5, (3,)), (5, (3,)), (5, (3,)), (5, (3,))), train_tokens=1000)
BIASED = case(family="deepseek_v3", shapes=ROUTED.shapes, train_tokens=1000, dtype=torch.float32)
WHOLE = {  # layouts in which all ranks read the same micro-batch
    "tensor 2, experts 2": {"tp": 2, "sp": True, "ep": 2},
    "tensor 2, experts' tensor 2": {"tp": 2, "sp": True, "etp": 2},
    "stages 2": {"pp": 2},
    "context 2": {"cp": 2},
}
LAYOUTS = {**WHOLE, "experts 2, data 2": {"ep": 2}}
WEIGHT, RATE = 0.5, 0.03
LOSSES = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": WEIGHT},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": WEIGHT},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": WEIGHT},
    "z_loss": {"moe_z_loss_coeff": WEIGHT},
}
# A balancing loss is of a micro-batch: where ranks have their own, so are their losses.
ADDED = {f"{layout}: {kind}": (layout, kind) for layout in LAYOUTS for kind in LOSSES if layout in WHOLE or kind == "z_loss"}
KEPT = ("tensor 2, experts 2: aux_loss", "stages 2: seq_aux_loss", "context 2: global_aux_loss", "experts 2, data 2: z_loss")
NAMES = {
    "aux_loss": "moe/load_balancing_loss",
    "seq_aux_loss": "moe/seq_load_balancing_loss",
    "global_aux_loss": "moe/global_load_balancing_loss",
    "z_loss": "moe/z_loss",
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def add_router_losses(batch: Batch, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """A step in every layout with each loss of routers: the norm of its gradient, and its metrics on the rank that reports them."""
    found = {}
    for name in names:
        layout, kind = ADDED[name]
        options = LOSSES[kind] | {"moe_per_layer_logging": True}
        learner = make_megatron_learner(MegatronCase(case=ROUTED, world=2, sizes=LAYOUTS[layout], options=options))
        silent = torch.arange(batch.num_sequences) < (0 if layout in WHOLE else 2)  # routers learn of their tokens too
        part = replace(batch, zero_gradient=silent)
        logged = learner.forward_backward_local(part, get_loss(ROUTED)).metrics or {}
        norm = metrics.to_floats(learner.step())["grad_norm"]
        found[name] = {"norm": norm, **metrics.to_floats(logged)}
    return found


def update_biases(batch: Batch, folder: str) -> dict[str, Any]:
    """The biases of experts as they are published, after a step in every layout; saved in each and loaded in the next."""
    from strop.extensions.megatron.megatron_rank_builders import StageWeights

    def published(learner: Any) -> Tensor:
        weights = {weight.name: weight.gather for weight in StageWeights(learner.network).iter_weights()}
        return weights[BIAS]().clone()

    found, layouts = {}, {"tensor 2, experts 2": WHOLE["tensor 2, experts 2"], "stages 2": WHOLE["stages 2"], "data 2": {}}
    for number, (layout, sizes) in enumerate(layouts.items()):
        options = {"moe_router_bias_update_rate": RATE}
        learner = make_megatron_learner(MegatronCase(case=BIASED, world=2, sizes=sizes, options=options))
        loaded = None
        if number:
            learner.load(Path(folder) / str(number - 1))
            loaded = published(learner)
            learner = make_megatron_learner(MegatronCase(case=BIASED, world=2, sizes=sizes, options=options))
        learner.forward_backward_local(batch, get_loss(BIASED))
        learner.step()
        learner.save(Path(folder) / str(number))
        found[layout] = (loaded, published(learner))
    return found


def work_on_rank(rank: int, routed: Batch, biased: Batch, names: Sequence[str], folder: str) -> dict[str, Any]:
    return {"losses": add_router_losses(routed, names), "biases": update_biases(biased, folder)}


@cache
def results(kept: bool = True) -> list[dict[str, Any]]:
    names = [name for name in ADDED if (name in KEPT) == kept]
    with TemporaryDirectory() as folder:
        return run_on_ranks(2, work_on_rank, make_batch(ROUTED), make_batch(BIASED), names, folder)


@contextmanager
def record_routers(model: Any, keep: Callable[[Any, Tensor, Any], Tensor]) -> Iterator[list[Tensor]]:
    """Record what ``keep`` returns of each router, its logits [T, E] and its output."""
    recorded: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):

            def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
                hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
                recorded.append(keep(module, hidden @ module.weight.T, output))

            hooks.append(module.register_forward_hook(hook))
    yield recorded
    for each in hooks:
        each.remove()


def router_loss(kind: str, logits: Tensor) -> Tensor:
    """The loss of one router over a row, as its papers have it."""
    if kind == "z_loss":
        return logits.logsumexp(-1).square().mean()
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(2, -1).indices, 1.0)
    return probs.shape[-1] * (probs.mean(0) * chosen.mean(0) / 2).sum()


@cache
def expected(kind: str) -> dict[str, float]:
    """The norm of the gradient of the whole loss, and the losses of the routers, from the torch model."""
    batch, network = make_batch(ROUTED), build_network(ROUTED)
    with record_routers(network.model, lambda _, logits, __: router_loss(kind, logits)) as losses:
        outputs = network.outputs(batch, SAMPLING)
    loss, _ = get_loss(ROUTED)(outputs, batch)
    (loss + WEIGHT * torch.stack(losses).sum()).backward()
    norm = torch.stack([each.grad.square().sum() for each in network.model.parameters() if each.grad is not None]).sum().sqrt()
    layers = {f"{NAMES[kind]}_layer_{layer}": each.item() for layer, each in enumerate(losses)}
    return {"norm": norm.item(), NAMES[kind]: torch.stack(losses).mean().item(), **layers}


@pytest.mark.parametrize("name", sweep(ADDED))
def test_losses_of_routers_are_those_of_the_torch_model_in_every_layout(name: str) -> None:
    layout, kind = ADDED[name]
    ranks = [each["losses"][name] for each in results(name in KEPT)]
    found = {key: value for rank in reversed(ranks) for key, value in rank.items()}
    for key, value in expected(kind).items():
        if layout in WHOLE or key == "norm":
            assert found[key] == pytest.approx(value, rel=1e-6), key


def test_expert_biases_follow_the_load_are_published_and_saved() -> None:
    batch, network = make_batch(BIASED), build_network(replace(BIASED, dtype=torch.float64))
    before = dict(network.model.named_buffers())[BIAS].clone()

    def count(module: Any, logits: Tensor, output: Any) -> Tensor:
        chosen = next(each for each in output if not each.is_floating_point())
        return chosen.flatten().bincount(minlength=module.num_experts).double()

    with record_routers(network.model, count) as loads, torch.no_grad():
        network.outputs(batch, SAMPLING)
    wanted = (before + RATE * (loads[0].mean() - loads[0]).sign()).float()
    assert not torch.equal(wanted, before.float())
    for rank in results():
        for loaded, published in rank["biases"].values():
            torch.testing.assert_close(published, wanted, rtol=0, atol=1e-7)
            assert loaded is None or torch.equal(loaded, published)
