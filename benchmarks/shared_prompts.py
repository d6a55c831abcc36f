"""Processor seconds of one forward and backward pass over a GRPO group whose prompt is shared, packed without sharing, or padded.

python benchmarks/shared_prompts.py                                  each family, groups of 8 and 16, prompts of 512 and 2,048
python benchmarks/shared_prompts.py --families qwen3_5 --prompts 512 --repeats 5

Tiny random models in float32 on one thread: 4 layers of width 128, completions of 64 to 128 tokens. Each repetition measures the three
layouts one after another; printed are the median of the seconds, and the median, smallest and largest of the ratios to the shared pass of
the same repetition. Tokens are those that the network reads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from strop.data.packing import pack
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch, Rollout, Turn
from support.every_family import build
from support.rollouts import make_group, make_rollout

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **WIDE, "num_hidden_layers": 4, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "nemotron_h": {**WIDE, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32},
    "llama": {**WIDE, "num_hidden_layers": 4},
    "deepseek_v4": {
        **WIDE, "head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 32, "sliding_window": 128, "index_head_dim": 32, "index_topk": 64,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
}  # fmt: skip
LAYOUTS = ("shared", "packed", "padded")
ROLLOUTS = 2  # in a pass of the last two, whose memory would be gigabytes


def make_rollouts(prompt: int, size: int) -> list[Rollout]:
    chosen = random.Random(0)
    opening = [chosen.randrange(3, 200) for _ in range(prompt)]

    def turn() -> Turn:
        length = chosen.randint(64, 128)
        return Turn(
            author="policy", tokens=torch.tensor([chosen.randrange(3, 200) for _ in range(length)]), text="",
            logprobs=torch.zeros(length), versions=torch.zeros(length, dtype=torch.int32),
        )  # fmt: skip

    return [make_rollout(opening, turn()) for _ in range(size)]


def pack_passes(rollouts: Sequence[Rollout], layout: str) -> list[Batch]:
    size = len(rollouts) if layout == "shared" else ROLLOUTS
    groups = [make_group(*rollouts[first : first + size]) for first in range(0, len(rollouts), size)]
    return [pack([group], share_prefixes=layout == "shared") for group in groups]


def count_tokens(batch: Batch, layout: str) -> int:
    if layout != "padded":
        return len(batch.tokens)
    lengths = [sum(int(batch.segment_length[segment]) for segment in path) for paths in batch.rollout_paths() for path in paths]
    return len(lengths) * max(lengths)


def measure(network: Network, passes: Sequence[Batch]) -> float:
    """Return the processor's seconds of the forward and the backward passes, which other processes change little."""
    network.model.zero_grad(set_to_none=True)
    start = time.process_time()
    for batch in passes:
        network.outputs(batch, Sampling()).logprobs.sum().backward()
    return time.process_time() - start


def compare(networks: dict[bool, Network], rollouts: Sequence[Rollout], repeats: int) -> list[str]:
    """Return the cells of one row."""
    passes = {layout: pack_passes(rollouts, layout) for layout in LAYOUTS}
    tokens = {layout: sum(count_tokens(batch, layout) for batch in passes[layout]) for layout in LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for _ in range(repeats):
        for layout, batches in passes.items():
            seconds[layout].append(measure(networks[layout != "padded"], batches))
    cells = [f"{tokens['shared']:,}, {statistics.median(seconds['shared']):.2f}"]
    for layout in LAYOUTS[1:]:
        ratios = [one / shared for one, shared in zip(seconds[layout], seconds["shared"], strict=True)]
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        cells.append(f"{tokens[layout]:,}, {spread}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--groups", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | prompt | group | shared: tokens, s | packed: tokens, times the seconds | padded: tokens, times the seconds |"
    )
    print("|---|---|---|---|---|---|")
    for name in options.families:
        networks = {packed: Network(build(name, **FAMILIES[name]), packed=packed) for packed in (True, False)}
        for network in networks.values():
            measure(network, pack_passes(make_rollouts(64, 2), "shared"))
        for prompt in options.prompts:
            for size in options.groups:
                cells = compare(networks, make_rollouts(prompt, size), options.repeats)
                print(f"| {name} | {prompt:,} | {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
