"""Files as NeMo-RL's loader reads them: sections that replace the base's, values left open, resolvers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loop.runs import strop
from strop.config import TRAINING_RUNS, ConfigError, LoadedConfig, Problem, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.config.source.interpolation import resolve_interpolations
from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.rules import Effect


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(reversed(files))}.yaml"


def test_a_section_that_overrides_replaces_that_of_the_base(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="data: {train: {seed: 1, split: a}, shuffle: true}\ngrpo: {seed: 3}",
        middle="defaults: base.yaml\ngrpo: {max_num_steps: 2}",
        recipe="defaults: middle.yaml\ndata: {_override_: true, train: {split: b}}",
    )
    source = read_config_file(path)
    assert source.values == {"data": {"train": {"split": "b"}}, "grpo": {"seed": 3, "max_num_steps": 2}}
    assert ("data", "shuffle") not in source.origins and ("data", "_override_") not in source.origins


def test_below_the_top_a_section_merges_as_it_does_there(tmp_path: Path) -> None:
    path = write(tmp_path, base="a: {b: {c: 1}}", recipe="defaults: base.yaml\na: {b: {_override_: true, d: 2}}")
    assert read_config_file(path).values == {"a": {"b": {"c": 1, "_override_": True, "d": 2}}}


def test_resolvers_of_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_SOME_FOLDER", "/data")
    values = {
        "a": 3,
        "b": "${max:${a},${mul:2,4}}",
        "c": "${min:${a},1.5}",
        "d": "${oc.env:STROP_SOME_FOLDER}/x",
        "e": "${oc.env:NO_SUCH,y}",
    }
    resolved, errors = resolve_interpolations({**values, "e": "${oc.env:NO_SUCH,y}"})
    assert resolved == {"a": 3, "b": 8, "c": 1.5, "d": "/data/x", "e": "y"} and not errors


def test_a_value_that_is_left_open_is_the_problem(tmp_path: Path) -> None:
    path = write(tmp_path, recipe="policy: {model_name: '???', tokenizer: {name: '${policy.model_name}'}}\ngrpo: {seed: 1}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, root=GrpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "policy.model_name" and "???" in problem.message and "policy.model_name=" in problem.fix
    rest = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}"]
    assert load_config(path, rest, root=GrpoRunConfig, check=False).config.policy.tokenizer.name == "m"


BASE = ("policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.val_period=0")
MODE = "policy.generation.vllm_cfg.logprobs_mode"


def load(*overrides: str) -> LoadedConfig[GrpoRunConfig]:
    return load_config(None, [*BASE, "checkpointing.metric_name=null", *overrides], root=GrpoRunConfig)


def effects(loaded: LoadedConfig[Any]) -> dict[str, Effect]:
    return {difference.key: difference.effect for difference in loaded.differences}


def test_raw_logprobs_are_accepted_where_they_are_the_same() -> None:
    loaded = load(f"{MODE}=raw_logprobs")
    assert loaded.config.policy.generation.vllm_cfg.logprobs_mode == "processed_logprobs"
    assert effects(loaded) == {MODE: Effect.RENAMED}


@pytest.mark.parametrize("changed", ["temperature=0.7", "top_p=0.9", "top_k=50", "min_p=0.1"])
def test_raw_logprobs_of_another_distribution_are_refused_by_what_changes_it(changed: str) -> None:
    with pytest.raises(ConfigError, match=f"with policy.generation.{changed} tokens are sampled from another distribution"):
        load(f"{MODE}=raw_logprobs", f"policy.generation.{changed}")


@pytest.mark.parametrize(("saved", "often", "every"), [(10, 1, 1), (10, 5, 5), (10, 4, 2), (0, 3, 3)])
def test_checkpoints_against_faults_are_saved_as_often(saved: int, often: int, every: int) -> None:
    keys = (f"checkpointing.save_period={saved}", f"checkpointing.ft_save_period={often}", "checkpointing.ft_keep_latest_k=1")
    loaded = load(*keys)
    assert loaded.config.checkpointing.save_period == every
    assert effects(loaded) == {"checkpointing.ft_save_period": Effect.CHANGED, "checkpointing.ft_keep_latest_k": Effect.UNUSED}


def test_the_fused_adam_of_transformer_engine_is_the_one_of_torch() -> None:
    loaded = load(
        "policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "policy.optimizer.kwargs={lr: 1.0e-6, master_weights: true, store_param_remainders: true, exp_avg_dtype: torch.bfloat16}",
    )
    optimizer = loaded.config.policy.optimizer
    assert optimizer.name == "torch.optim.AdamW" and optimizer.kwargs["lr"] == 1e-6
    assert not {"master_weights", "store_param_remainders", "exp_avg_dtype"} & set(optimizer.kwargs)
    assert effects(loaded) == {"policy.optimizer.name": Effect.CHANGED}


def test_experts_of_the_rollout_are_replayed_and_the_prefix_cache_keeps_them() -> None:
    """NeMo-RL's own recipes turn the prefix cache off, beside which newer vLLMs keep the experts."""
    engine = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.enable_prefix_caching=false")
    loaded = load("policy.router_replay.enabled=true", *engine)
    assert loaded.config.policy.router_replay.enabled
    assert [problem.key for problem in loaded.warnings if "experts" in problem.message] == [
        "policy.generation.vllm_cfg.enable_prefix_caching"
    ]


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


