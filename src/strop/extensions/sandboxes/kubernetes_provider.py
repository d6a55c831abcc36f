"""Sandboxes as pods of Kubernetes 1.30 or later: one pod each, commands by the exec subresource over a WebSocket.

Without egress a pod gets a label that a NetworkPolicy of the namespace selects; whether it holds depends on the cluster's network plugin,
which ``strop sandbox check`` cannot see from inside.

With ``resource`` the controllers of kubernetes-sigs/agent-sandbox make the pod: of a Sandbox with the same pod, or of a SandboxClaim, which
takes one from a SandboxWarmPool, whose SandboxTemplate sets everything but the commands.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote, urlencode

from strop.extensions.sandboxes.base import Capabilities, FailureCause, SandboxFailure, SandboxSpec, UnsupportedSpec, check_spec
from strop.extensions.sandboxes.http_provider import HttpProvider
from strop.extensions.sandboxes.supervised import STAY, OnPart, SupervisedSandbox

LABEL, OWNER, EGRESS, POLICY = "strop.dev/sandbox", "strop.dev/owner", "strop.dev/egress", "strop-sandbox"
PROTOCOL = "v5.channel.k8s.io"  # the first that can end a command's input
POLL_S = 0.25
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KEPT = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE"]
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_NO_EXEC = dict.fromkeys((400, 403, 404, 500, 502, 503), FailureCause.LOST)
_ROOTS = {"pods": "/api/v1", "sandboxes": "/apis/agents.x-k8s.io/v1beta1"}
_EXTENSIONS = "/apis/extensions.agents.x-k8s.io/v1beta1"
_PLURALS = {"pod": "pods", "sandbox": "sandboxes", "claim": "sandboxclaims"}
_NEVER_READY = {  # reasons of the condition Ready that its controllers do not try again
    *("WarmPoolNotFound", "TemplateNotFound", "InvalidMetadata", "VolumeClaimTemplatesError", "InvalidConfiguration"),
    *("ClaimExpired", "SandboxExpired", "SandboxSuspended", "PodFailed", "PodSucceeded", "MultiplePods"),
}
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of ``sandboxes.provider: kubernetes``."""

    namespace: str = ""  # "": that of the context or of this pod
    context: str = ""  # of the kubeconfig; "": the current one
    runtime_class: str = ""  # for example gvisor
    node_selector: Mapping[str, str] | None = None
    max_hours: float = 24.0  # after which the cluster ends a sandbox, whatever became of its run
    resource: Literal["pod", "sandbox", "claim"] = "pod"  # the last two need agent-sandbox 0.5 or later
    warm_pool: str = ""  # the SandboxWarmPool of resource=claim

    def __post_init__(self) -> None:
        if self.resource not in _PLURALS or (self.resource == "claim") != bool(self.warm_pool):
            raise UnsupportedSpec(
                f"sandboxes.options has resource={self.resource!r} and warm_pool={self.warm_pool!r}: resource is one of "
                f"{', '.join(_PLURALS)}, and claim alone needs the name of a SandboxWarmPool"
            )


@dataclass(frozen=True)
class KubernetesApi:
    """How the API is reached."""

    url: str
    namespace: str
    token_file: str = ""  # read for each request: tokens of pods are renewed
    token: str = ""
    context: ssl.SSLContext | None = None

    @property
    def headers(self) -> dict[str, str]:
        token = Path(self.token_file).read_text().strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}


