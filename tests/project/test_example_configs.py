"""Every configuration in examples/ loads, and the commands of the documentation are understood as written."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, EvalRunConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.yaml_source import read_config_file
from strop.data.data_config import DataEntryConfig
from support.micro_batches import assert_micro_batch_is_named

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
TRAINING = sorted(path for path in CONFIGS.glob("*.yaml") if not path.stem.endswith("_megatron"))  # those are of an extension
ARITHMETIC = sorted((CONFIGS / "arithmetic").glob("*.yaml"))
DRAWN = sorted((CONFIGS / "drawn_images").glob("*.yaml"))
EVERY_TRAINING = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "evals")
EVALUATION = sorted((CONFIGS / "evals").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples are relative to the repository's root; what they need is installed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("strop.packages.is_installed", lambda package: True)


def section_of(path: Path) -> str:
    """The kind of run a file is for: the one whose section it has, or the file it is laid over."""
    values = read_config_file(path).values
    found = set(TRAINING_RUNS) & set(values)
    if not found and "defaults" in values:
        return section_of(path.parent / str(values["defaults"]))
    (section,) = found
    return section


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_training_example_loads(path: Path) -> None:
    config = load_config(path, root=TRAINING_RUNS[section_of(path)]).config
    assert config.checkpointing.checkpoint_dir.startswith("results/")


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_an_example_on_drawn_images_loads_without_a_warning(path: Path) -> None:
    loaded = load_config(path, root=TRAINING_RUNS[section_of(path)])
    assert loaded.warnings == () and path.stem == section_of(path)


@pytest.mark.parametrize("path", EVERY_TRAINING, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_example_names_its_micro_batch_on_a_gpu_and_why(path: Path) -> None:
    assert_micro_batch_is_named(load_config(path, root=TRAINING_RUNS[section_of(path)], check=False).config)


@pytest.mark.parametrize("path", EVALUATION, ids=lambda path: path.stem)
def test_an_evaluation_example_loads(path: Path) -> None:
    load_config(path, root=EvalRunConfig)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what examples/arithmetic_data.py writes."""
    folder = tmp_path_factory.mktemp("sums")
    arguments = sys.argv
    sys.argv = ["arithmetic_data.py", "--folder", str(folder / "data" / "arithmetic"), "--train", "200", "--validation", "20"]
    try:
        runpy.run_path(str(ROOT / "examples" / "arithmetic_data.py"), run_name="__main__")
    finally:
        sys.argv = arguments
    return folder


@pytest.mark.parametrize("path", ARITHMETIC, ids=lambda path: path.stem)
def test_an_example_on_sums_loads_with_the_data_that_is_made_for_it(
    path: Path, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sums)
    loaded = load_config(path, root=TRAINING_RUNS[section_of(path)])
    assert loaded.warnings == () and path.stem in (section_of(path), "async_vllm")


@pytest.mark.parametrize("kind", ["conversations", "preferences", "judgements"])
def test_the_data_of_the_examples_is_read_and_no_question_is_held_out_and_trained_on(kind: str, sums: Path) -> None:
    from strop.data.sources.source import DataSource
    from strop.extensions.recorded.recorded_run import EXAMPLE_READERS

    parts = {}
    for part, size in (("train", 200), ("validation", 20)):
        entry = DataEntryConfig(dataset_name=str(sums / "data" / "arithmetic" / f"{kind}_{part}.jsonl"))
        rows = EXAMPLE_READERS[kind](DataSource.from_entry(entry, seed=0, part=part))
        assert len(rows) == size
        parts[part] = {row.question if kind != "conversations" else row.messages[0].content for row in rows}
    assert not parts["train"] & parts["validation"]


