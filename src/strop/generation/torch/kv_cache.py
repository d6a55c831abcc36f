"""Key-value cache of the embedded engine: a fixed number of slots, and a store of shared prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from strop.columns import Columns, TokenColumn
from strop.device_copies import is_gpu
from strop.generation.torch.mixer_states import MixerPass, SlotStates, StateKey, States, StateShape, split_states
from strop.models.attention.attention_plan import AttentionSpec, causal_mask, masked_attention
from strop.models.attention.flash_kernel import VarlenFlashKernel, flash_obstacle
from strop.models.attention.merged_attention import attend_in_pieces
from strop.models.attention.tree_pieces import AttentionPiece, Levels
from strop.models.mixers.indexers import IndexRows, choose_tokens, count_bytes, sees
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.models.network_parts import FixedOrder
from strop.models.recorded_columns import RecordedColumn, Recorders, allocate_columns
from strop.types import PromptImage

SPAN_STEP = 32  # positions

# [R, layers, D]: the keys of indexers, which the cache holds as it holds recorded columns
INDEX_KEYS = TokenColumn("index_keys", dtype="float32", aligned="read", stored=False)


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Shape of a model's key-value cache, and of the states of its sequences.

    Layers whose heads are fewer or smaller than others' (Gemma 4's windows) use the beginning of their room.
    """

    layers: int  # with keys and values
    heads: int  # key-value heads, the most of a layer
    head_size: int  # of keys, the largest
    value_size: int  # of values, the largest
    dtype: torch.dtype
    device: torch.device
    state_size: int = 0  # numbers of the policy's state that are held for a drafter, float32
    exact: FixedOrder | None = None  # attention in the learner's order of additions
    attending: tuple[int, ...] = ()  # the model's layers that have keys of their own, if not all do
    shared: Mapping[int, int] = field(default_factory=dict)  # layer -> the earlier one whose keys and values it attends to
    states: Mapping[StateKey, StateShape] = field(default_factory=dict)  # that layers carry from token to token
    indexed: tuple[int, ...] = ()  # the model's layers with an indexer
    index_size: int = 0  # of its keys, float32

    def allocate_columns(self, recorded: Sequence[RecordedColumn], size: tuple[int, ...]) -> dict[TokenColumn, Tensor]:
        """Return memory for the recorded columns of tokens, and for the keys of indexers, [*size, ...] each."""
        columns = allocate_columns(recorded, size, self.device)
        if self.indexed:
            columns[INDEX_KEYS] = torch.zeros((*size, len(self.indexed), self.index_size), device=self.device)
        return columns

    def place(self, layer: int) -> int:
        """Return the place of a layer's keys in the cache."""
        layer = self.shared.get(layer, layer)
        return self.attending.index(layer) if self.attending else layer

    def round_span(self, span: int) -> int:
        """Round a number of attended positions up, for few distinct shapes and, in a fixed order of additions, whole blocks of keys."""
        step = SPAN_STEP if self.exact is None else self.exact.key_block
        return -(-span // step) * step

    @property
    def bytes_per_token(self) -> int:
        """At least one, for models that have only states."""
        keys = self.layers * self.heads * (self.head_size + self.value_size) * self.dtype.itemsize
        return keys + 4 * (self.state_size + len(self.indexed) * self.index_size) or 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, however long it is."""
        return sum(each.num_bytes for each in self.states.values())

    @property
    def state_tokens(self) -> int:
        """Tokens whose keys and values take as much memory as the states of a sequence."""
        return -(-self.state_bytes // self.bytes_per_token)


def of_layer(cached: Tensor, new: Tensor) -> Tensor:
    """[.., heads, length, D], the part of a layer's room that its new keys or values [T, heads, D] fill."""
    heads, size = new.shape[1:]
    whole = cached.shape[-3] == heads and cached.shape[-1] == size
    return cached if whole else cached[..., :heads, :, :size]


class SlotCache:
    """Keys and values of the running requests, [layers, slots, heads, length, D], and their states, allocated once."""

    def __init__(self, shape: CacheShape, slots: int, length: int, recorded: Sequence[RecordedColumn] = ()) -> None:
        """``recorded``: columns of tokens that are held too."""
        self.shape = shape
        self.columns = shape.allocate_columns(recorded, (slots, length))  # [slots, length, ...]
        self.slots = slots
        self.length = length
        size = (shape.layers, slots, shape.heads, length)
        self.keys = torch.zeros((*size, shape.head_size), dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros((*size, shape.value_size), dtype=shape.dtype, device=shape.device)
        self.states = SlotStates(shape.states, slots, shape.device)

    def write_prefix(self, slot: int, prefix: Prefix) -> None:
        self.keys[:, slot, :, : prefix.length] = prefix.keys
        self.values[:, slot, :, : prefix.length] = prefix.values
        for column, values in prefix.columns.items():
            self.columns[column][slot, : prefix.length] = values
        self.states.write(slot, prefix.states)

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        for held in self.columns.values():
            held[target, :length] = held[source, :length]
        self.states.copy(source, target)

    def read_prefix(self, slot: int, tokens: tuple[int, ...]) -> Prefix:
        """Return a copy of the slot's first ``len(tokens)`` positions."""
        length = len(tokens)
        columns = {column: held[slot, :length].clone() for column, held in self.columns.items()}
        keys, values = self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()
        return Prefix(tokens, keys, values, columns=columns, states=self.states.read(slot, length))


@dataclass(frozen=True, eq=False)
class Prefix:
    """The keys and values of some tokens, [layers, heads, P, D], and the logits after the last of them, if known."""

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor
    logits: Tensor | None = None  # [V]
    columns: Columns = field(default_factory=dict)  # [P, ...]
    states: States = field(default_factory=dict)  # after the last token

    @property
    def length(self) -> int:
        return len(self.tokens)

    def drop_last(self) -> Prefix | None:
        """Return the prefix without its last token, which must then be recomputed for its logits. None if nothing is left, or if
        states are known after its last token only.
        """
        if self.length < 2 or self.states:
            return None
        columns = {column: values[:-1] for column, values in self.columns.items()}
        return Prefix(self.tokens[:-1], self.keys[:, :, :-1], self.values[:, :, :-1], columns=columns)


class PrefixStore:
    """An LRU cache of prefixes, up to a number of tokens. Prompts are stored under their tokens, conversations under their session."""

    def __init__(self, capacity: int, state_tokens: int = 0) -> None:
        """``state_tokens``: counted for each prefix in addition to its own."""
        self.capacity = capacity
        self.state_tokens = state_tokens
        self.num_tokens = 0
        self._entries: OrderedDict[str | tuple[int, ...], Prefix] = OrderedDict()

    def put(self, key: str | tuple[int, ...], prefix: Prefix) -> None:
        self.drop(key)
        size = prefix.length + self.state_tokens
        if size > self.capacity:
            return
        while self.num_tokens + size > self.capacity:
            self.drop(next(iter(self._entries)))
        self._entries[key] = prefix
        self.num_tokens += size

    def drop(self, key: str | tuple[int, ...]) -> None:
        prefix = self._entries.pop(key, None)
        self.num_tokens -= prefix.length + self.state_tokens if prefix is not None else 0

    def find(self, tokens: tuple[int, ...], session: str) -> Prefix | None:
        """Return the full prompt if it is stored, otherwise the part of it cached by this session, otherwise None.

        The result has its logits or is shorter than the prompt, so generation can continue from it.
        """
        for key in (tokens, session):
            prefix = self._entries.get(key)
            if prefix is not None and tokens[: prefix.length] == prefix.tokens:
                self._entries.move_to_end(key)
                return prefix if prefix.logits is not None or prefix.length < len(tokens) else prefix.drop_last()
        return None

    def clear(self) -> None:
        """Drop all prefixes, after the weights changed."""
        self._entries.clear()
        self.num_tokens = 0


@dataclass(frozen=True, eq=False)
class ImageRuns:
    """Runs of a prompt's tokens that also attend to later tokens of their run."""

    blocks: Tensor  # [P] int64, the run of each token; -1: none
    windows_only: bool = False  # only in layers with a window


def see_blocks(blocks: Tensor, queries: int, window: int | None) -> Tensor:
    """Return which keys the last ``queries`` tokens see within their own blocks [P], a mask [queries, P], limited by a window."""
    own = blocks[len(blocks) - queries :, None]
    inside = (own == blocks[None]) & (own >= 0)
    if window is None:
        return inside
    places = torch.arange(len(blocks), device=blocks.device)
    return inside & (places[len(blocks) - queries :, None] - places[None] < window)


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, runs: ImageRuns | None, spec: AttentionSpec) -> Tensor:
    """Attend causally, and in both directions within runs: queries [1, heads, L, D] are the last L of the keys [1, kv_heads, P, D]."""
    blocks = None if runs is None or (runs.windows_only and spec.window is None) else runs.blocks
    spec = spec.drop_unused_window(key.shape[2])
    causal = query.shape[2] == key.shape[2] and spec.window is None and blocks is None and spec.chosen is None
    mask = None if causal else causal_mask(query.shape[2], key.shape[2], spec.window, query.device)
    if mask is not None and spec.chosen is not None:
        mask = mask & sees(spec.chosen, torch.arange(key.shape[2], device=query.device))
    if mask is not None and blocks is not None:
        mask = mask | see_blocks(blocks.to(query.device), query.shape[2], spec.window)
    return masked_attention(query, key, value, mask, spec, causal=causal)


class PromptFlash:
    """The fused kernel of a GPU, over all prompts of a row at once: each one's new tokens attend to its cached ones and to themselves."""

    def __init__(self, lengths: Sequence[int], cached: Sequence[int]) -> None:
        """The prompts' numbers of new tokens, consecutive in the row, and of cached tokens before them."""
        self.kernel = VarlenFlashKernel()
        total = sum(lengths)
        starts, places = accumulate(lengths, initial=0), accumulate(cached, initial=total)
        new = [(start, length) for start, length in zip(starts, lengths, strict=False)]
        pieces: list[AttentionPiece] = []
        for rows, place, count in zip(new, places, cached, strict=False):
            pieces += [AttentionPiece(*rows, place, count)] if count else []
            pieces.append(AttentionPiece(*rows, *rows, 0))
        self.levels: Levels = (tuple(pieces),)
        self.longest = max(length + count for length, count in zip(lengths, cached, strict=True))

    def computes(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
        spec = spec.drop_unused_window(self.longest)
        return is_gpu(query.device) and flash_obstacle(query, key, value, spec) is None

    def attend(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], spec: AttentionSpec) -> Tensor:
        """Attention of queries [T, heads, D] to the keys of the new tokens [T, kv_heads, D], and to the cached keys of each
        prompt that has some.
        """
        spec = spec.drop_unused_window(self.longest)
        return attend_in_pieces(query, torch.cat(list(keys)), torch.cat(list(values)), self.kernel, self.levels, spec)


class EnginePlan:
    """What a pass of the engine computes in addition to attention."""

    def __init__(self, mixing: MixerPass | None = None) -> None:
        self.mixing = mixing  # of a model whose layers carry states
        self.recorders: Recorders = {}  # of columns of the new tokens
        self.images: Mapping[int, PromptImage] = {}  # among the new tokens, by number

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        raise NotImplementedError

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        raise NotImplementedError

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        assert self.mixing is not None
        return self.mixing.convolve(inputs, weight, bias, spec)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        assert self.mixing is not None
        return self.mixing.scan(recurrence, rows, spec)


class PrefillPlan(EnginePlan):
    """Attention of several prompts packed into one row, each after its own cached prefix. Collects their keys and values."""

    def __init__(
        self,
        shape: CacheShape,
        lengths: list[int],
        prefixes: list[Prefix | None],
        runs: Sequence[ImageRuns | None] = (),
        mixing: MixerPass | None = None,
    ) -> None:
        """``runs``: of each whole prompt; None: it has none."""
        super().__init__(mixing)
        self.shape = shape
        self.runs = runs or [None] * len(lengths)
        self.lengths = lengths
        self.prefixes = prefixes
        self.keys: list[Tensor] = []  # per layer [T, heads, D]
        self.values: list[Tensor] = []
        self.index_keys: list[Tensor] = []  # per layer with an indexer [T, D]
        exact = shape.exact is not None or any(each is not None for each in self.runs)
        self.flash = None if exact else PromptFlash(lengths, [0 if each is None else each.length for each in prefixes])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        key, value = key.to(self.shape.dtype), value.to(self.shape.dtype)
        if spec.layer not in self.shape.shared:
            self.keys.append(key)
            self.values.append(value)
        outputs = []
        query = query.to(self.shape.dtype) if self.shape.exact is None else query
        if self.flash is not None and self.flash.computes(query, key, value, spec):
            cached = [prefix for prefix in self.prefixes if prefix is not None]
            place = self.shape.place(spec.layer)
            keys = [key, *(of_layer(prefix.keys[place], key).transpose(0, 1) for prefix in cached)]
            values = [value, *(of_layer(prefix.values[place], value).transpose(0, 1) for prefix in cached)]
            return self.flash.attend(query, keys, values, spec)
        parts = (tensor.split(self.lengths) for tensor in (query, key, value))
        specs = split_choice(spec, self.lengths)
        for q, k, v, prefix, runs, one in zip(*parts, self.prefixes, self.runs, specs, strict=True):
            outputs.append(self._attend_one(q, k, v, prefix, runs, one))
        return torch.cat(outputs)

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        place = len(self.index_keys)
        self.index_keys.append(rows.key)
        own = rows.key.split(self.lengths)
        keys = [
            key if prefix is None else torch.cat([prefix.columns[INDEX_KEYS][:, place], key])
            for key, prefix in zip(own, self.prefixes, strict=True)
        ]
        return choose_in_prompts(rows, keys, self.lengths)

    def _attend_one(
        self, query: Tensor, key: Tensor, value: Tensor, prefix: Prefix | None, runs: ImageRuns | None, spec: AttentionSpec
    ) -> Tensor:
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, L, D]
        if prefix is not None:
            place = self.shape.place(spec.layer)
            keys = torch.cat([of_layer(prefix.keys[place], key)[None], keys], dim=2)
            values = torch.cat([of_layer(prefix.values[place], value)[None], values], dim=2)
        if self.shape.exact is not None:
            positions = torch.arange(keys.shape[2] - len(query), keys.shape[2], device=query.device)
            return self.shape.exact.attend_cached(queries, keys, values, positions[None], spec)[0].transpose(0, 1)
        return attend_prompt(queries, keys, values, runs, spec)[0].transpose(0, 1)

    def build_prefix(self, index: int, tokens: tuple[int, ...], logits: Tensor, recorded: Columns) -> Prefix:
        """Return the ``index``-th prompt as a prefix, its cached part included. ``recorded`` [T, ...]: in this pass."""
        start = sum(self.lengths[:index])
        end = start + self.lengths[index]
        keys, values = (
            self._stack([layer[start:end] for layer in found], end - start, size)
            for found, size in ((self.keys, self.shape.head_size), (self.values, self.shape.value_size))
        )
        cached = self.prefixes[index]
        if cached is not None:
            keys, values = torch.cat([cached.keys, keys], dim=2), torch.cat([cached.values, values], dim=2)
        if self.index_keys:
            recorded = {**recorded, INDEX_KEYS: torch.stack(self.index_keys, 1)}
        before = {} if cached is None else cached.columns
        columns = {
            column: torch.cat([*([before[column]] if column in before else []), rows[start:end]])
            for column, rows in recorded.items()
        }
        return Prefix(tokens, keys, values, logits, columns, split_states(self.mixing, index))

    def _stack(self, layers: Sequence[Tensor], length: int, size: int) -> Tensor:
        """The keys or values [length, heads, D] of the layers -> [layers, heads, length, D], the most and largest heads."""
        stacked = torch.zeros(len(layers), self.shape.heads, length, size, dtype=self.shape.dtype, device=self.shape.device)
        for place, rows in enumerate(layers):
            of_layer(stacked[place], rows).copy_(rows.transpose(0, 1))
        return stacked


