"""One vLLM engine as a generator with weight updates.

vLLM's front end runs in this process, on the event loop; scheduler and model run in processes that vLLM starts. The cache salt of each
prompt is the version of the weights, so a prefix computed with other weights is never reused.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import multiprocessing.spawn
import os
import pickle
import shlex
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from strop.generation.base import Completion, check_request
from strop.generation.engine_launch import EngineLaunch
from strop.generation.vllm.engine_args import ENGINE_ENVIRONMENT, VllmLaunch, check_cpu_attention, kernel_plan, make_engine_args
from strop.generation.vllm.launch import DRIVER_PID_VARIABLE, LAUNCHING, fork_engine_cores, leave_when_launched, start_fork_server
from strop.generation.vllm.supported_models import find_cpu_problems
from strop.models.local_files import read_local_config
from strop.models.vision.vision_processor import VisionProcessor
from strop.problems import raise_problems
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

log = logging.getLogger(__name__)

T = TypeVar("T")

NO_VERSION = -1
ADAPTER_ID = 1  # vLLM's integer id of the only adapter
POLL_SECONDS = 0.5  # seconds between liveness checks during a call
SHUTDOWN_SECONDS = 5.0  # how long a failed call waits for the engine's shutdown to be reported
OUTPUT_TAIL_LINES = 12  # lines of an engine's output in the message about its death


class VllmEngine:
    """An ``Engine`` on vLLM. It starts without weights, so requests wait until the first ``resume``."""

    launch_class: ClassVar[type[EngineLaunch]] = VllmLaunch

    def __init__(
        self, name: str, launch: VllmLaunch, tokenizer: Any, *, stop_ids: Sequence[int], vision: VisionProcessor | None = None
    ) -> None:
        """``vision``: the image processor of a model that reads images."""
        self.name = name
        self.vision = vision
        self.launch = launch
        self.config = launch.config.vllm_cfg
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.receivers = launch.receivers
        self.version = NO_VERSION
        self._loaded_version = NO_VERSION  # version of the weights in the engine's memory
        self._resumed = asyncio.Event()
        self._engine: Any = None
        self._request_ids = itertools.count()
        self._adapter: Path | None = None
        self._counters: Any = None

    # --- start and close --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.close()
        try:
            async with asyncio.timeout(self.config.startup_seconds):
                self._engine = await asyncio.to_thread(self._start)
        except TimeoutError:
            raise EngineDied(
                f"{self.name} was not ready after {self.config.startup_seconds:g} s "
                f"(policy.generation.vllm_cfg.startup_seconds){self._output_tail()}"
            ) from None
        except RuntimeError as error:  # raised by vLLM if a process exits during startup
            raise EngineDied(f"{self.name} did not start: {error}{self._output_tail()}") from error

    def _output_tail(self) -> str:
        """Return the last lines of the output of the engine's processes, as the end of a message."""
        if self.launch.output_file is None or not self.launch.output_file.exists():
            return ""
        lines = self.launch.output_file.read_text(errors="replace").splitlines()[-OUTPUT_TAIL_LINES:]
        return f"; the end of {self.launch.output_file}:\n" + "\n".join(f"  {line}" for line in lines)

    def _start(self) -> Any:
        # These settings apply to this whole process, in which other engines start too. The next engine gets its turn as soon as
        # this one's processes run; then they all prepare in parallel, which takes minutes on a GPU.
        with tempfile.TemporaryDirectory(prefix="strop-start-") as folder, ExitStack() as settings:
            settings.enter_context(LAUNCHING)
            settings.enter_context(engine_environment(self.launch.env_vars))
            settings.enter_context(hide_main_module())
            settings.enter_context(redirect_output(self.launch.output_file, Path(folder)))
            if self.launch.on_cpu:
                start_fork_server()
                settings.enter_context(fork_engine_cores(self.launch.output_file))
            return self._create_engine(settings)

    def _create_engine(self, settings: ExitStack) -> Any:
        from strop.generation.vllm.requests import inspect_models_here

        import_vllm()
        settings.enter_context(leave_when_launched(settings))
        inspect_models_here()
        from vllm.v1.engine.async_llm import AsyncLLM

        from strop.generation.vllm.requests import EngineStats

        self._counters = EngineStats()
        args = make_engine_args(self.launch)
        if self.launch.on_cpu:
            raise_problems(find_cpu_problems(read_local_config(self.launch.model), self.config, "policy.generation"))
            check_cpu_attention(args)
        if self.launch.nodes:
            from strop.generation.vllm.spanning_executor import SpanningExecutor, leave_gpus_to_workers

            args.distributed_executor_backend = SpanningExecutor
            settings.enter_context(leave_gpus_to_workers())
        return AsyncLLM.from_engine_args(args, stat_loggers=[self._counters.make_logger])

    async def close(self) -> None:
        self._resumed.clear()
        self.version = self._loaded_version = NO_VERSION
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # otherwise it logs an error when the engine's processes exit
            await asyncio.to_thread(engine.shutdown)
            engine.shutdown = lambda timeout=None: None  # vLLM calls it again at interpreter exit, which logs an error
        self._delete_adapter_files()

    # --- sampling ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        params = self._sampling_params(prompt, sampling, seed)
        await self._resumed.wait()
        completion, _ = await self._complete(prompt, sampling, params, images)
        return completion

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        params = self._sampling_params(prompt, sampling, seed)
        await self._await_call(self._require_alive().resume_generation(), "while sampling the canary")
        completion, cached = await self._complete(prompt, sampling, params)
        return CanarySample(tokens=completion.tokens, logprobs=completion.logprobs, cached=cached, columns=completion.columns)

    def _sampling_params(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Any:
        from strop.generation.vllm.requests import to_sampling_params

        vocabulary = None if self._engine is None else self._engine.model_config.get_vocab_size()
        check_request(prompt, sampling, seed, length=self.config.max_model_len, vocabulary=vocabulary)
        room = self.config.max_model_len - len(prompt)
        return to_sampling_params(sampling, seed=seed, max_tokens=room, stop_ids=self.stop_ids)

    async def _complete(
        self, prompt: Sequence[int], sampling: Sampling, params: Any, images: Sequence[PromptImage] = ()
    ) -> tuple[Completion, int]:
        from strop.generation.vllm.requests import to_completion

        output = await self._run_request(list(prompt), params, images)
        return to_completion(output, sampling, self.tokenizer), output.num_cached_tokens or 0

    async def _run_request(self, prompt: list[int], params: Any, images: Sequence[PromptImage]) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        engine = self._require_alive()
        adapter = None if self._adapter is None else LoRARequest("policy", ADAPTER_ID, str(self._adapter))
        request = self._make_request(engine, prompt, images)
        output = None
        try:
            async for response in engine.generate(
                request, params, f"{self.name}/{next(self._request_ids)}", lora_request=adapter
            ):
                output = response
        except (EngineDeadError, EngineGenerateError) as error:
            if engine.errored:
                raise self._make_death_error("while generating") from error
            raise
        if output is None:
            raise EngineDied(f"{self.name} ended a request without output")
        if images and list(output.prompt_token_ids) != prompt:
            raise RuntimeError(
                f"{self.name} read {len(output.prompt_token_ids)} prompt tokens, not the {len(prompt)} of the request with images: its "
                "log-probabilities would belong to another prompt. Set policy.generation.backend=torch"
            )
        return output

    def _make_request(self, engine: Any, prompt: list[int], images: Sequence[PromptImage]) -> Any:
        from vllm.inputs import TokensPrompt

        if not images:
            return TokensPrompt(prompt_token_ids=prompt, cache_salt=self._cache_salt())
        if self.vision is None:
            raise ValueError(
                f"a request has {len(images)} images, and the model of {self.name} reads text only; leave out the images, or set "
                "policy.model_name to a vision-language model (docs/images.md)"
            )
        from strop.generation.vllm.requests import make_image_input

        processor = engine.renderer.get_mm_processor()
        return make_image_input(processor, self.vision, prompt, images, salt=self._cache_salt())

    def _cache_salt(self) -> str:
        """Return the cache salt of the current weights. Prompts with different salts share no keys and values."""
        return f"weights of version {self._loaded_version}"

    def _require_alive(self) -> Any:
        if self._engine is None or self._engine.errored:
            raise EngineDied(f"{self.name}: its process is gone")
        return self._engine

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def connect(self, address: ChannelAddress, first: int) -> None:
        await self._call_workers("strop_connect", pickle.dumps(address), first)

    async def pause(self, *, keep_running: bool) -> None:
        self._resumed.clear()
        mode = "keep" if keep_running else "wait"
        await self._await_call(self._require_alive().pause_generation(mode=mode, clear_cache=not keep_running), "while pausing")

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        self.version = self._loaded_version = NO_VERSION
        plan = pickle.dumps(kernel_plan(self.launch.config))
        results = [
            pickle.loads(result) for result in await self._call_workers("strop_load_weights", pickle.dumps(manifest), plan)
        ]
        received = {name: tuple(fingerprints[name] for fingerprints, _ in results) for name in manifest.names}
        return LoadReceipt(
            version=await self._set_version(version), fingerprints=received, seconds=max(seconds for _, seconds in results)
        )

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        from vllm.lora.request import LoRARequest

        self.version = self._loaded_version = NO_VERSION
        started = asyncio.get_running_loop().time()
        folder = Path(tempfile.mkdtemp(prefix="strop-adapter-", dir=self.launch.shared_folder))
        (folder / "adapter_model.safetensors").write_bytes(adapter.weights)
        (folder / "adapter_config.json").write_text(adapter.config)
        request = LoRARequest("policy", ADAPTER_ID, str(folder), load_inplace=True)
        if not await self._await_call(self._require_alive().add_lora(request), "while loading an adapter"):
            raise RuntimeError(f"{self.name}: vLLM did not load the adapter")
        self._delete_adapter_files()
        self._adapter = folder
        received = {
            name: combine_regions(shards)
            for name, shards in (await self._read_back("strop_read_adapter_fingerprints", ADAPTER_ID)).items()
        }
        seconds = asyncio.get_running_loop().time() - started
        return LoadReceipt(version=await self._set_version(version), fingerprints=received, seconds=seconds)

    async def _set_version(self, version: int) -> int:
        """Set the weight version that vLLM records with every sampled token. Return the version that it reports afterwards."""
        await self._await_call(self._require_alive().update_weight_version(str(version)), "while setting the weight version")
        self._loaded_version = int(
            await self._await_call(self._require_alive().get_weight_version(), "while reading the weight version")
        )
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
        return await self._read_back("strop_read_fingerprints")

    async def _read_back(self, method: str, *arguments: Any) -> dict[str, tuple[TensorFingerprint, ...]]:
        fingerprints: dict[str, list[TensorFingerprint]] = {}
        for result in await self._call_workers(method, *arguments):
            for name, shards in pickle.loads(result).items():
                fingerprints.setdefault(name, []).extend(shards)
        return {name: tuple(shards) for name, shards in fingerprints.items()}

    async def resume(self, version: int) -> None:
        if self._loaded_version != version:
            raise RuntimeError(
                f"{self.name} cannot resume with weights of version {version}: it holds those of version {self._loaded_version}"
            )
        await self._await_call(self._require_alive().resume_generation(), "while resuming")
        self.version = version
        self._resumed.set()

    async def reset_prefix_cache(self, *, running: bool) -> None:
        """Drop cached keys and values. With ``running`` also those of suspended requests, which are then recomputed."""
        await self._await_call(
            self._require_alive().reset_prefix_cache(reset_running_requests=running), "while resetting its prefix cache"
        )

    async def sleep(self) -> None:
        if self.launch.sleep_level:
            await self._await_call(self._require_alive().sleep(self.launch.sleep_level, mode="wait"), "while going to sleep")

    async def wake(self) -> None:
        if self.launch.sleep_level:
            await self._await_call(self._require_alive().wake_up(), "while waking up")

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``StropWorker`` on every rank and return the results."""
        engine, when = self._require_alive(), f"in {method}"
        if self.config.data_parallel_size == 1:
            return list(await self._await_call(engine.collective_rpc(method, args=arguments), when))
        # collective_rpc calls all copies of the model too, but returns only the results of the first copy's ranks.
        call = engine.engine_core.call_utility_all_async("collective_rpc", method, None, arguments, None)
        return [result for copy in await self._await_call(call, when) for result in copy]

    async def _await_call(self, call: Coroutine[Any, Any, T], when: str) -> T:
        """Await a call to the engine's processes. Raises EngineDied if they die, while vLLM itself would wait forever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, task = self._engine, asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=POLL_SECONDS))[0]:
                if engine.errored:
                    raise EngineDeadError
            return task.result()
        except Exception as error:
            if isinstance(error, EngineDeadError) or await _is_shutting_down(engine):
                raise self._make_death_error(when) from error
            raise
        finally:
            task.cancel()

    def _make_death_error(self, when: str) -> EngineDied:
        return EngineDied(f"{self.name}: its process died {when}{self._output_tail()}")

    def _delete_adapter_files(self) -> None:
        folder, self._adapter = self._adapter, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def counters(self) -> Mapping[str, float]:
        return {} if self._counters is None else self._counters.read()


async def _is_shutting_down(engine: Any) -> bool:
    """Whether an engine that failed a call is dying: a core whose worker died cancels its calls before vLLM reports it dead."""
    for _ in range(round(SHUTDOWN_SECONDS / POLL_SECONDS)):
        if engine.errored:
            return True
        await asyncio.sleep(POLL_SECONDS)
    return False


def import_vllm() -> None:
    """Import vLLM's front end without garbage collection, which would take a fifth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        import_module("vllm.v1.engine.async_llm")
    finally:
        if before:
            gc.enable()


@contextmanager
def engine_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that vLLM starts, and restore this process's environment afterwards.

    vLLM itself also changes the environment (preloaded libraries, thread counts); those changes are undone too.
    """
    saved = dict(os.environ)
    os.environ.update({**ENGINE_ENVIRONMENT, DRIVER_PID_VARIABLE: str(os.getpid()), **changes})
    try:
        yield
    finally:
        with suppress(KeyError):
            for name in set(os.environ) - saved.keys():
                del os.environ[name]
        os.environ.update(saved)


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep processes started inside from importing the main script.

    They do not need it, and it may lack an ``if __name__ == "__main__"`` guard.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextmanager
def redirect_output(file: Path | None, folder: Path) -> Iterator[None]:
    """Redirect the output of processes started inside to ``file``, by starting Python through a small shell script. None: do nothing.

    The script is in ``folder``, which must exist until these processes run."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    python = multiprocessing.spawn.get_executable()
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(os.fsdecode(python))} "$@" >>{shlex.quote(str(file))} 2>&1\n')
    script.chmod(0o700)
    multiprocessing.spawn.set_executable(str(script))
    try:
        yield
    finally:
        multiprocessing.spawn.set_executable(python)
