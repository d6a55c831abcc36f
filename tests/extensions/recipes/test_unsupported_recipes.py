"""What whole recipes of NeMo-RL need and this version lacks: one refusal for each, at the key that asks, and nothing of its details."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import TRAINING_RUNS, ConfigError, LoadedConfig, Problem, load_config
from strop.extensions.recipes.difference import Effect

BASE = """
policy: {model_name: m, generation: {backend: vllm, vllm_cfg: {precision: bfloat16}}}
grpo: {val_period: 0}
checkpointing: {metric_name: null}
data: {train: {dataset_name: gsm8k, env_name: math}}
env: {math: {num_workers: 8}}
"""
GYM = """
env:
  should_use_nemo_gym: true
  should_log_nemo_gym_responses: false
  should_mask_flagged_samples: true
  nemo_gym: {config_paths: [a.yaml], uv_venv_dir: "${oc.env:NOT_SET_ANYWHERE}/venvs", thinking_tags: ["<think>"]}
data:
  train: {dataset_name: NemoGymDataset, env_name: nemo_gym, data_path: train.jsonl}
  default: {processor: nemo_gym_data_processor}
policy:
  generation:
    vllm_cfg:
      expose_http_server: true
      reasoning_parser_plugin: parser.py
      http_server_serving_chat_kwargs: {enable_auto_tools: true, tool_parser: hermes}
grpo: {invalid_tool_call_advantage: -5, penalize_invalid_tool_call: true, penalize_malformed_thinking: true}
sif_dir: /images
"""
VIDEO = """
policy:
  is_vlm: true
  tokenizer: {video: {num_frames: 8}}
  generation: {bad_words: ["<image>"], vllm_cfg: {limit_mm_per_prompt: {audio: 1}}}
data:
  train: {dataset_name: clevr-cogent, env_name: clevr-cogent}
  default: {processor: vlm_hf_data_processor, video_target_num_patches: 9}
env: {clevr-cogent: {reward_functions: [{name: format, weight: 0.2}]}}
"""
SOUND = "data: {train: {dataset_name: avqa, env_name: avqa}}"
IMAGES = """
policy: {is_vlm: true, tokenizer: {use_processor: true, chat_template: "{{ messages }}"}}
data:
  train: {dataset_name: clevr-cogent, split: train, env_name: clevr-cogent}
  validation: {dataset_name: mmpr-tiny, download_dir: /mmpr, env_name: clevr-cogent}
  default: {processor: vlm_hf_data_processor}
grpo: {deduplicate_multimodal_data: true, val_period: 5}
env: {clevr-cogent: {num_workers: 8, reward_functions: [{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]}}
"""
TEACHERS = """
on_policy_distillation: {enabled: true, teacher_model_by_agent_name: {math: "${_teachers.general}"}}
_teachers: {general: /teacher}
"""


def load(tmp_path: Path, recipe: str, *overrides: str, kind: str = "grpo") -> LoadedConfig:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "recipe.yaml"
    path.write_text("defaults: base.yaml\n" + recipe)
    return load_config(path, overrides, root=TRAINING_RUNS[kind])


def refusals(tmp_path: Path, recipe: str, *overrides: str, kind: str = "grpo") -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, recipe, *overrides, kind=kind)
    return caught.value.problems


def engine(name: str, options: str) -> str:
    return f"policy: {{generation: {{backend: {name}, colocated: {{enabled: false}}, {options}}}}}"


@pytest.mark.parametrize(
    ("recipe", "key", "why"),
    [
        (GYM, "env.should_use_nemo_gym", "NeMo-Gym's servers run separately from the run"),
        (VIDEO, "policy.tokenizer.video", "no audio and no video"),
        (SOUND, "data.train.dataset_name", "no audio and no video"),
        (TEACHERS, "on_policy_distillation", "a teacher for each agent"),
        (engine("trtllm", "trtllm_cfg: {precision: x}, trtllm_kwargs: {a: 1}"), "policy.generation.backend", "TensorRT-LLM"),
        (engine("dynamo", "dynamo_cfg: {engine: vllm}"), "policy.generation.backend", "the Dynamo generation backend"),
        ("async_rl: {sampler: {name: custom}, max_buffered_rollouts: 64}", "async_rl.sampler.name", "no counterpart"),
        ("grpo: {use_best_at_k: true, best_at_k_k: 8, best_at_k_m: 1000}", "grpo.use_best_at_k", "best@k"),
        ("policy: {generation: {bad_words: [no]}}", "policy.generation.bad_words", "words cannot be forbidden"),
        ("policy: {model_name: null}", "policy.model_name", "a template that leaves the model open"),
    ],
)
def test_a_recipe_shows_one_problem_for_one_cause(recipe: str, key: str, why: str, tmp_path: Path) -> None:
    (problem,) = refusals(tmp_path, recipe)
    assert problem.key == key and why in problem.message and problem.fix
    assert problem.origin is not None and problem.origin.source == tmp_path / "recipe.yaml"


def test_what_is_switched_off_is_left_out(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
policy:
  quant_cfg: null
  router_replay: {enabled: false}
  draft: {enabled: false, loss_weight: 0.1}
  generation:
    bad_words: []
    mcore_generation_config: {max_tokens: 9}
    vllm_cfg: {expose_http_server: false, use_deep_gemm: false, num_last_layers_in_bf16: 0}
on_policy_distillation: null
grpo: {use_best_at_k: false, best_at_k_k: 8, deduplicate_multimodal_data: true}
data_plane: {enabled: true, impl: transfer_queue}
""",
    )
    left_out = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert len(loaded.differences) == len(left_out)
    assert {"grpo.best_at_k_k", "data_plane", "on_policy_distillation"} <= left_out


