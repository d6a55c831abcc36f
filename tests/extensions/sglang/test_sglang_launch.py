"""What an SGLang server is started with, and what is refused before."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, load_config
from strop.extensions.sglang.server.cpu_stub import CPU_VARIABLE, KernelStubFinder, install_cpu_stub
from strop.extensions.sglang.server_process import RESERVED_ARGUMENTS, SglangLaunch, make_server_arguments, write_empty_adapter
from strop.extensions.sglang.sglang_config import SglangConfig, find_cpu_problems, require_sglang
from strop.generation.engine_launch import LaunchedAdapters
from strop.generation.generation_config import GenerationConfig
from support.every_family import make_config
from support.overrides import RUN

BASE = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "policy.generation.backend=sglang"]
KEY = "policy.generation"


def launch(*, on_cpu: bool = True, kwargs: dict[str, Any] | None = None, **keys: Any) -> SglangLaunch:
    attached: dict[str, Any] = {"sglang_cfg": SglangConfig(**keys), "sglang_kwargs": kwargs or {}}
    config = GenerationConfig(backend="sglang", **attached)
    return SglangLaunch(config=config, model="folder", on_cpu=on_cpu)


def arguments(of: SglangLaunch) -> dict[str, Any]:
    return make_server_arguments(of, port=1, key="secret")


def test_a_server_begins_without_weights_and_takes_requests_with_its_key_from_this_machine_only() -> None:
    given = arguments(launch())
    assert given["load_format"] == "dummy" and given["host"] == "127.0.0.1" and given["api_key"] == "secret"
    assert arguments(replace(launch(), load_weights=True))["load_format"] == "auto"


def test_on_a_cpu_plain_torch_takes_the_place_of_kernels() -> None:
    given = arguments(launch())
    assert (given["device"], given["attention_backend"], given["sampling_backend"]) == ("cpu", "torch_native", "pytorch")
    on_gpu = arguments(launch(on_cpu=False, sampler="sglang"))
    assert not {"device", "attention_backend", "sampling_backend", "max_total_tokens"} & on_gpu.keys()
    assert launch().env_vars[CPU_VARIABLE] == "1" and CPU_VARIABLE not in launch(on_cpu=False).env_vars


def test_keys_of_sglang_are_passed_on_and_further_arguments_after_them() -> None:
    given = arguments(
        launch(on_cpu=False, max_running_requests=3, speculative_algorithm="EAGLE3", kwargs={"schedule_policy": "lpm"})
    )
    assert (given["max_running_requests"], given["speculative_algorithm"], given["schedule_policy"]) == (3, "EAGLE3", "lpm")
    assert "speculative_num_steps" not in given, "null is SGLang's choice"


@pytest.mark.parametrize("name", sorted(RESERVED_ARGUMENTS))
def test_arguments_that_strop_sets_itself_are_refused_with_what_to_set(name: str) -> None:
    with pytest.raises(ValueError, match=f"sglang_kwargs.{name}: Strop sets"):
        arguments(launch(kwargs={name: 1}))


def test_a_colocated_engine_on_a_gpu_gives_its_memory_up() -> None:
    assert arguments(launch(on_cpu=False))["enable_memory_saver"]
    assert not launch().sleeps
    kept = {"sglang_server_config": {"needs_offload": False}}
    assert not launch(on_cpu=False, **kept).sleeps


def test_the_interpreter_is_the_configured_one_or_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STROP_SGLANG_PYTHON", raising=False)
    assert launch().python == sys.executable
    monkeypatch.setenv("STROP_SGLANG_PYTHON", "/other/python")
    assert launch().python == "/other/python" and launch(python="/mine").python == "/mine"
    with pytest.raises(ValueError, match="make setup-sglang"):
        require_sglang(str(tmp_path / "none"))


def test_the_stub_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    install_cpu_stub()  # not in a process of an engine
    monkeypatch.setenv(CPU_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="there is a GPU"):
        install_cpu_stub()


def test_a_kernel_that_is_missing_may_be_named_and_says_so_when_it_is_called() -> None:
    finder = KernelStubFinder()
    assert finder.find_spec("torch", None) is None
    spec = finder.find_spec("sgl_kernel.scalar_type", None)
    assert spec is not None
    module: Any = type(sys)("sgl_kernel.scalar_type")
    finder.exec_module(module)
    assert module.scalar_types.uint4b8 is not None
    with pytest.raises(NotImplementedError, match="moe_align"):
        module.moe_align(1)


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([f"{KEY}.sglang_cfg.ep_size=2"], f"{KEY}.sglang_cfg.ep_size", "shards its experts"),
        ([f"{KEY}.sglang_cfg.python=/no/such/python"], f"{KEY}.sglang_cfg.python", "not a file"),
        ([f"{KEY}.top_k=1"], f"{KEY}.top_k", "greedy"),
        ([f"{KEY}.sglang_cfg.sampler=sglang", f"{KEY}.top_p=0.9"], f"{KEY}.sglang_cfg.sampler", "only with a top_k"),
        (
            [f"{KEY}.sglang_cfg.sampler=sglang", f"{KEY}.top_p=0.9", f"{KEY}.top_k=50"],
            f"{KEY}.sglang_cfg.sampler",
            "to the whole distribution",
        ),
        (
            [f"{KEY}.sglang_cfg.speculative_algorithm=EAGLE3", f"{KEY}.top_k=50"],
            f"{KEY}.sglang_cfg.speculative_algorithm",
            "from before top_k",
        ),
        ([f"{KEY}.sglang_cfg.context_length=64"], f"{KEY}.sglang_cfg.context_length", "would truncate"),
        (["policy.exact_on_policy=true"], "policy.exact_on_policy", "has not been tried"),
        (["policy.router_replay.enabled=true"], "policy.router_replay.enabled", "SGLang does not report the experts"),
        ([f"{KEY}.quantization.format=fp8_block"], f"{KEY}.quantization.format", "does not publish to SGLang"),
        (
            ["policy.deterministic=true", "policy.device=cuda"],
            f"{KEY}.sglang_cfg.enable_deterministic_inference",
            "depends on the batch without it",
        ),
        (
            [f"{KEY}.sglang_cfg.tp_size=4", "cluster.gpus_per_node=2", "cluster.backend=ray"],
            f"{KEY}.sglang_cfg.tp_size",
            "2 GPUs of a node generate, and an SGLang engine is on one node",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_configuration_is_loaded(overrides: list[str], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, *overrides], root=GrpoRunConfig)
    said = [f"{problem.key}: {problem.message} {problem.fix}" for problem in caught.value.problems]
    assert any(reason in each for each in said), said


@pytest.mark.parametrize(
    ("words", "refusal"),
    [([], "has no SGLang"), (["policy.generation.sglang_cfg.python=/no/python"], "/no/python, which is not a")],
)
def test_sglang_is_assumed_with_gpus_and_asked_for_without(
    words: list[str], refusal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STROP_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr("strop.packages.is_here", lambda package: package != "sglang")
    run = ["grpo", *RUN, "policy.device=auto", "policy.generation.backend=sglang", *words]
    assert cli.main([*run, "--dry-run", "--assume-gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "assumed to be on the machines of the run: sglang" in said and "sglang      bfloat16, SGLang's choice" in said
    assert cli.main([*run, "--dry-run"]) == 2
    assert refusal in capsys.readouterr().err


def test_lengths_and_precision_follow_the_policy() -> None:
    config = load_config(
        None, [*BASE, "policy.max_total_sequence_length=99", "policy.precision=float32"], root=GrpoRunConfig
    ).config
    options = SglangConfig.of(config.policy.generation)
    assert (options.context_length, options.dtype) == (99, "float32")


def test_what_another_engine_reads_is_said_to_be_unused() -> None:
    warned = load_config(None, [*BASE, f"{KEY}.torch_cfg.kv_cache_memory_gb=1"], root=GrpoRunConfig).warnings
    assert any("SGLang does not read" in str(problem) for problem in warned)
    base = [*BASE[:3], f"{KEY}.backend=torch", f"{KEY}.sglang_cfg.sampler=sglang"]
    warned = load_config(None, base, root=GrpoRunConfig).warnings
    assert any("torch does not read policy.generation.sglang_cfg.sampler" in str(problem) for problem in warned)


def test_an_evaluation_may_be_sampled_by_sglang() -> None:
    given = ["generation.model_name=m", "generation.backend=sglang", "generation.sglang_cfg.context_length=64"]
    data = ["data.dataset_name=gsm8k", "generation.max_new_tokens=32", "data.max_input_seq_length=64"]
    config = load_config(None, [*given, *data], root=EvalRunConfig).config
    assert config.generation.max_total_sequence_length == 64


def test_an_engine_for_adapters_starts_with_an_empty_one_of_their_shape(tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj")
    adapters = LaunchedAdapters(12, names)
    given = write_empty_adapter(adapters, tmp_path / "adapter")
    assert given["max_lora_rank"] == 12 and given["lora_target_modules"] == ["down_proj", "q_proj"]
    assert given["lora_paths"][0]["lora_path"] == str(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 12
    assert arguments(replace(launch(), adapters=adapters))["lora_backend"] == "torch_native"
    assert "lora_backend" not in arguments(replace(launch(on_cpu=False), adapters=adapters)), "a GPU's is SGLang's choice"


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ([], True),
        (["weight_sync.adapters_alone=false"], False),
        (["sglang_cfg.speculative_algorithm=NGRAM"], False),
    ],
)
def test_adapters_are_sent_alone_where_they_can_be_written_in_place(changes: list[str], alone: bool) -> None:
    overrides = [f"{KEY}.{change}" for change in changes]
    loaded = load_config(None, [*BASE, "policy.dtensor_cfg.lora_cfg.enabled=true", *overrides], root=GrpoRunConfig)
    assert loaded.config.policy.generation.sends_adapters is alone
    said = [warning for warning in map(str, loaded.warnings) if "merged weights" in warning]
    assert bool(said) is (not alone and "adapters_alone" not in str(changes))
    if said:
        assert changes[0].partition("=")[2] in said[0], "it says why"


@pytest.mark.parametrize("given", [{"speculative_algorithm": "NGRAM"}, {"kwargs": {"speculative_algorithm": "NGRAM"}}], ids=str)
def test_drafts_are_refused_on_a_cpu_where_sglang_would_accept_them_greedily(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="found NGRAM, but on a CPU SGLang accepts drafts greedily whatever the temperature is"):
        arguments(launch(**given))


RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "nemotron_h", "granite_hybrid", "falcon_h1", "mamba2", "lfm2",
    "lfm2_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", [*RECURRENT, "deepseek_v32", "glm_moe_dsa", "gpt_oss"])
def test_what_sglang_computes_by_kernels_of_gpus_alone_is_refused_on_a_cpu(family: str, tmp_path: Path) -> None:
    model = make_config(family)
    model.save_pretrained(tmp_path)
    others = "attention sinks" if family == "gpt_oss" else "sparse attention"
    layers = "recurrent layers and short convolutions" if family in RECURRENT else others
    with pytest.raises(ConfigError, match=f"{KEY}.backend: found sglang, whose {layers}"):
        load_config(None, [*BASE, "policy.device=cpu", f"policy.model_name={tmp_path}"], root=GrpoRunConfig)
    with pytest.raises(ValueError, match=f"and {model.model_type} has such"):
        arguments(replace(launch(), model=str(tmp_path)))


def test_models_of_attention_alone_are_not_refused_for_what_their_family_may_have() -> None:
    for family, changes in {
        "llama": {},
        "gemma4": {},
        "granite_hybrid": {"layer_types": ["full_attention"] * 2},
    }.items():
        assert not list(find_cpu_problems(make_config(family, **changes).to_dict(), KEY))
    assert list(find_cpu_problems({"text_config": make_config("qwen3_5").to_dict()}, KEY))


def test_values_and_scales_are_sent_only_to_engines_with_layers_for_them() -> None:
    changes = [f"{KEY}.quantization.send_quantized=true", "loss_fn.use_importance_sampling_correction=true"]
    for given in (["vllm_cfg.precision=fp8"], ["quantization.format=fp8_block", "quantization.emulate=true"]):
        with pytest.raises(ConfigError, match=r"send_quantized.*no engine of this run accepts values and scales"):
            load_config(None, [*BASE, *changes, *(f"{KEY}.{each}" for each in given)], root=GrpoRunConfig)


def test_a_way_of_loading_weights_that_is_gone_is_refused_with_what_to_do_instead() -> None:
    key = "policy.generation.sglang_cfg.weight_loading"
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, f"{key}=7"], root=GrpoRunConfig)
    (problem,) = caught.value.problems
    assert (problem.key, problem.message) == (key, "found 7, and this key is gone")
    assert problem.fix == "Remove it: the processes that hold the model always receive the weights themselves."
    unset = load_config(None, [*RUN, f"{key}=direct"], root=GrpoRunConfig).config
    assert unset == load_config(None, RUN, root=GrpoRunConfig).config
    load_config(None, [*RUN, f"{key}=7"], root=GrpoRunConfig, check=False)