# What a script runs, and with which configuration where none is named.
SCRIPTS: dict[str, tuple[str, str]] = {
    "run_grpo.py": ("grpo", "grpo_math_1B.yaml"),
    "run_grpo_math.py": ("grpo", "grpo_math_1B.yaml"),
    "run_grpo_sliding_puzzle.py": ("grpo", "grpo_sliding_puzzle.yaml"),
    "run_sft.py": ("sft", "sft.yaml"),
    "run_dpo.py": ("dpo", "dpo.yaml"),
    "run_rm.py": ("rm", "rm.yaml"),
    "run_ppo.py": ("ppo", "ppo_math_1B.yaml"),
    "run_distillation.py": ("distillation", "distillation_math.yaml"),
    "run_eval.py": ("eval", "evals/eval.yaml"),
}

# (the command as documented, the keys it is refused for in this version)
COMMANDS: list[tuple[str, set[str]]] = [
    ("examples/run_grpo.py", set()),
    ("examples/run_grpo_math.py", set()),
    ("examples/run_grpo_math.py cluster.gpus_per_node=8", set()),
    (
        'examples/run_grpo_math.py policy.model_name="meta-llama/Llama-3.2-1B-Instruct" '
        'checkpointing.checkpoint_dir="results/llama1b_math" logger.wandb_enabled=True '
        'logger.wandb.name="grpo-llama1b_math" logger.num_val_samples_to_print=10',
        set(),
    ),
    (
        "examples/run_grpo_math.py --config examples/configs/grpo_math_8B.yaml policy.model_name='Qwen/Qwen2.5-32B' "
        "policy.generation.vllm_cfg.tensor_parallel_size=4 policy.max_total_sequence_length=16384 cluster.num_nodes=32 "
        "policy.dtensor_cfg.enabled=True policy.dtensor_cfg.tensor_parallel_size=8 policy.dtensor_cfg.sequence_parallel=True "
        "policy.dtensor_cfg.activation_checkpointing=True checkpointing.checkpoint_dir='results/qwen2.5-32b' "
        "logger.wandb_enabled=True logger.wandb.name='qwen2.5-32b'",
        set(),
    ),
    ("examples/run_grpo_sliding_puzzle.py", set()),
    (
        "examples/run_grpo_sliding_puzzle.py env.sliding_puzzle_game.cfg.game_config.size=3 "
        "env.sliding_puzzle_game.cfg.game_config.shuffle_moves=10",
        set(),
    ),
    (
        "examples/run_grpo_sliding_puzzle.py --config examples/configs/grpo_sliding_puzzle.yaml logger.wandb_enabled=true "
        "logger.tensorboard_enabled=true",
        set(),
    ),
    ("examples/run_sft.py", set()),
    (
        'examples/run_sft.py policy.model_name="meta-llama/Meta-Llama-3-8B" policy.train_global_batch_size=128 '
        "sft.val_global_batch_size=128 cluster.gpus_per_node=8",
        set(),
    ),
    ("examples/run_sft.py policy.dtensor_cfg.lora_cfg.enabled=true policy.dtensor_cfg.lora_cfg.dim=16", set()),
    (
        'examples/run_dpo.py policy.model_name="meta-llama/Llama-3.1-8B-Instruct" policy.train_global_batch_size=256 '
        "cluster.gpus_per_node=8",
        set(),
    ),
    (
        "examples/run_dpo.py dpo.sft_loss_weight=0.1 dpo.preference_average_log_probs=True "
        'checkpointing.checkpoint_dir="results/llama_dpo_sft" logger.wandb_enabled=True logger.wandb.name="llama-dpo-sft"',
        set(),
    ),
    ("examples/run_dpo.py --config examples/configs/dpo.yaml cluster.num_nodes=2 cluster.gpus_per_node=8 " "dpo.val_global_batch_size=32",
     set()),
    ("examples/run_rm.py cluster.gpus_per_node=8", set()),
    ("examples/run_ppo.py", set()),
    ("examples/run_ppo.py value.head_only=true algorithm.name=vapo", set()),
    ("examples/run_distillation.py", set()),
    ("examples/run_distillation.py teacher.model_name=Qwen/Qwen3-8B cluster.num_nodes=2", set()),
    ("examples/run_eval.py generation.model_name=$PWD/results/grpo/hf", set()),
    (
        "examples/run_eval.py --config examples/configs/evals/math_eval.yaml "
        "generation.model_name=agentica-org/DeepScaleR-1.5B-Preview generation.temperature=0.6 generation.top_p=0.95 "
        "generation.vllm_cfg.max_model_len=32768 data.dataset_name=math500 eval.num_tests_per_prompt=16 cluster.gpus_per_node=8",
        set(),
    ),
    ("examples/run_grpo.py cluster.num_nodes=2", set()),
]  # fmt: skip


