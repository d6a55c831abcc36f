"""The output layer of a causal language model with its family's transformation of the logits, and softmax statistics of a tile of these.

A tile is the product of some rows of hidden states with some rows of the output layer. Its size depends on the device and on
``policy.logprob_chunk_size``, never on the batch, so that sums over the vocabulary have the same order however a batch is cut.
On a CPU a tile's float32 numbers stay in the cache between the operators below. Exponentials use ``torch.softmax``, which costs
half as much as ``torch.exp`` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.device_copies import is_gpu


class VocabularyDivision(Protocol):
    """Devices that each have some rows of the output layer, and so the logits of some tokens. They call its methods together."""

    @property
    def size(self) -> int:
        """V, of all devices."""
        ...

    @property
    def first(self) -> int:
        """The first token id of this device; its others follow."""
        ...

    def local(self, parameter: Tensor) -> Tensor:
        """Return this device's rows [v, ...] of a parameter of the layer, differentiably."""
        ...

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[n, ...] of each device -> [devices * n, ...]; backward: the sum of the gradients of this device's rows."""
        ...

    def own_rows(self, rows: Tensor) -> Tensor:
        """[devices * n, ...], equal on all devices -> this device's [n, ...]."""
        ...

    def stack(self, numbers: Tensor) -> Tensor:
        """[...] of each device -> [devices, ...], in the order of their token ids, without gradient."""
        ...

    def exchange(self, logits: Tensor) -> Tensor:
        """Logits of all devices' rows for this device's tokens [devices * n, v] -> of this device's rows for all tokens [n, V]."""
        ...


@dataclass(frozen=True)
class LMHead:
    """The output layer and its model family's transformation of the logits."""

    weight: Tensor  # [V, H]; with a division, this device's rows
    bias: Tensor | None  # [V]
    softcap: float | None = None  # final_logit_softcapping, Gemma 2 and 3; logits_soft_cap, Recurrent Gemma
    divisor: float = 1.0  # logits_scaling, Granite
    multiplier: float = 1.0  # logit_scale, Cohere
    division: VocabularyDivision | None = None

    @property
    def vocabulary(self) -> int:
        return len(self.weight) if self.division is None else self.division.size

    @property
    def is_linear(self) -> bool:
        return self.softcap is None and self.divisor == 1.0 and self.multiplier == 1.0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., V]; with a division [n, H] -> [n, V], with equal n on all devices."""
        if self.division is None:
            return self.transform_logits(nn.functional.linear(hidden, self.weight, self.bias))
        local = nn.functional.linear(self.division.gather_rows(hidden), self.weight, self.bias)
        return self.transform_logits(self.division.exchange(local))

    def transform_logits(self, logits: Tensor) -> Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def get_lm_head(model: nn.Module) -> LMHead:
    """Return the LM head of a Hugging Face causal LM. Raises ValueError if it has no linear output layer."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer (found {type(layer).__name__})")
    division: VocabularyDivision | None = getattr(layer, "division", None)
    if division is None:
        return make_lm_head(model.config, layer.weight, layer.bias)
    bias = None if layer.bias is None else division.local(layer.bias)
    return make_lm_head(model.config, division.local(layer.weight), bias, division)


def make_lm_head(config: Any, weight: Tensor, bias: Tensor | None = None, division: VocabularyDivision | None = None) -> LMHead:
    """Return an output layer with the logit transformation given by a Hugging Face configuration."""
    config = getattr(config, "text_config", None) or config
    return LMHead(
        weight=weight,
        bias=bias,
        softcap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
        division=division,
    )


ROWS = 1024  # of logits at a time where policy.logprob_chunk_size is not set
LARGEST_ROWS = 8192  # of a tile on a GPU: products of more are no faster
SHARE_OF_GPU = 32  # a tile of logits with its gradient takes at most one part in this many, and so do kept logits
MOST_KEPT_LOGITS = 512 * 2**20  # bytes, elsewhere and where policy.logprob_chunk_size is set
CPU_ROWS, CPU_COLUMNS = 512, 2048  # 4 MiB of float32; larger tiles leave the cache, smaller ones slow the products down


@dataclass(frozen=True)
class TileShape:
    """Rows of hidden states and rows of the output layer in one tile."""

    rows: int
    columns: int


