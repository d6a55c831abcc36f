"""Processor seconds of one forward and backward pass over a GRPO group whose prompt is shared, packed without sharing, or padded.

python benchmarks/shared_prompts.py                                  each family, groups of 8 and 16, prompts of 512 and 2,048
python benchmarks/shared_prompts.py --families qwen3_5 --prompts 512

Tiny random models in float32 on one thread: 4 layers of width 128, completions of 64 to 128 tokens, one run each after a warm-up on a
small group. Tokens are those that the network reads.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from strop.data.packing import pack
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch, Group, Turn
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


def make_one_group(prompt: int, size: int) -> Group:
    chosen = random.Random(0)
    opening = [chosen.randrange(3, 200) for _ in range(prompt)]

    def turn() -> Turn:
        length = chosen.randint(64, 128)
        return Turn(
            author="policy", tokens=torch.tensor([chosen.randrange(3, 200) for _ in range(length)]), text="",
            logprobs=torch.zeros(length), versions=torch.zeros(length, dtype=torch.int32),
        )  # fmt: skip

    return make_group(*(make_rollout(opening, turn()) for _ in range(size)))


def count_tokens(batch: Batch, layout: str) -> int:
    if layout != "padded":
        return len(batch.tokens)
    lengths = [sum(int(batch.segment_length[segment]) for segment in path) for paths in batch.rollout_paths() for path in paths]
    return len(lengths) * max(lengths)


def measure(network: Network, batch: Batch) -> tuple[float, float]:
    """Return the processor's seconds of the forward and of the backward pass, which other processes change little."""
    network.model.zero_grad(set_to_none=True)
    start = time.process_time()
    loss = network.outputs(batch, Sampling()).logprobs.mean()
    middle = time.process_time()
    loss.backward()
    return middle - start, time.process_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--groups", nargs="+", type=int, default=[8, 16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | prompt | group | " + " | ".join(f"{each}: tokens, s forward + backward" for each in LAYOUTS) + " |")
    print("|---" * (3 + len(LAYOUTS)) + "|")
    for name in options.families:
        networks = {packed: Network(build(name, **FAMILIES[name]), packed=packed) for packed in (True, False)}
        for network in networks.values():
            measure(network, pack([make_one_group(64, 2)]))
        for prompt in options.prompts:
            for size in options.groups:
                cells = []
                for layout in LAYOUTS:
                    batch = pack([make_one_group(prompt, size)], share_prefixes=layout == "shared")
                    forward, backward = measure(networks[layout != "padded"], batch)
                    cells.append(f"{count_tokens(batch, layout):,}, {forward:.2f} + {backward:.2f}")
                print(f"| {name} | {prompt:,} | {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