def test_a_recipe_of_nemo_gym_translates_where_it_says_where_the_servers_are(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"responses_create_params": {"input": "Hello."}}\n')
    recipe = GYM.replace("[a.yaml],", "[a.yaml], head_url: 'http://localhost:11000',").replace("sif_dir: /images\n", "")
    recipe = recipe.replace("data_path: train.jsonl", f"data_path: {tmp_path}/train.jsonl")
    recipe = recipe.replace(
        "grpo: {invalid_tool_call_advantage: -5, penalize_invalid_tool_call: true, penalize_malformed_thinking: true}", ""
    )
    loaded = load(tmp_path, recipe)
    (train,) = loaded.config.data.train
    assert train.dataset_name == f"{tmp_path}/train.jsonl" and train.env_name == "nemo_gym"
    assert loaded.config.env["nemo_gym"].options == {"head_url": "http://localhost:11000"}
    left_out = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {"env.should_use_nemo_gym", "env.nemo_gym.config_paths", "policy.generation.vllm_cfg.expose_http_server"} <= left_out


def test_a_recipe_of_images_is_trained_with_the_same_rewards_and_the_models_own_template(tmp_path: Path) -> None:
    loaded = load(tmp_path, IMAGES)
    environment = loaded.config.env["clevr-cogent"]
    rewards = [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}]
    assert (environment.type, environment.options) == ("vlm", {"num_workers": 8, "rewards": rewards})
    (train,), (validation,) = loaded.config.data.train, loaded.config.data.validation
    assert train.dataset_name == "clevr-cogent" and validation.media_data_dir == "/mmpr"
    assert loaded.config.policy.tokenizer.chat_template == "default"
    assert not [difference for difference in loaded.differences if difference.effect is Effect.CHANGED]


def test_images_on_megatron_core_are_trained_by_the_torch_learner_unless_megatron_is_insisted_on(tmp_path: Path) -> None:
    recipe = IMAGES.replace("policy: {", "policy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: false}, ")
    loaded = load(tmp_path, recipe)
    (changed,) = [each for each in loaded.differences if each.effect is Effect.CHANGED]
    assert changed.key == "policy.megatron_cfg.enabled" and "reads images" in changed.text
    assert loaded.config.policy.dtensor_cfg.enabled and not loaded.config.policy.megatron_cfg.enabled
    (problem,) = refusals(tmp_path, recipe, "policy.backend=megatron")
    assert problem.key == "policy.is_vlm" and "Megatron Core trains models of text alone" in problem.message
    assert "Set policy.backend=torch" in problem.fix
    assert load(tmp_path, recipe, "policy.backend=torch").config.policy.dtensor_cfg.enabled


def test_a_cache_in_fp8_has_other_scales_than_in_nemo_rl_and_that_is_said(tmp_path: Path) -> None:
    recipe = "policy: {generation: {backend: vllm, vllm_cfg: {precision: fp8, kv_cache_dtype: fp8}}}"
    (said,) = [each for each in load(tmp_path, recipe).differences if each.key.endswith("kv_cache_dtype")]
    assert "scale 1" in said.text
