"""Attention over pages of the key-value cache.

Queries are gathered, not keys: each page is multiplied once with the tokens of all sequences that use it, and the parts of a
token's attention are merged by their log-sum-exp. A group's shared prompt is thus read once for the group (cascade attention:
Juravsky et al., "Hydragen", arXiv 2402.05099). If each sequence has a single page, in order, nothing needs merging and the pages
are the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from strop.generation.torch.kv_cache import (
    INDEX_KEYS,
    EnginePlan,
    ImageRuns,
    PromptFlash,
    attend_prompt,
    choose_in_prompts,
    of_layer,
    split_choice,
)
from strop.generation.torch.mixer_states import MixerPass
from strop.generation.torch.paged.paged_cache import PagedCache, PagedSequence
from strop.models.attention.attention_plan import AttentionSpec, masked_attention
from strop.models.mixers.indexers import SCORES, IndexRows, choose_tokens, count_bytes, sees
from strop.models.recorded_columns import stack_columns

SPAN_STEP = 32  # the attended part of a page is rounded up to a multiple of this many tokens
HIDDEN = -1e30  # finite, so that a token that sees nothing of a page gets weight 0 instead of NaN
FEWEST_FLASH_ROWS = 8  # rows of queries from which the fused kernel is faster in float32
MOST_HOLES = 1.5  # a range of pages is read completely if it has at most this many pages per attended one


@dataclass(frozen=True, eq=False)
class PageBatch:
    """Pages attended to in one product."""

    pages: slice | Tensor  # m pages of the cache
    queries: Tensor  # [m, R] int64, tokens that attend to each page; zero-padded
    starts: Tensor  # [m] int64, position of the first token of each page
    place: Tensor  # [T, n] int64, index in ``queries`` [m * R] of each token's part; zero-padded
    missing: Tensor  # [T, n] bool, where ``place`` is padding
    whole: bool  # every token comes after every page: only windows hide something
    first: bool = False  # queries are the tokens in order

    def select(self, cache: Tensor, span: int) -> Tensor:
        """Return the pages of one layer's cache [pages, heads, page, D], [m, heads, span, D]."""
        if isinstance(self.pages, slice):
            return cache[self.pages, :, :span]
        return cache.index_select(0, self.pages)[:, :, :span]


@dataclass(frozen=True, eq=False)
class PageLayout:
    """Which new tokens attend to which pages, for T tokens of B sequences. It changes only when pages do."""

    batches: tuple[PageBatch, ...]
    token_pages: tuple[Sequence[int], ...]  # the pages of each token's sequence, in order
    single: bool  # each sequence has only one page, its own
    simple: bool  # the same with pages in order, for one new token per sequence

    @cached_property
    def table(self) -> Tensor:
        """[T, n] int64: ``token_pages`` padded with 0."""
        longest = max(map(len, self.token_pages))
        return torch.tensor([[*pages, *[0] * (longest - len(pages))] for pages in self.token_pages])


def make_layout(cache: PagedCache, sequences: Sequence[PagedSequence], widths: Sequence[int]) -> PageLayout:
    """Lay out ``widths`` new tokens for each sequence."""
    first = [sum(widths[:index]) for index in range(len(widths))]
    slots = {id(sequence): slot for slot, sequence in enumerate(sequences)}
    readers: dict[int, list[int]] = {}  # page -> tokens that attend to it
    starts: dict[int, int] = {}
    for slot, sequence in enumerate(sequences):
        tokens = range(first[slot], first[slot] + widths[slot])
        for index, page in enumerate(sequence.pages):
            readers.setdefault(page, []).extend(tokens)
            starts[page] = index * cache.page
    own = list(range(len(cache.pool.stack)))
    assert all(id(cache.pool.stack[page]) in slots for page in own), "a page belongs to no running sequence"
    batches = [_make_batch(own, readers, starts, sum(widths), cache, own=True)] if own else []
    shared = [page for sequence in sequences for page in (node.page for node in sequence.nodes)]
    batches += [_make_batch(pages, readers, starts, sum(widths), cache) for pages in _group_by_readers(set(shared), readers)]
    single = all(len(sequence.own) == 1 for sequence in sequences)
    simple = single and len(batches) == 1 and batches[0].first
    pages = tuple(sequence.pages for sequence, width in zip(sequences, widths, strict=True) for _ in range(width))
    return PageLayout(tuple(batches), pages, single, simple)


