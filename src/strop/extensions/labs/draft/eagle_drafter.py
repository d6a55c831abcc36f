"""Drafts of the policy's draft head (EAGLE-3), in the embedded engine.

A draft is sampled like the policy: with the request's sampling options, and with the same uniform number that the policy uses at
that token. The policy's token is then independent of the drafts, and a draft is right if both distributions map the number to
the same token: exact sampling by a coupling of the two (as in drafter-invariant speculative decoding, Daliri et al. 2024, arXiv
2408.07978). With rejection sampling (``rejection``) more drafts are kept, and tokens depend on the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.determinism import running_sums
from strop.extensions.labs.draft.eagle_config import EagleShape
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.sampler import sample_tokens
from strop.generation.torch.speculation import DraftedRequest
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits, mix_seed, uniform


def keep_or_redraw(
    logits: Tensor, draft_probs: Tensor, drafts: Tensor, samplings: Sequence[Sampling], kept_below: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the tokens and their log-probabilities under the policy, [R] each.

    Args:
        logits: [R, V], the policy's at each drafted token.
        draft_probs: [R, V], the distributions of the drafts.
        drafts: [R] int64.
        samplings: Of each row; none is greedy.
        kept_below: [R], uniform numbers that decide whether a draft is kept.
        uniforms: [R], that a token is drawn with instead.
    """
    scaled = torch.stack([filtered_logits(row[None], sampling)[0] for row, sampling in zip(logits, samplings, strict=True)])
    logs = scaled.float().log_softmax(-1)
    probs = logs.exp()
    row = torch.arange(len(drafts), device=logits.device)
    kept = kept_below * draft_probs[row, drafts] < probs[row, drafts]
    rest = (probs - draft_probs).clamp(min=0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)  # p = q except for rounding
    running = running_sums(rest.double())
    mass = torch.minimum(uniforms.double() * running[:, -1], torch.nextafter(running[:, -1], torch.zeros_like(running[:, -1])))
    redrawn = torch.searchsorted(running, mass[:, None], right=True).squeeze(1)
    tokens = torch.where(kept, drafts, redrawn)
    return tokens, logs[row, tokens]


SPAN_STEP = 64  # places


