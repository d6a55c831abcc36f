"""What a Megatron Core learner with adapters does on the ranks of a test, besides the mathematics of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.extensions.megatron.megatron_config import MegatronPeftConfig
from strop.types import Batch
from support.megatron_parity import MegatronCase, case, make_megatron_learner, make_network
from support.parity import SAMPLING, get_loss, make_batch

PEFT = MegatronPeftConfig(enabled=True, dim=4, alpha=4)
SMALL = case(lora=True, fused=True, dtype=torch.float32)
TENSOR = MegatronCase(case=SMALL, world=2, sizes={"tp": 2, "sp": True}, options={"peft": PEFT})
STAGES = MegatronCase(case=SMALL, world=2, sizes={"pp": 2}, options={"peft": PEFT}, distributed=True, overlap=True)
REWARD = MegatronCase(case=replace(SMALL, value=True), world=2, sizes={"pp": 2}, options={"peft": PEFT})


def adapters_on_rank(rank: int, root: str) -> dict[str, Any]:
    """Run everything on this rank."""
    from strop.extensions.megatron.layout import MegatronLayout
    from strop.extensions.megatron.megatron_dims import MegatronDims

    batch = make_batch(SMALL)

    def network(made: MegatronCase) -> Any:
        return make_network(made, MegatronLayout(MegatronDims.from_config(made.config(), 2), "cpu"))

    return {
        **resume(batch, Path(root) / "policy", TENSOR, STAGES),
        "reference": score_without_adapters(batch, network),
        "scores": resume(make_batch(REWARD.case), Path(root) / "critic", REWARD, replace(REWARD, sizes={"tp": 2})),
        "published": publish(network(TENSOR), Path(root) / "published"),
        "drawn": draw(network),
        "dropout": drop(batch),
        "refused": refuse(network),
    }


def resume(batch: Batch, folder: Path, made: MegatronCase, other: MegatronCase) -> dict[str, Any]:
    """Take a third step after two, and after a save and a load of these in the same layout and in another."""
    learner, loss = make_megatron_learner(made), get_loss(made.case)
    frozen = {name: value.clone() for name, value in learner.network.named_parameters() if not value.requires_grad}

    def train(each: Any, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            each.forward_backward_local(batch, loss)
            each.step()
        each.network.gather_weights()
        found: dict[str, Tensor] = each.network.adapters.gather()
        return {name: value.clone() for name, value in found.items()}

    train(learner, 2)
    staged = learner.stage()
    wanted = train(learner, 1)
    staged.save(folder)
    distances = []
    for layout in (made, other):
        resumed = make_megatron_learner(layout)
        resumed.load(folder)
        found = train(resumed, 1)
        distances.append(max((found[name] - wanted[name]).abs().max().item() for name in wanted))
    after = dict(learner.network.named_parameters())
    return {
        "same": distances[0],
        "other": distances[1],
        "base": all(torch.equal(value, after[name]) for name, value in frozen.items()),
        "trained": sum(value.requires_grad for value in after.values()),
        "names": list(wanted),
    }


def score_without_adapters(batch: Batch, network: Callable[[MegatronCase], Any]) -> tuple[bool, bool]:
    """Return whether scores without adapters are those of the base, and whether those with them are others."""
    from strop.extensions.megatron.megatron_network import MegatronScorer

    adapted, base = network(TENSOR), network(replace(TENSOR, case=replace(SMALL, lora=False), options={}))
    with_them = MegatronScorer(adapted, SAMPLING, 50).score_local(batch)
    without = MegatronScorer(adapted, SAMPLING, 50, adapted.adapters.disabled).score_local(batch)
    wanted = MegatronScorer(base, SAMPLING, 50).score_local(batch)
    again = MegatronScorer(adapted, SAMPLING, 50).score_local(batch)

    def same(left: Any, right: Any) -> bool:
        pairs = zip(left.outputs, right.outputs, strict=True)
        return all(torch.equal(one[1].logprobs, two[1].logprobs) for one, two in pairs)

    return same(without, wanted) and same(with_them, again), bool(wanted.outputs) and not same(with_them, wanted)


def publish(network: Any, folder: Path) -> dict[str, Any]:
    """Write what engines are sent."""
    from strop.extensions.megatron.megatron_rank_builders import StageWeights

    weights = StageWeights(network)
    source = weights.adapter_source()
    files = source.export_files()
    return {
        "merged": {weight.name: weight.gather().clone() for weight in weights.iter_weights()},
        "base": {weight.name: weight.gather().clone() for weight in source.base_weights()},
        "files": (files.weights, files.config),
        "fingerprints": source.fingerprints(torch.bfloat16),
    }


def draw(network: Callable[[MegatronCase], Any]) -> list[dict[str, Tensor]]:
    """Return fresh adapters in two layouts of a model in bfloat16."""
    from strop.extensions.megatron.stage_adapters import StageAdapters

    found = []
    options = MegatronPeftConfig(enabled=True, dim=3, alpha=6, target_modules=("*.layers.1.*", "linear_qkv"))
    for sizes in ({"tp": 2}, {"pp": 2}):
        plain = network(
            replace(TENSOR, sizes=sizes, case=replace(SMALL, lora=False, dtype=torch.bfloat16), options={"peft": options})
        )
        with plain.layout.activate():
            adapters = StageAdapters(plain.stages, plain.hf_config, options, base="base", seed=5)
            found.append(adapters.gather())
    return found


def drop(batch: Batch) -> dict[str, bool]:
    """Return in which passes dropout changes the log-probabilities, and whether all gradients are finite."""
    found, loss = {}, get_loss(SMALL)
    batch = replace(batch, zero_gradient=torch.zeros_like(batch.zero_gradient))
    for position in ("pre", "post"):
        options = {"peft": replace(PEFT, dropout=0.5, dropout_position=position), "activation_checkpointing": True}
        learner = make_megatron_learner(replace(TENSOR, options=options))
        answers = (
            learner.score_local(batch),
            learner.evaluate_loss_local(batch, loss),
            learner.forward_backward_local(batch, loss),
        )
        if learner.layout.is_leader:
            scored, measured, trained = (in_order(answer) for answer in answers)
            found[f"{position}: evaluation"] = not torch.equal(scored, measured)
            found[f"{position}: training"] = not torch.equal(scored, trained)
        found[f"{position}: gradients"] = all(
            bool(value.main_grad.isfinite().all()) for _, value in learner.network.named_parameters() if value.requires_grad
        )
    return found


def in_order(answer: Any) -> Tensor:
    """Return the log-probabilities of micro-batches in the order of the batch."""
    index, values = (torch.cat(parts) for parts in zip(*((index, each.logprobs) for index, each in answer.outputs), strict=True))
    return values[index.argsort()]


def refuse(network: Callable[[MegatronCase], Any]) -> dict[str, str]:
    """Return the errors of patterns that cannot work."""
    errors = {}
    experts = replace(SMALL, family="qwen3_moe", lora=True)
    for pattern, made in (
        ("linear_qvk", TENSOR),
        ("*.layers.0.*", STAGES),
        ("*experts.local_experts*", replace(TENSOR, case=experts)),
    ):
        try:
            network(replace(made, options={"peft": replace(PEFT, target_modules=(pattern,))}))
        except ValueError as error:
            errors[pattern] = str(error)
    return errors
