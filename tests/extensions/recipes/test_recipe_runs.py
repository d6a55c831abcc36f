"""Recipes in the shape of NeMo-RL's, with what a small machine needs on the command line: they train, finish, and continue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loop.runs import metrics_of, strop

GRPO = """
grpo:
  {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 1, max_num_epochs: 1, val_period: 1, val_batch_size: 256,
   max_val_samples: 4, adv_estimator: {name: grpo, normalize_rewards: true, use_leave_one_out_baseline: true, minus_baseline: true}}
loss_fn: {reference_policy_kl_penalty: 0.01, use_on_policy_kl_approximation: false}
checkpointing: {enabled: true, checkpoint_dir: results, metric_name: "val:accuracy", save_period: 1, model_save_format: safetensors}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 16
  generation_batch_size: 32
  max_total_sequence_length: 512
  dtensor_cfg: {_v2: true, enabled: true, automodel_kwargs: {}}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 1, optimizer: {lr: 5.0e-6}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, foreach: false, fused: false}}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", vllm_cfg: {async_engine: false}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.2, seed: 42}
  validation: null
  default: {prompt_file: null, system_prompt_file: null, processor: math_hf_data_processor, env_name: math}
env: {math: {num_workers: 1, math_verify_impl: hf_math_verify}}
logger: {log_dir: logs, wandb_enabled: false, swanlab_enabled: false, monitor_gpus: true}
"""
# The template opens an answer that is to be sampled in other words than one that is written.
RM = """
rm: {max_num_epochs: 1, max_num_steps: 1, val_period: 1, val_batches: -1, val_global_batch_size: 4}
checkpointing: {checkpoint_dir: results, metric_name: "val:accuracy", save_period: 1}
policy:
  model_name: meta-llama/Llama-3.2-1B-Instruct
  tokenizer:
    name: ${policy.model_name}
    chat_template: >-
      {%- for message in messages %}{{ '[' + message['role'] + '|]' + message['content'] }}{%- endfor %}
      {%- if add_generation_prompt %}{{ '[assistant]' }}{%- endif %}
  train_global_batch_size: 4
  max_total_sequence_length: 512
  reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}
data:
  train: {dataset_name: PreferenceDataset, data_path: pairs.jsonl}
  validation: {dataset_name: PreferenceDataset, data_path: pairs.jsonl}
logger: {log_dir: logs}
"""


def laptop(model: Path) -> list[str]:
    return [f"policy.model_name={model}", "policy.device=cpu", "policy.precision=float32", "logger.console=none"]


@pytest.mark.exhaustive
def test_a_grpo_recipe_trains_on_a_file_and_continues(tiny, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text(GRPO)
    rows = [{"problem": f"{a}+2=", "expected_answer": str(a + 2)} for a in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["dataset_name=ResponseDataset", "data_path=rows.jsonl", "input_key=problem", "output_key=expected_answer"]
    command = ["grpo", "--config", "recipe.yaml", *laptop(tiny), *(f"data.train.{entry}" for entry in data)]
    command += ["policy.generation.backend=torch", "policy.max_total_sequence_length=64", "policy.generation.max_new_tokens=4"]
    first = strop(*command, folder=tmp_path)
    assert first.code == 0, first.err
    second = strop(*command, "grpo.max_num_steps=2", folder=tmp_path)
    assert second.code == 0, second.err
    assert sorted(metrics_of(tmp_path / "logs")) == [1, 2]
    assert (tmp_path / "results" / "step_2").is_dir()


def test_a_reward_model_is_trained_whatever_the_template_opens_an_answer_with(tiny, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text(RM)
    pairs = [
        {
            "context": [{"role": "user", "content": f"{a}+2="}],
            "completions": [
                {"rank": rank, "completion": [{"role": "assistant", "content": str(a + 2 + rank)}]} for rank in (0, 1)
            ],
        }
        for a in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    outcome = strop("rm", "--config", "recipe.yaml", *laptop(tiny), folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "unusable" not in outcome.out + outcome.err
    assert (tmp_path / "results" / "step_1").is_dir()
