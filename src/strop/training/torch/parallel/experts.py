"""Expert parallelism: each rank holds some of the experts of a layer, and tokens travel to them and back.

A layer's experts lie in tensors [E, ...]. Of each token and each expert that its router chose for it, a *pair*, the token's hidden state
goes to the rank that holds the expert (one all-to-all), through that expert, and back (another), where it is weighted and summed. Every
pair is computed once, so the gradient that a rank's experts get is the whole one, of the tokens of all ranks that share the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strop.training.torch.parallel.collectives import exchange, join, own_rows, split
from strop.training.torch.parallel.layout import Meshes, ParallelSizes
from strop.training.torch.parallel.sharded import divide, local

dist: Any = torch.distributed


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in tensors [E, ...], by name."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    weight = module._parameters.get("down_proj")
    return weight is not None and weight.dim() == 3


def check_experts(model: Any, sizes: ParallelSizes) -> None:
    """Raise ValueError where the experts of a model cannot be divided as ``sizes`` say."""
    experts = experts_of(model)
    if sizes.expert > 1 and not experts:
        raise ValueError(
            f"expert_parallel_size is {sizes.expert} and {type(model).__name__} has no layers of experts; set it to 1"
        )
    if sizes.expert_ways == 1:
        return
    module: Any
    for name, module in experts.items():
        counts = {len(parameter) for parameter in module.parameters(recurse=False)}
        # What Transformers puts on experts that take (hidden, index, weights), the one interface there is a rule for.
        if not hasattr(module, "is_transposed") or not hasattr(module, "num_experts") or counts != {module.num_experts}:
            raise ValueError(
                f"the experts {name} ({type(module).__name__}) are of a form that there is no rule for dividing; set "
                "expert_parallel_size=1 and tensor_parallel_size=1, and shard with FSDP alone"
            )
        if (count := int(module.num_experts)) % sizes.expert_ways:
            asked = "expert_parallel_size" if sizes.expert > 1 else "tensor_parallel_size, which divides experts too,"
            raise ValueError(f"{asked} {sizes.expert_ways} does not divide the {count} experts of {name}; set it to a divisor")


def apply_expert_parallel(model: Any, meshes: Meshes) -> frozenset[str]:
    """Divide the experts of a model over the expert ranks, in place; the names of the modules that hold them.

    Their parameters become DTensors on the expert mesh, whose gradients are whole. Called on a model that every rank has whole (or on the
    meta device), before ``fully_shard``. From then on every forward and backward pass of one of the ranks is one of all expert ranks.
    Raises ValueError as ``check_experts`` does.
    """
    check_experts(model, meshes.sizes)
    if meshes.sizes.expert_ways == 1:
        return frozenset()
    alike = meshes.sizes.tensor > 1 and not meshes.sizes.sequence
    ranks = _Ranks(meshes.expert, meshes.tensor if alike else None)
    experts = experts_of(model)
    for module in experts.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, divide(parameter, meshes.experts["expert"], 0))
        kind = type(module)
        module.__class__ = type(f"Divided{kind.__name__}", (DividedExperts, kind), {"whole_class": kind})
        module.__dict__["ranks"] = ranks
    return frozenset(experts)


@dataclass(frozen=True, eq=False)
class _Ranks:
    expert: Any  # process group of the ranks that divide the experts
    alike: Any | None  # process group of those among them that come with the very same tokens

    @property
    def ways(self) -> int:
        return int(dist.get_world_size(self.expert))


class DividedExperts(nn.Module):
    """Mixed into the class of a layer's experts: the same function of (hidden [n, H], index [n, k], weights [n, k]) -> [n, H]."""

    whole_class: type[nn.Module]
    ranks: _Ranks
    num_experts: Any  # of the layer, on all ranks

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        alike = self.ranks.alike
        if alike is None:
            return self._dispatched(hidden_states, top_k_index, top_k_weights)
        own = split(hidden_states, alike), own_rows(top_k_index, alike), split(top_k_weights, alike)
        return join(self._dispatched(*own), alike)

    def _dispatched(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Each pair to the rank of its expert, and back: pairs sorted by expert are sorted by rank too."""
        pairs = index.flatten()
        order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=int(self.num_experts)).view(self.ranks.ways, -1)  # [ranks, experts of each]
        coming = exchange(counts, self.ranks.expert)
        sent, received = torch.stack([counts, coming]).sum(2).tolist()
        arrived = exchange(hidden.index_select(0, order // index.shape[1]), self.ranks.expert, received, sent)
        computed = self._computed(arrived, _experts_of_rows(coming))
        returned = exchange(computed, self.ranks.expert, sent, received)
        at_home = returned.index_select(0, order.argsort()).view(*index.shape, -1)  # [n, k, H]
        return (at_home * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _computed(self, rows: Tensor, expert: Tensor) -> Tensor:
        """[m, H] each through its expert [m] of this rank. No rows are one of zeros, so that the backward pass comes through here on
        every rank and every expert has a gradient."""
        count = len(rows)
        if not count:
            rows, expert = F.pad(rows, (0, 0, 0, 1)), expert.new_zeros(1)
        own: Any = _OwnExperts(self)
        function: Any = self.whole_class.forward
        output: Tensor = function(own, rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))
        return output[:count]


def _experts_of_rows(coming: Tensor) -> Tensor:
    """The expert, counted within its rank, of each row that comes: [ranks, experts] rows by sender, then by expert -> [m]."""
    senders, experts = coming.shape
    return torch.arange(experts, device=coming.device).repeat(senders).repeat_interleave(coming.flatten())


class _OwnExperts:
    """A layer's experts as a model with this rank's alone would have them, for the code of its class."""

    def __init__(self, whole: DividedExperts) -> None:
        self._whole = whole
        for name, parameter in whole.named_parameters(recurse=False):
            setattr(self, name, local(parameter))
        self.num_experts = int(whole.num_experts) // whole.ranks.ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
