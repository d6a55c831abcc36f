"""One SGLang engine as a generator with weight updates.

SGLang's server runs in processes of its own and is asked over HTTP. Every prompt carries a salt that changes with each load of weights, so
a prefix computed with other weights is never reused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from strop.extensions.sglang.server.engine_calls import decode_answers, encode_call
from strop.extensions.sglang.server_process import ADAPTER_NAME, ServerClient, ServerError, ServerProcess, SglangLaunch
from strop.extensions.sglang.sglang_requests import SharedPixels, to_completion, to_request
from strop.generation.base import COUNTERS, Completion, check_request
from strop.generation.engine_launch import EngineLaunch
from strop.models.vision.vision_processor import VisionProcessor
from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.base import (
    AdapterFiles,
    CanarySample,
    ChannelAddress,
    EngineDied,
    LoadReceipt,
    Manifest,
    TensorFingerprint,
)
from strop.weight_sync.verification import combine_regions

T = TypeVar("T")

NO_VERSION = -1
POLL_SECONDS = 0.5  # between two looks at whether the server lives, during a call
READY_SECONDS = 0.25  # between two questions whether it is ready
SHUTDOWN_SECONDS = 8.0  # for which a failed call waits to learn that the server is ending
FLUSH_SECONDS = 60.0  # that a scheduler without requests has to become idle
IMAGE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # whose log-probabilities were compared with the learner's
MEMORY_TAGS = ["kv_cache", "weights"]  # what a sleeping engine gives up


class SglangEngine:
    """An ``Engine`` on SGLang. It starts without weights, so requests wait until the first ``resume``."""

    launch_class: ClassVar[type[EngineLaunch]] = SglangLaunch

    def __init__(
        self, name: str, launch: SglangLaunch, tokenizer: Any, *, stop_ids: Sequence[int], vision: VisionProcessor | None = None
    ) -> None:
        """``vision``: the image processor of a model that reads images."""
        self.name = name
        self.vision = vision
        self.launch = launch
        self.config = launch.options
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.receivers = launch.receivers
        self.version = NO_VERSION
        self._loaded_version = NO_VERSION  # version of the weights in the engine's memory
        self._loads = 0  # of weights, successful or not
        self._resumed = asyncio.Event()
        self._idle = asyncio.Event()  # no request runs
        self._idle.set()
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._pixels: SharedPixels | None = None
        self._request_ids = itertools.count()
        self._counters = SglangCounters()
        self._aborts: set[asyncio.Task[Any]] = set()

    # --- start and close --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.close()
        self._server = await asyncio.to_thread(ServerProcess, self.launch)
        self._client = ServerClient(self._server.port, self._server.key)
        self._pixels = None if self.vision is None else SharedPixels(self.vision, self._server.folder)
        try:
            async with asyncio.timeout(self.config.startup_seconds):
                await self._await_ready(self._server, self._client)
        except TimeoutError:
            tail = self._server.describe_end()
            await self.close()
            raise EngineDied(
                f"{self.name} was not ready after {self.config.startup_seconds:g} s "
                f"(policy.generation.sglang_cfg.startup_seconds){tail}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _await_ready(self, server: ServerProcess, client: ServerClient) -> None:
        while not await client.is_ready():
            if not server.alive:
                if refusal := server.refusal:
                    raise ValueError(refusal)
                raise EngineDied(f"{self.name} did not start{server.describe_end()}")
            await asyncio.sleep(READY_SECONDS)

    async def close(self) -> None:
        self._resumed.clear()
        self.version = self._loaded_version = NO_VERSION
        server, self._server = self._server, None
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if server is not None:
            await asyncio.to_thread(server.end)

    # --- sampling ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        check_request(prompt, sampling, seed, length=self.config.context_length)  # SGLang checks ids against the vocabulary
        self._check_images(images)
        await self._resumed.wait()
        if not images:
            return (await self._complete(prompt, sampling, seed))[0]
        assert self._pixels is not None
        async with self._pixels.hold(images, salt=self._salt()) as said:
            completion, _ = await self._complete(prompt, sampling, seed, said)
        return completion

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        check_request(prompt, sampling, seed, length=self.config.context_length)  # SGLang checks ids against the vocabulary
        await self._post("/continue_generation")
        completion, cached = await self._complete(prompt, sampling, seed)
        return CanarySample(tokens=completion.tokens, logprobs=completion.logprobs, cached=cached, columns=completion.columns)

    def _check_images(self, images: Sequence[PromptImage]) -> None:
        if not images:
            return
        if self.vision is None:
            raise ValueError(
                f"a request has {len(images)} images, and the model of {self.name} reads text only; leave out the images, or set "
                "policy.model_name to a vision-language model (docs/images.md)"
            )
        kind = str(self.vision.family.config.model_type)
        if kind not in IMAGE_FAMILIES:
            raise ValueError(
                f"{self.name}: images of {kind} were not compared with the learner's in SGLang, which those of "
                f"{' and '.join(IMAGE_FAMILIES)} were; set policy.generation.backend to vllm or torch"
            )

    async def _complete(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, images: Sequence[str] = ()
    ) -> tuple[Completion, int]:
        """``images``: what the request says of each."""
        body = to_request(
            prompt,
            sampling,
            seed=seed,
            max_tokens=self.config.context_length - len(prompt),
            stop_ids=self.stop_ids,
            salt=self._salt(),
            sampler=self.config.sampler,
        )
        if images:
            body["image_data"] = list(images)
        if self.launch.adapters is not None:
            body["lora_path"] = ADAPTER_NAME
        body["rid"] = f"strop-{next(self._request_ids)}"
        self._counters.begin()
        self._idle.clear()
        try:
            answer = await self._post("/generate", body)
        except asyncio.CancelledError:
            self._abort(body["rid"])
            raise
        finally:
            self._counters.end()
            if not self._counters.running:
                self._idle.set()
        self._counters.add(answer["meta_info"])
        self._require_prompt(answer["meta_info"], prompt)
        completion = to_completion(answer, sampling, self.tokenizer, sampler=self.config.sampler)
        return completion, int(answer["meta_info"].get("cached_tokens") or 0)

    def _require_prompt(self, info: Mapping[str, Any], prompt: Sequence[int]) -> None:
        """Raises RuntimeError if SGLang read a longer or shorter prompt than it was sent."""
        if (found := info.get("prompt_tokens", len(prompt))) != len(prompt):
            raise RuntimeError(
                f"{self.name} read {found} prompt tokens, not the {len(prompt)} of the request: its log-probabilities would be of another "
                "prompt. Set policy.generation.backend=torch"
            )

    def _abort(self, request: str) -> None:
        """Have the server end a request that is no longer awaited."""
        if self._server is not None and self._server.alive:
            task = asyncio.ensure_future(self._post("/abort_request", {"rid": request}))
            self._aborts.add(task)
            task.add_done_callback(self._forget_abort)

    def _forget_abort(self, task: asyncio.Task[Any]) -> None:
        self._aborts.discard(task)
        if not task.cancelled():
            task.exception()  # the server may be gone by now

    def _salt(self) -> str:
        """Return what keeps prefixes of other weights apart: it changes with each load."""
        return f"load {self._loads}"

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def connect(self, address: ChannelAddress, first: int) -> None:
        await self._call("connect", address, first)

    async def pause(self, *, keep_running: bool) -> None:
        self._resumed.clear()
        self._require_alive()
        if keep_running:
            await self._post("/pause_generation", {"mode": self.config.sglang_server_config.pause_generation_mode})
            return
        await self._await_alive(self._idle.wait(), "while its requests finish")
        await self._flush()
        await self._post("/pause_generation", {"mode": "in_place"})

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        self.version = self._loaded_version = NO_VERSION
        self._loads += 1
        answers = await self._call("load", manifest)
        fingerprints = {name: tuple(arrived[name] for arrived, _ in answers) for name in manifest.names}
        seconds = max(seconds for _, seconds in answers)
        return LoadReceipt(version=await self._set_version(version), fingerprints=fingerprints, seconds=seconds)

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        self.version = self._loaded_version = NO_VERSION
        self._loads += 1
        seconds = max(await self._call("load_adapter", adapter))
        held = _group_shards(await self._call("adapter_fingerprints"))
        fingerprints = {name: combine_regions(shards) for name, shards in held.items()}
        return LoadReceipt(version=await self._set_version(version), fingerprints=fingerprints, seconds=seconds)

    async def _set_version(self, version: int) -> int:
        """Set the version that SGLang records with every sampled token. Return the one that its ranks report afterwards."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        held = {int(each) for each in await self._call("version")}
        self._loaded_version = held.pop() if len(held) == 1 else NO_VERSION
        return self._loaded_version

    async def use_own_weights(self, version: int) -> None:
        """Start serving with the weights read from ``launch.model``, as ``version``, without a publish.

        Raises RuntimeError unless ``launch.load_weights`` is set.
        """
        if not self.launch.load_weights:
            raise RuntimeError(f"{self.name} was started with load_weights=False, so it has no weights of its own to use")
        await self._set_version(version)
        await self.resume(version)

    async def read_back_fingerprints(self) -> Mapping[str, tuple[TensorFingerprint, ...]]:
        return _group_shards(await self._call("fingerprints"))

    async def resume(self, version: int) -> None:
        if self._loaded_version != version:
            raise RuntimeError(
                f"{self.name} cannot resume with weights of version {version}: it holds those of version {self._loaded_version}"
            )
        await self._post("/continue_generation")
        self.version = version
        self._resumed.set()

    async def reset_prefix_cache(self, *, running: bool) -> None:
        """Drop cached keys and values. With ``running`` also those of suspended requests, which are then recomputed.

        Requests that are suspended in place keep theirs, and SGLang then drops nothing: the salt alone keeps prefixes of other weights
        apart. To be called between ``pause`` and ``resume``.
        """
        if self.config.sglang_server_config.pause_generation_mode == "in_place":
            if self._counters.running and not running:
                return
            # Also where none is waited for: SGLang keeps a request that was given up while it is suspended until the next step.
            await self._post("/pause_generation", {"mode": "retract"})
        await self._flush()

    async def _flush(self) -> None:
        """Drop cached keys and values. The scheduler counts as busy until the step after the last request.

        Raises TimeoutError if it stays busy.
        """
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                while not all(await self._call("flush")):
                    await asyncio.sleep(READY_SECONDS / 10)
        except TimeoutError:
            raise TimeoutError(
                f"{self.name}: SGLang still had requests {FLUSH_SECONDS:g} s after the last one ended, so its prefix cache "
                f"could not be emptied; its own messages are in {self.launch.output_file}"
            ) from None

    async def sleep(self) -> None:
        if self.launch.sleeps:
            await self._post("/release_memory_occupation", {"tags": MEMORY_TAGS})

    async def wake(self) -> None:
        if self.launch.sleeps:
            await self._post("/resume_memory_occupation", {"tags": MEMORY_TAGS})

    # --- calls ------------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``ModelWeights`` on every rank and return the results. Raises RuntimeError with a rank's own error."""
        return decode_answers(await self._post("/weights_checker", encode_call(method, *arguments)))

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        client = self._require_alive()
        return await self._await_alive(client.post(path, body), f"in {path.partition('?')[0]}")

    async def _await_alive(self, call: Coroutine[Any, Any, T], when: str) -> T:
        """Await a call. Raises EngineDied if the server's process ends meanwhile."""
        server, task = self._server, asyncio.ensure_future(call)
        assert server is not None
        try:
            while not (await asyncio.wait([task], timeout=POLL_SECONDS))[0]:
                if not server.alive:
                    raise self._make_death_error(server, when)
            return task.result()
        except (EngineDied, ServerError, asyncio.CancelledError):
            raise
        except Exception as error:  # of the connection
            if await _is_ending(server):
                raise self._make_death_error(server, when) from error
            raise
        finally:
            task.cancel()

    def _require_alive(self) -> ServerClient:
        if self._client is None or not self.alive:
            raise EngineDied(f"{self.name}: its process is gone")
        return self._client

    def _make_death_error(self, server: ServerProcess, when: str) -> EngineDied:
        return EngineDied(f"{self.name}: its process died {when}{server.describe_end()}")

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.alive

    @property
    def process(self) -> int | None:
        """The id of the server's process, and of its group."""
        return None if self._server is None else self._server.pid

    def counters(self) -> Mapping[str, float]:
        return self._counters.read()


