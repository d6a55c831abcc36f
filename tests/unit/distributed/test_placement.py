"""Which nodes a run takes, and which devices train and generate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.distributed.placement import (
    DeviceCounts,
    DeviceSlot,
    Node,
    PlacementError,
    choose_nodes,
    find_domain,
    make_thread_env,
    plan_devices,
)


def nodes(*domains: str, gpus: int = 8) -> list[Node]:
    return [Node(id=f"n{n}", address=f"10.0.0.{n}", cpus=8, gpus=gpus, domain=domain) for n, domain in enumerate(domains)]


def test_nodes_of_the_largest_domain_come_first_and_together() -> None:
    chosen = choose_nodes(nodes("a", "b", "a", "b", "b"), 4, 8, on_cpu=False)
    assert [node.domain for node in chosen] == ["b", "b", "b", "a"]


def test_each_segment_lies_in_one_domain() -> None:
    chosen = choose_nodes(nodes("a", "b", "a", "b", "b"), 4, 8, on_cpu=False, segment=2)
    assert [node.domain for node in chosen] == ["b", "b", "a", "a"]
    with pytest.raises(PlacementError, match="3 segments of that many nodes in one NVLink domain"):
        choose_nodes(nodes("a", "b", "a", "b", "b", "c"), 6, 8, on_cpu=False, segment=2)
    with pytest.raises(PlacementError, match="does not divide"):
        choose_nodes(nodes("a", "a", "a"), 3, 8, on_cpu=False, segment=2)


def test_nodes_with_too_few_gpus_are_passed_over_and_named() -> None:
    mixed = [*nodes("", ""), *nodes("", gpus=2)]
    assert len(choose_nodes(mixed, 2, 8, on_cpu=False)) == 2
    with pytest.raises(PlacementError, match=r"10\.0\.0\.0 \(2 GPUs"):
        choose_nodes(mixed, 3, 8, on_cpu=False)
    assert len(choose_nodes(mixed, 3, 8, on_cpu=True)) == 3


def test_a_node_s_domain_is_in_its_labels() -> None:
    assert find_domain({"strop.nvlink-domain": "rack 3", "ray.io/gpu-domain": "other"}) == "rack 3"
    assert find_domain({"ray.io/node-id": "x"}) == ""


@given(
    count=st.integers(1, 4),
    devices=st.integers(1, 8),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    engines=st.none() | st.integers(1, 4),
    colocated=st.booleans(),
    engine_devices=st.none() | st.integers(1, 8),
    engine_nodes=st.none() | st.integers(1, 3),
)
def test_no_device_is_given_twice_and_an_engine_spans_nodes_only_if_it_is_larger_than_one(
    count: int,
    devices: int,
    size: int,
    engines: int | None,
    colocated: bool,
    engine_devices: int | None,
    engine_nodes: int | None,
) -> None:
    try:
        counts = DeviceCounts(
            nodes=count,
            per_node=devices,
            engine_size=size,
            engines=engines,
            colocated=colocated,
            engine_devices=engine_devices,
            engine_nodes=engine_nodes,
        )
        found = plan_devices(counts, on_cpu=False)
    except PlacementError as error:
        assert len(str(error)) > 40
        return
    training = [(place.node, place.devices[0]) for place in found.training]
    generating = [(part.node, device) for place in found.generation for part in place.parts for device in part.devices]
    assert len(set(training)) == len(training) > 0 and len(set(generating)) == len(generating)
    room = counts.generating_per_node
    for place in found.generation:
        assert sum(len(part.devices) for part in place.parts) == size
        assert len(place.parts) == 1 if size <= room else {len(part.devices) for part in place.parts} == {room}
    assert all(node < count and device < devices for node, device in (*training, *generating))
    assert training == sorted(training), "ranks next to each other are near each other"
    if colocated:
        assert len(training) == count * devices
    else:
        assert not found.colocated and not set(training) & set(generating)
    if engines is not None:
        assert len(found.generation) == engines


def test_generation_apart_takes_the_last_nodes_or_the_last_devices() -> None:
    apart = {"engines": None, "colocated": False}
    whole = plan_devices(DeviceCounts(nodes=3, per_node=2, engine_size=2, engine_nodes=1, **apart), on_cpu=False)
    assert {place.node for place in whole.training} == {0, 1} and whole.generation == (DeviceSlot(2, (0, 1)),)
    part = plan_devices(DeviceCounts(nodes=1, per_node=4, engines=1, engine_devices=1, colocated=False), on_cpu=False)
    assert len(part.training) == 3 and part.generation == (DeviceSlot(0, (3,)),)


def test_an_engine_that_is_larger_than_a_node_takes_whole_nodes() -> None:
    plan = plan_devices(DeviceCounts(nodes=5, per_node=2, engine_size=4, engines=None), on_cpu=False)
    first, second = plan.generation
    assert first.parts == (DeviceSlot(0, (0, 1)), DeviceSlot(1, (0, 1))) and [part.node for part in second.parts] == [2, 3]
    assert not plan.on_one_machine and plan.colocated
    apart = DeviceCounts(nodes=3, per_node=4, engine_size=4, engines=1, engine_devices=2, colocated=False)
    (engine,) = plan_devices(apart, on_cpu=False).generation
    assert engine.parts == (DeviceSlot(0, (2, 3)), DeviceSlot(1, (2, 3)))
    for size, reason in ((3, "a multiple of 2"), (12, "2 devices of a node generate, on 5 nodes")):
        with pytest.raises(PlacementError, match=reason):
            plan_devices(DeviceCounts(nodes=5, per_node=2, engine_size=size, engines=None), on_cpu=False)


def test_a_run_without_engines_trains_on_every_device() -> None:
    assert plan_devices(DeviceCounts(nodes=2, per_node=2, engines=0), on_cpu=False).generation == ()


def test_as_many_engines_as_fit_is_one_without_gpus() -> None:
    counts = DeviceCounts(nodes=2, per_node=2, engines=None)
    assert len(plan_devices(counts, on_cpu=False).generation) == 4
    assert len(plan_devices(counts, on_cpu=True).generation) == 1


def test_processes_that_compute_at_the_same_time_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    plan = plan_devices(DeviceCounts(nodes=1, per_node=3, engines=1), on_cpu=True)

    def threads(configured: int | None = None, **how: bool) -> str:
        return make_thread_env(configured, plan, on_cpu=True, **how)["OMP_NUM_THREADS"]

    assert threads() == threads(generates=True) == "3"
    assert threads(time_shared=True) == "4" and threads(time_shared=True, generates=True) == "12"
    assert threads(5) == "5"
    assert make_thread_env(None, plan, on_cpu=False) == {}, "on GPUs nothing is set"
