"""A real vLLM engine that is larger than a node: its ranks are Ray actors on two nodes, here two raylets of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from strop.weight_sync.base import EngineLost
from support.vllm_engines import perturb

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from strop.generation.vllm import spanning_executor
from strop.generation.vllm.spanning_executor import SpanningExecutor

SECOND = "127.0.0.2"


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=0, node_ip_address=SECOND)
    yield cluster
    cluster.shutdown()


def find_workers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("SpanningWorker" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_copies_on_two_nodes_share_their_experts(room: BackgroundLoop, two_nodes: Any, tmp_path: Path, tokenizer: Any) -> None:
    import transformers

    from support.expert_models import experts_family
    from support.spanning_engine import check, serve_on

    async def live() -> None:
        served, cluster = await serve_on(
            two_nodes.address, tmp_path, tokenizer, model=experts_family("qwen3_moe", transformers).eval(), expert_parallel_size=2
        )
        try:
            await check(served, 0)
            workers = find_workers()
            assert len(workers) == 2 and workers[0].parent() != workers[1].parent(), "one on each node"
            perturb(served.model, 2)
            await check(served, 1)
        finally:
            await served.close()
            await cluster.close()

    room.run(live(), seconds=450)
    assert find_workers() == [], "no worker outlives its engine"


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_it_takes_weights_on_both_nodes_is_started_again_after_a_worker_died_and_lost_with_a_node(
    room: BackgroundLoop, two_nodes: Any, tmp_path: Path, tokenizer: Any
) -> None:
    from support.spanning_engine import check, serve_on

    async def live() -> None:
        served, cluster = await serve_on(two_nodes.address, tmp_path, tokenizer)
        try:
            await check(served, 0)
            workers = find_workers()
            assert len(workers) == 2 and workers[0].parent() != workers[1].parent(), "one on each node"
            workers[1].kill()
            perturb(served.model, 2)
            await check(served, 1)
            second = next(node for node in two_nodes.list_all_nodes() if node.node_ip_address == SECOND)
            await asyncio.to_thread(two_nodes.remove_node, second)
            await asyncio.sleep(1)
            with pytest.raises(EngineLost, match="its node 127"):
                await served.engine.start()
        finally:
            await served.close()
            await cluster.close()

    room.run(live(), seconds=450)
    assert find_workers() == [], "no worker outlives its engine"


def test_a_worker_that_dies_ends_the_process_that_waits_for_it_and_one_that_lives_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor: Any = SpanningExecutor.__new__(SpanningExecutor)
    executor.ray_worker_handles, executor.shutting_down = [SimpleNamespace(run_ref="worker")], False
    answers = iter([[], [], ["worker"]])
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        executor.shutting_down = True

    monkeypatch.setattr(spanning_executor.ray, "wait", lambda running, **_: (next(answers), running))
    monkeypatch.setattr(spanning_executor.os, "_exit", end)
    executor.start_worker_monitor()
    executor._monitor_thread.join(20)
    assert codes == [1] and next(answers, None) is None
    assert executor._monitor_thread.daemon, "it keeps no process that has nothing else to do"