@pytest.mark.parametrize(("command", "refused"), COMMANDS, ids=[command[9:70] for command, _ in COMMANDS])
def test_a_documented_command_is_understood(command: str, refused: set[str]) -> None:
    script, *words = shlex.split(command)
    kind, default = SCRIPTS[Path(script).name]
    path = words[words.index("--config") + 1] if "--config" in words else f"examples/configs/{default}"
    overrides = [word for word in words if "=" in word]
    root: Any = TRAINING_RUNS.get(kind, EvalRunConfig)
    found: set[str] = set()
    try:
        load_config(path, overrides, root=root)
    except ConfigError as error:
        found = {problem.key for problem in error.problems}
        assert all("version" in problem.message for problem in error.problems)
    assert found == refused


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_names_the_configuration_it_is_said_to_run(script: str) -> None:
    kind, default = SCRIPTS[script]
    text = (ROOT / "examples" / script).read_text()
    assert f'run_script("{kind}", ' in text and all(f'"{part}"' in text for part in default.split("/"))


# What NeMo-RL's examples of the same name set (August 2026), where it was once another value here.
AS_IN_NEMO_RL: dict[str, dict[str, object]] = {
    "grpo_math_1B": {
        "grpo.normalize_rewards": True,
        "grpo.use_leave_one_out_baseline": True,
        "policy.train_global_batch_size": 512,
        "data.train.0.split_validation_size": 0.05,
    },
    "grpo_math_8B": {
        "grpo.num_prompts_per_step": 64,
        "grpo.num_generations_per_prompt": 32,
        "grpo.use_leave_one_out_baseline": True,
        "policy.train_global_batch_size": 512,
        "policy.optimizer.kwargs.lr": 3e-7,
    },
    "ppo_math_1B": {
        "ppo.reward_shaping.enabled": True,
        "ppo.reward_shaping.overlong_buffer_length": 2048,
        "ppo.reward_shaping.overlong_buffer_penalty": 1,
        "ppo.reward_shaping.max_response_length": 14336,
        "checkpointing.keep_top_k": 5,
        "env.math.verifier": "dapo",
    },
    "sft": {"data.add_bos": True, "data.add_eos": True},
    "distillation_math": {"distillation.topk_logits_k": 64, "policy.max_total_sequence_length": 8192},
    "evals/math_eval": {"generation.model_name": "Qwen/Qwen2.5-7B-Instruct", "data.dataset_name": "math"},
}


def value_of(name: str, key: str) -> object:
    path = CONFIGS / f"{name}.yaml"
    value: Any = load_config(path, root=EvalRunConfig if name.startswith("evals/") else TRAINING_RUNS[section_of(path)]).config
    for part in key.split("."):
        if isinstance(value, tuple):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value[part]
        else:
            value = value.options[part] if part == "verifier" else getattr(value, part)
    return value


@pytest.mark.parametrize("name", AS_IN_NEMO_RL)
def test_an_example_agrees_with_that_of_the_same_name(name: str) -> None:
    assert {key: value_of(name, key) for key in AS_IN_NEMO_RL[name]} == AS_IN_NEMO_RL[name]
