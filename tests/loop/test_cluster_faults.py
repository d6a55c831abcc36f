"""Runs over Ray whose processes are killed. ``benchmarks/fault_campaign.py`` does the same to every role at random moments."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loop.runs import Running, grpo, metrics_of, overrides, start, tiny_config
from loop.victims import MARK, Marked, describe_processes, find_worker, wait_for_exit
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 8
SHORT = {
    "grpo.max_num_steps": STEPS,
    "grpo.val_period": 0,
    "checkpointing.save_period": 1,
    "checkpointing.metric_name": None,
    "logger.console": "plain",
}
TWO_RANKS = {"cluster.gpus_per_node": 2, "cluster.address": "local"}
NOISE = 2e-4  # relative: ranks and batches of requests add float32 numbers in another order


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    outcome = grpo(tiny, folder, **SHORT)
    assert outcome.code == 0, outcome.err
    return folder


def begin(tiny: Path, folder: Path, **changes: Any) -> Running:
    settings = {**tiny_config(tiny), **SHORT, **TWO_RANKS, **changes}
    return start(["grpo", *overrides(settings)], folder, before=Marked(str(folder)))


def wait_for(running: Running, ready: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert running.process.is_alive() and time.monotonic() < deadline, said_by(running)
        time.sleep(0.02)
    return found


def said_by(running: Running) -> str:
    files = [running.folder / name for name in (".out", ".err")]
    return "".join(file.read_text() for file in files if file.exists())


def steps_logged(running: Running) -> int:
    file = running.folder / "logs" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def kill(running: Running, name: str) -> int:
    process: psutil.Process = wait_for(running, lambda: find_worker(name, str(running.folder)))
    process.kill()
    return int(process.pid)


def assert_as_if_undisturbed(folder: Path, alone: Path) -> None:
    """Each step and each rollout once, the metrics of the run in one process, and nobody left."""
    steps = [json.loads(line)["step"] for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    identities = [(record.group, record.sample) for record in RolloutStore(folder / "logs").read_all()]
    assert sorted(identities) == [(group, sample) for group in range(STEPS * 4) for sample in range(8)]
    own, other = metrics_of(folder / "logs"), metrics_of(alone / "logs")
    for step, line in other.items():
        for name, value in line.items():
            if name.startswith("train/") and "rank" not in name:
                assert math.isclose(own[step][name], value, rel_tol=NOISE, abs_tol=NOISE), (step, name, value, own[step][name])
    assert_nobody_left(folder)


def assert_nobody_left(folder: Path) -> None:
    left, _ = wait_for_exit(str(folder))
    assert not left, describe_processes(left)


@pytest.mark.exhaustive
def test_an_engine_a_host_and_a_learner_rank_that_are_killed_one_after_the_other_change_nothing(
    tiny: Path, alone: Path, tmp_path: Path
) -> None:
    """The next two tests in one run."""
    running = begin(tiny, tmp_path, **{"cluster.environment_hosts": 1})
    wait_for(running, lambda: steps_logged(running) >= 1)
    engine = kill(running, "engine-0")
    wait_for(running, lambda: steps_logged(running) >= 2)
    host = kill(running, "environment-arithmetic-0")
    wait_for(running, lambda: steps_logged(running) >= 4)
    rank = kill(running, "learner-1")
    outcome = running.finish(200)
    assert outcome.code == 0, outcome.err
    said = outcome.out + outcome.err
    assert f"process {engine}, on" in said and f"process {host}, on" in said and "another process takes its place" in said
    assert f"the learner group lost a member: learner-1 (process {rank}, on" in outcome.out
    assert "The learner restarts from the checkpoint of step" in outcome.out and "continuing after step" in outcome.out
    assert max(line["generation/restarts"] for line in metrics_of(tmp_path / "logs").values()) <= 1
    assert_as_if_undisturbed(tmp_path, alone)


@pytest.mark.exhaustive
def test_a_learner_that_dies_again_and_again_ends_the_run_and_says_where_to_look(tiny: Path, tmp_path: Path) -> None:
    running = begin(tiny, tmp_path, **{"cluster.max_restarts": 1})
    first = kill(running, "learner-0")
    wait_for(running, lambda: "restarts from the beginning" in said_by(running))
    wait_for(running, lambda: (found := find_worker("learner-0", str(tmp_path))) is not None and found.pid != first)
    kill(running, "learner-0")
    outcome = running.finish(200)
    assert outcome.code == 1
    assert "restarted 1 times without saving another step (cluster.max_restarts)" in outcome.err
    assert "learner-0" in outcome.err and str(Path("logs") / "workers") in outcome.err and "Traceback" not in outcome.err
    assert_nobody_left(tmp_path)


@pytest.mark.exhaustive
def test_a_run_that_is_interrupted_or_loses_its_driver_leaves_nobody_and_goes_on_by_the_same_command(
    tiny: Path, alone: Path, tmp_path: Path
) -> None:
    running = begin(tiny, tmp_path)
    wait_for(running, lambda: steps_logged(running) >= 1)
    os.kill(running.process.pid, signal.SIGINT)
    outcome = running.finish(60)
    assert outcome.code == 130 and "Start the same command again" in outcome.err and "Traceback" not in outcome.err
    assert_nobody_left(tmp_path)

    before = steps_logged(running)
    running = begin(tiny, tmp_path)
    wait_for(running, lambda: steps_logged(running) > before)
    family = psutil.Process(running.process.pid).children(recursive=True)
    running.process.kill()
    assert running.finish(10).code == -signal.SIGKILL
    left, _ = wait_for_exit(str(tmp_path), family)
    assert not left, describe_processes(left)

    outcome = begin(tiny, tmp_path).finish(200)
    assert outcome.code == 0, outcome.err
    assert "continuing after step" in outcome.out
    assert_as_if_undisturbed(tmp_path, alone)


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of three nodes on this machine, as Ray's own tests make them."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("SPT_NOENV", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
    for address in ("127.0.0.2", "127.0.0.3"):  # the driver is at home on the head
        cluster.add_node(num_cpus=2, num_gpus=0, node_ip_address=address)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.exhaustive
def test_a_run_goes_on_without_the_engines_of_a_lost_node_if_it_may(
    tiny: Path, alone: Path, tmp_path: Path, three_nodes: str
) -> None:
    nodes = {
        "cluster.gpus_per_node": 1,
        "cluster.num_nodes": 3,
        "cluster.address": three_nodes,
        "cluster.shrink_on_lost_node": True,
        "cluster.roles.generator.env_vars": {MARK: str(tmp_path)},
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.num_nodes": 2,
        "policy.generation.torch_cfg.num_engines": 2,
    }
    running = begin(tiny, tmp_path, **nodes)
    wait_for(running, lambda: steps_logged(running) >= 1)
    engine = find_worker("engine-0", str(tmp_path))
    assert engine is not None
    node = engine.parent()
    assert node is not None and node.name() == "raylet"
    for process in [node, *node.children(recursive=True)]:  # as a machine that is switched off
        process.kill()
    outcome = running.finish(200)
    assert outcome.code == 0, outcome.err
    metrics = metrics_of(tmp_path / "logs")
    assert metrics[1]["generation/engines"] == 2 and metrics[STEPS]["generation/engines"] == 1
    assert "cannot be restarted; its requests go to the 1 others" in outcome.out + outcome.err
    assert_as_if_undisturbed(tmp_path, alone)
