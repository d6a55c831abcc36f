"""Whole GRPO runs of a mixture of experts that train with the experts of the rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loop.runs import grpo, metrics_of, repeatable
from loop.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow

REPLAY: dict[str, Any] = {"policy.router_replay.enabled": True, "grpo.max_num_steps": 3, "grpo.val_period": 0}
ROUTING = ("train/router_disagreement", "train/tokens_without_routes")
UNSAVED: dict[str, Any] = {"checkpointing.enabled": False, "checkpointing.metric_name": None}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixture(tmp_path_factory.mktemp("model") / "mixture")


def build_mixture(folder: Path) -> Path:
    """Save a tiny mixture: 8 experts of which 2 are chosen, in 2 layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                size = 0.3 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, folder: Path, **changes: Any) -> dict[int, dict[str, float]]:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    outcome = grpo(model, folder, **{**REPLAY, **UNSAVED, **settings})
    assert outcome.code == 0, outcome.err
    return metrics_of(folder / "logs")


def test_in_float32_the_learner_would_choose_what_is_replayed_and_nothing_changes(mixture: Path, tmp_path: Path) -> None:
    replayed = train(mixture, tmp_path / "replayed")
    ordinary = train(mixture, tmp_path / "ordinary", policy__router_replay__enabled=False)
    for step, line in replayed.items():
        assert [line.pop(name) for name in ROUTING] == [0.0, 0.0]
        assert repeatable({step: line}) == repeatable({step: ordinary[step]})
    assert max(line["train/grad_norm"] for line in replayed.values()) > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ranks_replay_what_an_engine_in_another_process_says(mixture: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    replay_on_ranks(
        mixture, tmp_path, {"cluster.gpus_per_node": 2, "policy.dtensor_cfg.tensor_parallel_size": 2, "cluster.backend": "ray"}
    )


def replay_on_ranks(mixture: Path, folder: Path, sizes: dict[str, Any]) -> None:
    """Experts cross processes, are cut among tensor ranks or stages, and are those that the ranks would choose, but for rounding."""
    lines = train(mixture, folder, **sizes)
    assert all(line["train/tokens_without_routes"] == 0.0 for line in lines.values())
    assert max(line["train/router_disagreement"] for line in lines.values()) < 0.01
    assert max(line["train/token_mult_prob_error"] for line in lines.values()) < 1.001
