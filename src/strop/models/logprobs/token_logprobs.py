"""Log-probabilities of given tokens from hidden states, without materializing [N, vocabulary] in float32.

For a linear output layer and the full softmax, ``tiled_logprobs`` reads one tile of logits at a time. Its forward pass keeps three
numbers per row: the log of the tile's sum of exponentials, the mean logit under the tile's softmax, and the target's logit (online
softmax, Milakov and Gimelshein 2018, arXiv 1805.02867, merged at the end). The backward pass writes softmax minus one-hot into the
buffer that the two products of the gradient read (cut cross-entropy, Wijmans et al. 2024, arXiv 2411.09009, without its fused
products). Everything except the products is at least float32. With p = softmax(logits): d logprob / d logits = onehot(target) - p,
and d entropy / d logits = -p (log p + entropy).

For any other head, filter or request, the output layer is applied to one chunk of rows at a time, under autograd, and the backward
pass recomputes a chunk's logits instead of storing them: for a vocabulary of 150,000 that saves 1.2 MB of memory per token and pass,
at the cost of one more product with the output layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.device_copies import is_gpu
from strop.models.logprobs.lm_head import (
    MOST_KEPT_LOGITS,
    ROWS,
    LMHead,
    RowSlopes,
    TileOperations,
    TileShape,
    TorchTiles,
    VocabularyDivision,
    choose_tile_shape,
    logit_bytes,
    tile_slices,
)
from strop.sampling import Sampling, at_least_float32, filtered_logits, kept_logits


def map_chunks(
    compute: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]],
    hidden: Tensor,
    target: Tensor,
    chunk: int,
    candidates: Tensor | None,
    kept: Tensor | None,
    *,
    squared_probs: bool,
) -> TokenOutputs:
    """Return the outputs of all rows, computed ``chunk`` rows at a time: the columns returned by ``compute``, joined."""
    outputs = [
        compute(*rows)
        for rows in zip(
            hidden.split(chunk),
            target.split(chunk),
            _split_optional(candidates, chunk),
            _split_optional(kept, chunk),
            strict=False,
        )
    ]
    columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
    squares = columns.pop() if squared_probs else None
    return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)


def _split_optional(column: Tensor | None, chunk: int) -> Iterable[Tensor | None]:
    return repeat(None) if column is None else column.split(chunk)


log = logging.getLogger(__name__)

LEAST_ROWS = 16  # of a product: with fewer rows, libraries use other kernels, and a row's last bit would depend on its neighbours


def tiled_logprobs(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    chunk: int | None,
    division: VocabularyDivision | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [N, H], target [N], weight [V, H], bias [V] -> log softmax(W h / temperature)[target] and its entropy in nats, [N] each.

    Differentiable in hidden, weight and bias. The products are computed in the autocast dtype, or that of ``hidden``. If a
    backward pass will follow, the logits of the first rows are kept for it: up to the size of ``chunk`` rows in float32, 512 MiB
    at most, or on a GPU without ``chunk`` a 32nd of its memory. The others are recomputed, bit-identically.

    With a division, ``weight`` and ``bias`` have this device's rows, and N is equal on all devices: each reads the rows of all.
    """
    if division is not None:
        hidden, target = division.gather_rows(hidden), division.gather_rows(target)
    layer = _OutputLayer(temperature, choose_tile_shape(hidden.device, len(weight), chunk), division)
    most = logit_bytes(hidden.device) if chunk is None else MOST_KEPT_LOGITS
    kept = min(most, 4 * (chunk or layer.tiles.rows) * len(weight)) if torch.is_grad_enabled() else 0
    apply: Any = _TiledLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, target, layer, kept)
    return (logprobs, entropy) if division is None else (division.own_rows(logprobs), division.own_rows(entropy))


def choose_operations(device: torch.device, dtype: torch.dtype) -> TileOperations:
    """Return Triton's kernels on a GPU, and PyTorch's operators elsewhere or if Triton is missing."""
    if device.type == "cuda" and dtype != torch.float64 and _has_triton():
        from strop.models.logprobs.row_kernels import TritonRows

        return TritonRows()
    return TorchTiles()


