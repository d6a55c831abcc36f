"""Indexers of Transformers' sparse attention: the plan of a call makes their choice.

An indexer of any family projects queries, keys and weights of heads, and takes the best of their scores. It runs as it is written, up to
its scores: the products are not computed, what they multiply goes to the plan, and the plan's choice is returned in place of indices.
Attention passes it on as ``indices``, also from a layer that chooses to those that share its choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.models.mixers.chosen_tokens import IndexRows

_CALLED = {"matmul", "relu", "topk"}
_GIVEN = {"hidden_states", "q_resid", "position_embeddings", "attention_mask", "past_key_values"}
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_TOPK = (torch.topk, torch.Tensor.topk)


Chooser = Callable[[IndexRows, int], Tensor]  # (what it scores, the layer) -> the choice of each token


class UnknownIndexer(RuntimeError):
    """An indexer scores tokens in another way than expected."""


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module chooses the tokens of its path with the best scores."""
    if getattr(module, "chooses_tokens", False):
        return True
    forward = inspect.unwrap(type(module).forward)
    chooses = isinstance(getattr(module, "index_topk", None), int) and isinstance(getattr(module, "layer_idx", None), int)
    return chooses and inspect.signature(forward).parameters.keys() >= _GIVEN and set(forward.__code__.co_names) >= _CALLED


class PlannedIndexer(nn.Module):
    """Mixin for the class of an indexer."""

    chooses_tokens = True
    index_topk: int
    layer_idx: int
    checked = False
    find_chooser: Callable[[], Chooser | None]  # of the call that runs; None without a plan

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        choose = type(self).find_chooser()
        if choose is None:
            return super().forward(*args, **kwargs)
        scoring = _Scoring(f"{type(self).__name__} of layer {self.layer_idx}")
        with scoring:
            super().forward(*args, **kwargs)
        if scoring.query is None or scoring.weight is None or not scoring.taken:
            raise scoring.unknown
        if not self.checked and any(bool(each.any()) for each in scoring.zeros):
            raise scoring.unknown  # something is added to the products, or to the scores
        self.checked = True
        rows = IndexRows(scoring.query, scoring.key, scoring.weight, self.index_topk)
        return choose(rows, self.layer_idx)[None]


def make_planned(indexer: nn.Module, find_chooser: Callable[[], Chooser | None]) -> None:
    """Let the plan of a call choose for an indexer, in place."""
    kind = type(indexer)
    if not isinstance(indexer, PlannedIndexer):
        options = {"find_chooser": staticmethod(find_chooser), "__module__": kind.__module__}
        indexer.__class__ = type(kind.__name__, (PlannedIndexer, kind), options)


class _Scoring(TorchFunctionMode):
    """Keeps what an indexer's two products multiply, and returns zeros [1, T, heads, 1] and [1, T, 1, 1] for them."""

    query: Tensor | None = None  # [T, heads, D]
    key: Tensor  # [T, D]
    weight: Tensor | None = None  # [T, heads]
    taken = False
    zeros: tuple[Tensor, ...] = ()  # what became of the zeros

    def __init__(self, name: str) -> None:
        super().__init__()
        self.unknown = UnknownIndexer(f"{name} does not choose by the weighted scores of its heads")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func in _TOPK:
            self.taken = self.weight is not None
            self.zeros += (args[0],)
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        left, right = args
        if left.dim() != 4 or right.dim() != 4 or self.weight is not None:
            raise self.unknown
        if self.query is None:
            self.query, self.key = left[0], right[0, 0].mT
        else:
            self.weight = left[0, :, 0]
            self.zeros += (right,)
        return left.new_zeros(*left.shape[:-1], 1)
