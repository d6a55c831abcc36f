"""The engines of an evaluation: in this process, in processes of this machine, or on the nodes of a Ray cluster.

The model is in memory once for each engine. Engines in other processes read it from its folder themselves, so this process holds
only the tokenizer.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorOptions, Cluster
from strop.distributed.placement import (
    DeviceCounts,
    DevicePlan,
    DeviceSlot,
    count_engines,
    engine_size,
    make_thread_env,
    plan_devices,
)
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.generation.base import Generator
from strop.generation.engine_launch import EngineLaunch, NodeRanks
from strop.generation.generation_config import GenerationConfig
from strop.generation.launched_engines import find_engine, make_launched_engine, make_local_engines
from strop.generation.pool import start_serving_pool
from strop.generation.torch.torch_engine import make_torch_engine
from strop.gpus import has_gpu, visible_gpus
from strop.models.adapters import adapter_folder
from strop.models.attention.rotary_scaling import fixed_rotary_config
from strop.models.loading import find_model_folder, locate_model, override_config, read_model_config
from strop.packages import install_command
from strop.runs.cluster.engine_builders import build_serving_torch_engine
from strop.runs.evaluation_job import EvaluationJob
from strop.runs.model_check import note_turn_end
from strop.runs.models import TokenizerBundle, load_bundle, load_policy, resolve_device, select_device

if TYPE_CHECKING:
    from strop.models.chat_template import ChatTemplate

Note = Callable[[str], object]


@dataclass(frozen=True)
class OpenEngines:
    """The generator of an evaluation, and the chat template of its model."""

    generator: Generator
    template: ChatTemplate


def uses_ray(job: EvaluationJob) -> bool:
    """Whether the engines are Ray actors: if configured, on several nodes, or with several torch engines."""
    cluster, generation = job.cluster, job.generation
    if cluster.backend != "auto" or cluster.num_nodes > 1:
        return cluster.backend == "ray" or cluster.num_nodes > 1
    if generation.uses_engines:
        return False
    on_gpu = job.policy.device == "auto" and has_gpu()
    return (count_engines(generation) or (min(cluster.gpus_per_node, len(visible_gpus())) if on_gpu else 1)) > 1


@asynccontextmanager
async def open_engines(job: EvaluationJob, note: Note, *, output_folder: Path | None) -> AsyncIterator[OpenEngines]:
    """Start the engines of an evaluation for the duration of the context. ``output_folder``: for their output; None: a temporary
    one.

    Raises ModelNotFound, ValueError, PlacementError, ConnectionError.
    """
    async with AsyncExitStack() as stack:
        if uses_ray(job):
            yield await _open_on_cluster(job, stack, note, output_folder)
        elif job.generation.uses_engines:
            outputs = output_folder / "workers" if output_folder else _make_temporary_folder(stack, "strop-output-")
            yield await _open_local(job, stack, note, outputs)
        else:
            yield _open_here(job, stack, note)


def _open_here(job: EvaluationJob, stack: AsyncExitStack, note: Note) -> OpenEngines:
    select_device(job.policy.device)
    policy = load_policy(job.policy)
    note_turn_end(policy, job.sets[0].sampling, "generation", note)
    options, length = job.generation.torch_cfg, job.rules.max_length
    engine = make_torch_engine(policy.network, policy.tokenizer, options, length=length, stop_ids=policy.stop_ids)
    engine.resume(0)
    stack.push_async_callback(engine.close)
    return OpenEngines(engine, policy.template)


async def _open_local(job: EvaluationJob, stack: AsyncExitStack, note: Note, outputs: Path) -> OpenEngines:
    device, bundle = resolve_device(job.policy.device), load_bundle(job.policy)
    note_turn_end(bundle, job.sets[0].sampling, "generation", note)
    launch = _make_launch(
        bundle,
        config=_share_devices(job, on_cpu=device.type == "cpu"),
        model=_find_weights(job, stack, note, parent=None),
        tokenizer=_find_tokenizer(job, bundle, stack),
        on_cpu=device.type == "cpu",
    )
    engines = make_local_engines(
        launch,
        bundle.tokenizer,
        learner=device,
        stop_ids=bundle.stop_ids,
        threads=job.policy.num_threads,
        output_folder=outputs,
        vision=bundle.template.vision,
    )
    return await _start(job, stack, engines, bundle)


def _make_launch(
    bundle: TokenizerBundle, *, config: GenerationConfig, model: str, tokenizer: str, **settings: Any
) -> EngineLaunch:
    """Return how an engine is launched that reads the weights itself. ``settings``: further fields of the launch."""
    images = bundle.template.vision is not None
    launch = find_engine(config).launch_class
    return launch(config=config, model=model, tokenizer=tokenizer, load_weights=True, reads_images=images, **settings)


def _share_devices(job: EvaluationJob, *, on_cpu: bool) -> Any:
    """Return the section of the engines, with as many engines as fit on the usable GPUs of this machine."""
    generation = job.generation
    if on_cpu or generation.engine_options.num_engines is not None:
        return generation
    fitting = min(job.cluster.gpus_per_node, len(visible_gpus())) // engine_size(generation)
    options: Any = replace(generation.engine_options, num_engines=max(1, fitting))
    return replace(generation, **{generation.engine_key: options})


async def _start(job: EvaluationJob, stack: AsyncExitStack, engines: Any, bundle: TokenizerBundle) -> OpenEngines:
    pool = await start_serving_pool(engines, max_restarts=job.generation.engine_options.max_restarts)
    stack.push_async_callback(pool.close)
    return OpenEngines(pool, bundle.template)


# --- Ray -----------------------------------------------------------------------------------------------------------------


async def _open_on_cluster(job: EvaluationJob, stack: AsyncExitStack, note: Note, output_folder: Path | None) -> OpenEngines:
    try:
        from strop.distributed.ray import connect
    except ImportError as error:
        raise ValueError(
            f"this evaluation has engines in several processes or on several nodes (cluster.backend, cluster.num_nodes, num_engines), "
            f"which requires Ray, and Ray cannot be imported here ({error}): {install_command('ray')}, or set cluster.backend=local and "
            "one engine"
        ) from error
    bundle = load_bundle(job.policy)
    note_turn_end(bundle, job.sets[0].sampling, "generation", note)
    generation, device = job.generation, job.policy.device
    counts = DeviceCounts(
        nodes=job.cluster.num_nodes,
        per_node=max(1, job.cluster.gpus_per_node),
        engine_size=engine_size(generation),
        engines=count_engines(generation),
        uses_ray=True,
    )
    cpus = counts.per_node * job.cluster.roles.generator.num_cpus
    workers = None if output_folder is None else (output_folder / "workers").resolve()
    cluster = await connect(
        replace(job.cluster, gpus_per_node=counts.per_node),
        on_cpu={"cpu": True, "auto": None}.get(device, False),
        cpus_per_node=max(1.0, cpus),
        output_folder=workers,
    )
    stack.push_async_callback(cluster.close)
    plan = plan_devices(counts, on_cpu=cluster.on_cpu)
    of_engines = DevicePlan((), plan.generation)
    threads = make_thread_env(job.policy.num_threads, of_engines, on_cpu=cluster.on_cpu, generates=True)
    if generation.uses_engines and cluster.on_cpu and (own := generation.engine_options.num_threads):
        threads = {"OMP_NUM_THREADS": str(own)}
    weights = _find_weights(job, stack, note, parent=output_folder) if generation.uses_engines else job.policy.model_name
    engines = [_open_engine(job, cluster, bundle, weights, threads, *found) for found in enumerate(plan.generation)]
    count = f"{len(engines)} {'engine' if len(engines) == 1 else 'engines'}"
    note(f"cluster: {cluster.num_nodes} {'node' if cluster.num_nodes == 1 else 'nodes'}, {count} share the tasks")
    return await _start(job, stack, engines, bundle)


def _open_engine(
    job: EvaluationJob,
    cluster: Cluster,
    bundle: TokenizerBundle,
    weights: str,
    threads: Mapping[str, str],
    number: int,
    slot: DeviceSlot,
) -> RemoteEngine:
    name, receivers = f"engine {number}", 1
    make: Callable[[], Any]
    if job.generation.uses_engines:
        launch = _make_launch(
            bundle,
            config=job.generation,
            model=weights,
            tokenizer=locate_model(job.policy.tokenizer.name)[0],
            on_cpu=cluster.on_cpu,
            environment=threads,
            nodes=tuple(_locate_ranks(cluster, part) for part in slot.parts) if slot.further else (),
            ray_address=cluster.address if slot.further else "",
        )
        receivers, vision = launch.receivers, bundle.template.vision
        make = partial(make_launched_engine, name, launch, bundle.tokenizer, stop_ids=bundle.stop_ids, vision=vision)
    else:
        policy = replace(job.policy, num_threads=None)  # set by the process's environment variables
        length = job.rules.max_length
        make = partial(build_serving_torch_engine, name, policy, job.generation.torch_cfg, length, bundle.stop_ids)
    options = ActorOptions(
        name=f"engine-{number}",
        role=job.cluster.roles.generator,
        node=slot.node,
        further_nodes=tuple(part.node for part in slot.further),
        devices=slot.devices,
        kind="async",
        environment=threads,
    )
    return RemoteEngine(name, receivers, RestartableActor(cluster, options, make))


def _locate_ranks(cluster: Cluster, part: DeviceSlot) -> NodeRanks:
    node, gpus = cluster.locate(part.node, part.devices)
    return NodeRanks(node, len(part.devices), gpus)


# --- weights for vLLM ----------------------------------------------------------------------------------------------------


def _find_weights(job: EvaluationJob, stack: AsyncExitStack, note: Note, *, parent: Path | None) -> str:
    """Return the name or folder from which vLLM reads the model: its own, or a temporary one for adapters, a GGUF file, or a
    configuration with overrides. ``parent``: parent of the temporary folder, visible to several nodes.
    """
    name = job.policy.model_name
    fixed = fixed_rotary_config(read_model_config(name), job.policy.max_total_sequence_length)
    overrides = {**job.policy.hf_config_overrides, **fixed}
    merged = adapter_folder(name) is not None
    location, gguf = ("", None) if merged else locate_model(name)
    if not merged and gguf is None and not overrides:
        return location
    folder = _make_temporary_folder(stack, "strop-model-", parent=parent)
    if merged or gguf is not None:
        target = folder / "model"
        note(f"{'merging the adapters' if merged else 'writing the weights of the GGUF file'} to a temporary folder, {folder}")
        _export(name, target, merge=merged)  # in a separate process that ends, so that this one never holds the weights
    else:
        target = folder
        for path in find_model_folder(name).resolve().iterdir():
            (target / path.name).symlink_to(path)
    if overrides:
        override_config(target, overrides)
    return str(target)


def _find_tokenizer(job: EvaluationJob, bundle: TokenizerBundle, stack: AsyncExitStack) -> str:
    """Return the name or folder from which vLLM reads the tokenizer: a temporary one for a GGUF file's."""
    location, gguf = locate_model(job.policy.tokenizer.name)
    if gguf is None:
        return location
    folder = _make_temporary_folder(stack, "strop-tokenizer-")
    bundle.tokenizer.save_pretrained(folder)
    return str(folder)


def _make_temporary_folder(stack: AsyncExitStack, prefix: str, *, parent: Path | None = None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _export(name: str, target: Path, *, merge: bool) -> None:
    command = [sys.executable, "-m", "strop", "export", name, str(target), *(["--merge"] if merge else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name} could not be written as a folder that vLLM reads: {done.stderr.strip()[-2000:]}")
