"""Tiny random vision-language models of each family, with a byte-level tokenizer and an image processor that need no hub."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.import_hooks import install_hook
from support.models import ExactNorm, to_float64

install_hook()  # before transformers is imported: torchvision may be there and not fit torch

END, PAD = "<|im_end|>", "<|endoftext|>"
_COMMON = (PAD, "<|im_start|>", END)
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
_GEMMA4 = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>")
_IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES)

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyFamily:
    special: tuple[str, ...]  # tokens of images
    place: str  # what the chat template writes for an image
    config: Callable[[Mapping[str, int], dict[str, Any]], Any]  # of token ids and sizes of the language model
    image_processor: Callable[[], Any]


def _text(ids: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "tie_word_embeddings": False,
        **more,
    }


def _qwen_tokens(ids: Mapping[str, int]) -> dict[str, int]:
    names = {
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    return {f"{name}_token_id": ids[token] for name, token in names.items()}


def _qwen2_5_vl(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    text.pop("head_dim")
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=False, **_qwen_tokens(ids)
    )


def _qwen3_vl(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=False, **_qwen_tokens(ids)
    )


def _qwen3_vl_moe(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import Qwen3VLMoeConfig

    dense = _qwen3_vl(ids, text)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    vision = {key: value for key, value in dense.vision_config.to_dict().items() if key != "model_type"}
    return Qwen3VLMoeConfig(
        text_config={**text, **experts, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **_qwen_tokens(ids),
    )


def _qwen3_5(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import Qwen3_5Config

    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    }
    return Qwen3_5Config(
        text_config={**text, **heads, **layers, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **_qwen_tokens(ids),
    )


def _glm(kind: str, **experts: Any) -> Callable[[Mapping[str, int], dict[str, Any]], Any]:
    def make(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
        import transformers

        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 28,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        tokens = {
            "image_token_id": "<|image|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        }
        tokens |= {"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"}
        return getattr(transformers, kind)(
            text_config={**text, **experts, "rope_parameters": rope},
            vision_config=vision,
            tie_word_embeddings=False,
            **{name: ids[token] for name, token in tokens.items()},
        )

    return make


def _glm_images(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        size = {"shortest_edge": 4 * 14 * 14, "longest_edge": 64 * 14 * 14}
        return getattr(transformers, kind)(size=size, patch_size=14, temporal_patch_size=2, merge_size=2)

    return make


def _gemma3(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import Gemma3Config

    layers = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    return Gemma3Config(
        text_config={**text, **layers},
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        tie_word_embeddings=False,
        eos_token_id=ids[END],
    )


def _gemma4(**sizes: Any) -> Callable[[Mapping[str, int], dict[str, Any]], Any]:
    def make(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
        from transformers import Gemma4Config

        kinds = ["sliding_attention", "full_attention"] * 2
        own = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 12, "global_head_dim": 48}
        names = {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>", "video": "<|video|>", "audio": "<|audio|>"}
        vision = {
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 2,
            "position_embedding_size": 64,
        }
        return Gemma4Config(
            text_config={**text, **own, **sizes},
            vision_config=vision,
            audio_config=None,
            tie_word_embeddings=False,
            **{f"{name}_token_id": ids[token] for name, token in names.items()},
        )

    return make


def _gemma4_images() -> Any:
    from transformers import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70)


def _llava(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
    from transformers import LlavaConfig

    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 32,
    }
    return LlavaConfig(
        text_config={**text, "model_type": "llama"},
        vision_config=vision,
        image_token_index=ids["<image>"],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def _idefics(kind: str) -> Callable[[Mapping[str, int], dict[str, Any]], Any]:
    def make(ids: Mapping[str, int], text: dict[str, Any]) -> Any:
        import transformers

        vision = {
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        }
        return getattr(transformers, kind)(
            text_config={**text, "model_type": "llama"},
            vision_config=vision,
            image_token_id=ids["<image>"],
            scale_factor=2,
            pad_token_id=ids[PAD],
            tie_word_embeddings=False,
        )

    return make


def _qwen_images(patch: int) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
        return Qwen2VLImageProcessorPil(size=size, patch_size=patch, temporal_patch_size=2, merge_size=2)

    return make


def _gemma3_images() -> Any:
    from transformers import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4)


def _llava_images() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _idefics_images(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})

    return make


FAMILIES: dict[str, TinyFamily] = {
    "qwen2_5_vl": TinyFamily(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen2_5_vl, _qwen_images(14)),
    "qwen3_vl": TinyFamily(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen3_vl, _qwen_images(16)),
    "qwen3_vl_moe": TinyFamily(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen3_vl_moe, _qwen_images(16)),
    "qwen3_5": TinyFamily(_QWEN, "<|vision_start|><|image_pad|><|vision_end|>", _qwen3_5, _qwen_images(16)),
    "glm4v": TinyFamily(
        _GLM, "<|begin_of_image|><|image|><|end_of_image|>", _glm("Glm4vConfig"), _glm_images("Glm4vImageProcessorPil")
    ),
    "glm4v_moe": TinyFamily(
        _GLM,
        "<|begin_of_image|><|image|><|end_of_image|>",
        _glm("Glm4vMoeConfig", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
        _glm_images("Glm4vImageProcessorPil"),
    ),
    "glm46v": TinyFamily(
        _GLM, "<|begin_of_image|><|image|><|end_of_image|>", _glm("Glm46VConfig"), _glm_images("Glm46VImageProcessorPil")
    ),
    "gemma3": TinyFamily(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<start_of_image>", _gemma3, _gemma3_images
    ),
    "gemma4": TinyFamily(
        _GEMMA4,
        "<|image|>",
        _gemma4(hidden_size_per_layer_input=16, vocab_size_per_layer_input=320, num_kv_shared_layers=2, use_double_wide_mlp=True),
        _gemma4_images,
    ),
    "gemma4_moe": TinyFamily(
        _GEMMA4,
        "<|image|>",
        _gemma4(
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            num_key_value_heads=2,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        _gemma4_images,
    ),
    "llava": TinyFamily(("<image>",), "<image>\n", _llava, _llava_images),
    "smolvlm": TinyFamily(_IDEFICS, "<image>", _idefics("SmolVLMConfig"), _idefics_images("SmolVLMImageProcessorPil")),
    "idefics3": TinyFamily(_IDEFICS, "<image>", _idefics("Idefics3Config"), _idefics_images("Idefics3ImageProcessorPil")),
}


def build_vision_tokenizer(family: str) -> Any:
    """Build a tokenizer of the 256 bytes and the special tokens of a family, with a chat template that has places for images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kind = FAMILIES[family]
    tokenizer.add_special_tokens([*_COMMON, *kind.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=_TEMPLATE.replace("PLACE", kind.place)
    )


def make_vision_config(family: str) -> Any:
    tokenizer = build_vision_tokenizer(family)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (*_COMMON, *FAMILIES[family].special)}
    return FAMILIES[family].config(ids, _text(ids))


