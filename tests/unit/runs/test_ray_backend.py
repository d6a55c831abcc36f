"""What the driver tells the ranks and the processes of engines, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.config import TrainingRunConfig, load_config
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import TRAINING_RUNS
from strop.distributed.placement import plan_devices
from strop.distributed.workers.learner_worker import PolicyInfo
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.generation.pool import SyncedGenerator
from strop.runs.cluster.ray_backend import RayBackend
from strop.runs.engines import GeneratorSpec
from strop.sampling import Sampling
from strop.weight_sync.transports.choose import EngineLocations

VLLM = "policy.generation.backend=vllm"


class Ranks:
    """A group of actors that notes what it is called with."""

    actors = (SimpleNamespace(address="10.0.0.1"),)

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        self.calls[method] = arguments
        return []

    async def call_one(self, rank: int, method: str, *arguments: Any) -> None:
        self.calls[method] = arguments


def config_of(model: Path, *overrides: str) -> TrainingRunConfig:
    base = [f"policy.model_name={model}", "grpo.val_period=0", "checkpointing.metric_name=null", "cluster.backend=ray"]
    data = ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    return load_config(None, [*base, *data, *overrides], root=TRAINING_RUNS["grpo"]).config


def generator_of(config: TrainingRunConfig, *, on_cpu: bool = False) -> tuple[SyncedGenerator, EngineLocations]:
    """Build the generator, whose engines do not start, and return it with where rank 0 is told that they are."""
    ranks: Any = Ranks()
    info = PolicyInfo(packed=True, fallback=None, on_cpu=on_cpu, stop_ids=(2,), fingerprint="", vocab_size=8)
    plan = plan_devices(count_devices(config), on_cpu=on_cpu)
    cluster: Any = SimpleNamespace(num_nodes=config.cluster.num_nodes, on_cpu=on_cpu)
    learner: Any = None
    spec = GeneratorSpec(
        sampling=Sampling(),
        learner=learner,
        max_staleness=0,
        in_flight=False,
        recompute=False,
        share_prefixes=True,
        seed=0,
        note=print,
        output_folder=Path("engines"),
    )
    synced = asyncio.run(RayBackend(config, cluster, plan, ranks, info).build_generator(spec))
    (make_exporter,) = ranks.calls["open_export"]
    return synced, make_exporter.keywords["engines"]


@pytest.mark.parametrize(
    ("overrides", "count", "same_machine"),
    [
        (["cluster.gpus_per_node=4"], 4, True),
        (["cluster.gpus_per_node=4", "policy.generation.vllm_cfg.tensor_parallel_size=4"], 1, True),
        (["cluster.gpus_per_node=4", "policy.generation.vllm_cfg.num_engines=2"], 2, True),
        (["cluster.gpus_per_node=2", "cluster.num_nodes=2"], 4, False),
    ],
)
def test_the_transport_is_chosen_for_as_many_engines_as_there_are(
    overrides: list[str], count: int, same_machine: bool, tiny_model_folder: Path
) -> None:
    synced, engines = generator_of(config_of(tiny_model_folder, VLLM, *overrides))
    pool: Any = synced.generator
    assert len(pool.engines) == count
    assert engines == EngineLocations(count=count, colocated=True, same_machine=same_machine, host="10.0.0.1")


def test_an_engine_s_process_has_the_role_and_vllm_its_own_variables(tiny_model_folder: Path) -> None:
    role = [
        "cluster.roles.generator.env_vars={OMP_NUM_THREADS: '7'}",
        "policy.generation.vllm_cfg.env_vars={OMP_NUM_THREADS: '5'}",
    ]
    threads = ["policy.num_threads=2", "policy.generation.vllm_cfg.num_threads=3"]
    config = config_of(tiny_model_folder, VLLM, *role, *threads, "policy.device=cpu", "policy.precision=float32")
    synced, _ = generator_of(config, on_cpu=True)
    pool: Any = synced.generator
    engine: RemoteEngine = pool.engines[0]
    assert engine._actor.options.environment == {"OMP_NUM_THREADS": "2"}
    assert engine._actor.options.role == config.cluster.roles.generator
    launch = engine._actor._make.args[1]
    assert launch.environment == {"OMP_NUM_THREADS": "3"} and launch.env_vars == {"OMP_NUM_THREADS": "5"}
    assert launch.config == config.policy.generation and launch.output_file.name == "engine_0.log"
