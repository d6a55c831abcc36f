"""Continuous batching: requests join and leave the running batch at every token.

One step admits waiting requests into free slots (a prompt shared by several requests is read once) and then decodes one token for every
running request, or several where drafts of them turn out right. A prompt longer than the limit of a step is read in parts,
alongside decoding. If memory runs short, the request admitted last is preempted: it frees its memory, waits, and is read again.
The event loop runs between steps, so environments work while other requests generate. Scheduling depends only on the order of
requests, never on a clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch

from strop.columns import Columns
from strop.generation.base import Completion, check_request
from strop.generation.quantized_rollouts import EmulatedQuantization
from strop.generation.torch.image_tokens import PromptImages
from strop.generation.torch.model_runner import (
    CachedRunner,
    ModelRunner,
    PlanRunner,
    RecomputeRunner,
    SlotPrompt,
    cache_capacity,
    infer_cache_shape,
)
from strop.generation.torch.paged.paged_cache import choose_page, split_memory
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.sampler import SampledTokens, sample_tokens
from strop.generation.torch.speculation import Drafter, PromptLookup, PromptSamples
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.models.network import Network
from strop.models.network_parts import FixedOrder
from strop.monitoring.process_profile import RECORDER
from strop.sampling import KEPT, Sampling, pad_kept_tokens, uniform
from strop.types import PromptImage

log = logging.getLogger(__name__)

TokenListener = Callable[[int, float], object]  # called with each sampled token and its log-probability


@dataclass(eq=False)
class _Request:
    """One request and the tokens sampled so far."""

    prompt: tuple[int, ...]  # with ids below 0 for the rows of its images
    sampling: Sampling
    seed: int
    session: str
    limit: int  # maximum number of new tokens
    done: asyncio.Future[Completion]
    on_token: TokenListener | None = None
    priority: bool = False  # precedes the waiting requests, and starts even while they are paused
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)  # for each token, the [k] ids it was sampled from, if recorded
    lookup: PromptLookup | None = None  # with speculation
    order: int = 0  # of admission
    images: PromptImages | None = None

    @property
    def columns(self) -> Columns:
        """Return what was recorded of its tokens."""
        return {KEPT: pad_kept_tokens(self.kept)} if self.sampling.records_sampling_mask else {}

    @cached_property
    def reach(self) -> int:
        """Number of last tokens in which a stop string may begin: a token has at least one byte."""
        return max(len(text.encode()) for text in self.sampling.stop_strings) + 4

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens to read before the next one is sampled, or, if it was preempted, decoded."""
        return (*self.prompt, *self.tokens[:-1])

    def make_prompt(self, slot: int) -> SlotPrompt:
        """Return the input of a slot."""
        return SlotPrompt(slot, self.context, self.session, self.images)

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
    running_requests: int = 0  # summed over these steps, as those that wait
    waiting_requests: int = 0
    drafts: int = 0  # verified drafts, of one token or more
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that were sampled
    preemptions: int = 0  # preempted requests, which were read again
    queried_images: int = 0  # images of the prompts of all requests
    encoded_images: int = 0  # images that the vision tower computed; the others were cached


