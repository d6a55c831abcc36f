"""Models with recurrent layers and sparse attention in complete runs: they learn as the tiny Llama does, and go on after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from golden.curve import SETTINGS
from loop.killing import Kill
from loop.kinds import assert_same_run
from loop.runs import grpo, metrics_of
from loop.tiny import build_tiny, tiny_tokenizer
from support.sweep import sweep

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
QWEN = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1}
INDEXED = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "index_topk": 8, "index_head_dim": 8, "index_n_heads": 16, "num_hidden_layers": 2,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", {**QWEN, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "nemotron_h": ("NemotronHConfig", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    "deepseek_v32": ("DeepseekV32Config", INDEXED),
}


def build_family(family: str, folder: Path) -> Path:
    """The tiny Llama's tokenizer and habits (it likes digits and the end of a turn), in a model of the family."""
    import transformers

    tokenizer = tiny_tokenizer()
    name, options = CONFIGS[family]
    config = getattr(transformers, name)(
        vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None, **{**SIZES, **options}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    likely = [*tokenizer.convert_tokens_to_ids(list("0123456789")), tokenizer.eos_token_id, tokenizer.eos_token_id]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if "embed" in name else 0.15))
        model.get_input_embeddings().weight[:, 0] = 2.0
        for token in likely:
            model.get_output_embeddings().weight[token, 0] += 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rewards(model: Path, folder: Path, rate: float) -> list[float]:
    outcome = grpo(model, folder, **{**SETTINGS, "grpo.max_num_steps": 14, "policy.optimizer.kwargs.lr": rate})
    assert outcome.code == 0, outcome.err
    assert "cannot read packed rows" not in outcome.out + outcome.err
    return [line["train/reward"] for line in metrics_of(folder / "logs").values()]


@pytest.mark.parametrize("family", sweep(CONFIGS))
def test_such_a_model_learns_as_a_llama_of_its_size(family: str, tmp_path: Path) -> None:
    """Each at a rate that suits it: at the Llama's, the others learn as steadily and a third as fast."""
    llama = rewards(build_tiny(tmp_path / "llama"), tmp_path / "run_of_llama", 0.003)
    found = rewards(build_family(family, tmp_path / "model"), tmp_path / "run", 0.01)
    risen = sum(found[-4:]) / 4 - found[0]
    assert risen > 0.7 * (sum(llama[-4:]) / 4 - llama[0]) > 0.05, (found, llama)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CONFIGS)
def test_a_killed_run_of_such_a_model_ends_as_if_nothing_had_happened(family: str, tmp_path: Path) -> None:
    model = build_family(family, tmp_path / "model")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = {"grpo.max_num_steps": 3, "checkpointing.save_period": 1, "data.validation.size": 2}
    settings |= {"policy.router_replay.indexers": True} if family == "deepseek_v32" else {}
    assert grpo(model, whole, **settings).code == 0
    assert grpo(model, parts, before=Kill("at the optimizer step", 3), **settings).code == -signal.SIGKILL
    outcome = grpo(model, parts, **settings)
    assert outcome.code == 0, outcome.err
    assert_same_run(parts, whole)
