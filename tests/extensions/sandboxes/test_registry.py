"""Images from a registry: a small server of the distribution API on loopback, with tokens, redirects and faults."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure
from strop.extensions.sandboxes.images import registry
from strop.extensions.sandboxes.images.layers import LayerLimits, Owners
from strop.extensions.sandboxes.images.store import ImageStore
from support.oci_images import entry, folder, make_layer, write_layout

LAYERS = [make_layer([folder("etc"), entry("etc/name", b"base" * 3000)]), make_layer([entry("etc/top", b"top")])]


class Registry:
    """Serves one layout as ``team/box``. ``faults``: answers of the next requests for blobs, instead of the blobs."""

    def __init__(self, layout: Path) -> None:
        self.layout, self.faults, self.requests, self.login = layout, list[Any](), list[tuple[str, str]](), ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, given = handler.path, handler.headers.get("Authorization", "")
        self.requests.append((path, given))
        if path.startswith("/token"):
            if self.login and given != f"Basic {self.login}":
                return self.send(handler, 401, b"")
            return self.send(handler, 200, json.dumps({"token": "t0k"}).encode())
        if path.startswith("/storage/"):
            return self.send_blob(handler, path.rpartition("/")[2])
        if given != "Bearer t0k":
            realm = f'Bearer realm="http://{handler.headers["Host"]}/token",service="here",scope="repository:team/box:pull"'
            return self.send(handler, 401, b"", {"WWW-Authenticate": realm})
        if path == "/v2/team/box/manifests/v1":
            return self.send(
                handler, 200, json.dumps({"manifests": [self.describe("other", "arm"), self.describe("linux", "")]}).encode()
            )
        if path.startswith("/v2/team/box/manifests/sha256:"):
            return self.send_blob(handler, path.rpartition("sha256:")[2])
        if path.startswith("/v2/team/box/blobs/sha256:"):
            return self.send(handler, 307, b"", {"Location": f"/storage/{path.rpartition('sha256:')[2]}"})
        self.send(handler, 404, b"{}")

    def describe(self, system: str, architecture: str) -> dict[str, Any]:
        (found,) = json.loads((self.layout / "index.json").read_text())["manifests"]
        return {**found, "platform": {"os": system, **({"architecture": architecture} if architecture else {})}}

    def send_blob(self, handler: BaseHTTPRequestHandler, digest: str) -> None:
        data = (self.layout / "blobs/sha256" / digest).read_bytes()
        fault = self.faults.pop(0) if self.faults and len(data) > 3000 else None
        if fault == "damaged":
            data = data.replace(b"base", b"evil")
        if isinstance(fault, int):
            return self.send(handler, fault, b"", {"Retry-After": "0"})
        self.send(handler, 200, data, cut=len(data) // 2 if fault == "cut" else None)

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data[:cut])


@contextmanager
def serving(served: Registry) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(registry.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    write_layout(tmp_path / "layout", LAYERS, compress=False)
    return Registry(tmp_path / "layout")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "cache", limit_mb=100, limits=LayerLimits(total_mb=10), owners=Owners())


def test_an_image_is_pulled_with_a_token_once(served: Registry, store: ImageStore):
    with serving(served) as host:
        image = store.get(f"{host}/team/box:v1")
        assert (image.layers[0] / "etc/name").read_bytes() == b"base" * 3000 and image.config.environment["COLOUR"] == "blue"
        before = len(served.requests)
        store.get(f"{host}/team/box:v1").release()
        assert len(served.requests) == before
    assert all(given == "" for path, given in served.requests if path.startswith("/storage/")), "tokens stay with the registry"


def test_a_login_of_docker_is_used(served: Registry, store: ImageStore, tmp_path: Path):
    served.login = base64.b64encode(b"ann:secret").decode()
    with serving(served) as host:
        with pytest.raises(SandboxFailure, match="refuses access to team/box; log in by docker login") as found:
            store.get(f"{host}/team/box:v1")
        assert found.value.cause == FailureCause.IMAGE
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: {"auth": served.login}}}))
        store.get(f"{host}/team/box:v1").release()


@pytest.mark.parametrize("fault", ["damaged", "cut", 500, 429])
def test_a_fault_that_passes_is_tried_again_and_one_that_stays_has_a_cause(served: Registry, store: ImageStore, fault: Any):
    with serving(served) as host:
        served.faults = [fault] * 100
        with pytest.raises(SandboxFailure, match="failed 4 times") as found:
            store.get(f"{host}/team/box:v1")
        assert found.value.cause == (FailureCause.THROTTLED if fault == 429 else FailureCause.REGISTRY)
        assert found.value.ending == ("provider_limit" if fault == 429 else "service")
        served.faults = [fault] * 2
        store.get(f"{host}/team/box:v1").release()


def test_a_tag_that_is_not_there_is_the_tasks_fault_and_a_registry_that_is_not_the_services(served: Registry, store: ImageStore):
    with serving(served) as host, pytest.raises(SandboxFailure, match="has no team/box at v2: 404") as found:
        store.get(f"{host}/team/box:v2")
    assert found.value.ending == "broken_task"
    with pytest.raises(SandboxFailure, match="refused") as found:
        store.get(f"{host}/team/box:v1")
    assert found.value.ending == "service"


def test_a_registry_cannot_send_a_login_elsewhere(served: Registry, store: ImageStore):
    served.describe("linux", "")
    with serving(served) as host:
        source = registry.RegistrySource(f"{host}/team/box:v1")
        with pytest.raises(SandboxFailure, match="a login that is not known"):
            source._fetch_token('Bearer realm="http://10.0.0.1/token"')
