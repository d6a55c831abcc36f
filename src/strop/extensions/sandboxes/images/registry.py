"""Pulls images from a registry by the OCI distribution API 1.1, with tokens. The reference names the registry; there is no default one.

HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]      loopback is reached by HTTP, every other host by HTTPS
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from strop.extensions.sandboxes.base import FailureCause, SandboxFailure
from strop.extensions.sandboxes.images.layers import broken
from strop.extensions.sandboxes.images.sources import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_JSON,
    Blob,
    ImageConfig,
    ImageManifest,
    Verifying,
    choose_platform,
    read_json,
    read_manifest,
)

TIMEOUT_S = 60.0  # without any data
TRIES = 4
_REFERENCE = re.compile(
    r"(?P<host>(?:\[[0-9a-fA-F:]+\]|[\w.-]+)(?::\d+)?)/(?P<name>[a-z0-9._/-]+)(?::(?P<tag>[\w.-]{1,128}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class _Failed(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, cause: FailureCause, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.cause, self.after_s = cause, after_s


@dataclass
class RegistrySource:
    """An image in a registry."""

    reference: str
    host: str = field(init=False)
    name: str = field(init=False)
    wanted: str = field(init=False)  # a tag or a digest
    _token: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        found = _REFERENCE.fullmatch(self.reference)
        if found is None or not ({".", ":", "["} & set(found["host"]) or found["host"] == "localhost"):
            raise broken(
                f"{self.reference!r:.200} names no registry; write HOST/NAME:TAG, oci:FOLDER[:TAG] or docker-archive:FILE"
            )
        self.host, self.name = found["host"], found["name"]
        self.wanted = found["digest"] or found["tag"] or "latest"

    @property
    def _address(self) -> str:
        local = self.host.partition(":")[0] in ("localhost", "127.0.0.1") or self.host.startswith("[::1]")
        return f"{'http' if local else 'https'}://{self.host}/v2/{self.name}"

    def read_manifest(self) -> ImageManifest:
        values = self._read_manifest(self.wanted)
        if values.get("manifests"):
            values = self._read_manifest(choose_platform(values).digest)
        config = Blob.read(values.get("config"))
        with self.open_layer(config, MAX_JSON) as file:
            return read_manifest(values, ImageConfig.read(read_json(file.read(), "configuration")))

    def _read_manifest(self, wanted: str) -> dict[str, Any]:
        def read(answer: Any) -> bytes:
            data: bytes = answer.read(MAX_JSON + 1)
            if len(data) > MAX_JSON:
                raise broken(f"its manifest is larger than {MAX_JSON >> 20} MB")
            if wanted.startswith("sha256:") and f"sha256:{hashlib.sha256(data).hexdigest()}" != wanted:
                raise _Failed(FailureCause.REGISTRY, f"its manifest is not {wanted}")
            return data

        accepted = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
        return read_json(self._request(f"{self._address}/manifests/{wanted}", read, accepted), "manifest")

    @contextmanager
    def open_layer(self, blob: Blob, most: int) -> Iterator[IO[bytes]]:
        def copy(answer: Any) -> IO[bytes]:
            copied = Verifying(blob, most)
            try:
                while part := answer.read(1 << 20):
                    copied.write(part)
                return copied.finish()
            except BaseException as error:
                copied.file.close()
                if isinstance(error, SandboxFailure) and error.cause == FailureCause.REGISTRY:
                    raise _Failed(error.cause, str(error)) from error
                raise

        file = self._request(f"{self._address}/blobs/{blob.digest}", copy)
        with file:
            yield file

    def _request(self, url: str, read: Any, accepted: str = "*/*") -> Any:
        """Return ``read(answer)``, tried again with growing pauses where the failure may pass. Raises SandboxFailure."""
        for number in range(TRIES):
            try:
                return self._try(url, read, accepted)
            except _Failed as error:
                if number == TRIES - 1:
                    raise SandboxFailure(
                        error.cause, f"the registry {self.host} failed {TRIES} times, the last: {error}"
                    ) from error
                time.sleep(min(30.0, max(error.after_s, 0.2 * 4**number)))
        raise AssertionError

    def _try(self, url: str, read: Any, accepted: str) -> Any:
        try:
            try:
                return self._open(url, read, accepted)
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                self._token = self._fetch_token(error.headers.get("WWW-Authenticate", ""))
            return self._open(url, read, accepted)
        except urllib.error.HTTPError as error:
            if error.code == 429:
                raise _Failed(
                    FailureCause.THROTTLED, "429 Too Many Requests", _seconds(error.headers.get("Retry-After"))
                ) from error
            if error.code >= 500:
                raise _Failed(FailureCause.REGISTRY, f"{error.code} {error.reason}") from error
            if error.code in (401, 403):
                raise broken(
                    f"the registry {self.host} refuses access to {self.name}; log in by docker login, or set DOCKER_CONFIG"
                ) from error
            raise broken(f"the registry {self.host} has no {self.name} at {self.wanted}: {error.code} {error.reason}") from error
        except (OSError, EOFError) as error:  # URLError, a broken connection or certificate
            raise _Failed(FailureCause.REGISTRY, str(getattr(error, "reason", error))) from error

    def _open(self, url: str, read: Any, accepted: str) -> Any:
        request = urllib.request.Request(url, headers={"Accept": accepted})
        if self._token:
            request.add_unredirected_header("Authorization", self._token)  # blobs are often redirected to other hosts
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return read(answer)

    def _fetch_token(self, challenge: str) -> str:
        """Answer a challenge: with the stored login itself, or with a token that it gets."""
        kind, _, rest = challenge.partition(" ")
        login = self._find_login()
        if kind.lower() == "basic" and login:
            return f"Basic {login}"
        values = dict(_CHALLENGE.findall(rest))
        realm = values.get("realm", "")
        if kind.lower() != "bearer" or not realm.startswith(("https://", f"{self._address.partition('/v2/')[0]}/")):
            raise broken(f"the registry {self.host} asks for a login that is not known: {challenge!r:.200}")
        query = {"service": values.get("service", ""), "scope": values.get("scope") or f"repository:{self.name}:pull"}
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(query)}")
        if login:
            request.add_unredirected_header("Authorization", f"Basic {login}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = read_json(answer.read(MAX_JSON), "token")
        return f"Bearer {found.get('token') or found.get('access_token') or ''}"

    def _find_login(self) -> str:
        """Return the login that ``docker login`` has stored for the registry, base64; "" if there is none."""
        folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads((folder / "config.json").read_text()).get("auths", {}).get(self.host, {})
            if found.get("username"):
                return base64.b64encode(f"{found['username']}:{found.get('password', '')}".encode()).decode()
            return str(found.get("auth", ""))
        return ""


def _seconds(text: str | None) -> float:
    with suppress(TypeError, ValueError):
        return max(0.0, float(text or 0))
    return 0.0
