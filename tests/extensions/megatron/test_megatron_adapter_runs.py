"""Whole runs that train adapters of Megatron Core's layers: the same curve in any layout, also after a kill, and what is exported."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from extensions.megatron.test_megatron_runs import NOISE, PP2, STEPS, TP2, begin, grpo_settings, megatron, run
from loop.kinds import recorded_config, write_data
from loop.runs import metrics_of, strop
from loop.test_cluster_faults import assert_nobody_left, steps_logged, wait_for
from loop.test_cluster_runs import curves_agree
from loop.tiny import build_tiny
from strop.models.loading import load_model
from support.needs import needs_vllm

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytest.importorskip("megatron.core", reason="Megatron Core is not installed: pip install -e '.[megatron]'")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

RATE = 0.01
EACH_STEP = {"checkpointing.save_period": 1, "checkpointing.metric_name": None, "checkpointing.keep_top_k": ...}


def adapters(**sizes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"peft.enabled": True, "peft.dim": 4, "peft.alpha": 8, "optimizer.lr": RATE}
    return megatron(**sizes) | {f"policy.megatron_cfg.{name}": value for name, value in own.items()}


def test_two_layouts_give_one_curve_with_the_base_as_reference_and_are_exported(tiny: Path, tmp_path: Path) -> None:
    asked = {"loss_fn.reference_policy_kl_penalty": 0.1, "policy.offload": True, **EACH_STEP}
    run("grpo", grpo_settings(tiny, **adapters(**TP2), **asked), tmp_path / "tensor")
    folder = tmp_path / "stages"
    settings = grpo_settings(tiny, **adapters(**PP2), **asked)
    running = begin("grpo", settings, folder)
    wait_for(running, lambda: steps_logged(running) >= 2)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.join()
    assert_nobody_left(folder)
    assert "continuing after step" in run("grpo", settings, folder).out
    curves_agree(tmp_path / "tensor", folder, steps=STEPS, noise=NOISE)
    last = metrics_of(folder / "logs")[STEPS]
    assert last["train/token_mult_prob_error"] < 1.0005 and last["train/kl_penalty"] > 0
    merged = strop("export", "logs", "merged", "--merge", folder=folder)
    assert merged.code == 0, merged.err
    weights, base = (load_model(str(path)).state_dict() for path in (folder / "merged", tiny))
    changed = {name for name, value in weights.items() if not torch.equal(value, base[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_recorded_data_trains_adapters_of_a_reward_model_and_with_a_reference(tiny: Path, tmp_path: Path) -> None:
    for section, sizes in (("rm", PP2), ("dpo", TP2)):
        folder = tmp_path / section
        folder.mkdir()
        write_data(folder)
        settings = {**recorded_config(section, tiny), f"{section}.max_num_steps": 2, "checkpointing.save_period": 2}
        settings |= {**adapters(**sizes), "policy.megatron_cfg.peft.dropout": 0.1}
        run(section, settings, folder)
        weights = folder / "results" / "step_2" / "policy" / "weights"
        assert (weights / "adapter_model.safetensors").is_file() and not (weights / "iter_0000000").exists()


def test_real_vllm_is_sent_the_adapters_alone(tmp_path: Path) -> None:
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    vllm = {
        "policy.generation.backend": "vllm",
        "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
        "policy.generation.vllm_cfg.num_threads": 1,
        "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
        "policy.generation.weight_sync.proof": "always",
        "policy.generation.weight_sync.adapters_alone": True,
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.gpus_per_node": 1,
    }
    folder = tmp_path / "run"
    outcome = run("grpo", grpo_settings(model, **(adapters(**TP2) | {"cluster.gpus_per_node": 3} | vllm)), folder)
    assert metrics_of(folder / "logs")[STEPS]["train/token_mult_prob_error"] < 1.0005, outcome.out