class TorchEngine:
    """The embedded generator. Serves requests in this process, on the event loop of the caller."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        prefill_tokens: int = 4096,
        drafts: int = 0,
        drafter: Drafter | None = None,
        exact: FixedOrder | None = None,
    ) -> None:
        """Create an engine that waits for its first weights.

        Args:
            runner: Runs the model.
            tokenizer: Decodes completions.
            stop_ids: End every request.
            prefill_tokens: Limits the prompt tokens computed between two decoding steps.
            drafts: Tokens looked up ahead for each request; 0 decodes one token at a time. The runner must verify drafts.
            drafter: Proposes tokens instead of looking them up.
            exact: Computes log-probabilities in the order of additions of the learner.
        """
        self.exact = exact
        self.runner = runner
        network = getattr(runner, "network", None)  # a runner that replays recorded tokens has none
        self._vocabulary = None if network is None else network.model.get_input_embeddings().weight.shape[0]
        self.kernels = runner.kernels if isinstance(runner, PlanRunner) else None  # to sample with
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.prefill_tokens = prefill_tokens
        self.drafts = drafts
        self.drafter = drafter
        self.version = 0
        self.counters = TokenCounters()
        self._collected = TokenCounters()  # at the last ``collect_metrics``
        self._samples = PromptSamples()  # for looked-up drafts
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._paused = True  # no request starts; until the first publish
        self._frozen = False  # running requests are suspended too
        self._crowded = False  # memory ran short: nothing starts until a request has ended
        self._admitted = 0  # requests so far
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        seed: int,
        session: str = "",
        images: Sequence[PromptImage] = (),
        on_token: TokenListener | None = None,
    ) -> Completion:
        """Sample one completion. ``on_token`` is called as its tokens are sampled, to stream them.

        Raises InvalidRequest for a request that cannot be served, and ValueError for images that the model cannot read.
        """
        return await self._submit(prompt, sampling, seed, session, on_token, images=images)

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
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        if self._failure is not None:
            raise RuntimeError("the embedded engine has stopped") from self._failure
        check_request(prompt, sampling, seed, session, length=self.runner.length, vocabulary=self._vocabulary)
        room = self.runner.length - len(prompt)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(tuple(prompt), sampling, seed, session, min(sampling.max_new_tokens, room), done, on_token, priority)
        if images:
            request.prompt, request.images = self._mark_images(prompt, images)
        if priority:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve(), name="strop-torch-engine")
        self._wake.set()
        return await done

    def _mark_images(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> tuple[tuple[int, ...], PromptImages]:
        if self.runner.images is None:
            raise ValueError(
                f"a request has {len(images)} images, and {type(self.runner.network.model).__name__} "
                f"{'reads text only' if self.runner.network.vision is None else 'is recomputed at every token, with text only'}; leave out "
                "the images, or set policy.model_name to a vision-language model whose attention follows a plan (docs/images.md)"
            )
        self.counters.queried_images += len(images)
        return self.runner.images.mark(prompt, images)

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
        """Switch to the module's current weights, as ``version``."""
        self.version = version
        self.runner.activate()

    def resume_requests(self) -> None:
        self._paused = self._frozen = False
        self._wake.set()

    def recompute_running(self) -> None:
        """Recompute keys and values of the running requests with the current weights."""
        if self.drafter is not None:
            self.drafter.forget_all()
        running, self._running = self._running, []
        for slot in reversed(range(len(running))):
            self.runner.release(slot)
        for request in running:
            prompt = replace(request.make_prompt(len(self._running)), session="")
            if self.runner.reserve(prompt):
                self.runner.prefill([prompt])
                self._running.append(request)
            else:
                self._wait_again(request)

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine, or None."""
        return self._failure

    @property
    def load(self) -> int:
        """Number of requests that run or wait, without cancelled ones."""
        return sum(not request.done.done() for request in (*self._running, *self._waiting))

    def collect_metrics(self) -> dict[str, float]:
        """Return what requests, speculation and preemption were since the previous call; nothing if there were none."""
        counts, last = self.counters, self._collected
        self._collected = replace(counts)
        found = {}
        if drafted := counts.drafted_tokens - last.drafted_tokens:
            accepted = counts.accepted_tokens - last.accepted_tokens
            found["generation/acceptance_rate"] = accepted / drafted
            found["generation/tokens_per_draft"] = 1 + accepted / (counts.drafts - last.drafts)
        if preempted := counts.preemptions - last.preemptions:
            found["generation/preemptions"] = float(preempted)
        if steps := counts.decode_steps - last.decode_steps:
            found["generation/running_requests"] = (counts.running_requests - last.running_requests) / steps
            found["generation/waiting_requests"] = (counts.waiting_requests - last.waiting_requests) / steps
        return found

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
                    await asyncio.sleep(0)  # let other tasks woken at the same time submit their requests first
                    continue
                self._idle.clear()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _can_admit(self) -> bool:
        """Whether the next waiting request may start."""
        if not self._waiting or (self._crowded and self._running and not self._waiting[0].priority):
            return False
        return not self._paused or self._waiting[0].priority or bool(self._waiting[0].tokens)

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
            with RECORDER.span("engine", "decode", self._describe_running() if RECORDER.is_recording else ""):
                self._decode()

    def _describe_running(self) -> str:
        """Describe the input of a decoding step, for the profile of a training step; with drafts it is not known in advance."""
        attended = sum(request.position + 1 for request in self._running)
        return "" if self.drafts or self.drafter is not None else f"{len(self._running):,} sequences, {attended:,} tokens"

    def _admit(self) -> None:
        """Fill free slots from the queue, in order, within the prompt tokens allowed per step and the free memory."""
        prompts: list[SlotPrompt] = []
        seen: set[tuple[int, ...]] = set()
        read = 0
        while self._can_admit() and len(self._running) < self.runner.slots:
            request = self._waiting[0]
            prompt = request.make_prompt(len(self._running))
            cost = 0 if prompt.tokens in seen else self.runner.count_unread(prompt)
            if read + cost > self.prefill_tokens and (prompts or self._read_ahead(prompt)):
                break
            if not self.runner.reserve(prompt):
                if not prompts and not self._make_way(request):
                    continue
                break
            read += cost
            seen.add(prompt.tokens)
            prompts.append(prompt)
            self._start(self._waiting.popleft())
        if prompts:
            self.counters.prompt_tokens += read
            with RECORDER.span("engine", "prefill"):
                self._prefill(prompts)

    def _read_ahead(self, prompt: SlotPrompt) -> bool:
        """Read a part of a prompt that is too long for one step. Return whether there was one to read."""
        read = self.runner.read_ahead(prompt, self.prefill_tokens)
        self.counters.prompt_tokens += read
        return read > 0

    def _start(self, request: _Request) -> None:
        self.counters.queried_tokens += 0 if request.tokens else len(request.prompt)
        self._admitted += 1
        request.order = self._admitted
        self._running.append(request)

    def _prefill(self, prompts: list[SlotPrompt]) -> None:
        """Read the prompts of the most recently started requests, and sample a token for each, unless it was preempted and has
        one.
        """
        logits = self.runner.prefill(prompts)
        if any(prompt.images for prompt in prompts) and self.runner.images is not None:
            self.counters.encoded_images = self.runner.images.encoded
        started = self._running[-len(prompts) :]
        new = [index for index, request in enumerate(started) if not request.tokens]
        if new:
            self._append([started[index] for index in new], logits if len(new) == len(started) else logits[new])

    def _make_way(self, request: _Request) -> bool:
        """Handle too little memory for the first waiting request. With priority, it takes the memory of the newest running one.

        Return False if the request failed, because even the whole cache is too small for it.
        """
        if not self._running:
            self._waiting.popleft()
            self._abandon(
                request,
                RuntimeError(
                    f"the key-value cache has no room for a sequence of {len(request.context)} tokens although nothing else is running"
                ),
            )
            return False
        if request.priority:
            self._waiting.popleft()
            self._preempt()
            self._waiting.appendleft(request)
        return True

    def _abandon(self, request: _Request, error: Exception) -> None:
        """Fail a request that cannot be served, and free its slot; the others go on."""
        if not request.done.done():
            request.done.set_exception(error)
        if request in self._running:
            self._free_slot(self._running.index(request))
            self._crowded = False

    def _preempt(self) -> None:
        """Preempt the request admitted last. It waits before all others, and is read again."""
        request = max(self._running, key=lambda request: (not request.priority, request.order))
        self._free_slot(self._running.index(request))
        self._wait_again(request)
        self._crowded = True

    def _wait_again(self, request: _Request) -> None:
        self.counters.preemptions += 1
        self._waiting.appendleft(request)

    def _decode(self) -> None:
        drafts = self._draft_all()
        while not self.runner.extend([request.position + 1 + len(d) for request, d in zip(self._running, drafts, strict=True)]):
            self._preempt()
            drafts = self._draft_all()
        running = list(self._running)
        positions = [request.position for request in running]
        if any(drafts):
            rows = [[request.tokens[-1], *draft] for request, draft in zip(running, drafts, strict=True)]
            logits = self.runner.decode_drafts(rows, positions)
        else:
            logits = self.runner.decode([request.tokens[-1] for request in running], positions)
        self.counters.decode_steps += 1
        self.counters.running_requests += len(running)
        self.counters.waiting_requests += len(self._waiting)
        self._append(running, logits, drafts)

    def _draft_all(self) -> list[list[int]]:
        """Propose possible next tokens for each running request."""
        if self.drafter is None:
            return [self._look_up(request, self._room_for_drafts(request, self.drafts)) for request in self._running]
        return self.drafter.propose(self._running, [self._room_for_drafts(each, self.drafter.count) for each in self._running])

    @staticmethod
    def _room_for_drafts(request: _Request, count: int) -> int:
        return min(count, request.limit - len(request.tokens) - 1)

    def _look_up(self, request: _Request, count: int) -> list[int]:
        if count < 1:
            return []
        if request.lookup is None:
            request.lookup = PromptLookup(self._samples.of(request.prompt), len(request.prompt))
        draft = request.lookup.draft((*request.prompt, *request.tokens), count)
        return list(takewhile(lambda token: token >= 0, draft))  # only up to image tokens

    def _append(self, requests: list[_Request], logits: torch.Tensor, drafts: Sequence[list[int]] | None = None) -> None:
        """Sample the next tokens of each request and finish the requests that end with them.

        Row by row of logits [T, V]: the token after the last one, then those after each drafted one, which count as long as the
        drafts match the sampled tokens.
        """
        drafts = drafts or [[] for _ in requests]
        rows = [(request, index) for request, draft in zip(requests, drafts, strict=True) for index in range(len(draft) + 1)]
        uniforms = [uniform(request.seed, len(request.tokens) + index) for request, index in rows]
        samplings = [request.sampling for request, _ in rows]
        sampled = sample_tokens(logits, samplings, uniforms, kernels=self.kernels, exact=self.exact)
        columns = sampled.rows()
        if self.drafter is not None and self.drafter.rejection and any(drafts):
            for row, (token, logprob) in self.drafter.verify(requests, drafts, logits).items():
                columns[row] = (token, logprob, columns[row][2])
        first = 0
        for request, draft in zip(requests, drafts, strict=True):
            try:
                self._take_tokens(request, draft, columns[first : first + len(draft) + 1], sampled, first)
            except Exception as error:  # of its stop strings, its decoded text, or its token listener
                self._abandon(request, error)
            first += len(draft) + 1

    def _take_tokens(
        self, request: _Request, draft: list[int], columns: list[tuple[int, float, float]], sampled: SampledTokens, first: int
    ) -> None:
        """Append the sampled tokens up to the first that differs from the draft, and finish the request if one of them ends it."""
        self.counters.drafts += bool(draft)
        self.counters.drafted_tokens += len(draft)
        for index, (token, logprob, entropy) in enumerate(columns):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"token {len(request.tokens)} of a completion has the log-probability {logprob}: the model's logits are not finite. "
                    "Either its weights are not finite, or its precision overflows after this prompt; try policy.precision=float32"
                )
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            request.versions.append(self.version)
            if first + index in sampled.kept:
                request.kept.append(sampled.kept[first + index])
            self.counters.sampled_tokens += 1
            if request.on_token is not None:
                request.on_token(token, logprob)
            accepted = index < len(draft) and draft[index] == token
            self.counters.accepted_tokens += accepted
            stopped = self._hits_stop(request)
            if stopped or len(request.tokens) >= request.limit:
                return self._finish(request, stopped)
            if not accepted:
                return None

    def _hits_stop(self, request: _Request) -> bool:
        last = request.tokens[-1]
        if last in self.stop_ids or last in request.sampling.stop_token_ids:
            return True
        if not request.sampling.stop_strings:
            return False
        tail = self.tokenizer.decode(request.tokens[-request.reach :])
        return any(text in tail for text in request.sampling.stop_strings)

    def _finish(self, request: _Request, stopped: bool) -> None:
        """Return the completion, and free the slot."""
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
                    columns={**self.runner.read_columns(slot, request.position), **request.columns},
                )
            )
        if request.session:
            self.runner.store_session(slot, request.session, request.context)
        self._free_slot(slot)
        self._crowded = False

    def _free_slot(self, slot: int) -> None:
        """Free the memory of a slot, and move the last running request into it."""
        if self.drafter is not None:
            self.drafter.forget(self._running[slot])
        self.runner.release(slot)
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
    network: Network,
    tokenizer: Any,
    config: TorchGenerationConfig,
    *,
    length: int,
    stop_ids: Sequence[int],
    quantization: EmulatedQuantization | None = None,
) -> TorchEngine:
    """Create an engine on a network, for sequences of up to ``length`` tokens. Raises ValueError if its KV cache is too small for
    one.

    ``quantization``: round like an engine with low-precision weights."""
    runner = make_runner(network, config, length=length, quantization=quantization)
    drafts = config.speculative_lookup if runner.verifies_drafts else 0
    if drafts < config.speculative_lookup:
        log.warning(
            "torch_cfg.speculative_lookup needs a paged cache, which this engine does not have: it decodes one token at a time"
        )
    return TorchEngine(
        runner,
        tokenizer,
        stop_ids=stop_ids,
        prefill_tokens=config.prefill_tokens,
        drafts=drafts,
        drafter=config.make_drafter(network, runner),
        exact=network.exact,
    )


def make_runner(
    network: Network, config: TorchGenerationConfig, *, length: int, quantization: EmulatedQuantization | None = None
) -> ModelRunner:
    """Create the runner for a network and configuration, and log which one."""
    if (reason := find_cache_obstacle(network)) is not None:
        if quantization is not None:
            raise ValueError(
                f"policy.generation: found {quantization.plan.weights.name}, but this model is sampled without a KV cache by its own "
                f"modules, which do not round ({reason}); set policy.generation.backend=vllm"
            )
        log.warning("the torch engine cannot use a KV cache and recomputes the whole sequence for every token: %s", reason)
        return RecomputeRunner(network, max_slots=config.max_num_seqs, length=length)
    if _may_use_pages(network, config, length):
        paged = PagedRunner(network, config, length=length, quantization=quantization)
        if config.paged_cache or paged.rounds_as_learner:
            log.info("the torch engine's KV cache has %d pages of %d tokens", paged.cache.pool.size, paged.cache.page)
            return paged
        config = replace(config, compiled_kernels=False)  # a warning that they cannot be used was already logged
    slots = CachedRunner(network, config, length=length, quantization=quantization)
    log.info("the torch engine's KV cache has %d slots of %d tokens", slots.slots, length)
    return slots


def find_cache_obstacle(network: Network) -> str | None:
    """Return why sequences cannot go on from a cache; None if they can."""
    if not network.supports_attention_plans():
        return network.fallback
    try:
        infer_cache_shape(network)
    except ValueError as error:
        return str(error)
    return None


def _may_use_pages(network: Network, config: TorchGenerationConfig, length: int) -> bool:
    """Whether the cache is paged: as configured, otherwise only on a CPU, where it was measured. On a GPU, CUDA graphs need fixed
    slots.

    Exact attention adds in the learner's order, which is implemented only over fixed slots.
    """
    if network.exact is not None:
        if config.paged_cache:
            log.warning("torch_cfg.paged_cache is true, but policy.exact_on_policy needs fixed slots, which are used instead")
        return False
    shape = infer_cache_shape(network)
    if not shape.layers:
        return False  # no keys: only states, which are held whole
    if config.paged_cache is not None:
        return config.paged_cache
    if network.device.type != "cpu":
        return False
    capacity = cache_capacity(network, shape, config, length)
    slots, capacity = split_memory(shape, capacity, config.max_num_seqs)
    return choose_page(capacity, length, slots) is not None
