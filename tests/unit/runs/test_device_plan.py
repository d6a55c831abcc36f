"""Who trains and who generates where, as it is said before there is a cluster."""

from __future__ import annotations

import pytest

from strop.config import TrainingRunConfig, load_config
from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import TRAINING_RUNS
from strop.distributed.placement import PlacementError, plan_devices
from strop.runs.cluster.device_plan import format_device_rows, format_placement
from strop.runs.summary import summarize

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
    assert rows(*TWO_NODES, *APART, *wide) == [
        ("0", "0-1", "engine 0: 2-3"),
        ("1", "0-1", "engine 1: 2-3"),
    ]


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
