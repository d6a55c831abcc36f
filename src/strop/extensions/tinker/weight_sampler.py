"""Samples from the base model and from weights that clients saved, each by a separate embedded engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.base_config import validate_section
from strop.extensions.tinker.datum_batch import TARGETS, TrainingDatum, make_batch
from strop.extensions.tinker.tuned_model import make_model_config
from strop.extensions.tinker.weight_folders import WeightFolders
from strop.generation.base import Completion
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.models.adapters import load_adapters
from strop.runs.models import LoadedPolicy, load_policy
from strop.sampling import Sampling, mix_seed


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """A call of ``sample`` or ``compute_logprobs``."""

    prompt: Sequence[int]
    sampling: Sampling
    count: int
    seed: int
    prompt_logprobs: bool = False


@dataclass(eq=False)
class _LoadedWeights:
    policy: LoadedPolicy
    engine: TorchEngine
    users: int = 0

    async def sample(self, call: SampleCall) -> tuple[list[Completion], Tensor | None]:
        requests = (
            self.engine.generate(call.prompt, sampling=call.sampling, seed=mix_seed(call.seed, index))
            for index in range(call.count)
        )
        completions = await asyncio.gather(*requests)
        return completions, self._score(call.prompt) if call.prompt_logprobs else None

    @torch.no_grad()
    def _score(self, prompt: Sequence[int]) -> Tensor:  # [P], NaN for the first token
        tokens = torch.tensor([*prompt], dtype=torch.int64)
        scores = torch.full((len(tokens),), float("nan"))
        if len(tokens) > 1:
            batch = make_batch([TrainingDatum(tokens[:-1], {TARGETS: tokens[1:]})], ())
            scores[1:] = self.policy.network.outputs(batch, Sampling()).logprobs.cpu()
        return scores


class WeightSampler:
    """Keeps the engines of the weights that were used last."""

    def __init__(self, base: dict[str, Any], folders: WeightFolders, *, length: int, kv_cache_gb: float, limit: int = 2) -> None:
        """``limit``: engines that are kept, besides those in use."""
        self._base, self._folders, self._length, self._kv_cache_gb, self._limit = base, folders, length, kv_cache_gb, limit
        self._loaded: OrderedDict[str | None, _LoadedWeights] = OrderedDict()
        self._loading = asyncio.Lock()

    async def sample(self, address: str | None, call: SampleCall) -> tuple[list[Completion], Tensor | None]:
        """Sample with the weights saved at an address; None: with the base model. Raises TinkerRequestError, InvalidRequest."""
        weights = await self._use(address)
        try:
            return await weights.sample(call)
        finally:
            weights.users -= 1

    async def _use(self, address: str | None) -> _LoadedWeights:
        async with self._loading:
            loaded = self._loaded.get(address)
            if loaded is not None and loaded.engine.failure is not None:  # load it again: it no longer serves clients
                await self._loaded.pop(address).engine.close()
            if address not in self._loaded:
                self._loaded[address] = await asyncio.to_thread(self._load, address)
                self._loaded[address].engine.resume(0)
            weights = self._loaded[address]
            weights.users += 1
            self._loaded.move_to_end(address)
            await self._drop_unused()
            return weights

    def _load(self, address: str | None) -> _LoadedWeights:
        folder, shape = (None, None) if address is None else self._folders.find(address)
        policy = load_policy(make_model_config(self._base, shape))
        if folder is not None:
            load_adapters(policy.network.model, folder)
        config = validate_section(TorchGenerationConfig, {"kv_cache_memory_gb": self._kv_cache_gb})
        engine = make_torch_engine(policy.network, policy.tokenizer, config, length=self._length, stop_ids=policy.stop_ids)
        return _LoadedWeights(policy, engine)

    async def _drop_unused(self) -> None:
        idle = [address for address, weights in self._loaded.items() if not weights.users]
        for address in idle[: max(len(self._loaded) - self._limit, 0)]:
            await self._loaded.pop(address).engine.close()

    async def close(self) -> None:
        for weights in self._loaded.values():
            await weights.engine.close()
