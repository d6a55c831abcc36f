"""An engine in another process, on any node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorDied, NodeLost, RemoteActor
from strop.generation.base import Completion
from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.base import (
    AdapterFiles,
    CanarySample,
    ChannelAddress,
    EngineDied,
    EngineLost,
    LoadReceipt,
    Manifest,
    TensorFingerprint,
)


class RemoteEngine:
    """An ``Engine`` that forwards every call to an engine in another process. The process ends when the engine is closed or has died."""

    def __init__(self, name: str, receivers: int, actor: RestartableActor) -> None:
        """``actor`` creates the engine in its process, without starting it."""
        self.name = name
        self.receivers = receivers
        self.version = -1
        self._actor = actor
        self._counters: Mapping[str, float] = {}

    async def start(self) -> None:
        await self.close()
        try:
            await self._actor.start()
        except NodeLost as error:
            raise EngineLost(f"{self.name}: {error}") from error
        except ActorDied as error:
            raise EngineDied(f"{self.name}: {error}") from error
        await self._call("start")

    async def close(self) -> None:
        self.version = -1
        remote, self._actor.remote = self._actor.remote, None
        if remote is not None:
            if remote.alive:
                await _close_engine(remote)
            await remote.kill()

    @property
    def alive(self) -> bool:
        return self._actor.remote is not None and self._actor.remote.alive

    @property
    def process(self) -> int | None:
        return None if self._actor.remote is None else self._actor.remote.pid

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        shown = {"images": tuple(images)} if images else {}
        completion: Completion = await self._call(
            "generate", list(prompt), sampling=sampling, seed=seed, session=session, **shown
        )
        return completion

    async def sample_canary(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> CanarySample:
        sample: CanarySample = await self._call("sample_canary", list(prompt), sampling=sampling, seed=seed)
        return sample

    async def connect(self, address: ChannelAddress, first: int) -> None:
        await self._call("connect", address, first)

    async def pause(self, *, keep_running: bool) -> None:
        await self._call("pause", keep_running=keep_running)

    async def load(self, manifest: Manifest, version: int) -> LoadReceipt:
        self.version = -1
        receipt: LoadReceipt = await self._call("load", manifest, version)
        return receipt

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> LoadReceipt:
        self.version = -1
        receipt: LoadReceipt = await self._call("load_adapter", adapter, version)
        return receipt

    async def read_back_fingerprints(self) -> Mapping[str, tuple[TensorFingerprint, ...]]:
        fingerprints: Mapping[str, tuple[TensorFingerprint, ...]] = await self._call("read_back_fingerprints")
        return fingerprints

    async def reset_prefix_cache(self, *, running: bool) -> None:
        await self._call("reset_prefix_cache", running=running)

    async def resume(self, version: int) -> None:
        await self._call("resume", version)
        self.version = version
        self._counters = await self._call("counters")

    async def use_own_weights(self, version: int) -> None:
        """Serve with the weights the engine was started with."""
        await self._call("use_own_weights", version)
        self.version = version

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    def counters(self) -> Mapping[str, float]:
        """Return the counters as of the last ``resume``."""
        return self._counters

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        remote = self._actor.remote  # a dead engine is restarted by its pool, which also loads its weights
        if remote is None:
            raise EngineDied(f"{self.name}: its process has died")
        try:
            return await remote.call(method, *arguments, **named)
        except ActorDied as error:
            raise EngineDied(f"{self.name}: {error}") from error
        except EngineDied:
            await remote.kill()  # the process only wraps an engine that died: restart both
            raise


async def _close_engine(remote: RemoteActor) -> None:
    """Let the engine end its child processes before its own process is killed."""
    try:
        await remote.call("close")
    except Exception:
        return  # the caller kills it, which also ends its children