def _group_by_readers(pages: set[int], readers: dict[int, list[int]]) -> list[list[int]]:
    """Group pages with similar numbers of readers, to limit padding."""
    groups: dict[int, list[int]] = {}
    for page in sorted(pages):
        groups.setdefault((len(readers[page]) - 1).bit_length() // 2, []).append(page)
    return list(groups.values())


def _make_batch(
    pages: list[int], readers: dict[int, list[int]], starts: dict[int, int], tokens: int, cache: PagedCache, *, own: bool = False
) -> PageBatch:
    low, high = pages[0], pages[-1] + 1
    dense = high - low <= MOST_HOLES * len(pages)
    rows, members = list(range(low, high)) if dense else pages, set(pages)
    reading = [readers[page] if page in members else [] for page in rows]
    width = max(map(len, reading))
    places: list[list[int]] = [[] for _ in range(tokens)]
    for row, attending in enumerate(reading):
        for rank, token in enumerate(attending):
            places[token].append(row * width + rank)
    most = max(map(len, places))
    queries = [attending + [0] * (width - len(attending)) for attending in reading]
    device = cache.shape.device
    return PageBatch(
        pages=slice(low, high) if dense else torch.tensor(rows, device=device),
        queries=torch.tensor(queries, device=device),
        starts=torch.tensor([starts.get(page, 0) for page in rows], device=device),
        place=torch.tensor([place + [0] * (most - len(place)) for place in places], device=device),
        missing=torch.tensor([[False] * len(place) + [True] * (most - len(place)) for place in places], device=device),
        whole=not own,
        first=width == 1 and queries == [[token] for token in range(tokens)],
    )


class PagedDecodePlan(EnginePlan):
    """Attention of the new tokens of running sequences; writes their keys and values into the cache."""

    def __init__(
        self,
        cache: PagedCache,
        layout: PageLayout,
        pages: Tensor,
        positions: Tensor,
        longest: int,
        mixing: MixerPass | None = None,
    ) -> None:
        """``pages`` [T] and ``positions`` [T] belong to the new tokens; all positions are below ``longest``."""
        super().__init__(mixing)
        self.cache = cache
        self.layout = layout
        self.pages = pages
        self.positions = positions
        self.offsets = positions % cache.page
        self.longest = longest
        used = int(self.offsets.max()) + 1 if layout.single else cache.page
        self.span = min(-(-used // SPAN_STEP) * SPAN_STEP, cache.page)  # for the sequences' own pages
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def record(self) -> None:
        """Write the recorded columns of the new tokens into the cache."""
        for column, values in stack_columns(self.recorders).items():
            self.cache.columns[column][self.pages, self.offsets] = values

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        held = write_index_keys(self.cache, rows.key, self.pages, self.offsets, layer)
        if self.longest <= rows.count:
            return rows.choose_everything()
        table = self.layout.table.to(held.device)
        size = max(1, SCORES // (table.shape[1] * self.cache.page * held.shape[2]))
        chosen = []
        for part in (slice(start, start + size) for start in range(0, len(table), size)):
            keys = held[table[part]].flatten(1, 2)[:, : self.longest].to(rows.query.dtype)
            own = replace(rows, query=rows.query[part], weight=rows.weight[part])
            chosen.append(choose_tokens(own, self.positions[part], keys, count_bytes(self.longest)))
        return torch.cat(chosen)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        place = self.cache.shape.place(spec.layer)
        keys, values = of_layer(self.cache.keys[place], key), of_layer(self.cache.values[place], value)
        dtype = keys.dtype
        keys[self.pages, :, self.offsets] = key.to(dtype)
        values[self.pages, :, self.offsets] = value.to(dtype)
        spec = spec.drop_unused_window(self.longest)
        query = query.to(dtype)
        if self.layout.simple:
            return self._attend_simple(query, keys, values, spec)
        parts = [self._attend_batch(index, query, keys, values, spec) for index in range(len(self.layout.batches))]
        return merge_parts(parts, spec.sinks).flatten(1, 2).to(dtype)

    def _attend_simple(self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        count = len(query)
        visible = self._mask(0, spec)
        assert visible is not None
        output = masked_attention(
            query[:, :, None], keys[:count, :, : self.span], values[:count, :, : self.span], visible[:, :, None], spec
        )
        return output[:, :, 0]

    def _attend_batch(
        self, index: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens' parts of a batch of pages: [T, n, kv_heads, G, D] and their log-sum-exp [T, n, kv_heads, G]."""
        batch, heads = self.layout.batches[index], keys.shape[1]
        width = batch.queries.shape[1]
        grouped = query.unflatten(1, (heads, -1))  # [T, kv_heads, G, D]
        rows = grouped if batch.first else grouped[batch.queries].transpose(1, 2).flatten(2, 3)  # [m, kv_heads, R * G, D]
        span = self.cache.page if batch.whole else self.span
        output, lse = attend_parts(rows, batch.select(keys, span), batch.select(values, span), self._mask(index, spec), spec)
        if width == 1:
            output, lse = output[batch.place], lse[batch.place]
        else:
            rank = batch.place % width
            page = batch.place.div(width, rounding_mode="floor")
            output = output.unflatten(2, (width, -1))[page, :, rank]
            lse = lse.unflatten(2, (width, -1))[page, :, rank]
        if batch.place.shape[1] > 1 or len(self.layout.batches) > 1:
            lse = lse.masked_fill(batch.missing[:, :, None, None], HIDDEN)
        return output, lse

    def _mask(self, index: int, spec: AttentionSpec) -> Tensor | None:
        """Return which positions of its pages a batch's queries attend to, [m, R, span]; None if to all."""
        visible, batch = self._visible(index, spec.window), self.layout.batches[index]
        if spec.chosen is None:
            return visible
        span = self.cache.page if batch.whole else self.span
        held = batch.starts[:, None, None] + torch.arange(span, device=batch.starts.device)
        chosen = sees(spec.chosen[batch.queries], held.expand(-1, batch.queries.shape[1], -1))
        return chosen if visible is None else visible & chosen

    def _visible(self, index: int, window: int | None) -> Tensor | None:
        """Return which positions of its pages a batch's queries see, [m, R, span]; None if they see all."""
        if (index, window) not in self._masks:
            batch = self.layout.batches[index]
            visible = None
            if not batch.whole or window is not None:
                span = self.cache.page if batch.whole else self.span
                held = batch.starts[:, None] + torch.arange(span, device=batch.starts.device)
                distance = self.positions[batch.queries][:, :, None] - held[:, None]
                visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._masks[index, window] = visible
        return self._masks[index, window]


def write_index_keys(cache: PagedCache, keys: Tensor, pages: Tensor, offsets: Tensor, layer: int) -> Tensor:
    """Write the keys [T, D] of new tokens of a layer's indexer, and return those of all pages, [pages, page, D]."""
    held = cache.columns[INDEX_KEYS][:, :, cache.shape.indexed.index(layer)]
    held[pages, offsets] = keys.to(held.dtype)
    return held


def attend_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attend to each page separately.

    Args:
        query: [m, kv_heads, R * G, D], R tokens with G query heads for each key head.
        key: [m, kv_heads, span, D], and ``value`` alike.
        mask: [m, R, span], True where a token sees a key; None where all do.

    Returns:
        [m, kv_heads, R * G, D], normalized within the page, and the logarithm of the sum of its weights [m, kv_heads, R * G] float32.
    """
    fused = query.device.type == "cpu" and query.dtype == torch.float32 and spec.softcap is None and mask is None
    if fused and query.shape[2] >= FEWEST_FLASH_ROWS and key.shape == value.shape:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=spec.scale)
        return output, lse
    scores = (query * spec.scale) @ key.transpose(2, 3)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        tokens = scores.unflatten(2, (mask.shape[1], -1))  # a view
        tokens.masked_fill_(~mask[:, None, :, None], HIDDEN)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """Merge parts of attention, [T, n, kv_heads, G, D] with log-sum-exp [T, n, kv_heads, G] each -> [T, kv_heads, G, D].

    ``sinks`` [heads]: one more logit for each query, without a value.
    """
    output = torch.cat([output for output, _ in parts], 1) if len(parts) > 1 else parts[0][0]
    lse = torch.cat([lse for _, lse in parts], 1) if len(parts) > 1 else parts[0][1]
    if output.shape[1] == 1 and sinks is None:
        return output[:, 0]
    if sinks is not None:
        lse = torch.cat([lse, sinks.to(lse.dtype).view(1, 1, *lse.shape[2:]).expand(len(lse), -1, -1, -1)], 1)
    merged: Tensor = (output * lse.softmax(1)[:, : output.shape[1]].unsqueeze(-1)).sum(1)
    return merged


@dataclass(frozen=True, eq=False)
class PromptRead:
    """Tokens of one sequence to read: those after the first ``cached``."""

    tokens: tuple[int, ...]
    cached: int
    pages: Sequence[int]  # of the sequence, in order
    runs: ImageRuns | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) - self.cached


class PagedPrefillPlan(EnginePlan):
    """Attention of several prompts packed into one row, each after its cached part; writes their keys and values into the cache."""

    def __init__(self, cache: PagedCache, reads: Sequence[PromptRead], mixing: MixerPass | None = None) -> None:
        super().__init__(mixing)
        self.cache = cache
        self.reads = reads
        self.lengths = [read.length for read in reads]
        device = cache.shape.device
        positions = [position for read in reads for position in range(read.cached, len(read.tokens))]
        pages = [read.pages[position // cache.page] for read in reads for position in range(read.cached, len(read.tokens))]
        self.positions = torch.tensor(positions, device=device)
        self.pages = torch.tensor(pages, device=device)
        self.offsets = self.positions % cache.page
        exact = any(read.runs is not None for read in reads)
        self.flash = None if exact else PromptFlash(self.lengths, [read.cached for read in reads])
        self._tables = [torch.tensor(read.pages[: -(-len(read.tokens) // cache.page)], device=device) for read in reads]

    def record(self) -> None:
        """Write the recorded columns of the new tokens into the cache."""
        for column, values in stack_columns(self.recorders).items():
            self.cache.columns[column][self.pages, self.offsets] = values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        place = self.cache.shape.place(spec.layer)
        cached = of_layer(self.cache.keys[place], key), of_layer(self.cache.values[place], value)
        query, key, value = (tensor.to(cached[0].dtype) for tensor in (query, key, value))
        cached[0][self.pages, :, self.offsets] = key
        cached[1][self.pages, :, self.offsets] = value
        if self.flash is not None and self.flash.computes(query, key, value, spec):
            read = [(index, read.cached) for index, read in enumerate(self.reads) if read.cached]
            keys, values = (
                [own, *(self._gather(index, tensor)[:count] for index, count in read)]
                for own, tensor in zip((key, value), cached, strict=True)
            )
            return self.flash.attend(query, keys, values, spec)
        outputs, specs = [], split_choice(spec, self.lengths)
        for index, (q, k, v) in enumerate(zip(*(tensor.split(self.lengths) for tensor in (query, key, value)), strict=True)):
            if self.reads[index].cached:
                k, v = (self._gather(index, tensor) for tensor in cached)
            queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
            outputs.append(attend_prompt(queries, keys, values, self.reads[index].runs, specs[index])[0].transpose(0, 1))
        return torch.cat(outputs)

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        held = write_index_keys(self.cache, rows.key, self.pages, self.offsets, layer)
        tables = zip(self._tables, self.reads, strict=True)
        keys = [held[table].flatten(0, 1)[: len(read.tokens)].to(rows.query.dtype) for table, read in tables]
        return choose_in_prompts(rows, keys, self.lengths)

    def _gather(self, index: int, cache: Tensor) -> Tensor:  # [length, heads, D]
        pages = cache.index_select(0, self._tables[index])
        return pages.transpose(1, 2).flatten(0, 1)[: len(self.reads[index].tokens)]