def split_choice(spec: AttentionSpec, lengths: Sequence[int]) -> list[AttentionSpec]:
    """Return the options for the queries of each of several prompts."""
    if spec.chosen is None:
        return [spec] * len(lengths)
    return [replace(spec, chosen=chosen) for chosen in spec.chosen.split(list(lengths))]


def choose_in_prompts(rows: IndexRows, keys: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Choose for the new tokens of prompts, the last ``lengths`` ones of the keys [P, D] of each: [T, bytes] int8."""
    longest = max(map(len, keys))
    if longest <= rows.count:
        return rows.choose_everything()
    chosen, start = [], 0
    for key, length in zip(keys, lengths, strict=True):
        own = slice(start, start + length)
        part = IndexRows(rows.query[own], key, rows.weight[own], rows.count)
        positions = torch.arange(len(key) - length, len(key), device=key.device)
        chosen.append(choose_tokens(part, positions, key[None], count_bytes(longest)))
        start += length
    return torch.cat(chosen)


class DecodePlan(EnginePlan):
    """Attention of one new token for each of the first B slots; writes its key and value into the cache."""

    def __init__(self, cache: SlotCache, positions: Tensor, span: int, mixing: MixerPass | None = None) -> None:
        """``positions`` [B] are the positions of the new tokens, all below ``span``."""
        super().__init__(mixing)
        self.cache = cache
        self.rows = torch.arange(len(positions), device=positions.device)
        self.positions = positions
        self.span = span
        self._masks: dict[int | None, Tensor] = {}

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        held = self.cache.columns[INDEX_KEYS][:, :, self.cache.shape.indexed.index(layer)]  # [slots, length, D]
        held[self.rows, self.positions] = rows.key.to(held.dtype)
        if self.span <= rows.count:
            return rows.choose_everything()
        return choose_tokens(
            rows, self.positions, held[: len(self.rows), : self.span].to(rows.query.dtype), count_bytes(self.span)
        )

    def _mask(self, window: int | None) -> Tensor:  # [B, 1, 1, span]
        if window not in self._masks:
            distance = self.positions[:, None] - torch.arange(self.span, device=self.positions.device)[None]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._masks[window] = visible[:, None, None]
        return self._masks[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        place = self.cache.shape.place(spec.layer)
        keys, values = of_layer(self.cache.keys[place], key), of_layer(self.cache.values[place], value)
        dtype = keys.dtype
        keys[self.rows, :, self.positions] = key.to(dtype)
        values[self.rows, :, self.positions] = value.to(dtype)
        count = len(self.rows)
        if (exact := self.cache.shape.exact) is not None:
            cached_keys, cached_values = (tensor[:count, :, : self.span] for tensor in (keys, values))
            return exact.attend_cached(query[:, :, None], cached_keys, cached_values, self.positions[:, None], spec)[:, :, 0]
        spec = spec.drop_unused_window(self.span)
        mask = self._mask(spec.window)
        if spec.chosen is not None:
            mask = mask & sees(spec.chosen, torch.arange(self.span, device=mask.device))[:, None, None]
        output = masked_attention(
            query.to(dtype)[:, :, None], keys[:count, :, : self.span], values[:count, :, : self.span], mask, spec
        )
        return output[:, :, 0]