BASE_RECIPES = """
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
  nemo_gym:
    config_paths: [a.yaml]
    is_trajectory_collection: false
    thinking_tags: ["<think>", "</think>"]
    num_gpu_nodes: 2
    effort_levels: {low_string: "", low_weight: 0.0, low_ub: 100, low_penalty: 1.0}
    policy_model: {responses_api_models: {vllm_model: {extra_body: {chat_template_kwargs: {enable_thinking: false}}}}}
    code_gen: {resources_servers: {code_gen: {num_processes: "${mul:64,${cluster.num_nodes}}", folder: "${sif_dir}/x"}}}
data:
  train: {dataset_name: NemoGymDataset, env_name: nemo_gym, data_path: nvidia/rows}
  default: {processor: nemo_gym_data_processor}
policy:
  generation:
    vllm_cfg:
      expose_http_server: true
      reasoning_parser_plugin: parser.py
      http_server_serving_chat_kwargs: {enable_auto_tools: true, tool_parser: hermes, chat_template: "{{ messages }}"}
grpo: {max_rollout_turns: 1, invalid_tool_call_advantage: -5, penalize_invalid_tool_call: true, penalize_malformed_thinking: true}
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
POLICY = "env.nemo_gym.policy_model.responses_api_models.vllm_model"
TEACHERS = """
on_policy_distillation: {enabled: true, teacher_model_by_agent_name: {math: "${_teachers.general}"}}
_teachers: {general: /teacher}
"""


def load_recipes(tmp_path: Path, recipe: str, *overrides: str, kind: str = "grpo") -> LoadedConfig:
    (tmp_path / "base.yaml").write_text(BASE_RECIPES)
    path = tmp_path / "recipe.yaml"
    path.write_text("defaults: base.yaml\n" + recipe)
    return load_config(path, overrides, root=TRAINING_RUNS[kind])


def refusals(tmp_path: Path, recipe: str, *overrides: str, kind: str = "grpo") -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_recipes(tmp_path, recipe, *overrides, kind=kind)
    return caught.value.problems


def engine(name: str, options: str) -> str:
    return f"policy: {{generation: {{backend: {name}, colocated: {{enabled: false}}, {options}}}}}"


@pytest.mark.parametrize(
    ("recipe", "key", "why"),
    [
        (GYM.replace("collection: false", "collection: true"), "env.nemo_gym.is_trajectory_collection", "the run trains"),
        (GYM.replace("{enable_thinking: false}", "{}, bad_words: [no]"), f"{POLICY}.extra_body.bad_words", "cannot be forbidden"),
        (
            GYM.replace("{max_roll", "{adv_estimator: {name: gdpo}, max_roll"),
            "grpo.adv_estimator.name",
            "a reward for each component",
        ),
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
    loaded = load_recipes(
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


def test_a_recipe_of_nemo_gym_starts_the_servers_that_its_section_describes(tmp_path: Path) -> None:
    loaded = load_recipes(tmp_path, GYM)
    (train,) = loaded.config.data.train
    assert train.dataset_name == "nvidia/rows" and train.env_name == "nemo_gym"
    policy = {"responses_api_models": {"vllm_model": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}}}
    code = {"resources_servers": {"code_gen": {"num_processes": 64, "folder": "/images/x"}}}
    assert loaded.config.env["nemo_gym"].options == {
        "config": {"config_paths": ["a.yaml"], "policy_model": policy, "code_gen": code}
    }
    assert loaded.config.grpo.max_rollout_turns == 1024 and loaded.config.reward_penalties.invalid_tool_call_advantage == -5
    assert loaded.config.policy.tokenizer.chat_template == "{{ messages }}"
    (changed,) = [difference for difference in loaded.differences if difference.effect is Effect.CHANGED]
    assert changed.key == "env.nemo_gym.num_gpu_nodes" and "RAY_ADDRESS" in changed.text
    shaped = load_recipes(tmp_path, GYM.replace('low_string: "", low_weight: 0.0', "low_string: efficient, low_weight: 0.1"))
    assert shaped.config.env["nemo_gym"].options["effort_levels"]["low_weight"] == 0.1


def test_a_recipe_of_nemo_gym_that_says_where_the_servers_are_starts_none(tmp_path: Path) -> None:
    loaded = load_recipes(tmp_path, GYM.replace("config_paths:", "head_url: 'http://localhost:11000'\n    config_paths:"))
    assert loaded.config.env["nemo_gym"].options == {"head_url": "http://localhost:11000"}
    left_out = {difference.key for difference in loaded.differences if difference.effect is Effect.UNUSED}
    assert {"env.should_use_nemo_gym", "env.nemo_gym.config_paths", "policy.generation.vllm_cfg.expose_http_server"} <= left_out


def test_a_recipe_of_images_is_trained_with_the_same_rewards_and_the_models_own_template(tmp_path: Path) -> None:
    loaded = load_recipes(tmp_path, IMAGES)
    environment = loaded.config.env["clevr-cogent"]
    rewards = [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}]
    assert (environment.type, environment.options) == ("vlm", {"num_workers": 8, "rewards": rewards})
    (train,), (validation,) = loaded.config.data.train, loaded.config.data.validation
    assert train.dataset_name == "clevr-cogent" and validation.media_data_dir == "/mmpr"
    assert loaded.config.policy.tokenizer.chat_template == "default"
    assert not [difference for difference in loaded.differences if difference.effect is Effect.CHANGED]


def test_images_on_megatron_core_are_trained_by_the_torch_learner_unless_megatron_is_insisted_on(tmp_path: Path) -> None:
    recipe = IMAGES.replace("policy: {", "policy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: false}, ")
    loaded = load_recipes(tmp_path, recipe)
    (changed,) = [each for each in loaded.differences if each.effect is Effect.CHANGED]
    assert changed.key == "policy.megatron_cfg.enabled" and "reads images" in changed.text
    assert loaded.config.policy.dtensor_cfg.enabled and not loaded.config.policy.megatron_cfg.enabled
    (problem,) = refusals(tmp_path, recipe, "policy.backend=megatron")
    assert problem.key == "policy.is_vlm" and "Megatron Core trains models of text alone" in problem.message
    assert "Set policy.backend=torch" in problem.fix
    assert load_recipes(tmp_path, recipe, "policy.backend=torch").config.policy.dtensor_cfg.enabled


def test_a_cache_in_fp8_has_other_scales_than_in_nemo_rl_and_that_is_said(tmp_path: Path) -> None:
    recipe = "policy: {generation: {backend: vllm, vllm_cfg: {precision: fp8, kv_cache_dtype: fp8}}}"
    (said,) = [each for each in load_recipes(tmp_path, recipe).differences if each.key.endswith("kv_cache_dtype")]
    assert "scale 1" in said.text
