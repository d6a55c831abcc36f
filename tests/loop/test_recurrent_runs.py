"""Whole runs of models whose layers carry states from token to token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of
from loop.tiny import tiny_tokenizer
from support.every_family import build
from support.sweep import sweep

pytestmark = pytest.mark.slow

REWARD = "def small(task, rollout):\n    return sum(letter.islower() for letter in rollout.text) / 24\n"


@pytest.mark.parametrize("family", sweep(["qwen3_5", "nemotron_h"], "qwen3_5"))
def test_a_recurrent_model_trains_on_what_it_sampled_from_held_states(tmp_path: Path, family: str) -> None:
    tokenizer = tiny_tokenizer()
    model = build(family, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=1, pad_token_id=0)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+{n}={n}+{n}=", "answer": 0}) + "\n" for n in range(12))
    )
    run = grpo(
        tmp_path / "model",
        tmp_path,
        grpo__max_num_steps=3,
        grpo__val_period=0,
        checkpointing__enabled=False,
        policy__generation__max_new_tokens=24,
        policy__generation__torch_cfg__speculative_lookup=3,
        env__mine__rewards={"small": "rewards.py:small"},
        env__arithmetic__max_operand=...,
        env__arithmetic__wording=...,
        data__train__env_name=...,
        data__train__dataset_name="rows.jsonl",
        data__validation__env_name=...,
        data__validation__size=...,
    )
    assert run.code == 0, run.err
    assert "recomputes the whole sequence" not in run.out + run.err
    metrics = metrics_of(tmp_path / "logs")
    assert len(metrics) >= 3
    for step in metrics.values():
        assert abs(step["train/token_mult_prob_error"] - 1) < 1e-4 and abs(step["train/gen_kl_error"]) < 1e-5
        assert step["train/grad_norm"] > 0