def _group_shards(ranks: Iterable[Mapping[str, tuple[TensorFingerprint, ...]]]) -> dict[str, tuple[TensorFingerprint, ...]]:
    """Return the shards of each tensor, of all ranks."""
    found: dict[str, list[TensorFingerprint]] = {}
    for rank in ranks:
        for name, shards in rank.items():
            found.setdefault(name, []).extend(shards)
    return {name: tuple(shards) for name, shards in found.items()}


async def _is_ending(server: ServerProcess) -> bool:
    for _ in range(round(SHUTDOWN_SECONDS / POLL_SECONDS)):
        if not server.alive:
            return True
        await asyncio.sleep(POLL_SECONDS)
    return False


# Cumulative statistics of an SGLang engine, summed from what it says of each request.


class SglangCounters:
    """Sums since the engine was made, and how many requests it has now."""

    def __init__(self) -> None:
        self.running = 0
        self._sums: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def begin(self) -> None:
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def add(self, info: Mapping[str, Any]) -> None:
        """Count a request that SGLang has answered, from its ``meta_info``."""
        prompt, cached = info.get("prompt_tokens") or 0, info.get("cached_tokens") or 0
        found = {
            "prompt_tokens": prompt,
            "sampled_tokens": info.get("completion_tokens"),
            "preemptions": info.get("num_retractions"),
            "prefix_queries": prompt,
            "prefix_hits": cached,
            "drafted_tokens": info.get("spec_draft_token_num"),
            "accepted_tokens": info.get("spec_accept_token_num"),
        }
        for name, value in found.items():
            self._sums[name] += value or 0

    def read(self) -> Mapping[str, float]:
        return {**self._sums, "running": float(self.running)}
