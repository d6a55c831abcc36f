"""Whole runs that Megatron Core trains, on ranks over Ray: the curves of the torch learner in one process, also after kills."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.kinds import GRADED, recorded_config, sampling_config, write_data
from loop.runs import Outcome, Running, metrics_of, overrides, start, strop, tiny_config
from loop.test_cluster_faults import assert_nobody_left, kill, steps_logged, wait_for
from loop.test_cluster_runs import curves_agree
from loop.tiny import build_tiny
from loop.victims import Marked
from strop.models.loading import load_model
from support.forked_interpreter import Forked, forked_interpreter
from support.forks import forks_with
from support.megatron_families import make_model
from support.needs import needs_vllm

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytest.importorskip("megatron.core", reason="Megatron Core is not installed: pip install -e '.[megatron]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
RATE = 0.001
NOISE = 2e-4  # relative, as for ranks of the torch learner: they add float32 numbers in another order
SHORT = {**GRADED, "grpo.max_num_steps": STEPS, "grpo.val_period": 2, "logger.console": "plain"}
TORCH = {"policy.optimizer.kwargs.lr": RATE, "policy.optimizer.kwargs.weight_decay": 0.0}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
TEACHER = "teacher"


def megatron(model: str = "policy", **sizes: Any) -> dict[str, Any]:
    """Return the settings of a model that Megatron Core trains on two ranks."""
    section = f"{model}.megatron_cfg"
    settings: dict[str, Any] = {
        "cluster.gpus_per_node": 2,
        f"{section}.enabled": True,
        f"{model}.dtensor_cfg.enabled": False,
        **{f"{section}.{name}": value for name, value in sizes.items()},
    }
    if model == TEACHER:
        return settings
    settings |= {f"{model}.optimizer.kwargs.lr": ..., f"{model}.optimizer.kwargs.weight_decay": ...}
    constant = {"optimizer.lr": RATE, "optimizer.min_lr": 0.0, "optimizer.weight_decay": 0.0, "scheduler.lr_warmup_iters": 0}
    return settings | {f"{section}.{name}": value for name, value in constant.items()}


def begin(section: str, settings: Mapping[str, Any], folder: Path, *, interpreter: str = sys.executable) -> Running:
    return start([section, *overrides(dict(settings))], folder, before=Forked(interpreter, then=Marked(str(folder))))


def run(section: str, settings: Mapping[str, Any], folder: Path, *, interpreter: str = sys.executable) -> Outcome:
    outcome = begin(section, settings, folder, interpreter=interpreter).finish(400)
    assert outcome.code == 0, outcome.err + outcome.out[-4000:]
    return outcome


def grpo_settings(model: Path, **changes: Any) -> dict[str, Any]:
    return {**tiny_config(model), **SHORT, **changes}


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """The run of the torch learner, in one process, which goes on beside the test until it is needed."""
    return begin("grpo", grpo_settings(tiny, **TORCH), tmp_path_factory.mktemp("alone"))


def agrees(alone: Running, folder: Path, noise: float = NOISE) -> None:
    """Compare a run with the one of the torch learner."""
    outcome = alone.finish(400)
    assert outcome.code == 0, outcome.err
    curves_agree(alone.folder, folder, steps=STEPS, noise=noise)


def test_tensor_parallel_ranks_of_megatron_give_the_curve_of_the_torch_learner(
    tiny: Path, alone: Running, tmp_path: Path
) -> None:
    with forks_with("megatron"), forked_interpreter() as interpreter:
        outcome = run("grpo", grpo_settings(tiny, **megatron(**TP2)), tmp_path, interpreter=interpreter)
    agrees(alone, tmp_path, noise=5e-6)  # a gradient that lacks one token's embedding is 1e-5 away
    assert metrics_of(tmp_path / "logs")[STEPS]["train/token_mult_prob_error"] < 1.0005
    assert (tmp_path / "results" / f"step_{STEPS}" / "policy" / "weights" / "iter_0000000").is_dir(), outcome.out
    assert_nobody_left(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_recurrent_layers_on_tensor_parallel_ranks_give_the_curve_of_the_torch_learner(family: str, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model")
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    changed = make_model(family, torch.float32, vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    changed.save_pretrained(model)
    sizes = TP2 | ({"expert_tensor_parallel_size": 2, "freeze_moe_router": False} if family == "qwen3_next" else {})
    run("grpo", grpo_settings(model, **TORCH), tmp_path / "torch")
    run("grpo", grpo_settings(model, **megatron(**sizes)), tmp_path / "megatron")
    curves_agree(tmp_path / "torch", tmp_path / "megatron", steps=STEPS, noise=NOISE)
    assert metrics_of(tmp_path / "megatron" / "logs")[STEPS]["train/token_mult_prob_error"] < 1.001


@pytest.mark.exhaustive
def test_a_run_of_two_stages_whose_rank_and_driver_are_killed_gives_the_curve_of_the_torch_learner(
    tiny: Path, alone: Running, tmp_path: Path
) -> None:
    settings = grpo_settings(
        tiny,
        **megatron(**PP2),
        **{"checkpointing.save_period": 1, "checkpointing.metric_name": None, "checkpointing.keep_top_k": ...},
    )
    running = begin("grpo", settings, tmp_path)
    wait_for(running, lambda: steps_logged(running) >= 1)
    kill(running, "learner-1")
    wait_for(running, lambda: steps_logged(running) >= 2)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.join()
    assert_nobody_left(tmp_path)
    outcome = run("grpo", settings, tmp_path)
    assert "continuing after step" in outcome.out
    agrees(alone, tmp_path)


VLLM: dict[str, Any] = {
    "policy.generation.backend": "vllm",
    "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
    "policy.generation.vllm_cfg.num_threads": 1,
    "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
    "policy.generation.weight_sync.proof": "always",
}


def beside_an_engine(ranks: int, **sizes: Any) -> dict[str, Any]:
    """Return the settings of a policy on so many ranks, whose engine has a device of its own."""
    return {
        **VLLM,
        **megatron(**sizes),
        "cluster.gpus_per_node": ranks + 1,
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.gpus_per_node": 1,
        "checkpointing.save_period": 1,
        "checkpointing.metric_name": None,
        "checkpointing.keep_top_k": ...,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "sizes"), [(2, TP2), (2, PP2), (4, TP2 | PP2)], ids=["tp2", "pp2", "tp2 x pp2"])
def test_real_vllm_samples_what_megatron_trains(ranks: int, sizes: dict[str, Any], tmp_path: Path) -> None:
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    run("grpo", grpo_settings(model, **TORCH, **VLLM), tmp_path / "torch")
    folder = tmp_path / "megatron"
    settings = grpo_settings(model, **beside_an_engine(ranks, **sizes))
    running = begin("grpo", settings, folder)
    wait_for(running, lambda: steps_logged(running) >= 2, 300)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.join()
    assert_nobody_left(folder)
    assert "continuing after step" in run("grpo", settings, folder).out
    assert metrics_of(folder / "logs")[STEPS]["train/token_mult_prob_error"] < 1.0005
    curves_agree(tmp_path / "torch", folder, steps=STEPS, noise=NOISE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [TP2, PP2], ids=["tp2", "pp2"])
def test_in_bfloat16_vllm_samples_from_what_megatron_trains(sizes: dict[str, Any], tmp_path: Path) -> None:
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    run("grpo", grpo_settings(model, **beside_an_engine(2, **sizes), **{"policy.precision": "bfloat16"}), tmp_path)
    lines = metrics_of(tmp_path / "logs")
    assert max(lines) == STEPS and all(1 <= line["train/token_mult_prob_error"] < 1.02 for line in lines.values())


RECORDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", TP2, {}),
    "rm": ("rm", PP2, {}),
    "dpo with a reference": ("dpo", PP2, {}),
    "dpo computed before": ("dpo", TP2, {"dpo.precompute_reference": True}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_data_trains_megatron_as_the_torch_learner(name: str, tiny: Path, tmp_path: Path) -> None:
    section, sizes, more = RECORDED[name]
    settings = {**recorded_config(section, tiny), f"{section}.max_num_steps": 3, "checkpointing.save_period": 3, **more}
    for learner, own in (("torch", TORCH), ("megatron", megatron(**sizes))):
        (tmp_path / learner).mkdir()
        write_data(tmp_path / learner)
        run(section, {**settings, **own}, tmp_path / learner)
    curves_agree(tmp_path / "torch", tmp_path / "megatron", steps=3, noise=NOISE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["distillation", "topk_distillation"])
def test_a_teacher_of_other_sizes_teaches_a_student_of_two_stages(algorithm: str, tiny: Path, tmp_path: Path) -> None:
    teacher = build_tiny(tmp_path / "teacher_model", seed=5)
    settings = {
        **sampling_config("distillation", tiny),
        "algorithm.name": algorithm,
        "distillation.topk_logits_k": 6,
        "distillation.max_num_steps": 3,
        "distillation.val_period": 0,
        "teacher.model_name": str(teacher),
        "checkpointing.enabled": False,
    }
    run("distillation", {**settings, **TORCH}, tmp_path / "torch")
    run("distillation", {**settings, **megatron(**PP2), **megatron(TEACHER, **TP2)}, tmp_path / "megatron")
    curves_agree(tmp_path / "torch", tmp_path / "megatron", steps=3, noise=NOISE)


@pytest.mark.exhaustive
def test_ppo_with_a_critic_of_its_own_sizes(tiny: Path, tmp_path: Path) -> None:
    settings = {**sampling_config("ppo", tiny), "ppo.max_num_steps": 3, "ppo.val_period": 0, "checkpointing.enabled": False}
    settings["value.precision"] = "float32"  # its default does not follow the policy's
    critic = {"value.optimizer.kwargs.lr": RATE, "value.optimizer.kwargs.weight_decay": 0.0}
    run("ppo", {**settings, **TORCH, **critic}, tmp_path / "torch")
    run("ppo", {**settings, **megatron(**TP2), **megatron("value", **PP2)}, tmp_path / "megatron")
    curves_agree(tmp_path / "torch", tmp_path / "megatron", steps=3, noise=NOISE)


@pytest.mark.exhaustive
def test_a_frozen_reference_and_a_learner_that_leaves_its_device_while_engines_sample(tiny: Path, tmp_path: Path) -> None:
    asked = {"loss_fn.reference_policy_kl_penalty": 0.1, "policy.offload": True}
    run("grpo", grpo_settings(tiny, **TORCH, **asked), tmp_path / "torch")
    run("grpo", grpo_settings(tiny, **megatron(**TP2), **asked), tmp_path / "megatron")
    curves_agree(tmp_path / "torch", tmp_path / "megatron", steps=STEPS, noise=NOISE)


@pytest.mark.exhaustive
def test_ranks_of_megatron_train_while_engines_sample_and_save_beside_training(tiny: Path, tmp_path: Path) -> None:
    asked = {
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.max_trajectory_age_steps": 1,
        "loss_fn.use_importance_sampling_correction": True,
        "checkpointing.async_save": True,
    }
    run("grpo", grpo_settings(tiny, **megatron(**PP2), **asked), tmp_path)
    metrics = metrics_of(tmp_path / "logs")
    assert max(metrics) == STEPS and max(line["train/staleness_max"] for line in metrics.values()) <= 1
    assert (tmp_path / "results" / f"step_{STEPS}" / "policy" / "weights" / "iter_0000000").is_dir()


@pytest.mark.exhaustive
def test_the_documented_commands_train_convert_and_plan_for_four_nodes(tiny: Path, tmp_path: Path) -> None:
    """As they are written, with a model, data and numbers that a small machine has."""
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    rows = [{"problem": f"{a}+2=", "expected_answer": str(a + 2)} for a in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["dataset_name=ResponseDataset", "data_path=rows.jsonl", "input_key=problem", "output_key=expected_answer"]
    small = [
        f"policy.model_name={tiny}",
        "policy.device=cpu",
        "policy.precision=float32",
        "policy.max_total_sequence_length=256",
        "policy.generation.max_new_tokens=4",
        "policy.generation.torch_cfg.kv_cache_memory_gb=0.02",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.max_num_steps=2",
        "checkpointing.save_period=2",
        "checkpointing.metric_name=null",
        "data.train.split_validation_size=0",
        "grpo.val_period=0",
        *(f"data.train.{entry}" for entry in data),
    ]
    train = ["examples/run_grpo.py", "--config", "examples/configs/grpo_math_1B_megatron.yaml"]
    planned = strop(
        *train, "cluster.num_nodes=4", "cluster.gpus_per_node=8", "--dry-run", f"policy.model_name={tiny}", folder=tmp_path
    )
    assert "32 ranks on 4 nodes: Megatron Core, 32 data" in planned.out, planned.err + planned.out
    outcome = strop(*train, *small, folder=tmp_path, timeout=400)
    assert outcome.code == 0, outcome.err + outcome.out
    step = "results/grpo/step_2"
    weights = ["--megatron-ckpt-path", f"{step}/policy/weights/iter_0000000"]
    converted = strop(
        "examples/converters/convert_megatron_to_hf.py",
        *("--config", f"{step}/config.yaml", *weights, "--hf-ckpt-path", "results/grpo/hf"),
        folder=tmp_path,
    )
    assert converted.code == 0, converted.err
    assert load_model(str(tmp_path / "results" / "grpo" / "hf")).config.num_hidden_layers == 2