class DraftCache:
    """Keys and values [layers, rows, heads, places, D]."""

    def __init__(self, shape: EagleShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.keys = torch.zeros(shape.layers, 0, shape.kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._free: list[int] = []

    def take_row(self) -> int:
        """Return an unused row."""
        if not self._free:
            rows = self.keys.shape[1]
            self._grow(max(4, rows), 0)
            self._free = list(range(self.keys.shape[1] - 1, rows - 1, -1))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reach(self, places: int) -> None:
        """Make room for this many places in each row."""
        have = self.keys.shape[3]
        if places > have:
            self._grow(0, -(-max(places, have + have // 2) // SPAN_STEP) * SPAN_STEP - have)

    def _grow(self, rows: int, places: int) -> None:
        padding = (0, 0, 0, places, 0, 0, 0, rows)
        self.keys, self.values = F.pad(self.keys, padding), F.pad(self.values, padding)

    def copy_row(self, source: int, target: int, places: int) -> None:
        """Copy the first places of a row."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :places] = tensor[:, source, :, :places]


class DraftCachePlan:
    """Attention of w new places of each of B rows to all places up to their own; writes their keys and values."""

    def __init__(self, cache: DraftCache, rows: Tensor, places: Tensor) -> None:
        """``rows`` [B] int64, ``places`` [B, w] int64, ascending; a repeated place is written with the same values."""
        self.cache, self.rows, self.places = cache, rows, places
        self.span = int(places.max()) + 1
        self.visible = torch.arange(self.span, device=places.device) <= places[:, :, None]  # [B, w, span]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.keys[spec.layer], self.cache.values[spec.layer]
        rows, width = self.places.shape
        where = self.rows[:, None].expand(rows, width).flatten(), self.places.flatten()
        keys[where[0], :, where[1]] = key.to(keys.dtype)
        values[where[0], :, where[1]] = value.to(keys.dtype)
        grouped = query.to(keys.dtype).unflatten(0, (rows, width)).transpose(1, 2)  # [B, heads, w, D]
        attended = F.scaled_dot_product_attention(
            grouped,
            keys[self.rows, :, : self.span],
            values[self.rows, :, : self.span],
            self.visible[:, None],
            scale=spec.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(0, 1).to(query.dtype)


DRAFTS, KEEPS = 1, 2  # uses of random numbers other than the policy's own


@dataclass(eq=False)
class _Progress:
    """How much of a request the head has read."""

    row: int  # of the cache
    read: int = 0  # places read with the policy's own states

    def places(self, request: DraftedRequest) -> range:
        """The places to read: place i stands for token i + 1, whose predecessor the policy has read. At least the last one is
        read.
        """
        end = len(request.prompt) + len(request.tokens) - 1
        return range(min(self.read, end - 1), end)


@dataclass(frozen=True, eq=False)
class _Proposal:
    """A drafted token, to be kept or redrawn."""

    row: int  # of the policy's logits
    request: DraftedRequest
    index: int  # among the tokens proposed together
    token: int
    probs: Tensor  # [V], its distribution


class EagleDrafter:
    """Proposes tokens for all running requests together."""

    def __init__(self, network: Network, runner: PagedRunner, count: int, *, rejection: bool = False) -> None:
        """``count``: maximum number of proposed tokens. ``rejection``: drafts are drawn with separate random numbers, and kept or
        redrawn.
        """
        assert isinstance(network.draft, EagleHead)
        self.network, self.runner, self.head, self.count = network, runner, network.draft, count
        self.cache = DraftCache(self.head.shape, network.precision, network.device)
        self.rejection = rejection
        self._probs: list[Tensor] = []  # [B, V] per step of the latest proposals
        self._asked: list[int] = []  # slots of their rows
        self._progress: dict[DraftedRequest, _Progress] = {}

    def forget(self, request: DraftedRequest) -> None:
        """Free the memory of a request that has ended or will be read again."""
        if (progress := self._progress.pop(request, None)) is not None:
            self.cache.give_back(progress.row)

    def forget_all(self) -> None:
        for request in list(self._progress):
            self.forget(request)

    @torch.no_grad()
    def propose(self, running: Sequence[DraftedRequest], limits: Sequence[int]) -> list[list[int]]:
        """Return up to ``limits`` tokens for each request, in the order of the slots."""
        self._probs.clear()
        asking = self._asked = [slot for slot, limit in enumerate(limits) if limit > 0]
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
        """Read the prompts of new requests, shared prompts only once."""
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
        """Read the tokens that the policy has read since the last call; return the head's states at each request's last token,
        [B, H].
        """
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
        """Run the head: rows [B], places and tokens [B, w], states [B, w, H] -> output states [B, w, H]."""
        plan = DraftCachePlan(self.cache, rows, places)
        with self.network.autocast():
            embedded = self.network.embed_tokens(tokens.flatten())
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
        samplings = [request.sampling for request in requests]
        if self.rejection:
            rows = [filtered_logits(row[None], sampling)[0] for row, sampling in zip(logits, samplings, strict=True)]
            self._probs.append(torch.stack(rows).float().softmax(-1))
        uniforms = [uniform(self._seed(request, DRAFTS), len(request.tokens) + step) for request in requests]
        return sample_tokens(logits, samplings, uniforms).tokens

    def _seed(self, request: DraftedRequest, use: int) -> int:
        """Return the seed of a request's numbers: the policy's own, or with rejection a different one, because the numbers must
        be independent.
        """
        return mix_seed(request.seed, use) if self.rejection else request.seed

    def verify(
        self, running: Sequence[DraftedRequest], drafts: Sequence[list[int]], logits: Tensor
    ) -> dict[int, tuple[int, float]]:
        """Keep or redraw the latest proposals, given the policy's ``logits`` [T, V]: return the token and its log-probability by
        row.

        Greedy requests are left out: their drafts are either right or wrong.
        """
        asked = []
        first = 0
        for slot, (request, draft) in enumerate(zip(running, drafts, strict=True)):
            if draft and not request.sampling.greedy:
                place = self._asked.index(slot)
                asked += [
                    _Proposal(first + index, request, index, token, self._probs[index][place])
                    for index, token in enumerate(draft)
                ]
            first += len(draft) + 1
        if not asked:
            return {}
        device = logits.device
        kept = [uniform(self._seed(each.request, KEEPS), len(each.request.tokens) + each.index) for each in asked]
        drawn = [uniform(each.request.seed, len(each.request.tokens) + each.index) for each in asked]
        tokens, logprobs = keep_or_redraw(
            logits[[each.row for each in asked]],
            torch.stack([each.probs for each in asked]),
            torch.tensor([each.token for each in asked], device=device),
            [each.request.sampling for each in asked],
            torch.tensor(kept, device=device),
            torch.tensor(drawn, device=device),
        )
        return {each.row: found for each, found in zip(asked, zip(tokens.tolist(), logprobs.tolist(), strict=True), strict=True)}


def _token_at(request: DraftedRequest, position: int) -> int:
    prompt = len(request.prompt)
    return request.prompt[position] if position < prompt else request.tokens[position - prompt]
