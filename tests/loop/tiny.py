"""A language model so small that a complete run takes seconds: two Llama layers, about a hundred tokens, a ChatML template.

The weights are random and untrained. Digits and the end of a turn are made likely, so that sums of small numbers are sometimes correct
and there is a signal to learn from. A few merges ("12", "th") make tokenization ambiguous, so that tests detect re-tokenization of
sampled text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

END, START, PAD, UNKNOWN = "<|im_end|>", "<|im_start|>", "<|pad|>", "<|unk|>"
MERGES = [("1", "2"), ("3", "4"), ("t", "h"), ("th", "e"), ("i", "n")]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(*, template: str | None = CHATML) -> Any:
    """Build a tokenizer of ASCII characters and the merges above."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, START, UNKNOWN, "\n", *map(chr, range(32, 127)), *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, MERGES, unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def tiny_model(vocabulary: int, *, seed: int = 0, likely: tuple[int, ...] = (), head_dim: int = 8) -> Any:
    """Build the model. ``likely`` tokens get larger logits: all embeddings share a direction that their output rows align with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if "embed" in name else 0.15))
        model.get_input_embeddings().weight[:, 0] = 2.0
        for token in likely:
            model.get_output_embeddings().weight[token, 0] += 1.0
    return model


def build_tiny(folder: Path, *, seed: int = 0, template: str | None = CHATML, head_dim: int = 8) -> Path:
    """Save the model and its tokenizer to a Hugging Face folder. vLLM's CPU kernels need a ``head_dim`` of at least 32."""
    tokenizer = tiny_tokenizer(template=template)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    model = tiny_model(
        len(tokenizer), seed=seed, likely=(*digits, tokenizer.eos_token_id, tokenizer.eos_token_id), head_dim=head_dim
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
