"""Continuous batching: requests join and leave the running batch at every token.

One step admits waiting requests into free slots (a prompt shared by several requests is read once) and then decodes one token for every
running request. The event loop runs between steps, so environments work while other requests generate. Scheduling depends only on the order
of requests, never on a clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.generation.base import Completion, Pacer, RequestTooLong
from strop.generation.torch.model_runner import CachedRunner, ModelRunner, RecomputeRunner, SlotPrompt
from strop.generation.torch.sampler import sample_tokens
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.network import Network
from strop.sampling import Sampling, pad_kept_tokens, uniform

log = logging.getLogger(__name__)

TokenListener = Callable[[int, float], object]  # called with each sampled token and its log-probability


@dataclass(eq=False)
class _Request:
    """One request and the tokens sampled so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str
    limit: int  # maximum number of new tokens
    done: asyncio.Future[Completion]
    on_token: TokenListener | None = None
    priority: bool = False  # goes before the waiting requests, and starts even while they are paused
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)  # for each token the [k] ids it was sampled from, if recorded

    @property
    def position(self) -> int:
        """Position of the last sampled token."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass
class TokenCounters:
    """Cumulative token counts since the engine was created. Differences of two readings give rates."""

    queried_tokens: int = 0  # prompt tokens of all requests
    prompt_tokens: int = 0  # prompt tokens that were computed; the others were cached
    sampled_tokens: int = 0
    decode_steps: int = 0


class TorchEngine:
    """The embedded generator. Serves requests in this process, on the event loop of the caller."""

    def __init__(self, runner: ModelRunner, tokenizer: Any, *, stop_ids: Sequence[int], prefill_tokens: int = 4096) -> None:
        """``stop_ids`` end every request; ``prefill_tokens`` limits the prompt tokens computed between two decoding steps."""
        self.runner = runner
        self.kernels = runner.kernels if isinstance(runner, CachedRunner) else None  # to sample with
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.prefill_tokens = prefill_tokens
        self.version = 0
        self.counters = TokenCounters()
        self.pacer: Pacer | None = None  # of a run whose events are ordered by the engine's steps
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._paused = True  # no request starts; until the first publish
        self._frozen = False  # running requests are suspended too
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", on_token: TokenListener | None = None
    ) -> Completion:
        """Sample one completion. ``on_token`` is called as its tokens are sampled, to stream them."""
        return await self._submit(prompt, sampling, seed, session, on_token)

    async def generate_with_priority(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> Completion:
        """Generate before all waiting requests, even while the engine is paused. Suspended requests continue."""
        self._frozen = False
        return await self._submit(prompt, sampling, seed, priority=True)

    async def _submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        session: str = "",
        on_token: TokenListener | None = None,
        *,
        priority: bool = False,
    ) -> Completion:
        if self._failure is not None:
            raise RuntimeError("the embedded engine has stopped") from self._failure
        if not len(prompt):
            raise ValueError("a request needs a prompt of at least one token; this one is empty")
        room = self.runner.length - len(prompt)
        if room < 1:
            raise RequestTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room in a sequence of {self.runner.length}; raise "
                "policy.max_total_sequence_length, or lower data.max_input_seq_length to drop such prompts"
            )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(tuple(prompt), sampling, seed, session, min(sampling.max_new_tokens, room), done, on_token, priority)
        if priority:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve(), name="strop-torch-engine")
        self._wake.set()
        return await done

    async def drain(self) -> None:
        self._paused, self._frozen = True, False
        self._wake.set()
        await self._idle.wait()
        self.runner.deactivate()

    def freeze(self) -> None:
        """Start no requests and suspend the running ones, with their keys and values. The weights may then change."""
        self._paused = self._frozen = True

    def resume(self, version: int) -> None:
        self.activate_version(version)
        self.resume_requests()

    def activate_version(self, version: int) -> None:
        """Switch to the module's current weights, which are those of ``version``."""
        self.version = version
        self.runner.activate()

    def resume_requests(self) -> None:
        self._paused = self._frozen = False
        self._wake.set()

    def recompute_running(self) -> None:
        """Recompute keys and values of the running requests with the current weights."""
        for slot, request in enumerate(self._running):
            self.runner.prefill([SlotPrompt(slot, (*request.prompt, *request.tokens[:-1]))])

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine, or None."""
        return self._failure

    @property
    def load(self) -> int:
        """Requests that run or wait, without those that their callers cancelled."""
        return sum(not request.done.done() for request in (*self._running, *self._waiting))

    @property
    def room(self) -> int:
        """How many more requests would run at once."""
        return max(0, self.runner.slots - len(self._running) - len(self._waiting))

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None
        self._fail(RuntimeError("the embedded engine was closed"))
        self.runner.deactivate()

    async def _serve(self) -> None:
        try:
            while True:
                if self._frozen or not (self._running or self._can_admit()):
                    if not self._running:
                        self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    await asyncio.sleep(0)  # let other tasks that were woken at the same time submit their requests first
                    continue
                self._idle.clear()
                if self.pacer is None:
                    self._step()
                else:
                    await self.pacer.pace(self._step)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _can_admit(self) -> bool:
        """Whether the next waiting request may start."""
        return bool(self._waiting) and (not self._paused or self._waiting[0].priority)

    def _fail(self, error: Exception) -> None:
        """Stop the engine and fail all its requests, so that no caller keeps waiting for them."""
        self._failure = error
        for request in (*self._running, *self._waiting):
            if not request.done.done():
                request.done.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._idle.set()

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if self._running:
            self._decode()

    def _admit(self) -> None:
        """Fill free slots from the queue, in order, within the prompt tokens allowed per step."""
        prompts: list[SlotPrompt] = []
        seen: set[tuple[int, ...]] = set()
        first, read = len(self._running), 0
        while self._can_admit() and len(self._running) < self.runner.slots:
            request = self._waiting[0]
            prompt = SlotPrompt(len(self._running), request.prompt, request.session)
            cost = 0 if request.prompt in seen else self.runner.count_unread(prompt)
            if read and read + cost > self.prefill_tokens:
                break
            read += cost
            self.counters.queried_tokens += len(request.prompt)
            seen.add(request.prompt)
            prompts.append(prompt)
            self._running.append(self._waiting.popleft())
        if not prompts:
            return
        logits = self.runner.prefill(prompts)
        self.counters.prompt_tokens += read
        self._append(self._running[first:], logits)

    def _decode(self) -> None:
        running = list(self._running)
        logits = self.runner.decode([request.tokens[-1] for request in running], [request.position for request in running])
        self.counters.decode_steps += 1
        self._append(running, logits)

    def _append(self, requests: list[_Request], logits: torch.Tensor) -> None:
        """Sample the next token of each request and finish the requests that end with it."""
        uniforms = [uniform(request.seed, len(request.tokens)) for request in requests]
        sampled = sample_tokens(logits, [request.sampling for request in requests], uniforms, self.kernels)
        columns = (sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.entropies.tolist())
        for request, token, logprob, entropy in zip(requests, *columns, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            request.versions.append(self.version)
            if request.on_token is not None:
                request.on_token(token, logprob)
        for row, tokens in sampled.kept.items():
            requests[row].kept.append(tokens)
        self.counters.sampled_tokens += len(requests)
        for request in requests:
            stopped = self._hits_stop(request)
            if stopped or len(request.tokens) >= request.limit:
                self._finish(request, stopped)

    def _hits_stop(self, request: _Request) -> bool:
        last = request.tokens[-1]
        if last in self.stop_ids or last in request.sampling.stop_token_ids:
            return True
        if not request.sampling.stop_strings:
            return False
        # A token has at least one byte, so a stop string starts at most as many tokens back as it has bytes.
        reach = max(len(text.encode()) for text in request.sampling.stop_strings) + 4
        tail = self.tokenizer.decode(request.tokens[-reach:])
        return any(text in tail for text in request.sampling.stop_strings)

    def _finish(self, request: _Request, stopped: bool) -> None:
        """Return the completion, and move the last running request into the freed slot."""
        slot = self._running.index(request)
        if not request.done.done():
            request.done.set_result(
                Completion(
                    tokens=torch.tensor(request.tokens, dtype=torch.int64),
                    logprobs=torch.tensor(request.logprobs, dtype=torch.float32),
                    versions=torch.tensor(request.versions, dtype=torch.int32),
                    text=self.tokenizer.decode(request.tokens, skip_special_tokens=True),
                    stopped=stopped,
                    entropies=torch.tensor(request.entropies, dtype=torch.float32) if request.sampling.entropy else None,
                    kept=pad_kept_tokens(request.kept) if request.sampling.records_sampling_mask else None,
                    routes=self.runner.read_routes(slot, request.position),
                )
            )
        if request.session:
            self.runner.store_session(slot, request.session, (*request.prompt, *request.tokens[:-1]))
        last = len(self._running) - 1
        if slot != last:
            self.runner.move(last, slot, self._running[last].position + 1)
            self._running[slot] = self._running[last]
        self._running.pop()

    def _drop_cancelled(self) -> None:
        """Free the slots of requests that their callers cancelled."""
        for request in [request for request in self._running if request.done.cancelled()]:
            self._finish(request, False)
        self._waiting = deque(request for request in self._waiting if not request.done.cancelled())


def make_torch_engine(
    network: Network, tokenizer: Any, config: TorchGenerationConfig, *, length: int, stop_ids: Sequence[int]
) -> TorchEngine:
    """Make an engine on a network, for sequences of up to ``length`` tokens. Raises ValueError if its KV cache is too small for one."""
    runner: ModelRunner
    if network.supports_attention_plans():
        runner = CachedRunner(network, config, length=length)
    else:
        log.warning(
            "the torch engine cannot use a KV cache and recomputes the whole sequence for every token: %s", network.fallback
        )
        runner = RecomputeRunner(network, max_slots=config.max_num_seqs, length=length)
    return TorchEngine(runner, tokenizer, stop_ids=stop_ids, prefill_tokens=config.prefill_tokens)
