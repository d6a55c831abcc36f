"""A cluster looked at from a laptop: packages are assumed as GPUs are, those are named, and a run here assumes none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from strop import cli, packages
from strop.config import ConfigError, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from support.declared_packages import run_commands
from support.overrides import RUN

GPU_PACKAGES = ("vllm", "megatron", "sglang", "ray", "torchao", "peft", "transformer_engine", "flash_attn", "deep_ep")
SERVICES = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
ASSUME = ["--dry-run", "--assume-gpus", "8", "--assume-nodes", "2"]

# What NeMo-RL's performance recipe of Llama 3.1 8B on two nodes of eight GPUs asks for, in its keys.
RECIPE = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32, max_num_steps: 500, val_period: 0}
loss_fn: {use_importance_sampling_correction: true, force_on_policy_ratio: true}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  train_global_batch_size: 2048
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    pipeline_model_parallel_size: 2
    activation_checkpointing: true
    defer_fp32_logits: true
    optimizer: {lr: 5.0e-7, min_lr: 5.0e-8, weight_decay: 0.0, use_precision_aware_optimizer: true}
    scheduler: {lr_warmup_iters: 2, lr_warmup_init: 5.0e-8}
  generation: {backend: vllm, max_new_tokens: 4096, stop_token_ids: [128009], vllm_cfg: {max_model_len: 4096}}
data: {max_input_seq_length: 4096, train: {dataset_name: gsm8k}}
env: {math: {num_workers: 8}}
checkpointing: {metric_name: null, checkpoint_dir: results/8b}
logger: {log_dir: logs/8b, wandb_enabled: true, tensorboard_enabled: true}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
# A machine without the packages: whatever of them is imported all the same ends the program; to look for one finds nothing.
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {(*GPU_PACKAGES, *SERVICES)} else find_spec(name, path, target)
PathFinder.find_spec = staticmethod(find_others)
"""


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe, on a machine without any optional package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(packages, "is_here", lambda package: package.partition(".")[0] not in (*GPU_PACKAGES, *SERVICES))
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_recipe_for_two_nodes_is_translated_planned_and_looked_at_without_any_package_of_gpus(laptop: Path) -> None:
    ((code, translation, said),) = run_commands(laptop, None, ["translate", "recipe.yaml"], before=WITHOUT)
    assert code == 0, said
    assert "assumed to be on the machines of the run: megatron-core, ray, tensorboard, vllm, wandb" in said
    (laptop / "mine.yaml").write_text(translation)
    run, plan = ["grpo", "--config", "mine.yaml", *ASSUME], ["plan", "recipe.yaml", "--model-config", "config.json"]
    (code, seen, said), (planned, memory, why) = run_commands(laptop, None, run, plan, before=WITHOUT)
    assert (code, planned) == (0, 0), said + why
    assert "16 ranks on 2 nodes: Megatron Core, 8 data x 2 stages" in seen and "vllm        bfloat16" in seen
    assert seen.count("assumed to be on the machines of the run: megatron-core, ray, tensorboard, vllm, wandb") == 1
    assert "engine weights" in memory


def test_the_same_run_here_is_refused_with_every_package_that_it_lacks(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--dry-run"]):
        assert cli.main(["grpo", "--config", "recipe.yaml", *flags]) == 2
        said = capsys.readouterr().err
        for key in ("policy.megatron_cfg.enabled", "policy.generation.backend", "logger.wandb_enabled", "cluster.backend"):
            assert f"{key}: found" in said
        assert said.count("not installed") == 5


def test_recipes_of_a_folder_are_tried_as_if_their_packages_were_here(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", "--all", ".", "--json"]) == 0
    (recipe,) = (found for found in json.loads(capsys.readouterr().out) if found["file"] == "recipe.yaml")
    assert recipe["outcome"] in ("passes", "translated")


@pytest.mark.parametrize(
    ("words", "package", "refusal"),
    [
        (["policy.generation.backend=vllm"], "vllm", "vLLM is not installed"),
        (["policy.fp8.enabled=true"], "torchao", "torchao is not installed"),
        (["policy.dtensor_cfg.lora_cfg.enabled=true"], "peft", "peft is not installed"),
        (["logger.mlflow_enabled=true"], "mlflow", "mlflow is not installed"),
    ],
)  # fmt: skip
def test_a_package_is_assumed_with_gpus_and_asked_for_without(
    words: list[str], package: str, refusal: str, laptop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["grpo", *RUN, "policy.device=auto", *words]
    assert cli.main([*run, "--dry-run", "--assume-gpus", "8"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "assumed to be on the machines" in line)
    assert package in line.partition(": ")[2].split(", ")
    assert cli.main([*run, "--dry-run"]) == 2
    assert refusal in capsys.readouterr().err


def test_nothing_is_said_where_every_package_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(packages, "is_here", lambda package: True)
    assert cli.main(["grpo", *RUN, "policy.device=auto", *ASSUME]) == 0
    assert "assumed to be" not in capsys.readouterr().out


def test_packages_are_assumed_within_the_look_alone(laptop: Path) -> None:
    vllm = [*RUN, "policy.generation.backend=vllm"]
    with packages.assume_packages():
        load_config(None, vllm, root=TRAINING_RUNS["grpo"])
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        load_config(None, vllm, root=TRAINING_RUNS["grpo"])


@pytest.fixture
def no_gymnasium(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Refuse:
        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name.partition(".")[0] == "gymnasium":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return None

    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    yield


def test_an_environment_whose_package_is_missing_is_named_as_not_looked_at(
    no_gymnasium: None, laptop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["grpo", *RUN, "policy.device=auto", "env={pole: {type: gymnasium, id: CartPole-v1}}", "data.train.env_name=pole"]
    assert cli.main([*run, *ASSUME]) == 0
    said = capsys.readouterr().out
    assert "env.pole: not examined without the package gymnasium" in said and "gymnasium, ray, vllm" in said
    assert cli.main([*run, "--dry-run"]) == 2
    (laptop / "mine.py").write_text("import gymnasium\nclass Mine: pass\n")
    assert cli.main(["grpo", *RUN, "env={mine: {type: 'mine.py:Mine'}}", "data.train.env_name=mine", *ASSUME]) == 2
    assert "importing 'mine.py' failed" in capsys.readouterr().err  # a file of the user's may be what is missing


def test_folders_of_the_machines_are_not_asked_of_this_one(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (laptop / "file").touch()
    run = ["grpo", *RUN, "policy.device=auto", "policy.model_name=/shared/models/8b", f"logger.log_dir={laptop}/file/logs"]
    assert cli.main([*run, *ASSUME]) == 0
    said = capsys.readouterr().out
    assert (
        "policy.model_name: /shared/models/8b is not on this machine: it was not examined" in said
        and "note        logger.log_dir" in said
    )
    assert cli.main([*run, "cluster.gpus_per_node=1", "--dry-run"]) == 2
    assert "there is no folder /shared/models/8b" in capsys.readouterr().err
