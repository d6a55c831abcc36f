"""Whole runs of models whose layers carry states from token to token."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of
from loop.tiny import tiny_tokenizer
from support.every_family import build

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_recurrent_model_trains_on_what_it_sampled_from_held_states(tmp_path: Path, family: str) -> None:
    tokenizer = tiny_tokenizer()
    model = tmp_path / "model"
    build(family, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1, pad_token_id=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    changes = {"policy.generation.torch_cfg.speculative_lookup": 3, "policy.generation.max_new_tokens": 24}
    run = grpo(model, tmp_path / "run", grpo__max_num_steps=3, grpo__val_period=0, checkpointing__enabled=False, **changes)
    assert run.code == 0, run.err
    assert "recomputes the whole sequence" not in run.out + run.err
    metrics = metrics_of(tmp_path / "run" / "logs")
    assert len(metrics) >= 3
    for step in metrics.values():
        assert abs(step["train/token_mult_prob_error"] - 1) < 1e-4 and abs(step["train/gen_kl_error"]) < 1e-5
        assert step["train/grad_norm"] > 0
