"""What ``policy.exact_on_policy`` costs: generation and training with and without it, in alternation, on random weights of SmolLM2's shape.

    python benchmarks/exact_on_policy.py --precision bfloat16 --layers 6

32 rollouts (4 prompts of 96 tokens, 32 new tokens each) are sampled, then trained on. Each ratio is exact to ordinary of one repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from strop.extensions.labs.exact.exact_passes import make_network_exact
from strop.generation.base import Completion
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.models.layers.fused_layers import use_fused_layers
from strop.models.network import Network
from strop.sampling import Sampling

PROMPTS, COPIES, PROMPT, NEW, VOCABULARY = 4, 8, 96, 32, 49152
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NoText:
    """The engine's tokenizer."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def make_network(exact: bool, layers: int, precision: torch.dtype) -> Network:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    network = Network(AutoModelForCausalLM.from_config(config), precision=precision, packed=True)
    if exact:
        make_network_exact(network)
    return network


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (PROMPTS, PROMPT), generator=generator).tolist()  # type: ignore[no-any-return]


def generate(engine: TorchEngine) -> list[Completion]:
    async def run() -> list[Completion]:
        engine.resume(0)
        sampling = Sampling(max_new_tokens=NEW)
        jobs = [
            engine.generate(prompt, sampling=sampling, seed=COPIES * place + copy)
            for place, prompt in enumerate(make_prompts())
            for copy in range(COPIES)
        ]
        completions = await asyncio.gather(*jobs)
        await engine.close()
        return list(completions)

    return asyncio.run(run())


def train(network: Network, batch: Any) -> Tensor:
    with use_fused_layers(network, keep_copies=True):
        logprobs = network.outputs(batch, Sampling()).logprobs
        logprobs.sum().backward()
    network.model.zero_grad()
    return logprobs.detach()


def make_batch(completions: list[Completion]) -> Any:
    """A packed batch of the rollouts, each prompt once."""
    from strop.types import Batch, Totals

    tokens, positions, starts, parents, lengths = [], [], [], [], []
    source, target, sequence, rollout = [], [], [], []
    for place, prompt in enumerate(make_prompts()):
        root = len(starts)
        for parent, row, first in [(-1, prompt, 0)] + [
            (root, completions[COPIES * place + copy].tokens.tolist()[:-1], PROMPT) for copy in range(COPIES)
        ]:
            starts.append(len(tokens))
            parents.append(parent)
            lengths.append(len(row))
            tokens += row
            positions += range(first, first + len(row))
        for copy in range(COPIES):
            index = COPIES * place + copy
            found, start = completions[index].tokens.tolist(), starts[root + 1 + copy]
            source += [starts[root] + PROMPT - 1, *range(start, start + len(found) - 1)]
            target += found
            sequence += [index] * len(found)
            rollout.append(completions[index].logprobs)
    count = len(target)
    columns = {"tokens": tokens, "positions": positions, "segment_start": starts, "segment_parent": parents}
    columns |= {"source": source, "target": target, "sequence": sequence}
    return Batch(
        **{name: torch.tensor(column) for name, column in columns.items()},
        rollout_logprobs=torch.cat(rollout),
        versions=torch.zeros(count, dtype=torch.int32),
        advantages=torch.ones(count),
        mask=torch.ones(count),
        leaf=torch.tensor([place for place, parent in enumerate(parents) if parent >= 0]),
        group=torch.arange(PROMPTS).repeat_interleave(COPIES),
        rewards=torch.zeros(PROMPTS * COPIES),
        totals=Totals(count, PROMPTS * COPIES, PROMPTS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    networks = {exact: make_network(exact, options.layers, PRECISIONS[options.precision]) for exact in (False, True)}
    config = TorchGenerationConfig(max_num_seqs=32, kv_cache_memory_gb=0.5)
    ratios: dict[str, list[float]] = {"generation": [], "training": []}
    differences = {}
    for repetition in range(options.repetitions + 1):
        seconds: dict[tuple[str, bool], float] = {}
        for exact, network in networks.items():
            engine = make_torch_engine(network, NoText(), config, length=256, stop_ids=())
            started = time.perf_counter()
            completions = generate(engine)
            seconds["generation", exact] = time.perf_counter() - started
            batch = make_batch(completions)
            started = time.perf_counter()
            logprobs = train(network, batch)
            seconds["training", exact] = time.perf_counter() - started
            differences[exact] = float((logprobs - batch.rollout_logprobs).abs().max())
        if repetition:  # the first makes copies and tries shapes
            for name, found in ratios.items():
                found.append(seconds[name, True] / seconds[name, False])
        print(
            {f"{name} {'exact' if exact else 'ordinary'}": round(value, 2) for (name, exact), value in seconds.items()},
            flush=True,
        )
    print(f"largest difference of a log-probability: ordinary {differences[False]:.2g}, exact {differences[True]:.2g}")
    for name, found in ratios.items():
        print(f"{name}: exact / ordinary {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
