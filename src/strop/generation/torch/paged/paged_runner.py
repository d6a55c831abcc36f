"""Forward passes of the embedded engine with a paged key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from strop.columns import Columns
from strop.generation.quantized_rollouts import EmulatedQuantization
from strop.generation.torch.fast_layers import FastLayers
from strop.generation.torch.mixer_states import MixerPass, SlotStates, States, split_states
from strop.generation.torch.model_runner import PlanRunner, SlotPrompt, cache_capacity, collect_images, join_positions
from strop.generation.torch.paged.page_attention import PagedDecodePlan, PagedPrefillPlan, PageLayout, PromptRead, make_layout
from strop.generation.torch.paged.paged_cache import OpenedSequence, PagedCache, PagedSequence, choose_page, split_memory
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.network import Network


class PagedRunner(PlanRunner):
    """Runs a network with a paged key-value cache. Memory limits the number of stored tokens, not of sequences."""

    verifies_drafts = True

    def __init__(
        self,
        network: Network,
        config: TorchGenerationConfig,
        *,
        length: int,
        page: int | None = None,
        quantization: EmulatedQuantization | None = None,
    ) -> None:
        """``page``: tokens per page; None chooses. Raises ValueError if the memory does not fit one sequence of ``length``
        tokens.
        """
        super().__init__(network, config, length=length, quantization=quantization)
        self.fuser = config.make_fuser(network)
        if self.fuser is not None:
            self.shape = replace(self.shape, state_size=self.fuser.size)
        capacity = cache_capacity(network, self.shape, config, length)
        self.slots, capacity = split_memory(self.shape, capacity, config.max_num_seqs)
        page = page or choose_page(capacity, length, self.slots)
        if page is None or capacity // page * page < length:
            raise ValueError(
                f"policy.generation.torch_cfg.kv_cache_memory_gb holds {max(capacity, 0)} tokens, too few whole pages for a sequence of "
                f"policy.max_total_sequence_length = {length}; raise the first, or set policy.generation.torch_cfg.paged_cache=false"
            )
        self.cache = PagedCache(self.shape, capacity // page, page, network.recorded_columns, prefixes=self.slots)
        self.states = SlotStates(self.shape.states, self.slots, network.device)
        self._make_offsets(self.slots)
        self._sequences: list[PagedSequence] = []  # of the slots, in order
        self._opened: dict[int, OpenedSequence] = {}  # slot -> sequence reserved for the next prefill
        self._readers: dict[tuple[int, ...], int] = {}  # prompt -> slot that reads it in the next prefill
        self._ahead: PagedSequence | None = None  # the read part of a prompt that is not admitted yet
        self._layout: PageLayout | None = None  # for one new token per sequence
        self._table: Tensor | None = None  # [B, n] int32, pages of each sequence, for the compiled kernels

    @property
    def rounds_as_learner(self) -> bool:
        """Whether merging parts of attention makes no difference: in float32, or with kernels that do not merge.

        In bfloat16 a part is rounded before merging, unlike in the learner's attention.
        """
        return self.layers is not None or self.network.precision != torch.bfloat16

    def _forget_layout(self) -> None:
        """Called when the assignment of pages has changed."""
        self._layout = self._table = None

    def count_unread(self, prompt: SlotPrompt) -> int:
        return len(prompt.tokens) - self.cache.tree.match(prompt.tokens).length(self.cache.page)

    def reserve(self, prompt: SlotPrompt) -> bool:
        self._forget_layout()
        reserved = self._open(prompt)
        if not reserved and self._ahead is not None:
            self._drop_ahead()
            reserved = self._open(prompt)
        return reserved

    def _open(self, prompt: SlotPrompt) -> bool:
        slot = len(self._sequences)
        reader = self._readers.get(prompt.tokens)
        if reader is not None:
            sequence = self.cache.open_beside(self._sequences[reader], len(prompt.tokens))
            if sequence is not None:
                self._sequences.append(sequence)
            return sequence is not None
        opened = self.cache.open(prompt.tokens)
        if opened is None:
            return False
        self._sequences.append(opened.sequence)
        self._opened[slot] = opened
        self._readers[prompt.tokens] = slot
        return True

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self.cache.close(self._ahead)
            self._ahead = None

    def read_ahead(self, prompt: SlotPrompt, budget: int) -> int:
        self._forget_layout()
        cached = self.count_unread(prompt)
        cached = len(prompt.tokens) - cached
        page = self.cache.page
        end = (cached + max(budget, page)) // page * page  # whole pages
        if end >= len(prompt.tokens) or self._find_runs(prompt.tokens) is not None:  # which are read whole
            return 0
        opened = self.cache.open(prompt.tokens[:end])
        if opened is None:
            return 0
        self._drop_ahead()
        self._ahead = opened.sequence
        read = PromptRead(prompt.tokens[:end], opened.cached, opened.sequence.pages)
        _, states = self._read([read], [replace(prompt, tokens=read.tokens)], [opened.states])
        self.cache.store(opened.sequence, read.tokens, states=states[0])
        return read.length if len(prompt.tokens) - self.count_unread(prompt) >= end else 0

    def prefill(self, prompts: Sequence[SlotPrompt]) -> Tensor:
        logits = {slot: opened.logits for slot, opened in self._opened.items() if opened.logits is not None}
        states = {slot: self._opened[slot].states for slot in logits}
        reading = [slot for slot in self._opened if slot not in logits]
        readers = {prompt.slot: prompt for prompt in prompts}
        tokens = {slot: prompt for prompt, slot in self._readers.items()}
        if reading:
            reads = [self._make_read(slot, tokens[slot]) for slot in reading]
            cached = [self._opened[slot].states for slot in reading]
            found, after = self._read(reads, [readers[slot] for slot in reading], cached)
            logits |= dict(zip(reading, found, strict=True))
            states |= dict(zip(reading, after, strict=True))
        for slot, each in states.items():
            self.states.write(slot, each)
        for prompt in prompts:
            self._set_offset(prompt)
            reader = self._readers[prompt.tokens]
            if prompt.slot != reader:
                self._copy_own(reader, prompt.slot, len(prompt.tokens))
        result = torch.stack([logits[self._readers[prompt.tokens]] for prompt in prompts])
        for slot in reading:
            self.cache.store(self._sequences[slot], tokens[slot], logits[slot], states[slot])
        self._opened.clear()
        self._readers.clear()
        self._drop_ahead()
        return result

    def _make_read(self, slot: int, tokens: tuple[int, ...]) -> PromptRead:
        return PromptRead(tokens, self._opened[slot].cached, self._sequences[slot].pages, self._find_runs(tokens))

    def _copy_own(self, source: int, target: int, length: int) -> None:
        """Copy the states after a prompt, and its tokens that are not in shared pages."""
        self.states.copy(source, target)
        reader, sequence = self._sequences[source], self._sequences[target]
        for index, (old, new) in enumerate(zip(reader.own, sequence.own, strict=True)):
            start = (len(reader.nodes) + index) * self.cache.page
            self.cache.copy_page(old, new, min(length - start, self.cache.page))

    def _read(
        self, reads: Sequence[PromptRead], prompts: Sequence[SlotPrompt], cached: Sequence[States]
    ) -> tuple[Tensor, list[States]]:
        """Run one forward pass over the uncached part of some prompts; return the logits after each, [B, V], and the states.

        ``cached``: the states after the cached part; empty without one.
        """
        mixing = self.states.open_prompts([read.length for read in reads], cached)
        plan = PagedPrefillPlan(self.cache, reads, mixing)
        tokens = torch.tensor([token for read in reads for token in read.tokens[read.cached :]])
        last = torch.tensor(plan.lengths).cumsum(0) - 1
        plan.recorders = self.network.record_columns()
        plan.images = collect_images(prompts)
        positions = join_positions(prompts, [read.cached for read in reads])
        with self._capturing(plan.pages, plan.offsets):
            logits = self._forward(tokens, positions, plan, last)
        plan.record()
        return logits, [split_states(mixing, index) for index in range(len(reads))]

    @contextmanager
    def _capturing(self, pages: Tensor, offsets: Tensor) -> Iterator[None]:
        """Hold what a drafter reads of the tokens of a pass, at their places."""
        if self.fuser is None or self.cache.states is None:
            yield
            return
        with self.fuser.capturing():
            yield
        self.cache.states[pages, offsets] = self.fuser.take()

    def _decode_compiled(self, layers: FastLayers, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        if self.fuser is None or self.cache.states is None:
            return layers.decode(tokens, positions, table, self.cache)
        states = self.fuser.empty(len(tokens))
        logits = layers.decode(tokens, positions, table, self.cache, self.fuser.layers, states)
        pages = table.gather(1, (positions // self.cache.page)[:, None]).squeeze(1).long()
        self.cache.states[pages, positions % self.cache.page] = self.fuser.fuse(states.flatten(1))
        return logits

    def read_states(self, slot: int, first: int, last: int) -> Tensor:
        """Return the fused states of the tokens of a slot at positions [first, last), [last - first, H], for a drafter."""
        return self.cache.read_states(self._sequences[slot], first, last)

    def extend(self, lengths: Sequence[int]) -> bool:
        for sequence, length in zip(self._sequences, lengths, strict=True):
            if (len(sequence.nodes) + len(sequence.own)) * self.cache.page < length:
                self._forget_layout()
                if not self.cache.extend(sequence, length):
                    self._drop_ahead()
                    if not self.cache.extend(sequence, length):
                        return False
        return True

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self.layers is not None:
            return self._decode_compiled(self.layers, torch.tensor(tokens), torch.tensor(positions), self._make_table())
        if self._layout is None:
            self._layout = make_layout(self.cache, self._sequences, [1] * len(tokens))
        with self.states.decoding(positions, [1] * len(tokens)) as mixing:
            return self._decode(tokens, positions, self._layout, range(len(tokens)), mixing)

    def _make_table(self) -> Tensor:
        """Return the pages of each sequence, [B, n] int32, padded with 0."""
        if self._table is None:
            pages = [sequence.pages for sequence in self._sequences]
            longest = max(map(len, pages))
            self._table = torch.tensor([row + [0] * (longest - len(row)) for row in pages], dtype=torch.int32)
        return self._table

    def decode_drafts(self, rows: Sequence[Sequence[int]], positions: Sequence[int]) -> Tensor:
        slots = [slot for slot, row in enumerate(rows) for _ in row]
        tokens = [token for row in rows for token in row]
        places = [position + index for row, position in zip(rows, positions, strict=True) for index in range(len(row))]
        if self.layers is not None:
            return self._decode_compiled(self.layers, torch.tensor(tokens), torch.tensor(places), self._make_table()[slots])
        layout = make_layout(self.cache, self._sequences, [len(row) for row in rows])
        with self.states.decoding(positions, [len(row) for row in rows]) as mixing:
            return self._decode(tokens, places, layout, slots, mixing)

    def _decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        layout: PageLayout,
        slots: Sequence[int],
        mixing: MixerPass | None,
    ) -> Tensor:
        page, device = self.cache.page, self.network.device
        pages = []
        for slot, position in zip(slots, positions, strict=True):
            sequence = self._sequences[slot]
            pages.append(sequence.own[position // page - len(sequence.nodes)])
        where = torch.tensor(pages, device=device), torch.tensor(positions, device=device)
        plan = PagedDecodePlan(self.cache, layout, *where, longest=max(positions) + 1, mixing=mixing)
        plan.recorders = self.network.record_columns()
        rotary = plan.positions if self.offsets is None else plan.positions + self.offsets[torch.tensor(slots, device=device)]
        with self._capturing(plan.pages, plan.offsets):
            logits = self._forward(torch.tensor(tokens), rotary, plan, None)
        plan.record()
        return logits

    def release(self, slot: int) -> None:
        self._forget_layout()
        self.cache.close(self._sequences[slot])
        self.states.release(slot)
        if slot == len(self._sequences) - 1:
            self._sequences.pop()

    def move(self, source: int, target: int, length: int) -> None:
        self._forget_layout()
        assert source == len(self._sequences) - 1
        self._sequences[target] = self._sequences.pop()
        self.states.copy(source, target)
        self.states.release(source)
        self._move_offset(source, target)

    def store_session(self, slot: int, session: str, tokens: tuple[int, ...]) -> None:
        self.cache.store(self._sequences[slot], tokens, states=self.states.read(slot, len(tokens)))

    def read_columns(self, slot: int, length: int) -> Columns:
        return self.cache.read_columns(self._sequences[slot], length)

    def reset_prefix_cache(self) -> None:
        self._drop_ahead()
        self.cache.tree.clear()
