"""A server of the part of Kubernetes' API that Strop uses, whose pods are sandboxes of this machine.

It also has the resources of kubernetes-sigs/agent-sandbox 0.5, and what its controllers do about them, as their sources and CRDs say.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from copy import deepcopy
from typing import Any

from aiohttp import web

from strop.extensions.sandboxes.base import Resources, Sandbox, SandboxCommand, SandboxFailure, SandboxSpec
from strop.extensions.sandboxes.local.local_provider import LocalProvider
from support.fake_docker import exit_code
from support.fake_service import FakeService

PODS = "/api/v1/namespaces/tests/pods"
OBJECTS = "/apis/{group}/v1beta1/namespaces/tests/{plural}"
AGENTS, EXTENSIONS = "agents.x-k8s.io", "extensions.agents.x-k8s.io"
PLURALS = {
    "sandboxes": AGENTS, "sandboxclaims": EXTENSIONS, "sandboxwarmpools": EXTENSIONS, "sandboxtemplates": EXTENSIONS
}  # fmt: skip
FIELDS = {  # of the specs that clients send: the first is required
    "sandboxes": ("podTemplate", "volumeClaimTemplates", "service", "operatingMode", "shutdownTime", "shutdownPolicy"),
    "sandboxclaims": ("warmPoolRef", "lifecycle", "additionalPodMetadata", "env", "volumeClaimTemplates"),
}


class FakeKubernetes(FakeService):
    """``images``: references of local images by the name that the cluster has for them."""

    makes = "/pods", "/sandboxes", "/sandboxclaims"

    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__()
        self.provider, self.images = provider, images
        self.pods: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.policies: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []  # of the next pods, instead of starting
        self.tokens: set[str] = set()
        self.served = {AGENTS, EXTENSIONS}  # groups whose CRDs are installed
        self.objects: dict[str, dict[str, dict[str, Any]]] = {plural: {} for plural in PLURALS}
        self.forbids = ""  # why controllers may make no pod
        self._turn, self._controllers = asyncio.Lock(), set[asyncio.Task[None]]()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/apis/networking.k8s.io/v1/namespaces/tests/networkpolicies", self.add_policy),
            web.post(PODS, self.create), web.get(PODS, self.list), web.get(PODS + "/{name}", self.get),
            web.delete(PODS + "/{name}", self.delete), web.get(PODS + "/{name}/exec", self.exec),
            web.get("/apis/{group}/v1beta1", self.describe_group), web.post(OBJECTS, self.create_object),
            web.get(OBJECTS, self.list_objects), web.get(OBJECTS + "/{name}", self.get_object),
            web.delete(OBJECTS + "/{name}", self.delete_object),
        ]  # fmt: skip

    async def close(self) -> None:
        await self.settle()
        await self.provider.close()

    async def add_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        known = any(each["metadata"]["name"] == body["metadata"]["name"] for each in self.policies)
        self.policies += [] if known else [body]
        return web.json_response({}, status=409 if known else 201)

    async def create(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization", ""))
        pod = await request.json()
        await self._start(pod)
        return web.json_response(pod, status=201)

    async def _start(self, pod: dict[str, Any]) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        pod["metadata"]["uid"] = secrets.token_hex(8)
        self.pods[name] = pod
        if self.states:
            pod["status"] = self.states.pop(0)
        elif container["image"] not in self.images:
            waiting = {"reason": "ErrImagePull", "message": "not found"}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
        else:
            pod["status"] = {"phase": "Pending"}
            limits = container["resources"]["limits"]
            resources = Resources(memory_mb=int(limits["memory"][:-2]), disk_mb=200)
            environment = {each["name"]: each["value"] for each in container.get("env", ())}
            spec = SandboxSpec(image=self.images[container["image"]], resources=resources, environment=environment)
            self.sandboxes[name] = await self.provider.create(spec)
            running = {"name": container["name"], "containerID": f"containerd://{secrets.token_hex(8)}", "state": {"running": {}}}
            pod["status"] = {"phase": "Running", "containerStatuses": [running]}

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"items": list(self.pods.values())})

    async def get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod or {"message": "not found"}, status=200 if pod else 404)

    async def delete(self, request: web.Request) -> web.Response:
        found = await self._stop(request.match_info["name"])
        self.changed()
        return web.json_response({}, status=200 if found else 404)

    async def _stop(self, name: str) -> bool:
        found = self.pods.pop(name, None)
        if name in self.sandboxes:
            await self.sandboxes.pop(name).destroy()
        return found is not None

    async def exec(self, request: web.Request) -> web.StreamResponse:
        sandbox = self.sandboxes.get(request.match_info["name"])
        if sandbox is None:
            return web.json_response({"message": "not found"}, status=404)
        channel = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
        await channel.prepare(request)
        stdin = b""
        async for message in channel:
            if message.data == bytes([255, 0]):
                break
            stdin += message.data[1:]
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def send() -> None:
            while (part := await parts.get()) is not None:
                await channel.send_bytes(part)

        sending = asyncio.ensure_future(send())
        command = SandboxCommand(argv=tuple(request.query.getall("command")), stdin=stdin, wall_s=200, output_kb=1 << 20)
        with suppress(SandboxFailure, ConnectionError):
            result = await sandbox.exec(
                command, lambda stream, part: parts.put_nowait(bytes([1 if stream == "stdout" else 2]) + part)
            )
            code = exit_code(result.exit_code)
            causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes} if code else {"status": "Success"}
            parts.put_nowait(b"\x03" + json.dumps(status).encode())
        parts.put_nowait(None)
        await sending
        await channel.close()
        return channel

    # --- agent-sandbox --------------------------------------------------------------------------------------------------------

    def add_pool(self, name: str, replicas: int, template: dict[str, Any]) -> None:
        """Make a SandboxTemplate and a SandboxWarmPool of it."""
        spec = {"replicas": replicas, "sandboxTemplateRef": {"name": f"{name}-template"}}
        self.objects["sandboxtemplates"][f"{name}-template"] = _object(f"{name}-template", template)
        self.objects["sandboxwarmpools"][name] = _object(name, spec)
        self.changed()

    def _find(self, request: web.Request) -> dict[str, dict[str, Any]]:
        group, plural = request.match_info["group"], request.match_info["plural"]
        if group not in self.served or PLURALS.get(plural) != group:
            raise web.HTTPNotFound(text="404 page not found")  # as the API says where there is no such resource
        return self.objects[plural]

    async def describe_group(self, request: web.Request) -> web.Response:
        found = request.match_info["group"] in self.served
        return web.json_response({"kind": "APIResourceList"}) if found else web.Response(status=404, text="404 page not found")

    async def create_object(self, request: web.Request) -> web.Response:
        known, given, fields = self._find(request), await request.json(), FIELDS[request.match_info["plural"]]
        if fields[0] not in given["spec"] or not set(given["spec"]) <= set(fields):
            return web.json_response({"message": f"{given['kind']} is invalid: {sorted(given['spec'])}"}, status=422)
        known[given["metadata"]["name"]] = given
        given["metadata"]["uid"] = secrets.token_hex(8)
        self.changed()
        return web.json_response(given, status=201)

    async def list_objects(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [each for each in self._find(request).values() if each["metadata"].get("labels", {}).get(key) == value]
        return web.json_response({"items": found})

    async def get_object(self, request: web.Request) -> web.Response:
        found = self._find(request).get(request.match_info["name"])
        return web.json_response(found or {"message": "not found"}, status=200 if found else 404)

    async def delete_object(self, request: web.Request) -> web.Response:
        found = self._find(request).pop(request.match_info["name"], None)
        self.changed()
        return web.json_response({}, status=200 if found else 404)

    def changed(self) -> None:
        """Wake the controllers."""
        task = asyncio.ensure_future(self._control())
        self._controllers.add(task)
        task.add_done_callback(self._controllers.discard)

    async def settle(self) -> None:
        """Wait until the controllers have done what they were woken for."""
        await asyncio.gather(*self._controllers)

    async def _control(self) -> None:
        async with self._turn:
            sandboxes, claims, pools = (self.objects[each] for each in ("sandboxes", "sandboxclaims", "sandboxwarmpools"))
            for claim in claims.values():
                self._bind(claim)
            for name, pool in pools.items():
                for _ in range(pool["spec"]["replicas"] - sum(_owner(each) == _uid(pool) for each in sandboxes.values())):
                    self._make_sandbox(f"{name}-{secrets.token_hex(3)}", pool, pool)
            for known, owners in ((sandboxes, {**claims, **pools}), (self.pods, sandboxes)):  # what lost its owner is collected
                left = {_uid(each) for each in owners.values()} | {""}
                for name in [name for name, each in known.items() if _owner(each) not in left]:
                    await self._stop(name) if known is self.pods else known.pop(name)
            for sandbox in list(sandboxes.values()):
                await self._run(sandbox)
            for claim in claims.values():
                if bound := sandboxes.get(claim.get("status", {}).get("sandbox", {}).get("name", "")):
                    claim["status"]["conditions"] = bound["status"]["conditions"]

    def _bind(self, claim: dict[str, Any]) -> None:
        """Give a claim a sandbox of the pool that is ready, or else a new one with the claim's name."""
        if claim.get("status", {}).get("sandbox"):
            return
        pool = self.objects["sandboxwarmpools"].get(claim["spec"]["warmPoolRef"]["name"])
        if pool is None:
            claim["status"] = {"conditions": [_ready("WarmPoolNotFound")]}
            return
        warm = [each for each in self.objects["sandboxes"].values() if _owner(each) == _uid(pool) and _is_ready(each)]
        bound = warm[0] if warm else self._make_sandbox(claim["metadata"]["name"], pool, claim)
        if bound is None:
            claim["status"] = {"conditions": [_ready("TemplateNotFound")]}
            return
        bound["metadata"]["ownerReferences"] = [{"uid": _uid(claim), "controller": True}]
        claim["status"] = {"sandbox": {"name": bound["metadata"]["name"]}, "conditions": [_ready("SandboxNotReady")]}

    def _make_sandbox(self, name: str, pool: dict[str, Any], owner: dict[str, Any]) -> dict[str, Any] | None:
        template = self.objects["sandboxtemplates"].get(pool["spec"]["sandboxTemplateRef"]["name"])
        if template is None:
            return None
        made = _object(name, {"podTemplate": deepcopy(template["spec"]["podTemplate"])})
        made["metadata"]["ownerReferences"] = [{"uid": _uid(owner), "controller": True}]
        self.objects["sandboxes"][name] = made
        return made

    async def _run(self, sandbox: dict[str, Any]) -> None:
        """Keep a pod for a Sandbox, made again if it is gone, and say in the Sandbox's status whether it is ready."""
        name, template = sandbox["metadata"]["name"], deepcopy(sandbox["spec"]["podTemplate"])
        if name not in self.pods and self.forbids:
            message = f'Error seen: pods "{name}" is forbidden: {self.forbids}'
            sandbox["status"] = {"conditions": [{**_ready("ReconcilerError"), "message": message}]}
            return
        if name not in self.pods:
            owner = {"name": name, "ownerReferences": [{"uid": _uid(sandbox), "controller": True}]}
            await self._start({"metadata": {**template.get("metadata", {}), **owner}, "spec": template["spec"]})
            sandbox["metadata"].setdefault("annotations", {})["agents.x-k8s.io/pod-name"] = name
        phase = self.pods[name]["status"]["phase"]
        reason = {"Running": "DependenciesReady", "Failed": "PodFailed"}.get(phase, "DependenciesNotReady")
        sandbox["status"] = {"conditions": [_ready(reason)]}


def _object(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": secrets.token_hex(8)}, "spec": spec}


def _uid(each: dict[str, Any]) -> str:
    return str(each["metadata"]["uid"])


def _owner(each: dict[str, Any]) -> str:
    return str(each["metadata"].get("ownerReferences", [{"uid": ""}])[0]["uid"])


def _ready(reason: str) -> dict[str, Any]:
    return {"type": "Ready", "status": str(reason == "DependenciesReady"), "reason": reason, "message": ""}


def _is_ready(sandbox: dict[str, Any]) -> bool:
    return bool(sandbox.get("status", {}).get("conditions") == [_ready("DependenciesReady")])
