"""Providers keep the protocol: bubblewrap really, the others against small servers of their APIs with real sandboxes behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.extensions.sandboxes.base import (
    FailureCause,
    NetworkPolicy,
    SandboxCommand,
    SandboxError,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
    UnsupportedSpec,
)
from strop.extensions.sandboxes.conformance import CHECKS, check_provider
from strop.extensions.sandboxes.docker_provider import DockerOptions, DockerProvider
from strop.extensions.sandboxes.kubernetes_provider import KubernetesApi, KubernetesOptions, KubernetesProvider, find_cluster
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from strop.extensions.sandboxes.warm_pool import WarmPool
from support.fake_docker import Answer, FakeDocker
from support.fake_kubernetes import FakeKubernetes

MakeLocal = Callable[[], LocalProvider]


async def check_all(provider: SandboxProvider, image: str, left_out: set[str]) -> None:
    results = await check_provider(provider, image)
    assert {result.name: result.error for result in results if result.error} == {}
    assert {result.name for result in results if result.error is None} == left_out and len(results) == len(CHECKS)


@pytest.mark.slow
def test_bubblewrap_keeps_the_protocol(make_local: MakeLocal, image: str):
    async def work() -> None:
        provider = make_local()
        await check_all(provider, image, set())
        await provider.close()

    asyncio.run(work())


@pytest.mark.slow
def test_docker_keeps_the_protocol(make_local: MakeLocal, image: str, socket_path: Path):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            await check_all(provider, "box:1", {"a full disk is an error of the program"})
            await provider.close()
            assert daemon.containers == {}

    asyncio.run(work())


def test_docker_gives_a_container_few_rights_and_removes_those_of_ended_runs(
    make_local: MakeLocal, image: str, socket_path: Path
):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            await provider.create(SandboxSpec(image="box:1", environment={"A": "b"}))
            (values,) = daemon.containers.values()
            host = values["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"] and host["NetworkMode"] == "none"
            assert host["Memory"] == host["MemorySwap"] == 2048 << 20 and host["PidsLimit"] == 256 and values["Env"] == ["A=b"]
            ended = provider.owner.rsplit(":", 2)[0] + ":4194304:17"
            daemon.containers["old"] = {"Labels": {"strop.sandbox": ended}}
            daemon.containers["elsewhere"] = {"Labels": {"strop.sandbox": "other:4194304:17"}}
            assert (
                await provider.remove_left_over() == 1
                and set(daemon.containers) >= {"elsewhere"}
                and "old" not in daemon.containers
            )
            await provider.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    "answer, cause",
    [
        (Answer(500, "write /var: no space left on device"), FailureCause.DISK),
        (Answer(429, "slow down"), FailureCause.THROTTLED),
        (Answer(500, "cannot allocate memory"), FailureCause.REFUSED),
    ],
)
def test_what_docker_refuses_has_a_cause_and_leaves_nothing(make_local: MakeLocal, image: str, socket_path: Path, answer, cause):
    async def work() -> None:
        async with FakeDocker(socket_path, make_local(), {"box:1": image}) as daemon:
            daemon.refuses = [answer]
            provider = DockerProvider(DockerOptions(socket=str(socket_path)))
            with pytest.raises(SandboxFailure) as found:
                await provider.create(SandboxSpec(image="box:1"))
            assert found.value.cause == cause and daemon.containers == {}

    asyncio.run(work())


def test_a_daemon_that_is_not_there_and_a_policy_it_cannot_keep_are_refused(socket_path: Path):
    provider = DockerProvider(DockerOptions(socket=str(socket_path)))
    with pytest.raises(SandboxFailure, match="does not answer at") as found:
        asyncio.run(provider.create(SandboxSpec(image="box:1")))
    assert found.value.cause == FailureCause.REFUSED and found.value.ending == "sandbox"
    with pytest.raises(UnsupportedSpec, match="has no network egress=allow; set one of all, none"):
        asyncio.run(provider.create(SandboxSpec(image="box:1", network=NetworkPolicy(egress="allow", hosts=("a.b",)))))


# --- Kubernetes ---------------------------------------------------------------------------------------------------------------


CLAIM = KubernetesOptions(resource="claim", warm_pool="warm")


def make_template(**changes: object) -> dict[str, object]:
    """A SandboxTemplate without egress, whose container has a name of its own."""
    container = {"name": "runtime", "image": "box:1", "resources": {"limits": {"memory": "256Mi"}}}
    return {"podTemplate": {"spec": {"containers": [container]}}, "networkPolicy": {"egress": []}, **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        KubernetesOptions(),
        pytest.param(KubernetesOptions(resource="sandbox"), marks=pytest.mark.exhaustive),
        pytest.param(CLAIM, marks=pytest.mark.exhaustive),
    ],
    ids=lambda options: options.resource,
)
def test_kubernetes_keeps_the_protocol(make_local: MakeLocal, image: str, options: KubernetesOptions):
    async def work() -> None:
        async with FakeKubernetes(make_local(), {"box:1": image}) as cluster:
            cluster.add_pool("warm", 2 if options is CLAIM else 0, make_template())
            provider = KubernetesProvider(options, KubernetesApi(cluster.url, "tests", token="t0k"))
            left_out = {
                "a full disk is an error of the program", "a fork bomb is contained", "a command runs as the user that is set",
                "a snapshot is an image of which forks differ",
            }  # fmt: skip
            await check_all(provider, "box:1", left_out)
            await provider.close()
            cluster.objects["sandboxwarmpools"].clear()
            cluster.changed()
            await cluster.settle()
            assert cluster.pods == {} and {*cluster.tokens, "Bearer t0k"} == {"Bearer t0k"}

    asyncio.run(work())


def test_a_pod_has_few_rights_and_those_of_ended_runs_are_removed(make_local: MakeLocal, image: str):
    async def work() -> None:
        async with FakeKubernetes(make_local(), {"box:1": image}) as cluster:
            options = KubernetesOptions(runtime_class="gvisor", node_selector={"pool": "sandboxes"})
            provider = KubernetesProvider(options, KubernetesApi(cluster.url, "tests"))
            await provider.create(SandboxSpec(image="box:1"))
            (pod,) = cluster.pods.values()
            spec, container = pod["spec"], pod["spec"]["containers"][0]
            assert (
                not spec["automountServiceAccountToken"]
                and spec["activeDeadlineSeconds"] == 86400
                and spec["restartPolicy"] == "Never"
            )
            assert spec["runtimeClassName"] == "gvisor" and spec["nodeSelector"] == {"pool": "sandboxes"}
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"] == {"cpu": "1", "memory": "2048Mi", "ephemeral-storage": "1024Mi"}
            selected = {each["spec"]["policyTypes"][0]: each["spec"]["podSelector"]["matchLabels"] for each in cluster.policies}
            assert selected["Egress"].items() <= pod["metadata"]["labels"].items()
            ended = provider.owner.rsplit(":", 2)[0] + ":4194304:17"
            cluster.pods["old"] = {"metadata": {"name": "old", "annotations": {"strop.dev/owner": ended}}}
            assert await provider.remove_left_over() == 1 and "old" not in cluster.pods
            await provider.close()

    asyncio.run(work())


@pytest.mark.parametrize("options", [KubernetesOptions(resource="sandbox"), CLAIM], ids=lambda options: options.resource)
def test_controllers_make_the_pod_and_one_made_again_is_a_lost_sandbox(make_local: MakeLocal, image: str, options):
    async def work() -> None:
        async with FakeKubernetes(make_local(), {"box:1": image}) as cluster:
            if options is CLAIM:
                cluster.add_pool("warm", 1, make_template())
                while not cluster.pods:
                    await asyncio.sleep(0.05)
            waiting = set(cluster.pods)
            provider = KubernetesProvider(options, KubernetesApi(cluster.url, "tests"))
            sandbox = await provider.create(SandboxSpec(image="box:1", environment={"A": "b"}))
            pod, made = sandbox.pod["metadata"]["name"], cluster.objects["sandboxclaims" if options is CLAIM else "sandboxes"]
            if options is CLAIM:
                assert {pod} == waiting and cluster.policies == []
            else:
                selected = [each["spec"]["podSelector"]["matchLabels"] for each in cluster.policies]
                assert len(selected) == 2 and all(
                    each.items() <= cluster.pods[pod]["metadata"]["labels"].items() for each in selected
                )
            assert (await sandbox.exec(SandboxCommand(argv=("sh", "-c", "echo $A")))).stdout == b"b\n"
            ended = {"strop.dev/owner": provider.owner.rsplit(":", 2)[0] + ":4194304:17"}
            made["old"] = {**made[sandbox.id], "metadata": {"name": "old", "uid": "1", "labels": {"strop.dev/sandbox": "true"}}}
            made["old"]["metadata"]["annotations"] = ended
            assert await provider.remove_left_over() == 1 and set(made) == {sandbox.id}
            if options is CLAIM:
                cluster.pods[pod]["status"]["containerStatuses"][0]["containerID"] = "containerd://another"
            else:
                await provider.call("DELETE", f"{provider.pods}/{pod}")
            with pytest.raises(SandboxFailure, match="its pod was removed or started again") as found:
                await sandbox.exec(SandboxCommand(argv=("true",)))
            assert found.value.cause == FailureCause.LOST and not (await sandbox.health()).answers
            await provider.close()
            assert made == {}

    asyncio.run(work())


@pytest.mark.parametrize(
    "change, failure, match",
    [
        ({"served": {"agents.x-k8s.io"}}, UnsupportedSpec, "does not serve extensions.agents.x-k8s.io/v1beta1: install"),
        ({"pool": "other"}, UnsupportedSpec, "has no sandboxwarmpool warm"),
        ({"template": None}, UnsupportedSpec, "has no sandboxtemplate warm-template"),
        ({"template": make_template(networkPolicy=None)}, UnsupportedSpec, "lets its sandboxes connect"),
        ({"template": make_template(networkPolicyManagement="Unmanaged")}, UnsupportedSpec, "lets its sandboxes connect"),
        ({"image": "box:2"}, FailureCause.IMAGE, "warm has sandboxes of box:1, not of box:2"),
        ({"forbids": "exceeded quota: pods"}, FailureCause.REFUSED, "exceeded quota: pods"),
        ({"states": [{"phase": "Failed", "reason": "Evicted"}]}, FailureCause.DISK, "Evicted"),
        ({"states": [{"phase": "Pending"}], "start_s": 0.3}, FailureCause.SLOW, "not ready in 0.3 s"),
    ],
)
def test_what_a_claim_cannot_get_has_a_cause_and_leaves_none(make_local: MakeLocal, image: str, change, failure, match):
    async def work() -> None:
        async with FakeKubernetes(make_local(), {"box:1": image}) as cluster:
            cluster.add_pool(change.get("pool", "warm"), 0, change.get("template") or make_template())
            if change.get("template", ()) is None:
                cluster.objects["sandboxtemplates"].clear()
            for name in {"served", "forbids", "states"} & set(change):
                setattr(cluster, name, change[name])
            provider = KubernetesProvider(CLAIM, KubernetesApi(cluster.url, "tests"))
            pool = WarmPool(provider, max_open=1, start_s=change.get("start_s", 60.0), tries=1)
            with pytest.raises(SandboxError, match=match) as found:
                await pool.create(SandboxSpec(image=change.get("image", "box:1")))
            assert getattr(found.value, "cause", type(found.value)) == failure and cluster.objects["sandboxclaims"] == {}
            await pool.close()

    asyncio.run(work())


@pytest.mark.parametrize("options", [{"resource": "claim"}, {"resource": "pods"}, {"warm_pool": "warm"}])
def test_a_resource_and_its_warm_pool_belong_together(options):
    with pytest.raises(UnsupportedSpec, match="claim alone needs the name of a SandboxWarmPool"):
        KubernetesOptions(**options)


WAITING = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "CreateContainerError"}}}]}


@pytest.mark.parametrize(
    "refused, state, cause",
    [
        ((403, {"message": "exceeded quota: pods"}), None, FailureCause.REFUSED),
        ((429, {"message": "too many requests"}), None, FailureCause.THROTTLED),
        ((422, {"message": "invalid image"}), None, FailureCause.IMAGE),
        (None, WAITING, FailureCause.REFUSED),
        (None, {"phase": "Failed", "reason": "Evicted"}, FailureCause.DISK),
    ],
)
def test_what_a_cluster_refuses_has_a_cause_and_leaves_nothing(make_local: MakeLocal, image: str, refused, state, cause):
    async def work() -> None:
        async with FakeKubernetes(make_local(), {"box:1": image}) as cluster:
            cluster.refuses, cluster.states = [refused] if refused else [], [state] if state else []
            with pytest.raises(SandboxFailure) as found:
                await KubernetesProvider(cluster=KubernetesApi(cluster.url, "tests")).create(SandboxSpec(image="box:1"))
            assert found.value.cause == cause and cluster.pods == {}

    asyncio.run(work())


def test_a_cluster_is_found_by_the_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UnsupportedSpec, match="set KUBECONFIG"):
        find_cluster(KubernetesOptions())
    (tmp_path / "config").write_text(
        "current-context: here\n"
        "contexts: [{name: here, context: {cluster: c, user: u, namespace: train}}, {name: other, context: {cluster: c, user: login}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1/'}}]\n"
        "users: [{name: u, user: {token: t0k}}, {name: login, user: {exec: {command: aws}}}]\n"
    )
    cluster = find_cluster(KubernetesOptions())
    assert (cluster.url, cluster.namespace, cluster.headers) == ("http://127.0.0.1:1", "train", {"Authorization": "Bearer t0k"})
    with pytest.raises(UnsupportedSpec, match="logs in by a program"):
        find_cluster(KubernetesOptions(context="other"))
    with pytest.raises(UnsupportedSpec, match="no context named 'missing'"):
        find_cluster(KubernetesOptions(context="missing"))
