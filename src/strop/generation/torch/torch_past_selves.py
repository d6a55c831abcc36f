"""Earlier selves of the policy, sampled by an embedded engine next to the run's engine.

It runs on a copy of the policy's module that shares frozen weights, so that a LoRA run adds only adapters. It holds one snapshot
at a time: requests for another one wait until earlier requests are finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from random import Random

from strop.generation.base import Completion, PastSelf
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.in_process import Snapshot, SnapshotPool


@dataclass(eq=False)
class _Request:
    snapshot: Snapshot
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    images: Sequence[PromptImage]
    done: asyncio.Future[Completion]


class TorchPastSelves:
    """An engine for the snapshots of a pool."""

    def __init__(self, network: Network, make_engine: Callable[[Network], TorchEngine], *, every: int, size: int) -> None:
        """``network`` is the policy's, of which ``size`` snapshots are kept; ``make_engine`` creates an engine on the copy of it."""
        self.pool = SnapshotPool(network.model, every=every, size=size)
        self.engine = make_engine(copy_network(network))
        self._loaded: Snapshot | None = None
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None

    def draw(self, seed: int) -> PastSelf:
        """Return one of the snapshots with equal probability, for the games of a group."""
        random = Random(seed)
        return PastSelf(SnapshotGenerator(self, random.choice(self.pool.snapshots)), quantile=random.random())

    async def generate(
        self, snapshot: Snapshot, prompt: Sequence[int], *, sampling: Sampling, seed: int, images: Sequence[PromptImage] = ()
    ) -> Completion:
        """Sample one completion with the weights of a snapshot."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(snapshot, prompt, sampling, seed, images, done))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="strop-past-selves")
        return await done

    async def _serve(self) -> None:
        """Serve all requests for the snapshot of the oldest one, until none waits.

        Caches of earlier requests are dropped, as by a restart, so that equal prompts are rounded the same in a resumed run.
        """
        self.engine.runner.reset_prefix_cache()
        while self._waiting:
            snapshot = self._waiting[0].snapshot
            asked = [request for request in self._waiting if request.snapshot is snapshot]
            self._waiting = [request for request in self._waiting if request.snapshot is not snapshot]
            try:
                await self._load(snapshot)
            except Exception as error:
                for request in asked:
                    _finish(request.done, error)
                continue
            await asyncio.gather(*map(self._answer, asked))

    async def _answer(self, request: _Request) -> None:
        try:
            completion = await self.engine.generate(
                request.prompt, sampling=request.sampling, seed=request.seed, images=request.images
            )
            _finish(request.done, completion)
        except Exception as error:
            _finish(request.done, error)

    async def _load(self, snapshot: Snapshot) -> None:
        if self._loaded is snapshot:
            return
        if self._loaded is not None:
            await self.engine.drain()
        self._loaded = None
        snapshot.copy_to(self.engine.runner.network.model)
        self.engine.resume(snapshot.version)
        self._loaded = snapshot

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.engine.close()


@dataclass(frozen=True)
class SnapshotGenerator:
    """Samples with the weights of a snapshot."""

    selves: TorchPastSelves
    snapshot: Snapshot

    @property
    def version(self) -> int:
        return self.snapshot.version

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        return await self.selves.generate(self.snapshot, prompt, sampling=sampling, seed=seed, images=images)


def _finish(done: asyncio.Future[Completion], result: Completion | Exception) -> None:
    if done.done():  # who asked was cancelled
        return
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)


def copy_network(network: Network) -> Network:
    """Return a network with its own copies of trained weights, which shares the others."""
    shared = {id(parameter): parameter for parameter in network.model.parameters() if not parameter.requires_grad}
    copied = copy(network)
    copied.model = deepcopy(network.model, shared)
    if network.vision is not None:
        copied.enable_vision(network.vision.processor)
    return copied
