"""The choice of an indexer: which tokens of its path each token attends to (DeepSeek Sparse Attention, arXiv 2512.02556).

A choice is a bitmap: bit ``p % 8`` of byte ``p // 8`` of a token's row is set if the token attends to position p of its path. As
positions are those of the path, a choice is the same in a packed tree, in a page of a cache and alone, and can be recorded. Bits are of
blocks of tokens, counted from the root, where a layer attends to blocks.

Layers that pool the keys of a block read ``PathBlocks``. Blocks are counted from the root of a path, so segments may begin and end
inside of one. A block belongs to its last token: one that lies in a shared prefix is there once for all paths, and one that straddles a
fork once for each child.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

EVERYTHING = -1  # each byte of a token that attends to its whole path
SCORES = 1 << 26  # scores of heads at a time


@dataclass(frozen=True, eq=False)
class IndexRows:
    """What an indexer scores: token t scores token s by the sum over heads of weight[t, h] * relu(query[t, h] . key[s])."""

    query: Tensor  # [T, heads, D], at least float32, as the others
    key: Tensor  # [T, D]; [W, D] if pooled
    weight: Tensor  # [T, heads]
    count: int  # blocks that each token attends to, if its path has more
    block: int = 1  # tokens that are chosen together
    pooled: bool = False  # keys are of blocks, not of tokens

    @property
    def choices(self) -> tuple[int, ...]:
        """The shape of a token's choices: () if all heads attend to the same."""
        return ()

    def count_bytes(self, longest: int) -> int:
        """Return the bytes of a choice among the positions below ``longest``."""
        return count_bytes(-(-longest // self.block))

    def choose(self, positions: Tensor, keys: Tensor, width: int) -> Tensor:
        """Return the choice of these queries, [n, *choices, width] int8; arguments as of ``choose_tokens``."""
        return choose_tokens(self, positions, keys, width)

    def choose_everything(self) -> Tensor:
        """Return the choice of tokens whose paths have no more: without bytes, [T, 0] int8."""
        return torch.empty(len(self.query), 0, dtype=torch.int8, device=self.query.device)


class IndexerPlan(Protocol):
    """Decides which tokens an indexer may choose."""

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        """Return the choice of each token of one flat row, [T, bytes] int8; without bytes if all tokens attend to everything."""
        ...


def count_bytes(longest: int) -> int:
    """Return the bytes of a bitmap of ``longest`` bits."""
    return -(-longest // 8)


def bits_below(counts: Tensor, width: int) -> Tensor:
    """Return bitmaps [n, width] int8 in which the first ``counts`` [n] bits are set."""
    left = counts[:, None] - torch.arange(0, 8 * width, 8, device=counts.device)
    return ((1 << left.clamp_(0, 8)) - 1).to(torch.uint8).view(torch.int8)


def choose_tokens(rows: IndexRows, positions: Tensor, keys: Tensor, width: int) -> Tensor:
    """Choose for the queries [n, heads, D] at ``positions`` [n] among the keys [n or 1, K, D] at positions 0 to K - 1: [n, width] int8.
    If keys are pooled, so are positions: that of the newest complete block of a query, which also attends to the tokens after it.

    Equal scores, such as the zeros where no head is positive, are taken in the order of positions, the lowest first, so the choice depends
    neither on the width of a row nor on the device.
    """
    length, heads = keys.shape[1], rows.query.shape[1]
    size = max(1, SCORES // (heads * length))
    parts = []
    for start in range(0, len(positions), size):
        part = slice(start, start + size)
        own = keys[0] if len(keys) == 1 else keys[part]  # of a matrix alone, torch makes one product
        visible = torch.arange(length, device=keys.device) <= positions[part, None]
        scores = _score(rows.query[part], own, rows.weight[part]).masked_fill(~visible, float("-inf"))
        best = take_best(scores, rows.count) & visible
        if rows.pooled:  # the tokens after the newest block
            best = torch.nn.functional.pad(best, (0, 1)).scatter_(1, positions[part, None] + 1, True)
        chosen = pack_bits(best, width)
        parts.append(torch.where(positions[part, None] < rows.count, EVERYTHING, chosen))
    return torch.cat(parts)


def _score(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """[n, heads, D], [K, D] or [n, K, D], and [n, heads] -> [n, K]"""
    with torch.autocast(query.device.type, enabled=False):
        scores = (query @ keys.mT).relu_()
        return (weight.unsqueeze(1) @ scores).squeeze(1)


def take_best(scores: Tensor, count: int) -> Tensor:
    """Return which of the scores [n, K] are the ``count`` largest of their row, the first ones among equal ones, [n, K] bool."""
    if count >= scores.shape[1]:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    larger, equal = scores > least, scores == least
    return larger | (equal & (equal.cumsum(-1) <= count - larger.sum(-1, keepdim=True)))


def pack_bits(chosen: Tensor, width: int) -> Tensor:
    """[n, K] bool -> [n, width] int8"""
    padded = torch.nn.functional.pad(chosen, (0, 8 * width - chosen.shape[1])).view(len(chosen), width, 8)
    return (padded << torch.arange(8, device=chosen.device)).sum(-1).to(torch.uint8).view(torch.int8)


def sees(chosen: Tensor, positions: Tensor) -> Tensor:
    """Return whether tokens with the choices [..., bytes] attend to these positions of their paths, [K] or [..., K] -> [..., K] bool."""
    places = positions.expand(*chosen.shape[:-1], -1) >> 3
    return (chosen.gather(-1, places.clamp(max=chosen.shape[-1] - 1)) >> (positions & 7)) & 1 > 0


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


@dataclass(frozen=True, eq=False, kw_only=True)
class PathBlocks:
    """The W complete blocks of a row of T tokens."""

    size: int  # tokens of a block
    places: Tensor  # [W, size] int64: of its tokens in the row
    index: Tensor  # [W] int64: its number on its path
    before: Tensor  # [W] int64: the block before it on its path; -1: it is the first
    gather: Callable[[Tensor], Tensor] | None = None  # rows of this rank -> those of all ranks

    def take(self, rows: Tensor) -> Tensor:
        """[T, ...] -> [W, size, ...]"""
        rows = rows if self.gather is None else self.gather(rows)
        return rows.index_select(0, self.places.flatten()).view(*self.places.shape, *rows.shape[1:])

    def shift(self, blocks: Tensor, fill: float) -> Tensor:
        """[W, ...] -> those of the blocks before, and ``fill`` where there is none."""
        first = (self.before < 0).view(-1, *[1] * (blocks.dim() - 1))
        return blocks.index_select(0, self.before.clamp(min=0)).masked_fill(first, fill)
