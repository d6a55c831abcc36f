"""The embedded engine: a cache of fixed slots against pages, in alternation in one process, with the same weights and requests.

    python benchmarks/engine.py                                      # all workloads, float32 and bfloat16
    python benchmarks/engine.py --workloads short group --dtype float32 --rounds 5
    python benchmarks/engine.py --steps --layers 4 --threads 1       # decoding steps alone, processor time: for a busy machine

A round runs A B, the next B A. What is reported is tokens per second of each side (median, minimum to maximum) and the ratio pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import MODEL

from strop.generation.torch.model_runner import CachedRunner, SlotPrompt
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine
from strop.models.loading import load_model
from strop.models.network import Network
from strop.sampling import Sampling

SIDES = {"slots": CachedRunner, "pages": PagedRunner}


@dataclass(frozen=True)
class Conversation:
    """The turns of one conversation: what is read before each answer, and how long the answer is."""

    seed: int
    turns: tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Workload:
    """Conversations that run at once."""

    name: str
    length: int  # of the longest sequence
    conversations: tuple[Conversation, ...]


def make_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(count))


def short(rng: random.Random) -> Workload:
    """32 different prompts of 45 tokens, answers of 48."""
    return Workload("32 short", 192, tuple(Conversation(seed, ((make_tokens(rng, 45), 48),)) for seed in range(32)))


def group(rng: random.Random) -> Workload:
    """4 groups of 8 on prompts of about 1,000 tokens, answers of 32."""
    prompts = [make_tokens(rng, rng.randrange(900, 1100)) for _ in range(4)]
    return Workload(
        "4 x 8, 1k prompt", 1280, tuple(Conversation(8 * g + c, ((prompts[g], 32),)) for g in range(4) for c in range(8))
    )


def turns(rng: random.Random) -> Workload:
    """16 conversations of four turns, each after an observation of 80 tokens."""
    conversations = tuple(
        Conversation(seed, tuple((make_tokens(rng, 200 if turn == 0 else 80), 32) for turn in range(4))) for seed in range(16)
    )
    return Workload("16 x 4 turns", 768, conversations)


def mixed(rng: random.Random) -> Workload:
    """32 requests: prompts of 20 to 600 tokens, answers of 16 to 128."""
    conversations = tuple(
        Conversation(seed, ((make_tokens(rng, rng.choice((20, 60, 150, 300, 600))), rng.choice((16, 32, 64, 128))),))
        for seed in range(32)
    )
    return Workload("32 mixed", 768, conversations)


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {"short": short, "group": group, "turns": turns, "mixed": mixed}


async def converse(engine: TorchEngine, conversation: Conversation) -> int:
    so_far: tuple[int, ...] = ()
    sampled = 0
    for index, (observed, count) in enumerate(conversation.turns):
        so_far += observed
        session = f"s{conversation.seed}" if len(conversation.turns) > 1 else ""
        completion = await engine.generate(
            so_far, sampling=Sampling(max_new_tokens=count), seed=conversation.seed + 1000 * index, session=session
        )
        so_far += tuple(completion.tokens.tolist())
        sampled += len(completion.tokens)
    return sampled


async def run_once(engine: TorchEngine, workload: Workload) -> tuple[float, int]:
    engine.resume(engine.version + 1)
    started = time.perf_counter()
    sampled = sum(await asyncio.gather(*(converse(engine, each) for each in workload.conversations)))
    seconds = time.perf_counter() - started
    await engine.drain()
    return seconds, sampled


class _NoText:
    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return ""


@dataclass(frozen=True)
class Row:
    """Tokens per second, and the ratio of the second side to the first."""

    workload: str
    dtype: str
    rates: dict[str, list[float]]
    ratios: list[float]

    def __str__(self) -> str:
        sides = ", ".join(
            f"{name} {median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for name, rates in self.rates.items()
        )
        ratio = f"{median(self.ratios):.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        return f"{self.workload:18} {self.dtype:9} {sides} tokens/s, ratio {ratio}"


def measure(network: Network, workload: Workload, dtype: str, rounds: int, memory: float, kernels: bool | None) -> Row:
    config = TorchGenerationConfig(kv_cache_memory_gb=memory, compiled_kernels=kernels)
    engines = {
        name: TorchEngine(runner(network, config, length=workload.length), _NoText(), stop_ids=())
        for name, runner in SIDES.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}

    async def run() -> None:
        for engine in engines.values():
            await run_once(engine, workload)  # warm up
        for index in range(rounds):
            for name in sorted(engines, reverse=bool(index % 2)):
                seconds, sampled = await run_once(engines[name], workload)
                rates[name].append(sampled / seconds)
        for engine in engines.values():
            await engine.close()

    asyncio.run(run())
    ratios = [b / a for a, b in zip(rates["slots"], rates["pages"], strict=True)]
    return Row(workload.name, dtype, rates, ratios)


def step_prompts(rng: random.Random) -> dict[str, list[tuple[int, ...]]]:
    """Return what the sequences of a decoding step have read."""
    groups = [make_tokens(rng, 1000) for _ in range(4)]
    return {
        "32 x 45": [make_tokens(rng, 45) for _ in range(32)],
        "16 x 300": [make_tokens(rng, 300) for _ in range(16)],
        "25 x 20 to 600": [make_tokens(rng, length) for length in (20, 60, 150, 300, 600) * 5],
        "4 x 8, 1k shared": [group for group in groups for _ in range(8)],
    }


def measure_steps(network: Network, prompts: list[tuple[int, ...]], config: TorchGenerationConfig, steps: int = 24) -> str:
    """Alternate decoding steps of both sides; report the processor time of a step and the largest difference of logits."""
    runners = {name: runner(network, config, length=max(map(len, prompts)) + steps + 1) for name, runner in SIDES.items()}
    for runner in runners.values():
        runner.activate()
        asked = [SlotPrompt(slot, prompt) for slot, prompt in enumerate(prompts)]
        assert all(runner.reserve(prompt) for prompt in asked)
        runner.prefill(asked)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    positions, logits, difference = [len(prompt) for prompt in prompts], {}, 0.0
    for step in range(steps):
        for name in sorted(runners, reverse=bool(step % 2)):
            assert runners[name].extend([position + 1 for position in positions])
            started = time.process_time()
            logits[name] = runners[name].decode([5 + step] * len(positions), positions)
            seconds[name].append(time.process_time() - started)
        difference = max(difference, float((logits["slots"] - logits["pages"]).abs().max()))
        positions = [position + 1 for position in positions]
    slots, pages = (1e3 * median(seconds[name][4:]) for name in ("slots", "pages"))
    return f"slots {slots:.1f} ms, pages {pages:.1f} ms, ratio {slots / pages:.2f}, largest difference of logits {difference:.1e}"


def make_random_model(layers: int) -> Any:
    """Make a model of the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, help="random weights of the model's shape with so many layers, for a quick look")
    parser.add_argument("--steps", action="store_true", help="decoding steps alone, in processor time")
    parser.add_argument("--modules", action="store_true", help="without compiled kernels")
    parser.add_argument("--memory", type=float, default=3.5, help="of each side's cache (GiB)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.threads} threads")
    model = make_random_model(options.layers) if options.layers else load_model(options.model)
    rows, kernels = [], False if options.modules else None
    for dtype in options.dtype:
        network = Network(model, precision=getattr(torch, dtype))
        if options.steps:
            config = TorchGenerationConfig(kv_cache_memory_gb=options.memory, compiled_kernels=kernels)
            for name, prompts in step_prompts(random.Random(1)).items():
                print(f"{name:18} {dtype:9} {measure_steps(network, prompts, config)}", flush=True)
            continue
        for name in options.workloads:
            rows.append(measure(network, WORKLOADS[name](random.Random(7)), dtype, options.rounds, options.memory, kernels))
            print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
