"""Devices of a run: of this process, and the plan of a cluster's."""

from __future__ import annotations

import logging

import pytest
import torch

from strop import gpus
from strop.config import GrpoRunConfig, TrainingRunConfig, load_config
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import TRAINING_RUNS
from strop.distributed.placement import PlacementError, plan_devices
from strop.runs.dry_run.assumed_cluster import format_device_rows, format_placement
from strop.runs.local_device import resolve_device_name
from strop.runs.models import select_device, set_up_gpu
from strop.runs.summary import summarize
from support.overrides import RUN


@pytest.fixture(autouse=True)
def two_of_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "2,3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_gpu_is_counted_among_those_that_are_seen() -> None:
    assert [resolve_device_name(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == ["cuda", "cpu", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match=r"cuda:2, and this process sees 2 GPUs \(CUDA_VISIBLE_DEVICES=2,3\).*cuda:0 to cuda:1"):
        resolve_device_name("cuda:2")
    assert gpus.visible_gpus() == ["2", "3"]


def test_names_after_one_that_cuda_does_not_know_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "GPU-1,GPU-unknown,GPU-2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus.visible_gpus() == ["GPU-1"]


def test_without_a_gpu_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpus.visible_gpus() == [] and resolve_device_name("auto") == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        resolve_device_name("cuda:0")


def test_the_policys_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("auto", "cuda", "cpu", "cuda:1"):
        select_device(name)
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("overrides", "environment", "expands", "said"),
    [
        (["policy.generation.backend=torch"], {}, True, "segments that expand"),
        (["policy.generation.backend=vllm"], {}, False, "fixed segments, as weights may be sent by CUDA IPC"),
        (["policy.generation.backend=vllm", "policy.generation.weight_sync.transport=memory"], {}, True, "segments that expand"),
        (["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"], {}, True, "segments that expand"),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, "set by an environment variable"),
        (["policy.device=cpu"], {}, False, None),
    ],
)
def test_the_learners_memory_expands_unless_other_processes_may_map_it(
    overrides: list[str],
    environment: dict[str, str],
    expands: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, [*RUN, "policy.device=cuda:1", *overrides], root=GrpoRunConfig, check=False).config
    with caplog.at_level(logging.INFO):
        set_up_gpu(config)
    assert settings == (["expandable_segments:True"] if expands else [])
    assert not caplog.records if said is None else said in caplog.text


TWO_NODES = ["cluster.num_nodes=2", "cluster.gpus_per_node=4"]
APART = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=2"]


def config(*overrides: str, section: str = "grpo") -> TrainingRunConfig:
    base = ["policy.model_name=m", "policy.device=cpu", f"{section}.val_period=0", "checkpointing.metric_name=null"]
    data = ["data.train.dataset_name=squad"] if section == "sft" else ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    return load_config(None, [*base, *data, *overrides], root=TRAINING_RUNS[section]).config


def lines(*overrides: str, on_cpu: bool = False, section: str = "grpo") -> dict[str, str]:
    found = format_placement(config(*overrides, section=section), on_cpu=on_cpu)
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in found}


def rows(*overrides: str) -> list[tuple[str, str, str]]:
    return format_device_rows(plan_devices(count_devices(config(*overrides)), on_cpu=False), 2)


def test_ranks_layout_and_engines_of_a_run_on_gpus() -> None:
    sizes = ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.dp_replicate_size=2"]
    assert lines(*TWO_NODES, *sizes) == {
        "cluster": "2 nodes of a Ray cluster, 4 GPUs on each",
        "learner": "8 ranks on 2 nodes: 2 copies x 2 shards x 1 context x 2 tensor",
        "engines": "8 engines of 1 device on nodes 0 to 1, colocated with the learner",
        "env": "environments run in the driver's process",
    }


def test_engines_apart_are_on_devices_of_their_own() -> None:
    wide = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    found = lines(*TWO_NODES, *APART, *wide)
    assert found["learner"].startswith("4 ranks on 2 nodes")
    assert found["engines"] == "2 engines of 2 devices on nodes 0 to 1, on their own devices"
    assert rows(*TWO_NODES, *APART, *wide) == [("0", "0-1", "engine 0: 2-3"), ("1", "0-1", "engine 1: 2-3")]


def test_more_engines_than_fit_are_refused() -> None:
    many = config(*TWO_NODES, *APART, "policy.generation.torch_cfg.num_engines=9")
    with pytest.raises(PlacementError, match="9"):
        format_placement(many, on_cpu=True)


def test_a_run_on_a_cluster_says_where_it_is_and_one_process_says_nothing_of_it() -> None:
    many, one = summarize(config(*TWO_NODES)), summarize(config("policy.num_threads=1"))
    assert "policy      m on the CPUs of the learner's ranks" in many and "torch engines, 2 GiB of cache each" in many
    assert "learner     8 ranks on 2 nodes" in many and "warning" not in many
    assert "learner " not in one and "cluster " not in one and "in this process" in one


def test_what_the_cluster_says_of_its_devices_counts_more_than_what_is_here() -> None:
    anywhere = config(*TWO_NODES, "policy.device=cuda")
    assert "on the GPUs of the learner's ranks" in summarize(anywhere), "the driver may have no GPU"
    assert "8 engines" in summarize(anywhere, on_cpu=False)
    assert "on the CPUs" in summarize(config(*TWO_NODES, "policy.device=auto"), on_cpu=True)