def build_vision_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Build a model whose distributions are neither flat nor peaked, so that errors are visible; float64 is exact to float64."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(make_vision_config(family)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter[0].numel() ** 0.5)
    return vision_to_float64(model) if dtype == torch.float64 else model.to(dtype)


def vision_to_float64(model: Any) -> Any:
    """Convert a model entirely to float64, without the norms' casts to float32."""
    to_float64(model)
    if "moe" in model.config.model_type or getattr(model.config.text_config, "enable_moe_block", False):
        model.set_experts_implementation("eager")  # grouped matrix products do not support float64
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("Qwen2_5_VLRMSNorm", "Qwen3VLTextRMSNorm", "Qwen3VLMoeTextRMSNorm"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
            elif type(child).__name__ == "Gemma3RMSNorm":
                setattr(parent, name, ExactNorm(child.weight, child.eps, 1.0))
            elif type(child).__name__ == "Gemma4RMSNorm":
                setattr(parent, name, ExactNorm(getattr(child, "weight", torch.ones(())), child.eps))
    return model


def keep_rotary_float64(monkeypatch: Any) -> None:
    """Have the towers of Qwen rotate in the dtype of their queries: Transformers rounds them to float32."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    for module in (modeling_qwen2_5_vl, modeling_qwen3_vl):
        rotate_half: Any = module.rotate_half

        def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, half: Any = rotate_half) -> tuple[Tensor, Tensor]:
            cos, sin = (each.unsqueeze(-2).to(query.dtype) for each in (cos, sin))
            return query * cos + half(query) * sin, key * cos + half(key) * sin

        monkeypatch.setattr(module, "apply_rotary_pos_emb_vision", rotate)


def save_vision_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a model, its tokenizer and its image processor as the hub has them."""
    build_vision_model(family, seed=seed).save_pretrained(folder)
    build_vision_tokenizer(family).save_pretrained(folder)
    FAMILIES[family].image_processor().save_pretrained(folder)
    return folder


def draw_image(seed: int, width: int = 60, height: int = 44) -> bytes:
    """Draw a PNG of seeded noise in large squares."""
    from PIL import Image

    chosen = random.Random(seed)
    small = Image.new("RGB", (4, 3))
    small.putdata([tuple(chosen.randrange(256) for _ in range(3)) for _ in range(12)])
    memory = io.BytesIO()
    small.resize((width, height), Image.Resampling.NEAREST).save(memory, "PNG")
    return memory.getvalue()


def as_data_url(content: bytes) -> str:
    """Return an encoded file as a data: URL, for a message whose image stands in the data itself."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(content)) as opened:
        kind = Pillow.MIME.get(opened.format or "", "image/png")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
