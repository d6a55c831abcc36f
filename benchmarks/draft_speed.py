"""Tokens per second of the embedded engine with a draft head that is often right, and without drafts, in alternation.

    python benchmarks/draft_speed.py --layers 12 --width 512 --sequences 1 8

A random Llama says a greedy text after its prompt, which a new head learns by heart. So drafts are about as good as they get, and what
is left is what the head and the longer passes cost on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.models.network import Network
from strop.sampling import Sampling
from support.drafts import make_learned_head
from support.rollouts import make_group, make_rollout, sampled_turn
from support.torch_engine import Request, run_requests

PROMPT = tuple(range(40, 60))


def build(layers: int, width: int, vocabulary: int) -> Network:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        initializer_range=0.05,
        max_position_embeddings=512,
    )
    return Network(LlamaForCausalLM(config).eval())


def make_engine(network: Network, drafts: int) -> TorchEngine:
    config = TorchGenerationConfig(kv_cache_memory_gb=0.5, max_num_seqs=16)
    engine = make_torch_engine(network, Texts(), replace(config, speculative_draft=drafts), length=256, stop_ids=())
    engine.resume(0)
    return engine


class Texts:
    """A tokenizer of nothing."""

    def decode(self, tokens: object, **_: object) -> str:
        return ""


def measure(network: Network, drafts: int, sequences: int, tokens: int) -> tuple[float, float]:
    """Return seconds of a batch of requests, and the share of drafts that were accepted."""
    engine = make_engine(network, drafts)
    requests = [Request(PROMPT, Sampling(max_new_tokens=tokens, temperature=0.0), seed=place) for place in range(sequences)]
    start = time.perf_counter()
    run_requests(engine, requests)
    counts = engine.counters
    return time.perf_counter() - start, counts.accepted_tokens / max(counts.drafted_tokens, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40, help="of training the head")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=3)
    options = parser.parse_args()
    network = build(options.layers, options.width, options.vocabulary)
    network.use_native_attention()
    prompt = torch.tensor([PROMPT])
    text = network.model.generate(prompt, max_new_tokens=options.tokens, do_sample=False, eos_token_id=-1)[0, len(PROMPT) :]
    network.use_learner_attention()
    rollouts = (make_rollout(PROMPT, sampled_turn(text.tolist()), reward=float(place)) for place in range(2))
    make_learned_head(network, steps=options.steps, groups=[make_group(*rollouts)])
    for sequences in options.sequences:
        ratios, accepted = [], 0.0
        for repeat in range(options.repeats + 1):
            plain, _ = measure(network, 0, sequences, options.tokens)
            drafted, accepted = measure(network, options.drafts, sequences, options.tokens)
            if repeat:
                ratios.append(plain / drafted)
        rate = sequences * options.tokens / drafted
        print(
            f"{sequences} sequences: {accepted:.0%} of drafts accepted, {rate:.0f} tokens/s with drafts, without / with "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
