"""Drafts of the policy's draft head (EAGLE-3), in the embedded engine.

A draft is sampled as the policy will be: with the request's own sampling options, and with the uniform number that the policy inverts its
distribution with at the same token. The policy's token is then what it would be without a draft, whoever drafts and however well, and a
draft is right where both distributions put the number on the same token: exact sampling by a coupling of the two (as in drafter-invariant
speculative decoding, Daliri et al. 2024, arXiv 2408.07978), where rejection sampling (Leviathan et al. 2023, arXiv 2211.17192) would let
tokens depend on the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strop.generation.torch.drafting.draft_cache import DraftCache, DraftCachePlan
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.sampler import sample_tokens
from strop.models.network import Network
from strop.sampling import Sampling, uniform


class DraftedRequest(Protocol):
    """What is read of a running request."""

    prompt: tuple[int, ...]
    tokens: list[int]
    sampling: Sampling
    seed: int


@dataclass(eq=False)
class _Progress:
    """How far the head has read a request."""

    row: int  # of the cache
    read: int = 0  # places with the policy's own states

    def places(self, request: DraftedRequest) -> range:
        """The places to read: place i stands for token i + 1, whose predecessor the policy has read. The last one at least is read."""
        end = len(request.prompt) + len(request.tokens) - 1
        return range(min(self.read, end - 1), end)


class EagleDrafter:
    """Proposes tokens for the running requests, all together."""

    def __init__(self, network: Network, runner: PagedRunner, count: int) -> None:
        """``count``: tokens that are proposed at most."""
        assert network.draft is not None
        self.network, self.runner, self.head, self.count = network, runner, network.draft, count
        self.cache = DraftCache(self.head.shape, network.precision, network.device)
        self._progress: dict[DraftedRequest, _Progress] = {}

    def forget(self, request: DraftedRequest) -> None:
        """Free what is held for a request, which has ended or will be read again."""
        if (progress := self._progress.pop(request, None)) is not None:
            self.cache.give_back(progress.row)

    def forget_all(self) -> None:
        for request in list(self._progress):
            self.forget(request)

    @torch.no_grad()
    def propose(self, running: Sequence[DraftedRequest], limits: Sequence[int]) -> list[list[int]]:
        """Return up to ``limits`` tokens for each request, in the order of the slots."""
        asking = [slot for slot, limit in enumerate(limits) if limit > 0]
        drafts: list[list[int]] = [[] for _ in running]
        if not asking:
            return drafts
        requests = [running[slot] for slot in asking]
        self._begin(requests)
        longest = max(len(request.prompt) + len(request.tokens) for request in requests)
        self.cache.reach(longest + self.count)
        self._read_prompts(asking, requests)
        hidden = self._read_new(asking, requests)
        rows = torch.tensor([self._progress[request].row for request in requests], device=hidden.device)
        ends = torch.tensor([self._progress[request].read for request in requests], device=hidden.device)
        steps = min(self.count, max(limits))
        for step in range(steps):
            tokens = self._sample(hidden, requests, step)
            for slot, token in zip(asking, tokens.tolist(), strict=True):
                if len(drafts[slot]) < limits[slot]:
                    drafts[slot].append(token)
            if step + 1 < steps:
                hidden = self._run(rows, (ends + step)[:, None], tokens[:, None], hidden[:, None])[:, -1]
        return drafts

    def _begin(self, requests: Sequence[DraftedRequest]) -> None:
        for request in requests:
            if request not in self._progress:
                self._progress[request] = _Progress(self.cache.take_row())

    def _read_prompts(self, slots: Sequence[int], requests: Sequence[DraftedRequest]) -> None:
        """Read the prompts of new requests, each once however many share it."""
        first: dict[tuple[int, ...], _Progress] = {}
        for slot, request in zip(slots, requests, strict=True):
            progress, length = self._progress[request], len(request.prompt) - 1
            if progress.read or length < 1:
                continue
            if request.prompt in first:
                self.cache.copy_row(first[request.prompt].row, progress.row, length)
            else:
                self._read_row(progress, request.prompt[1:], self.runner.read_states(slot, 0, length))
                first[request.prompt] = progress
            progress.read = length

    def _read_row(self, progress: _Progress, tokens: Sequence[int], states: Tensor) -> None:
        device = states.device
        places = torch.arange(len(tokens), device=device)[None]
        self._run(torch.tensor([progress.row], device=device), places, torch.tensor([tokens], device=device), states[None])

    def _read_new(self, slots: Sequence[int], requests: Sequence[DraftedRequest]) -> Tensor:
        """Read what the policy has read since the last call; return the head's states at each request's last token, [B, H]."""
        device = self.network.device
        todo = [self._progress[request].places(request) for request in requests]
        width = max(map(len, todo))
        places = torch.tensor(
            [[min(each.start + index, each.stop - 1) for index in range(width)] for each in todo], device=device
        )
        tokens = [
            [_token_at(request, place + 1) for place in row] for request, row in zip(requests, places.tolist(), strict=True)
        ]
        states = []
        for slot, each in zip(slots, todo, strict=True):
            found = self.runner.read_states(slot, each.start, each.stop)
            states.append(torch.cat([found, found[-1:].expand(width - len(found), -1)]))
        rows = torch.tensor([self._progress[request].row for request in requests], device=device)
        hidden = self._run(rows, places, torch.tensor(tokens, device=device), torch.stack(states))
        for request, each in zip(requests, todo, strict=True):
            self._progress[request].read = each.stop
        return hidden[:, -1]

    def _run(self, rows: Tensor, places: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        """Run the head: rows [B], places and tokens [B, w], states [B, w, H] -> its own states [B, w, H]."""
        plan = DraftCachePlan(self.cache, rows, places)
        with self.network.autocast():
            embedded = self.network.model.get_input_embeddings()(tokens.flatten())
            hidden = self.head(embedded, states.flatten(0, 1), places.flatten(), plan)
        output: Tensor = hidden.unflatten(0, places.shape)
        return output

    def _sample(self, hidden: Tensor, requests: Sequence[DraftedRequest], step: int) -> Tensor:
        """Sample the head's next token of each request from its states [B, H], [B] int64."""
        with self.network.autocast():
            logits = self.head.lm_head(self.head.norm(hidden))
        if self.head.reduced:
            full = logits.new_full((len(logits), self.head.shape.vocabulary), float("-inf"))
            full[:, self.head.token_ids] = logits
            logits = full
        uniforms = [uniform(request.seed, len(request.tokens) + step) for request in requests]
        return sample_tokens(logits, [request.sampling for request in requests], uniforms).tokens


def _token_at(request: DraftedRequest, position: int) -> int:
    prompt = len(request.prompt)
    return request.prompt[position] if position < prompt else request.tokens[position - prompt]
