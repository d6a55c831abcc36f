"""What an inference engine cannot do is refused when the run starts, and what it does not read is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strop import packages
from strop.config import ConfigError, EvalRunConfig, GrpoRunConfig, load_config
from strop.config.schema.run_config import PpoRunConfig
from strop.generation.vllm.vllm_config import MIN_TEMPERATURE
from strop.runs import summary
from support.overrides import RUN

VLLM = "policy.generation.backend=vllm"
GPUS = ["cluster.gpus_per_node=2"]
APART = "policy.generation.colocated.enabled=false"
AHEAD = "grpo.async_grpo.enabled=true"
G, C, W = "policy.generation.", "policy.generation.vllm_cfg.", "policy.generation.weight_sync."


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: True)


def warnings(*overrides: str, root: Any = GrpoRunConfig, base: list[str] = RUN) -> list[str]:
    return [str(problem) for problem in load_config(None, [*base, *overrides], root=root).warnings]


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*RUN, *overrides], root=GrpoRunConfig)
    return caught.value


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [APART],
        [AHEAD, APART],
        [AHEAD, "policy.device=cpu"],
        [f"{G}temperature=0", f"{G}val_temperature=0.01"],
        [f"{C}max_model_len=1024"],
        [f"{C}tensor_parallel_size=2", f"{C}num_engines=2"],
        [f"{C}tensor_parallel_size=2", f"{C}expert_parallel_size=4"],
        [f"{W}transport=memory"],
        [f"{W}transport=broadcast", "policy.device=cpu"],
        [f"{W}transport=broadcast", "policy.device=cuda", APART],
        [f"{W}transport=cuda_ipc", "policy.device=cuda:0"],
        [f"{W}transport=folder", f"{W}folder=weights"],
        [f"{W}proof=every_n", f"{W}proof_every=3"],
        [f"{C}speculation.method=ngram", f"{C}speculation.prompt_lookup_max=8"],
        [f"{C}speculation.method=draft_model", f"{C}speculation.model_name=draft"],
        [f"{C}speculation.method=eagle3", f"{C}speculation.model_name=head"],
        [f"{C}speculation.method=mtp", f"{C}speculation.model_name=m"],
        [APART, f"{C}num_engines=3", f"{G}colocated.resources.gpus_per_node=3", "cluster.gpus_per_node=4"],
        [APART, f"{G}colocated.resources.num_nodes=1"],
        [f"{C}pipeline_parallel_size=2"],
    ],
)
def test_what_vllm_can_do_is_accepted_without_a_word(overrides: list[str]) -> None:
    assert warnings(VLLM, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{G}temperature=0.001"], "vLLM raises temperatures between 0 and 0.01"),
        ([f"{G}val_temperature=0.009"], "policy.generation.val_temperature: found 0.009"),
        ([f"{C}max_model_len=511"], "the engine would truncate it earlier"),
        ([f"{C}tensor_parallel_size=2", f"{C}expert_parallel_size=3"], "Set it to 1, or to a multiple of 2"),
        ([f"{C}expert_parallel_size=2", f"{C}speculation.method=ngram"], "makes an engine of 2 copies"),
        ([f"{W}transport=cuda_ipc", "policy.device=cpu"], "no GPU memory to share"),
        ([f"{W}transport=cuda_ipc", APART], "cannot map the learner's memory"),
        ([f"{W}transport=cuda_ipc", f"{C}num_engines=2"], "only the first of 2 engines is on the learner's GPU"),
        ([f"{W}transport=broadcast", "policy.device=cuda"], "NCCL does not connect two processes on one GPU"),
        ([AHEAD, "policy.device=cuda"], "would be asleep"),
        ([f"{C}speculation.method=ngram", f"{G}min_p=0.1"], "ignores min_p in speculative decoding"),
        ([f"{C}speculation.method=ngram", f"{C}speculation.prompt_lookup_min=9"], "no match has such a length"),
        ([f"{C}speculation.method=ngram", f"{C}pipeline_parallel_size=2"], "draft only on the last stage"),
        ([f"{C}speculation.method=mtp"], "whose layers the learner does not have"),
        ([APART, f"{G}colocated.resources.gpus_per_node=4"], "policy.generation.vllm_cfg.num_engines=4 or it to 1 or null"),
        ([APART, f"{C}tensor_parallel_size=2", f"{G}colocated.resources.gpus_per_node=3"], "Set it to 2 or null"),
        ([APART, f"{C}tensor_parallel_size=2", f"{C}pipeline_parallel_size=2", f"{G}colocated.resources.gpus_per_node=2"],
         "1 engines of 4 ranks use 4 GPUs"),
        ([APART, f"{G}colocated.resources.num_nodes=2"], "this run uses one machine"),
    ],
)  # fmt: skip
def test_what_vllm_cannot_do_is_refused_with_the_way_out(overrides: list[str], reason: str) -> None:
    error = refusal(VLLM, *overrides)
    assert reason in str(error) and len(error.problems) == 1 and error.problems[0].fix


@pytest.mark.parametrize(
    ("overrides", "device", "reason"),
    [
        ([AHEAD], "cuda", "would be asleep"),
        ([f"{W}transport=broadcast"], "cuda", "NCCL does not connect two processes on one GPU"),
        ([f"{W}transport=cuda_ipc"], "cpu", "no GPU memory to share"),
    ],
)
def test_what_the_device_of_this_machine_cannot_do_is_refused_by_a_dry_run(
    overrides: list[str], device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "resolve_device_name", lambda _: device)
    config = load_config(None, [*RUN, VLLM, *overrides], root=GrpoRunConfig).config
    assert config.policy.device == "auto"
    with pytest.raises(ValueError, match=reason):
        summary.summarize(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{G}torch_cfg.max_num_seqs=8", f"{G}torch_cfg.cuda_graphs=false"], ["vLLM does not read policy.generation.torch_cfg"]),
        ([f"{C}kv_cache_dtype=fp8"], ["rounded keys and values change the sampling distribution"]),
        ([f"{W}proof=first", f"{W}proof_every=5"], ["proof is first, and it is the period of every_n"]),
        ([f"{W}folder=weights"], ["transport is auto, which writes no files"]),
        ([f"{W}transport=folder", f"{W}bucket_mb=8"], ["chooses the size of its files"]),
        ([f"{C}sleep_level=1", APART], ["never sleeps"]),
        ([f"{C}sleep_level=1", "policy.device=cpu"], ["frees no memory"]),
        ([f"{C}speculation.num_speculative_tokens=2"], ["speculation.method is null"]),
        ([f"{C}speculation.method=ngram", f"{C}speculation.model_name=draft"], ["speculation.method is ngram"]),
        ([f"{G}colocated.resources.gpus_per_node=1"], ["generation shares the devices that train"]),
    ],
)
def test_what_changes_nothing_with_vllm_or_not_what_it_seems_to_is_said(overrides: list[str], said: list[str]) -> None:
    found = warnings(VLLM, *overrides)
    assert len(found) == len(said) and all(part in warning for part, warning in zip(said, found, strict=True))


@pytest.mark.parametrize(
    "override", [f"{C}num_engines=2", f"{C}speculation.method=ngram", f"{G}vllm_kwargs.seed=1", f"{W}proof=always"]
)
def test_options_of_vllm_are_not_read_by_the_torch_engine(override: str) -> None:
    (warning,) = warnings(override)
    assert f"the torch engine does not read {override.partition('=')[0].removesuffix('.seed')}" in warning


def test_suffixes_are_looked_up_by_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "arctic_inference")
    assert "pip install arctic-inference" in str(refusal(VLLM, f"{C}speculation.method=suffix"))


def test_vllm_has_to_be_installed_where_something_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "vllm")
    error = refusal(VLLM)
    assert "vLLM is not installed" in str(error) and "make setup-vllm" in str(error)
    with pytest.raises(ConfigError, match=r"generation\.backend: found vllm, but vLLM is not installed"):
        load_config(None, ["generation.model_name=m", "env.math={}", "generation.backend=vllm"], root=EvalRunConfig)


def test_a_run_on_recorded_data_needs_no_engine_and_says_what_it_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    SftRunConfig = pytest.importorskip("strop.extensions.recorded.recorded_config").SftRunConfig
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "vllm")
    base = ["policy.model_name=m", "data.train.dataset_name=squad", "data.validation.dataset_name=squad"]
    assert warnings(root=SftRunConfig, base=base) == []
    (warning,) = warnings(VLLM, f"{C}speculation.method=ngram", root=SftRunConfig, base=base)
    assert "does not read policy.generation.backend, policy.generation.vllm_cfg.speculation.method" in warning


def test_an_evaluation_is_sent_no_weights() -> None:
    base = ["generation.model_name=m", "env.math={}", "generation.backend=vllm"]
    assert warnings(root=EvalRunConfig, base=base) == []
    (warning,) = warnings("generation.weight_sync.proof=always", root=EvalRunConfig, base=base)
    assert "an evaluation reads its weights from m" in warning


def test_the_coldest_temperature_is_the_one_that_requests_are_refused_below() -> None:
    requests = pytest.importorskip("strop.generation.vllm.requests", reason="vLLM is not installed")
    assert requests.MIN_TEMPERATURE == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{C}tensor_parallel_size=12"],
         "found 12, but .* 8 GPUs of a node generate"),
        ([APART, "cluster.gpus_per_node=8", f"{G}colocated.resources.gpus_per_node=2", f"{C}tensor_parallel_size=4"],
         "found 4, but 2 GPUs generate, 2 of a node"),
        (
            [
                APART,
                "cluster.gpus_per_node=4",
                "cluster.num_nodes=3",
                f"{G}colocated.resources.num_nodes=2",
                f"{C}tensor_parallel_size=4",
                f"{C}pipeline_parallel_size=4",
            ],
            "found 4 x pipeline_parallel_size = 4, but 8 GPUs generate, 4 of a node",
        ),
    ],
)  # fmt: skip
def test_an_engine_that_whole_nodes_do_not_hold_is_refused_in_one_sentence_at_its_key(overrides: list[str], said: str) -> None:
    (problem,) = refusal(VLLM, *overrides).problems
    assert problem.key == f"{C}tensor_parallel_size" and problem.origin is not None and problem.fix.startswith("Set it to")
    assert re.match(said, problem.message) and "\n" not in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{C}tensor_parallel_size=16"],
        ["cluster.gpus_per_node=8", "cluster.num_nodes=4", f"{C}tensor_parallel_size=8", f"{C}pipeline_parallel_size=2"],
        [APART, "cluster.gpus_per_node=4", "cluster.num_nodes=3", f"{G}colocated.resources.num_nodes=2",
         f"{C}tensor_parallel_size=8"],
    ],
)  # fmt: skip
def test_an_engine_may_have_several_whole_nodes(overrides: list[str]) -> None:
    assert warnings(VLLM, *overrides) == []


def test_several_colocated_engines_whose_number_is_left_open_get_a_transport_that_reaches_all() -> None:
    many = [VLLM, "cluster.gpus_per_node=4", "policy.device=cuda"]
    assert warnings(*many) == []
    (problem,) = refusal(*many, f"{W}transport=cuda_ipc").problems
    assert "only the first of 4 engines is on the learner's GPU" in problem.message
    assert warnings(*many, f"{W}transport=cuda_ipc", f"{C}tensor_parallel_size=4") == []


def test_shared_memory_is_refused_where_engines_are_on_other_nodes() -> None:
    two_nodes = [VLLM, "cluster.gpus_per_node=2", "cluster.num_nodes=2"]
    assert warnings(*two_nodes) == [] and warnings(*two_nodes, f"{W}transport=broadcast", "policy.device=cuda") == []
    (problem,) = refusal(*two_nodes, f"{W}transport=memory").problems
    assert "they do not share its memory" in problem.message


def test_the_devices_of_a_cluster_that_is_known_decide_before_a_model_is_loaded() -> None:
    config = load_config(None, [*RUN, VLLM, "cluster.gpus_per_node=2", AHEAD], root=GrpoRunConfig).config
    with pytest.raises(ValueError, match="would be asleep"):
        summary.summarize(config, on_cpu=False)
    assert "vLLM engines" in summary.summarize(config, on_cpu=True)


@pytest.mark.parametrize("key", ["policy.device", "value.device"])
def test_a_numbered_gpu_is_refused_where_ray_gives_each_process_its_own(key: str) -> None:
    base = [override.replace("grpo.", "ppo.") for override in RUN]
    load_config(None, [*base, f"{key}=cuda:1", "value.model_name=m"], root=PpoRunConfig)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*base, f"{key}=cuda:1", "value.model_name=m", "cluster.gpus_per_node=2"], root=PpoRunConfig)
    (problem,) = caught.value.problems
    assert problem.key == key and "numbered from 0 there" in problem.message and "CUDA_VISIBLE_DEVICES=1" in problem.fix
