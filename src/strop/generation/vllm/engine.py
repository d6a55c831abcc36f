"""One vLLM engine as a generator with weight updates.

vLLM's front end runs in this process, on the event loop; scheduler and model run in processes that vLLM starts. The cache salt of each
prompt is the version of the weights, so a prefix computed with other weights is never reused.
"""

from __future__ import annotations

import asyncio
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from strop.generation.base import Completion, RequestTooLong
from strop.generation.vllm.arguments import EngineOptions, engine_arguments
from strop.generation.vllm.guardian import DRIVER
from strop.generation.vllm.launch import forked_processes, start_server
from strop.sampling import Sampling
from strop.weights.base import AdapterFiles, Answer, ChannelAddress, EngineDied, Held, Manifest, Receipt
from strop.weights.fingerprints import combine

log = logging.getLogger(__name__)

T = TypeVar("T")

NO_VERSION = -1
ADAPTER = 1  # vLLM's integer id of the only adapter
LOOK_EVERY = 0.5  # seconds between liveness checks during a call
LAST_LINES = 12  # of an engine's output, in the message about its death
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU vLLM would otherwise bind all engines to the same cores, override OMP_NUM_THREADS, and require a NUMA node for each rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class VllmEngine:
    """An ``Engine`` on vLLM. It starts without weights, so requests wait until the first ``resume``."""

    def __init__(self, name: str, options: EngineOptions, tokenizer: Any, *, stop_ids: Sequence[int]) -> None:
        self.name = name
        self.options = options
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.receivers = options.tensor_parallel_size * options.pipeline_parallel_size
        self.version = NO_VERSION
        self._loaded = NO_VERSION  # version of the weights in the engine's memory
        self._open = asyncio.Event()
        self._engine: Any = None
        self._numbers = itertools.count()
        self._adapter: Path | None = None
        self._counters: Any = None

    # --- starting and ending ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.close()
        try:
            async with asyncio.timeout(self.options.startup_seconds):
                self._engine = await asyncio.to_thread(self._start)
        except TimeoutError:
            raise EngineDied(
                f"{self.name} was not ready after {self.options.startup_seconds:g} s "
                f"(policy.generation.vllm_cfg.startup_seconds){self._last_words()}"
            ) from None
        except RuntimeError as error:  # what vLLM raises if a process exits during startup
            raise EngineDied(f"{self.name} did not start: {error}{self._last_words()}") from error

    def _last_words(self) -> str:
        """Return the last lines of the output of the engine's processes, as the end of a message."""
        if self.options.output is None or not self.options.output.exists():
            return ""
        lines = self.options.output.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f"; the end of {self.options.output}:\n" + "\n".join(f"  {line}" for line in lines)

    def _start(self) -> Any:
        with own_environment(self.options.environment), unnamed_main(), output_to(self.options.output):
            if not self.options.on_cpu:
                return self._started()
            start_server()
            with forked_processes(self.options.output):
                return self._started()

    def _started(self) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        from strop.generation.vllm.counters import EngineCounters

        self._counters = EngineCounters()
        return AsyncLLM.from_engine_args(engine_arguments(self.options), stat_loggers=[self._counters.attach])

    async def close(self) -> None:
        self._open.clear()
        self.version = self._loaded = NO_VERSION
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # otherwise it logs an error when the engine's processes exit
            await asyncio.to_thread(engine.shutdown)
            engine.shutdown = lambda timeout=None: None  # vLLM calls it again at interpreter exit, which logs an error
        self._forget_adapter()

    # --- sampling ---------------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        params = self._params(prompt, sampling, seed)
        await self._open.wait()
        completed, _ = await self._answer(prompt, sampling, params)
        return completed

    async def ask(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> Answer:
        params = self._params(prompt, sampling, seed)
        await self._asked(self._living().resume_generation(), "while sampling the canary")
        completed, cached = await self._answer(prompt, sampling, params)
        return Answer(tokens=completed.tokens, logprobs=completed.logprobs, cached=cached, kept=completed.kept)

    def _params(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Any:
        from strop.generation.vllm.requests import sampling_params

        room = self.options.max_model_len - len(prompt)
        if room < 1:
            raise RequestTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room in a sequence of {self.options.max_model_len}; raise "
                "policy.max_total_sequence_length, or lower data.max_input_seq_length to drop such prompts"
            )
        return sampling_params(sampling, seed=seed, limit=room, stop_ids=self.stop_ids)

    async def _answer(self, prompt: Sequence[int], sampling: Sampling, params: Any) -> tuple[Completion, int]:
        from strop.generation.vllm.requests import completion

        output = await self._finished(list(prompt), params)
        return completion(output, sampling, self.tokenizer), output.num_cached_tokens or 0

    async def _finished(self, prompt: list[int], params: Any) -> Any:
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        engine = self._living()
        adapter = None if self._adapter is None else LoRARequest("policy", ADAPTER, str(self._adapter))
        request = TokensPrompt(prompt_token_ids=prompt, cache_salt=self._salt())
        output = None
        try:
            async for answer in engine.generate(request, params, f"{self.name}/{next(self._numbers)}", lora_request=adapter):
                output = answer
        except (EngineDeadError, EngineGenerateError) as error:
            if engine.errored:
                raise EngineDied(f"{self.name}: its process died while generating{self._last_words()}") from error
            raise
        if output is None:
            raise EngineDied(f"{self.name} ended a request without output")
        return output

    def _salt(self) -> str:
        """Return the cache salt of the current weights. Prompts with different salts share no keys and values."""
        return f"weights of version {self._loaded}"

    def _living(self) -> Any:
        if self._engine is None or self._engine.errored:
            raise EngineDied(f"{self.name}: its process is gone")
        return self._engine

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def connect(self, address: ChannelAddress, first: int) -> None:
        await self._call("strop_connect", pickle.dumps(address), first)

    async def pause(self, *, keep_running: bool) -> None:
        self._open.clear()
        mode = "keep" if keep_running else "wait"
        await self._asked(self._living().pause_generation(mode=mode, clear_cache=not keep_running), "while pausing")

    async def load(self, manifest: Manifest, version: int) -> Receipt:
        self.version = self._loaded = NO_VERSION
        answers = [pickle.loads(answer) for answer in await self._call("strop_load", pickle.dumps(manifest))]
        received = {name: tuple(marks[name] for marks, _ in answers) for name in manifest.names}
        return Receipt(version=await self._label(version), received=received, seconds=max(seconds for _, seconds in answers))

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> Receipt:
        from vllm.lora.request import LoRARequest

        self.version = self._loaded = NO_VERSION
        started = asyncio.get_running_loop().time()
        folder = Path(tempfile.mkdtemp(prefix="strop-adapter-"))
        (folder / "adapter_model.safetensors").write_bytes(adapter.weights)
        (folder / "adapter_config.json").write_text(adapter.config)
        request = LoRARequest("policy", ADAPTER, str(folder), load_inplace=True)
        if not await self._asked(self._living().add_lora(request), "while loading an adapter"):
            raise RuntimeError(f"{self.name}: vLLM did not load the adapter")
        self._forget_adapter()
        self._adapter = folder
        received = {name: _whole(parts) for name, parts in (await self._read_back("strop_held_adapter", ADAPTER)).items()}
        seconds = asyncio.get_running_loop().time() - started
        return Receipt(version=await self._label(version), received=received, seconds=seconds)

    async def _label(self, version: int) -> int:
        """Set the weight version that vLLM records with every sampled token. Return the version that it reports afterwards."""
        await self._asked(self._living().update_weight_version(str(version)), "while setting the weight version")
        self._loaded = int(await self._asked(self._living().get_weight_version(), "while reading the weight version"))
        return self._loaded

    async def use_own_weights(self, version: int) -> None:
        """Start serving with the weights read from ``options.model``, as ``version``, without a publish.

        Raises RuntimeError unless ``options.load_weights`` is set.
        """
        if not self.options.load_weights:
            raise RuntimeError(f"{self.name} was started with load_weights=False, so it has no weights of its own to use")
        await self._label(version)
        await self.unpause(version)

    async def held(self) -> Mapping[str, tuple[Held, ...]]:
        return await self._read_back("strop_held")

    async def _read_back(self, method: str, *arguments: Any) -> dict[str, tuple[Held, ...]]:
        found: dict[str, list[Held]] = {}
        for answer in await self._call(method, *arguments):
            for name, piece in pickle.loads(answer).items():
                found.setdefault(name, []).append(piece)
        return {name: tuple(parts) for name, parts in found.items()}

    async def unpause(self, version: int) -> None:
        if self._loaded != version:
            raise RuntimeError(
                f"{self.name} cannot resume with weights of version {version}: it holds those of version {self._loaded}"
            )
        await self._asked(self._living().resume_generation(), "while resuming")
        self.version = version
        self._open.set()

    async def forget_prefixes(self, *, running: bool) -> None:
        """Drop cached keys and values. With ``running`` also those of suspended requests, which are then recomputed."""
        await self._asked(self._living().reset_prefix_cache(reset_running_requests=running), "while resetting its prefix cache")

    async def sleep(self) -> None:
        if self.options.sleep_level and not self.options.on_cpu:
            await self._asked(self._living().sleep(self.options.sleep_level, mode="wait"), "while going to sleep")

    async def wake(self) -> None:
        if self.options.sleep_level and not self.options.on_cpu:
            await self._asked(self._living().wake_up(), "while waking up")

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``StropWorker`` on every rank and return the results."""
        return list(await self._asked(self._living().collective_rpc(method, args=arguments), f"in {method}"))

    async def _asked(self, call: Coroutine[Any, Any, T], when: str) -> T:
        """Await a call to the engine's processes. Raises EngineDied if they die meanwhile, where vLLM itself would wait forever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        engine, answer = self._engine, asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_EVERY))[0]:
                if engine.errored:
                    raise EngineDied(f"{self.name}: its process died {when}{self._last_words()}")
            return answer.result()
        except EngineDeadError as error:
            raise EngineDied(f"{self.name}: its process died {when}{self._last_words()}") from error
        finally:
            answer.cancel()

    def _forget_adapter(self) -> None:
        folder, self._adapter = self._adapter, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def counters(self) -> Mapping[str, float]:
        return {} if self._counters is None else self._counters.read()


def _whole(parts: Sequence[Held]) -> tuple[int, ...]:
    """Combine the fingerprints of a tensor's regions into one. If replicas of a region differ, return one fingerprint per process."""
    if len({part.region for part in parts}) < len(set(parts)):
        return tuple(part.fingerprint for part in parts)
    return (combine(part.fingerprint for part in set(parts)),)


@contextmanager
def own_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that vLLM starts, and restore this process's environment afterwards.

    vLLM itself also changes the environment (preloaded libraries, thread counts); those changes are undone too.
    """
    before = dict(os.environ)
    os.environ.update({**ENVIRONMENT, DRIVER: str(os.getpid()), **changes})
    try:
        yield
    finally:
        with suppress(KeyError):
            for name in set(os.environ) - before.keys():
                del os.environ[name]
        os.environ.update(before)


@contextmanager
def unnamed_main() -> Iterator[None]:
    """Keep processes started inside from importing the main script, which may lack an ``if __name__ == "__main__"`` guard. They do not need
    it."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextmanager
def output_to(file: Path | None) -> Iterator[None]:
    """Redirect the output of processes started inside to ``file``, by starting Python through a small shell script. None: do nothing."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    python = multiprocessing.spawn.get_executable()
    with tempfile.TemporaryDirectory(prefix="strop-start-") as folder:
        script = Path(folder) / "python"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(os.fsdecode(python))} "$@" >>{shlex.quote(str(file))} 2>&1\n')
        script.chmod(0o700)
        multiprocessing.spawn.set_executable(str(script))
        try:
            yield
        finally:
            multiprocessing.spawn.set_executable(python)
