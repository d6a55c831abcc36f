"""Helpers to compare sharded tiny models with unsharded ones in float64, up to the last digits."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.learner.parallel.collectives import all_gather, copy_to_ranks, join_rows, local_rows
from strop.learner.parallel.parallel_dims import DeviceMeshes
from strop.models.attention.attention_interface import IMPLEMENTATION
from strop.models.attention.tree_plan import TreePlan
from strop.models.logprobs.lm_head import get_lm_head
from support.models import CONFIGS, VOCABULARY, build


class Float64Torch:
    """A stand-in for torch that provides float64 where modelling code requests float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Float64Norm(nn.Module):
    """Gemma's RMSNorm without its cast to float32; its weight is an offset from one."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, hidden: Tensor) -> Tensor:
        return (1 + self.weight) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


def use_float64(family: str) -> None:
    """Make the family's modelling code use float64 instead of float32, for the rest of this process."""
    vars(modeling_code(family))["torch"] = Float64Torch()


def modeling_code(family: str) -> Any:
    """Return the module of Transformers with a family's code."""
    kind = CONFIGS[family]().model_type.removesuffix("_text")
    return import_module(f"transformers.models.{kind}.modeling_{kind}")


def build_float64_model(family: str, *, tied: bool = False, change: Mapping[str, Any] | None = None) -> Any:
    """Build a family's tiny model entirely in float64, including routers and norms. Affects the rest of this process."""
    make = CONFIGS[family]

    def changed() -> Any:
        config = make()
        for name, value in {"tie_word_embeddings": tied, **(change or {})}.items():
            setattr(config, name, value)
        return config

    use_float64(family)
    CONFIGS[family] = changed
    try:
        model = build(family, dtype=torch.float64)
    finally:
        CONFIGS[family] = make
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.startswith("Gemma") and type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, _Float64Norm(child))
    model.set_attn_implementation(IMPLEMENTATION)
    model.config._experts_implementation = "eager"
    return model


def random_tokens(length: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def make_tree_plan(length: int) -> TreePlan:
    """Return the plan of a prompt with a third of the tokens and two continuations of unequal lengths."""
    third = length // 3
    lengths = torch.tensor([third, third - 1, length - 2 * third + 1])
    return TreePlan(lengths.cumsum(0) - lengths, lengths, torch.tensor([-1, 0, 0]), torch.device("cpu"))


def tree_positions(length: int) -> Tensor:
    third = length // 3
    return torch.cat([torch.arange(third), third + torch.arange(third - 1), third + torch.arange(length - 2 * third + 1)])


def compute_hidden_states(model: Any, tokens: Tensor) -> Tensor:  # [T] -> [T, H], or this rank's rows
    output = model.get_decoder()(
        input_ids=tokens[None], position_ids=tree_positions(len(tokens))[None], plan=make_tree_plan(len(tokens)), use_cache=False
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def compute_loss(model: Any, tokens: Tensor, meshes: DeviceMeshes | None = None) -> Tensor:
    """Return a loss that depends on every logit. With meshes, each tensor-parallel rank reads some of the rows, as in a learner."""
    hidden = compute_hidden_states(model, tokens)
    if meshes is not None and meshes.dims.tensor > 1:
        hidden = (all_gather if meshes.dims.sequence else copy_to_ranks)(hidden, meshes.tensor)
        hidden = local_rows(hidden, meshes.tensor)
    logits = get_lm_head(model).compute_logits(hidden)
    own = torch.stack([logits.logsumexp(-1), logits[:, 5], logits.square().mean(-1)], -1)
    outputs = own if meshes is None else join_rows(own, meshes.tensor)
    weight = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return (outputs * weight).sum() + outputs.square().sum() / 10


def gather_gradient(parameter: Any) -> Tensor:
    """Return a parameter's unsharded gradient, or zeros if it has none."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    if not isinstance(parameter.grad, DTensor):
        return parameter.grad.clone()
    whole: Tensor = parameter.grad.full_tensor()
    return whole


def largest_relative_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest gradient difference, relative to that gradient's largest entry, and the parameter's name."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    return max(
        (float((found[name] - wanted[name]).abs().max()) / max(float(wanted[name].abs().max()), 1e-6 * largest), name)
        for name in wanted
    )
