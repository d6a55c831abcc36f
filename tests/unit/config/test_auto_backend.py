"""``generation.backend: auto`` is vLLM where a GPU and vLLM are, unless vLLM cannot do what is configured; what it is, is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import gpus, packages
from strop.config import GrpoRunConfig, dump_config, load_config
from strop.config.load import device_defaults
from strop.config.source.keys import find_changes
from strop.generation.vllm import supported_models
from strop.runs.rollout_run import engine_shares_module
from strop.runs.summary import summarize
from support.overrides import RUN

G = "policy.generation."


@pytest.fixture(autouse=True)
def everything_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    monkeypatch.setattr(gpus, "has_gpu", lambda: True)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


def load(*overrides: str, **options: Any) -> Any:
    return load_config(None, [*RUN, *overrides], root=GrpoRunConfig, **options)


def test_with_a_gpu_and_vllm_auto_is_vllm_in_the_precision_of_the_policy_with_a_share_of_the_memory() -> None:
    loaded = load()
    generation = loaded.config.policy.generation
    assert loaded.warnings == () and generation.uses_vllm and generation.backend == "auto"
    options = generation.vllm_cfg
    assert (options.precision, options.kv_cache_memory_gb, options.gpu_memory_utilization, options.sleep_level) == (
        "bfloat16",
        None,
        0.6,
        2,
    )
    assert not engine_shares_module(loaded.config)
    assert "a vLLM engine in a separate process, bfloat16 (backend auto: a GPU and vLLM are here)" in summarize(
        loaded.config, on_cpu=False
    )


def test_without_a_gpu_or_without_vllm_auto_is_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = load("policy.device=cpu").config
    assert not on_cpu.policy.generation.uses_vllm and "backend auto" not in summarize(on_cpu)
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "vllm")
    config = load().config
    assert not config.policy.generation.uses_vllm and "(backend auto: vLLM is not installed)" in summarize(config, on_cpu=False)
    monkeypatch.undo()
    monkeypatch.setattr(gpus, "has_gpu", lambda: False)
    assert not load().config.policy.generation.uses_vllm


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{G}temperature=0.001"], "vLLM raises temperatures between 0 and 0.01"),
        (["grpo.async_grpo.enabled=true"], "an engine on the learner's GPU would be asleep then"),
        ([f"{G}vllm_cfg.expert_parallel_size=3", f"{G}vllm_cfg.tensor_parallel_size=2"], "divides its experts over all ranks"),
    ],
)
def test_where_vllm_cannot_do_what_is_asked_auto_is_torch_and_says_why(overrides: list[str], reason: str) -> None:
    loaded = load(*overrides)
    first = loaded.warnings[0]
    assert not loaded.config.policy.generation.uses_vllm
    assert (
        first.key == f"{G}backend" and "found auto, which is the torch engine here" in first.message and reason in first.message
    )


def test_rules_about_an_engine_are_those_of_the_one_that_auto_stands_for() -> None:
    assert load(f"{G}colocated.enabled=false").config.policy.generation.uses_vllm  # torch would refuse it in one process
    (warning,) = load(f"{G}torch_cfg.max_num_seqs=8").warnings
    assert "vLLM does not read policy.generation.torch_cfg.max_num_seqs" in str(warning)


def test_a_model_whose_class_vllm_lacks_is_sampled_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported_models, "list_supported_models", lambda: frozenset({"LlamaForCausalLM"}))
    for name, classes in (("own", ["OwnForCausalLM"]), ("llama", ["LlamaForCausalLM"]), ("silent", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": classes}))
    loaded = load(f"policy.model_name={tmp_path / 'own'}")
    assert "no model of the class OwnForCausalLM" in loaded.warnings[0].message
    assert all(load(f"policy.model_name={tmp_path / name}").config.policy.generation.uses_vllm for name in ("llama", "silent"))


def test_the_classes_of_a_hub_model_are_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["OwnForCausalLM"]}')
    assert supported_models.read_architectures("owner/name") == ["OwnForCausalLM"]
    assert supported_models.read_architectures("owner/other") == []


def test_what_auto_stands_for_is_not_saved_and_is_no_change_to_a_run() -> None:
    here, there = load().config, load("policy.device=cpu").config
    assert "backend: auto" in dump_config(here) and "auto_engine" not in dump_config(here)
    assert [change.key for change in find_changes(here, there)] == ["policy.device"]


def test_a_cluster_decides_for_a_driver_that_sees_other_devices() -> None:
    config = load().config
    assert not device_defaults.resolve_auto_backend(config, has_gpus=False).policy.generation.uses_vllm
    assert device_defaults.resolve_auto_backend(config, has_gpus=True).policy.generation.uses_vllm
    explicit = load(f"{G}backend=torch").config
    assert device_defaults.resolve_auto_backend(explicit, has_gpus=True) is explicit
