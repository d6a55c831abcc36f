"""Every configuration in examples/ loads, and the commands of the documentation are understood as written."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, load_config

ROOT = Path(__file__).parents[3]
TRAINING = sorted(path for path in (ROOT / "examples" / "configs").glob("*.yaml") if not path.name.endswith("_megatron.yaml"))
EVALUATION = sorted((ROOT / "examples" / "configs" / "evals").glob("*.yaml"))
MEGATRON = {"policy.megatron_cfg.enabled"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples are relative to the repository's root."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_training_example_loads(path: Path) -> None:
    load_config(path, root=GrpoRunConfig)


@pytest.mark.parametrize("path", EVALUATION, ids=lambda path: path.stem)
def test_an_evaluation_example_loads(path: Path) -> None:
    load_config(path, root=EvalRunConfig)


# (the command as documented, the keys it is refused for in this version)
COMMANDS: list[tuple[str, set[str]]] = [
    ("examples/run_grpo.py", set()),
    ("examples/run_grpo_math.py", set()),
    ("examples/run_grpo.py --config examples/configs/grpo_math_1B_megatron.yaml", MEGATRON),
    (
        "examples/run_grpo.py --config examples/configs/grpo_math_1B_megatron.yaml cluster.num_nodes=4 cluster.gpus_per_node=8",
        MEGATRON | {"cluster.num_nodes"},
    ),
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
        {"cluster.num_nodes", "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.sequence_parallel"},
    ),
    ("examples/run_eval.py generation.model_name=$PWD/results/grpo/hf", set()),
    (
        "examples/run_eval.py --config examples/configs/evals/math_eval.yaml "
        "generation.model_name=agentica-org/DeepScaleR-1.5B-Preview generation.temperature=0.6 generation.top_p=0.95 "
        "generation.vllm_cfg.max_model_len=32768 data.dataset_name=math500 eval.num_tests_per_prompt=16 cluster.gpus_per_node=8",
        set(),
    ),
    ("examples/run_grpo.py cluster.num_nodes=2", {"cluster.num_nodes"}),
]


@pytest.mark.parametrize(("command", "refused"), COMMANDS, ids=[command[9:70] for command, _ in COMMANDS])
def test_a_documented_command_is_understood(command: str, refused: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.config.checks.installed", lambda package: True)
    script, *words = shlex.split(command)
    evaluation = "eval" in script
    default = "evals/eval.yaml" if evaluation else "grpo_math_1B.yaml"
    path = words[words.index("--config") + 1] if "--config" in words else f"examples/configs/{default}"
    overrides = [word for word in words if "=" in word]
    root: Any = EvalRunConfig if evaluation else GrpoRunConfig
    found: set[str] = set()
    try:
        load_config(path, overrides, root=root)
    except ConfigError as error:
        found = {problem.key for problem in error.problems}
        assert all("version" in problem.message for problem in error.problems)
    assert found == refused
