"""Whole runs over Ray: the same curves as in one process, whatever lives where."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import GRADED, recorded_config, sampling_config, write_data
from loop.runs import Environ, Outcome, metrics_of, overrides, start, tiny_config
from loop.tiny import build_tiny
from loop.victims import MARK, find_processes
from support.forked_interpreter import Forked, forked_interpreter
from support.needs import needs_vllm
from support.sweep import sweep

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUIET = {"logger.console": "plain", "checkpointing.save_period": 3, "grpo.max_num_steps": 4}
RAY = {"cluster.backend": "ray"}
TWO = {**RAY, "cluster.gpus_per_node": 2}
LORA = {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4}
NOISE = 2e-4  # relative: ranks add float32 gradients in another order


def run(
    section: str, settings: Mapping[str, Any], folder: Path, *, interpreter: str = sys.executable, timeout: float = 300
) -> Outcome:
    before = Forked(interpreter, then=Environ({MARK: str(folder)}))
    return start([section, *overrides(dict(settings))], folder, before=before).finish(timeout)


def grpo(model: Path, folder: Path, *, interpreter: str = sys.executable, **changes: Any) -> Outcome:
    return run("grpo", {**tiny_config(model), **QUIET, **GRADED, **changes}, folder, interpreter=interpreter)


def curves_agree(one: Path, other: Path, *, steps: int = 4, noise: float = NOISE) -> None:
    first, second = metrics_of(one / "logs"), metrics_of(other / "logs")
    assert max(first) == max(second) == steps
    for step, line in first.items():
        for name, value in line.items():
            if name.startswith(("train/", "validation/")) and "rank" not in name and "seconds" not in name:
                assert math.isclose(value, second[step][name], rel_tol=noise, abs_tol=noise), (
                    step,
                    name,
                    value,
                    second[step][name],
                )


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = grpo(tiny, folder)
    assert outcome.code == 0, outcome.err
    return folder


def test_two_ranks_an_engine_and_hosts_of_environments_give_the_curve_of_one_process(
    tiny: Path, alone: Path, tmp_path: Path
) -> None:
    with forked_interpreter() as interpreter:
        outcome = grpo(tiny, tmp_path, interpreter=interpreter, **TWO, **{"cluster.environment_hosts": 2})
    assert outcome.code == 0, outcome.err + outcome.out
    curves_agree(alone, tmp_path)
    workers = {path.stem for path in (tmp_path / "logs" / "workers").iterdir()}
    workers -= {"monitor-0"}  # of a listener that watches machines
    assert workers == {"learner-0", "learner-1", "engine-0", "environment-graded-0", "environment-graded-1"}
    metrics = metrics_of(tmp_path / "logs")[4]
    assert 1.0 <= metrics["train/tokens_per_rank_max_over_mean"] < 1.6 and metrics["train/token_mult_prob_error"] < 1.0005
    assert find_processes(str(tmp_path)) == []


@pytest.mark.exhaustive
def test_what_two_ranks_saved_goes_on_in_one_process_and_the_other_way_round(tiny: Path, alone: Path, tmp_path: Path) -> None:
    together = tmp_path / "together"
    assert grpo(tiny, together, **TWO, **{"grpo.max_num_steps": 3}).code == 0
    outcome = grpo(tiny, together)
    assert outcome.code == 0 and "continuing after step 3" in outcome.out, outcome.err
    curves_agree(alone, together)
    apart = tmp_path / "apart"
    assert grpo(tiny, apart, **{"grpo.max_num_steps": 3}).code == 0
    outcome = grpo(tiny, apart, **TWO)
    assert outcome.code == 0 and "continuing after step 3" in outcome.out, outcome.err
    curves_agree(alone, apart)


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_with_adapters_and_a_reference_give_the_curve_of_one_process(tiny: Path, tmp_path: Path) -> None:
    asked = {**LORA, "loss_fn.reference_policy_kl_penalty": 0.1}
    sizes = {"policy.dtensor_cfg.tensor_parallel_size": 2, "policy.dtensor_cfg.sequence_parallel": True}
    assert grpo(tiny, tmp_path / "one", **asked).code == 0
    outcome = grpo(tiny, tmp_path / "two", **TWO, **asked, **sizes)
    assert outcome.code == 0, outcome.err
    curves_agree(tmp_path / "one", tmp_path / "two")


@pytest.mark.exhaustive
def test_pipeline_stages_give_the_curve_of_one_process_and_go_on_in_another_layout(
    tiny: Path, alone: Path, tmp_path: Path
) -> None:
    staged = {**TWO, "policy.dtensor_cfg.pipeline_parallel_size": 2}
    assert grpo(tiny, tmp_path, **staged, **{"grpo.max_num_steps": 3}).code == 0
    outcome = grpo(tiny, tmp_path, **staged)
    assert outcome.code == 0 and "continuing after step 3" in outcome.out, outcome.err
    assert "2 pipeline x 1 copy" in outcome.out
    curves_agree(alone, tmp_path)
    assert grpo(tiny, tmp_path, **TWO, **{"grpo.max_num_steps": 5}).code == 0
    assert find_processes(str(tmp_path)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_only", [False, True])
def test_a_critic_on_two_ranks_gives_the_curve_of_one_process(head_only: bool, tiny: Path, tmp_path: Path) -> None:
    settings = {
        **sampling_config("ppo", tiny),
        "ppo.max_num_steps": 3,
        "value.head_only": head_only,
        "value.optimizer.kwargs.lr": 1e-4,  # the noise of ranks grows with each step of AdamW
        "checkpointing.enabled": False,
    }
    for name, more in (("one", {}), ("two", TWO)):
        folder = tmp_path / name
        folder.mkdir()
        outcome = run("ppo", {**settings, **more}, folder)
        assert outcome.code == 0, outcome.err
    curves_agree(tmp_path / "one", tmp_path / "two", steps=3)


@pytest.mark.parametrize("section", sweep(["sft", "dpo", "rm"]))
def test_recorded_data_trains_two_ranks_as_one_process(section: str, tiny: Path, tmp_path: Path) -> None:
    settings = {**recorded_config(section, tiny), f"{section}.max_num_steps": 3, "checkpointing.enabled": False}
    for name, more in (("one", {}), ("two", TWO)):
        folder = tmp_path / name
        write_data(folder)
        outcome = run(section, {**settings, **more}, folder)
        assert outcome.code == 0, outcome.err
    curves_agree(tmp_path / "one", tmp_path / "two", steps=3)


@pytest.mark.exhaustive
def test_ranks_train_while_engines_sample(tiny: Path, tmp_path: Path) -> None:
    asked = {
        "grpo.async_grpo.enabled": True,
        "grpo.async_grpo.max_trajectory_age_steps": 1,
        "loss_fn.use_importance_sampling_correction": True,
    }
    outcome = grpo(tiny, tmp_path, **TWO, **asked, **{"checkpointing.async_save": True})
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert max(metrics) == 4 and max(line["train/staleness_max"] for line in metrics.values()) <= 1
    assert (tmp_path / "results" / "step_4" / "policy" / "weights" / ".metadata").exists()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of two nodes, as Ray's own tests make them: two raylets on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=0)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.exhaustive
def test_learner_and_engine_on_different_nodes_give_the_curve_of_one_process(
    tiny: Path, alone: Path, tmp_path: Path, two_nodes: str
) -> None:
    nodes = {
        **TWO,
        "cluster.num_nodes": 2,
        "cluster.address": two_nodes,
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.num_nodes": 1,
    }
    outcome = grpo(tiny, tmp_path, **nodes)
    assert outcome.code == 0, outcome.err
    assert "2 nodes" in outcome.out
    curves_agree(alone, tmp_path)


SPANNING = {
    **RAY,
    "cluster.num_nodes": 2,
    "policy.generation.backend": "vllm",
    "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
    "policy.generation.vllm_cfg.num_threads": 1,
    "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
    "policy.generation.weight_sync.proof": "always",
    "grpo.max_num_steps": 2,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_engine_on_two_nodes_gives_the_curve_of_one_on_one_node(size: str, tmp_path: Path, two_nodes: str) -> None:
    """The ranks of the engine are Ray actors, each on the node of a rank of the learner; every publish is read back."""
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    outcome = grpo(model, tmp_path / "one", **{**SPANNING, "cluster.num_nodes": 1, "cluster.address": "local"})
    assert outcome.code == 0, outcome.err
    spanning = {**SPANNING, "cluster.address": two_nodes, f"policy.generation.vllm_cfg.{size}": 2}
    outcome = grpo(model, tmp_path / "two", **spanning)
    assert outcome.code == 0, outcome.err
    assert "1 engine of 2 devices over 2 nodes each" in outcome.out
    line = metrics_of(tmp_path / "two" / "logs")[2]
    assert line["weights/tensors_not_read_back"] == 0 and line["weights/tensors_read_back"] > 0
    assert line["train/token_mult_prob_error"] < 1.0005
    curves_agree(tmp_path / "one", tmp_path / "two", steps=2)
    assert find_processes(str(tmp_path / "two")) == []


@pytest.mark.exhaustive
def test_real_vllm_beside_two_ranks_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    needs_vllm()
    model = build_tiny(tmp_path / "model", head_dim=32)
    asked = {
        "policy.generation.backend": "vllm",
        "policy.generation.vllm_cfg.kv_cache_memory_gb": 0.125,
        "policy.generation.vllm_cfg.num_threads": 1,
        "policy.generation.torch_cfg.kv_cache_memory_gb": ...,
        "policy.generation.weight_sync.proof": "always",
    }
    apart = {
        "cluster.gpus_per_node": 3,
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.gpus_per_node": 1,
        "cluster.environment_hosts": 1,
    }
    for name, more in (("one", {}), ("many", apart)):
        outcome = grpo(model, tmp_path / name, **asked, **more)
        assert outcome.code == 0, outcome.err
        assert metrics_of(tmp_path / name / "logs")[4]["train/token_mult_prob_error"] < 1.0005
    curves_agree(tmp_path / "one", tmp_path / "many")
    assert find_processes(str(tmp_path / "many")) == []