@cache
def _has_triton() -> bool:
    found = find_spec("triton") is not None
    if found:
        log.info("log-probabilities: Triton kernels, one pass over the logits of a row")
    else:
        log.warning("log-probabilities: Triton is not installed, so PyTorch's operators read the logits of a row several times")
    return found


@dataclass(frozen=True)
class _OutputLayer:
    temperature: float
    tiles: TileShape
    division: VocabularyDivision | None

    def add_devices(self, chosen: Tensor, normalizer: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the targets' logits, log-normalizers and mean logits of each device's tokens, [N] each."""
        if self.division is None:
            return chosen, normalizer, mean
        chosen, normalizers, means = self.division.stack(torch.stack([chosen, normalizer, mean])).unbind(1)  # [devices, N]
        normalizer = normalizers.logsumexp(0)
        return chosen.sum(0), normalizer, ((normalizers - normalizer).exp() * means).sum(0)


@dataclass(frozen=True)
class _Rows:
    """The arguments of the products, in their dtype."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    tiles: TileShape

    def row_slices(self) -> list[slice]:
        return list(tile_slices(len(self.hidden), self.tiles.rows))

    def column_slices(self) -> list[slice]:
        return list(tile_slices(len(self.weight), self.tiles.columns))

    def multiply(self, rows: slice, columns: slice) -> Tensor:
        """Return the logits of a tile before the temperature, [r, k]."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        count = len(hidden)
        if count < LEAST_ROWS:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, LEAST_ROWS - count))
        product = hidden @ weight.t() if self.bias is None else torch.addmm(self.bias[columns], hidden, weight.t())
        return product[:count]


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, layer: _OutputLayer, kept: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        ctx.layer, ctx.kept = layer, {}
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.set_materialize_grads(False)
        with torch.autocast(device, enabled=False):
            rows = _cast(hidden, weight, bias, ctx.dtype, layer.tiles)
            target = target if layer.division is None else target - layer.division.first  # in no tile if another device has it
            chosen, normalizers, means = _read_tiles(rows, target, layer.temperature, ctx.kept, kept)
            own = normalizers.logsumexp(1)
            mean = ((normalizers - own[:, None]).exp() * means).sum(1)
            chosen, normalizer, mean = layer.add_devices(chosen, own, mean)
            shares = normalizers.sub_(normalizer[:, None])  # log of each tile's share of a row's probability
            entropy = normalizer - mean
        ctx.save_for_backward(hidden, weight, bias, target, shares, normalizer, entropy)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, target, shares, normalizer, entropy = ctx.saved_tensors
        if grad is None and grad_entropy is None:
            return None, None, None, None, None, None
        grad = torch.zeros_like(normalizer) if grad is None else grad
        outgoing = _Outgoing(target, shares, normalizer, entropy, grad, grad_entropy, ctx.layer.temperature)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = _cast(hidden, weight, bias, ctx.dtype, ctx.layer.tiles)
            sums = _GradientSums(rows, hidden, weight, bias, ctx.needs_input_grad)
            for row, column, gradient in _gradient_tiles(rows, outgoing, ctx.kept):
                sums.add(row, column, gradient)
        return *sums.gradients(hidden), None, None, None


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, tiles: TileShape) -> _Rows:
    """Cast once for all tiles."""
    return _Rows(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), tiles)


def _read_tiles(
    rows: _Rows, target: Tensor, temperature: float, kept: dict[tuple[int, int], Tensor], budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets' logits [N], and per tile of columns the log-normalizers and mean logits [N, tiles]."""
    count, columns = len(rows.hidden), rows.column_slices()
    dtype = at_least_float32(rows.hidden.new_empty(0)).dtype
    chosen = torch.zeros(count, dtype=dtype, device=target.device)
    normalizers, means = (torch.empty(count, len(columns), dtype=dtype, device=target.device) for _ in range(2))
    operations = choose_operations(rows.hidden.device, rows.hidden.dtype)
    for row in rows.row_slices():
        for tile, column in enumerate(columns):
            product = rows.multiply(row, column)
            if (budget := budget - product.nbytes) >= 0:
                kept[row.start, column.start] = product
            summary = operations.summarize(product, temperature)
            normalizers[row, tile], means[row, tile] = summary.log_normalizer, summary.mean_logit
            place, here = _find(target[row], column)
            logits = at_least_float32(product.gather(1, place[:, None]).squeeze(1))
            chosen[row] += (logits if temperature == 1.0 else logits / temperature).masked_fill_(~here, 0.0)
    return chosen, normalizers, means


def _find(target: Tensor, column: slice) -> tuple[Tensor, Tensor]:
    """Return the targets' positions in a tile's columns, and which of them are inside: [r] each."""
    local = target - column.start
    last = column.stop - column.start - 1
    return local.clamp(0, last), (local >= 0) & (local <= last)


@dataclass(frozen=True)
class _Outgoing:
    """The outputs of the forward pass, [N] each, and their incoming gradients."""

    target: Tensor
    shares: Tensor  # [N, tiles]
    normalizer: Tensor
    entropy: Tensor
    grad: Tensor
    grad_entropy: Tensor | None
    temperature: float

    def slopes(self, row: slice, tile: int, column: slice) -> RowSlopes:
        log_share = self.shares[row, tile]
        share = log_share.exp().div_(self.temperature)
        place, here = _find(self.target[row], column)
        return RowSlopes(
            log_normalizer=log_share + self.normalizer[row],
            of_logprob=-self.grad[row] * share,
            of_entropy=None if self.grad_entropy is None else -self.grad_entropy[row] * share,
            shift=self.entropy[row] - self.normalizer[row],
            place=place,
            chosen=(self.grad[row] / self.temperature).masked_fill(~here, 0.0),
        )


def _gradient_tiles(
    rows: _Rows, outgoing: _Outgoing, kept: dict[tuple[int, int], Tensor]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the gradient of each tile of logits, and its rows and columns; valid until the next."""
    operations = choose_operations(rows.hidden.device, rows.hidden.dtype)
    for tile, column in enumerate(rows.column_slices()):
        for row in rows.row_slices():
            product = kept.pop((row.start, column.start), None)
            product = rows.multiply(row, column) if product is None else product
            yield row, column, operations.differentiate(product, outgoing.temperature, outgoing.slopes(row, tile, column))


class _GradientSums:
    """Gradients of hidden states, weight and bias, summed in at least float32. Tiles come column by column."""

    def __init__(self, rows: _Rows, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.rows = rows
        self.hidden = at_least_float32(rows.hidden.new_empty(0)).new_zeros(hidden.shape) if needed[0] else None
        summed = needed[1] and sums_in_products(weight.device, rows.hidden.dtype)
        self.in_product = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if summed else None
        self.weight = torch.zeros_like(weight) if needed[1] and not summed else None
        self.weight_dtype = weight.dtype
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None
        self.columns: list[Tensor] = []  # of this tile's rows of the weight, and of the bias
        self.last = max((each.start for each in rows.row_slices()), default=0)

    def add(self, row: slice, column: slice, gradient: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[row] += gradient @ self.rows.weight[column]
        if (total := self.in_product) is not None:
            part = total[column]
            torch.addmm(part, gradient.t(), self.rows.hidden[row], out_dtype=total.dtype, out=part)
        found = [] if self.weight is None else [gradient.t() @ self.rows.hidden[row]]
        found += [] if self.bias is None else [gradient.sum(0, dtype=at_least_float32(gradient.new_empty(0)).dtype)]
        if row.start == 0:
            self.columns = found if self.last == 0 else [at_least_float32(each) for each in found]
        else:
            self.columns = [total.add_(each) for total, each in zip(self.columns, found, strict=True)]
        if row.start == self.last:
            for whole, part in zip((each for each in (self.weight, self.bias) if each is not None), self.columns, strict=True):
                whole[column] = part.to(whole.dtype)

    def gradients(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight = self.weight if self.in_product is None else self.in_product.to(self.weight_dtype)
        return None if self.hidden is None else self.hidden.to(hidden.dtype), weight, self.bias


@cache
def sums_in_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds products of low-precision matrices to a float32 sum, without rounding and storing them first."""
    if not is_gpu(device) or dtype not in (torch.bfloat16, torch.float16):
        return False
    total, ones = (
        torch.zeros(LEAST_ROWS, LEAST_ROWS, device=device),
        torch.ones(LEAST_ROWS, LEAST_ROWS, dtype=dtype, device=device),
    )
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError):  # no such kernel, or a torch without the argument
        return False
    return True


def token_logprobs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    chunk: int | None,
    candidates: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    squared_probs: bool = False,
) -> TokenOutputs:
    """hidden [N, H], target [N] -> log-probabilities and entropies [N], at least float32, under the sampling distribution.

    ``candidates`` [N, K] are further token ids to return log-probabilities of. ``kept`` [N, K], padded with -1, are the ids that each
    target was sampled from: the distribution is then over these ids rather than those kept by the sampling filters for these logits.
    ``squared_probs``: also return the log of the sum over the vocabulary of p^2, without gradient. At most ``chunk`` rows of float32
    logits exist at a time, and fewer where tiles are used; None is 1,024, and for tiles the device's choice. All other outputs are
    differentiable; gradients that are not needed cost nothing. No rows give no outputs, and gradients of zero.
    """

    if head.is_linear and candidates is None and kept is None and not sampling.filtered and not squared_probs:
        temperature = sampling.temperature or 1.0
        return TokenOutputs(*tiled_logprobs(hidden, target, head.weight, head.bias, temperature, chunk, head.division))

    def compute(rows: Tensor, targets: Tensor, candidates: Tensor | None, kept: Tensor | None) -> tuple[Tensor, ...]:
        return _chunk_outputs(rows, targets, head, sampling, candidates, kept, squared_probs)

    return map_chunks(compute, hidden, target, chunk or ROWS, candidates, kept, squared_probs=squared_probs)


