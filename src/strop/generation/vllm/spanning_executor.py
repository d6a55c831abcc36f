"""The workers of an engine larger than one node: Ray actors on all of its nodes.

vLLM's own Ray executor takes GPUs from a placement group. Here the run holds the GPUs, shared by learner and engine, so each
worker is started on its node with the engine's GPUs there. The rest is vLLM's, with its message queues between scheduler and workers.

Runs in the engine core's process, which connects to the run's Ray cluster itself, so that its workers end with it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_env_utils import get_driver_env_vars
from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

from strop.generation.engine_launch import NodeRanks
from strop.generation.vllm.engine_args import SPANNED_VARIABLE, select_ranks
from strop.generation.vllm.launch import DRIVER_PID_VARIABLE, exit_with_driver, redirect_standard_output
from strop.gpus import VISIBLE

log = logging.getLogger(__name__)

ray: Any = ray_executor_v2.ray
WATCH_SECONDS = 1.0  # polled, because a thread blocked inside Ray at shutdown would crash
OWN_VARIABLES = {*WORKER_SPECIFIC_ENV_VARS, DRIVER_PID_VARIABLE, SPANNED_VARIABLE}  # of the core's process


@contextmanager
def leave_gpus_to_workers() -> Iterator[None]:
    """Start engine cores without their own GPUs. vLLM would give each model copy some of this process's GPUs, which are of one
    node only; here every worker is started with its own GPUs.
    """
    from vllm.v1.engine import utils

    assign = utils.set_assigned_physical_gpu_ids_for_dp_rank
    utils.set_assigned_physical_gpu_ids_for_dp_rank = lambda *arguments, **options: None
    try:
        yield
    finally:
        utils.set_assigned_physical_gpu_ids_for_dp_rank = assign


class SpanningWorker(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """A worker of vLLM in a Ray actor."""

    def __init__(self, output: str | None, **arguments: Any) -> None:
        if output is not None:
            redirect_standard_output(Path(output))
        if current_platform.is_cpu():
            _name_shared_memory_by_node(ray.get_runtime_context().get_node_id())
        super().__init__(**arguments)


class SpanningExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """Starts a worker for each rank on the node given by ``VllmLaunch.nodes``."""

    def _init_executor(self) -> None:
        self._finalizer = weakref.finalize(self, self.shutdown)
        self.is_failed = self.shutting_down = False
        self.failure_callback = None
        self.shutdown_lock = threading.Lock()
        exit_with_driver()  # otherwise this process would outlive its starter, because no worker is its child
        spanned = json.loads(os.environ[SPANNED_VARIABLE])
        if not ray.is_initialized():
            ray.init(address=spanned["address"], log_to_driver=False, configure_logging=False)
        self._get_parallel_sizes()
        # The name of vLLM's own executor: with any other, a worker expects the GPUs of all ranks on its node.
        self.parallel_config.distributed_executor_backend = "ray"
        nodes = [NodeRanks(each["node"], each["count"], tuple(each["gpus"])) for each in spanned["nodes"]]
        own = nodes[0].node  # the cores of all copies of an engine run on its first node
        copy = self.parallel_config.data_parallel_rank
        nodes = select_ranks(nodes, copy * self.world_size, self.world_size)
        self._start_workers(nodes, own, spanned["variables"], spanned["output"])
        self._connect_workers()
        self.futures_queue = deque[Any]()
        self._post_init_executor()
        self.start_worker_monitor()
        self.output_rank = self._get_output_rank()

    def _start_workers(self, nodes: list[NodeRanks], own: str, variables: list[str], output: str | None) -> None:
        """Start the actors in rank order; those on this process's node, ``own``, read queues in shared memory."""
        self.rpc_broadcast_mq = MessageQueue(
            self.world_size,
            nodes[0].count if nodes[0].node == own else 0,
            max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 2**20,
            connect_ip=ray.util.get_node_ip_address(),
        )
        queue = self.rpc_broadcast_mq.export_handle()
        actor_class = ray.remote(SpanningWorker)
        self.ray_worker_handles: list[ray_executor_v2.RayWorkerHandle] = []
        for node in nodes:
            options = self._actor_options(node, variables)
            for local_rank in range(node.count):
                rank = len(self.ray_worker_handles)
                actor = actor_class.options(**options).remote(
                    output,
                    vllm_config=self.vllm_config,
                    rank=rank,
                    input_shm_handle=queue,
                    is_driver_worker=self._is_driver_worker(rank),
                    is_driver_node=node.node == own,
                )
                self.ray_worker_handles.append(ray_executor_v2.RayWorkerHandle(actor, rank, local_rank, node.node))

    def _actor_options(self, node: NodeRanks, variables: list[str]) -> dict[str, Any]:
        runtime_env = self._build_runtime_env()  # the interpreter and packages of the engine's role
        own = {name: os.environ[name] for name in variables if name in os.environ}
        runtime_env["env_vars"] |= {**own, **({VISIBLE: ",".join(node.gpus)} if node.gpus else {})}
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.node, soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy, "runtime_env": runtime_env, "max_restarts": 0}

    def _connect_workers(self) -> None:
        """Load the model on every rank, and connect the queues. Raises an error of Ray if a worker cannot start."""
        handles = self.ray_worker_handles
        method = ray.get(handles[0].actor.create_dist_init_method.remote())
        environment = get_driver_env_vars(OWN_VARIABLES)  # defaults for a worker's process
        ray.get([each.actor.initialize_worker.remote(each.local_rank, {}, method, environment) for each in handles])
        answers = ray.get([each.actor.wait_for_init.remote() for each in handles])
        self.response_mqs = [MessageQueue.create_from_handle(answer["handle"], 0) for answer in answers]
        for handle in handles:
            handle.run()
        self.rpc_broadcast_mq.wait_until_ready()
        for queue in self.response_mqs:
            queue.wait_until_ready()

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers from a thread, which ends this process when one dies. The main thread may wait for that worker
        forever in a network queue, which vLLM's own monitor does not wake.
        """
        running = [each.run_ref for each in self.ray_worker_handles]
        self._monitor_thread = threading.Thread(target=self._watch_workers, args=(running,), name="strop-workers", daemon=True)
        self._monitor_thread.start()

    def _watch_workers(self, running: list[Any]) -> None:
        while not self.shutting_down:
            ended, _ = ray.wait(running, num_returns=1, timeout=WATCH_SECONDS)
            if ended and not self.shutting_down:
                log.error("a worker of the engine has died, or its node is gone")
                os._exit(1)


def _name_shared_memory_by_node(node: str) -> None:
    """Make CPU ranks share memory only with those of their own node: vLLM identifies machines by port."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{make_name(communicator)}-{node[:8]}")
