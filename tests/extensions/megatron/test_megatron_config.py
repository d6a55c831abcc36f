"""Configurations that name Megatron Core: what cannot work is refused before a run starts, with the reason and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.config import ConfigError, load_config
from strop.config.schema.run_config import PpoRunConfig
from strop.monitoring.run_starts import find_versions
from support.needs import needs_megatron
from support.overrides import RUN
from unit.cli.test_dry_run import RUN as DRY_RUN
from unit.cli.test_dry_run import dry_run
from unit.cli.test_dry_run_of_models import refuse, write_config
from unit.config.test_config_checks import AUTO, accepted, refusal
from unit.runs.test_device_plan import TWO_NODES, lines

M = "policy.megatron_cfg"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 8}"], "8 ranks do not divide the 1 devices"),
        (["policy.megatron_cfg={enabled: true, peft: {enabled: true, dropout: 0.1}}"], "rollouts are sampled without dropout"),
        (
            ["policy.dtensor_cfg.enabled=false"],
            "found false, and policy.megatron_cfg.enabled is false too, which leaves no learner",
        ),
        ([f"{M}.enabled=true", "policy.ema.enabled=true"], "keeps no moving average"),
        (
            [f"{M}.enabled=true", "policy.exact_on_policy=true", "cluster.backend=ray"],
            "add in an order that depends on the batch",
        ),
        ([f"{M}.enabled=true", "policy.dequantize_base_checkpoint=true"], "where weights and scales are separate"),
        (
            [f"{M}.enabled=true", "policy.fp8.enabled=true"],
            "found true, but it applies to the torch learner, and this run trains with Megatron Core",
        ),
        ([f"{M}.enabled=true", "policy.router_losses.aux_loss_coeff=0.1"], "which has its own keys for them"),
    ],
)
def test_what_megatron_core_cannot_do_is_refused(overrides: list[str], reason: str) -> None:
    assert reason in str(refusal(*overrides))


def test_what_the_torch_learner_would_read_is_said_to_have_no_effect() -> None:
    (warning,) = accepted(f"{M}.enabled=true", "policy.attention_kernel=plain")
    assert "policy.attention_kernel: it has no effect: Megatron Core's layers attend with" in warning


def test_a_budget_that_megatron_core_does_not_measure_is_refused() -> None:
    text = str(refusal(AUTO, f"{M}.enabled=true"))
    assert "train_mb_tokens: found auto, but the Megatron Core learner measures no memory" in text


MEGATRON = ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"]


def test_megatron_core_needs_ranks() -> None:
    (problem,) = refusal(*MEGATRON, "cluster.backend=local").problems
    assert problem.key == "cluster.backend" and "Megatron Core runs on ranks, which are processes of Ray" in str(problem)
    assert "Set it to auto or ray, or policy.backend=torch." in str(problem)
    for backend in ("auto", "ray"):
        accepted(*MEGATRON, f"cluster.backend={backend}")


def test_a_critic_of_megatron_core_is_a_network_of_its_own() -> None:
    critic = [*RUN[:3], *MEGATRON, "value.megatron_cfg.enabled=true", "value.dtensor_cfg.enabled=false"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*critic, "value.head_only=true"], root=PpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "value.head_only" and "the policy's last stage has no value head" in str(problem)
    assert "Set it to false, or policy.backend=torch." in str(problem)
    load_config(None, critic, root=PpoRunConfig)


def test_a_critic_has_the_learner_of_the_policy() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN[:3], f"{M}.enabled=true"], root=PpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == "value.megatron_cfg.enabled" and "found false, but policy.megatron_cfg.enabled is true" in str(problem)
    assert problem.fix.endswith("Set policy.backend=torch to train all models with the torch learner, or megatron.")


def test_the_layout_of_megatron_core_has_stages() -> None:
    sizes = ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
    found = lines(*TWO_NODES, "policy.megatron_cfg.enabled=true", *sizes, "policy.generation.backend=torch")
    assert found["learner"] == "8 ranks on 2 nodes: Megatron Core, 2 data x 2 stages x 1 context x 2 tensor"


def test_layers_and_experts_are_counted_where_megatron_core_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    values = {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "num_experts": 8,
    }
    (folder / "model" / "config.json").write_text(json.dumps(values))
    sizes = {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 16}
    words = [*DRY_RUN, "policy.model_name=model", "cluster.gpus_per_node=64", "policy.megatron_cfg.enabled=true"]
    said = dry_run(capsys, "grpo", *words, *(f"policy.megatron_cfg.{key}={size}" for key, size in sizes.items()), code=2)
    assert "policy.megatron_cfg.pipeline_model_parallel_size: found 4: 4 stages cannot share the 6 layers of model evenly" in said
    assert "policy.megatron_cfg.expert_model_parallel_size: found 16, which does not divide the 8 experts" in said
    (folder / "model" / "config.json").write_text(json.dumps({**values, "model_type": "nemotron_h"}))
    assert "does not train models of type nemotron_h: its Mamba layers" in dry_run(capsys, "grpo", *words, code=2)


@pytest.mark.parametrize("name", ["m", "m/iter_0000000"])
def test_a_folder_of_shards_is_refused_with_what_converts_it(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    iteration = folder / "m" / "iter_0000000"
    iteration.mkdir(parents=True)
    for file in (".metadata", "metadata.json"):
        (iteration / file).touch()
    (folder / "m" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    said = dry_run(capsys, "grpo", *DRY_RUN, f"policy.model_name={name}", code=2)
    assert f"convert_megatron_to_hf.py --megatron-ckpt-path {name} " in said


def test_megatron_core_keeps_float32_masters_of_bfloat16_weights(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["grpo", *DRY_RUN, "policy.device=auto", "policy.precision=bfloat16", "--assume-gpus", "8"]
    assert ", bfloat16, float32 masters\n" in dry_run(capsys, *run, f"{M}.enabled=true")


CASES: list[tuple[str, dict[str, Any], list[str], str]] = [
    # family, changes of its configuration, overrides, what is said
    ("llama", {"attention_bias": True}, [f"{M}.enabled=true"], "attention_bias and mlp_bias are not in Megatron Core's Llama"),
    ("qwen3_moe", {}, [f"{M}.enabled=true", f"{M}.moe_router_enable_expert_bias=true"],
     f"{M}.moe_router_enable_expert_bias: found true, but the model's weights have no such bias"),
    ("qwen3_moe", {}, [f"{M}.enabled=true", f"{M}.moe_token_dispatcher_type=flex"], "found flex, which needs DeepEP"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "words", "said"), CASES)
def test_a_model_that_a_run_refuses_once_it_is_loaded_is_refused_before(
    family: str, changes: dict[str, Any], words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(folder / "model", family, **changes)
    assert said in refuse(capsys, *RUN, "policy.model_name=model", "policy.device=cpu", *words)


@pytest.mark.slow
def test_a_model_that_fits_passes(folder: Path) -> None:
    write_config(folder / "model", "qwen3_moe")
    words = [*RUN, "policy.model_name=model", "policy.device=cpu", f"{M}.enabled=true"]
    assert cli.main(["grpo", *words, "--dry-run"]) == 0


def test_a_run_records_the_version_of_megatron_core() -> None:
    needs_megatron()
    assert find_versions()["megatron-core"]
