"""An embedded engine without a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.generation.base import Completion
from strop.generation.torch.model_runner import CachedRunner, ModelRunner
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.speculation import Drafter
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.network import Network
from strop.sampling import Sampling


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=8))
    seed: int = 0
    session: str = ""


def make_runner(
    network: Network,
    *,
    slots: int = 4,
    length: int = 48,
    prefix_tokens: int = 96,
    prefixes: int = 8,
    prepack: bool | None = False,
    cuda_graphs: bool = False,
) -> CachedRunner:
    """Build a runner with memory for ``slots`` sequences of ``length`` tokens and ``prefix_tokens`` cached prefix tokens, with the
    states of ``prefixes``.
    """
    from strop.generation.torch.model_runner import infer_cache_shape

    shape = infer_cache_shape(network)
    stored = length if shape.exact is None else shape.round_span(length)
    memory = (slots * (stored + shape.state_tokens) + prefix_tokens + prefixes * shape.state_tokens) * shape.bytes_per_token
    return CachedRunner(
        network, cache_config(memory, slots=slots, prepack_weights=prepack, cuda_graphs=cuda_graphs), length=length
    )


def make_paged_runner(
    network: Network,
    *,
    slots: int = 4,
    length: int = 48,
    prefix_tokens: int = 96,
    page: int | None = 16,
    prepack: bool | None = False,
) -> PagedRunner:
    """Build a runner with a paged cache of the same memory; ``slots`` limits the sequences only."""
    from strop.generation.torch.model_runner import infer_cache_shape

    shape = infer_cache_shape(network)
    states = slots * shape.state_tokens
    memory = max(slots * length + prefix_tokens + 2 * states, 4 * states) * shape.bytes_per_token
    return PagedRunner(network, cache_config(memory, slots=slots, prepack_weights=prepack), length=length, page=page)


def cache_config(
    memory: float, *, slots: int, prepack_weights: bool | None = None, cuda_graphs: bool = True
) -> TorchGenerationConfig:
    """Return a configuration with ``memory`` bytes of cache."""
    return TorchGenerationConfig(
        kv_cache_memory_gb=memory / 2**30, max_num_seqs=slots, prepack_weights=prepack_weights, cuda_graphs=cuda_graphs
    )


def make_engine(
    runner: ModelRunner,
    tokenizer: Any = None,
    *,
    stop_ids: Sequence[int] = (),
    prefill_tokens: int = 4096,
    drafts: int = 0,
    drafter: Drafter | None = None,
) -> TorchEngine:
    """Build an engine that is ready to generate with weights of version 0."""
    exact = runner.network.exact if isinstance(runner, CachedRunner) else None
    engine = TorchEngine(
        runner,
        tokenizer or _EmptyTokenizer(),
        stop_ids=stop_ids,
        prefill_tokens=prefill_tokens,
        drafts=drafts,
        drafter=drafter,
        exact=exact,
    )
    engine.resume(0)
    return engine


class _EmptyTokenizer:
    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return ""


async def generate_all(engine: TorchEngine, requests: Sequence[Request]) -> list[Completion]:
    """Run all requests concurrently. Returns completions in order."""
    return list(
        await asyncio.gather(
            *(
                engine.generate(request.prompt, sampling=request.sampling, seed=request.seed, session=request.session)
                for request in requests
            )
        )
    )


def run_requests(engine: TorchEngine, requests: Sequence[Request]) -> list[Completion]:
    """Run all requests without an event loop, then close the engine."""

    async def run() -> list[Completion]:
        try:
            return await generate_all(engine, requests)
        finally:
            await engine.close()

    return asyncio.run(run())


def token_lists(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]