@dataclass(frozen=True)
class TileSummary:
    """Statistics of the softmax over one tile's columns, [r] each, at least float32."""

    log_normalizer: Tensor  # log of the sum of exp(logit)
    mean_logit: Tensor  # sum of p * logit


@dataclass(frozen=True)
class RowSlopes:
    """Coefficients of the gradient of a tile's logits, [r] each: p * (of_logprob + of_entropy * (logit + shift)) plus ``chosen``
    at ``place``.

    p is the softmax over the tile's columns; the slopes include the tile's share of a row's probability, and the temperature.
    """

    log_normalizer: Tensor  # of the tile
    of_logprob: Tensor
    of_entropy: Tensor | None  # None: nothing depends on the entropies
    shift: Tensor  # entropy - the row's log-normalizer
    place: Tensor  # int64, the target's column in this tile; any column if the target is in another tile
    chosen: Tensor  # 0 if the target is in another tile


class TileOperations(Protocol):
    """The two passes over a tile. Neither changes ``product`` [r, k], the contiguous logits before the temperature."""

    def summarize(self, product: Tensor, temperature: float) -> TileSummary: ...

    def differentiate(self, product: Tensor, temperature: float, slopes: RowSlopes) -> Tensor:
        """Return the gradient of ``product`` in its dtype; valid until the next call."""
        ...


@dataclass
class TorchTiles:
    """The operations of one call with PyTorch's operators, in buffers shared by all tiles of the call."""

    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def summarize(self, product: Tensor, temperature: float) -> TileSummary:
        logits = self._scale(product, temperature)
        highest = logits.amax(1)
        probabilities = torch.softmax(logits, 1, out=self._buffer("probabilities", logits))
        # the largest softmax value is exp(0) / sum
        log_normalizer = highest - probabilities.amax(1).log()
        return TileSummary(log_normalizer, probabilities.mul_(logits).sum(1))

    def differentiate(self, product: Tensor, temperature: float, slopes: RowSlopes) -> Tensor:
        logits = self._scale(product, temperature)
        gradient = torch.softmax(logits, 1, out=self._buffer("probabilities", logits))
        if slopes.of_entropy is None:
            gradient.mul_(slopes.of_logprob[:, None])
        else:
            factor = torch.add(logits, slopes.shift[:, None], out=self._buffer("factor", logits))
            gradient.mul_(factor.mul_(slopes.of_entropy[:, None]).add_(slopes.of_logprob[:, None]))
        gradient.scatter_add_(1, slopes.place[:, None], slopes.chosen[:, None])
        return gradient if gradient.dtype == product.dtype else self._buffer("gradient", product).copy_(gradient)

    def _scale(self, product: Tensor, temperature: float) -> Tensor:
        """Return the logits in at least float32, divided by the temperature."""
        if product.dtype in (torch.float32, torch.float64):
            return product if temperature == 1.0 else torch.div(product, temperature, out=self._buffer("logits", product))
        logits = self._buffer("logits", product, torch.float32).copy_(product)
        return logits if temperature == 1.0 else logits.div_(temperature)

    def _buffer(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or like.dtype
        held = self.buffers.get((name, dtype))
        if held is None or held.numel() < like.numel():
            held = self.buffers[name, dtype] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return held[: like.numel()].view(like.shape)


def choose_tile_shape(device: torch.device, vocabulary: int, chunk: int | None) -> TileShape:
    """Return the tile shape for a device: whole rows on a GPU, where tiles need not fit a cache; ``chunk`` rows at most.

    None leaves the rows to the device: on a GPU as many as a 32nd of its memory holds, 1,024 to 8,192.
    """
    if device.type == "cpu":
        return TileShape(min(chunk or ROWS, CPU_ROWS), CPU_COLUMNS)
    return TileShape(chunk or count_rows(vocabulary, logit_bytes(device)), max(vocabulary, 1))


def count_rows(vocabulary: int, available: int) -> int:
    """Return how many rows of logits fit into a number of bytes: in bfloat16, with their gradients."""
    fitting = available // (4 * max(vocabulary, 1)) // 256 * 256
    return max(ROWS, min(LARGEST_ROWS, fitting))


@cache
def logit_bytes(device: torch.device) -> int:
    """Return the bytes of logits that may be held on a device at a time."""
    if not is_gpu(device):
        return MOST_KEPT_LOGITS
    total = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return total // SHARE_OF_GPU


def tile_slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
