"""Dimensions and FLOPs: Transformers' own models have as many parameters, and torch counts as many operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from strop.extensions.performance.devices import PassCounts, UnknownDimensions, dimensions_of, training_flops, windows_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "head_dim": 24,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "mixtral": {"moe_intermediate_size": None},
    "olmoe": {"moe_intermediate_size": None, "head_dim": None},
    "gpt_oss": {"moe_intermediate_size": None},
    "qwen2_moe": {"shared_expert_intermediate_size": 48, "head_dim": None},
    **{name: {"head_dim": None} for name in ("qwen2", "phi3", "phi", "olmo", "olmo2", "olmo3", "cohere", "starcoder2")},
    **{name: {"head_dim": None} for name in ("granite", "smollm3")},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": 4},
    "falcon": {"head_dim": None, "num_key_value_heads": None, "ffn_hidden_size": 96},
    "cohere2": {"head_dim": None},
}  # fmt: skip
SPARSE = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"}
USUAL = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "nemotron")
OTHERS = {
    *SPARSE,
    *OWN,
    "mistral",
    "ministral",
    "gemma",
    "gemma2",
    "seed_oss",
    "glm4",
    "arcee",
    "helium",
    "ernie4_5",
    "apertus",
    "falcon",
}
KINDS = [*USUAL, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in sorted(OTHERS - {*USUAL}))]


def make_config(kind: str, **sizes: Any) -> Any:
    own = {**SIZES, **(EXPERTS if kind in SPARSE else {}), **OWN.get(kind, {}), **sizes}
    return AutoConfig.for_model(kind, **{name: value for name, value in own.items() if value is not None})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_parameters_that_its_configuration_says(kind: str) -> None:
    config = make_config(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.dim() >= 2 and "bias" not in name)
    assert dimensions_of(config.to_dict()).parameters == matrices


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "mixtral", "deepseek_v3", "qwen2_moe", "phi3", "arcee", "gpt_neox", "falcon"]
)
def test_torch_counts_the_same_operations(kind: str) -> None:
    config = make_config(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(1, 300, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    dimensions = dimensions_of(config.to_dict())
    # eager attention computes all pairs, 24 x 24, also those that its mask hides
    counts = PassCounts(read=24, predicted=24, pairs=dict.fromkeys(windows_of(dimensions), 24 * 24))
    assert counter.get_total_flops() == pytest.approx(training_flops(dimensions, counts), rel=0.01)


def test_published_models_have_their_published_sizes() -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    assert dimensions_of(llama).parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    assert dimensions_of(llama).cache_width * 2 == 131072  # bytes of bfloat16 a token: 128 KiB
    sparse = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
    assert dimensions_of(sparse).parameters / 1e9 == pytest.approx(30.5, abs=0.05)


def test_a_model_that_reads_images_counts_its_language_model() -> None:
    text = {**SIZES, "model_type": "qwen3_vl_text"}
    whole = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"hidden_size": 8}, "tie_word_embeddings": True}
    assert dimensions_of(whole).tied
    assert len(dimensions_of(whole).layers) == 4


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mamba2", "Mamba2Block is no layer of attention over all tokens"),
        ("qwen3_next", "Qwen3NextDecoderLayer is no layer of attention"),
        ("falcon_h1", "FalconH1DecoderLayer is no layer of attention"),
        ("minimax", "MiniMaxDecoderLayer is no layer of attention"),
        ("t5", "t5 has an encoder"),
        ("unheard_of", "model_type is 'unheard_of', which the installed Transformers does not have"),
    ],
)
def test_layers_that_cannot_be_counted_are_said(kind: str, said: str) -> None:
    with pytest.raises(UnknownDimensions, match=said):
        dimensions_of({"model_type": kind, "num_hidden_layers": 2})


def test_windows_are_those_of_transformers() -> None:
    for kind in ("gemma2", "gemma3_text", "cohere2", "gpt_oss", "olmo3"):
        config = make_config(kind, num_hidden_layers=8, sliding_window=16)
        values = config.to_dict()
        with_types = [layer.window for layer in dimensions_of(values).layers]
        assert with_types == [16 if each == "sliding_attention" else None for each in config.layer_types], kind
        older = {name: value for name, value in values.items() if name != "layer_types"}
        assert [layer.window for layer in dimensions_of(older).layers] == with_types, kind


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    model = dimensions_of(make_config("llama").to_dict())
    counts = PassCounts(read=10, predicted=4, pairs={None: 0})
    assert training_flops(model, counts, frozen=True) * 3 == training_flops(model, counts) * 2
