"""Shapes of the models that are measured, with random weights, batches of made-up rollouts, and a made-up reward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A job imports what takes seconds before its turn.
import torch
import transformers  # noqa: F401

import strop.generation.torch.torch_engine
import strop.learner.torch.learner  # noqa: F401
import support.learners  # noqa: F401

if TYPE_CHECKING:
    from job import Target


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


TINY = ModelSize(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocabulary=512)
SIZES = {
    "0.5B": ModelSize(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocabulary=151_936),  # Qwen2.5-0.5B's
    "1.5B": ModelSize(hidden=1536, layers=28, heads=12, kv_heads=2, intermediate=8960, vocabulary=151_936),  # Qwen2.5-1.5B's
    "8B": ModelSize(  # a quarter of Llama-3.1-8B's layers, as much as one GPU trains
        hidden=4096, layers=8, heads=32, kv_heads=8, intermediate=14_336, vocabulary=128_256, tied=False
    ),
}


def choose_size(name: str, target: Target) -> ModelSize:
    return TINY if target.tiny else SIZES[name]


def build_model(size: ModelSize, device: str, dtype: torch.dtype, **special: Any) -> Any:
    """Build a Llama with random weights on the device. ``special``: the ids of a tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=65_536,
        tie_word_embeddings=size.tied,
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, **special},
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def save_model(name: str, target: Target) -> Path:
    """Save a model and the tests' tokenizer, unless another job has done so; return the folder."""
    from loop.tiny import tiny_tokenizer

    folder = target.work / f"model-{name}"
    if not folder.exists():
        tokenizer = tiny_tokenizer()
        own = target.work / f"model-{name}-{os.getpid()}"
        device = "cpu" if target.tiny else target.device
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        build_model(choose_size(name, target), device, torch.float32, **ids).save_pretrained(own)
        tokenizer.save_pretrained(own)
        if folder.exists():  # several jobs began at once
            return own
        own.rename(folder)
    return folder


def alternate(task: Any, rollouts: Sequence[Any]) -> list[float]:
    """A reward that no group has in common: without a difference there is nothing to train on, and no backward pass."""
    return [float(index % 2) for index in range(len(rollouts))]


def make_batch(prompt: int, completions: Sequence[int], vocabulary: int, algorithm: Any, groups: int = 1) -> Any:
    """Pack groups of random rollouts, each of one prompt and its completions, with the algorithm's credit."""
    from strop.data.packing import pack

    generator = torch.Generator().manual_seed(0)
    made = [_draw_group(index, prompt, completions, vocabulary, generator) for index in range(groups)]
    return algorithm.token_credit(pack(made, algorithm.group_credit(made)))


def _draw_group(index: int, prompt: int, completions: Sequence[int], vocabulary: int, generator: torch.Generator) -> Any:
    """Return a group of single-turn rollouts with the rewards 0, 1, 0, 1, ..."""
    from support.rollouts import make_group, make_rollout, sampled_turn

    def draw(count: int) -> list[int]:
        return torch.randint(4, vocabulary, (count,), generator=generator).tolist()

    asked = draw(prompt)
    turns = [sampled_turn(draw(length), (-3 * torch.rand(length, generator=generator)).tolist()) for length in completions]
    return make_group(*(make_rollout(asked, turn, reward=float(place % 2)) for place, turn in enumerate(turns)), index=index)
