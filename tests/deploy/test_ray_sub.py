"""``ray.sub`` on this machine: a stand-in for Slurm, and a stand-in for Ray wherever Ray itself is not the question."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import slurm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds that a job may take

# The head listens; a node is a file as long as it lives. RAY_FAILS names a node whose Ray ends at once with code 9.
RAY_COMMAND = """
import os, pathlib, signal, socket, sys, time
node, options = os.environ["SLURMD_NODENAME"], dict(word[2:].partition("=")[::2] for word in sys.argv[2:])
if os.environ.get("RAY_FAILS") == node: sys.exit(9)
folder = pathlib.Path(os.environ["NODES_FOLDER"])
(pathlib.Path(options["temp-dir"]) / "session_latest" / "logs").mkdir(parents=True)
(pathlib.Path(options["temp-dir"]) / "session_latest" / "logs" / "raylet.out").write_text(" ".join(sys.argv[1:]))
if "head" in options:
    listener = socket.create_server(("127.0.0.1", int(options["port"])))
(folder / node).touch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while (folder / node).exists(): time.sleep(0.05)
sys.exit(5)
"""
RAY_MODULE = """
import os, pathlib
def is_initialized(): return True
def init(**options): pass
def nodes(): return [{"Alive": True} for _ in pathlib.Path(os.environ["NODES_FOLDER"]).iterdir()]
def cluster_resources(): return {}
"""
SAVES_WHEN_TERMINATED = """
import signal, sys, time
def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
while True: time.sleep(0.1)
"""


class Job:
    """A job in a folder of its own, which it is submitted from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = str(uuid.uuid4().int % 10**8)
        self.tag = f"SLURM_JOB_ID={self.number}"
        (folder / "bin").mkdir()
        (folder / "nodes").mkdir()
        slurm.install(folder / "bin")
        (folder / "train.py").write_text(SAVES_WHEN_TERMINATED)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NODELIST": "node0,node1",
            "SLURM_SUBMIT_DIR": str(folder),
            "SRUN_RECORD": str(folder / "srun.jsonl"),
            "NODES_FOLDER": str(folder / "nodes"),
            "HEAD_IP": "127.0.0.1",
            "RAY_PORT": str(free_port()),
            "CPUS_PER_WORKER": "1",
            "WAIT_SECONDS": "60",
            "STOP_SECONDS": "3",
        }

    def with_stand_in_for_ray(self) -> Job:
        (self.folder / "ray_command.py").write_text(RAY_COMMAND)
        (self.folder / "bin" / "ray").write_text(f'#!/bin/bash\nexec {sys.executable} {self.folder / "ray_command.py"} "$@"\n')
        (self.folder / "bin" / "ray").chmod(0o755)
        (self.folder / "dummy").mkdir()
        (self.folder / "dummy" / "ray.py").write_text(RAY_MODULE)
        self.environment["PYTHONPATH"] = str(self.folder / "dummy")
        return self

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / "job.out").open("wb") as output:
            return subprocess.Popen(
                ["bash", str(ROOT / "ray.sub")],
                env={**self.environment, **environment},
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, **environment: str) -> int:
        return self.start(**environment).wait(LIMIT)

    def log(self, name: str) -> str:
        return (self.folder / f"{self.number}-logs" / name).read_text()

    def wait_for(self, text: str, name: str) -> None:
        path, end = self.folder / f"{self.number}-logs" / name, time.monotonic() + LIMIT
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < end, f"{name} never said {text!r}: {self.everything()}"
            time.sleep(0.05)

    def everything(self) -> str:
        paths = [self.folder / "job.out", *sorted((self.folder / f"{self.number}-logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def processes(self) -> list[int]:
        """Those that have this job's number in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{self.tag}\0" in path.read_text(errors="replace"):
                    found.append(int(path.parent.name))
            except (OSError, ValueError):
                continue
        return found

    def left_behind(self) -> list[int]:
        """Processes that do not go within a moment."""
        end = time.monotonic() + 5
        while (found := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)
    for folder in Path("/tmp").glob(f"ray-{made.number}-*"):
        shutil.rmtree(folder)


def test_the_scripts_are_shell() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "ray.sub")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", str(ROOT / "ray.sub")], check=True)


def test_the_command_runs_when_all_nodes_are_in_and_its_exit_code_is_the_jobs(job: Job) -> None:
    code = job.with_stand_in_for_ray().run(COMMAND="ls nodes | tr '\\n' ' '; pwd; exit 7", GPUS_PER_NODE="8")
    assert code == 7, job.everything()
    assert "node0 node1" in job.log("ray-driver.log") and str(job.folder) in job.log("ray-driver.log")
    assert "--num-cpus=1 --num-gpus=8" in job.log("node0/raylet.out") and "--head" in job.log("node0/raylet.out")
    assert f"--address=127.0.0.1:{job.environment['RAY_PORT']}" in job.log("node1/raylet.out")
    assert job.left_behind() == []
    assert not list(Path("/tmp").glob(f"ray-{job.number}-*"))


def test_sigterm_reaches_the_command_which_may_save_and_says_how_it_ended(job: Job) -> None:
    process = job.with_stand_in_for_ray().start(COMMAND="cd . && python3 train.py")
    job.wait_for("training", "ray-driver.log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 3, job.everything()
    assert "saved" in job.log("ray-driver.log")
    assert job.left_behind() == []


def test_a_node_that_dies_ends_the_job_with_its_exit_code(job: Job) -> None:
    process = job.with_stand_in_for_ray().start(COMMAND="python3 train.py")
    job.wait_for("training", "ray-driver.log")
    (job.folder / "nodes" / "node1").unlink()
    assert process.wait(LIMIT) == 5, job.everything()
    assert "Ray on the workers ended with exit code 5" in (job.folder / "job.out").read_text()
    assert job.left_behind() == []


@pytest.mark.exhaustive
def test_a_node_that_cannot_start_ends_the_job_before_the_command(job: Job) -> None:
    assert job.with_stand_in_for_ray().run(COMMAND="echo ran", RAY_FAILS="node1") == 9, job.everything()
    assert "ran" not in job.log("ray-driver.log").split()
    assert job.left_behind() == []


@pytest.mark.exhaustive
def test_nodes_that_do_not_join_in_time_end_the_job(job: Job) -> None:
    job.with_stand_in_for_ray()
    (job.folder / "dummy" / "ray.py").write_text(RAY_MODULE.replace("return [{", "return [] and [{"))
    assert job.run(COMMAND="echo ran", WAIT_SECONDS="1") == 1, job.everything()
    assert "0 of 2 nodes joined" in job.log("ray-driver.log")
    assert job.left_behind() == []


@pytest.mark.exhaustive
def test_without_a_command_the_cluster_stays_and_can_be_attached_to(job: Job) -> None:
    process = job.with_stand_in_for_ray().start(
        CONTAINER="strop.sqsh", MOUNTS="/data:/data", SETUP_COMMAND="export GREETING='good day'"
    )
    job.wait_for("all 2 nodes are in", "ray-driver.log")
    attach = ["bash", f"{job.number}-attach.sh"]
    environment = {**job.environment, "COMMAND": 'echo "$GREETING from $SLURMD_NODENAME, $RAY_ADDRESS"'}
    for node, name in (([], "node0"), (["1"], "node1"), (["node1"], "node1")):
        said = subprocess.run(attach + node, cwd=job.folder, env=environment, capture_output=True, text=True, check=True).stdout
        assert said == f"good day from {name}, 127.0.0.1:{job.environment['RAY_PORT']}\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0, job.everything()
    assert job.left_behind() == []
    steps = [json.loads(line) for line in (job.folder / "srun.jsonl").read_text().splitlines()]
    containers = {(step["container-image"], step["container-mounts"], step["container-name"]) for step in steps}
    assert containers == {("strop.sqsh", "/data:/data", f"strop-{job.number}")} and len(steps) == 6


def test_where_there_is_no_ray_the_log_says_so(job: Job) -> None:
    bare = ":".join([str(job.folder / "bin"), "/usr/bin", "/bin"])
    assert job.run(COMMAND="echo ran", PATH=bare) == 127, job.everything()
    assert "there is no 'ray' on PATH" in job.log("ray-head.log")


@pytest.mark.exhaustive
def test_ray_itself_starts_on_two_nodes_runs_the_command_and_leaves_nothing(job: Job) -> None:
    pytest.importorskip("ray")
    (job.folder / "count.py").write_text(
        "import ray\nray.init()\nprint('nodes', len(ray.nodes()), 'CPUs', ray.cluster_resources()['CPU'])\n"
        "print('task', ray.get(ray.remote(lambda: 6 * 7).remote()))\nraise SystemExit(4)\n"
    )
    assert job.run(COMMAND="python3 count.py") == 4, job.everything()
    said = job.log("ray-driver.log")
    assert "nodes 2 CPUs 2.0" in said and "task 42" in said
    assert list((job.folder / f"{job.number}-logs" / "node1").iterdir())
    assert job.left_behind() == []
