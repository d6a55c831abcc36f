"""Shapes of the models that are measured, with random weights, and batches of made-up rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The dimensions of a Llama-like decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool = True

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of the layers' matrices."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary


TINY = ModelSize(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocabulary=512)
SIZES = {
    "0.5B": ModelSize(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocabulary=151_936),  # Qwen2.5-0.5B's
    "1.5B": ModelSize(hidden=1536, layers=28, heads=12, kv_heads=2, intermediate=8960, vocabulary=151_936),  # Qwen2.5-1.5B's
    "8B": ModelSize(  # Llama-3.1-8B's
        hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14_336, vocabulary=128_256, tied=False
    ),
}


def build_model(size: ModelSize, device: str, dtype: torch.dtype, *, longest: int = 65_536) -> Any:
    """Build a Llama with random weights on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=size.tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def make_batch(prompt: int, completions: Sequence[int], vocabulary: int, algorithm: Any, groups: int = 1) -> Any:
    """Pack groups of random rollouts, each of one prompt and its completions, with the algorithm's credit."""
    from strop.data.packing import pack

    generator = torch.Generator().manual_seed(0)
    made = [_draw_group(index, prompt, completions, vocabulary, generator) for index in range(groups)]
    return algorithm.token_credit(pack(made, algorithm.group_credit(made)))


def _draw_group(index: int, prompt: int, completions: Sequence[int], vocabulary: int, generator: torch.Generator) -> Any:
    def draw(count: int) -> torch.Tensor:
        return torch.randint(4, vocabulary, (count,), generator=generator)

    sampled = [(draw(length), -3 * torch.rand(length, generator=generator)) for length in completions]
    return make_group(index, draw(prompt), sampled)


def make_group(index: int, prompt: torch.Tensor, sampled: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a group of single-turn rollouts from their tokens and log-probabilities, with the rewards 0, 1, 0, 1, ..."""
    from strop.types import Ending, Group, Rollout, Task, Turn

    rollouts = [
        Rollout(
            task=Task(id=f"task {index}"),
            sample=sample,
            seed=sample,
            messages=(),
            prompt=prompt,
            turns=(
                Turn(
                    author="policy",
                    tokens=tokens,
                    text="",
                    logprobs=logprobs,
                    versions=torch.zeros(len(tokens), dtype=torch.int32),
                ),
            ),
            ending=Ending.STOP,
            reward=float(sample % 2),
        )
        for sample, (tokens, logprobs) in enumerate(sampled)
    ]
    return Group(index=index, environment="made-up", version=0, rollouts=tuple(rollouts))
