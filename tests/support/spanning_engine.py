"""A vLLM engine over two nodes of a Ray cluster, which may be two raylets of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorOptions
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.ray import connect
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.generation.engine_launch import NodeRanks
from strop.generation.vllm.vllm_engine import VllmEngine
from strop.sampling import Sampling
from strop.weight_sync.transports.broadcast import BroadcastSender
from support.vllm_engines import TESTS, ServedModel, compute_logprobs, make_launch, save_model_folder, serve, served_model

SAMPLING = Sampling(temperature=0.8, max_new_tokens=8)


async def serve_on(
    address: str, folder: Path, tokenizer: Any, *, gpus: Sequence[str] = (), model: Any = None, **keys: Any
) -> tuple[ServedModel, Any]:
    """Serve a model with one engine of two ranks, each on a node: two pipeline stages, or what ``keys`` of ``vllm_cfg`` say."""
    cluster = await connect(ClusterConfig(num_nodes=2, address=address), on_cpu=True)
    model = (served_model(layers=3, tied=False) if model is None else model).to("cuda" if gpus else "cpu")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    launch = replace(
        make_launch(save_model_folder(model, tokenizer, folder), on_cpu=not gpus, **(keys or {"pipeline_parallel_size": 2})),
        environment=environment,
        nodes=tuple(NodeRanks(cluster.locate(node, (0,))[0], 1, tuple(gpus[node : node + 1])) for node in range(2)),
        ray_address=cluster.address,
    )
    make = partial(VllmEngine, "engine 0", launch, tokenizer, stop_ids=(tokenizer.eos_token_id,))
    options = ActorOptions(name="engine-0", node=0, further_nodes=(1,), devices=(0,), kind="async", environment=environment)
    engine: Any = RemoteEngine("engine 0", launch.receivers, RestartableActor(cluster, options, make))
    engine.config, engine.launch = launch.config.vllm_cfg, launch
    return serve(model, tokenizer, [engine], make_sender=partial(BroadcastSender, backend="gloo")), cluster


async def check(served: ServedModel, version: int, *, tolerance: float = 2e-5) -> None:
    published = await served.weights.publish(version)
    assert published["weights/tensors_read_back"].value == len(served.model.state_dict())
    prompt = tuple(range(40, 60))
    done = await served.pool.generate(prompt, sampling=SAMPLING, seed=1)
    assert float((done.logprobs - compute_logprobs(served.model, prompt, done.tokens, SAMPLING)).abs().max()) < tolerance
