"""``strop cluster check`` on real clusters: one that it starts, and two nodes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from strop.cli.output import INTERRUPTED
from strop.config import load_config
from strop.distributed.cluster_config import ClusterConfig
from strop.distributed.ray import connect, is_process_alive
from strop.extensions.performance.machine_monitor import SystemMonitor
from strop.extensions.performance.performance import watch_machines
from strop.extensions.recorded.recorded_config import SftRunConfig

pytestmark = pytest.mark.usefixtures("workers_are_forks")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, and no cluster to join but the one that is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def folder(room: Path, name: str) -> Path:
    (room / name).mkdir()
    return room / name


def test_an_address_where_nobody_answers_is_a_problem_without_a_traceback(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "check", "cluster.address=127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "no Ray cluster answers at 127.0.0.1:1" in error and "ray start --head" in error and "Traceback" not in error


@pytest.fixture(scope="module")
def two_nodes(workers_are_forks: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2, num_gpus=0)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def check(cluster: Any, *words: str) -> int:
    fixed = [f"cluster.address={cluster.address}", "cluster.wait_seconds=2", "policy.device=cpu"]
    return cli.main(["cluster", "check", *fixed, *words])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_nodes_are_compared_share_their_folders_and_are_timed(
    two_nodes: Any, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = folder(room, "results")
    assert check(two_nodes, "cluster.num_nodes=2", f"checkpointing.checkpoint_dir={results}/run") == 0
    output = capsys.readouterr().out
    assert "gloo, 2 ranks on 2 nodes" in output and f"{results}/run: shared by 2 of 2 nodes" in output
    assert output.rstrip().endswith("no problems found")
    assert list(results.iterdir()) == [], "a folder that was made for the check goes with it"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_folder_that_other_nodes_do_not_see_is_a_problem(
    two_nodes: Any, room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node with a disk of its own would: what the driver leaves in the folder is moved away before the nodes look."""
    from strop.extensions.checks import survey

    asked = survey._probe_nodes

    async def elsewhere(nodes: Any, needs: Any, folders: Any, token: str) -> Any:
        for path in Path(folders[0]).glob(".strop-check-*/driver"):
            path.rename(path.with_name("elsewhere"))
        return await asked(nodes, needs, folders, token)

    monkeypatch.setattr(survey, "_probe_nodes", elsewhere)
    assert check(two_nodes, "cluster.num_nodes=2") == 1
    output = capsys.readouterr().out
    assert output.count("is not the folder that the driver sees") == 2 and "shared by 0 of 2 nodes" in output
    assert list(room.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_interrupting_a_check_leaves_no_process(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.distributed.ray import run_on_every_node
    from strop.extensions.checks import survey

    processes: list[int] = []

    async def interrupted(*question: Any) -> Any:
        processes.extend(answer for _, answer in await run_on_every_node(os.getpid))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)  # the interrupt arrives here

    monkeypatch.setattr(survey, "_probe_nodes", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert cli.main(["cluster", "check", "cluster.address=local", "policy.device=cpu"]) == INTERRUPTED
    assert processes and not any(is_process_alive(process) for process in processes) and list(room.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_node_of_a_run_is_watched_and_one_whose_monitor_dies_is_said(
    two_nodes: Any, room: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside the tests of the check, since it needs their cluster."""
    keys = ["policy.model_name=m", "logger.gpu_monitoring={collection_interval: 0.05, flush_interval: 0.05}"]
    config = load_config(None, keys, root=SftRunConfig, check=False).config

    async def run() -> tuple[set[str], set[str]]:
        cluster = await connect(ClusterConfig(address=two_nodes.address, num_nodes=2, wait_seconds=20), on_cpu=True)
        try:
            system = await watch_machines(config, cluster)
            both = await collect(system, lambda seen: {"node_0", "node_1"} <= seen)
            victim = next(actor for actor in cluster._actors if actor.name == "monitor-1")
            os.kill(victim.pid, signal.SIGKILL)
            await collect(system, lambda _: "node 1 is no longer monitored" in caplog.text)
            system.metrics()
            left = await collect(system, lambda seen: bool(seen))
            system.stop()
            return both, left
        finally:
            await cluster.close()

    both, left = asyncio.run(run())
    assert both == {"node_0", "node_1"} and left == {"node_0"}
    assert caplog.text.count("no longer monitored") == 1


async def collect(system: SystemMonitor, enough: Callable[[set[str]], bool]) -> set[str]:
    """Return the nodes that report, once they are enough or 20 s are over."""
    seen: set[str] = set()
    for _ in range(400):
        metrics = system.metrics()
        assert all(name.endswith("_percent") <= (0 <= value <= 100) for name, value in metrics.items())
        seen |= {name.split("/")[1] for name in metrics}
        if enough(seen):
            break
        await asyncio.sleep(0.05)
    return seen
