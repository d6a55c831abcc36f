"""Write a small vision-language model of random weights, to try a run with images on a CPU without a download.

    python examples/tiny_vlm.py models/tiny_vlm

It has Qwen2.5-VL's architecture with two layers, and a tokenizer of bytes. It knows nothing: train it with drawn_images/sft.yaml first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE = 14, 2  # pixels of a patch, and patches on each side of what one token stands for


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def make_model(tokenizer: Any, width: int, seed: int) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 32, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": width // 32, "out_hidden_size": width,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": 8 * PATCH,
        "fullatt_block_indexes": [0, 1],
    }  # fmt: skip
    tokens = {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True, **tokens,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so narrow a model learns nothing from Transformers' 0.02
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        return model


def save(folder: Path, *, width: int = 64, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its image processor as the hub has them."""
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    make_model(tokenizer, width, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    unit = (PATCH * MERGE) ** 2
    size = {"shortest_edge": unit, "longest_edge": 64 * unit}
    Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, temporal_patch_size=2, merge_size=MERGE).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it is written")
    parser.add_argument("--width", type=int, default=64, help="hidden size, a multiple of 32 (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"wrote {save(options.folder, width=options.width, seed=options.seed)}")
