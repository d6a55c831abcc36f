"""What running recipes of NeMo-RL's found: each loads as it says, or is refused for what it would silently not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import TRAINING_RUNS, ConfigError, LoadedConfig, load_config
from strop.config.load.translated_recipe import render_recipe, translate_recipe

BASE = """
grpo: {val_period: 0}
checkpointing: {metric_name: null}
data: {train: {dataset_name: gsm8k, env_name: math} }
env: {math: {num_workers: 8}}
"""
PUZZLE = (
    BASE.replace("}}\n", "}, sliding_puzzle_game: {cfg: {game_config: {size: 5}, max_moves: 30}}}\n")
    + "policy: {model_name: m}\n"
)
MEGATRON = (
    BASE
    + """
policy:
  model_name: m
  optimizer: null
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, moe_router_dtype: null, optimizer: {optimizer: adam, lr: 3.0e-7}}
"""
)


def load(tmp_path: Path, text: str, *overrides: str) -> LoadedConfig:
    (tmp_path / "recipe.yaml").write_text(text)
    return load_config(tmp_path / "recipe.yaml", overrides, root=TRAINING_RUNS["grpo"])


def refusals(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return [f"{problem.key}: {problem.message} {problem.fix}" for problem in caught.value.problems]


def test_a_game_that_makes_its_own_tasks_is_played_in_the_place_of_the_data_of_the_base_recipe(tmp_path: Path) -> None:
    loaded = load(tmp_path, PUZZLE, "grpo.max_num_steps=10", "grpo.num_prompts_per_step=4", "grpo.max_val_samples=7")
    (entry,), (held_out,) = loaded.config.data.train, loaded.config.data.validation_entries
    assert (entry.dataset_name, entry.env_name, entry.size) == (None, "sliding_puzzle_game", 40)
    assert (held_out.env_name, held_out.size) == ("sliding_puzzle_game", 7)
    assert any("the game makes its own tasks" in warning for warning in map(str, loaded.warnings))
    assert load(tmp_path, PUZZLE, "~env.sliding_puzzle_game").config.data.train[0].dataset_name == "gsm8k"
    assert load(tmp_path, PUZZLE, "data.train.env_name=sliding_puzzle_game").config.data.train[0].dataset_name == "gsm8k"


def test_a_game_whose_recipe_offloads_on_one_rank_keeps_its_parameters_on_the_device_and_says_so(tmp_path: Path) -> None:
    recipe = PUZZLE.replace("policy: {", "policy: {dtensor_cfg: {enabled: true, cpu_offload: true}, ")
    loaded = load(tmp_path, recipe)
    assert not loaded.config.policy.dtensor_cfg.cpu_offload
    assert any("one rank keeps its parameters" in warning.message for warning in loaded.warnings)
    (refusal,) = refusals(tmp_path, recipe, "policy.dtensor_cfg.cpu_offload=true")
    assert "only a learner on several ranks" in refusal


def test_a_learning_rate_that_stands_only_in_a_section_that_is_off_is_not_replaced_by_the_default(tmp_path: Path) -> None:
    torch_learner = ("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true")
    (refusal,) = refusals(tmp_path, MEGATRON, *torch_learner)
    assert refusal.startswith("policy.optimizer: found null, and the learning rate 3e-07 is in policy.megatron_cfg.optimizer")
    own = load(tmp_path, MEGATRON, *torch_learner, "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}")
    assert own.config.policy.optimizer.kwargs["lr"] == 1e-6
    assert load(tmp_path, MEGATRON, "policy.backend=torch").config.policy.optimizer.kwargs["lr"] == 3e-7


def test_a_section_that_is_off_is_one_comment_of_the_translation(tmp_path: Path) -> None:
    off = MEGATRON.replace("enabled: true", "enabled: OFF").replace("enabled: false", "enabled: true").replace("OFF", "false")
    (tmp_path / "recipe.yaml").write_text(off.replace("optimizer: null", "max_grad_norm: 1.0"))
    text = render_recipe(translate_recipe(tmp_path / "recipe.yaml"), "strop translate recipe.yaml")
    assert "# left out: policy.megatron_cfg: it is switched off\n" in text
    assert "moe_router_dtype" not in text
