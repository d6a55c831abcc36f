"""Objects in Ray actors: calls, errors, ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError
from tests.unit.distributed.things import AsyncThing, Thing

from strop.determinism import VARIABLE, set_deterministic
from strop.distributed import ray as module
from strop.distributed.actor_group import ActorGroup, ActorGroupDied
from strop.distributed.base import ActorDied, ActorOptions
from strop.distributed.cluster_config import ClusterConfig, RoleConfig
from strop.distributed.placement import PlacementError
from strop.distributed.ray import RayActor, RayCluster, connect, is_process_alive

pytestmark = pytest.mark.slow


class Room:
    """A cluster and the event loop it is used from."""

    def __init__(self, output: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.output = output
        self.cluster: RayCluster = self.run(connect(ClusterConfig(gpus_per_node=2), on_cpu=True, output_folder=output))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def thing(self, number: int = 1, **options: Any) -> Any:
        return self.run(self.cluster.spawn(ActorOptions(**{"name": f"thing-{number}", "node": 0, **options}), Thing, number))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, workers_are_forks: None) -> Iterator[Room]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AUTH_CHOSEN", False)  # by whoever runs the tests
        room = Room(tmp_path_factory.mktemp("workers"))
    yield room
    processes = [room.thing(n).pid for n in (90, 91)]
    room.run(room.cluster.close())
    assert not any(is_process_alive(process) for process in processes), "a closed cluster leaves no process behind"


def test_an_object_answers_from_a_process_of_its_own_with_its_environment(room: Room) -> None:
    thing = room.thing(5, environment={"GREETING": "good day"})
    assert room.run(thing.call("add", 3)) == 8
    assert room.run(thing.call("process")) == thing.pid and is_process_alive(thing.pid)
    assert room.run(thing.call("environment", "GREETING")) == "good day"


def test_processes_of_a_deterministic_run_are_started_for_it_before_cuda_is(room: Room) -> None:
    set_deterministic(True)
    try:
        thing = room.thing(6, environment={"NCCL_NVLS_ENABLE": "1"})
    finally:
        set_deterministic(False)
    assert room.run(thing.call("environment", "CUBLAS_WORKSPACE_CONFIG")) == ":4096:8"
    assert room.run(thing.call("environment", VARIABLE)) == "1", "so that torch is set as soon as a model is loaded"
    assert room.run(thing.call("environment", "NCCL_NVLS_ENABLE")) == "1", "what is set for a role wins"


def test_what_it_raises_is_raised_here_and_says_where_it_came_from(room: Room) -> None:
    thing = room.thing(6)
    with pytest.raises(KeyError, match="no such thing") as caught:
        room.run(thing.call("fail"))
    assert "raised in another process" in caught.value.__notes__[0] and "things.py" in caught.value.__notes__[0]
    assert room.run(thing.call("add", 1)) == 7, "and it lives on"
    with pytest.raises(ValueError, match="cannot have the number -1"):
        room.thing(-1)


def test_a_death_is_told_from_an_error(room: Room) -> None:
    thing = room.thing(7)
    with pytest.raises(ActorDied, match=r"thing-7 \(process \d+"):
        room.run(thing.call("die"))
    assert not thing.alive
    with pytest.raises(ActorDied):
        room.run(thing.call("add", 1))


def test_a_process_that_ray_ended_for_want_of_memory_has_died(room: Room) -> None:
    """Ray raises an error of another family then, which is no error of the object's."""

    async def end(*_: object) -> None:
        raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory\nand more")

    actor = RayActor("thing-8", SimpleNamespace(call=SimpleNamespace(remote=end)))
    with pytest.raises(ActorDied, match=r"thing-8 .* died: 1 worker.*low on memory$"):
        room.run(actor.call("add", 1))
    assert not actor.alive


def test_an_urgent_call_does_not_wait_for_the_one_that_runs(room: Room) -> None:
    thing = room.thing(8)

    async def both() -> bool:
        waits = asyncio.ensure_future(thing.call("wait"))
        await thing.call("stop", urgent=True)
        return bool(await waits)

    assert room.run(both())


def test_a_host_on_an_event_loop_answers_many_calls_at_once(room: Room) -> None:
    async def many() -> list[int]:
        thing = await room.cluster.spawn(ActorOptions(name="many", node=0, kind="async"), AsyncThing)
        waits = [asyncio.ensure_future(thing.call("wait")) for _ in range(50)]
        await asyncio.sleep(0.2)
        await thing.call("open")
        return list(await asyncio.gather(*waits))

    assert room.run(many()) == [50] * 50


def test_what_is_shared_once_arrives_as_it_was(room: Room) -> None:
    thing = room.thing(9)
    reference = room.cluster.put(list(range(1000)))
    assert room.run(thing.call("size", reference)) == 1000


def test_a_group_that_loses_a_member_ends_and_names_it(room: Room) -> None:
    members = [room.thing(number) for number in (20, 21, 22)]
    group = ActorGroup("learner", members)
    assert room.run(group.call_all("add", 1)) == [21, 22, 23]

    async def lose() -> None:
        waits = asyncio.ensure_future(group.call_all("wait"))
        await asyncio.sleep(0.3)
        await members[1].kill()
        await waits

    with pytest.raises(ActorGroupDied, match="thing-21"):
        room.run(lose())
    assert not any(is_process_alive(member.pid) for member in members), "the others would have waited for ever"
    with pytest.raises(ActorGroupDied):
        room.run(group.call_all("add", 1))


def test_what_a_member_raises_by_itself_is_the_cause(room: Room) -> None:
    group = ActorGroup("learner", [room.thing(number) for number in (30, 31)])
    with pytest.raises(KeyError, match="no such thing"):
        room.run(group.call_all("fail"))


STRANGER = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).get_all_node_info())
"""


def test_a_stranger_cannot_join_the_cluster_of_a_run(room: Room) -> None:
    assert room.cluster.started_here
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    stranger = [sys.executable, "-c", STRANGER, room.cluster.address]
    outcome = subprocess.run(
        stranger, env={**outside, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode != 0 and "InvalidAuthToken" in outcome.stderr and not outcome.stdout


def wheel(folder: Path, version: str) -> Path:
    """A package that is nowhere else, as pip installs it without a network."""
    path = folder / f"strop_test_package-{version}-py3-none-any.whl"
    about = f"strop_test_package-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("strop_test_package.py", f"VERSION = {version!r}\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: strop_test_package\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_have_packages_of_their_own(room: Room, tmp_path: Path) -> None:
    found = []
    for number, version in ((40, "1.0"), (41, "2.0")):
        thing = room.thing(number, role=RoleConfig(pip=(str(wheel(tmp_path, version)),)))
        found.append(room.run(thing.call("package_version")))
    assert found == ["1.0", "2.0"]


def test_more_nodes_than_there_are_are_refused_with_what_was_found(room: Room) -> None:
    from strop.distributed.placement import choose_nodes
    from strop.distributed.ray import list_nodes

    with pytest.raises(PlacementError, match=r"cluster\.num_nodes is 4"):
        choose_nodes(list_nodes(), 4, 2, on_cpu=True)
