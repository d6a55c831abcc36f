"""Real vLLM engines for tests: a tiny model, one event loop that outlives the tests, and verified publishes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.generation.engine_launch import LaunchedAdapters
from strop.generation.generation_config import GenerationConfig, RolloutQuantizationConfig
from strop.generation.pool import EnginePool
from strop.generation.quantized_rollouts import make_weight_rounding
from strop.generation.vllm.engine_args import VllmLaunch
from strop.generation.vllm.vllm_config import VllmConfig
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.sampling import Sampling, filtered_logits
from strop.weight_sync.base import CanarySample, Sender
from strop.weight_sync.exporter import AdapterSource, BlockingExporter, LocalExporter, make_local_exporter
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.verification import Canary
from strop.weight_sync.weight_sync_config import WeightSyncConfig
from support.models import VOCABULARY
from support.tokenizer import END

T = TypeVar("T")

TESTS = Path(__file__).parents[1]  # on the engines' path, for the faulty worker


class BackgroundLoop:
    """An event loop in a thread. Engines are bound to the loop that started them, and a test's own loop ends with the test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 240) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def served_model(family: str = "llama", *, layers: int = 2, tied: bool = True, seed: int = 0, spread: float = 0.08) -> Any:
    """Build a tiny float32 model with varied logits and the minimum head size of vLLM's CPU kernels."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
        "initializer_range": spread,
    }
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def perturb(model: Any, seed: int, size: float = 0.02) -> None:
    """Add noise to every weight, to get a different policy."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def save_model_folder(model: Any, tokenizer: Any, folder: Path, *, weights: bool = False) -> Path:
    """Save the folder from which vLLM builds the model: config and tokenizer, optionally weights."""
    model.config.architectures = [type(model).__name__]
    if weights:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_launch(
    folder: Path,
    *,
    on_cpu: bool = True,
    max_lora_rank: int | None = None,
    worker_extension: str | None = None,
    quantization: RolloutQuantizationConfig | None = None,
    draft: str = "",
    **keys: Any,
) -> VllmLaunch:
    """Return what an engine is launched with. ``keys``: of the configuration's section ``vllm_cfg``."""
    small: dict[str, Any] = {"precision": "float32", "max_model_len": 256, "kv_cache_memory_gb": 0.125, "startup_seconds": 200}
    launch = VllmLaunch(
        config=GenerationConfig(
            vllm_cfg=VllmConfig(**{**small, **keys}), quantization=quantization or RolloutQuantizationConfig()
        ),
        model=str(folder),
        on_cpu=on_cpu,
        adapters=None if max_lora_rank is None else LaunchedAdapters(max_lora_rank),
        draft=draft,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        output_file=folder / "engine.log",
    )
    return launch if worker_extension is None else replace(launch, worker_extension=worker_extension)


def compute_logprobs(model: Any, prompt: Sequence[int], tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return the model's own log-probabilities of the tokens after the prompt, [L]."""
    row = torch.cat([torch.tensor(list(prompt)), tokens])
    with torch.no_grad():
        logits = model(row[None].to(model.device)).logits[0, len(prompt) - 1 : -1].cpu()
    return filtered_logits(logits, sampling, tokens).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def make_canary_scorer(
    model: Any, sampling: Sampling
) -> Callable[[Sequence[Sequence[int]], Sequence[CanarySample]], Awaitable[list[Tensor]]]:
    async def score(prompts: Sequence[Sequence[int]], answers: Sequence[CanarySample]) -> list[Tensor]:
        return [compute_logprobs(model, prompt, answer.tokens, sampling) for prompt, answer in zip(prompts, answers, strict=True)]

    return score


FAULTY = "support.faulty_worker.FaultyWorker"  # a worker that can be told to go wrong
ALWAYS = WeightSyncConfig(proof="always")
PROMPTS = (tuple(range(10, 90)), tuple(range(200, 120, -1)))  # more than two blocks of the prefix cache


@dataclass
class ServedModel:
    """A model, its engines and the weight publisher."""

    model: Any
    tokenizer: Any
    engines: list[VllmEngine]
    pool: EnginePool
    weights: WeightPublisher

    @property
    def engine(self) -> VllmEngine:
        return self.engines[0]

    @property
    def export(self) -> BlockingExporter:
        exporter = self.weights.exporter
        assert isinstance(exporter, LocalExporter)
        return exporter.export

    async def close(self) -> None:
        await self.pool.close()
        await self.weights.close()


def serve(
    model: Any,
    tokenizer: Any,
    engines: list[VllmEngine],
    *,
    sampling: Sampling | None = None,
    config: WeightSyncConfig = ALWAYS,
    make_sender: Callable[[int], Sender] = MemorySender,
    adapters: AdapterSource | None = None,
    tolerance: float = 0.002,
    drafted: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    **changes: Any,
) -> ServedModel:
    """Connect engines with a publisher. Nothing starts before the first publish. ``drafted``: weights of a draft head."""
    asked = sampling or Sampling(max_new_tokens=8)
    replicas = EnginePool(engines)
    options = PublishOptions(**{"separate_devices": True, "adapters": adapters is not None, **changes})
    weights = WeightPublisher(
        make_local_exporter(
            lambda: (*model.state_dict().items(), *drafted()),
            make_sender,
            dtype=getattr(torch, engines[0].config.dtype),
            keep_snapshot=options.async_training,
            adapters=adapters,
            quantization=make_weight_rounding(engines[0].launch.config, "float32"),
        ),
        engines,
        config,
        options,
        canary=Canary(prompts=PROMPTS, sampling=asked, score=make_canary_scorer(model, asked), tolerance=tolerance),
        on_published=replicas.set_version,
    )
    replicas.restart_engine = weights.restart_engine
    return ServedModel(model, tokenizer, engines, replicas, weights)


def serve_vllm(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    adapters: AdapterSource | None = None,
    tolerance: float = 0.002,
    drafted: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    **keys: Any,
) -> ServedModel:
    """Serve a model with one engine, which has no weights before the first publish. ``keys``: as of ``make_launch``."""
    launch = make_launch(save_model_folder(model, tokenizer, folder), **keys)
    engine = VllmEngine("engine 0", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,))
    return serve(model, tokenizer, [engine], adapters=adapters, tolerance=tolerance, drafted=drafted)
