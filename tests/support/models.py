"""Tiny random models of the supported families, with a few thousand parameters each, and their conversion to float64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 307  # not a multiple of the sampler's block of 256
WINDOW = 7  # shorter than most test sequences

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SIZES)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_SIZES, head_dim=8)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_SIZES, sliding_window=WINDOW)


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**_SIZES, original_max_position_embeddings=256)


def _gemma() -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(**_SIZES, head_dim=8)


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**_SIZES, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    )


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": 4},
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
    )


def _qwen2_moe() -> Any:
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        **_SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
    )


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_SIZES,
        head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    layers = ["sliding_attention", "full_attention"]
    return GptOssConfig(
        **_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=layers
    )


def _gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)


def _recurrent_gemma() -> Any:
    from transformers import RecurrentGemmaConfig

    blocks = {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW, "lru_width": 32}
    return RecurrentGemmaConfig(**_SIZES, **blocks)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "recurrent_gemma": _recurrent_gemma,
}

_SHARED_EXPERTS = ("deepseek_v3", "qwen2_moe", "glm4_moe")  # built where a test is of these
FAMILIES = tuple(
    name for name in CONFIGS if name not in ("recurrent_gemma", *_SHARED_EXPERTS)
)  # support packed rows and the cached engine


def make_config(family: str, layers: int | None = None) -> Any:
    """Return a family's tiny configuration, with another number of layers."""
    config = CONFIGS[family]()
    if layers is None:
        return config
    return type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})


def build(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int | None = None) -> Any:
    """Build a causal LM with next-token distributions that are neither flat nor peaked, so that errors are visible."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = make_config(family, layers)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.1 * noise)
            elif name.endswith(("A_log", ".D", "dt_proj.bias")):
                continue  # keeps the recurrence stable
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    return model.to(dtype)


class ExactNorm(nn.Module):
    """Llama's RMSNorm without its cast to float32, which would round a float64 model to seven digits."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.offset = offset  # Gemma's weight is an offset from one

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.offset + self.weight) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


def to_float64(model: Any) -> Any:
    """Convert the model entirely to float64 (families with Llama's RMSNorm)."""
    model.double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MistralRMSNorm"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
            elif type(child).__name__ == "GemmaRMSNorm":
                setattr(parent, name, ExactNorm(child.weight, child.eps, 1.0))
    return model


def with_exact_rotary(model: Any) -> Any:
    """Give a model of Llama's architecture rotary factors in float64, which are the same on every device.

    Transformers computes them in float32 whatever the model's dtype, on a GPU an ulp from those of a CPU.
    """
    rotary = model.model.rotary_emb

    def forward(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * rotary.inv_freq.double()
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    rotary.forward = forward
    return model


def copy_gradients(model: Any) -> dict[str, Tensor]:
    """Return a copy of every parameter's gradient, or zeros if it has none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return max |left - right| over all parameters, relative to the largest entry of either."""
    assert left.keys() == right.keys()
    size = max(float(tensor.abs().max()) for tensor in (*left.values(), *right.values()))
    return max(float((left[name] - right[name]).abs().max()) for name in left) / max(size, 1e-300)


def living_bytes() -> int:
    """The memory of all tensors that Python can reach, each part of it once."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.layout == torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