def _chunk_outputs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    candidates: Tensor | None,
    kept: Tensor | None,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Return log-probabilities and entropies [n] of one chunk, log-probabilities [n, K] of its candidates if any, and with ``squares``
    the log of the sum of squared probabilities [n]."""
    if torch.is_grad_enabled():
        outputs: tuple[Tensor, ...] = checkpoint(
            _autograd_outputs, hidden, target, head, sampling, candidates, kept, squares, use_reentrant=False
        )
        return outputs
    return _autograd_outputs(hidden, target, head, sampling, candidates, kept, squares)


def _autograd_outputs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    candidates: Tensor | None,
    kept: Tensor | None,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Compute the outputs of a chunk with autograd, for any head, filter and set of kept ids."""
    logits = head.compute_logits(hidden)
    if kept is not None:
        return _kept_outputs(logits, target, sampling, candidates, kept, squares)
    logs = filtered_logits(logits, sampling, target).log_softmax(-1)
    outputs = [logs.gather(1, target[:, None]).squeeze(1), _entropy(logs)]
    outputs += [] if candidates is None else [logs.gather(1, candidates)]
    return *outputs, *_log_sum_sq_probs(logs, squares)


def _kept_outputs(
    logits: Tensor, target: Tensor, sampling: Sampling, candidates: Tensor | None, kept: Tensor, squares: bool
) -> tuple[Tensor, ...]:
    """Return log-probabilities under the softmax over each row's kept ids; -inf for other candidates."""
    scaled = kept_logits(logits, kept, sampling)
    total = scaled.logsumexp(-1, keepdim=True)
    logprobs = (kept_logits(logits, target[:, None], sampling) - total).squeeze(1)
    outputs = [logprobs, _entropy(scaled - total)]
    if candidates is not None:
        is_kept = (candidates[:, :, None] == kept[:, None, :]).any(-1)
        outputs.append((kept_logits(logits, candidates, sampling) - total).masked_fill(~is_kept, float("-inf")))
    return *outputs, *_log_sum_sq_probs(scaled - total, squares)


def _log_sum_sq_probs(logs: Tensor, wanted: bool) -> tuple[Tensor, ...]:
    return ((2 * logs.detach()).logsumexp(-1),) if wanted else ()


def _entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)).sum(-1)
