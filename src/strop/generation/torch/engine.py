"""Continuous batching: requests join and leave the running batch at every token.

One step admits waiting requests into free slots (their prompts are read once, also when many share one) and then decodes one token for
every running request. Between steps the event loop runs, so environments work while others generate. Everything is decided by the order
of requests alone, never by a clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.generation.base import Completion, RequestTooLong
from strop.generation.torch.draw import draw
from strop.generation.torch.runner import Prompt, Runner
from strop.sampling import Sampling, pad_kept, uniform


@dataclass(eq=False)
class _Request:
    """One request and what was sampled for it so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str
    limit: int  # new tokens at most
    done: asyncio.Future[Completion]
    ahead: bool = False  # of those that wait, and begun while they are held
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)  # of each token the [k] it was drawn from, if that is recorded

    @property
    def position(self) -> int:
        """Where the token sampled last stands."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass
class EngineCounters:
    """What the engine has done since it was made; differences of two readings make rates."""

    asked_tokens: int = 0  # of prompts
    prompt_tokens: int = 0  # that were read: the others were in memory
    sampled_tokens: int = 0
    decode_steps: int = 0


class TorchEngine:
    """The embedded generator. Requests are served in this process, on the event loop that asks."""

    def __init__(self, runner: Runner, tokenizer: Any, *, stop_ids: Sequence[int], prefill_tokens: int = 4096) -> None:
        """``stop_ids`` end every request; ``prefill_tokens`` bounds the prompt tokens read between two decoding steps."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.prefill_tokens = prefill_tokens
        self.version = 0
        self.counters = EngineCounters()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._held = True  # nothing is begun, until the first publish
        self._frozen = False  # what runs stands still too
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        return await self._ask(prompt, sampling, seed, session)

    async def answer_ahead(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> Completion:
        """The same ahead of the requests that wait, and while they are held. Those that stand still go on."""
        self._frozen = False
        return await self._ask(prompt, sampling, seed, ahead=True)

    async def _ask(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, session: str = "", *, ahead: bool = False
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
        request = _Request(tuple(prompt), sampling, seed, session, min(sampling.max_new_tokens, room), done, ahead)
        if ahead:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve(), name="strop-torch-engine")
        self._wake.set()
        return await done

    async def drain(self) -> None:
        self._held, self._frozen = True, False
        self._wake.set()
        await self._idle.wait()
        self.runner.deactivate()

    def freeze(self) -> None:
        """Begin nothing and leave what runs where it is, with what it has read; the weights may then change under it."""
        self._held = self._frozen = True

    def resume(self, version: int) -> None:
        self.take_up(version)
        self.go_on()

    def take_up(self, version: int) -> None:
        """The module's weights are those of ``version`` now."""
        self.version = version
        self.runner.activate()

    def go_on(self) -> None:
        self._held = self._frozen = False
        self._wake.set()

    def read_again(self) -> None:
        """What runs reads all it has with the weights of now, and goes on from there."""
        for slot, request in enumerate(self._running):
            self.runner.prefill([Prompt(slot, (*request.prompt, *request.tokens[:-1]))])

    @property
    def failure(self) -> BaseException | None:
        """What ended it, if it has ended."""
        return self._failure

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
                if self._frozen or not (self._running or self._may_begin()):
                    if not self._running:
                        self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    await asyncio.sleep(0)  # let everyone who was woken with us hand in their requests first
                    continue
                self._idle.clear()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _may_begin(self) -> bool:
        """Whether the next of those that wait may."""
        return bool(self._waiting) and (not self._held or self._waiting[0].ahead)

    def _fail(self, error: Exception) -> None:
        """Nobody waits for an engine that has stopped."""
        self._failure = error
        for request in (*self._running, *self._waiting):
            if not request.done.done():
                request.done.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._idle.set()

    def _step(self) -> None:
        self._forget_cancelled()
        self._admit()
        if self._running:
            self._decode()

    def _admit(self) -> None:
        """Fill free slots from the queue, in order, within the prompt tokens of one step."""
        prompts: list[Prompt] = []
        seen: set[tuple[int, ...]] = set()
        first, read = len(self._running), 0
        while self._may_begin() and len(self._running) < self.runner.slots:
            request = self._waiting[0]
            prompt = Prompt(len(self._running), request.prompt, request.session)
            cost = 0 if request.prompt in seen else self.runner.unread(prompt)
            if read and read + cost > self.prefill_tokens:
                break
            read += cost
            self.counters.asked_tokens += len(request.prompt)
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
        """Draw the next token of each request and finish those that end with it."""
        uniforms = [uniform(request.seed, len(request.tokens)) for request in requests]
        drawn = draw(logits, [request.sampling for request in requests], uniforms)
        columns = (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.entropies.tolist())
        for request, token, logprob, entropy in zip(requests, *columns, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            request.versions.append(self.version)
        for row, tokens in drawn.kept.items():
            requests[row].kept.append(tokens)
        self.counters.sampled_tokens += len(requests)
        for request in requests:
            stopped = self._stopped(request)
            if stopped or len(request.tokens) >= request.limit:
                self._finish(request, stopped)

    def _stopped(self, request: _Request) -> bool:
        last = request.tokens[-1]
        if last in self.stop_ids or last in request.sampling.stop_token_ids:
            return True
        if not request.sampling.stop_strings:
            return False
        # A token stands for at least one byte: a stop string begins at most as many tokens back as it has bytes.
        reach = max(len(text.encode()) for text in request.sampling.stop_strings) + 4
        tail = self.tokenizer.decode(request.tokens[-reach:])
        return any(text in tail for text in request.sampling.stop_strings)

    def _finish(self, request: _Request, stopped: bool) -> None:
        """Answer, and close the gap in the running batch: its last request moves into the freed slot."""
        if not request.done.done():
            request.done.set_result(
                Completion(
                    tokens=torch.tensor(request.tokens, dtype=torch.int64),
                    logprobs=torch.tensor(request.logprobs, dtype=torch.float32),
                    versions=torch.tensor(request.versions, dtype=torch.int32),
                    text=self.tokenizer.decode(request.tokens, skip_special_tokens=True),
                    stopped=stopped,
                    entropies=torch.tensor(request.entropies, dtype=torch.float32) if request.sampling.entropy else None,
                    kept=pad_kept(request.kept) if request.sampling.records else None,
                )
            )
        slot = self._running.index(request)
        if request.session:
            self.runner.keep(slot, request.session, (*request.prompt, *request.tokens[:-1]))
        last = len(self._running) - 1
        if slot != last:
            self.runner.move(last, slot, self._running[last].position + 1)
            self._running[slot] = self._running[last]
        self._running.pop()

    def _forget_cancelled(self) -> None:
        """A caller that went away frees its slot."""
        for request in [request for request in self._running if request.done.cancelled()]:
            self._finish(request, False)
        self._waiting = deque(request for request in self._waiting if not request.done.cancelled())