def find_cluster(options: KubernetesOptions) -> KubernetesApi:
    """Find the cluster: that of this pod, else by the kubeconfig. Raises UnsupportedSpec."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if host and (_ACCOUNT / "token").exists():
        url = f"https://{f'[{host}]' if ':' in host else host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        namespace = options.namespace or (_ACCOUNT / "namespace").read_text().strip()
        context = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return KubernetesApi(url, namespace, token_file=str(_ACCOUNT / "token"), context=context)
    path = Path((os.environ.get("KUBECONFIG") or "").partition(":")[0] or Path.home() / ".kube" / "config")
    if not path.exists():
        raise UnsupportedSpec(
            f"sandboxes.provider=kubernetes finds no cluster: this is no pod, and there is no {path}; set KUBECONFIG"
        )
    from ruamel.yaml import YAML

    return _read_kubeconfig(YAML(typ="safe").load(path), options, path)


def _read_kubeconfig(values: Mapping[str, Any], options: KubernetesOptions, path: Path) -> KubernetesApi:
    def named(kind: str, name: str) -> Mapping[str, Any]:
        found = next((each for each in values.get(kind) or () if each.get("name") == name), None)
        if found is None:
            raise UnsupportedSpec(f"{path} has no {kind[:-1]} named {name!r}; set sandboxes.options.context")
        result: Mapping[str, Any] = found[kind[:-1]]
        return result

    context = named("contexts", options.context or str(values.get("current-context", "")))
    cluster, user = named("clusters", context["cluster"]), named("users", context["user"])
    if "exec" in user or "auth-provider" in user:
        raise UnsupportedSpec(
            f"the user of {path} logs in by a program, which is not supported: make a token for a service account"
        )
    secure = None
    if cluster["server"].startswith("https://"):
        secure = ssl.create_default_context(cadata=_read(cluster, "certificate-authority").decode() or None)
        if cluster.get("insecure-skip-tls-verify"):
            raise UnsupportedSpec(f"{path} skips the verification of certificates, which is refused: set certificate-authority")
        if certificate := _read(user, "client-certificate"):
            with tempfile.NamedTemporaryFile() as file:
                file.write(certificate + b"\n" + _read(user, "client-key"))
                file.flush()
                secure.load_cert_chain(file.name)
    namespace = options.namespace or context.get("namespace") or "default"
    return KubernetesApi(cluster["server"].rstrip("/"), namespace, user.get("tokenFile", ""), user.get("token", ""), secure)


def _read(values: Mapping[str, Any], key: str) -> bytes:
    if data := values.get(f"{key}-data"):
        return base64.b64decode(data)
    return Path(values[key]).read_bytes() if values.get(key) else b""


class KubernetesProvider(HttpProvider):
    """Makes pods."""

    name = "kubernetes"
    service = "the API of Kubernetes"
    causes: ClassVar[Mapping[int, FailureCause]] = {404: FailureCause.LOST, 400: FailureCause.IMAGE, 422: FailureCause.IMAGE}
    options_type = KubernetesOptions
    capabilities = Capabilities(
        egress=frozenset({"none", "all"}), users=False, limits_disk=False, tests="against a small server of the same API"
    )

    def __init__(self, options: KubernetesOptions = KubernetesOptions(), cluster: KubernetesApi | None = None) -> None:
        self.options, self.cluster = options, cluster or find_cluster(options)
        super().__init__(self.cluster.url)
        self.context = self.cluster.context
        self._is_prepared = False

    @property
    def headers(self) -> Mapping[str, str]:
        return self.cluster.headers

    def path(self, plural: str) -> str:
        return f"{_ROOTS.get(plural, _EXTENSIONS)}/namespaces/{quote(self.cluster.namespace)}/{plural}"

    @property
    def pods(self) -> str:
        return self.path("pods")

    @property
    def objects(self) -> str:
        """The path of what a provider makes, lists and deletes for sandboxes."""
        return self.path(_PLURALS[self.options.resource])

    def removal(self, name: str) -> str:
        return f"{self.objects}/{name}?gracePeriodSeconds=0"

    async def create(self, spec: SandboxSpec) -> KubernetesSandbox:
        check_spec(spec, self.name, self.capabilities)
        await self._prepare()
        if self.options.resource == "claim":
            await self._check_template(spec)
        sandbox = KubernetesSandbox(f"strop-{secrets.token_hex(8)}", self)
        self.add(sandbox)
        try:
            await self.call("POST", self.objects, self.describe(sandbox.id, spec))
            while not (pod := await self._find_ready(sandbox.id, spec.image)):
                await asyncio.sleep(POLL_S)
            sandbox.pod = pod
            if self.options.resource == "claim":  # which would get no sandbox of the pool if it set variables
                sandbox.environment = spec.environment
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def _check_template(self, spec: SandboxSpec) -> None:
        """Check what a claim would get. A policy of ours could not narrow that of the template: a connection needs only one."""
        found: Any = {"spec": {"sandboxTemplateRef": {"name": self.options.warm_pool}}}
        for plural in ("sandboxwarmpools", "sandboxtemplates"):
            name = found["spec"]["sandboxTemplateRef"]["name"]
            found = await self.call("GET", f"{self.path(plural)}/{quote(name)}", accepted=(404,))
            if found is None:
                raise UnsupportedSpec(
                    f"the namespace {self.cluster.namespace} has no {plural[:-1]} {name}, which "
                    f"sandboxes.options.warm_pool={self.options.warm_pool} needs"
                )
        managed, policy = found["spec"].get("networkPolicyManagement") != "Unmanaged", found["spec"].get("networkPolicy")
        if spec.network.egress == "none" and (not managed or policy is None or policy.get("egress")):
            raise UnsupportedSpec(
                f"sandboxes.egress=none, and the sandboxtemplate {name} lets its sandboxes connect: set networkPolicy: {{egress: []}} "
                "in it, or sandboxes.egress=all"
            )

    async def _find_ready(self, name: str, image: str) -> Mapping[str, Any] | None:
        """Find the pod of a sandbox, once it takes commands. Raises SandboxFailure for one that never will."""
        found = await self.call("GET", f"{self.objects}/{name}")
        if self.options.resource == "pod":
            return found if _is_ready(found, image) else None
        conditions = found.get("status", {}).get("conditions", ())
        ready: Mapping[str, str] = next((each for each in conditions if each["type"] == "Ready"), {})
        if self.options.resource == "claim":
            name = found.get("status", {}).get("sandbox", {}).get("name", "")
            found = name and await self.call("GET", f"{self.path('sandboxes')}/{name}", accepted=(404,))
        pod = None
        if found:
            made_of = found["spec"]["podTemplate"]["spec"]["containers"][0]["image"]
            if made_of != image:
                raise SandboxFailure(
                    FailureCause.IMAGE,
                    f"the pool {self.options.warm_pool} has sandboxes of {made_of}, not of {image}: set another "
                    "sandboxes.options.warm_pool",
                )
            name = found["metadata"].get("annotations", {}).get("agents.x-k8s.io/pod-name") or name
            pod = await self.call("GET", f"{self.pods}/{name}", accepted=(404,))
        runs, why = _is_ready(pod or {}, image), f"{ready.get('reason')}: {ready.get('message')}"
        if ready.get("reason") in _NEVER_READY or "is forbidden" in why or "is invalid" in why:  # a pod, by a quota or rules
            raise SandboxFailure(FailureCause.REFUSED, f"the {self.options.resource} will not be ready: {why[:500]}")
        return pod if runs and ready.get("status") == "True" else None

    def describe(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """Describe what is made: a pod, or what the controllers of agent-sandbox make one of."""
        pod, owned = self._describe_pod(spec), {"name": name, "annotations": {OWNER: self.owner}}
        if self.options.resource == "pod":
            return {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {**owned, **pod["metadata"]}}
        ends = (datetime.now(UTC) + timedelta(hours=self.options.max_hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
        lifecycle, owned = {"shutdownTime": ends, "shutdownPolicy": "Delete"}, {**owned, "labels": {LABEL: "true"}}
        if self.options.resource == "sandbox":
            root, kind, values = _ROOTS["sandboxes"], "Sandbox", {"podTemplate": pod, **lifecycle}
        else:
            root, kind = _EXTENSIONS, "SandboxClaim"
            values = {"warmPoolRef": {"name": self.options.warm_pool}, "lifecycle": lifecycle}
        return {"apiVersion": root.removeprefix("/apis/"), "kind": kind, "metadata": owned, "spec": values}

    def _describe_pod(self, spec: SandboxSpec) -> dict[str, Any]:
        resources = spec.resources
        limits = {
            "cpu": f"{resources.cpus:g}",
            "memory": f"{resources.memory_mb}Mi",
            "ephemeral-storage": f"{resources.disk_mb}Mi",
        }
        container = {
            "name": "sandbox",
            "image": spec.image,
            "command": ["/bin/sh", "-c", STAY],
            "env": [{"name": name, "value": value} for name, value in spec.environment.items()],
            "resources": {"limits": limits, "requests": limits},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": _KEPT}},
        }
        labels = {LABEL: "true", EGRESS: spec.network.egress}
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": int(self.options.max_hours * 3600),
            "containers": [container],
        }
        pod |= {"runtimeClassName": self.options.runtime_class} if self.options.runtime_class else {}
        pod |= {"nodeSelector": dict(self.options.node_selector)} if self.options.node_selector else {}
        return {"metadata": {"labels": labels}, "spec": pod}

    async def _prepare(self) -> None:
        """Let nothing connect to a sandbox, and those without egress to nothing. Raises UnsupportedSpec without agent-sandbox."""
        if self._is_prepared:
            return
        root = _ROOTS.get(_PLURALS[self.options.resource], _EXTENSIONS)
        if self.options.resource != "pod" and await self.call("GET", root, accepted=(404,)) is None:
            raise UnsupportedSpec(
                f"the cluster does not serve {root.removeprefix('/apis/')}: install agent-sandbox 0.5 or later, or set "
                "sandboxes.options.resource=pod"
            )
        path = f"/apis/networking.k8s.io/v1/namespaces/{quote(self.cluster.namespace)}/networkpolicies"
        policies = ((f"{POLICY}-ingress", {LABEL: "true"}, "Ingress"), (f"{POLICY}-egress", {EGRESS: "none"}, "Egress"))
        for name, labels, kind in policies if self.options.resource != "claim" else ():
            spec = {"podSelector": {"matchLabels": labels}, "policyTypes": [kind]}
            body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}
            await self.call("POST", path, body, accepted=(409,))
        self._is_prepared = True

    async def remove_left_over(self) -> int:
        """Remove what runs of this machine that have ended left of ``resource``. What else is left ends after ``max_hours``."""
        await self._prepare()
        found = await self.call("GET", f"{self.objects}?{urlencode({'labelSelector': f'{LABEL}=true'})}")
        described = [each["metadata"] for each in found["items"]]
        return await self.delete_ended(
            {self.removal(each["name"]): each.get("annotations", {}).get(OWNER, "") for each in described}
        )


class KubernetesSandbox(SupervisedSandbox):
    """A pod."""

    def __init__(self, name: str, provider: KubernetesProvider) -> None:
        super().__init__(name)
        self.provider = provider
        self.pod: Mapping[str, Any] = {}

    @property
    def path(self) -> str:
        return f"{self.provider.pods}/{self.pod['metadata']['name']}"

    async def _check_pod(self) -> None:
        """Controllers make a pod again, and restart containers, without their files. Raises SandboxFailure."""
        pod = await self.provider.call("GET", self.path, accepted=(404,))
        if pod is None or _identify(pod) != _identify(self.pod):
            self.lost = self.lost or "its pod was removed or started again"
        self._check()

    async def attach(self, argv: Sequence[str], stdin: bytes, user: str, on_part: OnPart) -> int:
        if user:
            raise SandboxFailure(FailureCause.REQUEST, "Kubernetes runs commands as the user of the image; leave user empty")
        if self.provider.options.resource != "pod":
            await self._check_pod()
        container = self.pod["spec"]["containers"][0]["name"]
        streams = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query = urlencode([*streams, *(("command", word) for word in argv)])
        url = f"{self.provider.url}{self.path}/exec?{query}"
        async with self.provider.connect(url, headers=self.provider.headers, causes=_NO_EXEC, protocols=(PROTOCOL,)) as channel:
            if channel.protocol != PROTOCOL:
                raise SandboxFailure(
                    FailureCause.REFUSED, f"the API does not speak {PROTOCOL}: Kubernetes 1.30 or later is needed"
                )
            feeding = asyncio.ensure_future(_feed(channel, stdin))
            try:
                return await self._read_channel(channel, on_part)
            finally:
                feeding.cancel()

    async def _read_channel(self, channel: Any, on_part: OnPart) -> int:
        names: dict[int, Literal["stdout", "stderr"]] = {_STDOUT: "stdout", _STDERR: "stderr"}
        async for message in channel:
            data = message.data if isinstance(message.data, bytes) else b""
            if data and data[0] in names:
                on_part(names[data[0]], data[1:])
            elif data and data[0] == _ERROR:
                return self._read_exit(json.loads(data[1:] or b"{}"))
        raise self.gone("the connection ended before its command")

    def _read_exit(self, status: Mapping[str, Any]) -> int:
        if status.get("status") == "Success":
            return 0
        for cause in status.get("details", {}).get("causes", ()):
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise self.gone(str(status.get("message", status))[:300])

    async def was_out_of_memory(self) -> bool:
        pod = await self.provider.call("GET", self.path)
        found = [(each, key) for each in pod.get("status", {}).get("containerStatuses", ()) for key in ("state", "lastState")]
        states = [each.get(key, {}).get("terminated", {}) for each, key in found]
        return any(state.get("reason") == "OOMKilled" for state in states)

    async def remove(self) -> None:
        self.provider.forget(self)
        await self.provider.delete(self.provider.removal(self.id))


async def _feed(channel: Any, stdin: bytes) -> None:
    with suppress(ConnectionError):
        for at in range(0, len(stdin), 1 << 15):
            await channel.send_bytes(bytes([_STDIN]) + stdin[at : at + (1 << 15)])
        await channel.send_bytes(bytes([_CLOSE, _STDIN]))


def _identify(pod: Mapping[str, Any]) -> tuple[Any, ...]:
    name, statuses = pod["spec"]["containers"][0]["name"], pod.get("status", {}).get("containerStatuses", ())
    return (pod["metadata"].get("uid"), *(each.get("containerID") for each in statuses if each.get("name") == name))


def _is_ready(pod: Mapping[str, Any], image: str) -> bool:
    """Whether a pod takes commands. Raises SandboxFailure for one that never will."""
    status = pod.get("status", {})
    for each in status.get("containerStatuses", ()):
        waiting = each.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _NO_IMAGE:
            raise SandboxFailure(FailureCause.IMAGE, f"{image} cannot be pulled: {waiting.get('message', waiting['reason'])}")
        if "Error" in waiting.get("reason", ""):
            raise SandboxFailure(
                FailureCause.REFUSED, f"the container did not start: {waiting.get('message', waiting['reason'])}"
            )
    if status.get("phase") in ("Failed", "Succeeded"):
        cause = FailureCause.DISK if status.get("reason") == "Evicted" else FailureCause.REFUSED
        raise SandboxFailure(cause, f"the pod ended at once: {status.get('reason')} {status.get('message', '')}")
    return bool(status.get("phase") == "Running")
